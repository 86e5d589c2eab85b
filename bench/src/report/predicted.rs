//! Prediction against measurement.

use super::markdown::table;
use super::rows::{Row, rows};
use crate::plan;
use crate::record::Recorded;
use crate::statistics::figure;

/// One line for each size that was predicted and measured with all its seats taken; nothing where there is none.
#[must_use]
pub fn beside(recorded: &Recorded) -> String {
    let Some(plan) = &recorded.plan else {
        return String::new();
    };
    let all = rows(&recorded.cells);
    let line = |row: &Row| {
        let (instances, slots) = row.places();
        if row.cell.cold || row.concurrency()? < instances.saturating_mul(slots) {
            return None;
        }
        let measured = row.rate()?;
        let predicted = plan::of(plan, instances, slots)?;
        let or_dash = |value: Option<f64>| value.map_or_else(|| "-".into(), figure);
        Some(vec![
            format!("{instances}×{slots}"),
            or_dash(predicted.tokens_per_s),
            figure(measured),
            or_dash(predicted.tokens_per_s.map(|rate| measured / rate)),
            or_dash(predicted.ceiling_tokens_per_s),
            or_dash(predicted.memory_bytes.map(|bytes| bytes / 1e9)),
            row.footprint_bytes().map_or_else(
                || "-".into(),
                |bytes| {
                    #[expect(clippy::cast_precision_loss, reason = "far below 2^52 bytes")]
                    let gb = bytes as f64 / 1e9;
                    figure(gb)
                },
            ),
        ])
    };
    let lines: Vec<Vec<String>> = all.iter().filter_map(line).collect();
    if lines.is_empty() {
        return String::new();
    }
    let columns = [
        "K×slots",
        "predicted tok/s",
        "measured tok/s",
        "measured / predicted",
        "bus ceiling tok/s",
        "predicted GB",
        "footprint GB",
    ];
    let basis = match plan["estimates"].as_str() {
        Some("measured") => "from step times of this model on this machine",
        _ => "from guessed step times",
    };
    format!(
        "\nPrediction (`dispatcher plan`, {basis}) against measurement, where all seats were taken:\n\n{}",
        table(&columns, &lines)
    )
}

#[cfg(test)]
mod tests {
    use super::super::rows::made;
    use super::*;

    #[test]
    fn only_sizes_with_all_seats_taken_are_held_against_the_plan() {
        let cells = vec![
            made::cell("a", Some((1, 8)), 16, 0, 120.0),
            made::cell("a", Some((3, 8)), 16, 0, 130.0),
        ];
        let mut recorded = crate::record::made(cells);
        assert_eq!(beside(&recorded), "");
        recorded.plan = Some(serde_json::json!({"estimates": "measured", "cells": [
            {"instances": 1, "slots": 8, "estimate_tokens_per_s": 150.0, "memory_bytes": 2_000_000_000_u64},
            {"instances": 3, "slots": 8, "estimate_tokens_per_s": 150.0, "memory_bytes": 6_000_000_000_u64},
        ]}));
        let text = beside(&recorded);
        assert!(
            text.contains("| 1×8 | 150.0 | 120.0 | 0.800 | - | 2.000 | - |"),
            "{text}"
        );
        assert!(!text.contains("3×8"), "{text}");
    }
}

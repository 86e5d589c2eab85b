//! The plan as text for people and as JSON for programs.

use std::fmt::Write as _;

use serde_json::json;

use super::predict::Cell;
use super::prepare::{Bandwidth, Prepared};
use super::recommend::Recommendation;
use crate::memory::Size;

/// For people.
#[must_use]
pub(super) fn text(
    prepared: &Prepared,
    cells: &[Cell],
    recommendation: Option<&Recommendation>,
) -> String {
    let mut out = head(prepared);
    let has_estimate = prepared.question.curve.is_some();
    out.push_str(
        "\n  K  slots  streams  ceiling  estimate  a stream     TTFT     memory  lost by a crash\n\
         \x20                      tok/s     tok/s     tok/s       ms\n",
    );
    for cell in cells {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "{:>3}  {:>5}  {:>7}  {:>7}  {:>8}  {:>8}  {:>7}  {:>9}  {:>15}{}",
            cell.instances,
            cell.slots,
            cell.streams,
            rate(cell.ceiling_tokens_per_s),
            rate(cell.estimate_tokens_per_s),
            rate(cell.stream_tokens_per_s),
            rate(cell.ttft_ms),
            Size(cell.memory_bytes).to_string(),
            cell.blast_radius,
            if cell.fits { "" } else { "  does not fit" },
        );
    }
    out.push('\n');
    match recommendation {
        Some(found) => {
            let _ = writeln!(out, "run {}: {}", found.flags(), found.why);
        }
        None => out.push_str("nothing is recommended: no cell both fits and has a figure\n"),
    }
    if !has_estimate {
        out.push_str("no estimates: time this model's steps with `dispatcher plan --measure`\n");
    }
    for note in &prepared.notes {
        let _ = writeln!(out, "note: {note}");
    }
    out
}

fn head(prepared: &Prepared) -> String {
    let model = &prepared.model;
    let question = &prepared.question;
    let weights = &model.weights;
    let mut out = format!(
        "{} ({}): a step reads {} of weights",
        model.name,
        model.engine,
        Size(whole(weights.bytes_per_step(1.0)))
    );
    if weights.experts > 0 {
        let _ = write!(
            out,
            " ({} of {} experts; {} with 16 rows)",
            weights.experts_used,
            weights.experts,
            Size(whole(weights.bytes_per_step(16.0)))
        );
    }
    let _ = writeln!(
        out,
        ", and {} for each cached token of a row",
        Size(model.kv_bytes_per_token)
    );
    let memories = match question.buses.count {
        1 => String::new(),
        count => format!("each of {count} devices: "),
    };
    let bandwidth = match &prepared.bandwidth {
        Bandwidth::Measured {
            best_gb_per_s,
            median_gb_per_s,
            passes,
        } => format!(
            "memory reads {best_gb_per_s:.1} GB/s (measured: best of {passes}; median {median_gb_per_s:.1})"
        ),
        Bandwidth::DataSheet { name, gb_per_s } => {
            format!("memory reads {gb_per_s:.0} GB/s ({name}'s data sheet; not measured)")
        }
        Bandwidth::Given { gb_per_s } => format!("memory reads {gb_per_s} GB/s (as given)"),
        Bandwidth::Unknown => "memory bandwidth: unknown".to_owned(),
    };
    let _ = writeln!(out, "{memories}{bandwidth}");
    if prepared.cache_resident {
        out.push_str(
            "cache-resident: the weights fit into the last-level cache, so memory sets no ceiling\n",
        );
    }
    let _ = writeln!(
        out,
        "requests of {} prompt and {} output tokens; {} tokens of context a slot; {} usable",
        question.workload.prompt_tokens,
        question.workload.output_tokens,
        question.memory.context_tokens,
        prepared.usable()
    );
    match (&prepared.calibration, &question.curve) {
        (Some(known), _) => {
            let _ = writeln!(
                out,
                "estimates: from steps timed on this machine ({}, batches {})",
                known.origin,
                known
                    .curve
                    .points()
                    .iter()
                    .map(|(batch, _)| batch.to_string())
                    .collect::<Vec<_>>()
                    .join(" ")
            );
        }
        (None, Some(_)) => out.push_str(
            "estimates: guesses, no step of this model was timed here (`--measure` does, in under a minute)\n",
        ),
        (None, None) => {}
    }
    out
}

/// For programs.
#[must_use]
pub(super) fn json(
    prepared: &Prepared,
    cells: &[Cell],
    recommendation: Option<&Recommendation>,
) -> String {
    let question = &prepared.question;
    let value = json!({
        "model": prepared.model.name,
        "engine": prepared.model.engine.as_str(),
        "weights": question.weights,
        "kv_bytes_per_token": question.kv_bytes_per_token,
        "processor": prepared.processor,
        "bandwidth": prepared.bandwidth,
        "devices": question.buses.count,
        "cache_resident": prepared.cache_resident,
        "workload": question.workload,
        "context_tokens": question.memory.context_tokens,
        "usable_bytes": question.memory.usable,
        "estimates": match (&prepared.calibration, &question.curve) {
            (Some(_), _) => "measured",
            (None, Some(_)) => "assumed",
            (None, None) => "none",
        },
        "calibration": prepared.calibration,
        "cells": cells,
        "recommendation": recommendation,
        "notes": prepared.notes,
    });
    let mut text = serde_json::to_string_pretty(&value).unwrap_or_default();
    text.push('\n');
    text
}

fn rate(value: Option<f64>) -> String {
    value.map_or_else(
        || "-".to_owned(),
        |value| {
            if value < 100.0 {
                format!("{value:.1}")
            } else {
                format!("{value:.0}")
            }
        },
    )
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "bytes of a model are positive and far below 2^63"
)]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

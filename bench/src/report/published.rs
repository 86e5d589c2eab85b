//! What the study published (M4 Pro, 24 GB; Qwen2.5-7B-Instruct 4-bit; 256 tokens), to stand beside what was measured.

use super::markdown::table;

const WHERE: &str = "The study's own (M4 Pro, 24 GB, 273 GB/s; Qwen2.5-7B-Instruct 4-bit), another machine and another model: compare the shape, not the figures.\n\n";

/// The study's table to `verb`, where it has one.
#[must_use]
pub fn beside(verb: &str) -> Option<String> {
    let text = match verb {
        "single" => single(),
        "sweep" => sweep(),
        "scale" => scale(),
        _ => return None,
    };
    Some(format!("\n{WHERE}{text}"))
}

fn owned<const N: usize>(rows: &[[&str; N]]) -> Vec<Vec<String>> {
    let line = |row: &[&str; N]| row.iter().map(|&word| word.to_owned()).collect();
    rows.iter().map(line).collect()
}

fn single() -> String {
    table(
        &[
            "engine",
            "TTFT p50 ms",
            "TTFT p99 ms",
            "TPOT p50 ms",
            "tok/s",
            "RSS GB",
        ],
        &owned(&[
            [
                "mlx-lm (cold; warm about 56 tok/s)",
                "228",
                "332",
                "26.1",
                "37.1",
                "4.42",
            ],
            ["llama.cpp", "100", "174", "21.7", "45.3", "4.76"],
        ]),
    )
}

fn sweep() -> String {
    table(
        &["engine", "slots", "concurrency 1, 4, 8, 16, 32"],
        &owned(&[
            ["mlx-lm", "1", "flat within ±4 % of 56 tok/s"],
            ["llama.cpp", "1", "flat within ±4 % of 45 tok/s"],
        ]),
    )
}

fn scale() -> String {
    table(
        &[
            "engine",
            "K×slots",
            "aggregate tok/s",
            "×K=1",
            "TPOT p50 ms",
            "tok/s per request",
            "engine TTFT p50 ms",
            "queue-incl. TTFT p50 ms",
            "RSS sum GB",
        ],
        &owned(&[
            [
                "llama.cpp",
                "1×1",
                "45.3",
                "1.00",
                "21.7",
                "45.4",
                "99",
                "-",
                "4.7",
            ],
            [
                "llama.cpp",
                "2×1",
                "47.8",
                "1.06",
                "41.1",
                "23.9",
                "132",
                "-",
                "9.5",
            ],
            [
                "llama.cpp",
                "3×1",
                "49.3",
                "1.09",
                "60.1",
                "16.5",
                "160",
                "-",
                "14.2",
            ],
            [
                "mlx-lm", "1×1", "55.6", "1.00", "17.4", "55.8", "163", "34400", "4.3",
            ],
            [
                "mlx-lm", "2×1", "60.2", "1.08", "32.4", "30.1", "236", "30100", "8.6",
            ],
            [
                "mlx-lm", "3×1", "60.7", "1.09", "48.1", "20.4", "312", "25500", "about 13",
            ],
        ]),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ratios_of_the_studys_table_are_those_of_its_rates() {
        let text = scale();
        let mut first = std::collections::BTreeMap::new();
        let mut rows = 0;
        for line in text.lines().skip(2) {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            let rate: f64 = cells[2].parse().unwrap();
            let ratio: f64 = cells[3].parse().unwrap();
            let base = *first.entry(cells[0].to_owned()).or_insert(rate);
            assert!((rate / base - ratio).abs() < 0.005, "{line}");
            rows += 1;
        }
        assert_eq!(rows, 6);
        assert!(beside("load").is_none() && beside("sweep").is_some());
    }
}

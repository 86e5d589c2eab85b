//! Memory bandwidth as makers state it, for processors whose own memory nothing here can measure. A label, never called measured.

/// Words of the name, the most telling first, and GB/s. The first row all of whose words occur wins.
/// Sources: Apple's and NVIDIA's product pages; of a chip sold with two memories, the faster one, so
/// that a ceiling made from it stays a ceiling.
const ROWS: [(&str, f64); 33] = [
    ("apple m1 ultra", 800.0),
    ("apple m1 max", 400.0),
    ("apple m1 pro", 200.0),
    ("apple m1", 68.25),
    ("apple m2 ultra", 800.0),
    ("apple m2 max", 400.0),
    ("apple m2 pro", 200.0),
    ("apple m2", 100.0),
    ("apple m3 ultra", 819.0),
    ("apple m3 max", 400.0),
    ("apple m3 pro", 150.0),
    ("apple m3", 100.0),
    ("apple m4 max", 546.0),
    ("apple m4 pro", 273.0),
    ("apple m4", 120.0),
    ("apple m5", 153.0),
    ("b200", 8000.0),
    ("h200", 4800.0),
    ("h100 nvl", 3900.0),
    ("h100 pcie", 2000.0),
    ("h100", 3350.0),
    ("a100 80gb", 2039.0),
    ("a100", 1555.0),
    ("l40s", 864.0),
    ("l4", 300.0),
    ("rtx 5090", 1792.0),
    ("rtx 5080", 960.0),
    ("rtx 4090", 1008.0),
    ("rtx 4080", 736.0),
    ("rtx 3090 ti", 1008.0),
    ("rtx 3090", 936.0),
    ("v100", 900.0),
    ("t4", 320.0),
];

/// GB (10⁹ bytes) per second that the maker states for the processor of this name.
#[must_use]
pub fn gb_per_s(name: &str) -> Option<f64> {
    let lower = name.to_ascii_lowercase();
    let said: Vec<&str> = lower
        .split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .collect();
    let row = ROWS
        .iter()
        .find(|(words, _)| words.split(' ').all(|word| said.contains(&word)))?;
    Some(row.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_known_by_its_whole_name() {
        assert_eq!(gb_per_s("Metal: Apple M4 Pro"), Some(273.0));
        assert_eq!(gb_per_s("Apple M4"), Some(120.0));
        assert_eq!(gb_per_s("CUDA0: NVIDIA H200"), Some(4800.0));
        assert_eq!(gb_per_s("NVIDIA H100 80GB HBM3"), Some(3350.0));
        assert_eq!(gb_per_s("NVIDIA L40S"), Some(864.0));
        assert_eq!(gb_per_s("NVIDIA A100-SXM4-80GB"), Some(2039.0));
        assert_eq!(gb_per_s("AMD EPYC 9554"), None);
        assert_eq!(gb_per_s(""), None);
    }
}

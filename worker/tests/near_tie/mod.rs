//! What counts as a near tie, by engine, processor and format: `near_tie.toml`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

type Table = BTreeMap<String, BTreeMap<String, f32>>;

static TABLE: LazyLock<Table> =
    LazyLock::new(|| toml::from_str(include_str!("../near_tie.toml")).expect("a table"));

/// The largest difference of two candidates' logits that an engine's own arithmetic may decide
/// either way. Unitless, as logits are. Where this processor's kernels were measured, theirs.
pub(crate) fn epsilon(engine: &str, format: &str) -> f32 {
    let of = |name: &str| TABLE.get(name)?.get(format).copied();
    measured_kernels()
        .and_then(|kernels| of(&format!("{engine}-{kernels}")))
        .or_else(|| of(engine))
        .unwrap_or_else(|| panic!("near_tie.toml says nothing of {engine} {format}"))
}

/// Which of the processors in the table this one is.
fn measured_kernels() -> Option<&'static str> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        return Some("avx512");
    }
    None
}

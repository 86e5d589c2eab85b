//! What counts as a near tie, by engine, processor and format: `near_tie.toml`.

use std::collections::BTreeMap;
use std::sync::LazyLock;

type Table = BTreeMap<String, BTreeMap<String, f32>>;

static TABLE: LazyLock<Table> =
    LazyLock::new(|| toml::from_str(include_str!("../near_tie.toml")).expect("a table"));

/// The largest difference of two candidates' logits that an engine's own arithmetic may decide
/// either way. Unitless, as logits are.
pub(crate) fn epsilon(engine: &str, format: &str) -> f32 {
    let formats = TABLE.get(engine);
    *formats
        .and_then(|formats| formats.get(format))
        .unwrap_or_else(|| panic!("near_tie.toml says nothing of {engine} {format}"))
}

/// The same for llama.cpp on this computer's processor.
#[cfg(feature = "llama")]
pub(crate) fn llama(format: &str) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        return epsilon("llama-avx512", format);
    }
    epsilon("llama", format)
}

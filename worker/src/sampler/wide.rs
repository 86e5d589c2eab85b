//! Runs a pass over a vocabulary with the widest registers that the machine has.
//!
//! The worker is compiled for every x86-64; most have AVX2, whose registers are twice as wide. The pass
//! is the same code, compiled a second time, so that the answers are the same.

/// Largest value and whether all are usable, as [`super::vector::scan`] gives them.
#[cfg(target_arch = "x86_64")]
pub(super) fn scan(values: &[f32]) -> (f32, bool) {
    #[target_feature(enable = "avx2")]
    fn with_avx2(values: &[f32]) -> (f32, bool) {
        super::vector::scan(values)
    }
    if !is_x86_feature_detected!("avx2") {
        return super::vector::scan(values);
    }
    #[expect(unsafe_code, reason = "the compiler can't know the machine")]
    // SAFETY: the machine has AVX2, as was just asked of it.
    unsafe {
        with_avx2(values)
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn scan(values: &[f32]) -> (f32, bool) {
    super::vector::scan(values)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_wide_pass_answers_as_the_plain_one(
            values in proptest::collection::vec(
                prop_oneof![
                    40 => (-99_i8..99).prop_map(f32::from),
                    1 => Just(f32::NEG_INFINITY),
                    1 => Just(f32::INFINITY),
                    1 => Just(f32::NAN),
                ],
                0..200,
            )
        ) {
            prop_assert_eq!(super::scan(&values), crate::sampler::vector::scan(&values));
        }
    }
}

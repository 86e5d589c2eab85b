//! What several instances on one device cost and risk, said once when the first is ready.

/// `None` where there is one instance, or where they compute on the processor.
pub(crate) fn remark(instances: usize, device: &str) -> Option<String> {
    if instances < 2 || device.contains("CPU") || device == "script" {
        return None;
    }
    Some(format!(
        "{instances} instances share {device}: each keeps weights and caches of its own there, and \
         their steps take turns, so that together they are seldom faster than one instance with more \
         slots; a fault of the device, or of its driver, can end all of them at once"
    ))
}

#[cfg(test)]
mod tests {
    use super::remark;

    #[test]
    fn only_instances_that_share_a_gpu_are_remarked_upon() {
        let told = remark(3, "MLX Metal").unwrap();
        assert!(told.starts_with("3 instances share MLX Metal"), "{told}");
        assert!(remark(2, "CUDA0: NVIDIA H200").is_some());
        assert_eq!(remark(1, "MLX Metal"), None);
        for device in ["CPU (2 threads)", "MLX CPU (float32)", "script"] {
            assert_eq!(remark(3, device), None);
        }
    }
}

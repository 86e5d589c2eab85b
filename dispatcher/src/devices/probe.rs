//! Asks the machine for its GPUs.

use super::Device;
use crate::bus::machine::{self, Machine};

/// Devices that the scripted engine is given to share out; it computes on none.
pub const PRETENDED: u32 = 8;

/// The GPUs of this machine: NVIDIA's, as their driver's tool lists them, or a Mac's own.
#[must_use]
pub fn probe() -> Vec<Device> {
    if cfg!(target_os = "macos") {
        return metal(&Machine::probe());
    }
    let query = [
        "--query-gpu=index,uuid,memory.total,name",
        "--format=csv,noheader,nounits",
    ];
    parse(&machine::tell("nvidia-smi", &query).unwrap_or_default())
}

/// A Mac has one, and its memory is the machine's.
fn metal(machine: &Machine) -> Vec<Device> {
    vec![Device {
        index: 0,
        name: machine.chip.clone(),
        memory_bytes: machine.memory_bytes,
        environment: Vec::new(),
    }]
}

/// `0, GPU-5a…, 143771, NVIDIA H200`, the memory in MiB. Lines of another form are left out.
fn parse(text: &str) -> Vec<Device> {
    text.lines().filter_map(device).collect()
}

fn device(line: &str) -> Option<Device> {
    let mut fields = line.splitn(4, ',').map(str::trim);
    let (index, uuid) = (fields.next()?, fields.next()?);
    let mib: u64 = fields.next()?.parse().ok()?;
    let name = fields.next().filter(|name| !name.is_empty())?;
    if !uuid.starts_with("GPU-") {
        return None;
    }
    Some(Device {
        index: index.parse().ok()?,
        name: name.to_owned(),
        memory_bytes: mib.checked_mul(1 << 20)?,
        // By its identity: CUDA may number devices otherwise than the driver's tool.
        environment: vec![("CUDA_VISIBLE_DEVICES", uuid.to_owned())],
    })
}

/// Devices for the scripted engine, so that sharing out can be tried on a machine without any.
#[must_use]
pub fn pretended() -> Vec<Device> {
    let one = |index| Device {
        index,
        name: "pretended".to_owned(),
        memory_bytes: 1 << 30,
        environment: vec![("CUDA_VISIBLE_DEVICES", format!("GPU-pretended-{index}"))],
    };
    (0..PRETENDED).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_drivers_list_is_read_and_strange_lines_are_left_out() {
        let text = "0, GPU-aa-1, 143771, NVIDIA H200\n\
                    1, GPU-bb-2, 143771, NVIDIA H200, extra\n\
                    No devices were found\n\
                    2, GPU-cc-3, [N/A], NVIDIA H200\n\
                    3, MIG-dd-4, 1000, NVIDIA H200\n\
                    4, GPU-ee-5, 99999999999999999999, NVIDIA\n";
        let found = parse(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0].memory_bytes, 143_771 << 20);
        assert_eq!(found[0].to_string(), "0: NVIDIA H200");
        let visible = |device: &Device| device.environment[0].clone();
        assert_eq!(
            visible(&found[1]),
            ("CUDA_VISIBLE_DEVICES", "GPU-bb-2".to_owned())
        );
        assert_eq!(found[1].name, "NVIDIA H200, extra");
        assert!(parse("").is_empty());
    }

    #[test]
    fn a_mac_has_one_device_with_the_machines_memory() {
        let found = metal(&Machine {
            chip: "Apple M4 Pro".to_owned(),
            memory_bytes: 24 << 30,
            ..Machine::default()
        });
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].memory_bytes, 24 << 30);
        assert!(found[0].environment.is_empty());
    }
}

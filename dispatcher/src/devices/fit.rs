//! Does it fit on each device? Weights, KV cache and working memory of the instances that share it.

use serde::Serialize;

use super::{Device, instances_on};
use crate::memory::{DERIVED_SLOTS_MAX, DoesNotFit, Size};
use crate::model::gguf::Header;

/// A runtime's own memory on a device, in bytes: its context, its kernels and their scratch.
const RUNTIME_BYTES: u64 = 768 << 20;
/// Of a device's memory, what is left to others, in percent.
const HEADROOM_PERCENT: u64 = 5;

/// What one device has to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceShare {
    pub index: u32,
    pub instances: u32,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes that may be taken.
    pub usable: u64,
}

/// Slots an instance, so that each device holds its instances: as asked for, or as many as fit.
///
/// # Errors
/// Where they do not fit: the arithmetic of the fullest device, and what to change.
pub fn fit(
    devices: &[Device],
    header: &Header,
    instances: u32,
    slots: Option<u32>,
    context_tokens: u32,
) -> Result<(u32, Vec<DeviceShare>), DoesNotFit> {
    // Each instance has its own copy: processes do not share a device's memory.
    let fixed = header.tensor_bytes.saturating_add(RUNTIME_BYTES);
    let slot = header
        .kv_bytes_per_token
        .saturating_mul(u64::from(context_tokens));
    let shares = |slots: u32| -> Vec<DeviceShare> {
        let places = devices.iter().enumerate();
        places
            .map(|(place, device)| {
                let own = instances_on(devices.len(), place, instances);
                let each = slot.saturating_mul(slots.into()).saturating_add(fixed);
                DeviceShare {
                    index: device.index,
                    instances: own,
                    bytes: each.saturating_mul(own.into()),
                    usable: device.memory_bytes - device.memory_bytes / 100 * HEADROOM_PERCENT,
                }
            })
            .collect()
    };
    let fitting = shares(0)
        .iter()
        .map(|share| slots_that_fit(share, slot))
        .min();
    let fitting = fitting.unwrap_or(0);
    let wanted = slots.unwrap_or_else(|| fitting.clamp(1, DERIVED_SLOTS_MAX));
    let found = shares(wanted);
    let Some(fullest) = found.iter().find(|one| one.bytes > one.usable) else {
        return Ok((wanted, found));
    };
    let advice = if fitting >= 1 {
        format!("it fits with `--slots {fitting}`")
    } else {
        "name more devices, or run fewer instances or a smaller `--ctx-size`".to_owned()
    };
    Err(DoesNotFit {
        wanted: format!(
            "does not fit on device {}: {} of the usable {} = {} x (weights {} + working {} + {wanted} slots x \
             {context_tokens} tokens x {} B)",
            fullest.index,
            Size(fullest.bytes),
            Size(fullest.usable),
            fullest.instances,
            Size(header.tensor_bytes),
            Size(RUNTIME_BYTES),
            header.kv_bytes_per_token,
        ),
        advice,
    })
}

/// Slots of each instance that a device has room for beside what `empty` says of none.
fn slots_that_fit(empty: &DeviceShare, slot_bytes: u64) -> u32 {
    let left = empty.usable.saturating_sub(empty.bytes);
    if empty.bytes > empty.usable {
        return 0;
    }
    let each = slot_bytes.saturating_mul(empty.instances.into());
    left.checked_div(each)
        .map_or(u32::MAX, |slots| u32::try_from(slots).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn host(gib: &[u64]) -> Vec<Device> {
        (0..)
            .zip(gib)
            .map(|(index, gib)| Device {
                index,
                name: "GPU".to_owned(),
                memory_bytes: gib * GIB,
                environment: Vec::new(),
            })
            .collect()
    }

    /// A 7B model of 4 bits.
    fn header() -> Header {
        Header {
            tensor_bytes: 9 * GIB / 2,
            kv_bytes_per_token: 56 << 10,
            ..Header::default()
        }
    }

    #[test]
    fn each_device_holds_its_own_instances_and_no_others() {
        for count in [1, 2, 3, 8] {
            let devices = host(&vec![24; count]);
            let (slots, shares) = fit(&devices, &header(), 3, Some(4), 4096).unwrap();
            assert_eq!(slots, 4);
            let held: u32 = shares.iter().map(|share| share.instances).sum();
            assert_eq!(held, 3);
            let each = 9 * GIB / 2 + RUNTIME_BYTES + 4 * 4096 * (56 << 10);
            for share in shares {
                assert_eq!(share.bytes, each * u64::from(share.instances));
            }
        }
    }

    #[test]
    fn the_smallest_device_decides_how_many_slots_there_are() {
        let (wide, _) = fit(&host(&[80, 80]), &header(), 2, None, 4096).unwrap();
        let (narrow, shares) = fit(&host(&[80, 6]), &header(), 2, None, 4096).unwrap();
        assert_eq!(wide, DERIVED_SLOTS_MAX);
        assert!(narrow < wide, "{shares:?}");
        assert!(shares.iter().all(|one| one.bytes <= one.usable));
    }

    #[test]
    fn what_does_not_fit_names_the_device_and_the_change_that_helps() {
        let refused = fit(&host(&[80, 6]), &header(), 2, Some(64), 4096).unwrap_err();
        assert!(refused.wanted.contains("device 1"), "{refused}");
        let slots = refused.advice.split("--slots ").nth(1).unwrap();
        let slots: u32 = slots.trim_end_matches('`').parse().unwrap();
        assert!(fit(&host(&[80, 6]), &header(), 2, Some(slots), 4096).is_ok());
        let refused = fit(&host(&[8]), &header(), 3, None, 4096).unwrap_err();
        assert!(refused.advice.contains("more devices"), "{refused}");
        let absurd = Header {
            tensor_bytes: u64::MAX,
            kv_bytes_per_token: u64::MAX,
            ..Header::default()
        };
        assert!(fit(&host(&[8]), &absurd, u32::MAX, Some(u32::MAX), u32::MAX).is_err());
    }
}

//! The GPUs of this machine, and which instance is given which.
//!
//! A worker that was given a device sees that device and no other: the environment of that one
//! process says so. Engines then need no notion of several devices.

mod fit;
mod probe;

use std::fmt;

use serde::Serialize;

pub use fit::{DeviceShare, fit};
pub use probe::{PRETENDED, pretended, probe};

use crate::memory::Size;

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Its number, as the system's own tool lists it.
    pub index: u32,
    pub name: String,
    pub memory_bytes: u64,
    /// What makes a process see this device alone; empty where nothing is needed.
    #[serde(skip)]
    pub environment: Vec<(&'static str, String)>,
}

impl Device {
    pub(crate) fn environment(&self) -> &[(&'static str, String)] {
        &self.environment
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.index, self.name)
    }
}

/// The device of an instance: each in turn.
#[must_use]
pub fn assigned(devices: &[Device], instance: u32) -> Option<&Device> {
    let index = (instance as usize).checked_rem(devices.len())?;
    devices.get(index)
}

/// How many of `instances` the device in place `place` of `devices` gets.
#[must_use]
pub fn instances_on(devices: usize, place: usize, instances: u32) -> u32 {
    let all = instances as usize;
    let own = all / devices.max(1) + usize::from(place < all % devices.max(1));
    u32::try_from(own).unwrap_or(u32::MAX)
}

/// The devices that `list` names, such as `0,1`, in its order.
///
/// # Errors
/// Where it is no list of numbers, names one twice, or names one that is not in `there`: a fragment
/// that says which are.
pub fn choose(list: &str, there: &[Device]) -> Result<Vec<Device>, String> {
    let mut chosen: Vec<Device> = Vec::new();
    for word in list.split(',') {
        let word = word.trim();
        let index: u32 = word
            .parse()
            .map_err(|_| format!("must be numbers of devices, such as 0,1: `{word}` is none"))?;
        let Some(device) = there.iter().find(|device| device.index == index) else {
            return Err(missing(index, there));
        };
        if chosen.contains(device) {
            return Err(format!(
                "names device {index} twice; with more instances than devices each is used in turn"
            ));
        }
        chosen.push(device.clone());
    }
    Ok(chosen)
}

fn missing(index: u32, there: &[Device]) -> String {
    if there.is_empty() {
        return format!(
            "device {index} is not there: no GPU was found on this machine (nvidia-smi lists them); \
             leave `--devices` out"
        );
    }
    let list: Vec<String> = there
        .iter()
        .map(|device| format!("{device} ({})", Size(device.memory_bytes)))
        .collect();
    format!(
        "device {index} is not there; these are:\n  {}",
        list.join("\n  ")
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A host of so many equal GPUs, as a driver would list them.
    pub(crate) fn host(count: u32) -> Vec<Device> {
        let gpu = |index| Device {
            index,
            name: "NVIDIA H200".to_owned(),
            memory_bytes: 140 << 30,
            environment: vec![("CUDA_VISIBLE_DEVICES", format!("GPU-{index}"))],
        };
        (0..count).map(gpu).collect()
    }

    #[test]
    fn instances_take_devices_in_turn() {
        for count in [1, 2, 3, 8] {
            let devices = host(count);
            for instances in [1, 2, 3, 8, 17] {
                let of = |instance| assigned(&devices, instance).unwrap().index;
                let mut counts = vec![0; count as usize];
                for instance in 0..instances {
                    assert_eq!(of(instance), instance % count);
                    counts[of(instance) as usize] += 1;
                }
                for (place, counted) in counts.iter().enumerate() {
                    let said = instances_on(devices.len(), place, instances);
                    assert_eq!(said, *counted, "{count} devices, {instances} instances");
                }
            }
        }
        assert_eq!(assigned(&[], 3), None);
    }

    #[test]
    fn the_named_devices_are_taken_in_the_named_order() {
        let there = host(8);
        let indices = |list: &str| -> Vec<u32> {
            let chosen = choose(list, &there).unwrap();
            chosen.iter().map(|device| device.index).collect()
        };
        assert_eq!(indices("0"), [0]);
        assert_eq!(indices("3,1"), [3, 1]);
        assert_eq!(indices(" 7 , 0 "), [7, 0]);
    }

    #[test]
    fn a_device_that_is_not_there_is_refused_with_those_that_are() {
        let refusals: Vec<String> = [
            choose("1", &host(1)),
            choose("0,2", &host(2)),
            choose("3", &host(3)),
            choose("0", &[]),
            choose("0,0", &host(2)),
            choose("0;1", &host(2)),
            choose("", &host(2)),
            choose("-1", &host(8)),
        ]
        .into_iter()
        .map(Result::unwrap_err)
        .collect();
        insta::assert_snapshot!(refusals.join("\n"));
    }
}

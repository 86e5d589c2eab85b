//! Does it fit? The footprint of K instances against the limit of this machine, before anything starts.
//!
//! Mapped weights count once a file, however many processes map them. Everything else is private to
//! an instance: tensors that ggml copies into a layout of its own, the KV cache, and working memory.

pub mod footprint;
pub mod pressure;
pub mod reading;
pub(crate) mod reserve;
pub mod watch;

use std::fmt;

use thiserror::Error;

use crate::model::folder::Folder;
use crate::model::gguf::Header;

/// Slots that an instance gets at most when nobody said how many.
pub const DERIVED_SLOTS_MAX: u32 = 8;
/// Of the limit, what is left to the rest of the machine, in percent.
const HEADROOM_PERCENT: u64 = 10;
/// A worker's own code, buffers and allocator slack, in bytes (measured: 27 MB a process beside the
/// shared weights, and room for growth).
const PROCESS_BYTES: u64 = 64 << 20;
/// Buffers that MLX keeps for reuse: the bound that the engine sets.
const MLX_WORKING_BYTES: u64 = 512 << 20;
/// Rows of logits that llama.cpp reserves room for: its micro-batch.
const LOGIT_ROWS: u64 = 512;

/// What one model costs, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Mapped once a file and shared by all instances.
    pub mapped: u64,
    /// Private copies of tensors, once an instance; all of them where nothing is mapped.
    pub repacked: u64,
    /// KV cache of one token of one slot.
    pub kv_per_token: u64,
    /// Working memory of one instance.
    pub working: u64,
}

impl Costs {
    /// From a model's header, before the first start.
    ///
    /// `offloaded`: layers go to a device with memory of its own, so that neither copies nor KV cache
    /// are taken from the machine's; the file stays mapped.
    #[must_use]
    pub fn of_header(header: &Header, offloaded: bool) -> Self {
        let working = PROCESS_BYTES + LOGIT_ROWS * 4 * u64::from(header.vocabulary);
        if offloaded {
            return Self {
                mapped: header.file_bytes,
                working,
                ..Self::default()
            };
        }
        Self {
            // Pages of tensors that were copied are not read again and may be dropped, but nobody
            // promises it while the copy is made.
            mapped: header.file_bytes,
            repacked: header.repacked_bytes,
            kv_per_token: header.kv_bytes_per_token,
            working,
        }
    }

    /// From a model folder, before the first start. MLX reads weights into memory of its own, so that
    /// nothing is shared; `is_mac`: as they are stored. Elsewhere it computes in 32 bits, unpacked where
    /// that takes less than a quarter of `memory`. `None` where the folder says too little.
    #[must_use]
    pub fn of_folder(folder: &Folder, memory: Limit, is_mac: bool) -> Option<Self> {
        if folder.parameters == 0 {
            return None;
        }
        let whole = folder.parameters.saturating_mul(4);
        let number_bytes = if is_mac { 2 } else { 4 };
        let weights = if is_mac {
            folder.file_bytes
        } else if folder.packed && whole >= memory.bytes / 4 {
            // Scales and biases, up to a fifth of a packed matrix, become 32 bits wide.
            folder.file_bytes.saturating_add(folder.file_bytes / 5)
        } else {
            whole
        };
        Some(Self {
            mapped: 0,
            repacked: weights,
            kv_per_token: folder.kv_numbers_per_token.saturating_mul(number_bytes),
            working: PROCESS_BYTES + MLX_WORKING_BYTES,
        })
    }

    fn fixed_per_instance(&self) -> u64 {
        self.repacked.saturating_add(self.working)
    }

    fn per_slot(&self, context_tokens: u32) -> u64 {
        self.kv_per_token.saturating_mul(u64::from(context_tokens))
    }
}

/// How much is there, and who says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub bytes: u64,
    pub origin: LimitOrigin,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitOrigin {
    Machine,
    Cgroup,
    /// `--memory-limit`.
    Setting,
}

impl Limit {
    /// The smaller of the machine's memory and its cgroup's, where it has one.
    #[must_use]
    pub fn smaller(machine_bytes: u64, cgroup_bytes: Option<u64>) -> Self {
        match cgroup_bytes {
            Some(bytes) if bytes < machine_bytes => Self {
                bytes,
                origin: LimitOrigin::Cgroup,
            },
            _ => Self {
                bytes: machine_bytes,
                origin: LimitOrigin::Machine,
            },
        }
    }

    /// What instances may take. A limit that the user set is taken at its word.
    #[must_use]
    pub fn usable(&self) -> u64 {
        match self.origin {
            LimitOrigin::Setting => self.bytes,
            LimitOrigin::Machine | LimitOrigin::Cgroup => {
                self.bytes - self.bytes / 100 * HEADROOM_PERCENT
            }
        }
    }
}

/// A fitting configuration: reserve first, allocate after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    pub costs: Costs,
    pub limit: Limit,
    pub instances: u32,
    pub slots: u32,
    pub context_tokens: u32,
    pub slots_derived: bool,
}

/// It does not fit.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{wanted}\n{advice}")]
pub struct DoesNotFit {
    /// The arithmetic.
    pub wanted: String,
    /// What to change.
    pub advice: String,
}

/// Checks `slots` an instance, or derives how many fit.
///
/// # Errors
/// Where it does not fit, with the arithmetic and the flag to change.
pub fn plan(
    costs: Costs,
    limit: Limit,
    instances: u32,
    slots: Option<u32>,
    context_tokens: u32,
) -> Result<Plan, DoesNotFit> {
    let mut plan = Plan {
        costs,
        limit,
        instances,
        slots: slots.unwrap_or(1),
        context_tokens,
        slots_derived: slots.is_none(),
    };
    if slots.is_none() {
        plan.slots = plan.slots_that_fit().clamp(1, DERIVED_SLOTS_MAX);
    }
    if plan.footprint() <= limit.usable() {
        return Ok(plan);
    }
    Err(DoesNotFit {
        wanted: plan.to_string(),
        advice: plan.advice(),
    })
}

impl Plan {
    /// Private bytes of one instance.
    #[must_use]
    pub fn private_per_instance(&self) -> u64 {
        let kv = self
            .costs
            .per_slot(self.context_tokens)
            .saturating_mul(u64::from(self.slots));
        self.costs.fixed_per_instance().saturating_add(kv)
    }

    /// Bytes of all instances together.
    #[must_use]
    pub fn footprint(&self) -> u64 {
        self.private_per_instance()
            .saturating_mul(u64::from(self.instances))
            .saturating_add(self.costs.mapped)
    }

    /// Whether one more instance would fit beside these, for a replacement that starts before its
    /// predecessor stops.
    #[must_use]
    pub fn has_room_for_one_more(&self) -> bool {
        let more = Self {
            instances: self.instances.saturating_add(1),
            ..*self
        };
        more.footprint() <= self.limit.usable()
    }

    fn slots_that_fit(&self) -> u32 {
        let fixed = self
            .costs
            .fixed_per_instance()
            .saturating_mul(u64::from(self.instances))
            .saturating_add(self.costs.mapped);
        let left = self.limit.usable().saturating_sub(fixed);
        let each = self
            .costs
            .per_slot(self.context_tokens)
            .saturating_mul(u64::from(self.instances));
        match left.checked_div(each) {
            Some(fit) => u32::try_from(fit).unwrap_or(u32::MAX),
            // No cost per slot is known: memory bounds nothing.
            None => u32::MAX,
        }
    }

    /// The nearest change of one flag that makes it fit; of several, the first that helps.
    fn advice(&self) -> String {
        let fits = |change: Self| change.footprint() <= self.limit.usable();
        let slots = self.slots_that_fit();
        if slots >= 1 {
            return format!("it fits with `--slots {slots}`");
        }
        let smallest = Self { slots: 1, ..*self };
        let halved = [2048, 1024, 512]
            .into_iter()
            .filter(|context| *context < self.context_tokens)
            .find(|context| {
                fits(Self {
                    context_tokens: *context,
                    ..smallest
                })
            });
        if let Some(context) = halved {
            return format!("it fits with `--slots 1 --ctx-size {context}`");
        }
        let room = self.limit.usable().saturating_sub(self.costs.mapped);
        let fewer = room
            .checked_div(smallest.private_per_instance())
            .and_then(|instances| u32::try_from(instances).ok())
            .filter(|instances| (1..self.instances).contains(instances));
        if let Some(instances) = fewer {
            return format!("it fits with `--instances {instances} --slots 1`");
        }
        "no choice of instances, slots and context makes it fit: use a smaller model, or say with \
         `--memory-limit` how much may be taken"
            .to_owned()
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let costs = &self.costs;
        let slot = costs.per_slot(self.context_tokens);
        let verdict = if self.footprint() <= self.limit.usable() {
            "fits"
        } else {
            "does not fit"
        };
        let origin = match self.limit.origin {
            LimitOrigin::Machine => format!("this machine's {}", Size(self.limit.bytes)),
            LimitOrigin::Cgroup => format!("its cgroup's memory.max of {}", Size(self.limit.bytes)),
            LimitOrigin::Setting => "--memory-limit".to_owned(),
        };
        write!(
            f,
            "{verdict}: {} of the usable {} ({origin}) = ",
            Size(self.footprint()),
            Size(self.limit.usable()),
        )?;
        if costs.mapped > 0 {
            write!(f, "weights {} once + ", Size(costs.mapped))?;
        }
        write!(f, "{} x ({} working", self.instances, Size(costs.working))?;
        match (costs.mapped, costs.repacked) {
            (_, 0) => {}
            (0, own) => write!(f, " + {} weights", Size(own))?,
            (_, copied) => write!(f, " + {} repacked weights", Size(copied))?,
        }
        write!(
            f,
            " + {} slots x {} tokens x {} B = {} KV)",
            self.slots,
            self.context_tokens,
            costs.kv_per_token,
            Size(slot.saturating_mul(u64::from(self.slots)))
        )
    }
}

/// Bytes for people, in binary units.
#[derive(Clone, Copy, Debug)]
pub struct Size(pub u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = |unit: u64| (self.0 / unit, self.0 % unit * 10 / unit);
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{} KiB", self.0 >> 10),
            1_048_576..1_073_741_824 => write!(f, "{} MiB", self.0 >> 20),
            _ => {
                let (whole, tenth) = tenths(1 << 30);
                write!(f, "{whole}.{tenth} GiB")
            }
        }
    }
}

/// Asks the machine, and the cgroup where there is one.
#[must_use]
pub fn probe() -> Limit {
    let refresh = sysinfo::RefreshKind::nothing()
        .with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
    let machine =
        sysinfo::System::new_with_specifics(refresh).map_or(0, |system| system.total_memory());
    // A machine that will not say how much it has is not held to anything.
    let machine = if machine == 0 { u64::MAX } else { machine };
    Limit::smaller(machine, cgroup_limit())
}

#[cfg(target_os = "linux")]
fn cgroup_limit() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = cgroup_path(&own)?;
    smallest_memory_max(std::path::Path::new("/sys/fs/cgroup"), path)
}

#[cfg(not(target_os = "linux"))]
fn cgroup_limit() -> Option<u64> {
    None
}

/// The cgroup v2 path in `/proc/self/cgroup`: the line `0::/path`.
#[cfg(any(target_os = "linux", test))]
fn cgroup_path(own: &str) -> Option<&str> {
    own.lines()
        .find_map(|line| line.strip_prefix("0::"))
        .map(|path| path.trim_start_matches('/'))
}

/// The smallest `memory.max` from `root`/`path` up to `root`: every ancestor's bound holds.
#[cfg(any(target_os = "linux", test))]
fn smallest_memory_max(root: &std::path::Path, path: &str) -> Option<u64> {
    let leaf = root.join(path);
    leaf.ancestors()
        .take_while(|directory| directory.starts_with(root))
        .filter_map(|directory| std::fs::read_to_string(directory.join("memory.max")).ok())
        // `max` is no number, and no bound.
        .filter_map(|text| text.trim().parse().ok())
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(bytes: u64) -> Limit {
        Limit::smaller(bytes, None)
    }

    /// A 7B model of 4 bits: 4.5 GiB of weights, 56 KiB of KV cache a token.
    fn seven_b() -> Costs {
        Costs {
            mapped: 9 * GIB / 2,
            repacked: 0,
            kv_per_token: 56 << 10,
            working: 400 << 20,
        }
    }

    #[test]
    fn shared_weights_count_once_and_private_memory_for_each_instance() {
        let one = plan(seven_b(), machine(24 * GIB), 1, Some(4), 4096).unwrap();
        let three = plan(seven_b(), machine(24 * GIB), 3, Some(4), 4096).unwrap();
        assert_eq!(
            three.footprint() - one.footprint(),
            2 * one.private_per_instance()
        );
        assert_eq!(
            one.private_per_instance(),
            (400 << 20) + 4 * 4096 * (56 << 10)
        );
    }

    #[test]
    fn slots_are_derived_from_what_is_left_and_never_exceed_the_cap() {
        let plan_for = |gib| plan(seven_b(), machine(gib * GIB), 1, None, 4096);
        assert_eq!(plan_for(64).unwrap().slots, DERIVED_SLOTS_MAX);
        let tight = plan_for(6).unwrap();
        assert!(tight.slots < DERIVED_SLOTS_MAX, "{tight}");
        assert!(tight.slots >= 1);
        assert!(tight.footprint() <= tight.limit.usable());
        let one_more = Plan {
            slots: tight.slots + 1,
            ..tight
        };
        assert!(one_more.footprint() > tight.limit.usable());
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_arithmetic_and_the_flag_to_change() {
        let refused = plan(seven_b(), machine(6 * GIB), 1, Some(64), 4096).unwrap_err();
        assert!(refused.wanted.starts_with("does not fit: "), "{refused}");
        assert!(refused.advice.contains("`--slots "), "{refused}");
        let refused = plan(seven_b(), machine(6 * GIB), 3, None, 4096).unwrap_err();
        assert!(refused.advice.contains("--instances "), "{refused}");
        let refused = plan(seven_b(), machine(3 * GIB), 1, None, 4096).unwrap_err();
        assert!(refused.advice.contains("--memory-limit"), "{refused}");
    }

    #[test]
    fn the_advice_when_followed_fits() {
        for gib in 1..16 {
            let Err(refused) = plan(seven_b(), machine(gib * GIB), 4, Some(32), 8192) else {
                continue;
            };
            let flag = |name: &str, otherwise: u32| {
                let mut words = refused.advice.split([' ', '`']);
                match words.find(|word| *word == name) {
                    Some(_) => words.next().unwrap().parse().unwrap(),
                    None => otherwise,
                }
            };
            if refused.advice.starts_with("no choice") {
                continue;
            }
            let followed = plan(
                seven_b(),
                machine(gib * GIB),
                flag("--instances", 4),
                Some(flag("--slots", 32)),
                flag("--ctx-size", 8192),
            );
            assert!(followed.is_ok(), "{gib} GiB: {refused}");
        }
    }

    #[test]
    fn a_limit_the_user_set_is_taken_at_its_word() {
        let limit = Limit {
            bytes: GIB,
            origin: LimitOrigin::Setting,
        };
        assert_eq!(limit.usable(), GIB);
        assert!(machine(GIB).usable() < GIB);
    }

    #[test]
    fn offloaded_layers_take_no_private_memory_of_the_machine() {
        let header = Header {
            file_bytes: GIB,
            repacked_bytes: GIB,
            kv_bytes_per_token: 1000,
            ..Header::default()
        };
        let costs = Costs::of_header(&header, true);
        assert_eq!((costs.repacked, costs.kv_per_token), (0, 0));
        assert_eq!(Costs::of_header(&header, false).repacked, GIB);
    }

    #[test]
    fn each_mlx_instance_has_weights_of_its_own_in_the_form_that_its_device_computes_with() {
        let folder = Folder {
            context_length: None,
            parameters: GIB,
            packed: true,
            file_bytes: GIB / 2,
            kv_numbers_per_token: 1000,
        };
        let weights = |gib, is_mac| {
            let costs = Costs::of_folder(&folder, machine(gib * GIB), is_mac).unwrap();
            (costs.repacked, costs.kv_per_token)
        };
        assert_eq!(weights(32, false), (4 * GIB, 4000), "unpacked");
        assert_eq!(weights(16, false), (GIB / 2 + GIB / 10, 4000), "packed");
        assert_eq!(weights(16, true), (GIB / 2, 2000), "as stored");
        let costs = Costs::of_folder(&folder, machine(16 * GIB), true).unwrap();
        let three = plan(costs, machine(16 * GIB), 3, Some(1), 16).unwrap();
        assert_eq!(three.footprint(), 3 * three.private_per_instance());
        let told = three.to_string();
        assert!(
            told.contains("3 x (576 MiB working + 512 MiB weights + 1 slots"),
            "{told}"
        );
        assert_eq!(
            Costs::of_folder(&Folder::default(), machine(GIB), true),
            None
        );
    }

    #[test]
    fn absurd_figures_are_refused_and_do_not_overflow() {
        let costs = Costs {
            mapped: u64::MAX,
            repacked: u64::MAX,
            kv_per_token: u64::MAX,
            working: u64::MAX,
        };
        assert!(plan(costs, machine(GIB), u32::MAX, Some(u32::MAX), u32::MAX).is_err());
        assert!(plan(costs, machine(GIB), u32::MAX, None, u32::MAX).is_err());
    }

    #[test]
    fn the_smallest_bound_of_all_ancestors_holds() {
        let root = tempfile::tempdir().unwrap();
        let leaf = root.path().join("a/b");
        std::fs::create_dir_all(&leaf).unwrap();
        std::fs::write(leaf.join("memory.max"), "max\n").unwrap();
        std::fs::write(root.path().join("a/memory.max"), "4096\n").unwrap();
        std::fs::write(root.path().join("memory.max"), "8192\n").unwrap();
        assert_eq!(smallest_memory_max(root.path(), "a/b"), Some(4096));
        assert_eq!(smallest_memory_max(root.path(), ""), Some(8192));
        assert_eq!(cgroup_path("1:x:/y\n0::/a/b\n"), Some("a/b"));
    }
}

use std::fs;

use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::devices::tests::host as gpus;

/// A worker program that has these engines, and that is never asked for more than their names.
fn write_worker(path: &Path, engines: &str) {
    fs::write(path, format!("#!/bin/sh\nprintf '{engines}'\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A machine of 2 cores and 8 GiB, with a worker program and an empty models directory.
struct Machine {
    _directory: tempfile::TempDir,
    models: PathBuf,
    around: Surroundings,
}

fn machine() -> Machine {
    let directory = tempfile::tempdir().unwrap();
    let models = directory.path().join("models");
    fs::create_dir(&models).unwrap();
    let worker = directory.path().join("dispatcher-worker");
    write_worker(&worker, "llama\\nscripted\\n");
    let around = Surroundings {
        environment: [(
            "DISPATCHER_MODELS_DIR".to_owned(),
            models.to_string_lossy().into_owned(),
        )]
        .into(),
        cores: 2,
        memory: Limit::smaller(8 << 30, None),
        executable: directory.path().join("dispatcher"),
        current_directory: directory.path().to_path_buf(),
        is_mac: false,
        user: 1,
        process: 2,
        devices: Vec::new,
    };
    Machine {
        _directory: directory,
        models,
        around,
    }
}

fn text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// A header without tensors: 2,048 tokens of context, 1,024 bytes of KV cache a token.
fn model() -> Vec<u8> {
    let numbers = [
        ("m.block_count", 4_u32),
        ("m.context_length", 2048),
        ("m.attention.head_count_kv", 1),
        ("m.attention.key_length", 64),
        ("m.attention.value_length", 64),
    ];
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3_u32.to_le_bytes());
    bytes.extend(0_u64.to_le_bytes());
    bytes.extend((1 + numbers.len() as u64).to_le_bytes());
    text(&mut bytes, "general.architecture");
    bytes.extend(8_u32.to_le_bytes());
    text(&mut bytes, "m");
    for (key, number) in numbers {
        text(&mut bytes, key);
        bytes.extend(4_u32.to_le_bytes());
        bytes.extend(number.to_le_bytes());
    }
    bytes.resize(bytes.len().next_multiple_of(32), 0);
    bytes
}

impl Machine {
    fn with_model(self) -> Self {
        fs::write(self.models.join("tiny.gguf"), model()).unwrap();
        self
    }

    fn resolve(&self, words: &[&str]) -> Result<Config, ConfigError> {
        use clap::Parser as _;
        let words = ["dispatcher"].iter().chain(words);
        let args = crate::cli::Args::try_parse_from(words).unwrap();
        Config::resolve(&args.settings, &self.around)
    }

    fn refusal(&self, words: &[&str]) -> String {
        match self.resolve(words) {
            Ok(config) => panic!("{words:?} was taken: {config:?}"),
            Err(error) => error.to_string(),
        }
    }
}

#[test]
fn without_a_word_the_only_model_is_served_by_one_instance() {
    let machine = machine().with_model();
    let config = machine.resolve(&[]).unwrap();
    assert_eq!(config.engine, EngineKind::Llama);
    assert_eq!(config.served_model_name, "tiny");
    assert_eq!((config.instances, config.threads), (1, 2));
    assert_eq!(config.context_tokens, 2048, "the model's, being under 4096");
    assert_eq!(config.slots, memory::DERIVED_SLOTS_MAX);
    assert_eq!(config.listen, SocketAddr::from(([127, 0, 0, 1], 8080)));
    assert!(config.api_keys.as_slice().is_empty());
    assert!(config.notes.is_empty(), "{:?}", config.notes);
}

#[test]
fn threads_are_shared_among_instances_and_each_has_one_at_least() {
    let machine = machine().with_model();
    for (instances, threads) in [("1", 2), ("2", 1)] {
        let config = machine.resolve(&["--instances", instances]).unwrap();
        assert_eq!(config.threads, threads, "--instances {instances}");
        assert!(config.notes.is_empty(), "{:?}", config.notes);
    }
    let config = machine.resolve(&["--instances", "3"]).unwrap();
    assert_eq!(config.threads, 1);
    let told = "3 instances on 2 cores: each computes with one thread";
    assert!(config.notes[0].contains(told), "{:?}", config.notes);
    let config = machine
        .resolve(&["--instances", "2", "--threads", "2"])
        .unwrap();
    assert!(
        config.notes[0].contains("--threads 1"),
        "{:?}",
        config.notes
    );
}

#[test]
fn what_config_show_prints_is_a_file_that_says_the_same() {
    let machine = machine().with_model();
    let words = [
        "--instances",
        "2",
        "--queue-timeout",
        "1500ms",
        "--host",
        "::1",
    ];
    let shown = machine.resolve(&words).unwrap().show();
    let path = machine.models.join("d.toml");
    fs::write(&path, &shown).unwrap();
    let again = machine
        .resolve(&["--config", &path.to_string_lossy()])
        .unwrap();
    let values = |text: &str| -> Vec<String> {
        text.lines()
            .map(|line| line.split(" #").next().unwrap_or(line).trim().to_owned())
            .collect()
    };
    assert_eq!(values(&again.show()), values(&shown));
    assert_eq!(again.queue_timeout, Duration::from_millis(1500));
}

#[test]
fn the_policy_holds_what_was_set() {
    let machine = machine().with_model();
    let config = machine
        .resolve(&["--queue", "7", "--drain-timeout", "9", "--max-crashes", "2"])
        .unwrap();
    let policy = config.policy();
    assert_eq!(policy.queue_entries_max, 7);
    assert_eq!(policy.drain_timeout, Duration::from_secs(9));
    assert_eq!(policy.crashes_max, 2);
    assert_eq!(policy.stall_min, Policy::default().stall_min);
}

#[test]
fn nothing_that_must_be_at_least_one_can_be_zero() {
    let machine = machine().with_model();
    for flag in [
        "--instances",
        "--slots",
        "--threads",
        "--queue",
        "--max-crashes",
    ] {
        let refusal = machine.refusal(&[flag, "0"]);
        assert_eq!(refusal, format!("{flag} 0: must be at least 1"));
    }
}

#[test]
fn a_context_larger_than_the_models_is_refused_with_the_models() {
    let refusal = machine().with_model().refusal(&["--ctx-size", "4096"]);
    assert!(refusal.contains("2048 tokens"), "{refusal}");
}

#[test]
fn a_model_that_cannot_fit_is_refused_with_the_arithmetic_before_anything_starts() {
    let machine = machine().with_model();
    let refusal = machine.refusal(&["--memory-limit", "70MiB", "--slots", "64"]);
    assert!(refusal.contains("does not fit"), "{refusal}");
    assert!(
        refusal.contains("64 slots x 2048 tokens x 1024 B"),
        "{refusal}"
    );
    assert!(refusal.contains("`--slots "), "{refusal}");
}

#[test]
fn a_damaged_or_foreign_model_is_refused_by_name() {
    let machine = machine();
    fs::write(machine.models.join("x.gguf"), b"not a model").unwrap();
    let refusal = machine.refusal(&[]);
    assert!(refusal.contains("x.gguf is not a GGUF file"), "{refusal}");
    fs::write(machine.models.join("x.gguf"), &model()[..40]).unwrap();
    let refusal = machine.refusal(&[]);
    assert!(refusal.contains("cut short"), "{refusal}");
}

#[test]
fn an_engine_that_the_worker_has_not_is_refused_with_the_command_that_builds_it() {
    let refusal = machine().refusal(&["--instances", "3", "--engine", "mlx"]);
    assert!(
        refusal.contains("has no engine `mlx`, it has `llama`"),
        "{refusal}"
    );
    assert!(refusal.contains("--features worker/mlx"), "{refusal}");
}

#[test]
fn the_only_folder_is_served_by_a_worker_that_has_mlx_and_no_other_argument() {
    let machine = machine().with_model();
    write_worker(
        &machine
            .around
            .executable
            .with_file_name("dispatcher-worker"),
        "llama\\nmlx\\n",
    );
    let folder = machine.models.join("tiny-mlx");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("model.safetensors"), b"").unwrap();
    let config = r#"{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
        "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 2048}"#;
    fs::write(folder.join("config.json"), config).unwrap();
    let config = machine
        .resolve(&["--instances", "3", "--engine", "mlx"])
        .unwrap();
    assert_eq!(config.engine, EngineKind::Mlx);
    assert_eq!(config.model, Some(folder));
    assert_eq!(config.context_tokens, 2048);
    assert_eq!(
        (config.threads, config.slots),
        (1, memory::DERIVED_SLOTS_MAX)
    );
    assert!(config.plan.is_some());
    assert!(config.notes[0].contains("one thread"), "{:?}", config.notes);
    let config = machine.resolve(&[]).unwrap();
    assert_eq!(
        config.engine,
        EngineKind::Llama,
        "the GGUF file comes first"
    );
}

#[test]
fn a_worker_that_cannot_say_what_it_has_is_refused() {
    let machine = machine().with_model();
    let worker = machine
        .around
        .executable
        .with_file_name("dispatcher-worker");
    write_worker(&worker, "hello\\n");
    let refusal = machine.refusal(&[]);
    assert!(refusal.contains("answered something else"), "{refusal}");
    assert!(
        machine.resolve(&["--engine", "scripted"]).is_ok(),
        "the double asks nobody"
    );
}

#[test]
fn keys_come_from_flags_environment_or_file_and_are_never_printed() {
    let mut machine = machine().with_model();
    let keys = |config: &Config| config.api_keys.as_slice().to_vec();
    let config = machine
        .resolve(&["--api-key", "aa11", "--api-key", "bb22"])
        .unwrap();
    assert_eq!(keys(&config), ["aa11", "bb22"]);
    let printed = format!("{config:?}{}", config.show());
    assert!(!printed.contains("aa11"), "{printed}");

    let path = machine.models.join("keys");
    fs::write(&path, "# team\ncc33\n\ndd44\n").unwrap();
    let path = path.to_string_lossy().into_owned();
    let config = machine.resolve(&["--api-key-file", &path]).unwrap();
    assert_eq!(keys(&config), ["cc33", "dd44"]);

    let environment = &mut machine.around.environment;
    environment.insert("DISPATCHER_API_KEY".to_owned(), "ee55,ff66".to_owned());
    assert_eq!(keys(&machine.resolve(&[]).unwrap()), ["ee55", "ff66"]);
}

#[test]
fn a_key_that_is_empty_never_opens_the_server() {
    let mut machine = machine().with_model();
    assert!(machine.refusal(&["--api-key", ""]).contains("empty"));
    let path = machine.models.join("keys");
    fs::write(&path, "# none yet\n").unwrap();
    let refusal = machine.refusal(&["--api-key-file", &path.to_string_lossy()]);
    assert!(refusal.contains("holds no key"), "{refusal}");
    let environment = &mut machine.around.environment;
    environment.insert("DISPATCHER_API_KEY".to_owned(), String::new());
    assert!(machine.refusal(&[]).contains("empty"));
}

#[test]
fn an_open_address_without_a_key_is_remarked_upon() {
    let machine = machine().with_model();
    let config = machine.resolve(&["--host", "0.0.0.0"]).unwrap();
    assert!(config.notes[0].contains("--api-key"), "{:?}", config.notes);
    let keyed = ["--host", "0.0.0.0", "--api-key", "k"];
    assert!(machine.resolve(&keyed).unwrap().notes.is_empty());
}

#[test]
fn a_missing_worker_program_is_named() {
    let machine = machine().with_model();
    let refusal = machine.refusal(&["--worker", "/nonexistent/w"]);
    assert!(refusal.contains("/nonexistent/w"), "{refusal}");
}

#[test]
fn a_run_directory_too_long_for_a_socket_is_refused() {
    let machine = machine().with_model();
    let refusal = machine.refusal(&["--run-dir", &format!("/{}", "d".repeat(100))]);
    assert!(refusal.contains("101 bytes"), "{refusal}");
}

#[test]
fn the_scripted_engine_needs_no_model_and_is_never_mixed_with_another() {
    let machine = machine();
    let config = machine
        .resolve(&["--scripted", "x", "--slots", "3"])
        .unwrap();
    assert_eq!(config.engine, EngineKind::Scripted);
    assert_eq!((config.model, config.slots), (None, 3));
    let refusal = machine.refusal(&["--scripted", "x", "--engine", "llama"]);
    assert!(refusal.contains("`scripted`"), "{refusal}");
}

#[test]
fn a_replacement_starts_first_only_where_memory_and_cores_allow_it() {
    let machine = machine().with_model();
    let first = |words: &[&str]| machine.resolve(words).unwrap().start_then_stop;
    assert!(first(&["--instances", "1", "--threads", "1"]));
    assert!(!first(&["--instances", "1", "--threads", "2"]));
    assert!(!first(&["--instances", "2"]));
}

#[test]
fn a_reload_keeps_the_number_of_instances_and_names_what_waits_for_a_start() {
    let machine = machine();
    let with = |instances: &str, slots: &str, port: &str| Settings {
        engine: Some("scripted".into()),
        instances: Some(instances.into()),
        slots: Some(slots.into()),
        port: Some(port.into()),
        run_dir: Some("/tmp/d".into()),
        ..Settings::default()
    };
    let started = Config::resolve(&with("2", "3", "80"), &machine.around).unwrap();
    let same = started.again(&with("2", "3", "80"), &machine.around);
    assert!(same.unwrap().needs_restart(&started).is_empty());
    let other = started.again(&with("1", "5", "81"), &machine.around);
    let other = other.unwrap();
    assert_eq!((other.instances, other.slots), (2, 5));
    // Threads for two instances, though one was asked for.
    assert_eq!(other.threads, started.threads);
    assert_eq!(other.needs_restart(&started), ["instances", "port"]);
    assert!(
        started
            .again(&with("0", "3", "80"), &machine.around)
            .is_err()
    );
}

#[test]
fn the_run_directory_is_found_without_a_model() {
    let machine = machine();
    let settings = Settings {
        port: Some("81".into()),
        ..Settings::default()
    };
    assert!(Config::resolve(&settings, &machine.around).is_err());
    assert_eq!(
        Config::run_directory(&settings, &machine.around).unwrap(),
        Path::new("/tmp/dispatcher-1-81")
    );
}

#[test]
fn named_devices_must_be_there_and_are_kept_in_their_order() {
    type Host = fn() -> Vec<Device>;
    let hosts: [(u32, Host); 4] = [
        (1, || gpus(1)),
        (2, || gpus(2)),
        (3, || gpus(3)),
        (8, || gpus(8)),
    ];
    for (count, host) in hosts {
        let mut machine = machine().with_model();
        machine.around.devices = host;
        let last = (count - 1).to_string();
        let config = machine.resolve(&["--devices", &last]).unwrap();
        assert_eq!(config.devices, gpus(count)[count as usize - 1..]);
        assert!(config.show().contains(&format!("devices = \"{last}\"")));
        let refused = machine.refusal(&["--devices", &format!("0,{count}")]);
        assert!(
            refused.contains(&format!("device {count} is not there")),
            "{refused}"
        );
        assert_eq!(
            refused.matches("NVIDIA H200").count(),
            count as usize,
            "{refused}"
        );
    }
    let refused = machine().with_model().refusal(&["--devices", "0"]);
    assert!(refused.contains("no GPU was found"), "{refused}");
    let config = machine().with_model().resolve(&[]).unwrap();
    assert!(config.devices.is_empty());
}

#[test]
fn what_a_device_cannot_hold_is_refused_by_name() {
    let mut machine = machine().with_model();
    machine.around.devices = || {
        let mut small = gpus(2);
        small[1].memory_bytes = 900 << 20;
        small
    };
    let fits = machine.resolve(&["--devices", "0,1", "--instances", "2"]);
    assert_eq!(fits.unwrap().slots, memory::DERIVED_SLOTS_MAX);
    let refused = machine.refusal(&["--devices", "0,1", "--instances", "4"]);
    assert!(refused.contains("does not fit on device 1"), "{refused}");
    let unused = machine.resolve(&[
        "--devices",
        "0,1",
        "--instances",
        "4",
        "--n-gpu-layers",
        "0",
    ]);
    assert!(unused.is_ok(), "no layer goes to a device: {unused:?}");
}

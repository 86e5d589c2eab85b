//! What `dispatcher plan` predicted before anything was loaded, to stand beside what was measured.

use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

/// Asks the dispatcher's own prediction for `model`. `None` where it makes none: it is older than that, or it does
/// not know the model; nothing of a measurement hangs on it.
#[must_use]
pub fn ask(dispatcher: &Path, model: &Path, output_tokens: u32) -> Option<Value> {
    let output = Command::new(dispatcher)
        .arg("plan")
        .arg(model)
        .args(["--json", "--output-tokens", &output_tokens.to_string()])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let plan: Value = serde_json::from_slice(&output.stdout).ok()?;
    (output.status.success() && plan["cells"].is_array()).then_some(plan)
}

/// A size as it was predicted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Predicted {
    pub tokens_per_s: Option<f64>,
    pub ceiling_tokens_per_s: Option<f64>,
    pub memory_bytes: Option<f64>,
}

/// Of `instances` × `slots`, where the plan has it.
#[must_use]
pub fn of(plan: &Value, instances: u32, slots: u32) -> Option<Predicted> {
    let cells = plan["cells"].as_array()?;
    let cell = cells.iter().find(|cell| {
        cell["instances"].as_u64() == Some(u64::from(instances))
            && cell["slots"].as_u64() == Some(u64::from(slots))
    })?;
    Some(Predicted {
        tokens_per_s: cell["estimate_tokens_per_s"].as_f64(),
        ceiling_tokens_per_s: cell["ceiling_tokens_per_s"].as_f64(),
        memory_bytes: cell["memory_bytes"].as_f64(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that prints `says` and ends with `code`.
    fn program(folder: &Path, says: &str, code: u8) -> std::path::PathBuf {
        let path = folder.join(format!("planner-{code}"));
        let script = format!("#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {code}\n");
        std::fs::write(&path, script).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_plan_is_taken_where_there_is_one_and_its_absence_is_no_fault() {
        let folder = tempfile::tempdir().unwrap();
        let says = r#"{"cells":[{"instances":1,"slots":8,"estimate_tokens_per_s":150.5,"ceiling_tokens_per_s":null,"memory_bytes":1000}]}"#;
        let at = |code| program(folder.path(), says, code);
        let plan = ask(&at(0), Path::new("m.gguf"), 64).unwrap();
        let wanted = Predicted {
            tokens_per_s: Some(150.5),
            ceiling_tokens_per_s: None,
            memory_bytes: Some(1_000.0),
        };
        assert_eq!(of(&plan, 1, 8), Some(wanted));
        assert_eq!(of(&plan, 2, 8), None);
        assert_eq!(ask(&at(2), Path::new("m.gguf"), 64), None);
        assert_eq!(ask(Path::new("/no/such"), Path::new("m.gguf"), 64), None);
    }
}

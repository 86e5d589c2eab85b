//! What two results must have in common before they may be compared.

use serde::{Deserialize, Serialize};

use crate::error::BenchError;
use crate::host::System;
use crate::workload::Workload;

/// Version of `docs/METHODOLOGY.md`, the text of the rules. Another text has another version: a test holds the two together.
pub const METHODOLOGY: u32 = 1;

/// The rules that a run was made by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// `study-v1`, `study-v1-quick` or `v2`.
    pub rules: String,
    /// Version of the text that says what is measured and how; 0 in files from before there was one.
    #[serde(default)]
    pub methodology: u32,
    pub workload: String,
    /// Blake3 over all that is sent.
    pub workload_hash: String,
    /// Of each cell.
    pub requests: u64,
    pub warm_up: String,
    pub system: System,
    /// Blake3 over `system`.
    #[serde(default)]
    pub system_hash: String,
}

impl Contract {
    #[must_use]
    pub fn new(rules: &str, workload: &Workload, requests: u64, warm_up: &str) -> Self {
        let system = System::this();
        Self {
            rules: rules.into(),
            methodology: METHODOLOGY,
            workload: workload.name.clone(),
            workload_hash: workload.hash(),
            requests,
            warm_up: warm_up.into(),
            system_hash: hash_of(&system),
            system,
        }
    }

    /// Blake3 over all members, its first 16 hexadecimal digits.
    #[must_use]
    pub fn hash(&self) -> String {
        hash_of(self)
    }

    /// Refuses what a later bench made: what its words mean is not known here.
    ///
    /// # Errors
    /// Rules or a methodology that this bench does not know.
    pub fn require_known(&self) -> Result<(), BenchError> {
        let known = ["study-v1", "study-v1-quick", "v2"];
        if self.methodology > METHODOLOGY {
            return Err(BenchError::Contract(format!(
                "the file was made by methodology {}, and this bench knows up to {METHODOLOGY}: use the bench that made it, or a later one",
                self.methodology
            )));
        }
        if !known.contains(&self.rules.as_str()) {
            return Err(BenchError::Contract(format!(
                "the file was made by rules {:?}, and this bench knows {}",
                self.rules,
                known.join(", ")
            )));
        }
        Ok(())
    }

    /// Refuses to compare what was not made by the same rules.
    ///
    /// # Errors
    /// Each member that differs, with both values.
    pub fn require_same(&self, other: &Self) -> Result<(), BenchError> {
        let members = |contract: &Self| serde_json::to_value(contract).unwrap_or_default();
        let (mine, theirs) = (members(self), members(other));
        let differences: Vec<String> = mine
            .as_object()
            .into_iter()
            .flatten()
            .filter(|(name, value)| theirs.get(name.as_str()) != Some(value))
            .map(|(name, value)| format!("{name}: {value} and {}", theirs[name.as_str()]))
            .collect();
        if differences.is_empty() {
            Ok(())
        } else {
            Err(BenchError::Contract(differences.join("; ")))
        }
    }
}

fn hash_of(what: &impl Serialize) -> String {
    let text = serde_json::to_string(what).unwrap_or_default();
    blake3::hash(text.as_bytes()).to_hex().as_str()[..16].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_results_of_the_same_rules_are_compared_and_the_difference_is_told() {
        let contract = Contract::new("study-v1", &Workload::study(), 16, "4");
        contract.require_same(&contract).unwrap();
        let mut other = contract.clone();
        other.requests = 20;
        other.system.chip = "abacus".into();
        assert_ne!(contract.hash(), other.hash());
        let error = contract.require_same(&other).unwrap_err().to_string();
        assert!(error.contains("requests: 16 and 20"), "{error}");
        assert!(error.contains("abacus"), "{error}");
        assert!(!error.contains("workload"), "{error}");
    }

    #[test]
    fn the_hash_covers_every_member() {
        let contract = Contract::new("study-v1", &Workload::study(), 16, "4");
        let members = serde_json::to_value(&contract).unwrap();
        for name in members.as_object().unwrap().keys() {
            let mut other = members.clone();
            other[name] = match &members[name] {
                serde_json::Value::String(text) => format!("{text}x").into(),
                serde_json::Value::Number(number) => (number.as_u64().unwrap() + 1).into(),
                system => {
                    let mut system = system.clone();
                    system["cores"] = 1_234.into();
                    system
                }
            };
            let other: Contract = serde_json::from_value(other).unwrap();
            assert_ne!(other.hash(), contract.hash(), "{name}");
        }
    }

    const TEXT: (u32, &str) = (
        1,
        "4e602b8092aa04839de4b2f83e4e17e253bd44d49c8e92b73db7b19b68c8e1ec",
    );

    /// To change the text is to change what figures mean: raise `METHODOLOGY` and add the new text's line.
    #[test]
    fn the_text_of_the_methodology_has_the_version_that_is_hashed() {
        let text = include_str!("../../docs/METHODOLOGY.md");
        let first = text.lines().next().unwrap();
        assert_eq!(first, format!("# Methodology, version {METHODOLOGY}"));
        let hash = blake3::hash(text.as_bytes()).to_hex();
        assert_eq!((METHODOLOGY, hash.as_str()), TEXT);
    }

    #[test]
    fn rules_that_nobody_here_knows_are_refused() {
        let mut contract = Contract::new("study-v1-quick", &Workload::study(), 4, "4");
        contract.require_known().unwrap();
        contract.rules = "study-v9".into();
        let error = contract.require_known().unwrap_err().to_string();
        assert!(
            error.contains("study-v9") && error.contains("v2"),
            "{error}"
        );
    }
}

//! What two results must have in common before they may be compared.

use serde::{Deserialize, Serialize};

use crate::error::BenchError;
use crate::host::System;
use crate::workload::Workload;

/// The rules that a run was made by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// `study-v1` or `v2`.
    pub rules: String,
    pub workload: String,
    pub workload_hash: String,
    /// Of each cell.
    pub requests: u64,
    pub warm_up: String,
    pub system: System,
}

impl Contract {
    #[must_use]
    pub fn new(rules: &str, workload: &Workload, requests: u64, warm_up: &str) -> Self {
        Self {
            rules: rules.into(),
            workload: workload.name.clone(),
            workload_hash: workload.hash(),
            requests,
            warm_up: warm_up.into(),
            system: System::this(),
        }
    }

    /// Blake3 over all members, its first 16 hexadecimal digits.
    #[must_use]
    pub fn hash(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        blake3::hash(text.as_bytes()).to_hex().as_str()[..16].to_owned()
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
}

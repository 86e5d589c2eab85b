//! What a running server says of itself in `/status`: footprint, weight bytes, memory-bus use. A foreign server says nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::Client;

/// The server's own word at a cell's end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerWord {
    /// Memory of all workers, shared pages counted once.
    pub footprint_bytes: Option<u64>,
    /// Weight bytes that one step touches, of one instance.
    pub weight_bytes_per_step: Option<u64>,
    /// Engine steps of all instances since their starts.
    pub steps: Option<u64>,
    pub engine: Option<String>,
    pub model: Option<String>,
    pub model_hash: Option<String>,
    pub device: Option<String>,
    /// KV bytes that one token of context takes, and that each later step of its stream reads.
    pub kv_bytes_per_token: Option<u64>,
    /// What it publishes of its memory bus, as it is.
    pub bus: Option<Value>,
}

impl ServerWord {
    /// Asks for it.
    pub async fn ask(client: &Client) -> Option<Self> {
        let (code, body) = client.get("/status", Duration::from_secs(5)).await.ok()?;
        if code != 200 {
            return None;
        }
        Self::of(&serde_json::from_slice(&body).ok()?)
    }

    /// Takes what is known out of a `/status`.
    #[must_use]
    pub fn of(status: &Value) -> Option<Self> {
        let instances = status["instances"].as_array()?;
        let sum = |name: &str| -> Option<u64> {
            let each = instances.iter().filter_map(|one| one[name].as_u64());
            each.reduce(|sum, one| sum.saturating_add(one))
        };
        let first = |name: &str| -> Option<String> {
            let mut each = instances.iter().filter_map(|one| one[name].as_str());
            each.next().map(ToOwned::to_owned)
        };
        let weights = instances
            .iter()
            .filter_map(|one| one["weight_bytes_per_step"].as_u64());
        Some(Self {
            footprint_bytes: status["memory"]["workers_bytes"]
                .as_u64()
                .or_else(|| sum("footprint_bytes")),
            weight_bytes_per_step: weights.max(),
            steps: sum("steps"),
            engine: first("engine"),
            model: first("model"),
            model_hash: first("model_hash"),
            device: first("device"),
            kv_bytes_per_token: instances
                .iter()
                .filter_map(|one| one["kv_bytes_per_token"].as_u64())
                .max(),
            bus: status.get("bus").filter(|bus| !bus.is_null()).cloned(),
        })
    }
}

impl ServerWord {
    /// Of the memory that most instances read from: the first that is told.
    fn first_bus(&self) -> Option<&Value> {
        match self.bus.as_ref()? {
            Value::Array(buses) => buses.first(),
            bus => Some(bus),
        }
    }

    /// Measured read bandwidth, GB (10⁹ bytes) per second; none where the weights stay in the cache, and no bus is the limit.
    #[must_use]
    pub fn read_gb_per_s(&self) -> Option<f64> {
        let bus = self.first_bus()?;
        let is_resident = bus["cache_resident"].as_bool().unwrap_or(false);
        bus["best_gb_per_s"].as_f64().filter(|_| !is_resident)
    }

    /// Share of the bus that is used while steps run, 0 to 1, and above 1 where its accounting is at fault.
    #[must_use]
    pub fn bus_use(&self) -> Option<f64> {
        self.first_bus()?["usage_while_stepping"].as_f64()
    }

    /// What the server says would help.
    #[must_use]
    pub fn advice(&self) -> Option<&str> {
        let advice = self.first_bus()?["advice"].as_str()?;
        (!advice.is_empty()).then_some(advice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_dispatcher_says_is_taken_and_what_a_stranger_says_is_not() {
        let status = serde_json::json!({
            "instances": [
                {"state": "ready", "engine": "llama", "model_hash": "ab", "footprint_bytes": 100, "steps": 5, "weight_bytes_per_step": 96},
                {"state": "ready", "engine": "llama", "model_hash": "ab", "footprint_bytes": 20, "steps": 7, "weight_bytes_per_step": 96},
            ],
            "bus": [{"best_gb_per_s": 25.0, "usage_while_stepping": 0.5, "cache_resident": false, "advice": "run more slots"}],
        });
        let word = ServerWord::of(&status).unwrap();
        assert_eq!(word.footprint_bytes, Some(120));
        assert_eq!(
            (word.steps, word.weight_bytes_per_step),
            (Some(12), Some(96))
        );
        assert_eq!(word.engine.as_deref(), Some("llama"));
        assert_eq!(
            (word.read_gb_per_s(), word.bus_use()),
            (Some(25.0), Some(0.5))
        );
        assert_eq!(word.advice(), Some("run more slots"));
        let mut resident = word.clone();
        resident.bus.as_mut().unwrap()[0]["cache_resident"] = true.into();
        assert_eq!(resident.read_gb_per_s(), None);
        assert_eq!(ServerWord::default().bus_use(), None);
        assert_eq!(ServerWord::of(&serde_json::json!({"slots": []})), None);
    }
}

//! Every metric's name, kind, labels and help. docs/METRICS.md is written from this table.
//!
//! Where vLLM has a metric of the same meaning its name is used, so that dashboards fit both.

/// What a metric's samples are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// One metric as it is exposed. Counters' names end in `_total`, units come last.
#[derive(Debug, PartialEq, Eq)]
pub struct Name {
    pub name: &'static str,
    pub kind: Kind,
    /// Beside `model_name`, which all have.
    pub labels: &'static [&'static str],
    pub help: &'static str,
}

macro_rules! names {
    ($($constant:ident $name:literal $kind:ident [$($label:literal),*] $help:literal)*) => {
        $(
            #[doc = $help]
            pub const $constant: Name = Name {
                name: $name,
                kind: Kind::$kind,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        /// All of them, in the order of exposition.
        pub const ALL: &[&Name] = &[$(&$constant),*];
    };
}

names! {
    TIME_TO_FIRST_TOKEN "vllm:time_to_first_token_seconds" Histogram []
        "From the request's arrival to its first token, queue and load included."
    INTER_TOKEN "vllm:inter_token_latency_seconds" Histogram []
        "Between two tokens of one stream, as they reach the dispatcher."
    END_TO_END "vllm:e2e_request_latency_seconds" Histogram []
        "From the arrival of a completed request to its end."
    QUEUE_TIME "vllm:request_queue_time_seconds" Histogram []
        "From the request's arrival to its first assignment to an instance."
    PREFILL_TIME "vllm:request_prefill_time_seconds" Histogram []
        "From the first assignment to the first token."
    DECODE_TIME "vllm:request_decode_time_seconds" Histogram []
        "From the first token of a completed request to its end."
    REQUEST_PROMPT_TOKENS "vllm:request_prompt_tokens" Histogram []
        "Prompt tokens of a completed request."
    REQUEST_GENERATION_TOKENS "vllm:request_generation_tokens" Histogram []
        "Tokens produced for a completed request."
    PROMPT_TOKENS "vllm:prompt_tokens_total" Counter []
        "Prompt tokens of requests that ended after they had a slot."
    GENERATION_TOKENS "vllm:generation_tokens_total" Counter []
        "Tokens produced for requests that ended, however they did."
    PREFIX_CACHE_QUERIES "vllm:prefix_cache_queries_total" Counter []
        "Prompt tokens that were looked for in a slot's KV cache."
    PREFIX_CACHE_HITS "vllm:prefix_cache_hits_total" Counter []
        "Prompt tokens that were found there and not computed again."
    REQUEST_SUCCESS "vllm:request_success_total" Counter ["finished_reason"]
        "Requests that ended by a stop (`stop`), at their bound (`length`), or because the client left (`abort`)."
    RUNNING "vllm:num_requests_running" Gauge []
        "Requests assigned to an instance now."
    WAITING "vllm:num_requests_waiting" Gauge []
        "Requests in the queue now."

    BATCH_SIZE "dispatcher_batch_size" Histogram ["instance"]
        "Sequences that decoded in one engine step: how full the batch is."
    STEP_TIME "dispatcher_step_duration_seconds" Histogram ["instance"]
        "Forward pass and sampling of one engine step."
    PREFILL_TOKENS "dispatcher_prefill_tokens_total" Counter ["instance"]
        "Prompt tokens computed, those of repeated attempts included."

    REQUESTS_CANCELLED "dispatcher_requests_cancelled_total" Counter ["reason"]
        "Requests whose client left or did not read."
    REQUESTS_DENIED "dispatcher_requests_denied_total" Counter ["reason"]
        "Requests that never had a slot."
    REQUESTS_FAILED "dispatcher_requests_failed_total" Counter ["reason"]
        "Requests that had a slot and could not be finished."
    FAILOVERS "dispatcher_failovers_total" Counter []
        "Attempts that ended with their worker while the request went on elsewhere."
    STALE "dispatcher_stale_total" Counter []
        "Frames, rows, exits and timers of an older attempt or generation that were dropped."
    QUARANTINED "dispatcher_quarantined_prompts_total" Counter []
        "Prompts put into quarantine because engines died of them."
    WORKER_EXITS "dispatcher_worker_exits_total" Counter ["instance", "cause"]
        "Ends of worker processes."

    INSTANCE_STATE "dispatcher_instance_state" Gauge ["instance", "state"]
        "1 for the state that the instance is in, 0 for the others."
    INSTANCE_SLOTS "dispatcher_instance_slots" Gauge ["instance"]
        "Sequences that the instance can hold."
    INSTANCE_RUNNING "dispatcher_instance_running" Gauge ["instance"]
        "Requests assigned to the instance."
    INSTANCE_PULSE_AGE "dispatcher_instance_pulse_age_seconds" Gauge ["instance"]
        "Since the instance's engine last made progress."
    INSTANCE_FOOTPRINT "dispatcher_instance_footprint_bytes" Gauge ["instance"]
        "Memory of the instance's worker, with its share of what workers have in common (Linux: PSS; macOS: physical footprint)."
    INSTANCE_PRIVATE "dispatcher_instance_private_bytes" Gauge ["instance"]
        "Memory that would come free with the instance's worker."
    INSTANCE_TOKEN_RATE "dispatcher_instance_tokens_per_second" Gauge ["instance"]
        "Tokens decoded over the last seconds."
    INSTANCE_BUS_READ "dispatcher_instance_bus_read_bytes_per_second" Gauge ["instance"]
        "Bytes that the instance's steps read from memory: weights and KV cache of one step times steps a second."
    INSTANCE_BUS_USAGE "dispatcher_instance_bus_usage_ratio" Gauge ["instance"]
        "The same over what its memory can deliver. Absent where that is not known or the weights fit into the cache; over 1 is an accounting fault and shown as it is."
    INSTANCE_RESTARTS "dispatcher_instance_restarts_total" Counter ["instance"]
        "Workers started for the instance after its first."
    INSTANCE_CRASHES "dispatcher_instance_crashes_total" Counter ["instance"]
        "Workers of the instance that ended by the engine's fault."

    QUEUE_LIMIT "dispatcher_queue_limit" Gauge []
        "Requests that may wait."
    QUEUE_BYTES "dispatcher_queue_bytes" Gauge []
        "Bytes that waiting requests hold."
    QUEUE_TOKENS "dispatcher_queue_tokens" Gauge []
        "Estimated tokens of waiting requests."
    QUEUE_OLDEST "dispatcher_queue_oldest_wait_seconds" Gauge []
        "How long the oldest waiting request has waited; 0 where none waits."
    MEMORY_USED "dispatcher_memory_used_bytes" Gauge []
        "Used of the bound on memory that is nearest to being used up: the machine's, the cgroup's, or --memory-limit."
    MEMORY_LIMIT "dispatcher_memory_limit_bytes" Gauge []
        "That bound."
    MEMORY_WORKERS "dispatcher_memory_workers_bytes" Gauge []
        "Memory of all workers together, shared pages counted once."
    MEMORY_PRESSURE "dispatcher_memory_pressure" Gauge []
        "0: none; 1: soft, no new work is given out; 2: hard, what waits is sent away."
    BUS_BANDWIDTH "dispatcher_bus_bandwidth_bytes_per_second" Gauge ["device", "source"]
        "Read bandwidth of a memory, the best pass: `measured`, or from the maker's `data sheet`."
    BUS_READ "dispatcher_bus_read_bytes_per_second" Gauge ["device"]
        "Bytes that all instances on this memory read together."
    BUS_USAGE "dispatcher_bus_usage_ratio" Gauge ["device"]
        "The same over its bandwidth; absent and over 1 as for an instance."
    READY "dispatcher_ready" Gauge []
        "1 where /ready answers 200."
    UPTIME "dispatcher_uptime_seconds" Gauge []
        "Since the dispatcher started."

    HTTP_RESPONSES "dispatcher_http_responses_total" Counter ["route", "status"]
        "Responses begun."
    REFUSAL_TIME "dispatcher_refusal_seconds" Histogram []
        "From the end of a request's head to its refusal by 429."
    HTTP_CONNECTIONS "dispatcher_http_connections" Gauge []
        "Open connections."
    ACCEPT_FAILURES "dispatcher_accept_failures_total" Counter []
        "Connections that could not be accepted for want of descriptors or memory."
}

/// docs/METRICS.md as it must be.
#[must_use]
pub fn document() -> String {
    let mut text = String::from(
        "# Metrics\n\n\
         `GET /metrics` answers in the OpenMetrics text format, under any load and without an API key. \
         Every sample has the label `model_name`. Metrics whose meaning is the same as in vLLM have \
         vLLM's names. Times are on the dispatcher's clock; TTFT and the end-to-end latency count from \
         the arrival of the request, the queue included.\n\n\
         This page is written from `dispatcher/src/metrics/names.rs`; a test compares them \
         (`UPDATE_DOCS=1` rewrites the page).\n\n\
         | name | kind | labels | meaning |\n|---|---|---|---|\n",
    );
    for Name {
        name,
        kind,
        labels,
        help,
    } in ALL
    {
        let kind = format!("{kind:?}").to_lowercase();
        let labels: Vec<String> = labels.iter().map(|label| format!("`{label}`")).collect();
        let labels = labels.join(", ");
        text.push_str(&format!("| `{name}` | {kind} | {labels} | {help} |\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn docs_metrics_md_is_what_the_table_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/METRICS.md");
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(path, document()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == document(),
            "docs/METRICS.md is out of date: run this test with UPDATE_DOCS=1"
        );
    }

    #[test]
    fn names_are_unique_and_end_as_their_kind_demands() {
        let mut seen = HashSet::new();
        for name in ALL {
            assert!(seen.insert(name.name), "{} stands twice", name.name);
            assert_eq!(
                name.name.ends_with("_total"),
                name.kind == Kind::Counter,
                "{}",
                name.name
            );
            assert!(name.help.ends_with('.'), "{}", name.name);
        }
    }
}

//! Counters, histograms and the view as the text of GET /metrics.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{self, DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::exemplar::Exemplar;
use prometheus_client::registry::Registry;

use super::export::{Inner, PerInstance, Words};
use super::histogram::Histogram;
use super::names::{self, Kind, Name};
use crate::view::{BusView, InstanceView, MemoryView, View};

const STATES: [&str; 8] = [
    "spawning",
    "loading",
    "warming",
    "ready",
    "draining",
    "terminating",
    "backoff",
    "quarantined",
];

/// All metrics in the OpenMetrics text format.
pub(super) fn text(inner: &Arc<Inner>, view: &Arc<View>) -> String {
    let label = ("model_name".into(), inner.model.clone().into());
    let mut registry = Registry::with_labels([label].into_iter());
    registry.register_collector(Box::new(Scrape {
        inner: Arc::clone(inner),
        view: Arc::clone(view),
    }));
    let mut out = String::with_capacity(32 << 10);
    // Writing to a string does not fail.
    let _ = encoding::text::encode(&mut out, &registry);
    out
}

/// One scrape.
#[derive(Debug)]
struct Scrape {
    inner: Arc<Inner>,
    view: Arc<View>,
}

type Labels<'a> = [(&'a str, &'a str)];

/// Writes one metric's samples.
struct Samples<'a>(MetricEncoder<'a>);

impl Samples<'_> {
    fn counter(&mut self, labels: &Labels<'_>, value: u64) -> fmt::Result {
        // An empty set must not be written as a pair of braces.
        if labels.is_empty() {
            return self.0.encode_counter::<NoLabelSet, u64, f64>(&value, None);
        }
        self.0
            .encode_family(&labels)?
            .encode_counter::<NoLabelSet, u64, f64>(&value, None)
    }

    fn gauge(&mut self, labels: &Labels<'_>, value: f64) -> fmt::Result {
        if labels.is_empty() {
            return self.0.encode_gauge(&value);
        }
        self.0.encode_family(&labels)?.encode_gauge(&value)
    }

    fn histogram(&mut self, labels: &Labels<'_>, histogram: &Histogram) -> fmt::Result {
        let one = histogram.snapshot();
        let none = None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>;
        if labels.is_empty() {
            return self
                .0
                .encode_histogram(one.sum, one.count, &one.buckets, none);
        }
        self.0
            .encode_family(&labels)?
            .encode_histogram(one.sum, one.count, &one.buckets, none)
    }
}

fn metric(
    encoder: &mut DescriptorEncoder<'_>,
    name: &Name,
    write: impl FnOnce(&mut Samples<'_>) -> fmt::Result,
) -> fmt::Result {
    let (stem, kind) = match name.kind {
        // The encoder adds the ending itself.
        Kind::Counter => (
            name.name.strip_suffix("_total").unwrap_or(name.name),
            MetricType::Counter,
        ),
        Kind::Gauge => (name.name, MetricType::Gauge),
        Kind::Histogram => (name.name, MetricType::Histogram),
    };
    write(&mut Samples(
        encoder.encode_descriptor(stem, name.help, None, kind)?,
    ))
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (inner, view, to) = (&*self.inner, &*self.view, &mut encoder);
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        for (name, histogram) in [
            (&names::TIME_TO_FIRST_TOKEN, &inner.first_token),
            (&names::INTER_TOKEN, &inner.gap),
            (&names::END_TO_END, &inner.end_to_end),
            (&names::QUEUE_TIME, &inner.queue),
            (&names::PREFILL_TIME, &inner.prefill),
            (&names::DECODE_TIME, &inner.decode),
            (&names::REQUEST_PROMPT_TOKENS, &inner.request_prompt_tokens),
            (
                &names::REQUEST_GENERATION_TOKENS,
                &inner.request_generation_tokens,
            ),
        ] {
            metric(to, name, |samples| samples.histogram(&[], histogram))?;
        }
        for (name, count) in [
            (&names::PROMPT_TOKENS, &inner.prompt_tokens),
            (&names::GENERATION_TOKENS, &inner.generation_tokens),
            (&names::PREFIX_CACHE_QUERIES, &inner.prompt_tokens),
            (&names::PREFIX_CACHE_HITS, &inner.cached_tokens),
        ] {
            metric(to, name, |samples| samples.counter(&[], load(count)))?;
        }
        words(to, &names::REQUEST_SUCCESS, &inner.finished)?;
        metric(to, &names::RUNNING, |samples| {
            samples.gauge(&[], view.queue.running.into())
        })?;
        metric(to, &names::WAITING, |samples| {
            samples.gauge(&[], view.queue.waiting.into())
        })?;

        metric(to, &names::BATCH_SIZE, |samples| {
            each(inner, |one, labels| samples.histogram(labels, &one.batch))
        })?;
        metric(to, &names::STEP_TIME, |samples| {
            each(inner, |one, labels| samples.histogram(labels, &one.step))
        })?;
        metric(to, &names::PREFILL_TOKENS, |samples| {
            each(inner, |one, labels| {
                samples.counter(labels, load(&one.prefill_tokens))
            })
        })?;

        words(to, &names::REQUESTS_CANCELLED, &inner.cancelled)?;
        words(to, &names::REQUESTS_DENIED, &inner.denied)?;
        words(to, &names::REQUESTS_FAILED, &inner.failed)?;
        for (name, count) in [
            (&names::FAILOVERS, &inner.failovers),
            (&names::STALE, &inner.stale),
            (&names::QUARANTINED, &inner.quarantined),
        ] {
            metric(to, name, |samples| samples.counter(&[], load(count)))?;
        }
        metric(to, &names::WORKER_EXITS, |samples| {
            each(inner, |one, labels| {
                one.exits.counts().try_for_each(|(cause, count)| {
                    samples.counter(&[labels[0], ("cause", cause)], count)
                })
            })
        })?;
        instances(to, &view.instances)?;
        totals(to, view)?;

        metric(to, &names::HTTP_RESPONSES, |samples| {
            let responses = inner
                .responses
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            responses.iter().try_for_each(|((route, status), &count)| {
                let status = status.to_string();
                samples.counter(&[("route", route.0), ("status", &status)], count)
            })
        })?;
        metric(to, &names::REFUSAL_TIME, |samples| {
            samples.histogram(&[], &inner.refusal)
        })?;
        metric(to, &names::HTTP_CONNECTIONS, |samples| {
            samples.gauge(&[], load(&inner.connections) as f64)
        })?;
        metric(to, &names::ACCEPT_FAILURES, |samples| {
            samples.counter(&[], load(&inner.accept_failures))
        })
    }
}

fn words<const N: usize>(
    to: &mut DescriptorEncoder<'_>,
    name: &Name,
    words: &Words<N>,
) -> fmt::Result {
    let label = name.labels[0];
    metric(to, name, |samples| {
        words
            .counts()
            .try_for_each(|(word, count)| samples.counter(&[(label, word)], count))
    })
}

fn each(
    inner: &Inner,
    mut write: impl FnMut(&PerInstance, &Labels<'_>) -> fmt::Result,
) -> fmt::Result {
    inner
        .instances
        .iter()
        .try_for_each(|one| write(one, &[("instance", &one.label)]))
}

fn instances(to: &mut DescriptorEncoder<'_>, list: &[InstanceView]) -> fmt::Result {
    metric(to, &names::INSTANCE_STATE, |samples| {
        list.iter().try_for_each(|one| {
            let instance = one.instance.to_string();
            STATES.iter().try_for_each(|state| {
                let labels = [("instance", instance.as_str()), ("state", state)];
                samples.gauge(&labels, f64::from(u8::from(one.state == *state)))
            })
        })
    })?;
    type Of = fn(&InstanceView) -> Option<f64>;
    let gauges: [(&Name, Of); 8] = [
        (&names::INSTANCE_SLOTS, |one| Some(one.slots.into())),
        (&names::INSTANCE_RUNNING, |one| Some(one.running.into())),
        (&names::INSTANCE_PULSE_AGE, |one| {
            one.last_pulse_us.map(|age| age as f64 / 1e6)
        }),
        (&names::INSTANCE_FOOTPRINT, |one| {
            one.footprint_bytes.map(|bytes| bytes as f64)
        }),
        (&names::INSTANCE_PRIVATE, |one| {
            one.private_bytes.map(|bytes| bytes as f64)
        }),
        (&names::INSTANCE_TOKEN_RATE, |one| Some(one.tokens_per_s)),
        (&names::INSTANCE_BUS_READ, |one| one.bus_bytes_per_s),
        (&names::INSTANCE_BUS_USAGE, |one| one.bus_usage),
    ];
    for (name, of) in gauges {
        metric(to, name, |samples| {
            list.iter().try_for_each(|one| match of(one) {
                Some(value) => samples.gauge(&[("instance", &one.instance.to_string())], value),
                None => Ok(()),
            })
        })?;
    }
    type Count = fn(&InstanceView) -> u64;
    let counters: [(&Name, Count); 2] = [
        (&names::INSTANCE_RESTARTS, |one| one.restarts),
        (&names::INSTANCE_CRASHES, |one| one.crashes),
    ];
    for (name, of) in counters {
        metric(to, name, |samples| {
            list.iter().try_for_each(|one| {
                samples.counter(&[("instance", &one.instance.to_string())], of(one))
            })
        })?;
    }
    Ok(())
}

fn totals(to: &mut DescriptorEncoder<'_>, view: &View) -> fmt::Result {
    let queue = &view.queue;
    let oldest = queue.oldest_wait.unwrap_or_default().as_secs_f64();
    for (name, value) in [
        (&names::QUEUE_LIMIT, f64::from(queue.limit)),
        (&names::QUEUE_BYTES, queue.bytes as f64),
        (&names::QUEUE_TOKENS, queue.tokens as f64),
        (&names::QUEUE_OLDEST, oldest),
    ] {
        metric(to, name, |samples| samples.gauge(&[], value))?;
    }
    let memory = |of: fn(&MemoryView) -> f64| view.memory.as_ref().map(of);
    for (name, value) in [
        (&names::MEMORY_USED, memory(|one| one.used_bytes as f64)),
        (&names::MEMORY_LIMIT, memory(|one| one.limit_bytes as f64)),
        (
            &names::MEMORY_WORKERS,
            memory(|one| one.workers_bytes as f64),
        ),
        (&names::MEMORY_PRESSURE, memory(MemoryView::level)),
    ] {
        metric(to, name, |samples| match value {
            Some(value) => samples.gauge(&[], value),
            None => Ok(()),
        })?;
    }
    buses(to, &view.buses)?;
    for (name, value) in [
        (&names::READY, f64::from(u8::from(view.ready))),
        (&names::UPTIME, view.uptime_us as f64 / 1e6),
    ] {
        metric(to, name, |samples| samples.gauge(&[], value))?;
    }
    Ok(())
}

fn buses(to: &mut DescriptorEncoder<'_>, list: &[BusView]) -> fmt::Result {
    metric(to, &names::BUS_BANDWIDTH, |samples| {
        list.iter().try_for_each(|bus| match bus.best_gb_per_s {
            Some(rate) => {
                let labels = [("device", bus.device.as_str()), ("source", bus.source)];
                samples.gauge(&labels, rate * 1e9)
            }
            None => Ok(()),
        })
    })?;
    type Of = fn(&BusView) -> Option<f64>;
    let gauges: [(&Name, Of); 2] = [
        (&names::BUS_READ, |bus| Some(bus.read_gb_per_s * 1e9)),
        (&names::BUS_USAGE, |bus| bus.usage),
    ];
    for (name, of) in gauges {
        metric(to, name, |samples| {
            list.iter().try_for_each(|bus| match of(bus) {
                Some(value) => samples.gauge(&[("device", bus.device.as_str())], value),
                None => Ok(()),
            })
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proto::{FinishReason, Generation, InstanceId, RequestId};

    use super::*;
    use crate::machine::event::{CancelCause, ExitStatus};
    use crate::machine::measurement::{ExitCause, Measurement, RequestRecord};
    use crate::machine::{Denied, Outcome, Tick};
    use crate::metrics::Metrics;

    fn record(outcome: Outcome) -> Measurement {
        Measurement::Request(Box::new(RequestRecord {
            request: RequestId(1),
            key: crate::machine::event::KeyId(0),
            prompt_bytes: 160,
            received: Tick::from_micros(1_000_000),
            assigned: Some(Tick::from_micros(1_250_000)),
            first_token: Some(Tick::from_micros(1_500_000)),
            ended: Tick::from_micros(3_500_000),
            prompt_tokens: Some(40),
            completion_tokens: 12,
            cached_tokens: 8,
            attempts: 1,
            instance: Some(InstanceId(0)),
            outcome,
        }))
    }

    fn value(text: &str, sample: &str) -> f64 {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no sample {sample} in\n{text}"))
            .parse()
            .unwrap()
    }

    #[test]
    fn every_named_metric_is_exposed_once_under_its_name() {
        let view = View {
            instances: vec![InstanceView {
                state: "ready",
                last_pulse_us: Some(1),
                footprint_bytes: Some(1),
                private_bytes: Some(1),
                bus_bytes_per_s: Some(1.0),
                bus_usage: Some(1.0),
                ..InstanceView::default()
            }],
            buses: vec![BusView {
                device: "CPU".to_owned(),
                source: "measured",
                best_gb_per_s: Some(1.0),
                usage: Some(1.0),
                ..BusView::default()
            }],
            memory: Some(MemoryView::default()),
            ..View::default()
        };
        let metrics = Metrics::new(1, "m\"odel");
        metrics.responded(crate::metrics::Route::of("/x"), 200);
        let text = metrics.encode(&Arc::new(view));
        let mut heads = Vec::new();
        for line in text.lines() {
            if let Some(head) = line.strip_prefix("# TYPE ") {
                heads.push(head.to_owned());
            } else if !line.starts_with('#') {
                assert!(line.contains("model_name=\"m\\\"odel\""), "{line}");
            }
        }
        let expected: Vec<String> = names::ALL
            .iter()
            .map(|name| {
                let stem = name.name.strip_suffix("_total").unwrap_or(name.name);
                let has_sample = |ending: &str| {
                    text.lines()
                        .any(|line| line.starts_with(&format!("{stem}{ending}{{")))
                };
                let ending = match name.kind {
                    Kind::Counter => "_total",
                    Kind::Gauge => "",
                    Kind::Histogram => "_bucket",
                };
                assert!(has_sample(ending), "{} has no sample", name.name);
                format!("{stem} {}", format!("{:?}", name.kind).to_lowercase())
            })
            .collect();
        assert_eq!(heads, expected);
        insta::assert_snapshot!(heads.join("\n"));
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn what_is_recorded_is_what_is_read() {
        let metrics = Metrics::new(2, "m");
        metrics.record(&record(Outcome::Completed {
            reason: FinishReason::Length,
        }));
        metrics.record(&record(Outcome::Cancelled(CancelCause::SlowReader)));
        metrics.record(&record(Outcome::Denied(Denied::DeadlineExceeded)));
        metrics.record(&Measurement::WorkerExit {
            instance: InstanceId(1),
            generation: Generation(1),
            status: ExitStatus::Code(1),
            cause: ExitCause::Engine,
            uptime: Duration::from_secs(1),
            batch: Vec::new(),
        });
        metrics.record(&Measurement::Stale);
        metrics.stale(2);
        metrics.step(InstanceId(1), 4, 16, Duration::from_millis(3));
        metrics.step(InstanceId(9), 4, 16, Duration::from_millis(3));
        metrics.step(InstanceId(1), 0, 100, Duration::from_millis(30));
        metrics.gap(Duration::from_millis(8));
        let text = metrics.encode(&Arc::new(View::default()));
        for (sample, expected) in [
            (
                "vllm:time_to_first_token_seconds_sum{model_name=\"m\"}",
                1.5,
            ),
            (
                "vllm:request_queue_time_seconds_sum{model_name=\"m\"}",
                0.75,
            ),
            (
                "vllm:e2e_request_latency_seconds_sum{model_name=\"m\"}",
                2.5,
            ),
            (
                "vllm:inter_token_latency_seconds_count{model_name=\"m\"}",
                1.0,
            ),
            (
                "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.0075\"}",
                0.0,
            ),
            (
                "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"0.01\"}",
                1.0,
            ),
            (
                "vllm:inter_token_latency_seconds_bucket{model_name=\"m\",le=\"+Inf\"}",
                1.0,
            ),
            ("vllm:generation_tokens_total{model_name=\"m\"}", 36.0),
            ("vllm:prefix_cache_hits_total{model_name=\"m\"}", 24.0),
            (
                "vllm:request_success_total{model_name=\"m\",finished_reason=\"length\"}",
                1.0,
            ),
            (
                "vllm:request_success_total{model_name=\"m\",finished_reason=\"abort\"}",
                1.0,
            ),
            (
                "dispatcher_requests_cancelled_total{model_name=\"m\",reason=\"slow_reader\"}",
                1.0,
            ),
            (
                "dispatcher_requests_denied_total{model_name=\"m\",reason=\"deadline_exceeded\"}",
                1.0,
            ),
            (
                "dispatcher_worker_exits_total{model_name=\"m\",instance=\"1\",cause=\"engine\"}",
                1.0,
            ),
            ("dispatcher_stale_total{model_name=\"m\"}", 3.0),
            (
                "dispatcher_batch_size_sum{model_name=\"m\",instance=\"1\"}",
                4.0,
            ),
            (
                "dispatcher_batch_size_count{model_name=\"m\",instance=\"1\"}",
                1.0,
            ),
            (
                "dispatcher_prefill_tokens_total{model_name=\"m\",instance=\"1\"}",
                116.0,
            ),
        ] {
            assert_eq!(value(&text, sample), expected, "{sample}");
        }
    }
}

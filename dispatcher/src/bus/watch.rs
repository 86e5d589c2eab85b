//! Measures the memory's bandwidth once a machine, in moments when the server has nothing to do.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};

use super::machine::Machine;
use super::store::{self, Store};
use crate::input::Input;
use crate::view::View;

/// After an attempt that requests disturbed, how long until the next.
const PAUSE: Duration = Duration::from_secs(10);
/// So many disturbed attempts, and this run of the server goes without.
const ATTEMPTS_MAX: u32 = 30;

/// What the task needs.
#[derive(Debug)]
pub(crate) struct Measuring {
    pub(crate) view: watch::Receiver<Arc<View>>,
    pub(crate) inputs: mpsc::Sender<Input>,
    pub(crate) machine: Machine,
    pub(crate) store: Store,
}

impl Measuring {
    /// Waits until the engines run on this machine's cores and nothing is asked of them, measures, and
    /// tells the driver. A request that comes meanwhile waits for at most one pass over the array.
    pub(crate) async fn serve(mut self) {
        for _ in 0..ATTEMPTS_MAX {
            match self.view.wait_for(|view| is_idle(view)).await {
                Ok(view) if runs_on_cores(&view) => {}
                _ => return,
            }
            let (machine, view) = (self.machine.clone(), self.view.clone());
            let measured = tokio::task::spawn_blocking(move || {
                store::measure_while(&machine, &|| is_idle(&view.borrow()))
            });
            let Ok(Some(measurement)) = measured.await else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            let kept = self.store.put_better(measurement.clone());
            let measurement = kept.unwrap_or_else(|error| {
                tracing::warn!(
                    "the measured memory bandwidth cannot be kept in {}: {error}; it will be measured again at the next start",
                    self.store.path().display()
                );
                measurement
            });
            tracing::info!(
                best_gb_per_s = measurement.best_gb_per_s,
                median_gb_per_s = measurement.median_gb_per_s,
                "memory bandwidth measured"
            );
            // A driver that is gone has no use for it.
            let told = Input::BusMeasured(Box::new(measurement));
            let _ = self.inputs.send(told).await;
            return;
        }
        tracing::info!(
            "the memory bandwidth was not measured: there was no idle moment; `dispatcher plan` measures it"
        );
    }
}

/// Some instance serves, none starts, and nobody waits for anything.
fn is_idle(view: &View) -> bool {
    let starts = |state| matches!(state, "spawning" | "loading" | "warming");
    view.instances.iter().any(|one| one.state == "ready")
        && !view.instances.iter().any(|one| starts(one.state))
        && view.queue.running == 0
        && view.queue.waiting == 0
        && view.instances.iter().all(|one| one.live_slots == 0)
}

fn runs_on_cores(view: &View) -> bool {
    view.instances
        .iter()
        .filter_map(|one| one.device.as_ref())
        .any(|device| device.contains("CPU"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::{InstanceView, QueueView};

    fn view(state: &'static str, waiting: u32, device: &str) -> View {
        View {
            instances: vec![InstanceView {
                state,
                device: Some(device.to_owned()),
                ..InstanceView::default()
            }],
            queue: QueueView {
                waiting,
                ..QueueView::default()
            },
            ..View::default()
        }
    }

    fn machine() -> Machine {
        Machine {
            cores: 1,
            cache_bytes: Some(1 << 20),
            memory_bytes: 4 << 30,
            ..Machine::default()
        }
    }

    #[test]
    fn a_server_with_work_or_a_starting_worker_is_not_idle() {
        assert!(is_idle(&view("ready", 0, "CPU")));
        assert!(!is_idle(&view("ready", 1, "CPU")));
        assert!(!is_idle(&view("loading", 0, "CPU")));
        assert!(!is_idle(&view("quarantined", 0, "CPU")));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_first_idle_moment_gives_a_figure_that_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (sender, view_receiver) = watch::channel(Arc::new(view("loading", 0, "CPU")));
        let (inputs, mut receiver) = mpsc::channel(4);
        let store = Store::new(folder.path());
        let task = tokio::spawn(
            Measuring {
                view: view_receiver,
                inputs,
                machine: machine(),
                store: store.clone(),
            }
            .serve(),
        );
        assert!(receiver.try_recv().is_err(), "not while a worker loads");
        sender.send_replace(Arc::new(view("ready", 0, "CPU (1 thread)")));
        let Some(Input::BusMeasured(measured)) = receiver.recv().await else {
            panic!("a measurement comes");
        };
        assert!(measured.best_gb_per_s >= measured.median_gb_per_s);
        assert_eq!(store.get(&machine()).unwrap(), *measured);
        task.await.unwrap();
    }

    #[tokio::test]
    async fn the_machines_memory_is_not_measured_for_an_engine_on_a_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let (_sender, view) = watch::channel(Arc::new(view("ready", 0, "CUDA0: NVIDIA H200")));
        let (inputs, mut receiver) = mpsc::channel(4);
        let store = Store::new(folder.path());
        Measuring {
            view,
            inputs,
            machine: machine(),
            store: store.clone(),
        }
        .serve()
        .await;
        assert!(receiver.recv().await.is_none());
        assert_eq!(store.get(&machine()), None);
    }
}

//! The end of a dispatcher whose listening socket outlives it: first no connection is accepted any more, then the pool drains.
//!
//! What waits in the socket's backlog is the successor's. What was accepted is answered: the pool goes
//! on admitting until each accepted connection has handed its request over, or is closed.

use tokio::sync::{mpsc, oneshot};

use crate::gateway::Gateway;
use crate::input::Input;
use crate::run::FLUSH;

/// The front's side of a last call.
#[derive(Debug)]
pub struct LastCall {
    /// Resolves when no connection is to be accepted any more.
    pub begin: oneshot::Receiver<()>,
    /// To be told when every accepted connection's request has been handed over.
    pub settled: oneshot::Sender<()>,
}

/// Passes signals on to the driver; the first drain waits for the front.
#[derive(Debug)]
pub(crate) struct Conductor {
    /// `None`: the last call has begun.
    begin: Option<oneshot::Sender<()>>,
    settled: oneshot::Receiver<()>,
}

/// The two sides.
pub(crate) fn last_call() -> (Conductor, LastCall) {
    let (begin, begun) = oneshot::channel();
    let (settle, settled) = oneshot::channel();
    let conductor = Conductor {
        begin: Some(begin),
        settled,
    };
    let last_call = LastCall {
        begin: begun,
        settled: settle,
    };
    (conductor, last_call)
}

impl Conductor {
    fn call(&mut self) {
        if let Some(begin) = self.begin.take() {
            let _ = begin.send(());
        }
    }

    /// After an end that no signal asked for: what was accepted is answered all the same.
    pub(crate) async fn settle(mut self) {
        if self.begin.is_some() {
            self.call();
            // The front's own bound is as long; one that is gone has settled.
            let _ = tokio::time::timeout(FLUSH, &mut self.settled).await;
        }
    }

    /// Runs until there are no more signals or the driver is gone.
    pub(crate) async fn conduct(
        &mut self,
        signals: &mut mpsc::Receiver<Input>,
        inputs: mpsc::Sender<Input>,
        gateway: Gateway,
    ) {
        loop {
            match signals.recv().await {
                Some(Input::Drain) => break,
                Some(other) => {
                    if inputs.send(other).await.is_err() {
                        return;
                    }
                }
                None => return,
            }
        }
        tracing::info!("no connection is accepted any more: they are the successor's");
        // A front that is gone accepts nothing either.
        self.call();
        let mut waiting = true;
        while waiting {
            let next = tokio::select! {
                biased;
                next = signals.recv() => next,
                _ = &mut self.settled => {
                    waiting = false;
                    None
                }
            };
            match next {
                Some(Input::Stop) => {
                    let _ = inputs.send(Input::Stop).await;
                    waiting = false;
                }
                Some(other) => {
                    if inputs.send(other).await.is_err() {
                        return;
                    }
                }
                None => waiting = false,
            }
        }
        // By the way that the requests take, so that none of them is behind it.
        gateway.drain().await;
        while let Some(input) = signals.recv().await {
            if inputs.send(input).await.is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::sync::watch;

    use super::*;
    use crate::clock::Clock;
    use crate::gateway::Command;
    use crate::view::View;

    #[tokio::test]
    async fn the_pool_drains_after_the_front_has_settled_and_a_second_signal_is_not_held() {
        let (mut conductor, last_call) = last_call();
        let (signal, signals) = mpsc::channel(8);
        let (inputs, mut driver) = mpsc::channel(8);
        let (_view, view) = watch::channel(Arc::new(View::default()));
        let (gateway, mut commands) = Gateway::new(Clock::start(), view);
        tokio::spawn(async move { conductor.conduct(&mut { signals }, inputs, gateway).await });
        signal.send(Input::Reload).await.unwrap();
        assert!(matches!(driver.recv().await, Some(Input::Reload)));
        signal.send(Input::Drain).await.unwrap();
        last_call.begin.await.unwrap();
        signal.send(Input::Reload).await.unwrap();
        assert!(matches!(driver.recv().await, Some(Input::Reload)));
        assert!(commands.try_recv().is_err(), "drained before it settled");
        last_call.settled.send(()).unwrap();
        assert!(matches!(commands.recv().await, Some(Command::Drain)));
        signal.send(Input::Stop).await.unwrap();
        assert!(matches!(driver.recv().await, Some(Input::Stop)));
    }

    #[tokio::test]
    async fn a_second_signal_does_not_wait_for_the_front() {
        let (mut conductor, _last_call) = last_call();
        let (signal, signals) = mpsc::channel(8);
        let (inputs, mut driver) = mpsc::channel(8);
        let (_view, view) = watch::channel(Arc::new(View::default()));
        let (gateway, _commands) = Gateway::new(Clock::start(), view);
        tokio::spawn(async move { conductor.conduct(&mut { signals }, inputs, gateway).await });
        signal.send(Input::Drain).await.unwrap();
        signal.send(Input::Stop).await.unwrap();
        assert!(matches!(driver.recv().await, Some(Input::Stop)));
    }
}

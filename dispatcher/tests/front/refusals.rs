//! Requests that the driver refuses, or that fail: status, Retry-After, body.

use std::time::Duration;

use crate::world::{CHAT, World, chat, config, post};
use dispatcher::machine::{Denied, Failure, Outcome, QueueBound};

#[tokio::test]
async fn refusals_and_failures_have_their_own_status_in_both_modes() {
    let mut world = World::start(config()).await;
    let retry_after = Duration::from_millis(2300);
    let mut table = String::new();
    for outcome in [
        Outcome::Denied(Denied::QueueFull {
            bound: QueueBound::Entries,
            depth: 1024,
            limit: 1024,
            retry_after,
        }),
        Outcome::Denied(Denied::Draining { retry_after }),
        Outcome::Denied(Denied::NoInstance { retry_after }),
        Outcome::Denied(Denied::QueueTimeout {
            waited: Duration::from_secs(600),
        }),
        Outcome::Denied(Denied::PromptTooLong {
            prompt_tokens: 5000,
            context_tokens: 4096,
        }),
        Outcome::Failed(Failure::WorkerDied {
            oom: true,
            deaths: 2,
        }),
        Outcome::Failed(Failure::Engine("not a number".into())),
    ] {
        let mut answers = Vec::new();
        for stream in [false, true] {
            let mut client = world.client().await;
            let body = chat(&format!(r#","stream":{stream}"#));
            let asking = tokio::spawn(async move { client.send(post(CHAT, body)).await });
            let arrived = world.arrived().await;
            arrived.relay.end(outcome.clone());
            let reply = asking.await.unwrap();
            assert_eq!(reply.header("content-type"), "application/json");
            answers.push(format!(
                "{} retry-after={:?} {}\n",
                reply.status,
                reply.header("retry-after"),
                reply.body
            ));
        }
        assert_eq!(answers[0], answers[1]);
        table += &answers[0];
    }
    insta::assert_snapshot!(table);
    // Each end was read, so nothing was cancelled.
    assert!(world.commands.try_recv().is_err());
}

#[tokio::test]
async fn with_the_driver_gone_the_answer_is_503() {
    let mut world = World::start(config()).await;
    world.commands.close();
    let mut client = world.client().await;
    let reply = client.send(post(CHAT, chat(""))).await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.header("retry-after"), "1");
}

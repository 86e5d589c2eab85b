//! Answers, whole and streamed.

use std::time::Duration;

use crate::world::{CHAT, COMPLETIONS, World, chat, config, events, post, text, within};
use dispatcher::machine::event::{KeyId, Priority};
use dispatcher::machine::{Denied, Failure, Outcome};
use http_body_util::{BodyExt, Full};
use hyper::Request;
use proto::FinishReason;
use proto::to_worker::PromptInput;
use serde_json::{Value, json};

/// A body without what differs from run to run.
fn steady(mut body: Value) -> Value {
    for member in ["id", "created"] {
        assert!(body[member].is_string() || body[member].is_u64(), "{body}");
        body[member] = json!("…");
    }
    if let Some(timings) = body["timings"].as_object_mut() {
        for member in ["queue_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms"] {
            assert!(timings[member].is_f64(), "{member}");
            timings[member] = json!("…");
        }
    }
    body
}

#[tokio::test]
async fn a_whole_answer_of_each_route_reads_as_its_snapshot() {
    let mut world = World::start(config()).await;
    let mut bodies = Vec::new();
    for (path, body) in [
        (CHAT, chat(r#","model":"tiny""#)),
        (
            COMPLETIONS,
            r#"{"prompt":["once"],"model":"default"}"#.into(),
        ),
    ] {
        let mut client = world.client().await;
        let asking = tokio::spawn(async move { client.send(post(path, body)).await });
        let mut arrived = world.arrived().await;
        arrived.tokens(&["Hel", "", "lo 🦀"]);
        arrived.finish(&["!"], FinishReason::Stop);
        let reply = asking.await.unwrap();
        assert_eq!(reply.status, 200);
        assert_eq!(reply.header("content-type"), "application/json");
        bodies.push(serde_json::to_string_pretty(&steady(reply.json())).unwrap());
    }
    insta::assert_snapshot!(bodies.join("\n"));
    // The end was read: nothing is cancelled.
    assert!(world.commands.try_recv().is_err());
}

#[tokio::test]
async fn a_stream_has_one_role_one_event_a_token_one_finish_and_one_done() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let asking =
        tokio::spawn(async move { client.send(post(CHAT, chat(r#","stream":true"#))).await });
    let mut arrived = world.arrived().await;
    arrived.tokens(&["a", "b"]);
    arrived.tokens(&["", "🦀"]);
    arrived.finish(&["d"], FinishReason::Length);
    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), "text/event-stream");
    let events = events(&reply.body);
    assert_eq!(events.len(), 1 + 4 + 1 + 1);
    assert!(events[0].contains(r#""role":"assistant""#));
    assert_eq!(text(&reply.body), "ab🦀d");
    assert_eq!(reply.body.matches("[DONE]").count(), 1);
    assert_eq!(reply.body.matches(r#""finish_reason":"length""#).count(), 1);
    assert_eq!(events[6], "[DONE]");
    // Usage was not asked for, timings always come.
    assert!(!reply.body.contains("usage"));
    let last = steady(serde_json::from_str(events[5]).unwrap());
    assert_eq!(last["timings"]["batch_mean"], 2.0);
    assert_eq!(last["timings"]["attempts"], 1);
}

#[tokio::test]
async fn usage_comes_in_one_last_chunk_without_choices_where_it_was_asked_for() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let body = r#"{"prompt":"a","stream":true,"stream_options":{"include_usage":true}}"#;
    let asking = tokio::spawn(async move { client.send(post(COMPLETIONS, body)).await });
    let mut arrived = world.arrived().await;
    arrived.finish(&["x", "y"], FinishReason::Stop);
    let reply = asking.await.unwrap();
    let events = events(&reply.body);
    let usage: Value = serde_json::from_str(events[events.len() - 2]).unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(
        usage["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
               "prompt_tokens_details": {"cached_tokens": 0}})
    );
    let with_usage = events.iter().filter(|data| data.contains("total_tokens"));
    assert_eq!(with_usage.count(), 1);
}

#[tokio::test]
async fn a_stream_without_any_token_still_has_its_role_and_finish() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let asking =
        tokio::spawn(async move { client.send(post(CHAT, chat(r#","stream":true"#))).await });
    let mut arrived = world.arrived().await;
    arrived.finish(&[], FinishReason::Stop);
    let reply = asking.await.unwrap();
    assert_eq!(events(&reply.body).len(), 3);
    assert_eq!(text(&reply.body), "");
}

#[tokio::test]
async fn streamed_and_whole_texts_are_the_same_bytes() {
    let texts = [
        "né",
        "\u{1F468}\u{200D}\u{1F469}",
        "\"\\\n\t\u{0}",
        "日本",
        "</s>\u{2028}",
    ];
    let mut world = World::start(config()).await;
    for stream in [false, true] {
        let mut client = world.client().await;
        let body = chat(&format!(r#","stream":{stream}"#));
        let asking = tokio::spawn(async move { client.send(post(CHAT, body)).await });
        let mut arrived = world.arrived().await;
        for one in texts {
            arrived.tokens(&[one]);
        }
        arrived.finish(&[], FinishReason::Stop);
        let reply = asking.await.unwrap();
        let read = if stream {
            text(&reply.body)
        } else {
            let body = reply.json();
            body["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(read, texts.concat());
    }
}

#[tokio::test]
async fn what_was_asked_for_is_what_is_submitted() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let request = Request::post(CHAT)
        .header("content-type", "application/json; charset=utf-8")
        .header("x-priority", "low")
        .header("x-request-timeout", "2.5")
        .body(Full::from(chat(
            r#","max_tokens":7,"max_completion_tokens":99999999999,"temperature":0,"top_p":0.5,
            "top_k":40,"min_p":0.1,"repetition_penalty":1.1,"presence_penalty":-1,"frequency_penalty":2,
            "logit_bias":{"5":-100},"seed":-7,"stop":["x","y"],"stop_token_ids":[9],"ignore_eos":true,
            "logprobs":true,"top_logprobs":2,"batch_invariant":true,"cache_prompt":false,
            "n":1,"tools":[],"tool_choice":"auto","response_format":{"type":"text"},
            "user":"me","store":true,"metadata":{"a":{}},"parallel_tool_calls":true,"what_is_this":[{}]"#,
        )))
        .unwrap();
    let asking = tokio::spawn(async move { client.send(request).await });
    let mut arrived = world.arrived().await;
    let got = &arrived.submission;
    assert_eq!(got.max_tokens, Some(u32::MAX));
    assert_eq!(got.sampling.temperature, 0.0);
    assert_eq!(got.sampling.top_k, 40);
    assert_eq!(got.sampling.logit_bias, [(5, -100.0)]);
    assert_eq!(got.sampling.seed, (-7_i64).cast_unsigned());
    assert_eq!(got.stop, ["x", "y"]);
    assert_eq!(got.stop_ids, [9]);
    assert!(got.ignore_eos && got.batch_invariant && !got.cache_prompt);
    assert_eq!(got.logprobs, Some(2));
    assert_eq!(got.priority, Priority::Low);
    assert_eq!(got.deadline, Some(Duration::from_millis(2500)));
    assert_eq!(got.key, KeyId(0));
    let PromptInput::Chat {
        messages,
        add_generation_prompt: true,
    } = &got.prompt
    else {
        panic!("{:?}", got.prompt);
    };
    assert_eq!(
        (messages[0].role.as_str(), messages[0].content.as_str()),
        ("user", "hi")
    );
    arrived.finish(&["x"], FinishReason::Stop);
    assert_eq!(asking.await.unwrap().status, 200);
}

#[tokio::test]
async fn requests_without_a_seed_get_different_ones() {
    let mut world = World::start(config()).await;
    let mut seeds = std::collections::HashSet::new();
    for _ in 0..8 {
        let mut client = world.client().await;
        let asking = tokio::spawn(async move { client.send(post(CHAT, chat(""))).await });
        let mut arrived = world.arrived().await;
        seeds.insert(arrived.submission.sampling.seed);
        arrived.finish(&["x"], FinishReason::Stop);
        asking.await.unwrap();
    }
    assert_eq!(seeds.len(), 8);
}

#[tokio::test]
async fn content_parts_and_token_ids_become_prompts() {
    let mut world = World::start(config()).await;
    let parts = r#"{"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
        {"role":"assistant","content":null,"tool_calls":[]}]}"#;
    for (path, body) in [
        (CHAT, parts),
        (COMPLETIONS, r#"{"prompt":[1,2]}"#),
        (COMPLETIONS, r#"{"prompt":[[3]]}"#),
    ] {
        let mut client = world.client().await;
        let asking = tokio::spawn(async move { client.send(post(path, body)).await });
        let mut arrived = world.arrived().await;
        match &arrived.submission.prompt {
            PromptInput::Chat { messages, .. } => {
                assert_eq!(messages[0].content, "a\nb");
                assert_eq!(messages[1].content, "");
            }
            PromptInput::Ids(ids) => assert!(*ids == [1, 2] || *ids == [3], "{ids:?}"),
            other => panic!("{other:?}"),
        }
        arrived.finish(&["x"], FinishReason::Stop);
        assert_eq!(asking.await.unwrap().status, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_waits_gets_its_status_after_ten_seconds_and_comments_every_fifteen() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let start = tokio::time::Instant::now();
    let opening = tokio::spawn(async move {
        (
            client.open(post(CHAT, chat(r#","stream":true"#))).await,
            client,
        )
    });
    let mut arrived = world.arrived().await;
    let (mut reply, client) = opening.await.unwrap();
    assert_eq!(reply.status(), 200);
    assert_eq!(start.elapsed().as_secs(), 10);
    let mut at = Vec::new();
    for _ in 0..3 {
        let frame = within(reply.frame()).await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), ": keepalive\n\n");
        at.push(start.elapsed().as_secs());
    }
    assert_eq!(at, [10, 25, 40]);
    // A token in between moves the next comment.
    tokio::time::advance(Duration::from_secs(5)).await;
    arrived.tokens(&["a"]);
    let frame = within(reply.frame()).await.unwrap().unwrap();
    assert!(frame.into_data().unwrap().starts_with(b"data: "));
    let frame = within(reply.frame()).await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), ": keepalive\n\n");
    assert_eq!(start.elapsed().as_secs(), 60);
    // A failure now is an event of the stream, and no end that looks like success.
    arrived.relay.end(Outcome::Failed(Failure::WorkerDied {
        oom: false,
        deaths: 2,
    }));
    let rest = within(reply.collect()).await.unwrap().to_bytes();
    let rest = std::str::from_utf8(&rest).unwrap();
    insta::assert_snapshot!(rest);
    client.leave().await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_after_the_headers_is_one_error_event() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let asking =
        tokio::spawn(async move { client.send(post(CHAT, chat(r#","stream":true"#))).await });
    let arrived = world.arrived().await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    arrived.relay.end(Outcome::Denied(Denied::QueueTimeout {
        waited: Duration::from_secs(30),
    }));
    let reply = asking.await.unwrap();
    assert_eq!(reply.status, 200);
    let events = events(&reply.body);
    assert_eq!(events.len(), 1);
    assert!(events[0].contains("queue_timeout"));
    assert!(!reply.body.contains("finish_reason"));
}

#[tokio::test]
async fn tokens_that_wait_together_are_written_together() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let opening = tokio::spawn(async move {
        (
            client.open(post(CHAT, chat(r#","stream":true"#))).await,
            client,
        )
    });
    let mut arrived = world.arrived().await;
    arrived.tokens(&["a"; 20]);
    let (mut reply, client) = opening.await.unwrap();
    let frame = within(reply.frame())
        .await
        .unwrap()
        .unwrap()
        .into_data()
        .unwrap();
    let frame = std::str::from_utf8(&frame).unwrap();
    assert_eq!(events(frame).len(), 21);
    drop(arrived);
    client.leave().await;
}

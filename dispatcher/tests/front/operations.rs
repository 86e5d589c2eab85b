//! Health, models, metrics, keys, connection caps and the stop.

use std::sync::Arc;
use std::time::Duration;

use crate::world::{CHAT, World, chat, config, post, within};
use dispatcher::http::FrontConfig;
use dispatcher::view::{InstanceView, QueueView, View};
use http_body_util::Full;
use hyper::Request;
use proto::FinishReason;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

fn view(ready: bool) -> Arc<View> {
    Arc::new(View {
        served_model: "tiny".into(),
        context_tokens: Some(4096),
        ready,
        not_ready_reason: (!ready).then(|| "instance 0 is loading".into()),
        instances: vec![InstanceView {
            state: if ready { "ready" } else { "loading" },
            slots: 8,
            running: 3,
            last_pulse_us: Some(12_500),
            ..InstanceView::default()
        }],
        queue: QueueView {
            waiting: 5,
            running: 3,
            limit: 1024,
            oldest_wait: Some(Duration::from_millis(1500)),
            ..QueueView::default()
        },
        ..View::default()
    })
}

#[tokio::test]
async fn health_ready_models_and_status_say_how_things_stand() {
    let world = World::start(config()).await;
    let mut client = world.client().await;
    let mut table = String::new();
    for ready in [false, true] {
        world.view.send_replace(view(ready));
        for path in [
            "/health",
            "/health?deep=1",
            "/ready",
            "/v1/models",
            "/v1/models/tiny",
            "/status",
        ] {
            let reply = client.get(path).await;
            let mut body = reply.json();
            for pointer in ["/created", "/data/0/created"] {
                if let Some(created) = body.pointer_mut(pointer) {
                    *created = "…".into();
                }
            }
            table += &format!("{path} {} {body}\n", reply.status);
        }
    }
    insta::assert_snapshot!(table);
}

#[tokio::test]
async fn metrics_count_responses_and_show_the_view() {
    let world = World::start(config()).await;
    world.view.send_replace(view(true));
    let mut client = world.client().await;
    client.get("/health").await;
    client.get("/no/such/route").await;
    let reply = client.get("/metrics").await;
    assert!(
        reply
            .header("content-type")
            .starts_with("application/openmetrics-text")
    );
    for line in [
        "vllm:num_requests_waiting{model_name=\"tiny\"} 5.0",
        "dispatcher_http_responses_total{model_name=\"tiny\",route=\"/health\",status=\"200\"} 1",
        "dispatcher_http_responses_total{model_name=\"tiny\",route=\"other\",status=\"404\"} 1",
        "dispatcher_http_connections{model_name=\"tiny\"} 1.0",
        "dispatcher_instance_state{model_name=\"tiny\",instance=\"0\",state=\"ready\"} 1.0",
        "dispatcher_queue_oldest_wait_seconds{model_name=\"tiny\"} 1.5",
    ] {
        assert!(
            reply.body.lines().any(|one| one == line),
            "{line} not in\n{}",
            reply.body
        );
    }
}

#[tokio::test]
async fn a_request_id_is_echoed_or_made() {
    let world = World::start(config()).await;
    let mut client = world.client().await;
    let ask = |id: &str| {
        Request::get("/health")
            .header("x-request-id", id)
            .body(Full::default())
            .unwrap()
    };
    assert_eq!(
        client.send(ask("mine-7")).await.header("x-request-id"),
        "mine-7"
    );
    let made = client.send(ask(&"x".repeat(200))).await;
    assert!(made.header("x-request-id").starts_with("req-"));
    let other = client.get("/health").await;
    assert_ne!(other.header("x-request-id"), made.header("x-request-id"));
}

#[tokio::test]
async fn keys_guard_the_api_and_not_the_health_checks() {
    let mut world = World::start(FrontConfig {
        api_keys: vec!["secret".into()],
        ..config()
    })
    .await;
    let mut client = world.client().await;
    let reply = client.send(post(CHAT, chat(""))).await;
    insta::assert_snapshot!(format!("{} {}", reply.status, reply.body));
    assert_eq!(reply.header("www-authenticate"), "Bearer");
    assert_eq!(client.get("/v1/models").await.status, 401);
    for path in ["/health", "/metrics", "/status"] {
        assert_eq!(client.get(path).await.status, 200);
    }
    let mut request = post(CHAT, chat(""));
    request
        .headers_mut()
        .insert("authorization", "Bearer secret".parse().unwrap());
    let asking = tokio::spawn(async move { client.send(request).await });
    let mut arrived = world.arrived().await;
    assert_ne!(arrived.submission.key.0, 0);
    arrived.finish(&["x"], FinishReason::Stop);
    assert_eq!(asking.await.unwrap().status, 200);
}

#[tokio::test]
async fn above_the_cap_of_connections_health_is_still_answered() {
    let mut world = World::start(FrontConfig {
        connections_max: 1,
        ..config()
    })
    .await;
    let mut first = world.client().await;
    assert_eq!(first.get("/health").await.status, 200);
    let mut second = world.client().await;
    let reply = second.get("/metrics").await;
    assert_eq!(
        (reply.status.as_u16(), reply.header("connection")),
        (200, "close")
    );
    let mut third = world.client().await;
    let reply = third.send(post(CHAT, chat(""))).await;
    assert_eq!(reply.status, 503);
    assert_eq!(reply.json()["error"]["code"], "too_many_connections");
    assert_eq!(reply.header("retry-after"), "1");
    let asking = tokio::spawn(async move { first.send(post(CHAT, chat(""))).await });
    world.arrived().await.finish(&["x"], FinishReason::Stop);
    assert_eq!(asking.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_stop_closes_the_door_and_lets_what_runs_finish() {
    let mut world = World::start(config()).await;
    let mut idle = TcpStream::connect(world.address).await.unwrap();
    let mut client = world.client().await;
    let asking =
        tokio::spawn(async move { client.send(post(CHAT, chat(r#","stream":true"#))).await });
    let mut arrived = world.arrived().await;
    arrived.tokens(&["a"]);
    world.stop();
    // The idle connection is closed at once, and nobody new gets in.
    let mut nothing = [0; 1];
    assert_eq!(within(idle.read(&mut nothing)).await.unwrap(), 0);
    assert!(TcpStream::connect(world.address).await.is_err());
    arrived.finish(&["b"], FinishReason::Stop);
    let reply = asking.await.unwrap();
    assert!(reply.body.ends_with("data: [DONE]\n\n"));
    world.stopped().await;
}

#[tokio::test(start_paused = true)]
async fn what_does_not_finish_after_a_stop_is_cut_off() {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let asking = tokio::spawn(async move {
        (
            client.open(post(CHAT, chat(r#","stream":true"#))).await,
            client,
        )
    });
    let arrived = world.arrived().await;
    let _kept = asking.await.unwrap();
    world.stop();
    let start = tokio::time::Instant::now();
    let (request, _) = world.cancelled().await;
    assert_eq!(request, arrived.request);
    world.stopped().await;
    assert_eq!(start.elapsed().as_secs(), 35);
}

//! What a client can get wrong, by name, and what it is told.

use crate::world::{CHAT, COMPLETIONS, World, chat, config, post};
use http_body_util::Full;
use hyper::Request;

async fn told(cases: &[(&str, &str, String)]) -> String {
    let mut world = World::start(config()).await;
    let mut client = world.client().await;
    let mut table = String::new();
    for (name, path, body) in cases {
        let reply = client.send(post(path, body.clone())).await;
        assert!(reply.status.is_client_error(), "{name}: {reply:?}");
        assert_eq!(reply.header("content-type"), "application/json", "{name}");
        assert!(reply.header("x-request-id").starts_with("req-"), "{name}");
        let error = &reply.json()["error"];
        for member in ["message", "type", "code"] {
            assert!(error[member].is_string(), "{name}: {error}");
        }
        table += &format!("{name}\n  {} {}\n", reply.status.as_u16(), reply.body);
    }
    assert!(
        world.commands.try_recv().is_err(),
        "something was submitted"
    );
    table
}

#[tokio::test]
async fn every_bad_chat_request_is_refused_with_its_reason() {
    let deep = format!(
        r#"{{"messages":[],"x":{}{}}}"#,
        "[".repeat(10_000),
        "]".repeat(10_000)
    );
    let many = format!(r#"{{"stop":[{}"a"]}}"#, r#""a","#.repeat(16));
    let long = format!(r#","stop":"{}""#, "a".repeat(2000));
    let mut cases = vec![
        ("not json", "{nope".to_owned()),
        ("empty body", String::new()),
        ("cut off", r#"{"messages":[{"role":"us"#.into()),
        ("two values", chat("") + "{}"),
        ("an array", "[1,2]".into()),
        ("a string", "\"hi\"".into()),
        ("nested 10,000 deep", deep),
        ("a member twice", chat(r#","messages":[]"#)),
        ("no messages", "{}".into()),
        ("messages null", r#"{"messages":null}"#.into()),
        ("empty messages", r#"{"messages":[]}"#.into()),
        ("messages a string", r#"{"messages":"hi"}"#.into()),
        (
            "a message as an array",
            r#"{"messages":[["user","hi"]]}"#.into(),
        ),
        (
            "unknown role",
            r#"{"messages":[{"role":"wizard","content":"x"}]}"#.into(),
        ),
        ("no role", r#"{"messages":[{"content":"x"}]}"#.into()),
        ("no content", r#"{"messages":[{"role":"user"}]}"#.into()),
        (
            "content a number",
            r#"{"messages":[{"role":"user","content":5}]}"#.into(),
        ),
        (
            "an image",
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#
                .into(),
        ),
        (
            "a text part without text",
            r#"{"messages":[{"role":"user","content":[{"type":"text"}]}]}"#.into(),
        ),
        (
            "tool calls",
            r#"{"messages":[{"role":"assistant","tool_calls":[{"id":"1"}]}]}"#.into(),
        ),
        ("too many stops", many),
        ("a long stop", chat(&long)),
    ];
    for (name, more) in [
        ("unknown model", r#""model":"gpt-4""#),
        ("model a number", r#""model":4"#),
        ("max_tokens negative", r#""max_tokens":-1"#),
        ("max_tokens zero", r#""max_tokens":0"#),
        ("max_tokens a fraction", r#""max_tokens":1.5"#),
        ("max_tokens beyond 64 bits", r#""max_tokens":1e30"#),
        ("max_tokens a string", r#""max_tokens":"many""#),
        ("max_completion_tokens zero", r#""max_completion_tokens":0"#),
        ("temperature 1e9", r#""temperature":1e9"#),
        ("temperature negative", r#""temperature":-0.1"#),
        ("temperature beyond f64", r#""temperature":1e999"#),
        ("temperature a string", r#""temperature":"hot""#),
        ("top_p negative", r#""top_p":-1"#),
        ("top_p zero", r#""top_p":0"#),
        ("top_p above one", r#""top_p":1.01"#),
        ("top_k negative", r#""top_k":-2"#),
        ("min_p above one", r#""min_p":2"#),
        ("presence_penalty", r#""presence_penalty":3"#),
        ("frequency_penalty", r#""frequency_penalty":-2.5"#),
        ("repetition_penalty zero", r#""repetition_penalty":0"#),
        (
            "repetition_penalty out of range",
            r#""repetition_penalty":1e200"#,
        ),
        ("logit_bias key", r#""logit_bias":{"x":1}"#),
        ("logit_bias value", r#""logit_bias":{"1":101}"#),
        ("logit_bias an array", r#""logit_bias":[1]"#),
        ("seed a string", r#""seed":"abc""#),
        ("seed beyond 64 bits", r#""seed":99999999999999999999"#),
        ("stop empty string", r#""stop":["a",""]"#),
        ("stop a number", r#""stop":4"#),
        ("top_logprobs without logprobs", r#""top_logprobs":3"#),
        ("top_logprobs 21", r#""logprobs":true,"top_logprobs":21"#),
        ("logprobs a number", r#""logprobs":3"#),
        ("stream a string", r#""stream":"yes""#),
        (
            "stream_options without stream",
            r#""stream_options":{"include_usage":true}"#,
        ),
        (
            "stream_options an array",
            r#""stream":true,"stream_options":[true]"#,
        ),
        ("priority", r#""priority":"urgent""#),
        ("timeout zero", r#""timeout":0"#),
        ("n 2", r#""n":2"#),
        ("n 0", r#""n":0"#),
        ("best_of 2", r#""best_of":2"#),
        ("tools", r#""tools":[{"type":"function"}]"#),
        ("tool_choice", r#""tool_choice":"required""#),
        ("functions", r#""functions":[{"name":"f"}]"#),
        ("json mode", r#""response_format":{"type":"json_object"}"#),
        ("audio", r#""modalities":["text","audio"]"#),
        ("chat_template_kwargs", r#""chat_template_kwargs":{"a":1}"#),
        ("grammar", r#""grammar":"root ::= x""#),
        ("min_tokens", r#""min_tokens":4"#),
    ] {
        cases.push((name, chat(&format!(",{more}"))));
    }
    let cases: Vec<_> = cases
        .into_iter()
        .map(|(name, body)| (name, CHAT, body))
        .collect();
    insta::assert_snapshot!(told(&cases).await);
}

#[tokio::test]
async fn every_bad_completion_request_is_refused_with_its_reason() {
    let cases: Vec<_> = [
        ("no prompt", "{}"),
        ("empty prompt", r#"{"prompt":""}"#),
        ("no ids", r#"{"prompt":[]}"#),
        ("two prompts", r#"{"prompt":["a","b"]}"#),
        ("two lists of ids", r#"{"prompt":[[1],[2]]}"#),
        ("mixed", r#"{"prompt":[1,"b"]}"#),
        ("a negative id", r#"{"prompt":[-1]}"#),
        ("an id beyond 32 bits", r#"{"prompt":[4294967296]}"#),
        ("prompt an object", r#"{"prompt":{}}"#),
        ("echo", r#"{"prompt":"a","echo":true}"#),
        ("suffix", r#"{"prompt":"a","suffix":"b"}"#),
        ("logprobs 21", r#"{"prompt":"a","logprobs":21}"#),
        ("logprobs true", r#"{"prompt":"a","logprobs":true}"#),
    ]
    .into_iter()
    .map(|(name, body)| (name, COMPLETIONS, body.to_owned()))
    .collect();
    insta::assert_snapshot!(told(&cases).await);
}

#[tokio::test]
async fn bytes_that_are_no_text_are_refused() {
    let world = World::start(config()).await;
    let mut client = world.client().await;
    let reply = client
        .send(post(
            CHAT,
            &b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}"[..],
        ))
        .await;
    insta::assert_snapshot!(format!("{} {}", reply.status, reply.body));
}

#[tokio::test]
async fn ten_megabytes_get_a_clear_answer() {
    let world = World::start(config()).await;
    let mut client = world.client().await;
    let body = chat(&format!(r#","user":"{}""#, "a".repeat(10 << 20)));
    let reply = client.send(post(CHAT, body)).await;
    insta::assert_snapshot!(format!("{} {}", reply.status, reply.body));
    // Up to the bound all is well.
    let mut world = world;
    let mut client = world.client().await;
    let body = chat(&format!(r#","user":"{}""#, "a".repeat(7 << 20)));
    let asking = tokio::spawn(async move { client.send(post(CHAT, body)).await });
    let mut arrived = world.arrived().await;
    arrived.finish(&["ok"], proto::FinishReason::Stop);
    assert_eq!(asking.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_large_body_of_unknown_length_is_cut_off_too() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let world = World::start(dispatcher::http::FrontConfig {
        body_bytes_max: 1000,
        ..config()
    })
    .await;
    let mut socket = tokio::net::TcpStream::connect(world.address).await.unwrap();
    let chunk = format!("200\r\n{}\r\n", "a".repeat(0x200));
    let request = format!(
        "POST {CHAT} HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n{}0\r\n\r\n",
        chunk.repeat(3)
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 12];
    socket.read_exact(&mut answer).await.unwrap();
    assert_eq!(answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn routes_methods_and_content_types_that_do_not_exist_have_openai_errors() {
    let world = World::start(config()).await;
    let mut client = world.client().await;
    let mut replies = vec![
        client.get("/v1/embeddings").await,
        client.get(CHAT).await,
        client.get("/v1/models/other").await,
    ];
    let form = Request::post(CHAT)
        .header("content-type", "text/plain")
        .body(Full::from("{}"))
        .unwrap();
    replies.push(client.send(form).await);
    let bad_header = Request::post(CHAT)
        .header("x-request-timeout", "soon")
        .body(Full::from(chat("")))
        .unwrap();
    replies.push(client.send(bad_header).await);
    let table: Vec<String> = replies
        .iter()
        .map(|reply| format!("{} {}", reply.status, reply.body))
        .collect();
    insta::assert_snapshot!(table.join("\n"));
}

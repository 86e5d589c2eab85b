//! One example of every message, for the golden bytes and for whatever else wants real frames.

use proto::generate::Sampling;
use proto::span::Micros;
use proto::to_dispatcher::{
    End, Hello, Logprobs, ModelIdentity, Progress, PromptError, Ready, RequestError, Row,
    StepTokens, Token, Tokenised, TopLogprob,
};
use proto::to_worker::{ChatMessage, PromptInput};
use proto::{
    Attempt, FinishReason, Generate, Generation, InstanceId, RequestId, ToDispatcher, ToWorker,
};

const REQUEST: RequestId = RequestId(0x0102_0304_0506_0708);
const ATTEMPT: Attempt = Attempt(2);

pub(crate) fn to_worker() -> Vec<(&'static str, ToWorker)> {
    let tokenise = |input| ToWorker::Tokenise {
        request: REQUEST,
        input,
    };
    vec![
        (
            "hello",
            ToWorker::Hello {
                protocol: 1,
                build: "0.1.0 (abcdef0)".into(),
            },
        ),
        (
            "refused",
            ToWorker::Refused {
                reason: "token does not match".into(),
            },
        ),
        (
            "tokenise_chat",
            tokenise(PromptInput::Chat {
                messages: vec![
                    ChatMessage {
                        role: "system".into(),
                        content: "Be brief.".into(),
                        name: None,
                    },
                    ChatMessage {
                        role: "user".into(),
                        content: "Grüße, 世界".into(),
                        name: Some("ada".into()),
                    },
                ],
                add_generation_prompt: true,
            }),
        ),
        (
            "tokenise_text",
            tokenise(PromptInput::Text("once upon".into())),
        ),
        (
            "tokenise_ids",
            tokenise(PromptInput::Ids(vec![1, 2, u32::MAX])),
        ),
        ("generate", ToWorker::Generate(Box::new(generate()))),
        (
            "cancel",
            ToWorker::Cancel {
                request: REQUEST,
                attempt: ATTEMPT,
            },
        ),
        ("drain", ToWorker::Drain),
    ]
}

pub(crate) fn to_dispatcher() -> Vec<(&'static str, ToDispatcher)> {
    let tokenised = |outcome| ToDispatcher::Tokenised {
        request: REQUEST,
        outcome,
    };
    let failed = |error| ToDispatcher::Failed {
        request: REQUEST,
        attempt: ATTEMPT,
        error,
    };
    vec![
        (
            "hello",
            ToDispatcher::Hello(Hello {
                protocol: 1,
                build: "0.1.0 (abcdef0)".into(),
                instance: InstanceId(3),
                generation: Generation(17),
                pid: 4242,
                token: std::array::from_fn(|i| u8::try_from(i).unwrap()),
            }),
        ),
        ("loading", ToDispatcher::Loading { permille: 512 }),
        ("warming", ToDispatcher::Warming { done: 3, of: 9 }),
        ("ready", ToDispatcher::Ready(Box::new(ready()))),
        ("tokenised", tokenised(Ok(Tokenised { ids: vec![9, 8, 7] }))),
        (
            "tokenised_template",
            tokenised(Err(PromptError::Template("roles must alternate".into()))),
        ),
        (
            "tokenised_unknown_token",
            tokenised(Err(PromptError::UnknownToken(99_999))),
        ),
        ("tokenised_empty", tokenised(Err(PromptError::Empty))),
        ("tokenised_timed_out", tokenised(Err(PromptError::TimedOut))),
        ("tokenised_busy", tokenised(Err(PromptError::Busy))),
        (
            "started",
            ToDispatcher::Started {
                request: REQUEST,
                attempt: ATTEMPT,
                cached_tokens: 40,
            },
        ),
        ("tokens", ToDispatcher::Tokens(step())),
        (
            "failed_rejected",
            failed(RequestError::Rejected("prompt is empty".into())),
        ),
        (
            "failed_engine",
            failed(RequestError::Engine("NaN in logits".into())),
        ),
        ("failed_no_slot", failed(RequestError::NoSlot)),
        ("failed_draining", failed(RequestError::Draining)),
        (
            "progress",
            ToDispatcher::Progress(Progress {
                pulse: 1000,
                steps: 900,
                live_slots: 4,
                longest_step: Micros(48_000),
            }),
        ),
        ("drained", ToDispatcher::Drained),
    ]
}

fn generate() -> Generate {
    Generate {
        request: REQUEST,
        attempt: ATTEMPT,
        prompt: vec![1, 15043, 29871],
        emitted: vec![3186],
        released_bytes: 5,
        max_tokens: 256,
        sampling: Sampling {
            temperature: 0.7,
            top_p: 0.95,
            top_k: 40,
            min_p: 0.05,
            repetition_penalty: 1.1,
            presence_penalty: 0.25,
            frequency_penalty: -0.5,
            logit_bias: vec![(5, -100.0), (6, 2.5)],
            seed: 0xfeed_beef,
        },
        stop: vec!["\n\n".into(), "END".into()],
        stop_ids: vec![2],
        ignore_eos: true,
        logprobs: Some(5),
        batch_invariant: false,
        cache_prompt: true,
    }
}

fn ready() -> Ready {
    Ready {
        engine: "llama".into(),
        model: ModelIdentity {
            name: "tiny".into(),
            hash: [0xab; 32],
        },
        device: "CPU (2 threads)".into(),
        slots: 4,
        context_tokens: 4096,
        vocabulary: 32_000,
        longest_token_bytes: 27,
        weight_bytes_per_step: 700_000_000,
        kv_bytes_per_token: 22_528,
        load: Micros(1_200_000),
        warm_up: Micros(800_000),
    }
}

fn step() -> StepTokens {
    let row = |request, tokens, end| Row {
        request: RequestId(request),
        attempt: Attempt(1),
        first_index: 7,
        tokens,
        tail: "a tail".into(),
        end,
    };
    let token = |text: &str, logprobs| Token {
        id: 42,
        text: text.into(),
        released_bytes: 31,
        logprobs,
    };
    let logprobs = Logprobs {
        chosen: -0.25,
        bytes: vec![0xe4, 0xb8],
        top: vec![TopLogprob {
            id: 42,
            bytes: vec![0xe4, 0xb8],
            logprob: -0.25,
        }],
    };
    StepTokens {
        step: 77,
        duration: Micros(12_345),
        batch: 5,
        prefill_tokens: 16,
        rows: vec![
            row(1, vec![token(" a", None), token("", None)], None),
            row(
                2,
                vec![token("界", Some(logprobs))],
                Some(End::Finished(FinishReason::Stop)),
            ),
            row(3, vec![], Some(End::Finished(FinishReason::Length))),
            row(4, vec![], Some(End::Cancelled)),
            row(
                5,
                vec![],
                Some(End::Failed(RequestError::Engine("NaN".into()))),
            ),
        ],
    }
}

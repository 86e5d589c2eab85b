//! Any message comes back as it went, through frames cut anywhere.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

use proptest::collection::vec;
use proptest::prelude::*;
use proto::codec::Message;
use proto::generate::Sampling;
use proto::span::Micros;
use proto::to_dispatcher::{
    End, Logprobs, Progress, PromptError, RequestError, Row, StepTokens, Token, Tokenised,
    TopLogprob,
};
use proto::to_worker::{ChatMessage, PromptInput};
use proto::{
    Attempt, Decoder, FinishReason, Generate, RequestId, ToDispatcher, ToWorker, decode,
    encode_into,
};

fn ids() -> impl Strategy<Value = Vec<u32>> {
    vec(any::<u32>(), 0..40)
}

fn sampling() -> impl Strategy<Value = Sampling> {
    (
        any::<[f32; 6]>(),
        any::<u32>(),
        vec(any::<(u32, f32)>(), 0..4),
        any::<u64>(),
    )
        .prop_map(|(floats, top_k, logit_bias, seed)| Sampling {
            temperature: floats[0],
            top_p: floats[1],
            top_k,
            min_p: floats[2],
            repetition_penalty: floats[3],
            presence_penalty: floats[4],
            frequency_penalty: floats[5],
            logit_bias,
            seed,
        })
}

fn generate() -> impl Strategy<Value = Generate> {
    (
        any::<(u64, u32, u64, u32)>(),
        (ids(), ids(), ids()),
        sampling(),
        vec(".{0,12}", 0..4),
        any::<(bool, bool, bool, Option<u32>)>(),
    )
        .prop_map(|(numbers, lists, sampling, stop, flags)| Generate {
            request: RequestId(numbers.0),
            attempt: Attempt(numbers.1),
            prompt: lists.0,
            emitted: lists.1,
            released_bytes: numbers.2,
            max_tokens: numbers.3,
            sampling,
            stop,
            stop_ids: lists.2,
            ignore_eos: flags.0,
            logprobs: flags.3,
            batch_invariant: flags.1,
            cache_prompt: flags.2,
        })
}

fn prompt() -> impl Strategy<Value = PromptInput> {
    let message =
        (".{0,8}", ".{0,60}", proptest::option::of(".{0,8}")).prop_map(|(role, content, name)| {
            ChatMessage {
                role,
                content,
                name,
            }
        });
    prop_oneof![
        (vec(message, 0..5), any::<bool>()).prop_map(|(messages, add_generation_prompt)| {
            PromptInput::Chat {
                messages,
                add_generation_prompt,
            }
        }),
        ".{0,200}".prop_map(PromptInput::Text),
        ids().prop_map(PromptInput::Ids),
    ]
}

fn to_worker() -> impl Strategy<Value = ToWorker> {
    prop_oneof![
        (any::<u32>(), ".{0,30}").prop_map(|(protocol, build)| ToWorker::Hello { protocol, build }),
        ".{0,60}".prop_map(|reason| ToWorker::Refused { reason }),
        (any::<u64>(), prompt()).prop_map(|(request, input)| ToWorker::Tokenise {
            request: RequestId(request),
            input,
        }),
        generate().prop_map(|generate| ToWorker::Generate(Box::new(generate))),
        any::<(u64, u32)>().prop_map(|(request, attempt)| ToWorker::Cancel {
            request: RequestId(request),
            attempt: Attempt(attempt),
        }),
        Just(ToWorker::Drain),
    ]
}

fn request_error() -> impl Strategy<Value = RequestError> {
    prop_oneof![
        ".{0,30}".prop_map(RequestError::Rejected),
        ".{0,30}".prop_map(RequestError::Engine),
        Just(RequestError::NoSlot),
        Just(RequestError::Draining),
    ]
}

fn token() -> impl Strategy<Value = Token> {
    let bytes = || vec(any::<u8>(), 0..6);
    let top = (any::<u32>(), bytes(), any::<f32>()).prop_map(|(id, bytes, logprob)| TopLogprob {
        id,
        bytes,
        logprob,
    });
    let logprobs = (any::<f32>(), bytes(), vec(top, 0..4))
        .prop_map(|(chosen, bytes, top)| Logprobs { chosen, bytes, top });
    (
        any::<(u32, u64)>(),
        ".{0,8}",
        proptest::option::weighted(0.2, logprobs),
    )
        .prop_map(|((id, released_bytes), text, logprobs)| Token {
            id,
            text,
            released_bytes,
            logprobs,
        })
}

fn row() -> impl Strategy<Value = Row> {
    let end = prop_oneof![
        Just(None),
        Just(Some(End::Finished(FinishReason::Stop))),
        Just(Some(End::Finished(FinishReason::Length))),
        Just(Some(End::Cancelled)),
        request_error().prop_map(|error| Some(End::Failed(error))),
    ];
    (any::<(u64, u32, u32)>(), vec(token(), 0..4), ".{0,8}", end).prop_map(
        |(numbers, tokens, tail, end)| Row {
            request: RequestId(numbers.0),
            attempt: Attempt(numbers.1),
            first_index: numbers.2,
            tokens,
            tail,
            end,
        },
    )
}

fn to_dispatcher() -> impl Strategy<Value = ToDispatcher> {
    let prompt_error = prop_oneof![
        ".{0,30}".prop_map(PromptError::Template),
        any::<u32>().prop_map(PromptError::UnknownToken),
        Just(PromptError::Empty),
        Just(PromptError::TimedOut),
        Just(PromptError::Busy),
    ];
    let outcome = prop_oneof![
        ids().prop_map(|ids| Ok(Tokenised { ids })),
        prompt_error.prop_map(Err),
    ];
    prop_oneof![
        any::<u32>().prop_map(|permille| ToDispatcher::Loading { permille }),
        any::<(u32, u32)>().prop_map(|(done, of)| ToDispatcher::Warming { done, of }),
        (any::<u64>(), outcome).prop_map(|(request, outcome)| ToDispatcher::Tokenised {
            request: RequestId(request),
            outcome,
        }),
        any::<(u64, u32, u32)>().prop_map(|(request, attempt, cached_tokens)| {
            ToDispatcher::Started {
                request: RequestId(request),
                attempt: Attempt(attempt),
                cached_tokens,
            }
        }),
        (any::<(u64, u64, u32, u32)>(), vec(row(), 0..8)).prop_map(|(numbers, rows)| {
            ToDispatcher::Tokens(StepTokens {
                step: numbers.0,
                duration: Micros(numbers.1),
                batch: numbers.2,
                prefill_tokens: numbers.3,
                rows,
            })
        }),
        (any::<(u64, u32)>(), request_error()).prop_map(|((request, attempt), error)| {
            ToDispatcher::Failed {
                request: RequestId(request),
                attempt: Attempt(attempt),
                error,
            }
        }),
        any::<(u64, u64, u32, u64)>().prop_map(|(pulse, steps, live_slots, longest)| {
            ToDispatcher::Progress(Progress {
                pulse,
                steps,
                live_slots,
                longest_step: Micros(longest),
            })
        }),
        Just(ToDispatcher::Drained),
    ]
}

fn through_frames<M: Message>(messages: &[M], cut: usize) -> Vec<M> {
    let mut stream = Vec::new();
    for message in messages {
        encode_into(message, &mut stream).unwrap();
    }
    let mut decoder = Decoder::new();
    let mut back = Vec::new();
    for read in stream.chunks(cut) {
        let mut rest = read;
        while !rest.is_empty() {
            let taken = decoder.push(rest);
            rest = &rest[taken..];
            while let Some(frame) = decoder.next_frame().unwrap() {
                back.push(decode(frame).unwrap());
            }
        }
    }
    assert_eq!(decoder.pending_bytes(), 0);
    back
}

proptest! {
    #[test]
    fn what_a_worker_hears_comes_back_as_it_went(
        messages in vec(to_worker(), 1..5),
        cut in 1usize..200,
    ) {
        prop_assert_eq!(through_frames(&messages, cut), messages);
    }

    #[test]
    fn what_a_worker_says_comes_back_as_it_went(
        messages in vec(to_dispatcher(), 1..5),
        cut in 1usize..200,
    ) {
        prop_assert_eq!(through_frames(&messages, cut), messages);
    }
}

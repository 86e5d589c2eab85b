//! Turns of a scripted engine: bounds of streams, slots, cancels, stops, drains.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proto::generate::{FinishReason, Sampling};
use proto::to_dispatcher::RequestError;
use proto::{Attempt, RequestId, TokenId};

use super::*;
use crate::batch::{Opening, StopFlag};
use crate::engine::scripted::{ScriptedEngine, ScriptedText};
use crate::engine::{Slot, SlotEnd, TextModel};

const FINISHED_LENGTH: Option<SlotEnd> = Some(SlotEnd::Finished(FinishReason::Length));
const FINISHED_STOP: Option<SlotEnd> = Some(SlotEnd::Finished(FinishReason::Stop));

fn turn(script: &str, slots: u32) -> Turn {
    let engine = ScriptedEngine::new(script.parse().unwrap(), slots, 64);
    Turn::new(Box::new(engine), Pulse::default())
}

fn asked(request: u64, prompt: &str, max_tokens: u32) -> Generate {
    Generate {
        request: RequestId(request),
        attempt: Attempt(1),
        prompt: ScriptedText.tokenise(prompt, true),
        emitted: Vec::new(),
        released_bytes: 0,
        max_tokens,
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_ids: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        batch_invariant: false,
        cache_prompt: true,
    }
}

fn open(turn: &mut Turn, generate: Generate) -> Event {
    turn.command(Command::Generate(Box::new(generate)))
        .unwrap()
        .unwrap()
}

fn seated(event: Event) -> (Slot, Box<Opening>) {
    match event {
        Event::Seated { slot, opening, .. } => (slot, opening),
        other => panic!("not seated: {other:?}"),
    }
}

fn refusal(event: Event) -> RequestError {
    match event {
        Event::Refused { error, .. } => error,
        other => panic!("not refused: {other:?}"),
    }
}

fn cancel(turn: &mut Turn, request: u64, attempt: u32) -> Option<Event> {
    let command = Command::Cancel {
        request: RequestId(request),
        attempt: Attempt(attempt),
    };
    turn.command(command).unwrap()
}

/// Steps until `slot` ends: its tokens and its end.
fn run(turn: &mut Turn, slot: Slot) -> (Vec<TokenId>, Option<SlotEnd>) {
    let mut tokens = Vec::new();
    for _ in 0..1000 {
        for emission in turn.step().unwrap().emissions {
            if emission.slot == slot {
                tokens.extend(emission.tokens);
                if emission.end.is_some() {
                    return (tokens, emission.end);
                }
            }
        }
    }
    panic!("slot {slot:?} never ends");
}

#[test]
fn the_last_token_allowed_carries_the_end_and_no_step_follows() {
    let mut turn = turn("", 1);
    let (slot, _) = seated(open(&mut turn, asked(1, "go", 3)));
    assert_eq!(run(&mut turn, slot).0.len(), 3);
    assert_eq!(turn.steps(), 3);
    assert!(!turn.has_work());
}

#[test]
fn tokens_of_a_burst_beyond_the_budget_are_cut() {
    let mut turn = turn("burst=4", 1);
    let mut generate = asked(1, "go", 6);
    generate.logprobs = Some(2);
    let (slot, _) = seated(open(&mut turn, generate));
    assert_eq!(turn.step().unwrap().emissions[0].tokens.len(), 4);
    let last = turn.step().unwrap().emissions.remove(0);
    assert_eq!((last.tokens.len(), last.logprobs.len()), (2, 2));
    assert_eq!((last.slot, last.end), (slot, FINISHED_LENGTH));
}

#[test]
fn a_stop_id_ends_the_stream_and_is_not_a_token_of_it() {
    let mut turn = turn("", 1);
    let (slot, _) = seated(open(&mut turn, asked(1, "go", 9)));
    let (tokens, _) = run(&mut turn, slot);
    let at = tokens.iter().position(|t| *t == tokens[5]).unwrap();
    let mut generate = asked(2, "go", 9);
    generate.stop_ids = vec![tokens[5]];
    let (slot, _) = seated(open(&mut turn, generate));
    assert_eq!(run(&mut turn, slot), (tokens[..at].to_vec(), FINISHED_STOP));
    assert!(!turn.has_work());
}

#[test]
fn an_end_token_ends_the_stream_unless_it_is_to_be_ignored() {
    let mut turn = turn("length=4", 1);
    let (slot, _) = seated(open(&mut turn, asked(1, "go", 9)));
    let (tokens, end) = run(&mut turn, slot);
    assert_eq!((tokens.len(), end), (4, FINISHED_STOP));
    let mut generate = asked(2, "go", 9);
    generate.ignore_eos = true;
    let (slot, _) = seated(open(&mut turn, generate));
    let (tokens, end) = run(&mut turn, slot);
    assert_eq!((tokens.len(), end), (9, FINISHED_LENGTH));
}

#[test]
fn a_full_context_ends_its_row_alone() {
    let mut turn = turn("", 2);
    let prompt = "x".repeat(60);
    let (long, _) = seated(open(&mut turn, asked(1, &prompt, 100)));
    seated(open(&mut turn, asked(2, "short", 50)));
    let (tokens, end) = run(&mut turn, long);
    // 60 bytes and the leading special token.
    assert_eq!((tokens.len(), end), (64 - 61, FINISHED_LENGTH));
    assert_eq!(turn.live(), 1);
}

#[test]
fn what_cannot_be_seated_is_refused_with_the_reason() {
    let mut turn = turn("", 1);
    let too_long = asked(1, &"x".repeat(64), 1);
    let words = refusal(open(&mut turn, too_long));
    assert!(matches!(words, RequestError::Rejected(w) if w.contains("65 tokens")));
    let mut unknown = asked(2, "go", 1);
    unknown.prompt.push(1 << 20);
    assert!(matches!(
        refusal(open(&mut turn, unknown)),
        RequestError::Rejected(_)
    ));
    let mut empty = asked(3, "", 1);
    empty.prompt.clear();
    assert!(matches!(
        refusal(open(&mut turn, empty)),
        RequestError::Rejected(_)
    ));
    seated(open(&mut turn, asked(4, "go", 9)));
    assert_eq!(
        refusal(open(&mut turn, asked(5, "go", 9))),
        RequestError::NoSlot
    );
    turn.command(Command::Drain).unwrap();
    assert_eq!(
        refusal(open(&mut turn, asked(6, "go", 9))),
        RequestError::Draining
    );
    assert_eq!(turn.live(), 1, "a refusal costs nobody a slot");
}

#[test]
fn a_resume_with_no_tokens_left_is_complete_without_a_slot() {
    let mut turn = turn("", 1);
    let mut spent = asked(1, "go", 2);
    spent.emitted = vec![65, 66];
    let mut full = asked(2, "go", 1000);
    full.emitted = vec![65; 64];
    for generate in [spent, full, asked(3, "go", 0)] {
        let event = open(&mut turn, generate);
        assert!(
            matches!(
                event,
                Event::Complete {
                    reason: FinishReason::Length,
                    ..
                }
            ),
            "{event:?}"
        );
    }
    assert_eq!(turn.live(), 0);
}

#[test]
fn a_slot_whose_stream_was_stopped_is_free_for_whoever_asks_next() {
    let mut turn = turn("", 1);
    let (_, opening) = seated(open(&mut turn, asked(1, "go", 50)));
    turn.step().unwrap();
    opening.stopped.set();
    seated(open(&mut turn, asked(2, "go", 50)));
    assert_eq!(turn.live(), 1);
}

#[test]
fn a_cancel_reaches_only_the_attempt_it_names_and_only_once() {
    let mut turn = turn("", 2);
    let (slot, _) = seated(open(&mut turn, asked(1, "go", 50)));
    assert!(cancel(&mut turn, 1, 2).is_none(), "another attempt");
    assert!(cancel(&mut turn, 2, 1).is_none(), "another request");
    assert!(matches!(cancel(&mut turn, 1, 1), Some(Event::Cancelled { slot: s }) if s == slot));
    assert!(cancel(&mut turn, 1, 1).is_none(), "it has ended");
    assert!(!turn.has_work());
}

#[test]
fn a_drain_is_over_when_the_last_slot_is_empty_and_is_said_once() {
    let mut turn = turn("", 2);
    let (slot, _) = seated(open(&mut turn, asked(1, "go", 5)));
    turn.command(Command::Drain).unwrap();
    assert!(turn.drained().is_none());
    run(&mut turn, slot);
    assert!(matches!(turn.drained(), Some(Event::Drained)));
    assert!(turn.drained().is_none());
}

#[test]
fn the_pulse_moves_with_every_step() {
    let pulse = Pulse::default();
    let engine = ScriptedEngine::new("".parse().unwrap(), 1, 64);
    let mut turn = Turn::new(Box::new(engine), pulse.clone());
    seated(open(&mut turn, asked(1, "go", 5)));
    let before = pulse.read();
    turn.step().unwrap();
    assert!(pulse.read() > before);
}

#[test]
fn a_prompt_seen_before_is_seated_where_its_prefix_is_cached() {
    let mut turn = turn("", 3);
    let mut slots = Vec::new();
    for (request, prompt) in [(1, "first words"), (2, "second words"), (3, "third words")] {
        let (slot, _) = seated(open(&mut turn, asked(request, prompt, 2)));
        slots.push(slot);
    }
    while turn.has_work() {
        turn.step().unwrap();
    }
    match open(&mut turn, asked(4, "second words and more", 2)) {
        Event::Seated {
            slot,
            cached_tokens,
            ..
        } => {
            assert_eq!(slot, slots[1]);
            assert!(cached_tokens > 5, "{cached_tokens}");
        }
        other => panic!("{other:?}"),
    }
}

/// What may happen between two steps.
#[derive(Clone, Debug)]
enum Act {
    Generate { prompt: u8, max_tokens: u32 },
    Cancel { which: prop::sample::Index },
    Stop { which: prop::sample::Index },
    Step,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        3 => (0..4_u8, 0..8_u32).prop_map(|(prompt, max_tokens)| Act::Generate { prompt, max_tokens }),
        1 => any::<prop::sample::Index>().prop_map(|which| Act::Cancel { which }),
        1 => any::<prop::sample::Index>().prop_map(|which| Act::Stop { which }),
        5 => Just(Act::Step),
    ]
}

/// A live stream as the test sees it.
struct Shadow {
    slot: Slot,
    prompt: u8,
    max_tokens: u32,
    tokens: Vec<TokenId>,
    stopped: StopFlag,
}

proptest! {
    #[test]
    fn slots_are_never_lost_and_no_stream_feels_the_others(
        acts in prop::collection::vec(act(), 0..80),
        burst in 1..4_u32,
    ) {
        let prompt = |which: u8| format!("prompt {which}");
        let script = format!("burst={burst},length=6");
        let alone: Vec<Vec<TokenId>> = (0..4)
            .map(|which| {
                let mut turn = turn(&script, 1);
                let (slot, _) = seated(open(&mut turn, asked(0, &prompt(which), 50)));
                run(&mut turn, slot).0
            })
            .collect();
        let mut turn = turn(&script, 3);
        let mut live: BTreeMap<u64, Shadow> = BTreeMap::new();
        for (act, request) in acts.into_iter().zip(1..) {
            match act {
                Act::Generate { prompt: which, max_tokens } => {
                    match open(&mut turn, asked(request, &prompt(which), max_tokens)) {
                        Event::Seated { slot, opening, .. } => {
                            prop_assert!(live.values().all(|other| other.slot != slot));
                            live.insert(request, Shadow {
                                slot,
                                prompt: which,
                                max_tokens,
                                tokens: Vec::new(),
                                stopped: opening.stopped,
                            });
                        }
                        Event::Complete { .. } => prop_assert_eq!(max_tokens, 0),
                        Event::Refused { error, .. } => {
                            prop_assert_eq!(error, RequestError::NoSlot);
                            prop_assert_eq!(live.len(), 3);
                        }
                        other => prop_assert!(false, "{:?}", other),
                    }
                }
                Act::Cancel { which } if !live.is_empty() => {
                    let request = *live.keys().nth(which.index(live.len())).unwrap();
                    prop_assert!(cancel(&mut turn, request, 1).is_some());
                    live.remove(&request);
                }
                Act::Stop { which } if !live.is_empty() => {
                    let request = *live.keys().nth(which.index(live.len())).unwrap();
                    live.remove(&request).unwrap().stopped.set();
                }
                Act::Cancel { .. } | Act::Stop { .. } => {}
                Act::Step => {
                    if !turn.has_work() {
                        continue;
                    }
                    let stepped = turn.step().unwrap();
                    prop_assert_eq!(stepped.emissions.len(), live.len(), "every live slot decodes");
                    for emission in stepped.emissions {
                        let (&request, shadow) = live
                            .iter_mut()
                            .find(|(_, shadow)| shadow.slot == emission.slot)
                            .unwrap();
                        shadow.tokens.extend(emission.tokens);
                        let expected = &alone[usize::from(shadow.prompt)];
                        prop_assert!(expected.starts_with(&shadow.tokens));
                        let count = u32::try_from(shadow.tokens.len()).unwrap();
                        prop_assert!(count <= shadow.max_tokens);
                        if emission.end == FINISHED_LENGTH {
                            prop_assert_eq!(count, shadow.max_tokens);
                        } else if emission.end == FINISHED_STOP {
                            prop_assert_eq!(&shadow.tokens, expected);
                        }
                        if emission.end.is_some() {
                            live.remove(&request);
                        }
                    }
                }
            }
            turn.has_work();
            prop_assert_eq!(usize::try_from(turn.live()).unwrap(), live.len());
        }
    }
}

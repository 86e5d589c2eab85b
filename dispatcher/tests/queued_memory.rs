//! What a waiting request costs in memory, beyond its prompt and its HTTP connection.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use dispatcher::gateway::Submission;
use dispatcher::ledger::Ledger;
use dispatcher::machine::event::{KeyId, Priority};
use dispatcher::machine::{Action, Dispatch, Event, Policy, Tick};
use dispatcher::relay;
use proto::to_worker::{ChatMessage, PromptInput};
use proto::{RequestId, Sampling};

/// Counts the bytes that this thread holds.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
}

fn count(change: isize) {
    // A thread that ends frees after its thread-locals are gone; nobody reads that count.
    let _ = LIVE.try_with(|live| live.set(live.get() + change));
}

#[expect(
    unsafe_code,
    reason = "an allocator can only be watched from an allocator, and its trait is unsafe"
)]
// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: `pointer` came from `alloc` above with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const REQUESTS: u64 = 10_000;
const PROMPT_BYTES: usize = 400;
const BOUND_BYTES: isize = 4096;

fn submission(index: u64) -> Submission {
    Submission {
        prompt: PromptInput::Chat {
            messages: vec![ChatMessage {
                role: "user".into(),
                content: format!("{index:0>width$}", width = PROMPT_BYTES),
                name: None,
            }],
            add_generation_prompt: true,
        },
        max_tokens: Some(128),
        sampling: Sampling::default(),
        stop: Vec::new(),
        stop_ids: Vec::new(),
        ignore_eos: false,
        logprobs: None,
        batch_invariant: false,
        cache_prompt: true,
        return_token_ids: false,
        key: KeyId(index % 50),
        priority: Priority::Normal,
        deadline: None,
    }
}

#[test]
fn a_queued_request_takes_less_than_4_kib_beyond_its_prompt() {
    let policy = Policy {
        // Twice as many, because a key may hold no more than is still free.
        queue_entries_max: u32::try_from(2 * REQUESTS).unwrap(),
        ..Policy::default()
    };
    let mut machine = Dispatch::new(policy, 1, Tick::ZERO);
    while machine.poll_action().is_some() {}
    let mut ledger = Ledger::new([7; 32]);
    let mut receivers = Vec::with_capacity(usize::try_from(REQUESTS).unwrap());
    let before = LIVE.get();
    for index in 0..REQUESTS {
        let now = Tick::from_micros(index);
        let (sender, receiver) = relay::channel(now);
        receivers.push(receiver);
        let arrival = ledger.admit(RequestId(index), Box::new(submission(index)), sender);
        machine.handle(Event::Arrived(Box::new(arrival)), now);
        while let Some(action) = machine.poll_action() {
            assert!(
                !matches!(action, Action::End { .. }),
                "request {index} was turned away"
            );
        }
    }
    let each = (LIVE.get() - before) / isize::try_from(REQUESTS).unwrap();
    let beyond = each - isize::try_from(PROMPT_BYTES).unwrap();
    println!("{each} bytes a queued request, {beyond} of them beyond its prompt");
    assert!(beyond > 0, "nothing was counted");
    assert!(beyond < BOUND_BYTES, "{beyond} bytes beyond the prompt");
}

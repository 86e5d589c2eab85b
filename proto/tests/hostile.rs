//! Bytes from a peer that is broken or hostile: an error each, no panic, no memory over the cap.

#![expect(
    clippy::unwrap_used,
    reason = "a test that panics is a test that fails"
)]

mod example;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use proptest::prelude::*;
use proto::codec::Message;
use proto::frame::PREFIX_BYTES;
use proto::{Decoder, FRAME_BYTES_MAX, ProtoError, ToDispatcher, ToWorker, decode, encode};

/// Sequences inside sequences in one message: rows, tokens, likeliest tokens, their bytes. Each may
/// reserve the cap before it finds that its elements are not there.
const NESTING: usize = 4;

/// Counts the bytes that this thread holds, and the largest single request.
struct Counting;

thread_local! {
    static LIVE: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn count(change: isize, request: usize) {
    // A thread that ends frees after its thread-locals are gone; nobody reads those counts.
    let _ = LIVE.try_with(|live| {
        live.set(live.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(live.get())));
        let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(request)));
    });
}

#[expect(
    unsafe_code,
    reason = "an allocator can only be watched from an allocator, and its trait is unsafe"
)]
// SAFETY: every call goes to the system's allocator with the arguments it came with.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed(), layout.size());
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed(), 0);
        // SAFETY: `pointer` came from `alloc` above with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Peak bytes held and the largest single request while `work` ran.
fn watched<T>(work: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = LIVE.get();
    PEAK.set(before);
    LARGEST.set(0);
    let result = work();
    let peak = usize::try_from(PEAK.get() - before).unwrap_or(0);
    (result, peak, LARGEST.get())
}

/// Feeds a stream as a link does, in reads of at most 64 KiB, and decodes what comes out.
fn drink<M: Message>(stream: &[u8]) -> Result<usize, ProtoError> {
    let mut decoder = Decoder::new();
    let mut messages = 0;
    for read in stream.chunks(64 << 10) {
        let mut rest = read;
        while !rest.is_empty() {
            let taken = decoder.push(rest);
            rest = &rest[taken..];
            while let Some(frame) = decoder.next_frame()? {
                decode::<M>(frame)?;
                messages += 1;
            }
        }
    }
    Ok(messages)
}

fn check_memory(stream: &[u8]) {
    for (_, peak, largest) in [
        watched(|| drink::<ToDispatcher>(stream)),
        watched(|| drink::<ToWorker>(stream)),
    ] {
        let frame_cap = FRAME_BYTES_MAX + PREFIX_BYTES;
        assert!(largest <= frame_cap, "one request of {largest} bytes");
        assert!(
            peak <= (NESTING + 1) * frame_cap,
            "{peak} bytes held at once"
        );
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    let mut stream = u32::try_from(message.len()).unwrap().to_le_bytes().to_vec();
    stream.extend_from_slice(message);
    stream
}

fn messages() -> Vec<Vec<u8>> {
    let to_worker = example::to_worker();
    let to_dispatcher = example::to_dispatcher();
    to_worker
        .iter()
        .map(|(_, message)| encode(message).unwrap())
        .chain(
            to_dispatcher
                .iter()
                .map(|(_, message)| encode(message).unwrap()),
        )
        .collect()
}

#[test]
fn a_length_that_lies_allocates_no_more_than_the_cap() {
    // Every 8 bytes of every message become a length of all sizes: some of them are real lengths.
    for frame in messages() {
        for at in PREFIX_BYTES..frame.len().saturating_sub(8) {
            for lie in [u64::MAX, 1 << 40, 1 << 24, 1 << 20, 200_000, 100_000] {
                let mut stream = frame.clone();
                stream[at..at + 8].copy_from_slice(&lie.to_le_bytes());
                check_memory(&stream);
            }
        }
    }
}

#[test]
fn a_prefix_that_lies_allocates_next_to_nothing() {
    for announced in [u32::MAX, 1 << 31, 16 << 20, (16 << 20) + 1] {
        let stream = announced.to_le_bytes();
        let (_, peak, _) = watched(|| drink::<ToDispatcher>(&stream));
        assert!(peak <= 4 << 10, "{peak} bytes for a prefix of {announced}");
    }
}

fn check_cuts<M: Message>(messages: Vec<(&str, M)>) {
    for (name, message) in messages {
        let frame = encode(&message).unwrap();
        for end in PREFIX_BYTES..frame.len() {
            let cut = decode::<M>(&frame[PREFIX_BYTES..end]);
            assert!(cut.is_err(), "{name} of {end} bytes");
        }
    }
}

#[test]
fn every_message_cut_short_is_an_error_and_not_a_panic() {
    check_cuts(example::to_worker());
    check_cuts(example::to_dispatcher());
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic_and_never_pass_the_cap(
        bytes in proptest::collection::vec(any::<u8>(), 0..4096),
    ) {
        check_memory(&bytes);
        check_memory(&framed(&bytes));
    }

    #[test]
    fn a_valid_variant_with_arbitrary_bytes_never_panics_and_never_passes_the_cap(
        variant in 0u32..12,
        bytes in proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 0..512),
    ) {
        let mut message = variant.to_le_bytes().to_vec();
        message.extend(bytes);
        check_memory(&framed(&message));
    }

    #[test]
    fn flipped_bytes_never_panic_and_what_still_decodes_encodes_back(
        which in any::<prop::sample::Index>(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let frames = messages();
        let mut frame = which.get(&frames).clone();
        let body = PREFIX_BYTES..frame.len();
        for (at, value) in flips {
            frame[body.start + at.index(body.len())] = value;
        }
        check_memory(&frame);
        let body = &frame[PREFIX_BYTES..];
        if let Ok(message) = decode::<ToDispatcher>(body) {
            prop_assert_eq!(&encode(&message).unwrap()[PREFIX_BYTES..], body);
        }
        if let Ok(message) = decode::<ToWorker>(body) {
            prop_assert_eq!(&encode(&message).unwrap()[PREFIX_BYTES..], body);
        }
    }
}

//! Arbitrary bytes, cut arbitrarily, through the frame decoder and both message decoders.
//!
//! `cargo +nightly fuzz run frames -- -max_len=65536`, from `proto/`. The first byte says how the
//! rest is cut into reads.

#![no_main]

use libfuzzer_sys::fuzz_target;
use proto::frame::PREFIX_BYTES;
use proto::{Decoder, ToDispatcher, ToWorker, decode, encode};

fuzz_target!(|data: &[u8]| {
    let Some((cut, stream)) = data.split_first() else {
        return;
    };
    let mut decoder = Decoder::new();
    for read in stream.chunks(usize::from(*cut) + 1) {
        let mut rest = read;
        while !rest.is_empty() {
            let taken = decoder.push(rest);
            assert!(taken > 0, "a decoder without a whole frame takes bytes");
            rest = &rest[taken..];
            loop {
                match decoder.next_frame() {
                    Ok(Some(frame)) => check(frame),
                    Ok(None) => break,
                    Err(_) => return,
                }
            }
        }
    }
    // The bytes as one message too: a fuzzer is slow to find length prefixes.
    check(stream);
});

fn check(frame: &[u8]) {
    if let Ok(message) = decode::<ToDispatcher>(frame) {
        let again = encode(&message).expect("what was decoded fits in a frame");
        assert_eq!(&again[PREFIX_BYTES..], frame, "one message, one encoding");
    }
    if let Ok(message) = decode::<ToWorker>(frame) {
        let again = encode(&message).expect("what was decoded fits in a frame");
        assert_eq!(&again[PREFIX_BYTES..], frame, "one message, one encoding");
    }
}

//! Stop strings: finds the first in a stream of text and lets no part of it through.

/// Watches one stream for its stop strings.
///
/// The match is the one that is completed first; among those that the same byte completes, the
/// longest. It depends on the text alone and not on how the text is cut.
#[derive(Clone, Debug, Default)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    /// The longest end of the text so far with which a stop string begins.
    held: String,
}

#[derive(Clone, Debug)]
struct Pattern {
    bytes: Vec<u8>,
    /// For each matched length, the length to go on with when the next byte differs
    /// (Knuth, Morris, Pratt).
    fallback: Vec<usize>,
    matched: usize,
}

impl Pattern {
    fn new(text: &str) -> Self {
        let bytes = text.as_bytes().to_vec();
        let mut fallback = vec![0; bytes.len()];
        let mut length = 0;
        for at in 1..bytes.len() {
            while length > 0 && bytes[at] != bytes[length] {
                length = fallback[length - 1];
            }
            if bytes[at] == bytes[length] {
                length += 1;
            }
            fallback[at] = length;
        }
        Self {
            bytes,
            fallback,
            matched: 0,
        }
    }

    /// Whether `byte` completes the pattern.
    fn step(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        if self.bytes[self.matched] == byte {
            self.matched += 1;
        }
        self.matched == self.bytes.len()
    }
}

impl StopMatcher {
    /// Empty stop strings are ignored: they would match before the first character.
    #[must_use]
    pub fn new(stop: &[String]) -> Self {
        Self {
            patterns: stop
                .iter()
                .filter(|text| !text.is_empty())
                .map(|text| Pattern::new(text))
                .collect(),
            held: String::new(),
        }
    }

    /// Takes `text` and appends to `out` what no stop string can begin with. `true`: a stop string
    /// is complete; `out` has all that stood before it, the stream is over, and what follows it in
    /// `text` is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.patterns.is_empty() {
            out.push_str(text);
            return false;
        }
        for (at, byte) in text.bytes().enumerate() {
            let mut longest = 0;
            for pattern in &mut self.patterns {
                if pattern.step(byte) {
                    longest = longest.max(pattern.bytes.len());
                }
            }
            if longest > 0 {
                self.held.push_str(&text[..=at]);
                out.push_str(&self.held[..self.held.len() - longest]);
                self.reset();
                return true;
            }
        }
        let kept = self.patterns.iter().map(|p| p.matched).max().unwrap_or(0);
        self.held.push_str(text);
        // A stop string begins where a character does, so this is no cut through one.
        let released = self.held.len() - kept;
        out.push_str(&self.held[..released]);
        self.held.drain(..released);
        false
    }

    /// The stream ended without a stop string: what was held back is text like any other.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.reset();
    }

    fn reset(&mut self) {
        self.held.clear();
        for pattern in &mut self.patterns {
            pattern.matched = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matcher(stop: &[&str]) -> StopMatcher {
        StopMatcher::new(&stop.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    /// The text before the first stop string, and whether there was one: character by character.
    fn expected(text: &str, stop: &[String]) -> (String, bool) {
        for (at, c) in text.char_indices() {
            let seen = &text[..at + c.len_utf8()];
            let longest = stop
                .iter()
                .filter(|s| !s.is_empty() && seen.ends_with(s.as_str()))
                .map(String::len)
                .max();
            if let Some(length) = longest {
                return (seen[..seen.len() - length].to_string(), true);
            }
        }
        (text.to_string(), false)
    }

    #[test]
    fn a_stop_string_over_three_tokens_is_found_and_never_shown() {
        let mut matcher = matcher(&["<|stop|>"]);
        let mut out = String::new();
        assert!(!matcher.push("hello <", &mut out));
        assert_eq!(out, "hello ");
        assert!(!matcher.push("|sto", &mut out));
        assert!(matcher.push("p|> more", &mut out));
        assert_eq!(out, "hello ");
    }

    #[test]
    fn what_was_held_back_comes_when_it_turns_out_to_be_no_stop() {
        let mut matcher = matcher(&["\n\nUser:"]);
        let mut out = String::new();
        assert!(!matcher.push("one\n\nUs", &mut out));
        assert_eq!(out, "one");
        assert!(!matcher.push("ual", &mut out));
        assert_eq!(out, "one\n\nUsual");
    }

    #[test]
    fn a_half_stop_string_at_the_end_is_text() {
        let mut matcher = matcher(&["END"]);
        let mut out = String::new();
        assert!(!matcher.push("the EN", &mut out));
        matcher.finish(&mut out);
        assert_eq!(out, "the EN");
    }

    #[test]
    fn a_stop_string_that_overlaps_itself_is_found_late() {
        let mut matcher = matcher(&["aab"]);
        let mut out = String::new();
        assert!(!matcher.push("aaaa", &mut out));
        assert_eq!(out, "aa");
        assert!(matcher.push("b", &mut out));
        assert_eq!(out, "aa");
    }

    #[test]
    fn of_two_stop_strings_the_one_that_is_complete_first_counts() {
        let mut matcher = matcher(&["abcd", "bc", "c"]);
        let mut out = String::new();
        assert!(matcher.push("xabcd", &mut out));
        assert_eq!(out, "xa");
    }

    #[test]
    fn an_empty_stop_string_stops_nothing() {
        let mut matcher = matcher(&[""]);
        let mut out = String::new();
        assert!(!matcher.push("text", &mut out));
        assert_eq!(out, "text");
    }

    proptest! {
        #[test]
        fn a_match_depends_on_the_text_and_not_on_its_cuts(
            text in "[abé🦀]{0,40}",
            stop in prop::collection::vec("[abé🦀]{0,5}", 0..4),
            sizes in prop::collection::vec(1..4_usize, 0..48),
        ) {
            let (before, stops) = expected(&text, &stop);
            let mut matcher = StopMatcher::new(&stop);
            let mut out = String::new();
            let mut stopped = false;
            let characters: Vec<char> = text.chars().collect();
            let mut rest = &characters[..];
            for size in sizes.into_iter().chain([usize::MAX]) {
                let (part, after) = rest.split_at(size.min(rest.len()));
                rest = after;
                stopped = matcher.push(&part.iter().collect::<String>(), &mut out);
                prop_assert!(before.starts_with(&out), "{out:?} is no beginning of {before:?}");
                if stopped {
                    break;
                }
                // No more is held than what a stop string begins with.
                prop_assert!(matcher.held.is_empty() || stop.iter().any(|s| s.starts_with(&matcher.held)));
            }
            if !stopped {
                matcher.finish(&mut out);
            }
            prop_assert_eq!(stopped, stops);
            prop_assert_eq!(out, before);
        }
    }
}

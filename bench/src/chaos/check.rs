//! What an answer that was interrupted has too much, too little or different.

/// The pieces of text of one answer, in the order they came.
pub(crate) type Pieces = Vec<String>;

/// How an answer stands to the one that nobody interrupted.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Likeness {
    Equal,
    /// From token `at` on it goes on `tokens` earlier in the expected text.
    Duplicated {
        at: usize,
        tokens: usize,
    },
    /// At token `at`, `tokens` are left out.
    Missing {
        at: usize,
        tokens: usize,
    },
    /// From token `at` on it is another text.
    Differs {
        at: usize,
        expected: String,
        found: String,
    },
}

/// A repeat or a hole is looked for this far.
const REACH: usize = 4_096;

/// So many equal pieces, or all that are left, show that a text goes on elsewhere and does not just begin alike.
const RUN: usize = 4;

/// Compares a whole answer.
pub(crate) fn whole(expected: &[String], found: &[String]) -> Likeness {
    let at = common(expected, found);
    if at == expected.len() && at == found.len() || expected.concat() == found.concat() {
        return Likeness::Equal;
    }
    if at == found.len() {
        let tokens = expected.len() - at;
        return Likeness::Missing { at, tokens };
    }
    from(at, expected, found)
}

/// Compares an answer that was cut or failed: it must be the expected text's beginning.
pub(crate) fn beginning(expected: &[String], found: &[String]) -> Likeness {
    let at = common(expected, found);
    if at == found.len() || expected.concat().starts_with(&found.concat()) {
        return Likeness::Equal;
    }
    from(at, expected, found)
}

fn common(expected: &[String], found: &[String]) -> usize {
    expected
        .iter()
        .zip(found)
        .take_while(|(a, b)| a == b)
        .count()
}

fn from(at: usize, expected: &[String], found: &[String]) -> Likeness {
    let rest = &found[at..];
    let goes_on = |from: usize| {
        let there = &expected[from..];
        let run = common(there, rest);
        run > 0 && run >= RUN.min(rest.len()).min(there.len())
    };
    for tokens in 1..=REACH {
        if tokens <= at && goes_on(at - tokens) {
            return Likeness::Duplicated { at, tokens };
        }
        if at + tokens < expected.len() && goes_on(at + tokens) {
            return Likeness::Missing { at, tokens };
        }
    }
    if at == expected.len() {
        return Likeness::Duplicated {
            at,
            tokens: rest.len(),
        };
    }
    let few = |pieces: &[String]| pieces.iter().take(6).map(String::as_str).collect();
    Likeness::Differs {
        at,
        expected: few(&expected[at..]),
        found: few(rest),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(tokens: impl IntoIterator<Item = u32>) -> Pieces {
        tokens
            .into_iter()
            .map(|token| format!(" t{token}"))
            .collect()
    }

    #[test]
    fn repeats_holes_and_other_texts_are_told_apart() {
        let expected = text(0..50);
        let at = 20;
        let found = text((0..20).chain(17..50));
        assert_eq!(
            whole(&expected, &found),
            Likeness::Duplicated { at, tokens: 3 }
        );
        let found = text((0..20).chain(21..50));
        assert_eq!(
            whole(&expected, &found),
            Likeness::Missing { at, tokens: 1 }
        );
        assert_eq!(
            whole(&expected, &text(0..45)),
            Likeness::Missing { at: 45, tokens: 5 }
        );
        assert_eq!(
            whole(&expected, &text(0..52)),
            Likeness::Duplicated { at: 50, tokens: 2 }
        );
        let found = text((0..20).chain(100..130));
        assert!(matches!(
            whole(&expected, &found),
            Likeness::Differs { at: 20, .. }
        ));
        assert_eq!(whole(&expected, &expected), Likeness::Equal);
    }

    #[test]
    fn a_cut_answer_is_held_to_the_beginning() {
        let expected = text(0..50);
        assert_eq!(beginning(&expected, &text(0..9)), Likeness::Equal);
        assert_eq!(beginning(&expected, &[]), Likeness::Equal);
        let found = text((0..5).chain(4..8));
        assert_eq!(
            beginning(&expected, &found),
            Likeness::Duplicated { at: 5, tokens: 1 }
        );
    }

    #[test]
    fn the_same_text_in_other_pieces_is_equal() {
        let expected = vec!["a".to_owned(), "bc".to_owned()];
        let found = vec!["ab".to_owned(), "c".to_owned()];
        assert_eq!(whole(&expected, &found), Likeness::Equal);
    }
}

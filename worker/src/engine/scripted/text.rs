//! The scripted engine's text side: a small reversible vocabulary of specials, words and bytes.

use proto::TokenId;

use crate::engine::{ChatTemplateSource, TextModel};

/// Token 0..=255 is that byte; specials follow, then words.
const BYTES: u32 = 256;

/// Specials are spelt out by the chat template and have no text in the output.
const SPECIALS: [&str; 5] = ["<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>"];

/// Words of one token each, most with their leading space; some of several bytes a character.
const WORDS: [&str; 59] = [
    " the",
    " a",
    " of",
    " and",
    " to",
    " in",
    " is",
    " it",
    " on",
    " as",
    " at",
    " by",
    " we",
    " so",
    " no",
    " one",
    " two",
    " red",
    " sun",
    " sea",
    " sky",
    " day",
    " old",
    " new",
    " far",
    " near",
    " stone",
    " river",
    " light",
    " engine",
    " worker",
    " queue",
    " token",
    " batch",
    " slot",
    " memory",
    " latency",
    " measures",
    " waits",
    " runs",
    " sends",
    " reads",
    " holds",
    " naïve",
    " café",
    " über",
    " señor",
    " déjà",
    " 東京",
    " 日本語",
    " 한국",
    " 🦀",
    " 👩‍🚀",
    ",",
    ".",
    ":",
    "\n",
    "repeat",
    " repeat",
];

pub(super) const BOS: TokenId = BYTES;
pub(super) const EOS: TokenId = BYTES + 1;
const FIRST_WORD: u32 = 256 + 5;
const VOCABULARY: u32 = FIRST_WORD + 59;

/// The first token that is a word, and how many words there are.
pub(super) const WORD_TOKENS: (TokenId, u32) = (FIRST_WORD, 59);

const TEMPLATE: &str = "{{ bos_token }}\
    {% for message in messages %}\
    {% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}\
    <|{{ 'assistant' if message.role == 'assistant' else 'user' }}|>{{ message.content }}<|end|>\
    {% endfor %}\
    {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Turns text to ids by the longest word at each place, else byte by byte.
#[derive(Clone, Copy, Debug, Default)]
pub struct ScriptedText;

/// The special's or word's id and bytes with which `text` begins: the longest.
fn longest_entry(text: &[u8]) -> Option<(TokenId, usize)> {
    let specials = SPECIALS.iter().zip(BYTES..);
    let words = WORDS.iter().zip(FIRST_WORD..);
    specials
        .chain(words)
        .filter(|(entry, _)| text.starts_with(entry.as_bytes()))
        .map(|(entry, id)| (id, entry.len()))
        .max_by_key(|(_, length)| *length)
}

fn word(token: TokenId) -> Option<&'static str> {
    let at = usize::try_from(token.checked_sub(FIRST_WORD)?).ok()?;
    WORDS.get(at).copied()
}

impl ScriptedText {
    /// A special token: text is cut there when a prompt is read back.
    pub(super) fn is_special(token: TokenId) -> bool {
        (BYTES..FIRST_WORD).contains(&token)
    }
}

impl TextModel for ScriptedText {
    fn tokenise(&self, text: &str, add_special: bool) -> Vec<TokenId> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        if add_special && !text.starts_with(SPECIALS[0]) {
            ids.push(BOS);
        }
        let mut rest = text.as_bytes();
        while let [first, ..] = rest {
            let (id, length) = longest_entry(rest).unwrap_or((TokenId::from(*first), 1));
            ids.push(id);
            rest = &rest[length..];
        }
        ids
    }

    fn piece(&self, token: TokenId, into: &mut Vec<u8>) {
        if let Ok(byte) = u8::try_from(token) {
            into.push(byte);
        } else if let Some(word) = word(token) {
            into.extend_from_slice(word.as_bytes());
        }
    }

    fn is_end(&self, token: TokenId) -> bool {
        token == EOS
    }

    fn vocabulary(&self) -> u32 {
        VOCABULARY
    }

    fn longest_token_bytes(&self) -> u32 {
        let longest = SPECIALS.iter().chain(&WORDS).map(|entry| entry.len()).max();
        u32::try_from(longest.unwrap_or(1)).unwrap_or(u32::MAX)
    }

    fn chat_template(&self) -> Option<ChatTemplateSource> {
        Some(ChatTemplateSource {
            source: TEMPLATE.to_string(),
            bos_token: SPECIALS[0].to_string(),
            eos_token: SPECIALS[1].to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text_of(ids: &[TokenId]) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            ScriptedText.piece(id, &mut bytes);
        }
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn specials_spelt_out_are_one_token_without_text() {
        let ids = ScriptedText.tokenise("<bos><|user|>hi<|end|>", true);
        assert_eq!(ids, [256, 258, u32::from(b'h'), u32::from(b'i'), 260]);
        assert_eq!(text_of(&ids), "hi");
    }

    #[test]
    fn a_word_of_the_vocabulary_is_one_token() {
        assert_eq!(ScriptedText.tokenise(" 日本語", false).len(), 1);
        assert_eq!(
            ScriptedText.tokenise("日", false).len(),
            3,
            "bytes split characters"
        );
    }

    proptest! {
        #[test]
        fn text_survives_the_way_to_ids_and_back(text in "( the| 🦀|repeat|[a-zé日]){0,20}") {
            let ids = ScriptedText.tokenise(&text, false);
            prop_assert!(ids.iter().all(|&id| id < ScriptedText.vocabulary()));
            prop_assert_eq!(text_of(&ids), text);
        }
    }
}

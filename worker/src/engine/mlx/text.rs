//! The text side of a model folder: its tokenizer, its end tokens and its chat template.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use proto::TokenId;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::config::token_ids;
use super::{permanent, read_text};
use crate::engine::{ChatTemplateSource, LoadError, TextModel};
use crate::prompt::ChatTemplate;

/// A vocabulary of 256k entries with its merges takes some 40 MB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
/// Templates in use have up to 20 kB.
const TEMPLATE_BYTES_MAX: u64 = 1 << 20;
const SETTINGS_BYTES_MAX: u64 = 64 << 20;

/// How the vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spelling {
    /// Every byte is a printable character (GPT-2's table).
    ByteLevel,
    /// Text with `▁` for a space, and `<0xNN>` for a byte that is no character.
    Metaspace,
}

/// A Hugging Face tokenizer and what belongs to it.
#[derive(Debug)]
pub struct FolderText {
    tokenizer: Tokenizer,
    /// The bytes of every id.
    pieces: Vec<Box<[u8]>>,
    ends: BTreeSet<TokenId>,
    longest: u32,
    template: Option<ChatTemplateSource>,
}

impl FolderText {
    /// Reads a model folder's text files. `vocabulary` is the number of the model's logits, and
    /// `ends` what `config.json` names as end tokens.
    ///
    /// # Errors
    /// Permanent, naming the file: it is missing or malformed, has ids that the model has not, or
    /// the chat template is no template.
    pub fn load(folder: &Path, vocabulary: u32, ends: &[TokenId]) -> Result<Self, LoadError> {
        let source = read_text(&folder.join("tokenizer.json"), TOKENIZER_BYTES_MAX)?;
        let spelling = spelling(&source)?;
        let mut tokenizer = Tokenizer::from_bytes(source.as_bytes())
            .map_err(|e| permanent(format!("tokenizer.json: {e}")))?;
        // A file may carry the batch settings of its training; a prompt is never cut or padded.
        tokenizer
            .with_truncation(None)
            .map_err(|e| permanent(format!("tokenizer.json: {e}")))?;
        tokenizer.with_padding(None);
        let pieces = pieces(&tokenizer, spelling, vocabulary)?;
        let longest = pieces.iter().map(|p| p.len()).max().unwrap_or(0);

        let settings = optional_json(&folder.join("tokenizer_config.json"))?;
        let generation = optional_json(&folder.join("generation_config.json"))?;
        let named = |key: &str| token_text(settings.get(key));
        let mut all: BTreeSet<TokenId> = ends.iter().copied().collect();
        all.extend(token_ids(generation.get("eos_token_id")));
        all.extend(tokenizer.token_to_id(&named("eos_token")));
        all.retain(|&id| id < vocabulary);

        let template = template(folder, &settings)?.map(|source| ChatTemplateSource {
            source,
            bos_token: named("bos_token"),
            eos_token: named("eos_token"),
        });
        if let Some(source) = &template {
            ChatTemplate::new(Some(source))
                .map_err(|e| permanent(format!("the chat template is none: {e:?}")))?;
        }
        Ok(Self {
            tokenizer,
            pieces,
            ends: all,
            longest: u32::try_from(longest).unwrap_or(u32::MAX),
            template,
        })
    }
}

impl TextModel for FolderText {
    fn tokenise(&self, text: &str, add_special: bool) -> Vec<TokenId> {
        // The only failures are those of a pre-tokenizer's pattern on text that it cannot split;
        // no ids is then what the caller refuses as an empty prompt.
        self.tokenizer
            .encode_fast(text, add_special)
            .map(|encoding| encoding.get_ids().to_vec())
            .unwrap_or_default()
    }

    fn piece(&self, token: TokenId, into: &mut Vec<u8>) {
        if let Some(piece) = self.pieces.get(token as usize) {
            into.extend_from_slice(piece);
        }
    }

    fn is_end(&self, token: TokenId) -> bool {
        self.ends.contains(&token)
    }

    fn vocabulary(&self) -> u32 {
        u32::try_from(self.pieces.len()).unwrap_or(u32::MAX)
    }

    fn longest_token_bytes(&self) -> u32 {
        self.longest
    }

    fn chat_template(&self) -> Option<ChatTemplateSource> {
        self.template.clone()
    }
}

/// Found in the decoder's description: only that says how the vocabulary is to be read.
fn spelling(source: &str) -> Result<Spelling, LoadError> {
    let value: Value = serde_json::from_str(source)
        .map_err(|e| permanent(format!("tokenizer.json is not JSON: {e}")))?;
    let decoder = value.get("decoder").unwrap_or(&Value::Null);
    let steps = match decoder.get("decoders").and_then(Value::as_array) {
        Some(steps) => steps.iter().collect(),
        None => vec![decoder],
    };
    let has = |kind: &str| {
        let kind_of = |step: &Value| step.get("type").and_then(Value::as_str) == Some(kind);
        steps.iter().any(|step| kind_of(step))
    };
    if has("ByteLevel") {
        Ok(Spelling::ByteLevel)
    } else if has("Metaspace") || has("ByteFallback") {
        Ok(Spelling::Metaspace)
    } else {
        Err(permanent(
            "tokenizer.json: its decoder is neither byte-level nor SentencePiece's",
        ))
    }
}

fn pieces(
    tokenizer: &Tokenizer,
    spelling: Spelling,
    vocabulary: u32,
) -> Result<Vec<Box<[u8]>>, LoadError> {
    let bytes = byte_table();
    let mut pieces = vec![Box::<[u8]>::default(); vocabulary as usize];
    let added = tokenizer.get_added_tokens_decoder();
    for (text, id) in tokenizer.get_vocab(true) {
        let Some(piece) = pieces.get_mut(id as usize) else {
            return Err(permanent(format!(
                "tokenizer.json: token {id} is beyond the model's vocabulary of {vocabulary}"
            )));
        };
        let spelt = match added.get(&id) {
            Some(token) if token.special => Vec::new(),
            Some(token) => token.content.clone().into_bytes(),
            None => spelt(&text, spelling, &bytes),
        };
        *piece = spelt.into_boxed_slice();
    }
    Ok(pieces)
}

fn spelt(text: &str, spelling: Spelling, bytes: &HashMap<char, u8>) -> Vec<u8> {
    match spelling {
        Spelling::ByteLevel => {
            // A character outside of the table stands for itself, as the reference decoder has it.
            let mut out = Vec::with_capacity(text.len());
            for c in text.chars() {
                match bytes.get(&c) {
                    Some(&byte) => out.push(byte),
                    None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                }
            }
            out
        }
        Spelling::Metaspace => {
            let hex = text
                .strip_prefix("<0x")
                .and_then(|rest| rest.strip_suffix('>'))
                .filter(|hex| hex.len() == 2);
            match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            }
        }
    }
}

/// GPT-2's table, backwards: printable bytes stand for themselves, the others for the characters
/// from U+0100 on.
fn byte_table() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100u32;
    let mut table = HashMap::with_capacity(256);
    for byte in 0..=u8::MAX {
        let code = if printable(byte) {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        if let Some(c) = char::from_u32(code) {
            table.insert(c, byte);
        }
    }
    table
}

/// A token named by its text, or by an object that holds it.
fn token_text(value: Option<&Value>) -> String {
    let text = match value {
        Some(Value::Object(map)) => map.get("content"),
        other => other,
    };
    text.and_then(Value::as_str).unwrap_or_default().to_owned()
}

fn template(folder: &Path, settings: &Value) -> Result<Option<String>, LoadError> {
    let file = folder.join("chat_template.jinja");
    if file.exists() {
        return read_text(&file, TEMPLATE_BYTES_MAX).map(Some);
    }
    Ok(match settings.get("chat_template") {
        Some(Value::String(source)) => Some(source.clone()),
        // Several under names; the one for plain chat is called `default`.
        Some(Value::Array(named)) => named
            .iter()
            .find(|t| t.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|t| t.get("template"))
            .and_then(Value::as_str)
            .map(str::to_owned),
        _ => None,
    })
}

/// `Null` where there is no such file.
fn optional_json(path: &Path) -> Result<Value, LoadError> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    let text = read_text(path, SETTINGS_BYTES_MAX)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    serde_json::from_str(&text).map_err(|e| permanent(format!("{name} is not JSON: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own_and_a_space_is_spelt_as_gpt_2_does() {
        let table = byte_table();
        assert_eq!(table.len(), 256);
        assert_eq!(table[&'Ġ'], b' ');
        assert_eq!(table[&'Ċ'], b'\n');
        assert_eq!(table[&'A'], b'A');
        assert_eq!(spelt("Ġä", Spelling::ByteLevel, &table), b" \xe4");
        assert_eq!(spelt("▁a▁b", Spelling::Metaspace, &table), b" a b");
        assert_eq!(spelt("<0xE4>", Spelling::Metaspace, &table), b"\xe4");
        assert_eq!(spelt("<0xzz>", Spelling::Metaspace, &table), b"<0xzz>");
    }
}

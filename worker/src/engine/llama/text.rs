//! The text side of a llama.cpp model: ids from text, bytes from ids, the chat template.

use llama_cpp_2::model::LlamaModel;
use llama_cpp_2::token::LlamaToken;
use proto::TokenId;

use crate::engine::{ChatTemplateSource, TextModel};

/// Vocabulary and template, read once: after the load no call but `tokenise` goes to llama.cpp.
#[derive(Debug)]
pub struct LlamaText {
    model: &'static LlamaModel,
    /// All pieces one after another.
    bytes: Vec<u8>,
    /// Where each piece ends.
    bounds: Vec<usize>,
    ends: Vec<bool>,
    longest: u32,
    /// The model's leading token, where it wants one.
    leading: Option<TokenId>,
    template: Option<ChatTemplateSource>,
}

impl LlamaText {
    pub(super) fn new(model: &'static LlamaModel) -> Self {
        let vocab = model.vocab();
        let mut text = Self {
            model,
            bytes: Vec::new(),
            bounds: Vec::new(),
            ends: Vec::new(),
            longest: 0,
            leading: None,
            template: None,
        };
        for token in vocab.tokens() {
            // Special tokens have bytes when they are spelt out, which bounds what fits in a prompt,
            // but none in what is sent.
            let spelt = vocab.token_to_piece(token, true, None).len();
            text.longest = text.longest.max(u32::try_from(spelt).unwrap_or(u32::MAX));
            vocab.token_to_piece_into(token, &mut text.bytes, false, None);
            text.bounds.push(text.bytes.len());
            text.ends.push(vocab.is_eog(token));
        }
        let known = |token: LlamaToken| id(token).filter(|&id| (id as usize) < text.bounds.len());
        let name = |token: LlamaToken| {
            known(token).map_or_else(String::new, |_| {
                String::from_utf8_lossy(&vocab.token_to_piece(token, true, None)).into_owned()
            })
        };
        let leading = if vocab.should_add_bos() {
            known(vocab.bos())
        } else {
            None
        };
        let template = model
            .chat_template(None)
            .ok()
            .and_then(|t| t.to_string().ok())
            .map(|source| ChatTemplateSource {
                source,
                bos_token: name(vocab.bos()),
                eos_token: name(vocab.eos()),
            });
        text.leading = leading;
        text.template = template;
        text
    }

    /// The model itself, for tests that speak to llama.cpp directly.
    #[must_use]
    pub fn model(&self) -> &'static LlamaModel {
        self.model
    }
}

/// llama.cpp says "none" by −1.
fn id(token: LlamaToken) -> Option<TokenId> {
    TokenId::try_from(token.0).ok()
}

impl TextModel for LlamaText {
    fn tokenise(&self, text: &str, add_special: bool) -> Vec<TokenId> {
        // llama.cpp counts in i32 and panics beyond; no frame carries as much.
        if i32::try_from(text.len()).is_err() {
            return Vec::new();
        }
        // Not llama.cpp's own `add_special`: it may also append an end token, after which nothing
        // can be continued.
        let found = self.model.vocab().tokenize(text.as_bytes(), false, true);
        let mut ids: Vec<TokenId> = found.into_iter().filter_map(id).collect();
        if let Some(leading) = self.leading.filter(|_| add_special)
            && ids.first() != Some(&leading)
        {
            // Templates spell it out themselves; twice would be wrong.
            ids.insert(0, leading);
        }
        ids
    }

    fn piece(&self, token: TokenId, into: &mut Vec<u8>) {
        let at = token as usize;
        let start = if at == 0 {
            Some(0)
        } else {
            self.bounds.get(at - 1).copied()
        };
        if let (Some(start), Some(&end)) = (start, self.bounds.get(at)) {
            into.extend_from_slice(&self.bytes[start..end]);
        }
    }

    fn is_end(&self, token: TokenId) -> bool {
        self.ends.get(token as usize).copied().unwrap_or(false)
    }

    fn vocabulary(&self) -> u32 {
        u32::try_from(self.bounds.len()).unwrap_or(u32::MAX)
    }

    fn longest_token_bytes(&self) -> u32 {
        self.longest
    }

    fn chat_template(&self) -> Option<ChatTemplateSource> {
        self.template.clone()
    }
}

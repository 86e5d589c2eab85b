//! The request body of the OpenAI API's two inference routes: fields, and what type each must have.
//!
//! Ranges and refusals are [`super::validate`]'s. Members that are not named here are ignored.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Messages in one request.
pub(crate) const MESSAGES_MAX: usize = 8192;
/// Entries of `logit_bias`.
pub(crate) const LOGIT_BIAS_MAX: usize = 1024;
/// Strings in `stop`, and ids in `stop_token_ids`.
pub(crate) const STOPS_MAX: usize = 16;

/// Every field that either route knows. `null` counts as absent.
#[derive(Debug, Default, Deserialize)]
#[serde(default, expecting = "a JSON object")]
pub(crate) struct Body {
    pub(crate) model: Option<String>,
    pub(crate) messages: Option<Messages>,
    pub(crate) prompt: Option<Prompt>,

    pub(crate) max_tokens: Option<Int>,
    pub(crate) max_completion_tokens: Option<Int>,
    pub(crate) n_predict: Option<Int>,
    #[serde(deserialize_with = "real")]
    pub(crate) temperature: Option<f64>,
    #[serde(deserialize_with = "real")]
    pub(crate) top_p: Option<f64>,
    pub(crate) top_k: Option<Int>,
    #[serde(deserialize_with = "real")]
    pub(crate) min_p: Option<f64>,
    #[serde(deserialize_with = "real")]
    pub(crate) repetition_penalty: Option<f64>,
    #[serde(deserialize_with = "real")]
    pub(crate) repeat_penalty: Option<f64>,
    #[serde(deserialize_with = "real")]
    pub(crate) presence_penalty: Option<f64>,
    #[serde(deserialize_with = "real")]
    pub(crate) frequency_penalty: Option<f64>,
    pub(crate) logit_bias: Option<LogitBias>,
    pub(crate) seed: Option<Int>,
    pub(crate) stop: Option<Stop>,
    pub(crate) stop_token_ids: Option<TokenIds>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) logprobs: Option<LogprobsField>,
    pub(crate) top_logprobs: Option<Int>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<Object<StreamOptions>>,
    pub(crate) batch_invariant: Option<bool>,
    pub(crate) cache_prompt: Option<bool>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) priority: Option<PriorityField>,
    #[serde(deserialize_with = "real")]
    pub(crate) timeout: Option<f64>,

    // Known and not implemented: refused unless they say what is done anyway.
    pub(crate) n: Option<Int>,
    pub(crate) best_of: Option<Int>,
    pub(crate) echo: Option<bool>,
    pub(crate) suffix: Option<String>,
    pub(crate) use_beam_search: Option<bool>,
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) min_tokens: Option<Int>,
    pub(crate) response_format: Option<Object<ResponseFormat>>,
    pub(crate) tools: Option<Shape>,
    pub(crate) tool_choice: Option<Shape>,
    pub(crate) functions: Option<Shape>,
    pub(crate) function_call: Option<Shape>,
    pub(crate) modalities: Option<Shape>,
    pub(crate) audio: Option<Shape>,
    pub(crate) prediction: Option<Shape>,
    pub(crate) web_search_options: Option<Shape>,
    pub(crate) prompt_logprobs: Option<Shape>,
    pub(crate) chat_template: Option<Shape>,
    pub(crate) chat_template_kwargs: Option<Shape>,
    pub(crate) grammar: Option<Shape>,
    pub(crate) json_schema: Option<Shape>,
    pub(crate) structured_outputs: Option<Shape>,
    pub(crate) guided_json: Option<Shape>,
    pub(crate) guided_regex: Option<Shape>,
    pub(crate) guided_choice: Option<Shape>,
    pub(crate) guided_grammar: Option<Shape>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct ResponseFormat {
    pub(crate) r#type: String,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Message {
    pub(crate) role: String,
    #[serde(default)]
    pub(crate) content: Content,
    #[serde(default)]
    pub(crate) name: Option<String>,
    #[serde(default)]
    pub(crate) tool_calls: Option<Shape>,
    #[serde(default)]
    pub(crate) function_call: Option<Shape>,
}

#[derive(Debug, Deserialize)]
struct Part {
    r#type: String,
    #[serde(default)]
    text: Option<String>,
}

/// A whole number; `16.0` is one too. Beyond 64 bits it is refused.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Int(pub(crate) i128);

#[derive(Debug, Default, PartialEq)]
pub(crate) enum Content {
    #[default]
    Null,
    Text(String),
}

#[derive(Debug)]
pub(crate) struct Messages(pub(crate) Vec<Message>);

/// A JSON object that becomes a `T`; a derived struct alone would also take an array, by position.
#[derive(Debug)]
pub(crate) struct Object<T>(pub(crate) T);

#[derive(Debug, PartialEq)]
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    /// An array of this many prompts; only one is served.
    Several(usize),
}

#[derive(Debug, PartialEq)]
pub(crate) struct Stop(pub(crate) Vec<String>);

#[derive(Debug, PartialEq)]
pub(crate) struct TokenIds(pub(crate) Vec<u32>);

#[derive(Debug, PartialEq)]
pub(crate) struct LogitBias(pub(crate) Vec<(u32, f64)>);

/// `true` of the chat route, a number of the completions route.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LogprobsField {
    Bool(bool),
    Int(i128),
}

/// A word, or vLLM's number: lower is earlier.
#[derive(Debug, PartialEq)]
pub(crate) enum PriorityField {
    Word(String),
    Number(i128),
}

/// Enough of a value to say whether it asks for anything.
#[derive(Debug, PartialEq)]
pub(crate) enum Shape {
    Bool(bool),
    Number(f64),
    Text(String),
    /// Its number of items, and the first one where that is a string.
    List(usize, Option<String>),
    Object(usize),
}

/// A JSON array of at most `max` items.
fn items<'de, D, T>(
    deserializer: D,
    expecting: &'static str,
    max: usize,
) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    struct Bounded<T>(&'static str, usize, PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for Bounded<T> {
        type Value = Vec<T>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
        fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Vec<T>, A::Error> {
            collect(seq, self.1)
        }
    }
    deserializer.deserialize_seq(Bounded(expecting, max, PhantomData))
}

fn collect<'de, A: SeqAccess<'de>, T: Deserialize<'de>>(
    mut seq: A,
    max: usize,
) -> Result<Vec<T>, A::Error> {
    let mut list = Vec::new();
    while let Some(item) = seq.next_element()? {
        if list.len() == max {
            return Err(A::Error::custom(format_args!("more than {max} items")));
        }
        list.push(item);
    }
    Ok(list)
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for V<T> {
            type Value = Object<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Object<T>, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(V(PhantomData))
    }
}

impl<'de> Deserialize<'de> for Messages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let list: Vec<Object<Message>> = items(deserializer, "an array of messages", MESSAGES_MAX)?;
        Ok(Self(
            list.into_iter().map(|Object(message)| message).collect(),
        ))
    }
}

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        items(deserializer, "an array of token ids", STOPS_MAX).map(Self)
    }
}

/// Implements `Deserialize` by `deserialize_any` and the visitor methods given.
macro_rules! any {
    ($type:ty, $expecting:literal, $($method:item)*) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct V;
                impl<'de> Visitor<'de> for V {
                    type Value = $type;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expecting)
                    }
                    $($method)*
                }
                deserializer.deserialize_any(V)
            }
        }
    };
}

/// A float without a fraction, in the range of 64-bit numbers.
fn whole(value: f64) -> Option<i128> {
    #[expect(clippy::cast_possible_truncation, reason = "the range was checked")]
    (value.fract() == 0.0 && value.abs() < 9.2e18).then_some(value as i128)
}

/// A number, with words for what is none.
struct Real(f64);

fn real<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    Ok(Option::<Real>::deserialize(deserializer)?.map(|Real(value)| value))
}

any! {Real, "a number",
    fn visit_u64<E: Error>(self, value: u64) -> Result<Real, E> { Ok(Real(value as f64)) }
    fn visit_i64<E: Error>(self, value: i64) -> Result<Real, E> { Ok(Real(value as f64)) }
    fn visit_f64<E: Error>(self, value: f64) -> Result<Real, E> { Ok(Real(value)) }
}

any! {Int, "a whole number",
    fn visit_u64<E: Error>(self, value: u64) -> Result<Int, E> { Ok(Int(value.into())) }
    fn visit_i64<E: Error>(self, value: i64) -> Result<Int, E> { Ok(Int(value.into())) }
    fn visit_f64<E: Error>(self, value: f64) -> Result<Int, E> {
        whole(value).map(Int).ok_or_else(|| {
            E::invalid_value(serde::de::Unexpected::Float(value), &self)
        })
    }
}

any! {LogprobsField, "a boolean or a whole number",
    fn visit_bool<E: Error>(self, value: bool) -> Result<LogprobsField, E> { Ok(LogprobsField::Bool(value)) }
    fn visit_u64<E: Error>(self, value: u64) -> Result<LogprobsField, E> { Ok(LogprobsField::Int(value.into())) }
    fn visit_i64<E: Error>(self, value: i64) -> Result<LogprobsField, E> { Ok(LogprobsField::Int(value.into())) }
}

any! {PriorityField, "`high`, `normal`, `low` or a whole number",
    fn visit_str<E: Error>(self, value: &str) -> Result<PriorityField, E> { Ok(PriorityField::Word(value.to_owned())) }
    fn visit_u64<E: Error>(self, value: u64) -> Result<PriorityField, E> { Ok(PriorityField::Number(value.into())) }
    fn visit_i64<E: Error>(self, value: i64) -> Result<PriorityField, E> { Ok(PriorityField::Number(value.into())) }
}

any! {Stop, "a string or an array of strings",
    fn visit_str<E: Error>(self, value: &str) -> Result<Stop, E> { Ok(Stop(vec![value.to_owned()])) }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Stop, A::Error> {
        collect(seq, STOPS_MAX).map(Stop)
    }
}

any! {LogitBias, "an object of token ids to numbers",
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<LogitBias, A::Error> {
        let mut list = Vec::new();
        while let Some(key) = map.next_key::<String>()? {
            let id = key.parse().map_err(|_| {
                A::Error::custom(format_args!("the key `{}` is not a token id", brief(&key)))
            })?;
            if list.len() == LOGIT_BIAS_MAX {
                return Err(A::Error::custom(format_args!("more than {LOGIT_BIAS_MAX} entries")));
            }
            let Real(bias) = map.next_value()?;
            list.push((id, bias));
        }
        Ok(LogitBias(list))
    }
}

any! {Content, "a string or an array of text parts",
    fn visit_unit<E: Error>(self) -> Result<Content, E> { Ok(Content::Null) }
    fn visit_str<E: Error>(self, value: &str) -> Result<Content, E> { Ok(Content::Text(value.to_owned())) }
    fn visit_string<E: Error>(self, value: String) -> Result<Content, E> { Ok(Content::Text(value)) }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
        let mut whole = String::new();
        let mut first = true;
        while let Some(Object(part)) = seq.next_element::<Object<Part>>()? {
            if part.r#type != "text" {
                return Err(A::Error::custom(format_args!(
                    "content parts of type `{}` are not supported, only `text` is", brief(&part.r#type)
                )));
            }
            let Some(text) = part.text else {
                return Err(A::Error::custom("a text part without `text`"));
            };
            if !first {
                whole.push('\n');
            }
            first = false;
            whole.push_str(&text);
        }
        Ok(Content::Text(whole))
    }
}

/// One item of a `prompt` array.
enum PromptItem {
    Id(u32),
    Text(String),
    Ids(Vec<u32>),
}

any! {PromptItem, "a token id, a string or an array of token ids",
    fn visit_u64<E: Error>(self, value: u64) -> Result<PromptItem, E> {
        u32::try_from(value).map(PromptItem::Id).map_err(|_| {
            E::invalid_value(serde::de::Unexpected::Unsigned(value), &self)
        })
    }
    fn visit_str<E: Error>(self, value: &str) -> Result<PromptItem, E> { Ok(PromptItem::Text(value.to_owned())) }
    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<PromptItem, A::Error> {
        collect(seq, usize::MAX).map(PromptItem::Ids)
    }
}

any! {Prompt, "a string or an array of token ids",
    fn visit_str<E: Error>(self, value: &str) -> Result<Prompt, E> { Ok(Prompt::Text(value.to_owned())) }
    fn visit_string<E: Error>(self, value: String) -> Result<Prompt, E> { Ok(Prompt::Text(value)) }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompt, A::Error> {
        let mut ids = Vec::new();
        let mut prompt = None;
        let mut prompts = 0;
        while let Some(item) = seq.next_element()? {
            let one = match item {
                PromptItem::Id(id) => { ids.push(id); continue; }
                PromptItem::Text(text) => Prompt::Text(text),
                PromptItem::Ids(ids) => Prompt::Ids(ids),
            };
            prompts += 1;
            prompt.get_or_insert(one);
        }
        match prompt {
            None => Ok(Prompt::Ids(ids)),
            Some(_) if !ids.is_empty() => Err(A::Error::custom("token ids and strings are mixed")),
            Some(one) if prompts == 1 => Ok(one),
            Some(_) => Ok(Prompt::Several(prompts)),
        }
    }
}

any! {Shape, "any value",
    fn visit_bool<E: Error>(self, value: bool) -> Result<Shape, E> { Ok(Shape::Bool(value)) }
    fn visit_u64<E: Error>(self, value: u64) -> Result<Shape, E> { Ok(Shape::Number(value as f64)) }
    fn visit_i64<E: Error>(self, value: i64) -> Result<Shape, E> { Ok(Shape::Number(value as f64)) }
    fn visit_f64<E: Error>(self, value: f64) -> Result<Shape, E> { Ok(Shape::Number(value)) }
    fn visit_str<E: Error>(self, value: &str) -> Result<Shape, E> { Ok(Shape::Text(value.to_owned())) }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
        /// The text of a string, nothing of anything else.
        struct Word(Option<String>);
        any! {Word, "any value",
            fn visit_bool<E: Error>(self, _: bool) -> Result<Word, E> { Ok(Word(None)) }
            fn visit_u64<E: Error>(self, _: u64) -> Result<Word, E> { Ok(Word(None)) }
            fn visit_i64<E: Error>(self, _: i64) -> Result<Word, E> { Ok(Word(None)) }
            fn visit_f64<E: Error>(self, _: f64) -> Result<Word, E> { Ok(Word(None)) }
            fn visit_unit<E: Error>(self) -> Result<Word, E> { Ok(Word(None)) }
            fn visit_str<E: Error>(self, value: &str) -> Result<Word, E> { Ok(Word(Some(value.to_owned()))) }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Word, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(Word(None))
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Word, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Word(None))
            }
        }
        let Some(Word(first)) = seq.next_element()? else {
            return Ok(Shape::List(0, None));
        };
        let mut length = 1;
        while seq.next_element::<IgnoredAny>()?.is_some() {
            length += 1;
        }
        Ok(Shape::List(length, first))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Shape, A::Error> {
        let mut length = 0;
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
            length += 1;
        }
        Ok(Shape::Object(length))
    }
}

impl Shape {
    /// Nothing is asked for: `false`, 0, or empty.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::Bool(value) => !value,
            Self::Number(value) => *value == 0.0,
            Self::Text(value) => value.is_empty(),
            Self::List(length, _) | Self::Object(length) => *length == 0,
        }
    }

    /// It is this word, or a list of it alone.
    #[must_use]
    pub(crate) fn is_word(&self, word: &str) -> bool {
        match self {
            Self::Text(value) => value == word,
            Self::List(1, Some(value)) => value == word,
            _ => false,
        }
    }
}

/// A client's text for an error message: its first characters.
#[must_use]
pub(crate) fn brief(text: &str) -> String {
    const CHARACTERS_MAX: usize = 64;
    let mut characters = text.chars();
    let mut short: String = characters.by_ref().take(CHARACTERS_MAX).collect();
    if characters.next().is_some() {
        short.push('…');
    }
    short
}

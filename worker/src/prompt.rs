//! Turns chat messages into the prompt text that the model was trained on, by its own template.
//!
//! A template comes with the model's file and is run as it is: its steps and the memory it makes are
//! paid for from a fixed amount of fuel, and its output has a bound, so that a hostile one ends in
//! [`PromptError::Template`] and nothing else. One gap is known: minijinja 3.1 does not charge for a
//! list that is added to itself again and again; such a template ends the worker, and the supervisor
//! then treats it as it treats every worker that dies.

use std::fmt;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{AutoEscape, Environment, ErrorKind, State, UndefinedBehavior, context};
use proto::to_dispatcher::PromptError;
use proto::to_worker::ChatMessage;

mod calendar;
mod json;

use crate::engine::ChatTemplateSource;

/// Steps of a template, and 64-byte pieces of what it makes (64 MB at most): templates in use take
/// some hundreds a message, and a few a piece of its text.
const FUEL: u64 = 1_000_000;
/// Stack of a rendering thread, bytes; only what is touched takes memory. A template can nest lists
/// as deep as its fuel lasts (about 150,000), and dropping or writing them takes a frame a level.
const STACK_BYTES: usize = 512 << 20;
/// Deepest value that `tojson` writes.
const JSON_DEPTH_MAX: u32 = 128;
/// Longest prompt, bytes. The dispatcher refuses requests larger than the context long before.
const OUTPUT_BYTES_MAX: usize = 64 << 20;
/// Longest message of `raise_exception` that is passed on, characters.
const WORDS_MAX: usize = 300;

/// What is used where a model brings no template: `ChatML`, the commonest format. A model that was
/// trained on another format will answer worse than it could.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\n' }}{% endif %}";

/// A compiled chat template, to be kept for the life of the model.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos_token: String,
    eos_token: String,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a model's template; `None`: the fallback, `ChatML`.
    ///
    /// # Errors
    /// `Template` with the parser's words where it is no Jinja template.
    pub fn new(source: Option<&ChatTemplateSource>) -> Result<Self, PromptError> {
        let mut environment = Environment::new();
        environment.set_fuel(Some(FUEL));
        // As transformers sets it up: blocks leave no line ends or indents behind, and a name that
        // is not defined is empty (templates ask for `tools` and the like).
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(|e| refused(&e))?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        let text = source.map_or_else(|| CHATML.to_owned(), |s| without_generation(&s.source));
        environment
            .add_template_owned("chat", text)
            .map_err(|e| refused(&e))?;
        Ok(Self {
            environment,
            bos_token: source.map(|s| s.bos_token.clone()).unwrap_or_default(),
            eos_token: source.map(|s| s.eos_token.clone()).unwrap_or_default(),
        })
    }

    /// The prompt of `messages`; with `add_generation_prompt` it ends where the answer begins.
    ///
    /// # Errors
    /// `Template` where the template refuses the messages, fails, runs too long or writes too much;
    /// `Empty` where it writes nothing; `Busy` where no thread can be had for it.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, PromptError> {
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("render".to_owned())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || self.render_here(messages, add_generation_prompt))
                .map_err(|_| PromptError::Busy)?
                .join()
                .unwrap_or_else(|_| Err(PromptError::Template("the template failed".to_owned())))
        })
    }

    fn render_here(
        &self,
        messages: &[ChatMessage],
        add_generation_prompt: bool,
    ) -> Result<String, PromptError> {
        let template = self
            .environment
            .get_template("chat")
            .map_err(|e| refused(&e))?;
        let messages: Vec<Value> = messages.iter().map(value_of).collect();
        let mut output = Bounded(Vec::new());
        template
            .render_captured_to(
                context! {
                    messages => messages,
                    add_generation_prompt => add_generation_prompt,
                    bos_token => self.bos_token.as_str(),
                    eos_token => self.eos_token.as_str(),
                },
                &mut output,
            )
            .map_err(|e| refused(&e))?;
        let text = String::from_utf8(output.0)
            .map_err(|_| PromptError::Template("the template wrote no UTF-8".to_owned()))?;
        if text.is_empty() {
            Err(PromptError::Empty)
        } else {
            Ok(text)
        }
    }
}

/// Compiles and renders in one go; whoever renders often keeps a [`ChatTemplate`].
///
/// # Errors
/// Those of [`ChatTemplate::new`] and [`ChatTemplate::render`].
pub fn render(
    template: Option<&ChatTemplateSource>,
    messages: &[ChatMessage],
    add_generation_prompt: bool,
) -> Result<String, PromptError> {
    ChatTemplate::new(template)?.render(messages, add_generation_prompt)
}

/// A message as templates see it: a missing name is not there at all.
fn value_of(message: &ChatMessage) -> Value {
    let name = message.name.as_deref().map(|name| ("name", name));
    let pairs = [
        ("role", message.role.as_str()),
        ("content", message.content.as_str()),
    ];
    Value::from_pairs(pairs.into_iter().chain(name))
}

/// Refuses to grow beyond the bound.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len().saturating_add(bytes.len()) > OUTPUT_BYTES_MAX {
            return Err(io::Error::other("the template writes too much"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The error in words for the client, the innermost cause included, cut to a bound.
fn refused(error: &minijinja::Error) -> PromptError {
    let words = match error.kind() {
        ErrorKind::OutOfFuel => "the template runs too long or makes too much".to_owned(),
        ErrorKind::WriteFailure => "the template writes too much".to_owned(),
        kind => error
            .detail()
            .map_or_else(|| kind.to_string(), str::to_owned),
    };
    PromptError::Template(words.chars().take(WORDS_MAX).collect())
}

/// How templates refuse messages, by the convention of transformers.
fn raise_exception(words: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, words))
}

/// The date and time now in UTC, by the format of C's `strftime`.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seconds = now.map_or(0, |d| d.as_secs());
    calendar::strftime(format, seconds)
        .map_err(|words| minijinja::Error::new(ErrorKind::InvalidOperation, words))
}

/// Python's `json.dumps(value, ensure_ascii=False, …)`, which transformers puts in the place of
/// Jinja's own filter: nothing is escaped for HTML.
fn tojson(state: &State, value: &Value, options: Kwargs) -> Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    walk(state, value, JSON_DEPTH_MAX)?;
    let text = json::dumps(value, indent.map(|n| n.min(16)), separators)
        .map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    state.consume_fuel(text.len() as u64 / 64)?;
    Ok(text)
}

/// Pays for each part of a value before it is written, and refuses one that is nested too deep.
fn walk(state: &State, value: &Value, depth_left: u32) -> Result<(), minijinja::Error> {
    state.consume_fuel(1)?;
    if !matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable
    ) {
        return Ok(());
    }
    if depth_left == 0 {
        return Err(minijinja::Error::new(
            ErrorKind::InvalidOperation,
            "nested too deep",
        ));
    }
    for item in value.try_iter()? {
        if value.kind() == ValueKind::Map {
            walk(state, &value.get_item(&item)?, depth_left - 1)?;
        } else {
            walk(state, &item, depth_left - 1)?;
        }
    }
    Ok(())
}

/// The template without transformers' `{% generation %}` marks, which only training needs: they
/// become conditions that hold.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else { break };
        let (inner, after) = (&tag[2..end], &tag[end..]);
        out.push_str("{%");
        let word = inner.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        out.push_str(&match word {
            "generation" => inner.replace("generation", "if true"),
            "endgeneration" => inner.replace("endgeneration", "endif"),
            _ => inner.to_owned(),
        });
        out.push_str("%}");
        rest = &after[2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests;

//! What the client asked for to what a worker needs: ranges, defaults, refusals.

use std::time::Duration;

use proto::generate::Sampling;
use proto::to_worker::{ChatMessage, PromptInput};

use super::error::ApiError;
use super::openai::{
    Body, Content, Int, LogprobsField, Message, Object, PriorityField, Prompt, Shape, brief,
};
use crate::gateway::Submission;
use crate::machine::event::{KeyId, Priority};

/// Alternatives that may be reported with each token.
const LOGPROBS_MAX: i128 = 20;
/// Beyond this a token that was seen is gone for good anyway.
const REPETITION_PENALTY_MAX: f32 = 100.0;
/// Bytes of one stop string.
const STOP_BYTES_MAX: usize = 1024;
/// A client's own deadline is at most this long.
const DEADLINE_S_MAX: f64 = 7.0 * 86_400.0;

/// The route, where the two differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    Chat,
    Completions,
}

/// What comes from elsewhere than the body.
#[derive(Clone, Debug)]
pub(crate) struct Context<'a> {
    pub(crate) served_model: &'a str,
    pub(crate) key: KeyId,
    /// For a request without a seed.
    pub(crate) fresh_seed: u64,
    /// The `x-priority` header; the body's field wins.
    pub(crate) priority_header: Option<&'a str>,
    /// The `x-request-timeout` header; the body's field wins.
    pub(crate) timeout_header: Option<&'a str>,
}

/// A request that can be submitted, and how to answer it.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) submission: Submission,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

/// Checks a body of `route`.
///
/// # Errors
///
/// 400 with the field's name, or 404 for another model.
pub(crate) fn check(route: Route, body: Body, context: &Context<'_>) -> Result<Checked, ApiError> {
    model(body.model.as_deref(), context.served_model)?;
    refuse(&body)?;
    let sampling = sampling(&body, context.fresh_seed)?;
    let max_tokens = max_tokens(&body)?;
    let logprobs = logprobs(route, &body)?;
    let stream = body.stream.unwrap_or(false);
    let include_usage = body
        .stream_options
        .as_ref()
        .and_then(|Object(options)| options.include_usage);
    if body.stream_options.is_some() && !stream {
        return Err(ApiError::value(
            "stream_options",
            "`stream_options` is allowed only where `stream` is true",
        ));
    }
    let stop = stop(body.stop.map(|stop| stop.0).unwrap_or_default())?;
    let priority = priority(body.priority, context.priority_header)?;
    let deadline = deadline(body.timeout, context.timeout_header)?;
    let prompt = match route {
        Route::Chat => chat_prompt(
            body.messages.map(|messages| messages.0),
            body.add_generation_prompt.unwrap_or(true),
        )?,
        Route::Completions => text_prompt(body.prompt)?,
    };
    Ok(Checked {
        submission: Submission {
            prompt,
            max_tokens,
            sampling,
            stop,
            stop_ids: body.stop_token_ids.map(|ids| ids.0).unwrap_or_default(),
            ignore_eos: body.ignore_eos.unwrap_or(false),
            logprobs,
            batch_invariant: body.batch_invariant.unwrap_or(false),
            cache_prompt: body.cache_prompt.unwrap_or(true),
            key: context.key,
            priority,
            deadline,
        },
        stream,
        include_usage: include_usage.unwrap_or(false),
    })
}

fn model(asked: Option<&str>, served: &str) -> Result<(), ApiError> {
    match asked {
        None | Some("default") => Ok(()),
        Some(name) if name == served => Ok(()),
        Some(name) => {
            let mut error = ApiError::invalid(
                "model_not_found",
                format!(
                    "the model `{}` is not served here; `{served}` is",
                    brief(name)
                ),
            )
            .with_param("model");
            error.status = axum::http::StatusCode::NOT_FOUND;
            Err(error)
        }
    }
}

/// Known fields that would change the answer and are not implemented.
fn refuse(body: &Body) -> Result<(), ApiError> {
    let no = |param: &str| {
        Err(ApiError::unsupported(
            param,
            format!("`{param}` is not supported by this server"),
        ))
    };
    for (param, value) in [("n", body.n), ("best_of", body.best_of)] {
        match value {
            None | Some(Int(1)) => {}
            Some(Int(number)) if number < 1 => {
                return Err(ApiError::value(
                    param,
                    format!("`{param}` must be at least 1, not {number}"),
                ));
            }
            Some(Int(number)) => {
                return Err(ApiError::unsupported(
                    param,
                    format!("`{param}` of {number} is not supported: one choice is made a request"),
                ));
            }
        }
    }
    for (param, value) in [
        ("echo", body.echo),
        ("use_beam_search", body.use_beam_search),
        ("continue_final_message", body.continue_final_message),
        (
            "suffix",
            body.suffix.as_deref().map(|text| !text.is_empty()),
        ),
        ("min_tokens", body.min_tokens.map(|Int(least)| least != 0)),
    ] {
        if value == Some(true) {
            return no(param);
        }
    }
    if let Some(Object(format)) = &body.response_format
        && format.r#type != "text"
    {
        return Err(ApiError::unsupported(
            "response_format",
            format!(
                "`response_format` of type `{}` is not supported, only `text` is",
                brief(&format.r#type)
            ),
        ));
    }
    for (param, value, harmless) in [
        ("tools", &body.tools, &[][..]),
        ("tool_choice", &body.tool_choice, &["none", "auto"]),
        ("functions", &body.functions, &[]),
        ("function_call", &body.function_call, &["none", "auto"]),
        ("modalities", &body.modalities, &["text"]),
        ("audio", &body.audio, &[]),
        ("prediction", &body.prediction, &[]),
        ("prompt_logprobs", &body.prompt_logprobs, &[]),
        ("chat_template", &body.chat_template, &[]),
        ("chat_template_kwargs", &body.chat_template_kwargs, &[]),
        ("grammar", &body.grammar, &[]),
        ("json_schema", &body.json_schema, &[]),
        ("structured_outputs", &body.structured_outputs, &[]),
        ("guided_json", &body.guided_json, &[]),
        ("guided_regex", &body.guided_regex, &[]),
        ("guided_choice", &body.guided_choice, &[]),
        ("guided_grammar", &body.guided_grammar, &[]),
    ] {
        if let Some(value) = value
            && !value.is_empty()
            && !harmless.iter().any(|word| value.is_word(word))
        {
            return no(param);
        }
    }
    // Even an empty object asks for a search.
    if body.web_search_options.is_some() {
        return no("web_search_options");
    }
    Ok(())
}

fn sampling(body: &Body, fresh_seed: u64) -> Result<Sampling, ApiError> {
    let defaults = Sampling::default();
    let mut logit_bias = Vec::new();
    for &(id, bias) in body.logit_bias.iter().flat_map(|bias| &bias.0) {
        logit_bias.push((id, range("logit_bias", bias, -100.0, 100.0)?));
    }
    let top_k = match body.top_k {
        // llama-server and vLLM both take −1 for "all".
        None | Some(Int(-1)) => 0,
        Some(Int(number)) => u32::try_from(number).map_err(|_| {
            ApiError::value(
                "top_k",
                format!("`top_k` must be 0 (all) or more, not {number}"),
            )
        })?,
    };
    let top_p = optional("top_p", body.top_p, defaults.top_p, 0.0, 1.0)?;
    if top_p == 0.0 {
        return Err(ApiError::value(
            "top_p",
            "`top_p` must be greater than 0 and at most 1",
        ));
    }
    let (name, penalty) = match body.repetition_penalty {
        Some(penalty) => ("repetition_penalty", Some(penalty)),
        None => ("repeat_penalty", body.repeat_penalty),
    };
    let repetition_penalty = match penalty {
        None => defaults.repetition_penalty,
        Some(value) => {
            let narrow = narrow(value);
            if !(narrow > 0.0 && narrow <= REPETITION_PENALTY_MAX) {
                return Err(ApiError::value(
                    name,
                    format!("`{name}` must be greater than 0 and at most {REPETITION_PENALTY_MAX}"),
                ));
            }
            narrow
        }
    };
    let seed = match body.seed {
        None | Some(Int(-1)) => fresh_seed,
        Some(Int(number)) => u64::try_from(number)
            .or_else(|_| i64::try_from(number).map(i64::cast_unsigned))
            .map_err(|_| ApiError::value("seed", "`seed` must be a 64-bit integer"))?,
    };
    Ok(Sampling {
        temperature: optional(
            "temperature",
            body.temperature,
            defaults.temperature,
            0.0,
            2.0,
        )?,
        top_p,
        top_k,
        min_p: optional("min_p", body.min_p, defaults.min_p, 0.0, 1.0)?,
        repetition_penalty,
        presence_penalty: optional("presence_penalty", body.presence_penalty, 0.0, -2.0, 2.0)?,
        frequency_penalty: optional("frequency_penalty", body.frequency_penalty, 0.0, -2.0, 2.0)?,
        logit_bias,
        seed,
    })
}

fn optional(
    param: &str,
    value: Option<f64>,
    default: f32,
    least: f64,
    most: f64,
) -> Result<f32, ApiError> {
    value.map_or(Ok(default), |value| range(param, value, least, most))
}

fn range(param: &str, value: f64, least: f64, most: f64) -> Result<f32, ApiError> {
    if value >= least && value <= most {
        return Ok(narrow(value));
    }
    Err(ApiError::value(
        param,
        format!("`{param}` must be between {least} and {most}, not {value}"),
    ))
}

fn narrow(value: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "sampling parameters need no more digits"
    )]
    let narrow = value as f32;
    narrow
}

fn max_tokens(body: &Body) -> Result<Option<u32>, ApiError> {
    let (param, value) = match (body.max_completion_tokens, body.max_tokens) {
        (Some(value), _) => ("max_completion_tokens", value),
        (None, Some(value)) => ("max_tokens", value),
        (None, None) => match body.n_predict {
            // llama-server's −1: up to the context.
            None | Some(Int(-1)) => return Ok(None),
            Some(value) => ("n_predict", value),
        },
    };
    let Int(number) = value;
    if number < 1 {
        return Err(ApiError::value(
            param,
            format!("`{param}` must be at least 1, not {number}"),
        ));
    }
    // More than any context is as much as fits.
    Ok(Some(u32::try_from(number).unwrap_or(u32::MAX)))
}

fn logprobs(route: Route, body: &Body) -> Result<Option<u32>, ApiError> {
    let within = |param: &str, number: i128| {
        u32::try_from(number)
            .ok()
            .filter(|_| number <= LOGPROBS_MAX)
            .map(Some)
            .ok_or_else(|| {
                ApiError::value(
                    param,
                    format!("`{param}` must be between 0 and {LOGPROBS_MAX}, not {number}"),
                )
            })
    };
    match (route, body.logprobs) {
        (Route::Chat, None | Some(LogprobsField::Bool(false))) => match body.top_logprobs {
            None | Some(Int(0)) => Ok(None),
            Some(_) => Err(ApiError::value(
                "top_logprobs",
                "`top_logprobs` is allowed only where `logprobs` is true",
            )),
        },
        (Route::Chat, Some(LogprobsField::Bool(true))) => within(
            "top_logprobs",
            body.top_logprobs.map_or(0, |Int(number)| number),
        ),
        (Route::Chat, Some(LogprobsField::Int(_))) => Err(ApiError::invalid(
            "invalid_type",
            "`logprobs` must be a boolean here; `top_logprobs` takes the number",
        )
        .with_param("logprobs")),
        (Route::Completions, None | Some(LogprobsField::Bool(false))) => Ok(None),
        (Route::Completions, Some(LogprobsField::Int(number))) => within("logprobs", number),
        (Route::Completions, Some(LogprobsField::Bool(true))) => Err(ApiError::invalid(
            "invalid_type",
            "`logprobs` must be a whole number here",
        )
        .with_param("logprobs")),
    }
}

fn stop(list: Vec<String>) -> Result<Vec<String>, ApiError> {
    for text in &list {
        if text.is_empty() {
            return Err(ApiError::value("stop", "`stop` strings must not be empty"));
        }
        if text.len() > STOP_BYTES_MAX {
            return Err(ApiError::value(
                "stop",
                format!("`stop` strings have at most {STOP_BYTES_MAX} bytes"),
            ));
        }
    }
    Ok(list)
}

fn priority(field: Option<PriorityField>, header: Option<&str>) -> Result<Priority, ApiError> {
    let word = match &field {
        Some(PriorityField::Number(number)) => {
            return Ok(match number.signum() {
                -1 => Priority::High,
                0 => Priority::Normal,
                _ => Priority::Low,
            });
        }
        Some(PriorityField::Word(word)) => Some(word.as_str()),
        None => header,
    };
    match word {
        None | Some("normal") => Ok(Priority::Normal),
        Some("high") => Ok(Priority::High),
        Some("low") => Ok(Priority::Low),
        Some(word) => Err(ApiError::value(
            "priority",
            format!(
                "the priority must be `high`, `normal` or `low`, not `{}`",
                brief(word)
            ),
        )),
    }
}

fn deadline(field: Option<f64>, header: Option<&str>) -> Result<Option<Duration>, ApiError> {
    let (param, seconds) = match (field, header) {
        (Some(seconds), _) => ("timeout", seconds),
        (None, Some(text)) => ("x-request-timeout", text.trim().parse().unwrap_or(f64::NAN)),
        (None, None) => return Ok(None),
    };
    if seconds > 0.0 && seconds <= DEADLINE_S_MAX {
        return Ok(Some(Duration::from_secs_f64(seconds)));
    }
    Err(ApiError::value(
        param,
        format!(
            "`{param}` must be a number of seconds greater than 0 and at most {DEADLINE_S_MAX}"
        ),
    ))
}

fn chat_prompt(
    messages: Option<Vec<Message>>,
    add_generation_prompt: bool,
) -> Result<PromptInput, ApiError> {
    let Some(messages) = messages else {
        return Err(missing("messages"));
    };
    if messages.is_empty() {
        return Err(ApiError::value(
            "messages",
            "`messages` must hold at least one message",
        ));
    }
    let messages = messages
        .into_iter()
        .enumerate()
        .map(|(index, message)| chat_message(index, message))
        .collect::<Result<_, _>>()?;
    Ok(PromptInput::Chat {
        messages,
        add_generation_prompt,
    })
}

fn chat_message(index: usize, message: Message) -> Result<ChatMessage, ApiError> {
    const ROLES: [&str; 5] = ["system", "developer", "user", "assistant", "tool"];
    if !ROLES.contains(&message.role.as_str()) {
        return Err(ApiError::value(
            &format!("messages[{index}].role"),
            format!(
                "the role must be `system`, `developer`, `user`, `assistant` or `tool`, not `{}`",
                brief(&message.role)
            ),
        ));
    }
    let calls = [
        ("tool_calls", &message.tool_calls),
        ("function_call", &message.function_call),
    ];
    for (name, value) in calls {
        if value
            .as_ref()
            .is_some_and(|value: &Shape| !value.is_empty())
        {
            return Err(ApiError::unsupported(
                &format!("messages[{index}].{name}"),
                format!("`{name}` is not supported by this server"),
            ));
        }
    }
    let content = match message.content {
        Content::Text(text) => text,
        // A turn that said nothing.
        Content::Null if message.role == "assistant" => String::new(),
        Content::Null => return Err(missing(&format!("messages[{index}].content"))),
    };
    Ok(ChatMessage {
        role: message.role,
        content,
        name: message.name,
    })
}

fn text_prompt(prompt: Option<Prompt>) -> Result<PromptInput, ApiError> {
    match prompt {
        None => Err(missing("prompt")),
        Some(Prompt::Text(text)) if text.is_empty() => {
            Err(ApiError::value("prompt", "`prompt` must not be empty"))
        }
        Some(Prompt::Ids(ids)) if ids.is_empty() => {
            Err(ApiError::value("prompt", "`prompt` must not be empty"))
        }
        Some(Prompt::Text(text)) => Ok(PromptInput::Text(text)),
        Some(Prompt::Ids(ids)) => Ok(PromptInput::Ids(ids)),
        Some(Prompt::Several(number)) => Err(ApiError::unsupported(
            "prompt",
            format!("`prompt` holds {number} prompts: one prompt is served a request"),
        )),
    }
}

fn missing(param: &str) -> ApiError {
    ApiError::invalid(
        "missing_required_parameter",
        format!("`{param}` is required"),
    )
    .with_param(param)
}

//! What the scripted engine is told to do: `key=value,…`.

use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

/// The whole behaviour of a scripted engine. The default is one that works, without any delay.
///
/// Each field is set by the key of the same name, but where another key is named. Durations are in
/// the unit of their key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// `load_ms`: how long a load takes; it reports progress on the way.
    pub load: Duration,
    /// `load=ok|permanent|transient|stall`.
    pub load_outcome: LoadOutcome,
    /// Batch shapes that warm-up runs.
    pub warm_steps: u32,
    /// `warm_ms`: how long each of them takes.
    pub warm_step: Duration,
    /// `warm=stall`: warm-up never ends and never moves the pulse.
    pub warm_stalls: bool,
    /// `step_us`: how long a step takes, whatever its batch.
    pub step: Duration,
    /// `prefill_us`: how long each prompt token takes in addition.
    pub prefill_token: Duration,
    /// Prompt tokens that one step computes at most.
    pub chunk: u32,
    /// Tokens that a step gives a row.
    pub burst: u32,
    /// `text=words|bytes|invalid`: what the output is made of.
    pub text: TextShape,
    /// The output's length in tokens, after which comes the end token; 0: endless.
    pub length: u32,
    /// The fault, and when it strikes: `crash=abort|segv|panic|poison|exit:CODE|hang`.
    pub crash: Option<Crash>,
    /// `crash_at_step`: at this step, counted from 1 since the start.
    pub crash_at_step: Option<u64>,
    /// `crash_at_token`: when any row is to be given the token of this index.
    pub crash_at_token: Option<u32>,
    /// `crash_after_prefill=1`: when a row's prompt is computed, before its first token.
    pub crash_after_prefill: bool,
    /// `crash_on`: when a prompt with this text is stepped.
    pub crash_on: Option<String>,
    /// `fail_row`: a row whose prompt has this text fails alone, in its first step.
    pub fail_row: Option<String>,
    /// `reject`: a prompt with this text is refused when it is to be seated.
    pub reject: Option<String>,
    /// `only_instance`: the fault strikes on this instance alone.
    pub only_instance: Option<u32>,
    /// `only_generation`: the fault strikes in this generation alone.
    pub only_generation: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadOutcome {
    Loaded,
    Permanent,
    Transient,
    /// The load never ends and never moves the pulse.
    Stall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextShape {
    /// Words of one token each, of one to several bytes a character.
    Words,
    /// Characters of several bytes, a byte a token.
    Bytes,
    /// Any bytes, most of them no UTF-8.
    Invalid,
}

/// How the engine goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    Abort,
    Segv,
    Exit(i32),
    Panic,
    /// `step` says that the engine is poisoned.
    Poison,
    /// Never comes back, and never moves the pulse.
    Hang,
}

#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ScriptError {
    #[error("`{0}` is not key=value")]
    NotAPair(String),
    #[error("`{0}` is no key of a script")]
    UnknownKey(String),
    #[error("`{value}` is no value of `{key}`")]
    Value { key: String, value: String },
    #[error("`{0}` must be at least 1")]
    Zero(&'static str),
    #[error("`crash` needs a time: crash_at_step, crash_at_token, crash_after_prefill or crash_on")]
    CrashWithoutTime,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            load: Duration::ZERO,
            load_outcome: LoadOutcome::Loaded,
            warm_steps: 1,
            warm_step: Duration::ZERO,
            warm_stalls: false,
            step: Duration::ZERO,
            prefill_token: Duration::ZERO,
            chunk: 512,
            burst: 1,
            text: TextShape::Words,
            length: 0,
            crash: None,
            crash_at_step: None,
            crash_at_token: None,
            crash_after_prefill: false,
            crash_on: None,
            fail_row: None,
            reject: None,
            only_instance: None,
            only_generation: None,
        }
    }
}

impl Script {
    /// The script as one worker plays it: without faults that are meant for another.
    #[must_use]
    pub fn for_worker(mut self, instance: u32, generation: u64) -> Self {
        let meant = self.only_instance.is_none_or(|only| only == instance)
            && self.only_generation.is_none_or(|only| only == generation);
        if !meant {
            self.crash = None;
            self.load_outcome = LoadOutcome::Loaded;
            self.warm_stalls = false;
        }
        self
    }
}

impl FromStr for Script {
    type Err = ScriptError;

    fn from_str(text: &str) -> Result<Self, ScriptError> {
        let mut script = Self::default();
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair
                .split_once('=')
                .ok_or_else(|| ScriptError::NotAPair(pair.to_string()))?;
            set(&mut script, key, value)?;
        }
        if script.chunk == 0 {
            return Err(ScriptError::Zero("chunk"));
        }
        if script.burst == 0 {
            return Err(ScriptError::Zero("burst"));
        }
        let timed = script.crash_at_step.is_some()
            || script.crash_at_token.is_some()
            || script.crash_after_prefill
            || script.crash_on.is_some();
        if script.crash.is_some() && !timed {
            return Err(ScriptError::CrashWithoutTime);
        }
        Ok(script)
    }
}

fn set(script: &mut Script, key: &str, value: &str) -> Result<(), ScriptError> {
    let wrong = || ScriptError::Value {
        key: key.to_string(),
        value: value.to_string(),
    };
    let number = || value.parse::<u64>().map_err(|_| wrong());
    let small = || value.parse::<u32>().map_err(|_| wrong());
    let text = || Some(value.to_string());
    match key {
        "load_ms" => script.load = Duration::from_millis(number()?),
        "load" => {
            script.load_outcome = match value {
                "ok" => LoadOutcome::Loaded,
                "permanent" => LoadOutcome::Permanent,
                "transient" => LoadOutcome::Transient,
                "stall" => LoadOutcome::Stall,
                _ => return Err(wrong()),
            }
        }
        "warm_steps" => script.warm_steps = small()?,
        "warm_ms" => script.warm_step = Duration::from_millis(number()?),
        "warm" => {
            script.warm_stalls = match value {
                "ok" => false,
                "stall" => true,
                _ => return Err(wrong()),
            }
        }
        "step_us" => script.step = Duration::from_micros(number()?),
        "prefill_us" => script.prefill_token = Duration::from_micros(number()?),
        "chunk" => script.chunk = small()?,
        "burst" => script.burst = small()?,
        "text" => {
            script.text = match value {
                "words" => TextShape::Words,
                "bytes" => TextShape::Bytes,
                "invalid" => TextShape::Invalid,
                _ => return Err(wrong()),
            }
        }
        "length" => script.length = small()?,
        "crash" => {
            script.crash = Some(match value {
                "abort" => Crash::Abort,
                "segv" => Crash::Segv,
                "panic" => Crash::Panic,
                "poison" => Crash::Poison,
                "hang" => Crash::Hang,
                _ => {
                    let code = value.strip_prefix("exit:").and_then(|c| c.parse().ok());
                    Crash::Exit(code.ok_or_else(wrong)?)
                }
            });
        }
        "crash_at_step" => script.crash_at_step = Some(number()?),
        "crash_at_token" => script.crash_at_token = Some(small()?),
        "crash_after_prefill" => script.crash_after_prefill = small()? != 0,
        "crash_on" => script.crash_on = text(),
        "fail_row" => script.fail_row = text(),
        "reject" => script.reject = text(),
        "only_instance" => script.only_instance = Some(small()?),
        "only_generation" => script.only_generation = Some(number()?),
        _ => return Err(ScriptError::UnknownKey(key.to_string())),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_script_is_an_engine_that_works() {
        assert_eq!("".parse(), Ok(Script::default()));
    }

    #[test]
    fn each_key_sets_its_field() {
        let script: Script = "step_us=250,length=7,text=bytes,crash=exit:3,crash_at_step=2"
            .parse()
            .unwrap();
        let expected = Script {
            step: Duration::from_micros(250),
            length: 7,
            text: TextShape::Bytes,
            crash: Some(Crash::Exit(3)),
            crash_at_step: Some(2),
            ..Script::default()
        };
        assert_eq!(script, expected);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, words) in [
            ("step", "`step` is not key=value"),
            ("speed=1", "`speed` is no key of a script"),
            ("burst=many", "`many` is no value of `burst`"),
            ("chunk=0", "`chunk` must be at least 1"),
            ("crash=explode", "`explode` is no value of `crash`"),
        ] {
            assert_eq!(text.parse::<Script>().unwrap_err().to_string(), words);
        }
        assert_eq!(
            "crash=abort".parse::<Script>(),
            Err(ScriptError::CrashWithoutTime)
        );
    }

    #[test]
    fn a_fault_for_one_worker_spares_the_others() {
        let script: Script = "crash=abort,crash_at_step=1,only_instance=1,only_generation=4"
            .parse()
            .unwrap();
        assert!(script.clone().for_worker(1, 4).crash.is_some());
        assert!(script.clone().for_worker(0, 4).crash.is_none());
        assert!(script.for_worker(1, 5).crash.is_none());
    }
}

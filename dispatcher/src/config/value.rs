//! The kinds of values that settings have, from text: counts, sizes, durations, words.

use std::net::IpAddr;
use std::time::Duration;

use crate::model::EngineKind;

/// A value's text could not be understood; the fragment says what it must be.
pub(super) type Parsed<T> = Result<T, String>;

/// A whole number of at least `min` and at most `max`.
pub(super) fn count(text: &str, min: u64, max: u64) -> Parsed<u64> {
    let plain = text.trim();
    let must = || format!("must be a whole number from {min} to {max}");
    let number: u64 = plain.parse().map_err(|_| must())?;
    if (min..=max).contains(&number) {
        Ok(number)
    } else if number < min && min == 1 {
        Err("must be at least 1".to_owned())
    } else {
        Err(must())
    }
}

/// A count that fits 32 bits.
pub(super) fn count32(text: &str, min: u32, max: u32) -> Parsed<u32> {
    let number = count(text, u64::from(min), u64::from(max))?;
    u32::try_from(number).map_err(|error| error.to_string())
}

/// A duration: `30s`, `5m`, `250ms`, `1h`, or seconds without a unit. From 1 ms to 30 days.
pub(super) fn duration(text: &str) -> Parsed<Duration> {
    let must = || "must be a time such as 30s, 5m, 250ms or 1h".to_owned();
    let (number, unit) = split(text);
    let number: u64 = number.parse().map_err(|_| must())?;
    let unit_ms = match unit {
        "ms" => 1,
        "" | "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        _ => return Err(must()),
    };
    let ms = number.checked_mul(unit_ms).ok_or_else(must)?;
    if (1..=30 * 24 * 3_600_000).contains(&ms) {
        Ok(Duration::from_millis(ms))
    } else {
        Err("must be from 1ms to 720h".to_owned())
    }
}

/// A size in bytes: `256MiB`, `12GB`, `4096`. Decimal and binary units both, by their names.
pub(super) fn size(text: &str) -> Parsed<u64> {
    let must = || "must be a size in bytes such as 4096, 256MiB or 12GB".to_owned();
    let (number, unit) = split(text);
    let number: u64 = number.parse().map_err(|_| must())?;
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return Err(must()),
    };
    match number.checked_mul(factor) {
        Some(bytes) if bytes > 0 => Ok(bytes),
        _ => Err(must()),
    }
}

pub(super) fn engine(text: &str) -> Parsed<EngineKind> {
    match text {
        "llama" => Ok(EngineKind::Llama),
        "mlx" => Ok(EngineKind::Mlx),
        "scripted" => Ok(EngineKind::Scripted),
        _ => Err("must be `llama` or `mlx`".to_owned()),
    }
}

pub(super) fn host(text: &str) -> Parsed<IpAddr> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        _ => text
            .trim_matches(['[', ']'])
            .parse()
            .map_err(|_| "must be an address such as 127.0.0.1, ::1 or 0.0.0.0".to_owned()),
    }
}

/// Text that is not empty.
pub(super) fn text(text: &str) -> Parsed<String> {
    if text.trim().is_empty() {
        Err("must not be empty".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    #[default]
    Auto,
    Text,
    Json,
}

pub(super) fn log_format(text: &str) -> Parsed<LogFormat> {
    match text {
        "auto" => Ok(LogFormat::Auto),
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        _ => Err("must be `auto`, `text` or `json`".to_owned()),
    }
}

/// Digits, and what follows them.
fn split(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    (&text[..end], text[end..].trim_start())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units_and_seconds_without_one() {
        assert_eq!(duration("30"), Ok(Duration::from_secs(30)));
        assert_eq!(duration("250ms"), Ok(Duration::from_millis(250)));
        assert_eq!(duration("2 h"), Ok(Duration::from_secs(7200)));
        for wrong in [
            "",
            "s",
            "-1s",
            "1.5s",
            "0",
            "721h",
            "99999999999999999999s",
            "1d",
        ] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_have_binary_and_decimal_units() {
        assert_eq!(size("256MiB"), Ok(256 << 20));
        assert_eq!(size("12GB"), Ok(12_000_000_000));
        assert_eq!(size("1g"), Ok(1 << 30));
        for wrong in ["", "0", "GiB", "-1", "1.5GiB", "99999999999T", "1 apple"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn hosts_are_addresses() {
        assert_eq!(host("localhost"), host("127.0.0.1"));
        assert_eq!(host("[::1]"), host("::1"));
        assert!(host("example").is_err());
    }
}

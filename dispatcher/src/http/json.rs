//! A body's bytes to its typed form, or an error that names the member at fault.

use serde::de::DeserializeOwned;
use serde_json::error::Category;

use super::error::ApiError;

/// Deeper bodies are refused: no request of this API needs a tenth of it.
pub(crate) const DEPTH_MAX: u32 = 128;

/// Reads one JSON object.
///
/// # Errors
///
/// 400: not UTF-8, not JSON, nested too deep, not an object, or a member of the wrong type.
pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    let text = std::str::from_utf8(body).map_err(|error| {
        ApiError::invalid(
            "invalid_utf8",
            format!(
                "the body is not valid UTF-8 from byte {} on",
                error.valid_up_to()
            ),
        )
    })?;
    // Skipped members are not bounded by serde_json's own recursion limit.
    if !depth_fits(text.as_bytes()) {
        return Err(ApiError::invalid(
            "invalid_json",
            format!("the body is nested deeper than {DEPTH_MAX} levels"),
        ));
    }
    // A derived struct would also take an array, by position.
    if text.trim_ascii_start().starts_with('[') {
        return Err(ApiError::invalid(
            "invalid_json",
            "the body must be a JSON object, not an array",
        ));
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.classify() != Category::Data {
            return ApiError::invalid(
                "invalid_json",
                format!("the body is not valid JSON: {inner}"),
            );
        }
        let words = inner.to_string();
        // The path says where; lines and columns mean little in a body that a program wrote.
        let words = words
            .rsplit_once(" at line ")
            .map_or(&*words, |(words, _)| words);
        let code = if words.starts_with("invalid type") {
            "invalid_type"
        } else if words.starts_with("missing field") {
            "missing_required_parameter"
        } else {
            "invalid_value"
        };
        if path == "." {
            return ApiError::invalid(code, words);
        }
        ApiError::invalid(code, format!("`{path}`: {words}")).with_param(path)
    })?;
    reader.end().map_err(|error| {
        ApiError::invalid(
            "invalid_json",
            format!("the body is not valid JSON: {error}"),
        )
    })?;
    Ok(value)
}

/// Whether brackets outside of strings nest no deeper than [`DEPTH_MAX`].
fn depth_fits(bytes: &[u8]) -> bool {
    let mut depth = 0_u32;
    let mut in_string = false;
    let mut escaped = false;
    for &byte in bytes {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' | b'{' => {
                depth += 1;
                if depth > DEPTH_MAX {
                    return false;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_strings_are_no_depth() {
        let text = format!("{{\"a\":\"{}\\\"[[\"}}", "[".repeat(1000));
        assert!(depth_fits(text.as_bytes()));
        assert!(!depth_fits("[".repeat(129).as_bytes()));
        assert!(depth_fits("[]".repeat(1000).as_bytes()));
    }
}

//! JSON in the layout of Python's `json.dumps`, as chat templates were written against it.

use std::io;

use minijinja::Value;
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// The value as `json.dumps(value, ensure_ascii=False, indent=…, separators=…)` writes it.
///
/// # Errors
/// Where the value has no JSON form.
pub(super) fn dumps(
    value: &Value,
    indent: Option<usize>,
    separators: Option<Vec<String>>,
) -> serde_json::Result<String> {
    let mut out = Vec::new();
    if let Some(indent) = indent {
        let spaces = " ".repeat(indent);
        let formatter = PrettyFormatter::with_indent(spaces.as_bytes());
        value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
    } else {
        let mut given = separators.unwrap_or_default().into_iter();
        let item = given.next().unwrap_or_else(|| ", ".to_owned());
        let key = given.next().unwrap_or_else(|| ": ".to_owned());
        value.serialize(&mut Serializer::with_formatter(
            &mut out,
            OneLine { item, key },
        ))?;
    }
    Ok(String::from_utf8_lossy(&out).into_owned())
}

/// Everything on one line, with Python's separators.
struct OneLine {
    item: String,
    key: String,
}

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            w.write_all(self.item.as_bytes())
        }
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            w.write_all(self.item.as_bytes())
        }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.key.as_bytes())
    }
}

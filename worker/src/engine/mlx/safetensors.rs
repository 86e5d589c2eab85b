//! The inventory of a folder's safetensors files, read from their headers and checked against their sizes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::{permanent, unreadable};
use crate::engine::LoadError;

/// A header of a 1,000-tensor model is 0.1 MB; the format's own bound is 100 MB.
const HEADER_BYTES_MAX: u64 = 100 << 20;
const INDEX_BYTES_MAX: u64 = 100 << 20;
/// Names enough for a model of hundreds of layers with thousands of experts.
const FILES_MAX: usize = 4096;

/// How the numbers of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stored {
    F32,
    F16,
    BF16,
    U32,
}

impl Stored {
    #[must_use]
    pub(super) fn bytes(self) -> u64 {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::BF16 => 2,
        }
    }

    #[must_use]
    pub(super) fn is_float(self) -> bool {
        self != Self::U32
    }
}

/// One tensor as its file announces it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tensor {
    pub(super) stored: Stored,
    pub(super) shape: Vec<i32>,
}

/// All tensors of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shard {
    pub(super) path: PathBuf,
    pub(super) tensors: BTreeMap<String, Tensor>,
    /// The raw header, for the model's hash.
    pub(super) header: Vec<u8>,
    pub(super) bytes: u64,
}

/// Reads the headers of all the folder's weight files: those its index names, or the only one.
///
/// # Errors
/// Permanent: no weights, a shard that the index names is missing or cut short, a header that is
/// not one, a tensor twice or of a type that no supported model has.
pub(super) fn inventory(folder: &Path) -> Result<Vec<Shard>, LoadError> {
    let index = folder.join("model.safetensors.index.json");
    let files = if index.exists() {
        indexed(&index)?
    } else {
        vec!["model.safetensors".to_owned()]
    };
    let mut seen = BTreeMap::new();
    let mut shards = Vec::with_capacity(files.len());
    for file in files {
        let path = folder.join(&file);
        if !path.exists() {
            return Err(permanent(format!(
                "{file} is missing from the model folder"
            )));
        }
        let shard = read_header(&path)?;
        for name in shard.tensors.keys() {
            if let Some(first) = seen.insert(name.clone(), file.clone()) {
                return Err(permanent(format!(
                    "tensor {name} is in {first} and in {file}"
                )));
            }
        }
        shards.push(shard);
    }
    Ok(shards)
}

fn indexed(index: &Path) -> Result<Vec<String>, LoadError> {
    let text = super::read_text(index, INDEX_BYTES_MAX)?;
    let value: Value = serde_json::from_str(&text)
        .map_err(|e| permanent(format!("model.safetensors.index.json is not JSON: {e}")))?;
    let map = value
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| permanent("model.safetensors.index.json has no weight_map"))?;
    let mut files: Vec<String> = Vec::new();
    for file in map.values() {
        let file = file.as_str().unwrap_or_default();
        // The index is a foreign file: it may name files of its own folder only.
        let plain = Path::new(file).file_name().is_some_and(|name| name == file);
        if !plain || !file.ends_with(".safetensors") {
            return Err(permanent(format!(
                "model.safetensors.index.json names \"{file}\", which is no weight file of the folder"
            )));
        }
        if !files.iter().any(|known| known == file) {
            files.push(file.to_owned());
        }
        if files.len() > FILES_MAX {
            return Err(permanent(
                "model.safetensors.index.json names too many files",
            ));
        }
    }
    if files.is_empty() {
        return Err(permanent("model.safetensors.index.json names no file"));
    }
    files.sort();
    Ok(files)
}

fn read_header(path: &Path) -> Result<Shard, LoadError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let bad = |what: &str| permanent(format!("{name}: {what}"));
    let mut file = File::open(path).map_err(|e| unreadable(path, &e))?;
    let bytes = file.metadata().map_err(|e| unreadable(path, &e))?.len();
    let mut length = [0u8; 8];
    if bytes < 8 {
        return Err(bad("too short for a safetensors file"));
    }
    file.read_exact(&mut length)
        .map_err(|e| unreadable(path, &e))?;
    let length = u64::from_le_bytes(length);
    if length > HEADER_BYTES_MAX || length > bytes - 8 {
        return Err(bad(
            "cut short, or not a safetensors file: its header does not fit",
        ));
    }
    let mut header = vec![0u8; usize::try_from(length).map_err(|_| bad("its header is too long"))?];
    file.read_exact(&mut header)
        .map_err(|e| unreadable(path, &e))?;
    let value: Value = serde_json::from_slice(&header)
        .map_err(|e| permanent(format!("{name}: its header is not JSON: {e}")))?;
    let Value::Object(map) = value else {
        return Err(bad("its header is not an object"));
    };

    let data_bytes = bytes - 8 - length;
    let mut tensors = BTreeMap::new();
    for (key, entry) in map {
        if key == "__metadata__" {
            continue;
        }
        let tensor = tensor(&name, &key, &entry, data_bytes)?;
        tensors.insert(key, tensor);
    }
    Ok(Shard {
        path: path.to_owned(),
        tensors,
        header,
        bytes,
    })
}

fn tensor(file: &str, key: &str, entry: &Value, data_bytes: u64) -> Result<Tensor, LoadError> {
    let bad = |what: String| permanent(format!("{file}: tensor {key} {what}"));
    let stored = match entry.get("dtype").and_then(Value::as_str) {
        Some("F32") => Stored::F32,
        Some("F16") => Stored::F16,
        Some("BF16") => Stored::BF16,
        Some("U32") => Stored::U32,
        Some(other) => return Err(bad(format!("is of type {other}, which is not supported"))),
        None => return Err(bad("has no type".to_owned())),
    };
    let list = |name: &str| -> Option<Vec<u64>> {
        entry
            .get(name)?
            .as_array()?
            .iter()
            .map(Value::as_u64)
            .collect()
    };
    let wide = list("shape").ok_or_else(|| bad("has no shape".to_owned()))?;
    let mut shape = Vec::with_capacity(wide.len());
    let mut want = stored.bytes();
    for size in wide {
        let small = i32::try_from(size).map_err(|_| bad(format!("has a dimension of {size}")))?;
        want = want
            .checked_mul(size)
            .ok_or_else(|| bad("is larger than any memory".to_owned()))?;
        shape.push(small);
    }
    let offsets = list("data_offsets").ok_or_else(|| bad("has no data_offsets".to_owned()))?;
    let [start, end] = offsets[..] else {
        return Err(bad("has not two data_offsets".to_owned()));
    };
    if end.checked_sub(start) != Some(want) {
        return Err(bad(format!("has offsets {start}..{end} for {want} bytes")));
    }
    if end > data_bytes {
        return Err(bad(format!(
            "ends at byte {end} of {data_bytes}: the file is cut short"
        )));
    }
    Ok(Tensor { stored, shape })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn file(folder: &Path, name: &str, header: &str, data: usize) {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        std::fs::write(folder.join(name), bytes).unwrap();
    }

    fn one(name: &str, end: u64) -> String {
        json!({name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, end]}}).to_string()
    }

    #[test]
    fn a_whole_file_is_read_and_one_cut_short_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        file(folder.path(), "model.safetensors", &one("a", 24), 24);
        let shards = inventory(folder.path()).unwrap();
        assert_eq!(shards[0].tensors["a"].shape, [2, 3]);
        file(folder.path(), "model.safetensors", &one("a", 24), 23);
        let error = inventory(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("tensor a") && error.contains("cut short"),
            "{error}"
        );
    }

    #[test]
    fn foreign_headers_are_errors_and_never_panics() {
        let folder = tempfile::tempdir().unwrap();
        for header in [
            "",
            "[]",
            "{",
            r#"{"a": 1}"#,
            r#"{"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}}"#,
            r#"{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}"#,
            r#"{"a": {"dtype": "F32", "shape": [4294967296], "data_offsets": [0, 8]}}"#,
            r#"{"a": {"dtype": "F32", "shape": [2147483647, 2147483647, 2147483647], "data_offsets": [0, 8]}}"#,
            r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}"#,
            r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}"#,
        ] {
            file(folder.path(), "model.safetensors", header, 8);
            assert!(inventory(folder.path()).is_err(), "{header}");
        }
        for bytes in [&b""[..], b"short", &[0xff; 16]] {
            std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
            assert!(inventory(folder.path()).is_err());
        }
    }

    #[test]
    fn an_index_may_name_files_of_its_own_folder_only_and_each_must_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let index = |file: &str| {
            let text = json!({"weight_map": {"a": file}}).to_string();
            std::fs::write(folder.path().join("model.safetensors.index.json"), text).unwrap();
            inventory(folder.path()).map(|shards| shards.len())
        };
        file(folder.path(), "one.safetensors", &one("a", 24), 24);
        assert_eq!(index("one.safetensors"), Ok(1));
        for (name, told) in [
            ("../one.safetensors", "no weight file"),
            ("/etc/passwd", "no weight file"),
            ("two.safetensors", "two.safetensors is missing"),
        ] {
            let error = index(name).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
    }
}

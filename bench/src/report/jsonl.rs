//! Raw records, one JSON object a line, only ever appended.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::BenchError;

/// Appends records. Each is written whole by one call, so that a run that is killed loses at most the record it was writing.
#[derive(Debug)]
pub struct Writer {
    file: File,
    path: PathBuf,
    line: Vec<u8>,
}

impl Writer {
    /// Opens `path` for appending, and makes it where there is none. The rest of a line that an earlier
    /// run left unfinished is closed first, so that it cannot spoil the next record.
    ///
    /// # Errors
    /// The file cannot be opened or written.
    pub fn open(path: &Path) -> Result<Self, BenchError> {
        let failed = |source| BenchError::File {
            path: path.to_owned(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(failed)?;
        if file.metadata().map_err(failed)?.len() > 0 {
            let mut last = [0];
            file.seek(SeekFrom::End(-1)).map_err(failed)?;
            file.read_exact(&mut last).map_err(failed)?;
            if last != *b"\n" {
                file.write_all(b"\n").map_err(failed)?;
            }
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            line: Vec::new(),
        })
    }

    /// Appends one record.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn append(&mut self, record: &impl Serialize) -> Result<(), BenchError> {
        let failed = |source| BenchError::File {
            path: self.path.clone(),
            source,
        };
        self.line.clear();
        serde_json::to_writer(&mut self.line, record)
            .map_err(|error| failed(std::io::Error::other(error)))?;
        self.line.push(b'\n');
        self.file.write_all(&self.line).map_err(failed)
    }
}

/// What a file holds, and what of it could not be read.
#[derive(Debug)]
pub struct Contents<T> {
    pub records: Vec<T>,
    /// Whole lines that are no such record.
    pub unreadable_lines: usize,
    /// The last line has no end: the writer was killed in it.
    pub cut: bool,
}

/// Reads all whole records of `path`.
///
/// # Errors
/// The file cannot be read at all.
pub fn read<T: DeserializeOwned>(path: &Path) -> Result<Contents<T>, BenchError> {
    let bytes = std::fs::read(path).map_err(|source| BenchError::File {
        path: path.to_owned(),
        source,
    })?;
    let mut contents = Contents {
        records: Vec::new(),
        unreadable_lines: 0,
        cut: !bytes.is_empty() && bytes.last() != Some(&b'\n'),
    };
    let mut lines: Vec<&[u8]> = bytes.split(|&byte| byte == b'\n').collect();
    // After the last line feed comes nothing, or a cut record.
    lines.pop();
    for line in lines.into_iter().filter(|line| !line.is_empty()) {
        match serde_json::from_slice(line) {
            Ok(record) => contents.records.push(record),
            Err(_) => contents.unreadable_lines += 1,
        }
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::Sample;

    #[test]
    fn a_file_cut_anywhere_gives_all_whole_records_and_takes_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("samples.jsonl");
        let mut writer = Writer::open(&path).unwrap();
        for id in 0..3 {
            let mut sample = Sample::begin(id, 0, 0, 1);
            sample.token(5);
            writer.append(&sample).unwrap();
        }
        drop(writer);
        let whole = std::fs::read(&path).unwrap();
        let third = whole.len() / 3;
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let contents = read::<Sample>(&path).unwrap();
            assert_eq!(contents.records.len(), length / third);
            assert_eq!(contents.cut, length % third != 0);

            Writer::open(&path)
                .unwrap()
                .append(&Sample::begin(9, 0, 0, 1))
                .unwrap();
            let contents = read::<Sample>(&path).unwrap();
            assert_eq!(contents.records.last().unwrap().id, 9);
            assert!(!contents.cut);
            // A record that lacks no more than its line feed is whole again.
            assert!(contents.records.len() + contents.unreadable_lines > length / third);
        }
    }
}

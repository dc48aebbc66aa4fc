//! One file per subcommand.

pub(crate) mod caps;
pub(crate) mod compile;
pub(crate) mod inspect;
pub(crate) mod reference;
pub(crate) mod verify;

use memmap2::Mmap;
use ork_compiler::error::{Error, Result};
use ork_compiler::report::Report;
use ork_formats::one_line;
use ork_formats::pack::Reader;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// A mapped and proven pack.
pub(crate) struct Opened {
    pub(crate) map: Mmap,
    pub(crate) reader: Reader,
}

impl Opened {
    pub(crate) fn new(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::Input(format!("{}: no such file", path.display()))
            }
            _ => io(path)(e),
        })?;
        // SAFETY: read-only private mapping; packs are replaced by rename, never changed in place. A
        // truncation by another program while we read is outside this contract.
        let map = unsafe { Mmap::map(&file) }.map_err(io(path))?;
        let reader = Reader::parse(&map).map_err(|e| {
            let text = format!("{}: {e}", path.display());
            match e.is_mismatch() {
                true => Error::Mismatch(text),
                false => Error::Input(text),
            }
        })?;
        Ok(Self { map, reader })
    }
}

/// Writes to stdout. A reader that went away (`| head`) is no failure of ours.
pub(crate) fn say(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => Err(io(Path::new("stdout"))(e)),
        _ => Ok(()),
    }
}

/// Writes a line to stderr; one that nobody can read is no failure.
pub(crate) fn warn(text: &str) {
    eprintln!("orkc: warning: {}", one_line(text));
}

pub(crate) fn print(report: &Report, json: bool) -> Result<()> {
    match json {
        true => {
            say(&(serde_json::to_string_pretty(report).expect("a report is plain data") + "\n"))
        }
        false => say(&report.to_string()),
    }
}

pub(crate) fn io(path: &Path) -> impl Fn(std::io::Error) -> Error + '_ {
    |source| Error::Io {
        path: path.to_path_buf(),
        source,
    }
}

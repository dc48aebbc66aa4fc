//! The deterministic writer: a temporary sibling, synced, renamed.

use super::header::Header;
use super::{ALIGN, HEADER_BYTES, Kind, MAGIC, Section, VERSION};
use crate::golden::Golden;
use crate::model::Manifest;
use ork_caps::Caps;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Why a pack could not be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The target exists and may not be replaced.
    #[error("{} exists; {why}", path.display())]
    Exists {
        /// Target.
        path: PathBuf,
        /// And the fix.
        why: &'static str,
    },
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// What it said.
        source: std::io::Error,
    },
    /// A section was written short or long.
    #[error("section {0} got {1} bytes, {2} were reserved")]
    Reserved(&'static str, u64, u64),
}

/// Handle of a reserved section.
#[derive(Clone, Copy, Debug)]
pub struct SectionId(usize);

struct Open {
    section: Section,
    written: u64,
    hasher: blake3::Hasher,
}

/// Writes one pack. Sections are created in file order ([`Kind::ALL`]); reserved ones may be filled
/// in any interleaving. Dropping it before [`Writer::publish`] removes the temporary file.
pub struct Writer {
    target: PathBuf,
    temp: PathBuf,
    file: File,
    sections: Vec<Open>,
    end: u64,
    fingerprint: u64,
    soc: &'static str,
    force: bool,
    finished: bool,
}

impl Writer {
    /// Starts a pack for `caps` that will appear at `target`.
    ///
    /// # Errors
    /// [`WriteError::Exists`] when the target exists without `force`, or is not a pack of ours.
    pub fn create(target: &Path, force: bool, caps: &Caps) -> Result<Self, WriteError> {
        may_replace(target, force)?;
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.tmp", std::process::id()));
        let temp = target.with_file_name(name);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temp)
            .map_err(|source| WriteError::Io {
                path: temp.clone(),
                source,
            })?;
        Ok(Self {
            target: target.to_path_buf(),
            temp,
            file,
            sections: Vec::new(),
            end: HEADER_BYTES as u64,
            fingerprint: caps.fingerprint(),
            soc: caps.name,
            force,
            finished: false,
        })
    }

    /// Reserves a raw section of exactly `len` bytes.
    ///
    /// # Errors
    /// [`WriteError::Io`], for instance a full disk.
    pub fn begin(&mut self, kind: Kind, len: u64) -> Result<SectionId, WriteError> {
        let offset = self.end.next_multiple_of(ALIGN);
        self.end = offset + len;
        let end = self.end;
        self.io(|file| file.set_len(end))?;
        self.sections.push(Open {
            section: Section {
                kind,
                offset,
                stored: len,
                raw: len,
                hash: [0; 32],
            },
            written: 0,
            hasher: blake3::Hasher::new(),
        });
        Ok(SectionId(self.sections.len() - 1))
    }

    /// Appends to a reserved section.
    ///
    /// # Errors
    /// [`WriteError::Reserved`] past its end, [`WriteError::Io`].
    pub fn write(&mut self, id: SectionId, bytes: &[u8]) -> Result<(), WriteError> {
        let open = &mut self.sections[id.0];
        let at = open.section.offset + open.written;
        open.written += bytes.len() as u64;
        if open.section.stored < open.written {
            return Err(WriteError::Reserved(
                open.section.kind.name(),
                open.written,
                open.section.stored,
            ));
        }
        open.hasher.update(bytes);
        self.io(|file| {
            file.seek(SeekFrom::Start(at))?;
            file.write_all(bytes)
        })
    }

    /// Writes a whole zstd section.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn compressed(&mut self, kind: Kind, raw: &[u8]) -> Result<(), WriteError> {
        let stored = zstd::bulk::compress(raw, 9).map_err(|source| WriteError::Io {
            path: self.temp.clone(),
            source,
        })?;
        let id = self.begin(kind, stored.len() as u64)?;
        self.sections[id.0].section.raw = raw.len() as u64;
        self.write(id, &stored)
    }

    /// Writes the tokenizer section.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn tokenizer(&mut self, definition: &[u8]) -> Result<(), WriteError> {
        self.compressed(Kind::Tokenizer, definition)
    }

    /// Writes the golden section.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn golden(&mut self, golden: &Golden) -> Result<(), WriteError> {
        let bytes = bincode::serde::encode_to_vec(golden, bincode::config::standard())
            .expect("golden vectors have no value that bincode refuses");
        self.compressed(Kind::Golden, &bytes)
    }

    /// Writes the manifest section.
    ///
    /// # Errors
    /// [`WriteError::Io`].
    pub fn manifest(&mut self, manifest: &Manifest) -> Result<(), WriteError> {
        let bytes = bincode::serde::encode_to_vec(manifest, bincode::config::standard())
            .expect("a manifest has no value that bincode refuses");
        self.compressed(Kind::Manifest, &bytes)
    }

    /// Writes the header and syncs; returns the BLAKE3 of the header page, which covers every section's
    /// hash and so names the pack's content.
    ///
    /// # Errors
    /// [`WriteError::Reserved`] for a section left short, [`WriteError::Io`].
    pub fn seal(&mut self) -> Result<[u8; 32], WriteError> {
        let mut sections = Vec::new();
        for open in &self.sections {
            if open.written != open.section.stored {
                return Err(WriteError::Reserved(
                    open.section.kind.name(),
                    open.written,
                    open.section.stored,
                ));
            }
            sections.push(Section {
                hash: *open.hasher.finalize().as_bytes(),
                ..open.section
            });
        }
        let page = Header {
            version: VERSION,
            total: self.end,
            fingerprint: self.fingerprint,
            soc: self.soc.to_string(),
            sections,
        }
        .encode();
        self.io(|file| {
            file.seek(SeekFrom::Start(0))?;
            file.write_all(&page)?;
            file.sync_all()
        })?;
        Ok(*blake3::hash(&page).as_bytes())
    }

    /// The temporary file, complete after [`Writer::seal`], for a last look before it appears.
    #[must_use]
    pub fn temp(&self) -> &Path {
        &self.temp
    }

    /// Gives the sealed file its final name.
    ///
    /// # Errors
    /// [`WriteError::Exists`] when something took the name meanwhile, [`WriteError::Io`].
    pub fn publish(mut self) -> Result<(), WriteError> {
        let named = |source: std::io::Error| WriteError::Io {
            path: self.target.clone(),
            source,
        };
        if self.force {
            may_replace(&self.target, true)?;
            std::fs::rename(&self.temp, &self.target).map_err(named)?;
        } else {
            // A link never replaces what is there; a rename would.
            match std::fs::hard_link(&self.temp, &self.target) {
                Ok(()) => std::fs::remove_file(&self.temp).map_err(named)?,
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                    return Err(WriteError::Exists {
                        path: self.target.clone(),
                        why: "it appeared during the compile; choose another name",
                    });
                }
                // Memory cards are often formatted without hard links.
                Err(_) => {
                    may_replace(&self.target, false)?;
                    std::fs::rename(&self.temp, &self.target).map_err(named)?;
                }
            }
        }
        self.finished = true;
        sync_directory(&self.target)
    }

    fn io<T>(&mut self, f: impl FnOnce(&mut File) -> std::io::Result<T>) -> Result<T, WriteError> {
        f(&mut self.file).map_err(|source| WriteError::Io {
            path: self.temp.clone(),
            source,
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            // Nothing useful can be done when even the removal fails.
            let _ = std::fs::remove_file(&self.temp);
        }
    }
}

/// A directory entry survives a power cut only once its directory is synced.
fn sync_directory(target: &Path) -> Result<(), WriteError> {
    let parent = target
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    match File::open(parent).and_then(|dir| dir.sync_all()) {
        // Some filesystems cannot sync a directory; the pack itself is complete and synced.
        Err(e)
            if !matches!(
                e.kind(),
                std::io::ErrorKind::InvalidInput | std::io::ErrorKind::Unsupported
            ) =>
        {
            Err(WriteError::Io {
                path: parent.to_path_buf(),
                source: e,
            })
        }
        _ => Ok(()),
    }
}

/// Refuses a target that exists, unless it is a pack of ours and `force` is given.
fn may_replace(target: &Path, force: bool) -> Result<(), WriteError> {
    let refuse = |why| {
        Err(WriteError::Exists {
            path: target.to_path_buf(),
            why,
        })
    };
    let named = |source| WriteError::Io {
        path: target.to_path_buf(),
        source,
    };
    match std::fs::symlink_metadata(target) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(named(source)),
        // Opening a pipe would wait for its writer; replacing a link would not change its target.
        Ok(found) if !found.is_file() => {
            return refuse("it is no regular file; name the pack itself");
        }
        Ok(_) => {}
    }
    let mut file = File::open(target).map_err(named)?;
    let mut first = [0u8; 8];
    let ours = file.read_exact(&mut first).is_ok() && first == MAGIC;
    match (ours, force) {
        (false, _) => refuse("it is not an .orkpack and is never overwritten; choose another name"),
        (true, false) => refuse("pass --force to replace it"),
        (true, true) => Ok(()),
    }
}

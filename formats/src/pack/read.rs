//! The validating reader.

use super::header::Header;
use super::{ALIGN, COLD_LIMIT, HEADER_BYTES, Kind, PackError, Section, prove};
use crate::golden::Golden;
use crate::model::Manifest;
use crate::regcmd::Reloc;
use ork_caps::Caps;
use serde::de::DeserializeOwned;
use std::ops::Range;

/// A proven pack. It owns the cold sections and remembers where the hot ones are; the file's bytes
/// stay with the caller and are passed back to the view methods.
#[derive(Debug)]
pub struct Reader {
    sections: Vec<Section>,
    manifest: Manifest,
    tokenizer: Vec<u8>,
    programs: Vec<u8>,
    relocs: Vec<Reloc>,
    golden: Option<Golden>,
    version: u32,
    caps: &'static Caps,
    total: u64,
}

impl Reader {
    /// Proves structure, cold sections, programs and relocations of `file`. The bulk weights are
    /// hashed only by [`Reader::verify`].
    ///
    /// # Errors
    /// The first fault found; nothing is allocated beyond what the file's length justifies.
    pub fn parse(file: &[u8]) -> Result<Self, PackError> {
        let header = Header::decode(file)?;
        if header.total != file.len() as u64 {
            return Err(PackError::Length {
                have: file.len() as u64,
                need: header.total,
            });
        }
        let caps = ork_caps::find(&header.soc).ok_or(PackError::Soc(header.soc.clone()))?;
        if caps.fingerprint() != header.fingerprint {
            return Err(PackError::Caps {
                soc: caps.name,
                found: header.fingerprint,
                have: caps.fingerprint(),
            });
        }
        check_sections(file, header.version, &header.sections)?;
        let mut reader = Self {
            manifest: Manifest::empty(),
            tokenizer: Vec::new(),
            programs: Vec::new(),
            relocs: Vec::new(),
            golden: None,
            version: header.version,
            sections: header.sections,
            caps,
            total: header.total,
        };
        for kind in [
            Kind::Programs,
            Kind::Relocs,
            Kind::Tokenizer,
            Kind::Manifest,
        ] {
            reader.check_hash(file, kind)?;
        }
        // Copied, then proven: what was proven is what runs, even if the file changes under a mapping.
        reader.programs = file[reader.range(Kind::Programs)].to_vec();
        reader.relocs = reader.decode_relocs(file)?;
        reader.tokenizer = reader.decompress(file, Kind::Tokenizer)?;
        let raw = reader.decompress(file, Kind::Manifest)?;
        reader.manifest = decode(Kind::Manifest, &raw)?;
        prove::model(&reader.manifest, reader.section(Kind::HostWeights).stored)?;
        prove::programs(
            &reader.manifest,
            caps,
            &reader.programs,
            &reader.relocs,
            reader.section(Kind::NpuWeights).stored,
        )?;
        if 2 <= header.version {
            reader.check_hash(file, Kind::Golden)?;
            let raw = reader.decompress(file, Kind::Golden)?;
            let golden: Golden = decode(Kind::Golden, &raw)?;
            let programs = reader.manifest.npu.as_ref().map_or(0, |p| p.programs.len());
            if let Some(answer) = golden
                .blocks
                .iter()
                .find(|a| programs <= a.program as usize)
            {
                return Err(PackError::Model(format!(
                    "golden answer of program {}, there are {programs}",
                    answer.program
                )));
            }
            reader.golden = Some(golden);
        }
        Ok(reader)
    }

    /// Hashes every section.
    ///
    /// # Errors
    /// [`PackError::SectionHash`] naming the first damaged one.
    pub fn verify(&self, file: &[u8]) -> Result<(), PackError> {
        Kind::of_version(self.version).try_for_each(|kind| self.check_hash(file, kind))
    }

    /// Format version of the file.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Known answers; `None` in packs of version 1.
    #[must_use]
    pub fn golden(&self) -> Option<&Golden> {
        self.golden.as_ref()
    }

    /// The manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Limits the pack was planned for.
    #[must_use]
    pub fn caps(&self) -> &'static Caps {
        self.caps
    }

    /// The kitoken definition.
    #[must_use]
    pub fn tokenizer(&self) -> &[u8] {
        &self.tokenizer
    }

    /// (name, bytes in the file) of every section.
    #[must_use]
    pub fn section_sizes(&self) -> Vec<(&'static str, u64)> {
        self.sections
            .iter()
            .map(|s| (s.kind.name(), s.stored))
            .collect()
    }

    /// The section table.
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Length of the file.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Tensors of the CPU.
    #[must_use]
    pub fn host<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        &file[self.range(Kind::HostWeights)]
    }

    /// Native weight tiles.
    #[must_use]
    pub fn npu_weights<'a>(&self, file: &'a [u8]) -> &'a [u8] {
        &file[self.range(Kind::NpuWeights)]
    }

    /// Command streams, as proven.
    #[must_use]
    pub fn programs(&self) -> &[u8] {
        &self.programs
    }

    /// Relocations, in word order, as proven.
    #[must_use]
    pub fn relocs(&self) -> &[Reloc] {
        &self.relocs
    }

    fn decode_relocs(&self, file: &[u8]) -> Result<Vec<Reloc>, PackError> {
        let bytes = &file[self.range(Kind::Relocs)];
        let (records, rest) = bytes.as_chunks::<12>();
        if !rest.is_empty() {
            return Err(PackError::Section {
                section: Kind::Relocs.name().into(),
                fault: format!("{} bytes, a relocation has 12", bytes.len()),
            });
        }
        Ok(records.iter().map(|b| Reloc::from_bytes(*b)).collect())
    }

    fn section(&self, kind: Kind) -> &Section {
        self.sections
            .iter()
            .find(|s| s.kind == kind)
            .expect("check_sections proved that every kind is present")
    }

    fn range(&self, kind: Kind) -> Range<usize> {
        let section = self.section(kind);
        section.offset as usize..(section.offset + section.stored) as usize
    }

    fn check_hash(&self, file: &[u8], kind: Kind) -> Result<(), PackError> {
        if blake3::hash(&file[self.range(kind)]).as_bytes() == &self.section(kind).hash {
            Ok(())
        } else {
            Err(PackError::SectionHash(kind.name()))
        }
    }

    fn decompress(&self, file: &[u8], kind: Kind) -> Result<Vec<u8>, PackError> {
        let section = self.section(kind);
        let fault = |fault: String| PackError::Section {
            section: kind.name().into(),
            fault,
        };
        let raw = zstd::bulk::decompress(&file[self.range(kind)], section.raw as usize)
            .map_err(|e| fault(format!("does not decompress: {e}")))?;
        if raw.len() as u64 != section.raw {
            return Err(fault(format!(
                "expands to {} bytes, its row says {}",
                raw.len(),
                section.raw
            )));
        }
        Ok(raw)
    }
}

/// Decodes a whole cold section.
fn decode<T: DeserializeOwned>(kind: Kind, raw: &[u8]) -> Result<T, PackError> {
    let fault = |fault| PackError::Decode {
        section: kind.name(),
        fault,
    };
    // bincode allocates a string before it looks whether so many bytes follow, up to a limit that is a
    // constant: here at least 16 bytes of memory per byte, and rarely 256.
    const SMALL: usize = 1 << 20;
    const MEDIUM: usize = 16 << 20;
    const LARGE: usize = 256 << 20;
    const LARGEST: usize = 16 * COLD_LIMIT as usize;
    let config = bincode::config::standard();
    let (value, used) = match 16 * raw.len() {
        n if n <= SMALL => bincode::serde::decode_from_slice(raw, config.with_limit::<SMALL>()),
        n if n <= MEDIUM => bincode::serde::decode_from_slice(raw, config.with_limit::<MEDIUM>()),
        n if n <= LARGE => bincode::serde::decode_from_slice(raw, config.with_limit::<LARGE>()),
        _ => bincode::serde::decode_from_slice(raw, config.with_limit::<LARGEST>()),
    }
    .map_err(|e| fault(crate::one_line(&e.to_string())))?;
    match used == raw.len() {
        true => Ok(value),
        false => Err(fault(format!("{} bytes left over", raw.len() - used))),
    }
}

/// Proves the table: every kind once, in order, aligned, no gap but zero padding, nothing after.
fn check_sections(file: &[u8], version: u32, sections: &[Section]) -> Result<(), PackError> {
    let fault = |kind: Kind, fault: String| PackError::Section {
        section: kind.name().into(),
        fault,
    };
    let kinds: Vec<Kind> = Kind::of_version(version).collect();
    if sections.len() != kinds.len() {
        return Err(PackError::Section {
            section: "table".into(),
            fault: format!("{} sections, expected {}", sections.len(), kinds.len()),
        });
    }
    let mut end = HEADER_BYTES as u64;
    for (section, kind) in sections.iter().zip(kinds) {
        if section.kind != kind {
            return Err(fault(
                section.kind,
                format!("stands where {} belongs", kind.name()),
            ));
        }
        let start = end.next_multiple_of(ALIGN);
        if section.offset != start {
            return Err(fault(
                kind,
                format!("starts at {}, expected {start}", section.offset),
            ));
        }
        let stop = section.offset.checked_add(section.stored);
        let stop = stop.filter(|s| *s <= file.len() as u64).ok_or_else(|| {
            fault(
                kind,
                format!(
                    "{} bytes at {} exceed the file's {}",
                    section.stored,
                    section.offset,
                    file.len()
                ),
            )
        })?;
        // zstd's best case is a ratio of a few thousand; a larger promise is a decompression bomb.
        let justified = section.stored.saturating_mul(4096).min(COLD_LIMIT);
        if kind.compressed() && section.raw > justified {
            return Err(fault(
                kind,
                format!("promises {} bytes from {}", section.raw, section.stored),
            ));
        }
        if kind == Kind::Relocs && !section.stored.is_multiple_of(size_of::<Reloc>() as u64) {
            return Err(fault(
                kind,
                format!("{} bytes are no whole relocations", section.stored),
            ));
        }
        if !kind.compressed() && section.raw != section.stored {
            return Err(fault(
                kind,
                format!("raw length {} but {} stored", section.raw, section.stored),
            ));
        }
        zero_padding(file, end, start)?;
        end = stop;
    }
    if end != file.len() as u64 {
        return Err(PackError::Length {
            have: file.len() as u64,
            need: end,
        });
    }
    Ok(())
}

fn zero_padding(file: &[u8], from: u64, to: u64) -> Result<(), PackError> {
    match file[from as usize..to as usize]
        .iter()
        .position(|b| *b != 0)
    {
        Some(at) => Err(PackError::Padding(from + at as u64)),
        None => Ok(()),
    }
}

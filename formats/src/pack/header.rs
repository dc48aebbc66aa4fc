//! Byte layout of the header page.

use super::PackError;

/// First 8 bytes: a high bit, the name, and line endings that text-mode copies destroy.
pub const MAGIC: [u8; 8] = [0x89, b'O', b'R', b'K', b'\r', b'\n', 0x1a, b'\n'];
/// Format version written; the previous one is read too. Version 1 had no golden section.
pub const VERSION: u32 = 2;
/// Oldest format version read.
pub const OLDEST: u32 = 1;
/// Bytes of the header page.
pub const HEADER_BYTES: usize = 4096;
/// Alignment of every section: the largest page size among 64-bit Linux kernels.
pub const ALIGN: u64 = 65536;
/// Offset of the section table.
const TABLE: usize = 64;
/// Bytes of one section table entry.
const ENTRY: usize = 64;
/// Offset of the header checksum.
const HASH: usize = HEADER_BYTES - 32;

/// What a section holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Native int8 weight tiles, extent after extent.
    NpuWeights = 1,
    /// Tensors that the CPU reads in place.
    HostWeights = 2,
    /// Command streams.
    Programs = 3,
    /// Relocations of the command streams.
    Relocs = 4,
    /// kitoken definition, zstd.
    Tokenizer = 5,
    /// bincode [`crate::model::Manifest`], zstd.
    Manifest = 6,
    /// bincode [`crate::golden::Golden`], zstd; since version 2.
    Golden = 7,
}

impl Kind {
    /// Every kind, in file order.
    pub const ALL: [Self; 7] = [
        Self::NpuWeights,
        Self::HostWeights,
        Self::Programs,
        Self::Relocs,
        Self::Tokenizer,
        Self::Golden,
        Self::Manifest,
    ];

    /// The kinds a file of format `version` holds, in file order.
    pub fn of_version(version: u32) -> impl Iterator<Item = Self> {
        Self::ALL
            .into_iter()
            .filter(move |kind| *kind != Self::Golden || 2 <= version)
    }

    /// Name for reports and errors.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NpuWeights => "npu-weights",
            Self::HostWeights => "host-weights",
            Self::Programs => "programs",
            Self::Relocs => "relocs",
            Self::Tokenizer => "tokenizer",
            Self::Manifest => "manifest",
            Self::Golden => "golden",
        }
    }

    /// Whether the bytes are zstd compressed.
    #[must_use]
    pub fn compressed(self) -> bool {
        matches!(self, Self::Tokenizer | Self::Manifest | Self::Golden)
    }

    fn from_u32(value: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u32 == value)
    }
}

/// One row of the section table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section {
    /// What it holds.
    pub kind: Kind,
    /// From the start of the file; a multiple of [`ALIGN`].
    pub offset: u64,
    /// Bytes in the file.
    pub stored: u64,
    /// Bytes after decompression; equal to `stored` for raw sections.
    pub raw: u64,
    /// BLAKE3 of the stored bytes.
    pub hash: [u8; 32],
}

/// The decoded header page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) total: u64,
    pub(super) fingerprint: u64,
    pub(super) soc: String,
    pub(super) sections: Vec<Section>,
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

impl Header {
    /// Decodes and proves the header page of a file of `file_len` bytes.
    pub(super) fn decode(file: &[u8]) -> Result<Self, PackError> {
        if file.is_empty() {
            return Err(PackError::Empty);
        }
        if !file.starts_with(&MAGIC) {
            return Err(foreign(file));
        }
        if file.len() < HEADER_BYTES {
            return Err(PackError::CutHeader {
                have: file.len() as u64,
                need: HEADER_BYTES as u64,
            });
        }
        let page = &file[..HEADER_BYTES];
        let version = u32_at(page, 8);
        if !(OLDEST..=VERSION).contains(&version) {
            return Err(PackError::Version {
                found: version,
                oldest: OLDEST,
                newest: VERSION,
            });
        }
        if blake3::hash(&page[..HASH]).as_bytes() != &page[HASH..] {
            return Err(PackError::HeaderHash);
        }
        let soc_bytes = &page[32..48];
        let soc_len = soc_bytes.iter().position(|b| *b == 0).unwrap_or(16);
        let soc = crate::one_line(&String::from_utf8_lossy(&soc_bytes[..soc_len]));
        let count = u32_at(page, 12) as usize;
        if count > (HASH - TABLE) / ENTRY {
            return Err(PackError::Section {
                section: "table".into(),
                fault: format!("{count} entries, at most {}", (HASH - TABLE) / ENTRY),
            });
        }
        let mut sections = Vec::with_capacity(count);
        for index in 0..count {
            let row = &page[TABLE + index * ENTRY..][..ENTRY];
            let kind = Kind::from_u32(u32_at(row, 0)).ok_or_else(|| PackError::Section {
                section: index.to_string(),
                fault: format!("unknown kind {}", u32_at(row, 0)),
            })?;
            sections.push(Section {
                kind,
                offset: u64_at(row, 8),
                stored: u64_at(row, 16),
                raw: u64_at(row, 24),
                hash: row[32..64].try_into().expect("32 bytes"),
            });
        }
        let header = Self {
            version,
            total: u64_at(page, 16),
            fingerprint: u64_at(page, 24),
            soc,
            sections,
        };
        let again = header.encode();
        match again.iter().zip(page).position(|(a, b)| a != b) {
            Some(at) => Err(PackError::Padding(at as u64)),
            None => Ok(header),
        }
    }

    /// The header page; also how [`Header::decode`] proves that no reserved byte is set.
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut page = [0u8; HEADER_BYTES];
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&self.version.to_le_bytes());
        page[12..16].copy_from_slice(&(self.sections.len() as u32).to_le_bytes());
        page[16..24].copy_from_slice(&self.total.to_le_bytes());
        page[24..32].copy_from_slice(&self.fingerprint.to_le_bytes());
        let soc = &self.soc.as_bytes()[..self.soc.len().min(16)];
        page[32..32 + soc.len()].copy_from_slice(soc);
        for (index, section) in self.sections.iter().enumerate() {
            let row = &mut page[TABLE + index * ENTRY..][..ENTRY];
            row[..4].copy_from_slice(&(section.kind as u32).to_le_bytes());
            row[8..16].copy_from_slice(&section.offset.to_le_bytes());
            row[16..24].copy_from_slice(&section.stored.to_le_bytes());
            row[24..32].copy_from_slice(&section.raw.to_le_bytes());
            row[32..64].copy_from_slice(&section.hash);
        }
        let hash = blake3::hash(&page[..HASH]);
        page[HASH..].copy_from_slice(hash.as_bytes());
        page
    }
}

/// Names a file that is not ours, as far as its first and last bytes tell.
fn foreign(file: &[u8]) -> PackError {
    let tail = &file[file.len().saturating_sub(128)..];
    let named = if file.starts_with(b"GGUF") {
        Some("a GGUF model")
    } else if file.starts_with(b"RKNN") {
        Some("an RKNN model")
    } else if file.starts_with(b"RKLLM") {
        Some("an RKLLM model")
    } else if file.starts_with(b"version https://git-lfs") {
        Some("a Git-LFS pointer (run `git lfs pull`)")
    } else if tail.windows(8).any(|w| w == b"ORKPK01\0") {
        Some("a pack of the older ORKPK01 format")
    } else if file.len() > 9 && file[8] == b'{' {
        Some("a safetensors file")
    } else if file.iter().take(4096).all(|b| *b == 0) {
        Some("a file of zero bytes")
    } else {
        None
    };
    match named {
        Some(name) => PackError::Foreign(name),
        None => {
            let mut first = [0u8; 8];
            let n = file.len().min(8);
            first[..n].copy_from_slice(&file[..n]);
            if MAGIC.starts_with(&file[..n]) {
                PackError::CutHeader {
                    have: n as u64,
                    need: HEADER_BYTES as u64,
                }
            } else {
                PackError::Magic(first)
            }
        }
    }
}

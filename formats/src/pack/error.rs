//! One variant per way a file can be wrong.

/// Why a file is not a usable pack.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackError {
    /// Zero bytes.
    #[error("the file is empty; the copy was cut, copy it again")]
    Empty,
    /// Recognised, but something else.
    #[error("this is {0}, not an .orkpack; compile one with `orkc compile`")]
    Foreign(&'static str),
    /// Not recognised at all.
    #[error("not an .orkpack: the first 8 bytes are {0:02x?}")]
    Magic([u8; 8]),
    /// Shorter than the header page.
    #[error("the file has {have} bytes, the header alone has {need}; the copy was cut")]
    CutHeader {
        /// Bytes present.
        have: u64,
        /// Bytes needed.
        need: u64,
    },
    /// Format version out of range.
    #[error(
        "pack format version {found}, this build reads {oldest} to {newest}; {}",
        if newest < found { "install a newer `ork`" } else { "recompile the checkpoint with this `orkc`" }
    )]
    Version {
        /// In the file.
        found: u32,
        /// Oldest understood.
        oldest: u32,
        /// Newest understood.
        newest: u32,
    },
    /// The header page was altered.
    #[error("header checksum mismatch: the first 4096 bytes are damaged, copy the file again")]
    HeaderHash,
    /// File length differs.
    #[error("the file has {have} bytes, its header says {need}; the copy was cut or appended to")]
    Length {
        /// Bytes present.
        have: u64,
        /// Bytes promised.
        need: u64,
    },
    /// Unknown SoC.
    #[error("the pack is for SoC `{0}`, which this build does not know")]
    Soc(String),
    /// Known SoC with other numbers.
    #[error(
        "the pack was planned with another revision of the {soc} limits ({found:016x}, this build has {have:016x}); recompile it"
    )]
    Caps {
        /// Name.
        soc: &'static str,
        /// In the file.
        found: u64,
        /// Built in.
        have: u64,
    },
    /// Section table inconsistent.
    #[error("section {section}: {fault}")]
    Section {
        /// Index or name.
        section: String,
        /// What is wrong.
        fault: String,
    },
    /// A section's content was altered.
    #[error("section {0}: checksum mismatch, the file is damaged")]
    SectionHash(&'static str),
    /// Padding between sections is not zero.
    #[error("byte {0} is padding but not zero; the file is damaged")]
    Padding(u64),
    /// A cold section does not decode.
    #[error("section {section} does not decode: {fault}")]
    Decode {
        /// Which.
        section: &'static str,
        /// The decoder's words.
        fault: String,
    },
    /// The manifest contradicts itself or the sections.
    #[error("manifest: {0}")]
    Model(String),
    /// A program is refused by the linter.
    #[error("program {program}: {finding}")]
    Program {
        /// Index.
        program: u32,
        /// First finding.
        finding: String,
    },
    /// A relocation is wrong or missing.
    #[error("relocation of word {word}: {fault}")]
    Reloc {
        /// Word index in the programs section.
        word: u32,
        /// What is wrong.
        fault: String,
    },
}

impl PackError {
    /// True where another SoC or version is the reason (exit code 5); else the file itself is bad (3).
    #[must_use]
    pub fn is_mismatch(&self) -> bool {
        matches!(
            self,
            Self::Version { .. } | Self::Soc(_) | Self::Caps { .. } | Self::Foreign(_)
        )
    }
}

//! Relocations: the one thing done to a command stream at load.

use bytemuck::{Pod, Zeroable};

/// Adds the base of `extent` plus `offset` into bits 47:16 of word `word`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Pod, Zeroable)]
#[repr(C)]
pub struct Reloc {
    /// Index of the 64-bit word in the programs section.
    pub word: u32,
    /// Which allocation.
    pub extent: u32,
    /// Byte offset inside it.
    pub offset: u32,
}

const _: () = assert!(size_of::<Reloc>() == 12);

impl Reloc {
    /// From the little-endian wire form.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 12]) -> Self {
        let word =
            |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        Self {
            word: word(0),
            extent: word(4),
            offset: word(8),
        }
    }

    /// Little-endian wire form.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 12] {
        let mut out = [0; 12];
        out[..4].copy_from_slice(&self.word.to_le_bytes());
        out[4..8].copy_from_slice(&self.extent.to_le_bytes());
        out[8..].copy_from_slice(&self.offset.to_le_bytes());
        out
    }
}

/// Relocates a whole programs section; `bases[extent]` is the 32-bit device address of each extent.
/// The pack reader has proven every index in range.
pub fn apply(words: &mut [u64], relocs: &[Reloc], bases: &[u32]) {
    for reloc in relocs {
        let word = super::Word(words[reloc.word as usize]);
        let address = bases[reloc.extent as usize].wrapping_add(reloc.offset);
        words[reloc.word as usize] = word.with_value(word.value().wrapping_add(address)).0;
    }
}

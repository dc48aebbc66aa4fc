//! Command streams: the register table, words, the program builder, relocations.

mod program;
mod registers;
mod reloc;

pub use program::{Matmul, build, disassemble};
pub use registers::{
    CNA, CORE, DPU, ENABLE_WORD, Field, PC, RDMA, Reg, TEMPLATE, VERSION_WORD, field, lookup, reg,
};
pub use reloc::{Reloc, apply};

/// Register writes of a matmul program (`regcfg_amount`).
pub const REGS: usize = 108;
/// Words of a matmul program with its 4-word tail.
pub const WORDS: usize = REGS + 4;
/// Bytes of a matmul program; a multiple of 64.
pub const BYTES: usize = WORDS * 8;
/// Enable bits of a matmul: PC, CNA, CORE, DPU.
pub const ENABLE_MATMUL: u32 = 0x0d;
/// Entry of the feature address.
pub const A_ENTRY: usize = 25;
/// Entry of the weight address.
pub const W_ENTRY: usize = 34;
/// Entry of the output address.
pub const C_ENTRY: usize = 61;
/// Entry of the next program's address.
pub const NEXT_ENTRY: usize = 108;

/// Fetch amount announced for a program of `regs` register writes (vendor kernel formula).
#[must_use]
pub const fn next_amount(regs: usize) -> u32 {
    ((regs + 3) / 2) as u32
}

/// One 64-bit command word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word(pub u64);

impl Word {
    /// Writes `value` to `reg`.
    #[must_use]
    pub const fn new(reg: Reg, value: u32) -> Self {
        Self((reg.block as u64) << 48 | (value as u64) << 16 | reg.offset as u64)
    }

    /// Byte offset of the register, bits 15:0.
    #[must_use]
    pub const fn offset(self) -> u16 {
        self.0 as u16
    }

    /// Value, bits 47:16.
    #[must_use]
    pub const fn value(self) -> u32 {
        (self.0 >> 16) as u32
    }

    /// Target block, bits 63:48.
    #[must_use]
    pub const fn block(self) -> u16 {
        (self.0 >> 48) as u16
    }

    /// The same register with another value.
    #[must_use]
    pub const fn with_value(self, value: u32) -> Self {
        Self(self.0 & !(0xffff_ffff << 16) | (value as u64) << 16)
    }

    /// Whether it addresses `reg`.
    #[must_use]
    pub const fn is(self, reg: Reg) -> bool {
        self.block() == reg.block && self.offset() == reg.offset
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_keeps_its_three_parts() {
        let word = Word::new(reg::DATA_FORMAT, 0x8000_0001);
        assert_eq!(word.0, 0x1001_8000_0001_4010);
        assert_eq!((word.block(), word.offset()), (DPU, 0x4010));
        assert_eq!(word.value(), 0x8000_0001);
        assert_eq!(word.with_value(u32::MAX).value(), u32::MAX);
        assert_eq!(word.with_value(u32::MAX).with_value(0x8000_0001), word);
        assert!(word.is(reg::DATA_FORMAT) && !word.is(reg::CONV_CON1));
    }

    /// Published amounts: 55 for the 108-register matmul, 36 for the 69-register program.
    #[test]
    fn amounts_follow_the_vendor_formula() {
        assert_eq!(next_amount(REGS), 0x37);
        assert_eq!(next_amount(69), 36);
    }
}

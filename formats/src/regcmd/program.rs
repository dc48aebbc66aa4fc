//! The matmul program: places decided numbers, decides nothing.

use super::{ENABLE_MATMUL, REGS, TEMPLATE, WORDS, Word, field, lookup, next_amount, reg};
use std::fmt::Write;

/// The numbers of one `C[m, n] = A[m, k] W[n, k]^T` program, int8 in, int32 out, row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matmul {
    /// Rows.
    pub m: u32,
    /// Contracted length.
    pub k: u32,
    /// Output channels.
    pub n: u32,
    /// Output row pitch in elements; equal to `n` for contiguous blocks.
    pub ld: u32,
    /// Feature rows buffered before the start; a hint.
    pub grains_rows: u32,
    /// Buffer banks for features.
    pub data_banks: u32,
    /// Buffer banks for weights.
    pub weight_banks: u32,
}

impl Matmul {
    /// Value of `register` in this program; addresses are zero.
    #[must_use]
    pub fn value(&self, register: super::Reg) -> u32 {
        let Self { m, k, n, ld, .. } = *self;
        match register {
            reg::CBUF_CON0 => {
                field::DATA_BANK.set(self.data_banks) | field::WEIGHT_BANK.set(self.weight_banks)
            }
            // Row-major features are fetched line by line.
            reg::CONV_CON1 => field::GROUP_LINE_OFF.set(1),
            reg::DPU_S_POINTER => 0xe,
            reg::CONV_CON2 => field::FEATURE_GRAINS.set(self.grains_rows),
            // Both strides 1.
            reg::CONV_CON3 => 1 << 3 | 1,
            reg::DATA_SIZE0 | reg::FC_DATA_SIZE0 => field::WIDTH.set(1) | field::HEIGHT.set(m),
            reg::DATA_SIZE1 => field::CHANNEL_REAL_1.set(k - 1) | field::CHANNEL.set(k),
            reg::DATA_SIZE2 => 1,
            reg::DATA_SIZE3 => m,
            reg::WEIGHT_SIZE0 => k * n,
            reg::WEIGHT_SIZE1 => k,
            reg::WEIGHT_SIZE2 => {
                field::KERNEL_WIDTH.set(1) | field::KERNEL_HEIGHT.set(1) | field::KERNELS.set(n)
            }
            // 64-byte buffer entries per line.
            reg::CBUF_CON1 => k.div_ceil(64),
            // Signed data, converter bypassed, unit scales.
            reg::CVT_CON0 => 0xb,
            reg::CVT_CON1 | reg::CVT_CON2 | reg::CVT_CON3 | reg::CVT_CON4 => 1 << 16,
            // Longest bursts for weights and data.
            reg::DMA_CON0 => 0xf << 16 | 0xf,
            // Row stride in 16-byte units.
            reg::DMA_CON1 => k / 16,
            reg::FC_DATA_SIZE1 => k,
            reg::CORE_MISC_CFG => 1,
            reg::CORE_DATAOUT_SIZE_0 | reg::WDMA_SIZE_1 => field::HIGH.set(m - 1),
            reg::CORE_DATAOUT_SIZE_1 | reg::WDMA_SIZE_0 => n - 1,
            // Burst length 15, output mode 2.
            reg::FEATURE_MODE_CFG => 0xf << 5 | 2 << 1,
            // 4 is int32.
            reg::DATA_FORMAT => field::OUT_PRECISION.set(4),
            reg::DST_SURF_STRIDE => 0x10,
            reg::DATA_CUBE_HEIGHT => m - 1,
            reg::DATA_CUBE_NOTCH => field::HIGH.set(ld / 4 - 1) | field::LOW.set(n / 4 - 1),
            reg::DATA_CUBE_CHANNEL => field::HIGH.set(ld - 1) | field::LOW.set(n - 1),
            // Every post-processing unit bypassed.
            reg::BS_CFG | reg::BN_CFG => 0x53,
            // All size_e fields 7: int32 output geometry.
            reg::BS_OW_CFG => 0x7 << 8 | 0x7 << 5 | 0x7 << 2,
            reg::EW_CFG => 0x383,
            reg::EW_CVT_SCALE | reg::OUT_CVT_SCALE => 1,
            // 8 x DST_SURF_STRIDE for int32. Looks like an address, is none.
            reg::SURFACE_ADD => 0x80,
            _ => 0,
        }
    }
}

/// Builds the program with every address zero. `next` leaves room for a link; otherwise the tail is
/// the terminal template form (zeroing the amount entry too can hang a lone task).
#[must_use]
pub fn build(matmul: &Matmul, next: bool) -> [Word; WORDS] {
    let mut words = [Word(0); WORDS];
    for (word, register) in words.iter_mut().zip(TEMPLATE) {
        *word = Word::new(register, matmul.value(register));
    }
    let (link, amount) = match next {
        true => (Word::new(reg::PC_NEXT_ADDR, 0), next_amount(REGS)),
        false => (Word(0), 0),
    };
    words[REGS] = link;
    words[REGS + 1] = Word::new(reg::PC_NEXT_AMOUNT, amount);
    words[REGS + 2] = Word::new(reg::PC_VERSION, 0);
    words[REGS + 3] = Word::new(reg::PC_ENABLE, ENABLE_MATMUL);
    words
}

/// One line per word: index, block, offset, name, value.
#[must_use]
pub fn disassemble(words: &[Word]) -> String {
    let mut text = String::new();
    for (index, word) in words.iter().enumerate() {
        let name = match (word.0, lookup(word.block(), word.offset())) {
            (0, _) => "-",
            (_, Some(register)) => register.name,
            (_, None) => "?",
        };
        writeln!(
            text,
            "{index:4}  {:04x}:{:04x}  {name:<20} {:08x}",
            word.block(),
            word.offset(),
            word.value()
        )
        .expect("writing to a String");
    }
    text
}

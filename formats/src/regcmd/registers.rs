//! The register table: the only place with offsets.
//!
//! Names follow Mesa's rocket registers and the public ork-driver notes; one row per register.

/// Convolution fetch unit (features, weights, buffer).
pub const CNA: u16 = 0x0201;
/// MAC array and accumulator.
pub const CORE: u16 = 0x0801;
/// Output stage and writer.
pub const DPU: u16 = 0x1001;
/// Output stage's reader; present in other generators' streams, never in ours.
pub const RDMA: u16 = 0x2001;
/// Program-counter registers written from the stream.
pub const PC: u16 = 0x0101;
/// Separator word before the enable.
pub const VERSION_WORD: u16 = 0x0041;
/// Enable word.
pub const ENABLE_WORD: u16 = 0x0081;

/// One register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reg {
    /// Target block id, bits 63:48 of a word.
    pub block: u16,
    /// Byte offset, bits 15:0 of a word.
    pub offset: u16,
    /// Name for reports.
    pub name: &'static str,
}

macro_rules! registers {
    ($($name:ident: $block:ident, $offset:literal;)*) => {
        /// One constant per register.
        #[allow(missing_docs, reason = "the names are the documentation; fields are in `field`")]
        pub mod reg {
            use super::*;
            $(pub const $name: Reg = Reg { block: $block, offset: $offset, name: stringify!($name) };)*
        }
        const ALL: &[Reg] = &[$(reg::$name),*];
    };
}

#[rustfmt::skip]
registers! {
    CONV_CON1: CNA, 0x100c;
    CONV_CON2: CNA, 0x1010;
    CONV_CON3: CNA, 0x1014;
    DATA_SIZE0: CNA, 0x1020;
    DATA_SIZE1: CNA, 0x1024;
    DATA_SIZE2: CNA, 0x1028;
    DATA_SIZE3: CNA, 0x102c;
    WEIGHT_SIZE0: CNA, 0x1030;
    WEIGHT_SIZE1: CNA, 0x1034;
    WEIGHT_SIZE2: CNA, 0x1038;
    CBUF_CON0: CNA, 0x1040;
    CBUF_CON1: CNA, 0x1044;
    CVT_CON0: CNA, 0x104c;
    CVT_CON1: CNA, 0x1050;
    CVT_CON2: CNA, 0x1054;
    CVT_CON3: CNA, 0x1058;
    CVT_CON4: CNA, 0x105c;
    FC_CON0: CNA, 0x1060;
    FC_CON1: CNA, 0x1064;
    PAD_CON0: CNA, 0x1068;
    FEATURE_DATA_ADDR: CNA, 0x1070;
    FC_CON2: CNA, 0x1074;
    DMA_CON0: CNA, 0x1078;
    DMA_CON1: CNA, 0x107c;
    DMA_CON2: CNA, 0x1080;
    FC_DATA_SIZE0: CNA, 0x1084;
    FC_DATA_SIZE1: CNA, 0x1088;
    DCOMP_CTRL: CNA, 0x1100;
    DCOMP_REGNUM: CNA, 0x1104;
    DCOMP_ADDR0: CNA, 0x1110;
    DCOMP_AMOUNT0: CNA, 0x1140;
    DCOMP_AMOUNT1: CNA, 0x1144;
    DCOMP_AMOUNT2: CNA, 0x1148;
    DCOMP_AMOUNT3: CNA, 0x114c;
    DCOMP_AMOUNT4: CNA, 0x1150;
    DCOMP_AMOUNT5: CNA, 0x1154;
    DCOMP_AMOUNT6: CNA, 0x1158;
    DCOMP_AMOUNT7: CNA, 0x115c;
    DCOMP_AMOUNT8: CNA, 0x1160;
    DCOMP_AMOUNT9: CNA, 0x1164;
    DCOMP_AMOUNT10: CNA, 0x1168;
    DCOMP_AMOUNT11: CNA, 0x116c;
    DCOMP_AMOUNT12: CNA, 0x1170;
    DCOMP_AMOUNT13: CNA, 0x1174;
    DCOMP_AMOUNT14: CNA, 0x1178;
    DCOMP_AMOUNT15: CNA, 0x117c;
    CVT_CON5: CNA, 0x1180;
    PAD_CON1: CNA, 0x1184;
    CORE_MISC_CFG: CORE, 0x3010;
    CORE_DATAOUT_SIZE_0: CORE, 0x3014;
    CORE_DATAOUT_SIZE_1: CORE, 0x3018;
    CLIP_TRUNCATE: CORE, 0x301c;
    CORE_3030: CORE, 0x3030;
    DPU_S_POINTER: DPU, 0x4004;
    FEATURE_MODE_CFG: DPU, 0x400c;
    DATA_FORMAT: DPU, 0x4010;
    OFFSET_PEND: DPU, 0x4014;
    DST_BASE_ADDR: DPU, 0x4020;
    DST_SURF_STRIDE: DPU, 0x4024;
    DATA_CUBE_WIDTH: DPU, 0x4030;
    DATA_CUBE_HEIGHT: DPU, 0x4034;
    DATA_CUBE_NOTCH: DPU, 0x4038;
    DATA_CUBE_CHANNEL: DPU, 0x403c;
    BS_CFG: DPU, 0x4040;
    BS_ALU: DPU, 0x4044;
    BS_MUL: DPU, 0x4048;
    BS_RELUX: DPU, 0x404c;
    BS_OW_CFG: DPU, 0x4050;
    BS_OW_OP: DPU, 0x4054;
    WDMA_SIZE_0: DPU, 0x4058;
    WDMA_SIZE_1: DPU, 0x405c;
    BN_CFG: DPU, 0x4060;
    BN_ALU: DPU, 0x4064;
    BN_MUL: DPU, 0x4068;
    BN_RELUX: DPU, 0x406c;
    EW_CFG: DPU, 0x4070;
    EW_CVT_OFFSET: DPU, 0x4074;
    EW_CVT_SCALE: DPU, 0x4078;
    EW_RELUX: DPU, 0x407c;
    OUT_CVT_OFFSET: DPU, 0x4080;
    OUT_CVT_SCALE: DPU, 0x4084;
    OUT_CVT_SHIFT: DPU, 0x4088;
    EW_OP_VALUE_0: DPU, 0x4090;
    EW_OP_VALUE_1: DPU, 0x4094;
    EW_OP_VALUE_2: DPU, 0x4098;
    EW_OP_VALUE_3: DPU, 0x409c;
    EW_OP_VALUE_4: DPU, 0x40a0;
    EW_OP_VALUE_5: DPU, 0x40a4;
    EW_OP_VALUE_6: DPU, 0x40a8;
    EW_OP_VALUE_7: DPU, 0x40ac;
    SURFACE_ADD: DPU, 0x40c0;
    DPU_40C4: DPU, 0x40c4;
    LUT_0: DPU, 0x4100;
    LUT_1: DPU, 0x4104;
    LUT_2: DPU, 0x4108;
    LUT_3: DPU, 0x410c;
    LUT_4: DPU, 0x4110;
    LUT_5: DPU, 0x4114;
    LUT_6: DPU, 0x4118;
    LUT_7: DPU, 0x411c;
    LUT_8: DPU, 0x4120;
    LUT_9: DPU, 0x4124;
    LUT_10: DPU, 0x4128;
    LUT_11: DPU, 0x412c;
    RDMA_S_POINTER: RDMA, 0x5004;
    RDMA_CUBE_WIDTH: RDMA, 0x500c;
    RDMA_CUBE_HEIGHT: RDMA, 0x5010;
    RDMA_CUBE_CHANNEL: RDMA, 0x5014;
    RDMA_SRC_BASE_ADDR: RDMA, 0x5018;
    RDMA_BRDMA_CFG: RDMA, 0x501c;
    RDMA_BS_BASE_ADDR: RDMA, 0x5020;
    RDMA_NRDMA_CFG: RDMA, 0x5028;
    RDMA_BN_BASE_ADDR: RDMA, 0x502c;
    RDMA_ERDMA_CFG: RDMA, 0x5034;
    RDMA_EW_BASE_ADDR: RDMA, 0x5038;
    RDMA_EW_SURF_STRIDE: RDMA, 0x5040;
    RDMA_FEATURE_MODE: RDMA, 0x5044;
    RDMA_SRC_DMA_CFG: RDMA, 0x5048;
    RDMA_SURF_NOTCH: RDMA, 0x504c;
    RDMA_PAD_CFG: RDMA, 0x5064;
    RDMA_WEIGHT: RDMA, 0x5068;
    RDMA_EW_SURF_NOTCH: RDMA, 0x506c;
    PC_NEXT_ADDR: PC, 0x0010;
    PC_NEXT_AMOUNT: PC, 0x0014;
    PC_VERSION: VERSION_WORD, 0x0000;
    PC_ENABLE: ENABLE_WORD, 0x0008;
}

/// The register at `offset` of `block`.
#[must_use]
pub fn lookup(block: u16, offset: u16) -> Option<&'static Reg> {
    ALL.iter().find(|r| r.block == block && r.offset == offset)
}

/// Registers in the order a matmul program writes them. Several occur twice and the last occurrence
/// wins, so both must agree (ork-driver, measured).
#[rustfmt::skip]
pub const TEMPLATE: [Reg; super::REGS] = [
    reg::CBUF_CON0, reg::DCOMP_REGNUM, reg::DCOMP_CTRL, reg::CONV_CON1, reg::DPU_S_POINTER,
    reg::CONV_CON1, reg::CONV_CON2, reg::CONV_CON3, reg::DATA_SIZE0, reg::DATA_SIZE1,
    reg::DATA_SIZE2, reg::DATA_SIZE3, reg::WEIGHT_SIZE0, reg::WEIGHT_SIZE1, reg::WEIGHT_SIZE2,
    reg::CBUF_CON0, reg::CBUF_CON1, reg::CVT_CON0, reg::CVT_CON1, reg::CVT_CON2, reg::CVT_CON3,
    reg::CVT_CON4, reg::FC_CON0, reg::FC_CON1, reg::PAD_CON0, reg::FEATURE_DATA_ADDR, reg::FC_CON2,
    reg::DMA_CON0, reg::DMA_CON1, reg::DMA_CON2, reg::FC_DATA_SIZE0, reg::FC_DATA_SIZE1,
    reg::DCOMP_CTRL, reg::DCOMP_REGNUM, reg::DCOMP_ADDR0, reg::DCOMP_AMOUNT0, reg::DCOMP_AMOUNT1,
    reg::DCOMP_AMOUNT2, reg::DCOMP_AMOUNT3, reg::DCOMP_AMOUNT4, reg::DCOMP_AMOUNT5,
    reg::DCOMP_AMOUNT6, reg::DCOMP_AMOUNT7, reg::DCOMP_AMOUNT8, reg::DCOMP_AMOUNT9,
    reg::DCOMP_AMOUNT10, reg::DCOMP_AMOUNT11, reg::DCOMP_AMOUNT12, reg::DCOMP_AMOUNT13,
    reg::DCOMP_AMOUNT14, reg::DCOMP_AMOUNT15, reg::CVT_CON5, reg::PAD_CON1, reg::CORE_MISC_CFG,
    reg::CORE_DATAOUT_SIZE_0, reg::CORE_DATAOUT_SIZE_1, reg::CLIP_TRUNCATE, reg::CORE_3030,
    reg::FEATURE_MODE_CFG, reg::DATA_FORMAT, reg::OFFSET_PEND, reg::DST_BASE_ADDR,
    reg::DST_SURF_STRIDE, reg::DATA_CUBE_WIDTH, reg::DATA_CUBE_HEIGHT, reg::DATA_CUBE_NOTCH,
    reg::DATA_CUBE_CHANNEL, reg::BS_CFG, reg::BS_ALU, reg::BS_MUL, reg::BS_RELUX, reg::BS_OW_CFG,
    reg::BS_OW_OP, reg::WDMA_SIZE_0, reg::WDMA_SIZE_1, reg::BN_CFG, reg::BN_ALU, reg::BN_MUL,
    reg::BN_RELUX, reg::EW_CFG, reg::EW_CVT_OFFSET, reg::EW_CVT_SCALE, reg::EW_RELUX,
    reg::OUT_CVT_OFFSET, reg::OUT_CVT_SCALE, reg::OUT_CVT_SHIFT, reg::EW_OP_VALUE_0,
    reg::EW_OP_VALUE_1, reg::EW_OP_VALUE_2, reg::EW_OP_VALUE_3, reg::EW_OP_VALUE_4,
    reg::EW_OP_VALUE_5, reg::EW_OP_VALUE_6, reg::EW_OP_VALUE_7, reg::SURFACE_ADD, reg::DPU_40C4,
    reg::LUT_0, reg::LUT_1, reg::LUT_2, reg::LUT_3, reg::LUT_4, reg::LUT_5, reg::LUT_6, reg::LUT_7,
    reg::LUT_8, reg::LUT_9, reg::LUT_10, reg::LUT_11,
];

/// A bit field of a register value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Lowest bit.
    pub lo: u32,
    /// Highest bit.
    pub hi: u32,
}

impl Field {
    /// The field of `value`.
    #[must_use]
    pub const fn get(self, value: u32) -> u32 {
        (value >> self.lo) & self.mask()
    }

    /// `value` placed in the field.
    ///
    /// # Panics
    /// When it does not fit: the tiler decides ranges, so this is a bug.
    #[must_use]
    pub const fn set(self, value: u32) -> u32 {
        assert!(value <= self.mask(), "register field overflow");
        value << self.lo
    }

    const fn mask(self) -> u32 {
        u32::MAX >> (31 - (self.hi - self.lo))
    }
}

/// Fields that the builder, linter and simulator read.
#[allow(missing_docs, reason = "the names are the documentation")]
pub mod field {
    use super::Field;
    const fn f(hi: u32, lo: u32) -> Field {
        Field { lo, hi }
    }
    // CBUF_CON0
    pub const DATA_BANK: Field = f(3, 0);
    pub const WEIGHT_BANK: Field = f(7, 4);
    pub const FC_DATA_BANK: Field = f(10, 8);
    pub const DATA_REUSE: Field = f(12, 12);
    pub const WEIGHT_REUSE: Field = f(13, 13);
    // CONV_CON1
    pub const CONV_MODE: Field = f(3, 0);
    pub const IN_PRECISION: Field = f(6, 4);
    pub const PROC_PRECISION: Field = f(9, 7);
    pub const GROUP_LINE_OFF: Field = f(29, 29);
    // CONV_CON2
    pub const FEATURE_GRAINS: Field = f(13, 4);
    // DATA_SIZE0, FC_DATA_SIZE0
    pub const WIDTH: Field = f(31, 16);
    pub const HEIGHT: Field = f(15, 0);
    // DATA_SIZE1
    pub const CHANNEL_REAL_1: Field = f(29, 16);
    pub const CHANNEL: Field = f(15, 0);
    // WEIGHT_SIZE2
    pub const KERNELS: Field = f(13, 0);
    pub const KERNEL_HEIGHT: Field = f(20, 16);
    pub const KERNEL_WIDTH: Field = f(28, 24);
    // DMA_CON2, signed
    pub const SURF_STRIDE: Field = f(27, 0);
    // CORE_MISC_CFG
    pub const CORE_PROC_PRECISION: Field = f(10, 8);
    // CORE_DATAOUT_SIZE_0, WDMA_SIZE_1, DATA_CUBE_NOTCH, DATA_CUBE_CHANNEL
    pub const HIGH: Field = f(31, 16);
    pub const LOW: Field = f(15, 0);
    // DATA_FORMAT
    pub const OUT_PRECISION: Field = f(31, 29);
    pub const DPU_IN_PRECISION: Field = f(28, 26);
    pub const DPU_PROC_PRECISION: Field = f(2, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_register_has_one_row_and_is_found() {
        for (index, register) in ALL.iter().enumerate() {
            assert_eq!(lookup(register.block, register.offset), Some(register));
            let twin = ALL[..index]
                .iter()
                .find(|other| other.name == register.name);
            assert_eq!(twin, None);
        }
        assert_eq!(lookup(CNA, 0x4010), None);
        assert_eq!(lookup(0, 0), None);
    }

    #[test]
    fn fields_round_trip_and_stay_in_their_bits() {
        assert_eq!(field::WEIGHT_BANK.set(11) | field::DATA_BANK.set(1), 0xb1);
        assert_eq!(field::WEIGHT_BANK.get(0xffff_ffb1), 11);
        assert_eq!(field::OUT_PRECISION.set(4), 0x8000_0000);
        let all = Field { lo: 0, hi: 31 };
        assert_eq!(all.get(all.set(u32::MAX)), u32::MAX);
    }

    #[test]
    #[should_panic(expected = "register field overflow")]
    fn a_field_refuses_what_does_not_fit() {
        let _ = field::DATA_BANK.set(16);
    }
}

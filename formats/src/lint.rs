//! The independent checker of command streams: on this chip a bad stream costs a power cycle.
//!
//! Shares the register table and the SoC limits with the builder, none of its logic: every rule
//! here is written from what the registers mean. It enforces our policy (K granule, row caps,
//! full register set), which is stricter than what the hardware runs.

use crate::regcmd::{
    ENABLE_MATMUL, REGS, Reg, TEMPLATE, WORDS, Word, field, lookup, next_amount, reg,
};
use ork_caps::Caps;

/// One fault of a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(
    missing_docs,
    reason = "the messages say what each fault and its numbers are"
)]
pub enum Finding {
    #[error("has {0} words, a matmul program has {WORDS}")]
    Length(usize),
    #[error("word {0} writes an unknown register {1:04x}:{2:04x}")]
    Unknown(usize, u16, u16),
    #[error("word {0} writes {1}, the template has {2} there")]
    Order(usize, &'static str, &'static str),
    #[error("{0} is written twice with different values, {1:#x} and {2:#x}")]
    Disagree(&'static str, u32, u32),
    #[error("{0} is {1:#x}, must be {2:#x}")]
    Fixed(&'static str, u32, u32),
    #[error("{0} is {1}, but {2} says {3}")]
    Inconsistent(&'static str, u32, &'static str, u32),
    #[error("{data} data banks and {weight} weight banks do not sum to {banks}")]
    BankSum { data: u32, weight: u32, banks: u32 },
    #[error("too few data banks: {have}, {rows} rows of {k} bytes need {need}")]
    DataBanks {
        have: u32,
        need: u32,
        rows: u32,
        k: u32,
    },
    #[error("no weight bank")]
    WeightBanks,
    #[error("K {k} is not a multiple of {granule}")]
    KGranule { k: u32, granule: u32 },
    #[error("K {k} exceeds {max}")]
    KMax { k: u32, max: u32 },
    #[error("{rows} rows exceed the cap {cap} at K {k}")]
    Rows { rows: u32, cap: u32, k: u32 },
    #[error("N {n} exceeds {max}")]
    NMax { n: u32, max: u32 },
    #[error("N {n} is no positive multiple of {granule}")]
    NGranule { n: u32, granule: u32 },
    #[error("CONV_CON2 is {0:#x}, must hold 1..={1} feature grains in bits 13:4 and nothing else")]
    Grains(u32, u32),
    #[error("tail word {0} is {1:#018x}, must be {2:#018x}")]
    Tail(usize, u64, u64),
}

/// Registers whose value never changes in a row-major int8 -> int32 matmul.
const FIXED: &[(Reg, u32)] = &[
    (reg::CONV_CON1, 1 << 29),
    (reg::DPU_S_POINTER, 0xe),
    (reg::CONV_CON3, 9),
    (reg::DATA_SIZE2, 1),
    (reg::CVT_CON0, 0xb),
    (reg::CVT_CON1, 0x1_0000),
    (reg::CVT_CON2, 0x1_0000),
    (reg::CVT_CON3, 0x1_0000),
    (reg::CVT_CON4, 0x1_0000),
    (reg::DMA_CON0, 0xf_000f),
    (reg::CORE_MISC_CFG, 1),
    (reg::FEATURE_MODE_CFG, 0x1e4),
    (reg::DATA_FORMAT, 0x8000_0000),
    (reg::DST_SURF_STRIDE, 0x10),
    (reg::BS_CFG, 0x53),
    (reg::BS_OW_CFG, 0x7fc),
    (reg::BN_CFG, 0x53),
    (reg::EW_CFG, 0x383),
    (reg::EW_CVT_SCALE, 1),
    (reg::OUT_CVT_SCALE, 1),
    (reg::SURFACE_ADD, 0x80),
];

/// Registers that carry a size, a schedule or an address; everything else is fixed.
const VARIABLE: &[Reg] = &[
    reg::CBUF_CON0,
    reg::CONV_CON2,
    reg::DATA_SIZE0,
    reg::DATA_SIZE1,
    reg::DATA_SIZE3,
    reg::WEIGHT_SIZE0,
    reg::WEIGHT_SIZE1,
    reg::WEIGHT_SIZE2,
    reg::CBUF_CON1,
    reg::FEATURE_DATA_ADDR,
    reg::DMA_CON1,
    reg::FC_DATA_SIZE0,
    reg::FC_DATA_SIZE1,
    reg::DCOMP_ADDR0,
    reg::CORE_DATAOUT_SIZE_0,
    reg::CORE_DATAOUT_SIZE_1,
    reg::DST_BASE_ADDR,
    reg::DATA_CUBE_HEIGHT,
    reg::DATA_CUBE_NOTCH,
    reg::DATA_CUBE_CHANNEL,
    reg::WDMA_SIZE_0,
    reg::WDMA_SIZE_1,
];

/// Everything wrong with one program; `chained` says whether a link to a next one is due. Address
/// values are not looked at: relocations are proven elsewhere.
#[must_use]
pub fn program(words: &[Word], caps: &Caps, chained: bool) -> Vec<Finding> {
    let mut found = Vec::new();
    if words.len() != WORDS {
        found.push(Finding::Length(words.len()));
        return found;
    }
    registers(words, &mut found);
    if found.is_empty() {
        sizes(words, caps, &mut found);
    }
    tail(words, chained, &mut found);
    found
}

/// Last value written to `register`.
fn value(words: &[Word], register: Reg) -> u32 {
    words[..REGS]
        .iter()
        .rev()
        .find(|w| w.is(register))
        .map_or(0, |w| w.value())
}

fn registers(words: &[Word], found: &mut Vec<Finding>) {
    for (index, (word, want)) in words.iter().zip(TEMPLATE).enumerate() {
        match lookup(word.block(), word.offset()) {
            None => found.push(Finding::Unknown(index, word.block(), word.offset())),
            Some(have) if *have != want => {
                found.push(Finding::Order(index, have.name, want.name));
            }
            Some(_) => {
                let last = value(words, want);
                if word.value() != last {
                    found.push(Finding::Disagree(want.name, word.value(), last));
                }
                if !VARIABLE.contains(&want) {
                    let fixed = FIXED.iter().find(|f| f.0 == want).map_or(0, |f| f.1);
                    if word.value() != fixed {
                        found.push(Finding::Fixed(want.name, word.value(), fixed));
                    }
                }
            }
        }
    }
}

fn sizes(words: &[Word], caps: &Caps, found: &mut Vec<Finding>) {
    let v = |register| value(words, register);
    let rows = v(reg::DATA_SIZE3);
    let k = v(reg::WEIGHT_SIZE1);
    let n = v(reg::WDMA_SIZE_0).wrapping_add(1);
    let packed = |high: u32, low: u32| high.wrapping_shl(16) | low & 0xffff;
    // (register, what it must hold given rows, k, n; C blocks are contiguous, so the pitch is n)
    let relations = [
        (reg::DATA_SIZE0, packed(1, rows)),
        (reg::FC_DATA_SIZE0, packed(1, rows)),
        (reg::DATA_SIZE1, packed(k.wrapping_sub(1) & 0x3fff, k)),
        (reg::FC_DATA_SIZE1, k),
        (reg::WEIGHT_SIZE0, k.wrapping_mul(n)),
        (reg::WEIGHT_SIZE2, 0x0101_0000 | n),
        (reg::CBUF_CON1, k.div_ceil(64)),
        (reg::DMA_CON1, k / 16),
        (reg::CORE_DATAOUT_SIZE_0, packed(rows.wrapping_sub(1), 0)),
        (reg::WDMA_SIZE_1, packed(rows.wrapping_sub(1), 0)),
        (reg::DATA_CUBE_HEIGHT, rows.wrapping_sub(1)),
        (reg::CORE_DATAOUT_SIZE_1, n.wrapping_sub(1)),
        (
            reg::DATA_CUBE_CHANNEL,
            packed(n.wrapping_sub(1), n.wrapping_sub(1)),
        ),
        (
            reg::DATA_CUBE_NOTCH,
            packed((n / 4).wrapping_sub(1), (n / 4).wrapping_sub(1)),
        ),
    ];
    for (register, want) in relations {
        if v(register) != want {
            found.push(Finding::Inconsistent(
                register.name,
                v(register),
                "the shape",
                want,
            ));
        }
    }
    limits(
        v(reg::CBUF_CON0),
        v(reg::CONV_CON2),
        (rows, k, n),
        caps,
        found,
    );
}

fn limits(
    cbuf: u32,
    con2: u32,
    (rows, k, n): (u32, u32, u32),
    caps: &Caps,
    found: &mut Vec<Finding>,
) {
    let data = field::DATA_BANK.get(cbuf);
    let weight = field::WEIGHT_BANK.get(cbuf);
    let banks = caps.cbuf_banks.value;
    if data + weight != banks {
        found.push(Finding::BankSum {
            data,
            weight,
            banks,
        });
    }
    // Above the split: the FC bank (corrupts results when set), reuse bits, unknown bits.
    if 0xff < cbuf {
        found.push(Finding::Fixed(reg::CBUF_CON0.name, cbuf, cbuf & 0xff));
    }
    if weight == 0 {
        found.push(Finding::WeightBanks);
    }
    // Every feature line is rounded up to whole buffer lines first.
    // Packs come from outside, so the registers may hold anything: nothing here may overflow.
    let line = u64::from(caps.cbuf_line_bytes.value);
    let bytes = u64::from(rows).saturating_mul(u64::from(k).next_multiple_of(line));
    let need = bytes.div_ceil(u64::from(caps.cbuf_bank_bytes.value));
    let need = u32::try_from(need).unwrap_or(u32::MAX);
    if data < need {
        found.push(Finding::DataBanks {
            have: data,
            need,
            rows,
            k,
        });
    }
    let granule = caps.k_granule.value;
    if k == 0 || k % granule != 0 {
        found.push(Finding::KGranule { k, granule });
    }
    if caps.k_max.value < k {
        found.push(Finding::KMax {
            k,
            max: caps.k_max.value,
        });
    }
    match caps.m_cap(k) {
        Some(cap) if cap < rows || rows == 0 => found.push(Finding::Rows { rows, cap, k }),
        _ => {}
    }
    if caps.n_max.value < n {
        found.push(Finding::NMax {
            n,
            max: caps.n_max.value,
        });
    }
    // The register holds N - 1, so an N of zero wraps through every other rule.
    if n == 0 || n % caps.n_granule.value != 0 {
        found.push(Finding::NGranule {
            n,
            granule: caps.n_granule.value,
        });
    }
    let grains = field::FEATURE_GRAINS.get(con2);
    let most = rows.saturating_add(1);
    if grains == 0 || most < grains || con2 != field::FEATURE_GRAINS.set(grains) {
        found.push(Finding::Grains(con2, most));
    }
}

fn tail(words: &[Word], chained: bool, found: &mut Vec<Finding>) {
    let amount = match chained {
        true => next_amount(REGS),
        false => 0,
    };
    let link = match chained {
        true => Word::new(reg::PC_NEXT_ADDR, 0),
        false => Word(0),
    };
    let want = [
        link,
        Word::new(reg::PC_NEXT_AMOUNT, amount),
        Word::new(reg::PC_VERSION, 0),
        Word::new(reg::PC_ENABLE, ENABLE_MATMUL),
    ];
    for (index, want) in want.into_iter().enumerate() {
        let mut have = words[REGS + index];
        if index == 0 && chained {
            have = have.with_value(0);
        }
        if have != want {
            found.push(Finding::Tail(REGS + index, have.0, want.0));
        }
    }
}

//! Command streams: what lints clean runs on exactly sized memory, and relocation touches address
//! words only.

use super::Source;
use ork_caps::RK3588;
use ork_formats::lint;
use ork_formats::regcmd::{
    A_ENTRY, BYTES, C_ENTRY, Matmul, NEXT_ENTRY, REGS, Reg, Reloc, W_ENTRY, WORDS, Word, apply,
    build, reg,
};
use ork_sim::Memory;

/// Larger products are linted but not run, so that no case takes seconds.
const MOST_MACS: u64 = 1 << 24;
/// Where programs, A, W and C are mapped.
const BASES: [u32; 4] = [0x1000_0000, 0x2000_0000, 0x4000_0000, 0x8000_0000];

/// Lints and runs one or two near-honest programs.
pub fn lint_then_run(bytes: &[u8]) {
    let source = &mut Source(bytes);
    let count = 1 + source.below(2);
    let mut words = Vec::new();
    for index in 0..count {
        words.extend(program(source, index + 1 < count));
    }
    let clean = words
        .chunks(WORDS)
        .enumerate()
        .all(|(i, p)| lint::program(p, &RK3588, i + 1 < count).is_empty());
    let value = |p: &[Word], register: Reg| {
        let last = p[..REGS].iter().rev().find(|w| w.is(register));
        u64::from(last.map_or(0, |w| w.value()))
    };
    // What the shape registers say, read without the linter.
    let sizes = words.chunks(WORDS).map(|p| {
        let (m, k) = (value(p, reg::DATA_SIZE3), value(p, reg::WEIGHT_SIZE1));
        let n = (value(p, reg::WDMA_SIZE_0) as u32).wrapping_add(1);
        (m, k, u64::from(n))
    });
    let sizes: Vec<(u64, u64, u64)> = sizes.collect();
    let macs: u128 = sizes
        .iter()
        .map(|(m, k, n)| u128::from(*m) * u128::from(*k) * u128::from(*n))
        .sum();
    if clean && macs <= u128::from(MOST_MACS) {
        let most = |f: fn(&(u64, u64, u64)) -> u64| sizes.iter().map(f).max().unwrap_or(0);
        let lengths = [
            most(|(m, k, _)| m * k),
            most(|(_, k, n)| k * n),
            most(|(m, _, n)| m * n * 4),
        ];
        let stats = run(&mut words, count, lengths).expect("a clean program runs");
        assert_eq!(u128::from(stats.macs), macs);
    } else if !clean {
        // Whatever it says, it faults or runs; it never panics.
        let _ = run(&mut words, count, [1 << 16; 3]);
    }
}

/// Lints and runs words that mean nothing.
pub fn arbitrary_words(bytes: &[u8]) {
    let mut words: Vec<Word> = bytes
        .chunks_exact(8)
        .map(|b| Word(u64::from_le_bytes(b.try_into().expect("8 bytes"))))
        .collect();
    for chained in [false, true] {
        let _ = lint::program(&words, &RK3588, chained);
    }
    words.resize(WORDS, Word(0));
    let _ = lint::program(&words, &RK3588, false);
    let _ = run(&mut words, 1, [1 << 16; 3]);
}

/// Applies relocations and compares every word with a sum made in 64 bits.
pub fn relocate(bytes: &[u8]) {
    let source = &mut Source(bytes);
    let before: Vec<u64> = (0..=source.below(64))
        .map(|_| u64::from(source.word()) << 32 | u64::from(source.word()))
        .collect();
    let bases: Vec<u32> = (0..=source.below(8)).map(|_| source.word()).collect();
    let relocs: Vec<Reloc> = (0..source.below(64))
        .map(|_| Reloc {
            word: source.below(before.len()) as u32,
            extent: source.below(bases.len()) as u32,
            offset: source.number(0) as u32,
        })
        .collect();
    let mut after = before.clone();
    apply(&mut after, &relocs, &bases);
    for (index, (before, after)) in before.iter().zip(&after).enumerate() {
        let sum: u64 = relocs
            .iter()
            .filter(|r| r.word as usize == index)
            .map(|r| u64::from(bases[r.extent as usize]) + u64::from(r.offset))
            .sum();
        let value = ((before >> 16) + sum) & 0xffff_ffff;
        let outside = before & 0xffff_0000_0000_ffff;
        assert_eq!(*after, outside | value << 16, "word {index}");
    }
}

fn program(source: &mut Source<'_>, chained: bool) -> [Word; WORDS] {
    let k = 512 * (1 + source.below(8) as u32);
    let rows = RK3588.m_cap(k).expect("a scheduled K");
    let m = 1 + source.below(rows as usize) as u32 % 64;
    let line = u64::from(m) * u64::from(k);
    let banks = line.div_ceil(u64::from(RK3588.cbuf_bank_bytes.value)) as u32;
    let data_banks = banks + source.below(2) as u32;
    let n = 32 * (1 + source.below(4) as u32);
    let shape = Matmul {
        m,
        k,
        n,
        ld: n,
        grains_rows: 1 + source.below(m as usize) as u32,
        data_banks,
        weight_banks: RK3588.cbuf_banks.value.saturating_sub(data_banks),
    };
    let mut words = build(&shape, chained);
    match source.below(4) {
        0 => {}
        // A consistent lie: every register of the shape follows.
        1 => {
            let mut sizes = [m, k, n];
            let which = source.below(3);
            sizes[which] = source.number(u64::from(sizes[which])) as u32;
            reshape(&mut words, sizes);
        }
        // One register, everywhere it is written.
        2 => {
            let of = words[source.below(WORDS)];
            let value = source.number(u64::from(of.value())) as u32;
            for word in &mut words {
                if (word.block(), word.offset()) == (of.block(), of.offset()) {
                    *word = word.with_value(value);
                }
            }
        }
        _ => words[source.below(WORDS)].0 ^= 1 << source.below(64),
    }
    words
}

/// Rewrites what depends on the shape, wrapping where a builder would refuse.
fn reshape(words: &mut [Word], [m, k, n]: [u32; 3]) {
    let less = |v: u32| v.wrapping_sub(1);
    let pair = |v: u32| v << 16 | v & 0xffff;
    let values = [
        (reg::DATA_SIZE0, 1 << 16 | m & 0xffff),
        (reg::FC_DATA_SIZE0, 1 << 16 | m & 0xffff),
        (reg::DATA_SIZE1, (less(k) & 0x3fff) << 16 | k & 0xffff),
        (reg::DATA_SIZE3, m),
        (reg::WEIGHT_SIZE0, k.wrapping_mul(n)),
        (reg::WEIGHT_SIZE1, k),
        (reg::WEIGHT_SIZE2, 0x0101_0000 | n),
        (reg::CBUF_CON1, k.div_ceil(64)),
        (reg::DMA_CON1, k / 16),
        (reg::FC_DATA_SIZE1, k),
        (reg::CORE_DATAOUT_SIZE_0, less(m) << 16),
        (reg::WDMA_SIZE_1, less(m) << 16),
        (reg::CORE_DATAOUT_SIZE_1, less(n)),
        (reg::WDMA_SIZE_0, less(n)),
        (reg::DATA_CUBE_HEIGHT, less(m)),
        (reg::DATA_CUBE_NOTCH, pair(less(n / 4))),
        (reg::DATA_CUBE_CHANNEL, pair(less(n))),
    ];
    for word in words {
        if let Some((_, value)) = values.iter().find(|(register, _)| word.is(*register)) {
            *word = word.with_value(*value);
        }
    }
}

/// Relocates and runs; memory beyond the given lengths is not mapped.
fn run(
    words: &mut [Word],
    count: usize,
    lengths: [u64; 3],
) -> Result<ork_sim::Stats, ork_sim::Fault> {
    let mut raw: Vec<u64> = words.iter().map(|w| w.0).collect();
    for program in 0..count {
        let mut place = |entry: usize, extent: u32, offset: u32| {
            // An address register may have been mutated: what it holds is not a base.
            raw[program * WORDS + entry] &= !(0xffff_ffff << 16);
            let word = (program * WORDS + entry) as u32;
            let reloc = Reloc {
                word,
                extent,
                offset,
            };
            apply(&mut raw, &[reloc], &BASES);
        };
        place(A_ENTRY, 1, 0);
        place(W_ENTRY, 2, 0);
        place(C_ENTRY, 3, 0);
        if program + 1 < count {
            place(NEXT_ENTRY, 0, ((program + 1) * BYTES) as u32);
        }
    }
    let mut stream: Vec<u8> = raw.iter().flat_map(|w| w.to_le_bytes()).collect();
    let [mut a, mut w, mut c] = lengths.map(|len| vec![0u8; len as usize]);
    let mut memory = Memory::new();
    memory.map(BASES[0], &mut stream, false);
    memory.map(BASES[1], &mut a, false);
    memory.map(BASES[2], &mut w, false);
    memory.map(BASES[3], &mut c, true);
    ork_sim::run(
        &mut memory,
        BASES[0],
        WORDS as u32,
        count as u32,
        &RK3588,
        1,
    )
}

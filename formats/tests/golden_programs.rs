//! Our programs against an independent generator's words, and the linter against mutations.

use ork_caps::RK3588;
use ork_formats::lint::{self, Finding};
use ork_formats::regcmd::{self, A_ENTRY, C_ENTRY, Matmul, NEXT_ENTRY, REGS, W_ENTRY, Word};
use std::collections::BTreeMap;

/// shape -> words, in file order.
fn golden(csv: &str) -> BTreeMap<String, Vec<Word>> {
    let mut out: BTreeMap<String, Vec<Word>> = BTreeMap::new();
    for line in csv.lines().skip(1) {
        let cells: Vec<&str> = line.split(',').collect();
        let hex = |i: usize| u64::from_str_radix(cells[i], 16).unwrap();
        let word = Word(hex(2) << 48 | hex(4) << 16 | hex(3));
        out.entry(cells[0].to_string()).or_default().push(word);
    }
    out
}

/// `int8_M64_K576_N576_ld576_sched0` -> the same tile numbers for our builder.
fn tile(shape: &str) -> Matmul {
    let number = |prefix: &str| -> u32 {
        let part = shape.split('_').find(|p| {
            p.strip_prefix(prefix)
                .is_some_and(|rest| rest.parse::<u32>().is_ok())
        });
        part.unwrap()[prefix.len()..].parse().unwrap()
    };
    let (m, k, n, ld) = (number("M"), number("K"), number("N"), number("ld"));
    let (grains_rows, data_banks) = match number("sched") {
        0 => (m + 1, 1),
        _ => {
            let largest = 1 << (65536 / k).ilog2();
            ((m + 1).min(largest), m.div_ceil(64) * k.div_ceil(512))
        }
    };
    Matmul {
        m,
        k,
        n,
        ld,
        grains_rows,
        data_banks,
        weight_banks: 12 - data_banks,
    }
}

const SYNTH: &str = include_str!("data/ork_synth_i8_dense.csv");
const VENDOR: &str = include_str!("data/vendor_rknn_int8_M4_K32_N32_dense.csv");

#[test]
fn programs_equal_the_golden_words() {
    let shapes = golden(SYNTH);
    assert_eq!(shapes.len(), 6);
    for (shape, want) in shapes {
        let have = regcmd::build(&tile(&shape), false);
        assert_eq!(have.len(), want.len(), "{shape}");
        for (entry, (have, want)) in have.iter().zip(&want).enumerate() {
            let want = match entry {
                A_ENTRY | W_ENTRY | C_ENTRY => want.with_value(0),
                _ => *want,
            };
            assert_eq!(*have, want, "{shape} entry {entry}");
        }
    }
}

#[test]
fn the_linter_refuses_the_golden_shape_with_too_few_banks() {
    for (shape, words) in golden(SYNTH) {
        let found = lint::program(&words, &RK3588, false);
        if shape.contains("K576") {
            let banks = found.iter().any(|f| {
                matches!(
                    f,
                    Finding::DataBanks {
                        have: 1,
                        need: 2,
                        ..
                    }
                )
            });
            assert!(banks, "{shape}: {found:?}");
        } else {
            assert_eq!(found, [], "{shape}");
        }
    }
}

#[test]
fn every_single_bit_of_every_register_is_watched() {
    let tile = tile("int8_M64_K1024_N1536_ld1536_sched1");
    for chained in [false, true] {
        let good = regcmd::build(&tile, chained);
        assert_eq!(lint::program(&good, &RK3588, chained), []);
        for entry in 0..good.len() {
            let address =
                [A_ENTRY, W_ENTRY, C_ENTRY].contains(&entry) || (chained && entry == NEXT_ENTRY);
            // The grains field is a hint with many legal values; the rest of its register is not.
            let hint = entry < REGS && good[entry].is(regcmd::reg::CONV_CON2);
            for bit in 0..64 {
                let is_value = (16..48).contains(&bit);
                let is_grains = hint && (16 + 4..=16 + 13).contains(&bit);
                if (is_value && address) || is_grains {
                    continue;
                }
                let mut bad = good;
                bad[entry].0 ^= 1 << bit;
                let found = lint::program(&bad, &RK3588, chained);
                assert!(!found.is_empty(), "entry {entry} bit {bit}");
            }
        }
        assert!(!lint::program(&good, &RK3588, !chained).is_empty());
    }
}

#[test]
fn every_register_value_but_an_address_is_watched() {
    let good = regcmd::build(&tile("int8_M4_K512_N256_ld256_sched1"), false);
    for entry in 0..REGS {
        let mut bad = good;
        bad[entry] = bad[entry].with_value(bad[entry].value() ^ 1);
        let silent = lint::program(&bad, &RK3588, false).is_empty();
        let address = [A_ENTRY, W_ENTRY, C_ENTRY].contains(&entry);
        assert_eq!(silent, address, "entry {entry}");
    }
}

#[test]
fn every_vendor_word_has_a_name() {
    for (_, words) in golden(VENDOR) {
        for word in &words {
            let known = word.0 == 0 || regcmd::lookup(word.block(), word.offset()).is_some();
            assert!(known, "{word:x?}");
        }
        let text = regcmd::disassemble(&words);
        assert_eq!(text.lines().count(), words.len());
        assert!(text.contains("FEATURE_DATA_ADDR"));
    }
}

#[test]
fn relocation_adds_into_the_value_only() {
    let word = Word::new(regcmd::reg::DST_BASE_ADDR, 0);
    let mut words = [word.0, word.0];
    let reloc = regcmd::Reloc {
        word: 1,
        extent: 1,
        offset: 0x40,
    };
    regcmd::apply(&mut words, &[reloc], &[0, 0xffff_0000]);
    assert_eq!(words[0], word.0);
    assert_eq!(Word(words[1]), word.with_value(0xffff_0040));
}

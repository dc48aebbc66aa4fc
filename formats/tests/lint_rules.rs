//! One broken program per lint rule, and values no tiler would produce.

use ork_caps::RK3588;
use ork_formats::lint::{self, Finding};
use ork_formats::regcmd::{self, Matmul, REGS, Reg, WORDS, Word, field, reg};

/// A tile of the given shape with the banks the rows need, as far as the buffer goes.
fn tile(m: u32, k: u32, n: u32) -> Matmul {
    let data_banks = (m * k.next_multiple_of(64)).div_ceil(32768).clamp(1, 11);
    Matmul {
        m,
        k,
        n,
        ld: n,
        grains_rows: 2,
        data_banks,
        weight_banks: 12 - data_banks,
    }
}

fn lint(tile: &Matmul) -> Vec<Finding> {
    lint::program(&regcmd::build(tile, false), &RK3588, false)
}

/// Writes `value` to every occurrence of `register`.
fn patch(words: &mut [Word], register: Reg, value: u32) {
    for word in words.iter_mut().filter(|word| word.is(register)) {
        *word = word.with_value(value);
    }
}

#[test]
fn every_row_cap_is_reachable_and_one_row_more_is_not() {
    for &(k, rows) in RK3588.m_caps.value {
        assert_eq!(lint(&tile(rows, k, 8192)), [], "K {k} M {rows}");
        let over = lint(&tile(rows + 1, k, 32));
        let want = Finding::Rows {
            rows: rows + 1,
            cap: rows,
            k,
        };
        assert!(over.contains(&want), "K {k}: {over:?}");
    }
}

#[test]
fn shape_limits_are_named() {
    let cases = [
        (
            tile(1, 768, 32),
            Finding::KGranule {
                k: 768,
                granule: 512,
            },
        ),
        (tile(1, 4608, 32), Finding::KMax { k: 4608, max: 4096 }),
        (tile(1, 512, 8224), Finding::NMax { n: 8224, max: 8192 }),
        (tile(1, 512, 48), Finding::NGranule { n: 48, granule: 32 }),
        (
            Matmul {
                grains_rows: 3,
                ..tile(1, 512, 32)
            },
            Finding::Grains(3 << 4, 2),
        ),
    ];
    for (tile, want) in cases {
        let found = lint(&tile);
        assert!(found.contains(&want), "{tile:?}: {found:?}");
    }
}

#[test]
fn bank_splits_are_checked() {
    let good = tile(128, 1024, 64);
    assert_eq!(good.data_banks, 4);
    let split = |data_banks, weight_banks| {
        lint(&Matmul {
            data_banks,
            weight_banks,
            ..good
        })
    };
    assert_eq!(split(4, 8), []);
    assert_eq!(split(5, 7), [], "a spare bank is legal");
    assert_eq!(
        split(3, 9),
        [Finding::DataBanks {
            have: 3,
            need: 4,
            rows: 128,
            k: 1024
        }]
    );
    assert_eq!(split(12, 0), [Finding::WeightBanks]);
    assert_eq!(
        split(4, 7),
        [Finding::BankSum {
            data: 4,
            weight: 7,
            banks: 12
        }]
    );
}

/// The other bits of the bank register must be clear: a nonzero FC bank corrupts results.
#[test]
fn bits_beside_the_banks_are_named_as_such() {
    let mut words = regcmd::build(&tile(1, 512, 32), false);
    let banks = 0xb1;
    patch(
        &mut words,
        reg::CBUF_CON0,
        field::FC_DATA_BANK.set(1) | banks,
    );
    assert_eq!(
        lint::program(&words, &RK3588, false),
        [Finding::Fixed("CBUF_CON0", 0x1b1, banks)]
    );
}

#[test]
fn both_occurrences_must_agree() {
    let good = regcmd::build(&tile(1, 512, 32), false);
    for (first, last) in [(0, 15), (1, 33), (2, 32), (3, 5)] {
        for entry in [first, last] {
            let mut bad = good;
            bad[entry] = bad[entry].with_value(bad[entry].value() ^ 1);
            let found = lint::program(&bad, &RK3588, false);
            let disagree = found
                .iter()
                .any(|f| matches!(f, Finding::Disagree(name, ..) if *name == regcmd::TEMPLATE[entry].name));
            assert!(disagree, "entry {entry}: {found:?}");
        }
    }
}

#[test]
fn order_length_and_unknown_registers() {
    let good = regcmd::build(&tile(1, 512, 32), false);
    let short = lint::program(&good[..WORDS - 1], &RK3588, false);
    assert_eq!(short, [Finding::Length(WORDS - 1)]);

    let mut swapped = good;
    swapped.swap(6, 7);
    assert_eq!(
        lint::program(&swapped, &RK3588, false),
        [
            Finding::Order(6, "CONV_CON3", "CONV_CON2"),
            Finding::Order(7, "CONV_CON2", "CONV_CON3"),
        ]
    );

    let mut unknown = good;
    unknown[95] = Word(0x1001 << 48 | 0x40c8);
    let found = lint::program(&unknown, &RK3588, false);
    assert_eq!(found, [Finding::Unknown(95, 0x1001, 0x40c8)]);
}

/// The loader lints packs it did not write: no register value may stop the linter itself.
#[test]
fn extreme_values_are_refused_without_a_panic() {
    let good = regcmd::build(&tile(1, 512, 32), false);
    for value in [0, 1, 0x7fff_ffff, 0x8000_0000, u32::MAX - 1, u32::MAX] {
        let mut all = good;
        for word in &mut all[..REGS] {
            *word = word.with_value(value);
        }
        assert!(!lint::program(&all, &RK3588, false).is_empty());
        for register in [
            reg::DATA_SIZE3,
            reg::WEIGHT_SIZE1,
            reg::WDMA_SIZE_0,
            reg::CBUF_CON0,
            reg::CONV_CON2,
        ] {
            let mut bad = good;
            patch(&mut bad, register, value);
            let found = lint::program(&bad, &RK3588, false);
            let same = bad == good;
            assert_eq!(found.is_empty(), same, "{} = {value:#x}", register.name);
        }
        // Every size huge at once.
        let mut bad = good;
        patch(&mut bad, reg::DATA_SIZE3, value);
        patch(&mut bad, reg::WEIGHT_SIZE1, u32::MAX);
        assert!(!lint::program(&bad, &RK3588, false).is_empty());
    }
}

/// The register holds N - 1: a consistent N of zero once passed every rule and overflowed the reader.
#[test]
fn an_n_of_zero_is_named() {
    let mut words = regcmd::build(&tile(1, 512, 32), false);
    for (register, value) in [
        (reg::WEIGHT_SIZE0, 0),
        (reg::WEIGHT_SIZE2, 0x0101_0000),
        (reg::CORE_DATAOUT_SIZE_1, u32::MAX),
        (reg::WDMA_SIZE_0, u32::MAX),
        (reg::DATA_CUBE_NOTCH, u32::MAX),
        (reg::DATA_CUBE_CHANNEL, u32::MAX),
    ] {
        patch(&mut words, register, value);
    }
    let found = lint::program(&words, &RK3588, false);
    assert_eq!(found, [Finding::NGranule { n: 0, granule: 32 }]);
}

/// Output is int32, data int8, every post-processing unit bypassed: no other mode passes, and a register
/// without a meaning here stays 0.
#[test]
fn modes_and_precisions_are_fixed() {
    let good = regcmd::build(&tile(1, 512, 32), false);
    for register in [
        reg::DATA_FORMAT,
        reg::CONV_CON1,
        reg::FEATURE_MODE_CFG,
        reg::CORE_MISC_CFG,
        reg::BS_CFG,
        reg::EW_CFG,
        reg::SURFACE_ADD,
        reg::OFFSET_PEND,
        reg::BN_ALU,
    ] {
        let mut bad = good;
        patch(&mut bad, register, 0x12);
        let found = lint::program(&bad, &RK3588, false);
        let Some(entry) = regcmd::TEMPLATE.iter().position(|r| *r == register) else {
            panic!("{} is in no template", register.name);
        };
        let was = good[entry].value();
        // Once for each time the template writes it.
        let want = Finding::Fixed(register.name, 0x12, was);
        assert!(
            !found.is_empty() && found.iter().all(|f| *f == want),
            "{found:?}"
        );
    }
}

/// A lone task keeps its amount entry, a linked one has both; nothing else may stand in the tail.
#[test]
fn the_tail_has_one_of_two_forms() {
    for chained in [false, true] {
        let good = regcmd::build(&tile(1, 512, 32), chained);
        assert_eq!(lint::program(&good, &RK3588, chained), []);
        let other = lint::program(&good, &RK3588, !chained);
        assert!(
            matches!(other[..], [Finding::Tail(..), Finding::Tail(..)]),
            "{other:?}"
        );
        for entry in REGS..WORDS {
            let mut bad = good;
            bad[entry] = Word(bad[entry].0 ^ 1 << 48);
            let found = lint::program(&bad, &RK3588, chained);
            assert!(
                matches!(found[..], [Finding::Tail(at, ..)] if at == entry),
                "{found:?}"
            );
        }
    }
}

//! Streams written by others, executed unchanged; and mutations of our own.

use ork_caps::RK3588;
use ork_formats::regcmd::{self, A_ENTRY, C_ENTRY, Matmul, W_ENTRY, Word, reg};
use ork_sim::{Fault, Memory, Stats};
use std::path::Path;

const A: u32 = 0x1000_0000;
const W: u32 = 0x2000_0000;
const C: u32 = 0x3000_0000;
const PC: u32 = 0x4000_0000;

fn data(name: &str) -> Vec<u8> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    std::fs::read(dir.join(name)).unwrap()
}

#[test]
fn golden_vectors_execute() {
    for (name, words, macs) in [
        ("mtx512_M1_K64_N64", 108, 64 * 64),
        ("mtx512_M4_K576_N64", 108, 4 * 576 * 64),
        ("vendor_rknn_M4_K32_N32_dense", 112, 4 * 32 * 32),
    ] {
        let mut a = data(&format!("{name}.A.bin"));
        let mut w = data(&format!("{name}.W.bin"));
        let want = data(&format!("{name}.C.bin"));
        let mut program = data(&format!("{name}.regcmd.bin"));
        let mut c = vec![0xaa; want.len()];
        let mut mem = Memory::new();
        mem.map(A, &mut a, false);
        mem.map(W, &mut w, false);
        mem.map(PC, &mut program, false);
        mem.map(C, &mut c, true);
        let stats = ork_sim::run(&mut mem, PC, words, 1, &RK3588, 1).unwrap();
        assert_eq!(stats, Stats { macs, programs: 1 });
        drop(mem);
        assert!(c == want, "{name}");
    }
}

fn tile(m: u32, k: u32, n: u32) -> Matmul {
    let data_banks = (m * k.next_multiple_of(64)).div_ceil(32768);
    Matmul {
        m,
        k,
        n,
        ld: n,
        grains_rows: m + 1,
        data_banks,
        weight_banks: 12 - data_banks,
    }
}

fn bytes(words: &[Word]) -> Vec<u8> {
    words.iter().flat_map(|w| w.0.to_le_bytes()).collect()
}

fn addressed(t: &Matmul, next: bool) -> [Word; regcmd::WORDS] {
    let mut words = regcmd::build(t, next);
    for (entry, at) in [(A_ENTRY, A), (W_ENTRY, W), (C_ENTRY, C)] {
        words[entry] = words[entry].with_value(at);
    }
    words
}

fn execute(words: &[Word], t: &Matmul, tasks: u32) -> Result<Vec<u8>, Fault> {
    let (m, k, n) = (t.m as usize, t.k as usize, t.n as usize);
    let code = |i: usize| (i.wrapping_mul(2_654_435_761) >> 7) as u8;
    let mut a: Vec<u8> = (0..m * k).map(code).collect();
    let mut w: Vec<u8> = (0..n * k).map(|i| code(i + 5)).collect();
    let ld = t.ld as usize;
    // Nothing may be written between the rows: the gaps must keep this byte.
    let mut c = vec![0xaa; ((m - 1) * ld + n) * 4];
    let mut program = bytes(words);
    let mut mem = Memory::new();
    mem.map(A, &mut a, false);
    mem.map(W, &mut w, false);
    mem.map(PC, &mut program, false);
    mem.map(C, &mut c, true);
    ork_sim::run(&mut mem, PC, 112, tasks, &RK3588, 2)?;
    drop(mem);
    for row in 0..m {
        for col in 0..n {
            let want: i32 = (0..k)
                .map(|j| {
                    let at = ork_formats::layout::weight_index(col, j, k / 32);
                    i32::from(a[row * k + j] as i8) * i32::from(w[at] as i8)
                })
                .sum();
            let at = (row * ld + col) * 4;
            assert_eq!(c[at..at + 4], want.to_le_bytes(), "row {row} column {col}");
        }
        let gap = (row * ld + n) * 4..((row + 1) * ld * 4).min(c.len());
        assert!(
            row + 1 == m || c[gap].iter().all(|b| *b == 0xaa),
            "gap after row {row}"
        );
    }
    Ok(c)
}

#[test]
fn dense_programs_equal_a_naive_loop() {
    for (m, k, n) in [(1, 32, 32), (5, 96, 64), (64, 512, 96), (70, 1024, 64)] {
        let t = tile(m, k, n);
        execute(&addressed(&t, false), &t, 1).unwrap();
    }
}

#[test]
fn random_dense_programs_equal_a_naive_loop() {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut below = |limit: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit) as u32
    };
    for _ in 0..24 {
        let (m, k, n) = (1 + below(64), 32 * (1 + below(20)), 32 * (1 + below(6)));
        let ld = n + 4 * below(40);
        let t = Matmul {
            ld,
            ..tile(m, k, n)
        };
        execute(&addressed(&t, false), &t, 1).unwrap();
    }
}

/// Runs rows `first..first + m` of a `total`-row cube and compares them, and only them, with a naive
/// loop. `image` lays the rows along the width, as row tiles do; otherwise along the height.
fn cube(total: u32, first: u32, m: u32, image: bool) {
    let t = tile(m, 96, 64);
    let mut words = addressed(&t, false);
    let mut set = |register: regcmd::Reg, value: u32| {
        for word in words.iter_mut().filter(|w| w.is(register)) {
            *word = word.with_value(value);
        }
    };
    set(reg::FEATURE_DATA_ADDR, A + first * 16);
    set(reg::DST_BASE_ADDR, C + first * 16);
    set(reg::DST_SURF_STRIDE, total * 16);
    set(reg::SURFACE_ADD, total * 128);
    set(reg::DATA_CUBE_NOTCH, 0);
    if image {
        set(reg::DATA_SIZE0, m << 16 | 1);
        set(reg::FC_DATA_SIZE0, m << 16 | 1);
        set(reg::CBUF_CON1, (m * t.k).div_ceil(64));
        set(reg::DMA_CON1, total);
        set(reg::DMA_CON2, total - m);
        set(reg::CORE_DATAOUT_SIZE_0, m - 1);
        set(reg::WDMA_SIZE_1, m - 1);
        set(reg::DATA_CUBE_WIDTH, m - 1);
        set(reg::DATA_CUBE_HEIGHT, 0);
    } else {
        set(reg::CONV_CON1, 0);
        set(reg::DMA_CON1, 4);
        // Negative below four rows: the field is signed, 28 bits.
        set(reg::DMA_CON2, total.wrapping_sub(4) & 0x0fff_ffff);
    }
    let (rows, k, n) = (total as usize, t.k as usize, t.n as usize);
    let mut a: Vec<u8> = (0..rows * k).map(|i| ((i * 37) >> 2) as u8).collect();
    let mut w: Vec<u8> = (0..n * k).map(|i| ((i * 91) >> 3) as u8).collect();
    let mut c = vec![0xaa; rows * n * 4];
    let mut program = bytes(&words);
    let mut mem = Memory::new();
    mem.map(A, &mut a, false);
    mem.map(W, &mut w, false);
    mem.map(PC, &mut program, false);
    mem.map(C, &mut c, true);
    ork_sim::run(&mut mem, PC, 112, 1, &RK3588, 2).unwrap();
    drop(mem);
    for row in 0..rows {
        for col in 0..n {
            let dot: i32 = (0..k)
                .map(|j| {
                    let x = a[(j / 16) * rows * 16 + row * 16 + j % 16] as i8;
                    let y = w[ork_formats::layout::weight_index(col, j, k / 32)] as i8;
                    i32::from(x) * i32::from(y)
                })
                .sum();
            let want = match (first..first + m).contains(&(row as u32)) {
                true => dot.to_le_bytes(),
                false => [0xaa; 4],
            };
            let at = ((col / 4) * rows * 4 + row * 4 + col % 4) * 4;
            assert_eq!(c[at..at + 4], want, "{total} rows, row {row} column {col}");
        }
    }
}

#[test]
fn cubes_equal_a_naive_loop() {
    for total in [2, 4, 7, 20, 65] {
        cube(total, 0, total, false);
        cube(total, 0, total, true);
    }
    cube(20, 4, 8, true);
    cube(96, 60, 36, true);
}

#[test]
fn every_fault_is_found() {
    let t = tile(4, 64, 32);
    let fault = |register: regcmd::Reg, value: u32| {
        let mut words = addressed(&t, false);
        for word in words.iter_mut().filter(|w| w.is(register)) {
            *word = word.with_value(value);
        }
        execute(&words, &t, 1).unwrap_err()
    };
    assert!(matches!(
        fault(reg::CBUF_CON0, 0xb2),
        Fault::BankSplit { .. }
    ));
    assert!(matches!(
        fault(reg::CBUF_CON0, 0x0c),
        Fault::BankSplit { .. }
    ));
    assert!(matches!(fault(reg::CBUF_CON0, 0x1b1), Fault::Mode(..)));
    for (register, value) in [
        (reg::DATA_FORMAT, 0),
        (reg::BS_CFG, 0x52),
        (reg::BN_CFG, 0),
        (reg::EW_CFG, 0x382),
        (reg::BS_OW_CFG, 0x124),
    ] {
        assert!(matches!(fault(register, value), Fault::Mode(..)));
    }
    let wide = tile(1, 32, 8224);
    assert_eq!(
        execute(&addressed(&wide, false), &wide, 1).unwrap_err(),
        Fault::NMax(8224, 8192)
    );
    assert!(matches!(
        fault(reg::FEATURE_DATA_ADDR, 0),
        Fault::ZeroAddress(_)
    ));
    assert!(matches!(
        fault(reg::DST_BASE_ADDR, C + 8),
        Fault::Unaligned { .. }
    ));
    assert!(matches!(
        fault(reg::DCOMP_ADDR0, 0x5000_0000),
        Fault::Unmapped {
            program: PC,
            address: 0x5000_0000,
            ..
        }
    ));
    assert!(matches!(
        fault(reg::DST_BASE_ADDR, A),
        Fault::ReadOnly { program: PC, address, .. } if address == u64::from(A)
    ));
    assert!(matches!(fault(reg::DMA_CON1, 0x40), Fault::Unmapped { .. }));
    assert!(matches!(
        fault(reg::WEIGHT_SIZE1, 32),
        Fault::Contradiction(..)
    ));
    assert!(matches!(fault(reg::PC_ENABLE, 0x18), Fault::Enable(0x18)));

    let mut words = addressed(&t, false);
    words[20] = Word(0x0201_0000_0000_1ffc);
    assert!(matches!(
        execute(&words, &t, 1).unwrap_err(),
        Fault::UnknownRegister { index: 20, .. }
    ));
    words = addressed(&t, false);
    words[111] = Word(0);
    assert_eq!(execute(&words, &t, 1).unwrap_err(), Fault::NoEnable);
    words = addressed(&t, false);
    assert_eq!(
        execute(&words, &t, 2).unwrap_err(),
        Fault::MissingLink { task: 0, tasks: 2 }
    );
    let narrow = Matmul {
        data_banks: 1,
        weight_banks: 11,
        ..tile(64, 576, 32)
    };
    assert_eq!(
        execute(&addressed(&narrow, false), &narrow, 1).unwrap_err(),
        Fault::DataBanks { have: 1, need: 2 }
    );
    let odd = tile(4, 48, 32);
    assert_eq!(
        execute(&addressed(&odd, false), &odd, 1).unwrap_err(),
        Fault::K(48)
    );
    let odd = tile(4, 64, 48);
    assert_eq!(
        execute(&addressed(&odd, false), &odd, 1).unwrap_err(),
        Fault::N(48)
    );
}

#[test]
fn chains_follow_their_links() {
    let t = tile(4, 64, 32);
    let mut first = addressed(&t, true);
    first[regcmd::NEXT_ENTRY] = first[regcmd::NEXT_ENTRY].with_value(PC + regcmd::BYTES as u32);
    let words = [first, addressed(&t, false)].concat();
    execute(&words, &t, 2).unwrap();
}

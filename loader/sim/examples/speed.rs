//! Prints the simulator's rate: `cargo run --release -p ork-sim --example speed`.
#![allow(clippy::print_stdout, reason = "an example reports on stdout")]

use ork_caps::RK3588;
use ork_formats::regcmd::{self, A_ENTRY, C_ENTRY, Matmul, W_ENTRY};
use ork_sim::Memory;
use std::time::Instant;

fn main() -> Result<(), ork_sim::Fault> {
    let t = Matmul {
        m: 128,
        k: 2048,
        n: 2048,
        ld: 2048,
        grains_rows: 32,
        data_banks: 8,
        weight_banks: 4,
    };
    let mut words = regcmd::build(&t, false);
    let places = [
        (A_ENTRY, 0x1000_0000),
        (W_ENTRY, 0x2000_0000),
        (C_ENTRY, 0x3000_0000),
    ];
    for (entry, at) in places {
        words[entry] = words[entry].with_value(at);
    }
    let mut program: Vec<u8> = words.iter().flat_map(|w| w.0.to_le_bytes()).collect();
    let mut a: Vec<u8> = (0..t.m * t.k).map(|i| i as u8).collect();
    let mut w: Vec<u8> = (0..t.n * t.k).map(|i| (i * 7) as u8).collect();
    let mut c = vec![0u8; (t.m * t.n * 4) as usize];
    let mut mem = Memory::new();
    mem.map(0x1000_0000, &mut a, false);
    mem.map(0x2000_0000, &mut w, false);
    mem.map(0x3000_0000, &mut c, true);
    mem.map(0x4000_0000, &mut program, false);
    for threads in [1, 2] {
        let start = Instant::now();
        let mut macs = 0;
        for _ in 0..8 {
            macs += ork_sim::run(&mut mem, 0x4000_0000, 112, 1, &RK3588, threads)?.macs;
        }
        let rate = macs as f64 / start.elapsed().as_secs_f64() / 1e9;
        println!("{threads} threads: {rate:.1} GMAC/s");
    }
    Ok(())
}

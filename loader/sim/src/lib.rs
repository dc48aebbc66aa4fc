//! Bit-exact simulator of the NPU: the executable meaning of a command stream.
//!
//! It means the hardware, not our policy: it runs whatever the registers say, row-major and cube
//! layouts alike, and faults where the hardware would read or write memory it was not given, hang,
//! or return garbage. Addresses come from the registers only.
#![forbid(unsafe_code)]

mod decode;
mod execute;
mod fault;
mod memory;

pub use fault::Fault;
pub use memory::Memory;

use decode::Registers;
use ork_caps::Caps;
use ork_formats::regcmd::{Word, reg};

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Multiply-accumulates.
    pub macs: u64,
    /// Programs executed.
    pub programs: u32,
}

/// Executes `tasks` linked programs, the first at device address `pc` with `words` 64-bit words.
///
/// # Errors
/// The first [`Fault`]; memory holds what earlier programs wrote.
pub fn run(
    mem: &mut Memory<'_>,
    pc: u32,
    words: u32,
    tasks: u32,
    caps: &Caps,
    threads: usize,
) -> Result<Stats, Fault> {
    let mut stats = Stats::default();
    let (mut at, mut words) = (pc, words);
    for task in 0..tasks {
        mem.program = at;
        let stream = fetch(mem, at, words)?;
        let registers = Registers::decode(&stream)?;
        stats.macs += execute::matmul(mem, &registers, caps, threads)?;
        stats.programs += 1;
        if task + 1 < tasks {
            at = registers.get(reg::PC_NEXT_ADDR);
            let amount = registers.get(reg::PC_NEXT_AMOUNT);
            if at == 0 || amount == 0 {
                return Err(Fault::MissingLink { task, tasks });
            }
            // The fetch amount counts pairs of words less one.
            words = amount.saturating_add(1).saturating_mul(2);
        }
    }
    Ok(stats)
}

fn fetch(mem: &Memory<'_>, at: u32, words: u32) -> Result<Vec<Word>, Fault> {
    if !at.is_multiple_of(16) {
        return Err(Fault::Unaligned { address: at });
    }
    let bytes = mem.read(at, u64::from(words) * 8)?;
    Ok(bytes
        .chunks_exact(8)
        .map(|b| Word(u64::from_le_bytes(b.try_into().expect("8 bytes"))))
        .collect())
}

//! Command streams and their relocations.

use super::{Proof, bad};
use crate::lint as linter;
use crate::model::{NpuPlan, Place, Region};
use crate::pack::PackError;
use crate::regcmd::{self, Reloc, Word};
use ork_caps::Caps;

fn words(stream: &[u8]) -> impl Iterator<Item = Word> + '_ {
    stream
        .chunks_exact(8)
        .map(|b| Word(u64::from_le_bytes(b.try_into().expect("8 bytes"))))
}

pub(super) fn lint(plan: &NpuPlan, caps: &Caps, stream: &[u8], next: &[Option<u32>]) -> Proof {
    for (index, bytes) in stream.chunks_exact(regcmd::BYTES).enumerate() {
        let program: Vec<Word> = words(bytes).collect();
        let refuse = |finding: String| PackError::Program {
            program: index as u32,
            finding,
        };
        if let Some(finding) = linter::program(&program, caps, next[index].is_some()).first() {
            return Err(refuse(finding.to_string()));
        }
        let p = &plan.programs[index];
        let value = |reg: regcmd::Reg| {
            program
                .iter()
                .rev()
                .find(|w| w.block() == reg.block && w.offset() == reg.offset)
                .map_or(0, |w| w.value())
        };
        let (m, k, n) = (
            value(regcmd::reg::DATA_SIZE3),
            value(regcmd::reg::WEIGHT_SIZE1),
            value(regcmd::reg::WDMA_SIZE_0).wrapping_add(1),
        );
        if (m, k, n) != (p.m, p.k, p.n) {
            return Err(refuse(format!(
                "computes {m}x{k}x{n}, the manifest says {}x{}x{}",
                p.m, p.k, p.n
            )));
        }
    }
    Ok(())
}

/// Every address word has exactly one relocation, to exactly the place the manifest names.
pub(super) fn relocations(
    plan: &NpuPlan,
    stream: &[u8],
    relocs: &[Reloc],
    next: &[Option<u32>],
) -> Proof {
    let program_extents: Vec<(u32, u64, u64)> = plan
        .extents
        .iter()
        .enumerate()
        .filter(|(_, e)| e.region == Region::Programs)
        .map(|(i, e)| (i as u32, e.file_offset, e.bytes))
        .collect();
    let place_of = |program: u32| {
        let at = u64::from(program) * regcmd::BYTES as u64;
        program_extents
            .iter()
            .find(|(_, start, bytes)| *start <= at && at + regcmd::BYTES as u64 <= start + bytes)
            .map(|(extent, start, _)| Place {
                extent: *extent,
                offset: (at - start) as u32,
            })
    };
    let mut expected = Vec::with_capacity(relocs.len());
    for (index, p) in plan.programs.iter().enumerate() {
        let word = (index * regcmd::WORDS) as u32;
        let mut push = |entry: usize, at: Place| {
            expected.push(Reloc {
                word: word + entry as u32,
                extent: at.extent,
                offset: at.offset,
            });
        };
        place_of(index as u32)
            .ok_or_else(|| bad(format!("program {index} crosses a program extent")))?;
        push(regcmd::A_ENTRY, p.a);
        push(regcmd::W_ENTRY, p.w);
        push(regcmd::C_ENTRY, p.c);
        if let Some(follower) = next[index] {
            let at = place_of(follower)
                .ok_or_else(|| bad(format!("program {follower} crosses a program extent")))?;
            push(regcmd::NEXT_ENTRY, at);
        }
    }
    for (have, want) in relocs.iter().zip(&expected) {
        if have != want {
            return Err(PackError::Reloc {
                word: have.word,
                fault: format!("found {have:?}, the manifest needs {want:?}"),
            });
        }
        let bytes = &stream[have.word as usize * 8..][..8];
        let word = Word(u64::from_le_bytes(bytes.try_into().expect("8 bytes")));
        if word.value() != 0 {
            return Err(PackError::Reloc {
                word: have.word,
                fault: format!("the address word already holds {:#x}", word.value()),
            });
        }
    }
    if relocs.len() != expected.len() {
        return Err(PackError::Reloc {
            word: relocs.len() as u32,
            fault: format!(
                "{} relocations, {} address words",
                relocs.len(),
                expected.len()
            ),
        });
    }
    Ok(())
}

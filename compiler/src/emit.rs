//! Writes already decided numbers into command streams, and lists their address words.

use crate::memory::program_place;
use crate::schedule::Schedule;
use crate::tile::buffering;
use ork_caps::Caps;
use ork_formats::model::{NpuPlan, Place, Program};
use ork_formats::regcmd::{self, Matmul, Reloc};

/// The programs and relocations sections.
#[derive(Clone, Debug, Default)]
pub struct Emitted {
    /// Programs one after the other, every address zero.
    pub words: Vec<u64>,
    /// In word order.
    pub relocs: Vec<Reloc>,
}

impl Emitted {
    /// Little-endian bytes of the programs section.
    #[must_use]
    pub fn program_bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|w| w.to_le_bytes()).collect()
    }

    /// Bytes of the relocations section.
    #[must_use]
    pub fn reloc_bytes(&self) -> Vec<u8> {
        self.relocs.iter().flat_map(|r| r.to_bytes()).collect()
    }
}

/// Emits every program of `plan`, linked inside the chains of `schedule`.
#[must_use]
pub fn emit(schedule: &Schedule, plan: &NpuPlan, caps: &Caps) -> Emitted {
    let mut out = Emitted::default();
    for chain in schedule.matrices.iter().flat_map(|m| &m.chains) {
        let last = chain.first + chain.count - 1;
        for index in chain.first..=last {
            let next = (index != last)
                .then(|| program_place(&plan.extents, index as usize + 1))
                .flatten();
            program(&mut out, &plan.programs[index as usize], next, caps);
        }
    }
    out
}

fn program(out: &mut Emitted, p: &Program, next: Option<Place>, caps: &Caps) {
    let banks = buffering(p.m, p.k, caps);
    let matmul = Matmul {
        m: p.m,
        k: p.k,
        n: p.n,
        // Rows of C are contiguous.
        ld: p.n,
        grains_rows: banks.grains_rows,
        data_banks: banks.data_banks,
        weight_banks: banks.weight_banks,
    };
    let first = out.words.len();
    let addresses = [
        (regcmd::A_ENTRY, Some(p.a)),
        (regcmd::W_ENTRY, Some(p.w)),
        (regcmd::C_ENTRY, Some(p.c)),
        (regcmd::NEXT_ENTRY, next),
    ];
    for (entry, place) in addresses {
        out.relocs.extend(place.map(|at| Reloc {
            word: (first + entry) as u32,
            extent: at.extent,
            offset: at.offset,
        }));
    }
    let words = regcmd::build(&matmul, next.is_some());
    out.words.extend(words.iter().map(|w| w.0));
}

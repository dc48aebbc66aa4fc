//! Everything a prefill may submit, resolved when a pack opens: nothing is looked up per op.

use ork_formats::model::{Chain, NpuPlan, Place, Program, Region};
use ork_formats::pack::Reader;

/// What one core does of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its chain.
    pub chain: Chain,
    /// Index of the chain over the whole pack, in manifest order.
    pub index: u32,
    /// Bytes of activations it reads.
    pub a: Span,
    /// Bytes of results it writes.
    pub c: Span,
    /// Place of the word that is written last.
    pub doorbell: Place,
}

/// A range of one extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub at: Place,
    /// Bytes.
    pub bytes: u64,
}

/// One matrix times one half-chunk of a row class, on every core that owns columns of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Half whose A buffers and ring it uses.
    pub half: u32,
    /// Rows it computes.
    pub rows: u32,
    /// One per core.
    pub parts: Vec<Part>,
}

impl Job {
    /// Programs of all cores that touch the first `rows` rows.
    pub fn programs<'a>(&self, plan: &'a NpuPlan, rows: u32) -> Vec<&'a Program> {
        self.parts
            .iter()
            .flat_map(|p| programs(plan, &p.chain))
            .filter(|p| p.row0 < rows)
            .collect()
    }
}

/// The programs of a chain, in order.
pub fn programs<'a>(plan: &'a NpuPlan, chain: &Chain) -> &'a [Program] {
    &plan.programs[chain.first as usize..][..chain.count as usize]
}

/// All jobs of a pack.
#[derive(Debug, Default)]
pub struct Jobs {
    jobs: Vec<Job>,
    /// Job of each tensor, half and row class: `[tensor][half][class / granule - 1]`.
    index: Vec<[Vec<Option<u32>>; 2]>,
    granule: u32,
    chains: u32,
}

impl Jobs {
    /// Groups the chains of every tensor. That row classes are whole granules is proven.
    #[must_use]
    pub fn new(reader: &Reader) -> Self {
        let manifest = reader.manifest();
        let granule = reader.caps().row_granule.value;
        let mut out = Self {
            index: vec![Default::default(); manifest.tensors.len()],
            granule,
            ..Self::default()
        };
        let Some(plan) = &manifest.npu else {
            return out;
        };
        for (tensor, form) in manifest.tensors.iter().enumerate() {
            for chain in form.npu.iter().flat_map(|f| &f.chains) {
                let classes = &mut out.index[tensor][chain.half as usize];
                let class = (chain.rows / granule) as usize - 1;
                classes.resize(classes.len().max(class + 1), None);
                let id = *classes[class].get_or_insert_with(|| {
                    out.jobs.push(Job {
                        half: chain.half,
                        rows: chain.rows,
                        parts: Vec::new(),
                    });
                    out.jobs.len() as u32 - 1
                });
                let part = part(plan, *chain, out.chains);
                out.jobs[id as usize].parts.push(part);
                out.chains += 1;
            }
        }
        out
    }

    /// The job for `rows` rows of `half` of a tensor.
    #[must_use]
    pub fn find(&self, tensor: u32, half: u32, rows: u32) -> Option<u32> {
        let class = rows.div_ceil(self.granule).checked_sub(1)?;
        let classes = &self.index[tensor as usize][half as usize];
        *classes.get(class as usize)?
    }

    /// The job that holds a program.
    #[must_use]
    pub fn with_program(&self, program: u32) -> Option<u32> {
        let holds = |p: &Part| (p.chain.first..p.chain.first + p.chain.count).contains(&program);
        let at = self.jobs.iter().position(|j| j.parts.iter().any(holds))?;
        Some(at as u32)
    }

    /// One job.
    #[must_use]
    pub fn get(&self, id: u32) -> &Job {
        &self.jobs[id as usize]
    }

    /// Every job.
    pub fn iter(&self) -> impl Iterator<Item = &Job> {
        self.jobs.iter()
    }
}

fn part(plan: &NpuPlan, chain: Chain, index: u32) -> Part {
    let programs = programs(plan, &chain);
    let last = programs.last().expect("no chain is empty");
    let word = last.m * last.n * 4 - 4;
    Part {
        chain,
        index,
        a: span(programs.iter().map(|p| (p.a, p.m * p.k))),
        c: span(programs.iter().map(|p| (p.c, p.m * p.n * 4))),
        doorbell: Place {
            extent: last.c.extent,
            offset: last.c.offset + word,
        },
    }
}

/// The range around pieces of one extent.
fn span(pieces: impl Iterator<Item = (Place, u32)> + Clone) -> Span {
    let first = pieces.clone().map(|(at, _)| at).min();
    let at = first.expect("no chain is empty");
    let end = pieces.map(|(at, len)| u64::from(at.offset) + u64::from(len));
    Span {
        at,
        bytes: end.max().expect("no chain is empty") - u64::from(at.offset),
    }
}

/// Where each chain's task descriptors go: (extent, index of its first task), in manifest order.
/// The kernel counts tasks from the start of an allocation, so arrays follow each other without gaps
/// and never cross an extent. `None` when the plan has too little room.
#[must_use]
pub fn task_arrays(jobs: &Jobs, plan: &NpuPlan, task_bytes: u32) -> Option<Vec<(u32, u32)>> {
    let mut chains: Vec<(u32, u32)> = jobs
        .iter()
        .flat_map(|j| &j.parts)
        .map(|p| (p.index, p.chain.count))
        .collect();
    chains.sort_unstable();
    let mut extents = plan
        .extents
        .iter()
        .enumerate()
        .filter(|(_, e)| e.region == Region::Tasks)
        .map(|(i, e)| (i as u32, (e.bytes / u64::from(task_bytes)) as u32));
    let mut at = Vec::with_capacity(chains.len());
    let (mut extent, mut room, mut used) = (0, 0, 0);
    for (_, count) in chains {
        while room - used < count {
            (extent, room) = extents.next()?;
            used = 0;
        }
        at.push((extent, used));
        used += count;
    }
    Some(at)
}

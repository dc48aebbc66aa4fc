//! What must hold of a manifest, its programs and its relocations before anything runs.
//!
//! Written from the specification alone: it shares types with the compiler, never logic.

use super::PackError;
use crate::lint;
use crate::model::{
    Block, Chain, HostForm, Manifest, NpuForm, NpuPlan, Op, Place, Region, Span, Tensor,
};
use crate::quant::int4;
use crate::regcmd::{self, Reloc, Word};
use ork_caps::Caps;

type Proof = Result<(), PackError>;

fn bad(text: String) -> PackError {
    PackError::Model(text)
}

fn ensure(holds: bool, text: impl FnOnce() -> String) -> Proof {
    if holds { Ok(()) } else { Err(bad(text())) }
}

/// Longest slot and largest dimension accepted: products of two stay far inside u64, and sums of
/// int8 products inside int32.
const MAX_DIM: u32 = 1 << 20;

/// Proves ops, slots, tensors and host spans against a host section of `host` bytes.
pub(super) fn model(manifest: &Manifest, host: u64) -> Proof {
    let model = &manifest.model;
    ensure(!model.slots.is_empty() && model.slots.len() <= 4096, || {
        format!("{} activation slots", model.slots.len())
    })?;
    for width in &model.slots {
        ensure((1..=MAX_DIM).contains(width), || {
            format!("slot width {width}")
        })?;
    }
    ensure((1..=MAX_DIM).contains(&model.vocab), || {
        format!("vocab {}", model.vocab)
    })?;
    ensure((1..=1 << 24).contains(&model.context), || {
        format!("context {}", model.context)
    })?;
    for tensor in &manifest.tensors {
        host_form(tensor, host)?;
    }
    for cache in &model.caches {
        let width = u64::from(cache.kv_heads) * u64::from(cache.head_dim);
        ensure((1..=u64::from(MAX_DIM)).contains(&width), || {
            format!("cache width {width}")
        })?;
    }
    for rope in &model.ropes {
        ensure((1..=4096).contains(&rope.inv_freq.len()), || {
            format!("rope of {} frequencies", rope.inv_freq.len())
        })?;
    }
    for (index, op) in model.ops.iter().enumerate() {
        prove_op(manifest, op).map_err(|e| match e {
            PackError::Model(text) => bad(format!("op {index}: {text}")),
            other => other,
        })?;
    }
    let hidden = width(manifest, model.hidden)?;
    shape(manifest, model.head, model.vocab, hidden)
}

fn width(manifest: &Manifest, slot: u32) -> Result<u32, PackError> {
    let slots = &manifest.model.slots;
    slots
        .get(slot as usize)
        .copied()
        .ok_or_else(|| bad(format!("slot {slot} of {}", slots.len())))
}

fn tensor(manifest: &Manifest, id: u32) -> Result<&Tensor, PackError> {
    manifest
        .tensors
        .get(id as usize)
        .ok_or_else(|| bad(format!("tensor {id} of {}", manifest.tensors.len())))
}

fn shape(manifest: &Manifest, id: u32, n: u32, k: u32) -> Proof {
    let t = tensor(manifest, id)?;
    ensure((t.n, t.k) == (n, k), || {
        format!(
            "tensor {} is [{}, {}], the op needs [{n}, {k}]",
            t.name, t.n, t.k
        )
    })
}

/// Vectors are `[1, k]` in f32.
fn vector(manifest: &Manifest, id: u32, k: u32) -> Proof {
    shape(manifest, id, 1, k)?;
    let t = tensor(manifest, id)?;
    let f32s = matches!(
        t.host,
        HostForm::Float {
            ty: crate::model::FloatType::F32,
            ..
        }
    );
    ensure(f32s, || format!("vector {} is not f32", t.name))
}

fn same(a: u64, b: u64, what: &str) -> Proof {
    ensure(a == b, || format!("{what}: {a} against {b}"))
}

fn prove_op(manifest: &Manifest, op: &Op) -> Proof {
    let w = |slot| width(manifest, slot).map(u64::from);
    match *op {
        Op::Embed { table, out, .. } => {
            shape(manifest, table, manifest.model.vocab, w(out)? as u32)
        }
        Op::RmsNorm {
            x,
            weight,
            out,
            eps,
        } => {
            same(w(x)?, w(out)?, "norm widths")?;
            ensure(eps.is_finite() && 0.0 <= eps, || format!("norm eps {eps}"))?;
            let group = tensor(manifest, weight)?.k;
            vector(manifest, weight, group)?;
            same(w(x)? % u64::from(group), 0, "norm width over its group")
        }
        Op::Linear {
            x,
            weight,
            bias,
            out,
        } => {
            shape(manifest, weight, w(out)? as u32, w(x)? as u32)?;
            ensure(x != out, || format!("linear in place on slot {x}"))?;
            match bias {
                Some(id) => vector(manifest, id, w(out)? as u32),
                None => Ok(()),
            }
        }
        Op::Rope {
            x,
            heads,
            head_dim,
            rope,
        } => {
            same(w(x)?, u64::from(heads) * u64::from(head_dim), "rope width")?;
            let table = manifest.model.ropes.get(rope as usize);
            let lanes = table.map(|r| 2 * r.inv_freq.len() as u64);
            ensure(lanes.is_some_and(|l| l <= u64::from(head_dim)), || {
                format!("rope {rope} rotates {lanes:?} of {head_dim} lanes")
            })
        }
        Op::Attention {
            q,
            k,
            v,
            out,
            heads,
            cache,
            ..
        } => {
            let caches = &manifest.model.caches;
            let c = caches
                .get(cache as usize)
                .ok_or_else(|| bad(format!("cache {cache} of {}", caches.len())))?;
            let kv = u64::from(c.kv_heads) * u64::from(c.head_dim);
            let all = u64::from(heads) * u64::from(c.head_dim);
            same(w(k)?, kv, "key width")?;
            same(w(v)?, kv, "value width")?;
            same(w(q)?, all, "query width")?;
            same(w(out)?, all, "attention width")?;
            ensure(heads != 0 && heads % c.kv_heads == 0, || {
                format!("{heads} heads over {} kv heads", c.kv_heads)
            })
        }
        Op::Glu { gate, up, out, .. } => {
            same(w(gate)?, w(up)?, "gate and up")?;
            same(w(gate)?, w(out)?, "gate and out")
        }
        Op::Add { x, out, .. } => same(w(x)?, w(out)?, "addends"),
    }
}

fn span(at: Span, need: u64, host: u64, name: &str) -> Proof {
    ensure(at.bytes == need, || {
        format!("{name}: {} bytes, its shape needs {need}", at.bytes)
    })?;
    ensure(at.offset.is_multiple_of(64), || {
        format!("{name}: offset {} is not 64-byte aligned", at.offset)
    })?;
    let end = at.offset.checked_add(at.bytes);
    ensure(end.is_some_and(|e| e <= host), || {
        format!(
            "{name}: {} bytes at {} exceed the host section's {host}",
            at.bytes, at.offset
        )
    })
}

fn host_form(t: &Tensor, host: u64) -> Proof {
    ensure(
        (1..=MAX_DIM).contains(&t.n) && (1..=MAX_DIM).contains(&t.k),
        || format!("tensor {} is [{}, {}]", t.name, t.n, t.k),
    )?;
    let elements = u64::from(t.n) * u64::from(t.k);
    match t.host {
        HostForm::Float { ty, at } => span(at, elements * ty.bytes(), host, &t.name),
        HostForm::Int8 { at, scales } => {
            span(at, elements, host, &t.name)?;
            span(scales, u64::from(t.n) * 4, host, &t.name)
        }
        HostForm::Int4 { at } => span(at, int4::bytes(t.n as usize, t.k as usize), host, &t.name),
    }?;
    match &t.npu {
        Some(form) => {
            let padded = u64::from(t.n.next_multiple_of(32));
            span(form.scales, padded * 4, host, &t.name)
        }
        None => Ok(()),
    }
}

fn inside(plan: &NpuPlan, at: Place, bytes: u64, region: Region, what: &str) -> Proof {
    let extent = plan.extents.get(at.extent as usize).ok_or_else(|| {
        bad(format!(
            "{what}: extent {} of {}",
            at.extent,
            plan.extents.len()
        ))
    })?;
    ensure(extent.region == region, || {
        format!(
            "{what}: extent {} is {:?}, not {region:?}",
            at.extent, extent.region
        )
    })?;
    ensure(u64::from(at.offset) + bytes <= extent.bytes, || {
        format!(
            "{what}: {bytes} bytes at {} exceed extent {} of {}",
            at.offset, at.extent, extent.bytes
        )
    })?;
    ensure(at.offset.is_multiple_of(16), || {
        format!("{what}: offset {} is not 16-byte aligned", at.offset)
    })
}

/// Proves extents, forms, streams and relocations.
pub(super) fn programs(
    manifest: &Manifest,
    caps: &Caps,
    stream: &[u8],
    relocs: &[Reloc],
    weights: u64,
) -> Proof {
    let Some(plan) = &manifest.npu else {
        same(stream.len() as u64, 0, "program bytes without an NPU plan")?;
        same(relocs.len() as u64, 0, "relocations without an NPU plan")?;
        let forms = manifest.tensors.iter().filter(|t| t.npu.is_some()).count();
        return same(forms as u64, 0, "NPU forms without an NPU plan");
    };
    let count = plan.programs.len();
    same(
        stream.len() as u64,
        (count * regcmd::BYTES) as u64,
        "program bytes",
    )?;
    extents(plan, caps, stream.len() as u64, weights)?;
    for at in &plan.a_buffers {
        inside(plan, *at, u64::from(plan.a_bytes), Region::A, "A buffer")?;
    }
    // Which program follows which; u32::MAX where no chain claims the program.
    let mut next: Vec<Option<u32>> = vec![None; count];
    let mut claimed = vec![false; count];
    for t in &manifest.tensors {
        if let Some(form) = &t.npu {
            npu_form(plan, t, form)?;
            for chain in &form.chains {
                chain_programs(plan, t, form, chain, &mut claimed, &mut next)?;
            }
        }
    }
    if let Some(orphan) = claimed.iter().position(|c| !c) {
        return Err(bad(format!("program {orphan} belongs to no chain")));
    }
    streams(plan, caps, stream, &next)?;
    relocations(plan, stream, relocs, &next)
}

fn extents(plan: &NpuPlan, caps: &Caps, stream: u64, weights: u64) -> Proof {
    ensure((1..=caps.cores.value).contains(&plan.cores), || {
        format!("{} cores, the SoC has {}", plan.cores, caps.cores.value)
    })?;
    ensure(
        (64..=4096).contains(&plan.chunk) && plan.half_rows <= plan.chunk && 0 < plan.half_rows,
        || format!("chunk {} with half {}", plan.chunk, plan.half_rows),
    )?;
    same(
        plan.a_buffers.len() as u64,
        2 * u64::from(plan.cores),
        "A buffers",
    )?;
    let mut sum = 0u64;
    let mut file = [
        (Region::Weights, 0u64, weights),
        (Region::Programs, 0, stream),
    ];
    let mut last = Region::Weights;
    for (index, extent) in plan.extents.iter().enumerate() {
        ensure(last <= extent.region, || {
            format!("extent {index} is out of order")
        })?;
        last = extent.region;
        ensure(
            0 < extent.bytes
                && extent.bytes <= caps.extent_max.value
                && extent.bytes % caps.page.value == 0,
            || format!("extent {index} has {} bytes", extent.bytes),
        )?;
        sum += extent.bytes;
        if let Some((_, used, _)) = file.iter_mut().find(|f| f.0 == extent.region) {
            same(extent.file_offset, *used, "extent file offset")?;
            *used += extent.bytes;
        }
    }
    let window = caps.iova_budget.value - caps.iova_margin.value;
    ensure(sum <= window, || {
        format!("extents need {sum} bytes, the window has {window}")
    })?;
    // The last extent of a region is rounded up to a page; the section holds the bytes in use.
    for (region, used, section) in file {
        ensure(
            section <= used && used < section + caps.page.value.max(1),
            || format!("{region:?} extents hold {used} bytes, the section {section}"),
        )?;
    }
    Ok(())
}

fn npu_form(plan: &NpuPlan, t: &Tensor, form: &NpuForm) -> Proof {
    let covered = u64::from(form.slice_k) * u64::from(form.k_slices);
    ensure(u64::from(t.k) <= covered && 0 < form.k_slices, || {
        format!(
            "{}: {} slices of {} for K {}",
            t.name, form.k_slices, form.slice_k, t.k
        )
    })?;
    // int32 exactness: 127 * 127 * K stays inside i32, sentinel included.
    ensure(covered * 127 * 127 < i32::MAX as u64, || {
        format!("{}: K {covered} overflows int32", t.name)
    })?;
    ensure(
        covered * u64::from(plan.half_rows) <= u64::from(plan.a_bytes),
        || {
            format!(
                "{}: {} rows of {covered} exceed the A buffer's {}",
                t.name, plan.half_rows, plan.a_bytes
            )
        },
    )?;
    let padded = t.n.next_multiple_of(32);
    for block in &form.blocks {
        let Block {
            core,
            n0,
            cols,
            slice,
            at,
        } = *block;
        ensure(
            core < plan.cores
                && slice < form.k_slices
                && n0 % 32 == 0
                && cols % 32 == 0
                && 0 < cols
                && u64::from(n0) + u64::from(cols) <= u64::from(padded),
            || format!("{}: weight block {block:?}", t.name),
        )?;
        inside(
            plan,
            at,
            u64::from(cols) * u64::from(form.slice_k),
            Region::Weights,
            &t.name,
        )?;
    }
    Ok(())
}

fn chain_programs(
    plan: &NpuPlan,
    t: &Tensor,
    form: &NpuForm,
    chain: &Chain,
    claimed: &mut [bool],
    next: &mut [Option<u32>],
) -> Proof {
    let Chain {
        core,
        half,
        rows,
        first,
        count,
    } = *chain;
    let end = first
        .checked_add(count)
        .filter(|e| *e as usize <= plan.programs.len());
    ensure(
        core < plan.cores
            && half < 2
            && 0 < rows
            && rows <= plan.half_rows
            && 0 < count
            && end.is_some(),
        || format!("{}: chain {chain:?}", t.name),
    )?;
    let a = plan.a_buffers[(half * plan.cores + core) as usize];
    let mut area = 0u64;
    for index in first..first + count {
        let p = &plan.programs[index as usize];
        ensure(
            !std::mem::replace(&mut claimed[index as usize], true),
            || format!("program {index} is in two chains"),
        )?;
        if index + 1 < first + count {
            next[index as usize] = Some(index + 1);
        }
        let block = form.blocks.iter().any(|b| {
            b.core == core && b.at == p.w && b.n0 == p.n0 && b.cols == p.n && b.slice == p.slice
        });
        ensure(block, || {
            format!("program {index} reads no weight block of {}", t.name)
        })?;
        ensure(
            p.k == form.slice_k && 0 < p.m && u64::from(p.row0) + u64::from(p.m) <= u64::from(rows),
            || {
                format!(
                    "program {index}: rows {}+{} K {} in a chain of {rows}",
                    p.row0, p.m, p.k
                )
            },
        )?;
        let offset = u64::from(a.offset)
            + u64::from(p.slice) * u64::from(plan.half_rows) * u64::from(form.slice_k)
            + u64::from(p.row0) * u64::from(form.slice_k);
        ensure(
            p.a.extent == a.extent && u64::from(p.a.offset) == offset,
            || {
                format!(
                    "program {index} reads A at {:?}, expected offset {offset}",
                    p.a
                )
            },
        )?;
        inside(
            plan,
            p.a,
            u64::from(p.m) * u64::from(p.k),
            Region::A,
            "A rows",
        )?;
        inside(
            plan,
            p.c,
            u64::from(p.m) * u64::from(p.n) * 4,
            Region::Ring,
            "C block",
        )?;
        area += u64::from(p.m) * u64::from(p.n);
    }
    // Together the programs compute every (row, column, slice) of the core once: same area, and
    // blocks are distinct by the check above.
    let columns: u64 = form
        .blocks
        .iter()
        .filter(|b| b.core == core)
        .map(|b| u64::from(b.cols))
        .sum();
    same(area, columns * u64::from(rows), "outputs of a chain")
}

fn words(stream: &[u8]) -> impl Iterator<Item = Word> + '_ {
    stream
        .chunks_exact(8)
        .map(|b| Word(u64::from_le_bytes(b.try_into().expect("8 bytes"))))
}

fn streams(plan: &NpuPlan, caps: &Caps, stream: &[u8], next: &[Option<u32>]) -> Proof {
    for (index, bytes) in stream.chunks_exact(regcmd::BYTES).enumerate() {
        let program: Vec<Word> = words(bytes).collect();
        let refuse = |finding: String| PackError::Program {
            program: index as u32,
            finding,
        };
        if let Some(finding) = lint::program(&program, caps, next[index].is_some()).first() {
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
            value(regcmd::reg::WDMA_SIZE_0) + 1,
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
fn relocations(plan: &NpuPlan, stream: &[u8], relocs: &[Reloc], next: &[Option<u32>]) -> Proof {
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

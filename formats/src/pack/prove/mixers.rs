//! Recurrent ops with their states, and routed experts.

use super::shapes::{MAX_DIM, stacked, table, tensor, vector, width};
use super::{Proof, bad, ensure, same};
use crate::model::{Manifest, Op, State};
use crate::pack::PackError;

/// Bytes of state per byte of host weights. Projections write every element that a state mixes, so an
/// honest model has more weights than state.
const STATE_PER_WEIGHT: u64 = 8;

/// Proves the shapes of the states, and that the weights justify what a session allocates for them.
pub(super) fn states(states: &[State], host: u64) -> Proof {
    let mut bytes = 0u64;
    for State { heads, rows, width } in states {
        let dims = [*heads, *rows, *width];
        ensure(dims.iter().all(|d| (1..=MAX_DIM).contains(d)), || {
            format!("state of {heads} x {rows} x {width}")
        })?;
        let one = dims.iter().fold(4, |bytes, d| bytes * u64::from(*d));
        bytes = bytes.saturating_add(one);
    }
    ensure(bytes <= host.saturating_mul(STATE_PER_WEIGHT), || {
        format!("states of {bytes} bytes, {host} bytes of host weights")
    })
}

fn state(manifest: &Manifest, id: u32) -> Result<State, PackError> {
    let states = &manifest.model.states;
    states
        .get(id as usize)
        .copied()
        .ok_or_else(|| bad(format!("state {id} of {}", states.len())))
}

pub(super) fn conv(manifest: &Manifest, op: &Op) -> Proof {
    let Op::Conv {
        x,
        weight,
        out,
        state: id,
    } = *op
    else {
        return Ok(());
    };
    let s = state(manifest, id)?;
    same(s.heads.into(), 1, "heads of a convolution")?;
    same(width(manifest, x)?.into(), s.width.into(), "channels")?;
    same(width(manifest, out)?.into(), s.width.into(), "channels out")?;
    ensure(x != out, || format!("convolution in place on slot {x}"))?;
    table(manifest, weight, s.width, s.rows + 1)
}

pub(super) fn delta(manifest: &Manifest, op: &Op) -> Proof {
    let Op::Delta {
        qkv,
        a,
        b,
        a_log,
        dt_bias,
        out,
        key_heads,
        scale,
        eps,
        state: id,
    } = *op
    else {
        return Ok(());
    };
    let w = |slot| width(manifest, slot).map(u64::from);
    let s = state(manifest, id)?;
    ensure(key_heads != 0 && s.heads.is_multiple_of(key_heads), || {
        format!("{} value heads over {key_heads} key heads", s.heads)
    })?;
    let values = u64::from(s.heads) * u64::from(s.rows);
    let keys = u64::from(key_heads) * u64::from(s.width);
    same(w(qkv)?, 2 * keys + values, "width of q, k and v")?;
    same(w(out)?, values, "width of the delta rule")?;
    same(w(a)?, s.heads.into(), "width of a")?;
    same(w(b)?, s.heads.into(), "width of b")?;
    ensure(![qkv, a, b].contains(&out), || {
        format!("delta rule over slots {qkv}, {a}, {b} into {out}")
    })?;
    ensure(scale.is_finite() && eps.is_finite() && 0.0 <= eps, || {
        format!("delta rule with scale {scale}, eps {eps}")
    })?;
    vector(manifest, a_log, s.heads)?;
    vector(manifest, dt_bias, s.heads)
}

pub(super) fn moe(manifest: &Manifest, op: &Op) -> Proof {
    let Op::Moe {
        x,
        router,
        gate,
        up,
        down,
        out,
        top,
        ..
    } = *op
    else {
        return Ok(());
    };
    let (hidden, experts) = (width(manifest, x)?, width(manifest, router)?);
    same(width(manifest, out)?.into(), hidden.into(), "experts out")?;
    ensure(![x, router].contains(&out), || {
        format!("experts over slots {x}, {router} into {out}")
    })?;
    ensure((1..=experts).contains(&top), || {
        format!("{top} of {experts} experts")
    })?;
    let inner = tensor(manifest, gate)?.n;
    stacked(manifest, gate, experts, (inner, hidden))?;
    stacked(manifest, up, experts, (inner, hidden))?;
    stacked(manifest, down, experts, (hidden, inner))?;
    // Gate and up read the same quantised rows.
    let batched = |id| tensor(manifest, id).map(|t| t.batch.is_some());
    let all = batched(gate)?;
    ensure(batched(up)? == all && batched(down)? == all, || {
        "experts with and without an int8 form".into()
    })
}

//! int4 host form: groups of 32 along K, signed f16 scale, searched for the least squared error.

use super::nearest;
use half::f16;
use ork_formats::quant::int4::GROUP;

/// Candidates put the extreme element on code -8 * (1 + t / 80), t in -SPREAD..=SPREAD.
const SPREAD: i32 = 9;

/// Codes and scale bits of one row. `codes` has the row's length, `scales` one per group.
pub fn row(values: &[f32], codes: &mut [i8], scales: &mut [u16]) {
    let groups = values.chunks(GROUP).zip(codes.chunks_mut(GROUP));
    for ((values, codes), bits) in groups.zip(scales) {
        let mut group = [0f32; GROUP];
        group[..values.len()].copy_from_slice(values);
        let scale = search(&group);
        *bits = scale.to_bits();
        let chosen = encode(&group, scale.to_f32());
        for (code, c) in codes.iter_mut().zip(chosen) {
            *code = c as i8;
        }
    }
}

/// The f16 scale with the least error, each candidate judged after its rounding to f16. The first
/// of equal candidates wins, so the result does not depend on anything but the values.
fn search(group: &[f32; GROUP]) -> f16 {
    let extreme = group
        .iter()
        .fold(0f32, |m, v| if m.abs() < v.abs() { *v } else { m });
    let mut best = f16::from_f32(extreme / -8.0);
    if !best.is_finite() {
        best = if extreme < 0.0 { f16::MAX } else { f16::MIN };
    }
    if extreme == 0.0 {
        return f16::ZERO;
    }
    let mut least = error(group, best.to_f32());
    let mut consider = |candidate: f16| {
        if candidate.is_finite() {
            let e = error(group, candidate.to_f32());
            if e < least {
                (least, best) = (e, candidate);
            }
        }
    };
    for t in -SPREAD..=SPREAD {
        consider(f16::from_f32(extreme / -(8.0 + 0.1 * t as f32)));
    }
    // With the codes fixed the best scale has a closed form.
    let refined = refit(group, best.to_f32());
    if let Some(scale) = refined {
        let e = error(group, scale.to_f32());
        if scale.is_finite() && e < least {
            best = scale;
        }
    }
    best
}

/// Codes -8..=7 of `group` at `scale`, as floats.
#[inline]
fn encode(group: &[f32; GROUP], scale: f32) -> [f32; GROUP] {
    let inverse = inverse(scale);
    group.map(|v| nearest((v * inverse).clamp(-8.0, 7.0)))
}

/// 1 / scale, and 0 where the scale (or its inverse) is not usable.
#[inline]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Squared error of `group` at `scale`, each element weighted by its own square: large weights
/// move outputs most.
#[inline]
fn error(group: &[f32; GROUP], scale: f32) -> f32 {
    let codes = encode(group, scale);
    // Eight lanes, so the sum has one order on every target and still vectorises.
    let mut lanes = [0f32; 8];
    for (values, codes) in group.chunks_exact(8).zip(codes.chunks_exact(8)) {
        for i in 0..8 {
            let d = (values[i] - codes[i] * scale) * values[i];
            lanes[i] += d * d;
        }
    }
    lanes.iter().sum()
}

/// Weighted least-squares scale for the codes that `scale` yields.
fn refit(group: &[f32; GROUP], scale: f32) -> Option<f16> {
    let codes = encode(group, scale);
    let (mut xq, mut qq) = (0f32, 0f32);
    for (x, q) in group.iter().zip(codes) {
        let w = x * x;
        xq += w * x * q;
        qq += w * q * q;
    }
    (qq != 0.0).then(|| f16::from_f32(xq / qq))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(seed: u32) -> [f32; GROUP] {
        let mut state = seed;
        std::array::from_fn(|_| {
            let mut sum = 0.0;
            for _ in 0..4 {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                sum += (state >> 8) as f32 / (1 << 24) as f32 - 0.5;
            }
            sum * 0.05
        })
    }

    fn decoded_error(group: &[f32; GROUP], scale: f32, codes: &[i8]) -> f32 {
        group
            .iter()
            .zip(codes)
            .map(|(x, c)| ((x - f32::from(*c) * scale) * x).powi(2))
            .sum()
    }

    #[test]
    fn the_search_beats_absmax() {
        let (mut searched, mut plain) = (0.0, 0.0);
        for seed in 0..200 {
            let group = noise(seed);
            let (mut codes, mut bits) = ([0i8; GROUP], [0u16]);
            row(&group, &mut codes, &mut bits);
            let have = decoded_error(&group, f16::from_bits(bits[0]).to_f32(), &codes);
            let absmax = f16::from_f32(super::super::absmax(&group) / 7.0).to_f32();
            let base = encode(&group, absmax).map(|c| c as i8);
            searched += have;
            plain += decoded_error(&group, absmax, &base);
        }
        assert!(searched < 0.8 * plain, "{searched} against {plain}");
    }

    #[test]
    fn exact_grids_are_kept_exactly() {
        let values: Vec<f32> = (0..40).map(|i| ((i % 16) as f32 - 8.0) * 0.125).collect();
        let (mut codes, mut bits) = (vec![0i8; 40], [0u16; 2]);
        row(&values, &mut codes, &mut bits);
        for (i, v) in values.iter().enumerate() {
            assert_eq!(
                f32::from(codes[i]) * f16::from_bits(bits[i / GROUP]).to_f32(),
                *v
            );
        }
    }

    #[test]
    fn extremes_do_not_break_it() {
        for value in [0.0, 1e-30, -1e-30, 3e38, -3e38, 1e6] {
            let (mut codes, mut bits) = ([0i8; GROUP], [0u16]);
            row(&[value; GROUP], &mut codes, &mut bits);
            assert!(f16::from_bits(bits[0]).is_finite(), "{value}");
            assert!(codes.iter().all(|c| (-8..=7).contains(c)));
        }
    }
}

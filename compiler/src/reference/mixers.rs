//! Convolution, delta rule and experts, straight from their equations.

use ndarray::{Array2, ArrayView2};
use ork_formats::model::{Activation, State};

pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

pub(super) fn activate(act: Activation, x: f32) -> f32 {
    match act {
        Activation::Silu => x * sigmoid(x),
        Activation::GeluTanh => {
            let u = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
            x / 2.0 * (1.0 + u.tanh())
        }
        Activation::Sigmoid => sigmoid(x),
    }
}

/// Depthwise causal convolution of a whole sequence `[t, channels]` with `[channels, taps]`, then silu.
pub(super) fn conv(x: &Array2<f32>, weight: ArrayView2<'_, f32>) -> Array2<f32> {
    let taps = weight.ncols();
    Array2::from_shape_fn(x.raw_dim(), |(t, c)| {
        let sum: f32 = (0..taps)
            .filter(|j| taps <= t + j + 1)
            .map(|j| weight[[c, j]] * x[[t + j + 1 - taps, c]])
            .sum();
        sum * sigmoid(sum)
    })
}

/// What a delta rule reads besides q, k and v.
pub(super) struct Delta<'a> {
    pub(super) a: &'a Array2<f32>,
    pub(super) b: &'a Array2<f32>,
    pub(super) a_log: &'a [f32],
    pub(super) dt_bias: &'a [f32],
    pub(super) key_heads: usize,
    pub(super) scale: f32,
    pub(super) eps: f32,
}

/// The gated delta rule over a whole sequence of q|k|v rows, one token after the other.
pub(super) fn delta(qkv: &Array2<f32>, shape: State, d: &Delta<'_>) -> Array2<f32> {
    let (heads, dv, dk) = (
        shape.heads as usize,
        shape.rows as usize,
        shape.width as usize,
    );
    let mut out = Array2::zeros((qkv.nrows(), heads * dv));
    for head in 0..heads {
        let key_head = head / (heads / d.key_heads);
        let mut s = Array2::<f32>::zeros((dv, dk));
        for t in 0..qkv.nrows() {
            let lanes = |from: usize, n: usize| -> Vec<f32> {
                (from..from + n).map(|i| qkv[[t, i]]).collect()
            };
            let unit = |x: Vec<f32>| -> Vec<f32> {
                let length = (x.iter().map(|v| v * v).sum::<f32>() + d.eps).sqrt();
                x.iter().map(|v| v / length).collect()
            };
            let q = unit(lanes(key_head * dk, dk));
            let k = unit(lanes((d.key_heads + key_head) * dk, dk));
            let v = lanes(2 * d.key_heads * dk + head * dv, dv);
            let x = d.a[[t, head]] + d.dt_bias[head];
            // ln(1 + e^x), without overflow.
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            s *= (-d.a_log[head].exp() * softplus).exp();
            let beta = sigmoid(d.b[[t, head]]);
            for i in 0..dv {
                let read: f32 = (0..dk).map(|j| s[[i, j]] * k[j]).sum();
                let step = beta * (v[i] - read);
                for j in 0..dk {
                    s[[i, j]] += step * k[j];
                }
                let mixed: f32 = (0..dk).map(|j| s[[i, j]] * q[j] * d.scale).sum();
                out[[t, head * dv + i]] = mixed;
            }
        }
    }
    out
}

/// Which experts a row takes, and how.
pub(super) struct Routing {
    pub(super) top: usize,
    pub(super) renormalise: bool,
    pub(super) act: Activation,
}

/// `gate`, `up`: `[experts * inner, width]`, `down`: `[experts * width, inner]`.
pub(super) fn experts(
    x: &Array2<f32>,
    router: &Array2<f32>,
    [gate, up, down]: [ArrayView2<'_, f32>; 3],
    routing: &Routing,
) -> Array2<f32> {
    let (count, width) = (router.ncols(), x.ncols());
    let inner = gate.nrows() / count;
    let mut out = Array2::zeros(x.raw_dim());
    for (t, row) in x.rows().into_iter().enumerate() {
        let largest = router.row(t).iter().copied().fold(f32::MIN, f32::max);
        let exps: Vec<f32> = router.row(t).iter().map(|l| (l - largest).exp()).collect();
        let sum: f32 = exps.iter().sum();
        let p: Vec<f32> = exps.iter().map(|e| e / sum).collect();
        let mut order: Vec<usize> = (0..count).collect();
        // A stable sort keeps the lower index first.
        order.sort_by(|a, b| p[*b].total_cmp(&p[*a]));
        let chosen = &order[..routing.top];
        let total: f32 = match routing.renormalise {
            true => chosen.iter().map(|e| p[*e]).sum(),
            false => 1.0,
        };
        for e in chosen {
            let rows = |m: ArrayView2<'_, f32>, n: usize, x: &[f32]| -> Vec<f32> {
                (e * n..(e + 1) * n)
                    .map(|i| m.row(i).iter().zip(x).map(|(w, x)| w * x).sum())
                    .collect()
            };
            let input = row.to_vec();
            let hidden: Vec<f32> = rows(gate, inner, &input)
                .into_iter()
                .zip(rows(up, inner, &input))
                .map(|(g, u)| activate(routing.act, g) * u)
                .collect();
            for (i, y) in rows(down, width, &hidden).into_iter().enumerate() {
                out[[t, i]] += p[*e] / total * y;
            }
        }
    }
    out
}

//! Causal depthwise convolution over the sequence, with silu.

use ork_kernels::conv_silu;
use rayon::prelude::*;

/// `x`, `out`: `[rows, channels]`; `weight` `[channels, taps]`. `state` `[taps - 1, channels]` holds the
/// rows before `x` and takes the last ones of it.
pub(crate) fn conv(state: &mut [f32], weight: &[f32], channels: usize, x: &[f32], out: &mut [f32]) {
    let taps = weight.len() / channels;
    // Tap by tap, so that the channels are the inner loop.
    let mut turned = vec![0.0; weight.len()];
    for (c, line) in weight.chunks_exact(taps).enumerate() {
        for (j, w) in line.iter().enumerate() {
            turned[j * channels + c] = *w;
        }
    }
    let rows = [&*state, x].concat();
    out.par_chunks_exact_mut(channels)
        .enumerate()
        .for_each(|(t, out)| {
            conv_silu(&rows[t * channels..][..taps * channels], &turned, out);
        });
    state.copy_from_slice(&rows[rows.len() - state.len()..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_split_of_the_sequence_gives_the_same_bits() {
        let (channels, taps, rows) = (6, 4, 11);
        let noise = |i: usize| ((i * 7919 % 997) as f32) / 500.0 - 1.0;
        let weight: Vec<f32> = (0..channels * taps).map(|i| noise(i + 9)).collect();
        let x: Vec<f32> = (0..rows * channels).map(noise).collect();
        let run = |split: usize| {
            let mut state = vec![0.0; (taps - 1) * channels];
            let mut out = vec![0.0; x.len()];
            let at = split * channels;
            conv(&mut state, &weight, channels, &x[..at], &mut out[..at]);
            conv(&mut state, &weight, channels, &x[at..], &mut out[at..]);
            (out, state)
        };
        let whole = run(rows);
        for split in 0..rows {
            assert_eq!(run(split), whole, "split at {split}");
        }
        // The current row has the last tap; what is before the sequence is zero.
        let first = weight[taps - 1] * x[0];
        let want = first / (1.0 + (-first).exp());
        assert!((whole.0[0] - want).abs() < 1e-6);
        assert_eq!(whole.1, x[x.len() - 3 * channels..]);
    }
}

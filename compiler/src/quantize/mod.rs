//! Turns source tensors into the forms of a pack, a band of rows at a time.

pub mod int4;
pub mod int8;
pub mod w8a8;

/// Largest code of symmetric int8.
pub const CODE_MAX: f32 = 127.0;

/// Largest magnitude of `row`; 0 when empty.
#[must_use]
pub fn absmax(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |most, v| most.max(v.abs()))
}

/// Symmetric int8 codes of `row`, ties to even; returns the scale. An all-zero row has scale 0.
pub fn symmetric(row: &[f32], codes: &mut [i8]) -> f32 {
    let scale = absmax(row) / CODE_MAX;
    if scale == 0.0 {
        codes.fill(0);
        return 0.0;
    }
    for (code, v) in codes.iter_mut().zip(row) {
        *code = nearest((v / scale).clamp(-CODE_MAX, CODE_MAX)) as i8;
    }
    scale
}

/// Rounds half to even by way of the mantissa: exact for magnitudes below 2^22, and unlike a call
/// of `rintf` it vectorises on every target.
#[inline]
#[must_use]
pub fn nearest(x: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0; // 1.5 * 2^23
    (x + SHIFT) - SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;
    use ork_formats::quant::round_half_even;

    #[test]
    fn nearest_is_round_half_even() {
        for i in -2000..2000 {
            let x = i as f32 / 8.0;
            assert_eq!(nearest(x), round_half_even(x), "{x}");
        }
    }

    #[test]
    fn symmetric_rounds_half_to_even_and_clamps() {
        let mut codes = [0; 6];
        let scale = symmetric(&[127.0, -127.0, 0.5, 1.5, 2.5, -0.5], &mut codes);
        assert_eq!((scale, codes), (1.0, [127, -127, 0, 2, 2, 0]));
    }

    #[test]
    fn a_zero_row_has_scale_zero() {
        let mut codes = [9; 3];
        assert_eq!(symmetric(&[0.0, -0.0, 0.0], &mut codes), 0.0);
        assert_eq!(codes, [0; 3]);
    }
}

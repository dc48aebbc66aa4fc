//! int8 host form: one scale per row, for embeddings and heads.

use super::symmetric;

/// Codes of one row into `codes` (same length); returns its scale.
pub fn row(values: &[f32], codes: &mut [u8]) -> f32 {
    let mut signed = vec![0i8; values.len()];
    let scale = symmetric(values, &mut signed);
    for (byte, code) in codes.iter_mut().zip(&signed) {
        *byte = *code as u8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_twos_complement() {
        let mut codes = [0; 3];
        assert_eq!(row(&[254.0, -254.0, 2.0], &mut codes), 2.0);
        assert_eq!(codes, [127, 129, 1]);
    }
}

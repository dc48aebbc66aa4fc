//! Native layouts as index maps. The bytes are defined here; fast versions are tested equal.

/// Byte of weight (n, k) in the int8 tile layout; `kt` = K / 32 (ork-driver, mtx512: both agree).
#[must_use]
pub fn weight_index(n: usize, k: usize, kt: usize) -> usize {
    ((n / 32) * kt + k / 32) * 1024 + (n % 32) * 32 + k % 32
}

/// Byte of feature (m, k) in the int8 cube layout of `rows` rows.
#[must_use]
pub fn feature_cube(m: usize, k: usize, rows: usize) -> usize {
    (k / 16) * rows * 16 + m * 16 + k % 16
}

/// Element of output (m, n) in the int32 cube layout of `rows` rows.
#[must_use]
pub fn output_cube(m: usize, n: usize, rows: usize) -> usize {
    (n / 4) * rows * 4 + m * 4 + n % 4
}

/// Tiles `src` `[n][k]` into `out`; n and k are multiples of 32, both slices hold n * k codes.
///
/// # Panics
/// When they do not.
pub fn pack_weights(src: &[i8], n: usize, k: usize, out: &mut [u8]) {
    assert!(
        n.is_multiple_of(32) && k.is_multiple_of(32),
        "{n} x {k} is not whole tiles"
    );
    assert_eq!(src.len(), n * k);
    assert_eq!(out.len(), n * k);
    for (tile, bytes) in out.chunks_exact_mut(1024).enumerate() {
        let (n0, k0) = (tile / (k / 32) * 32, tile % (k / 32) * 32);
        for (row, line) in bytes.chunks_exact_mut(32).enumerate() {
            let source = &src[(n0 + row) * k + k0..][..32];
            for (byte, code) in line.iter_mut().zip(source) {
                *byte = *code as u8;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_follows_the_index_map() {
        let (n, k) = (64, 96);
        let src: Vec<i8> = (0..n * k).map(|i| (i * 7 % 255) as i8).collect();
        let mut out = vec![0; n * k];
        pack_weights(&src, n, k, &mut out);
        for row in 0..n {
            for col in 0..k {
                let byte = out[weight_index(row, col, k / 32)];
                assert_eq!(byte as i8, src[row * k + col]);
            }
        }
    }
    /// Every place of a cube is used exactly once.
    #[test]
    fn cubes_are_bijections() {
        let (m, k, n) = (5, 64, 32);
        let places = |columns: usize, index: fn(usize, usize, usize) -> usize| {
            let mut seen: Vec<usize> = (0..m)
                .flat_map(|row| (0..columns).map(move |column| index(row, column, m)))
                .collect();
            seen.sort_unstable();
            seen
        };
        assert_eq!(places(k, feature_cube), Vec::from_iter(0..m * k));
        assert_eq!(places(n, output_cube), Vec::from_iter(0..m * n));
        // A row tile of a cube starts 16 bytes per row in.
        assert_eq!(feature_cube(3, 0, m), 48);
        assert_eq!((feature_cube(0, 16, m), output_cube(0, 4, m)), (80, 20));
    }
}

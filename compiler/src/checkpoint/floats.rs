//! Small floats: every byte of E4M3, E5M2 and E8M0, every code of E2M1, and lists of them at any alignment.

use half::{bf16, f16};
use ork_formats::model::FloatType;
use safetensors::tensor::Dtype;

/// E2M1, the four-bit float of mxfp4 and nvfp4.
pub(super) const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// E4M3 "fn": no infinity, largest 448, two NaNs.
pub(super) static E4M3: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte & 0x7f {
            0x7f => f32::NAN,
            code => small(byte, code >> 3, code & 7, 7, 3),
        };
        byte += 1;
    }
    table
};

/// E5M2, the upper byte of a binary16: with infinities and NaNs.
pub(super) static E5M2: [f32; 256] = {
    let mut table = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte & 0x7f {
            0x7c if byte < 0x80 => f32::INFINITY,
            0x7c => f32::NEG_INFINITY,
            0x7d..=0x7f => f32::NAN,
            code => small(byte, code >> 2, code & 3, 15, 2),
        };
        byte += 1;
    }
    table
};

/// A finite value from its fields; `byte` gives the sign.
const fn small(byte: usize, exponent: usize, mantissa: usize, bias: i32, bits: i32) -> f32 {
    let (whole, power) = match exponent {
        0 => (mantissa, 1 - bias - bits),
        _ => (mantissa + (1 << bits), exponent as i32 - bias - bits),
    };
    // Both factors are exact, and so is every product in reach.
    let value = whole as f32 * f32::from_bits(((power + 127) as u32) << 23);
    if byte < 0x80 { value } else { -value }
}

/// E8M0: a power of two. 0 is 2^-127, a denormal of f32; 255 is NaN.
pub(super) fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// Element type of a [`Floats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Plain(FloatType),
    E4m3,
    E5m2,
    E8m0,
}

impl Kind {
    /// What safetensors says a tensor holds; `None` for integers, which say nothing.
    pub(super) fn of(dtype: Dtype) -> Option<Self> {
        Some(match dtype {
            Dtype::F32 => Self::Plain(FloatType::F32),
            Dtype::F16 => Self::Plain(FloatType::F16),
            Dtype::BF16 => Self::Plain(FloatType::Bf16),
            Dtype::F8_E4M3 => Self::E4m3,
            Dtype::F8_E5M2 => Self::E5m2,
            Dtype::F8_E8M0 => Self::E8m0,
            _ => return None,
        })
    }

    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Plain(ty) => ty.bytes() as usize,
            _ => 1,
        }
    }
}

/// Floats of any type, as the file has them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Floats<'a> {
    pub(super) kind: Kind,
    pub(super) bytes: &'a [u8],
}

impl Floats<'_> {
    pub(super) fn len(&self) -> usize {
        self.bytes.len() / self.kind.bytes()
    }

    pub(super) fn at(&self, i: usize) -> f32 {
        let b = &self.bytes[i * self.kind.bytes()..];
        match self.kind {
            Kind::Plain(FloatType::F32) => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Kind::Plain(FloatType::F16) => f16::from_le_bytes([b[0], b[1]]).to_f32(),
            Kind::Plain(FloatType::Bf16) => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Kind::E4m3 => E4M3[usize::from(b[0])],
            Kind::E5m2 => E5M2[usize::from(b[0])],
            Kind::E8m0 => e8m0(b[0]),
        }
    }
}

/// Widens little-endian bytes of any alignment, as many as `out` holds.
pub(super) fn widen_into(ty: FloatType, bytes: &[u8], out: &mut [f32]) {
    match ty {
        FloatType::F32 => {
            for (v, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        FloatType::F16 => {
            for (v, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *v = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        FloatType::Bf16 => {
            for (v, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *v = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e5m2_is_the_upper_byte_of_binary16() {
        for byte in 0..=255u8 {
            let want = f16::from_bits(u16::from(byte) << 8).to_f32();
            let got = E5M2[usize::from(byte)];
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{byte}: {got} {want}"
            );
        }
    }

    #[test]
    fn e8m0_is_a_power_of_two() {
        for byte in 0..255u8 {
            assert_eq!(
                f64::from(e8m0(byte)),
                f64::from(byte).exp2() / 127f64.exp2()
            );
        }
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn floats_widen_from_every_type() {
        let values = [1.0f32, -2.5, 0.25, 8.0];
        let f32s: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let half = |v: &f32| f16::from_f32(*v).to_le_bytes();
        let brain = |v: &f32| bf16::from_f32(*v).to_le_bytes();
        let f16s: Vec<u8> = values.iter().flat_map(half).collect();
        let bf16s: Vec<u8> = values.iter().flat_map(brain).collect();
        for (ty, bytes) in [
            (FloatType::F32, &f32s),
            (FloatType::F16, &f16s),
            (FloatType::Bf16, &bf16s),
        ] {
            let mut out = [0.0; 4];
            widen_into(ty, bytes, &mut out);
            assert_eq!(out, values);
            let kind = Kind::Plain(ty);
            let floats = Floats { kind, bytes };
            assert_eq!((floats.len(), floats.at(1)), (4, -2.5));
        }
    }
}

//! Executes one matmul from its registers.

use crate::decode::Registers;
use crate::{Fault, Memory};
use ork_caps::Caps;
use ork_formats::regcmd::{Reg, field, reg};

/// Bytes of one feature atom.
const ATOM: i64 = 16;
/// int32 values of one output atom.
const OUT_ATOM: usize = 4;

/// Sizes and addresses of a program, read from its registers and checked against each other.
struct Shape {
    width: u32,
    height: u32,
    k: usize,
    n: usize,
}

/// Runs the program; returns its multiply-accumulates.
pub(crate) fn matmul(
    mem: &mut Memory<'_>,
    registers: &Registers,
    caps: &Caps,
    threads: usize,
) -> Result<u64, Fault> {
    let shape = check(registers, caps)?;
    let (m, k, n) = ((shape.width * shape.height) as usize, shape.k, shape.n);
    let features = gather(mem, registers, &shape)?;
    let weights = mem.read(address(registers, reg::DCOMP_ADDR0)?, (n * k) as u64)?;
    let result = multiply(&features, weights, (m, k, n), threads.max(1));
    scatter(mem, registers, &shape, &result)?;
    Ok((m * k * n) as u64)
}

fn address(registers: &Registers, register: Reg) -> Result<u32, Fault> {
    match registers.get(register) {
        0 => Err(Fault::ZeroAddress(register.name)),
        at if at % 16 != 0 => Err(Fault::Unaligned { address: at }),
        at => Ok(at),
    }
}

fn check(registers: &Registers, caps: &Caps) -> Result<Shape, Fault> {
    let v = |register| registers.get(register);
    let size = v(reg::DATA_SIZE0);
    let (width, height) = (field::WIDTH.get(size), field::HEIGHT.get(size));
    let k = field::CHANNEL.get(v(reg::DATA_SIZE1));
    let n = field::KERNELS.get(v(reg::WEIGHT_SIZE2));
    let cube = v(reg::WDMA_SIZE_1);
    let modes = [
        (reg::CONV_CON1, v(reg::CONV_CON1) & 0x3ff, 0),
        (
            reg::CORE_MISC_CFG,
            field::CORE_PROC_PRECISION.get(v(reg::CORE_MISC_CFG)),
            0,
        ),
        // int8 in, int8 process, int32 out.
        (
            reg::DATA_FORMAT,
            v(reg::DATA_FORMAT),
            field::OUT_PRECISION.set(4),
        ),
        // Convolution of 1 x 1 kernels.
        (reg::WEIGHT_SIZE2, v(reg::WEIGHT_SIZE2) >> 16, 0x101),
        // Every post-processing stage bypassed, int32 write geometry (od_bypass may be either).
        (reg::BS_CFG, v(reg::BS_CFG), 0x53),
        (reg::BN_CFG, v(reg::BN_CFG), 0x53),
        (reg::EW_CFG, v(reg::EW_CFG), 0x383),
        (reg::BS_OW_CFG, v(reg::BS_OW_CFG) & !2, 0x7fc),
        // A nonzero FC bank corrupts; reuse bits need a previous program's state.
        (reg::CBUF_CON0, v(reg::CBUF_CON0) >> 8, 0),
        (reg::OUT_CVT_SCALE, v(reg::OUT_CVT_SCALE), 1),
        (reg::OUT_CVT_SHIFT, v(reg::OUT_CVT_SHIFT), 0),
        (reg::OUT_CVT_OFFSET, v(reg::OUT_CVT_OFFSET), 0),
    ];
    for (register, have, want) in modes {
        if have != want {
            return Err(Fault::Mode(register.name, v(register)));
        }
    }
    let pairs = [
        (
            "WDMA_SIZE_0 + 1",
            v(reg::WDMA_SIZE_0).wrapping_add(1),
            "kernels",
            n,
        ),
        (
            "CORE_DATAOUT_SIZE_1 + 1",
            v(reg::CORE_DATAOUT_SIZE_1).wrapping_add(1),
            "kernels",
            n,
        ),
        ("WDMA height", field::HIGH.get(cube) + 1, "height", height),
        ("WDMA width", field::LOW.get(cube) + 1, "width", width),
        (
            "DATA_CUBE_HEIGHT + 1",
            v(reg::DATA_CUBE_HEIGHT).wrapping_add(1),
            "height",
            height,
        ),
        (
            "DATA_CUBE_WIDTH + 1",
            v(reg::DATA_CUBE_WIDTH).wrapping_add(1),
            "width",
            width,
        ),
        (
            "CORE_DATAOUT_SIZE_0",
            v(reg::CORE_DATAOUT_SIZE_0),
            "WDMA_SIZE_1",
            cube,
        ),
        ("WEIGHT_SIZE1", v(reg::WEIGHT_SIZE1), "channels", k),
        (
            "WEIGHT_SIZE0",
            v(reg::WEIGHT_SIZE0),
            "kernels x channels",
            k.wrapping_mul(n),
        ),
        (
            "DATA_SIZE3",
            v(reg::DATA_SIZE3),
            "width x height",
            width.wrapping_mul(height),
        ),
    ];
    for (name, have, other, want) in pairs {
        if have != want {
            return Err(Fault::Contradiction(name, have, other, want));
        }
    }
    if k == 0 || !k.is_multiple_of(caps.k_hw_granule.value) {
        return Err(Fault::K(k));
    }
    if n == 0 || !n.is_multiple_of(caps.n_granule.value) {
        return Err(Fault::N(n));
    }
    if caps.n_max.value < n {
        return Err(Fault::NMax(n, caps.n_max.value));
    }
    banks(registers, caps, width, height, k)?;
    Ok(Shape {
        width,
        height,
        k: k as usize,
        n: n as usize,
    })
}

fn banks(registers: &Registers, caps: &Caps, width: u32, height: u32, k: u32) -> Result<(), Fault> {
    let cbuf = registers.get(reg::CBUF_CON0);
    let (data, weight) = (field::DATA_BANK.get(cbuf), field::WEIGHT_BANK.get(cbuf));
    let banks = caps.cbuf_banks.value;
    if data + weight != banks || weight == 0 || data == 0 {
        return Err(Fault::BankSplit {
            data,
            weight,
            banks,
        });
    }
    // Each line is rounded up to whole buffer entries before the lines are summed.
    let line = u64::from(width) * u64::from(k);
    let line = line.next_multiple_of(u64::from(caps.cbuf_line_bytes.value));
    let need = (u64::from(height) * line).div_ceil(u64::from(caps.cbuf_bank_bytes.value));
    match need <= u64::from(data) {
        true => Ok(()),
        false => Err(Fault::DataBanks {
            have: data,
            need: need as u32,
        }),
    }
}

/// Features as contiguous i16 rows `[width * height][k]`, fetched atom by atom.
fn gather(mem: &Memory<'_>, registers: &Registers, shape: &Shape) -> Result<Vec<i16>, Fault> {
    let base = i64::from(address(registers, reg::FEATURE_DATA_ADDR)?);
    let line = i64::from(registers.get(reg::DMA_CON1));
    // A signed 28-bit field.
    let raw = field::SURF_STRIDE.get(registers.get(reg::DMA_CON2));
    let surface = i64::from((raw << 4) as i32 >> 4);
    let by_line = field::GROUP_LINE_OFF.get(registers.get(reg::CONV_CON1)) == 1;
    let width = i64::from(shape.width);
    let mut rows = Vec::with_capacity((shape.width * shape.height) as usize * shape.k);
    for y in 0..i64::from(shape.height) {
        for x in 0..width {
            let (start, group) = match by_line {
                true => (y * line + x, surface + width),
                false => ((y / 4) * line + (y % 4) * width + x, surface + 4 * width),
            };
            for g in 0..(shape.k as i64 / ATOM) {
                let at = base + (start + g * group) * ATOM;
                let at = u32::try_from(at).map_err(|_| mem.unmapped(at as u64, ATOM as u64))?;
                let atom = mem.read(at, ATOM as u64)?;
                rows.extend(atom.iter().map(|b| i16::from(*b as i8)));
            }
        }
    }
    Ok(rows)
}

/// `[m][n]` products as 32-column strips: result `[n / 32][m][32]`.
fn multiply(
    features: &[i16],
    weights: &[u8],
    (m, k, n): (usize, usize, usize),
    threads: usize,
) -> Vec<i32> {
    let mut out = vec![0i32; m * n];
    let strips = n / 32;
    let share = strips.div_ceil(threads);
    std::thread::scope(|scope| {
        let jobs = out
            .chunks_mut(share * m * 32)
            .zip(weights.chunks(share * k * 32));
        for (out, weights) in jobs {
            let mut work = move || {
                for (out, strip) in out
                    .chunks_exact_mut(m * 32)
                    .zip(weights.chunks_exact(k * 32))
                {
                    multiply_strip(features, strip, k, out);
                }
            };
            // Spawning costs more than a small program.
            match threads == 1 || m * k * n < 1 << 20 {
                true => work(),
                false => drop(scope.spawn(work)),
            }
        }
    });
    out
}

/// One strip of 32 kernels; byte (n, k) of a tile is at `(k / 32) * 1024 + n * 32 + k % 32`.
fn multiply_strip(features: &[i16], strip: &[u8], k: usize, out: &mut [i32]) {
    let mut kernel = vec![0i16; k];
    for column in 0..32 {
        for (part, tile) in kernel.chunks_exact_mut(32).zip(strip.chunks_exact(1024)) {
            for (wide, byte) in part.iter_mut().zip(&tile[column * 32..][..32]) {
                *wide = i16::from(*byte as i8);
            }
        }
        for (row, out) in features.chunks_exact(k).zip(out.chunks_exact_mut(32)) {
            out[column] = row.iter().zip(&kernel).fold(0, |sum, (a, b)| {
                // Exact (K < 2^16, products within 2^14); plain `+` would carry an overflow check and not vectorise.
                i32::wrapping_add(sum, i32::from(*a).wrapping_mul(i32::from(*b)))
            });
        }
    }
}

/// Writes atoms of four int32: atom (g, y, x) stands `g * surface + y * line + x` atoms from the base,
/// where the surface stride and the notch after each line come from the registers.
fn scatter(
    mem: &mut Memory<'_>,
    registers: &Registers,
    shape: &Shape,
    result: &[i32],
) -> Result<(), Fault> {
    let base = u64::from(address(registers, reg::DST_BASE_ADDR)?);
    let surface = u64::from(registers.get(reg::DST_SURF_STRIDE) & !0xf);
    let notch = u64::from(field::HIGH.get(registers.get(reg::DATA_CUBE_NOTCH)));
    let line = (u64::from(shape.width) + notch) * 16;
    let m = (shape.width * shape.height) as usize;
    for row in 0..m {
        let (y, x) = (
            row as u64 / u64::from(shape.width),
            row as u64 % u64::from(shape.width),
        );
        // Row-major output: the atoms of a row are neighbours, so the row is one write.
        let step = match surface {
            16 => shape.n / OUT_ATOM,
            _ => 1,
        };
        for first in (0..shape.n / OUT_ATOM).step_by(step) {
            let at = base + first as u64 * surface + y * line + x * 16;
            let bytes = (step * 16) as u64;
            let at = u32::try_from(at).map_err(|_| mem.unmapped(at, bytes))?;
            let target = mem.write(at, bytes)?;
            for (i, value) in target.chunks_exact_mut(4).enumerate() {
                let n = first * OUT_ATOM + i;
                let word = result[(n / 32) * m * 32 + row * 32 + n % 32];
                value.copy_from_slice(&word.to_le_bytes());
            }
        }
    }
    Ok(())
}

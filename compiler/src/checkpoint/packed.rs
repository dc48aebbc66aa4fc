//! Formats that pack codes into words or bytes: which one it is, from shapes, types and the model's columns.

use super::affine::Affine;
use super::floats::{Floats, Kind};
use super::mx::{Code, Global, Mx};
use super::quantised::{Parts, Unit};
use super::shards::Stored;
use super::tensor::Form;
use crate::error::Result;
use safetensors::tensor::Dtype;

impl<'a> Unit<'a, '_> {
    /// Codes in U32: affine, mxfp4, mxfp8 or nvfp4, told apart by the scales' type and the group.
    pub(super) fn packed(&self) -> Result<(Form<'a>, Parts<'a>)> {
        let (name, found) = self.beside(".scales");
        let Some(scales) = found else {
            return self.bad(format!(
                "U32 codes without {name}; the download is incomplete, get every shard of one revision"
            ));
        };
        let (bits, group) = self.layout(&name, &scales)?;
        let codes = self.weight.bytes;
        if let Some(kind @ Kind::Plain(_)) = Kind::of(scales.dtype) {
            let (biases_name, biases_stored, biases) = self.scales(".biases")?;
            if biases_stored.shape != scales.shape {
                return self.bad(format!(
                    "{biases_name} is {:?}, {name} is {:?}; download both from one revision",
                    biases_stored.shape, scales.shape
                ));
            }
            let floats = |bytes| Floats { kind, bytes };
            let scales = floats(scales.bytes);
            return match bits {
                1..=6 | 8 => Ok((
                    Form::Affine(Affine {
                        codes,
                        scales,
                        biases,
                        bits,
                        group,
                    }),
                    vec![(name, scales), (biases_name, biases)],
                )),
                _ => self.bad(format!(
                    "codes of {bits} bits are not supported; quantise again with 1 to 6 or 8"
                )),
            };
        }
        let (code, kind) = match (bits, group, scales.dtype) {
            (4, 16, Dtype::U8 | Dtype::F8_E4M3) => (Code::E2m1, Kind::E4m3),
            (4, 32, Dtype::U8 | Dtype::F8_E8M0) => (Code::E2m1, Kind::E8m0),
            (8, 32, Dtype::U8 | Dtype::F8_E8M0) => (Code::E4m3, Kind::E8m0),
            (_, _, dtype) => {
                return self.bad(format!(
                    "{bits} bits in groups of {group} with {dtype:?} scales are no known format; known are mxfp4 (4 bits, 32), mxfp8 (8, 32) and nvfp4 (4, 16)"
                ));
            }
        };
        let bytes = scales.bytes;
        let scales = Floats { kind, bytes };
        let mut parts = vec![(name, scales)];
        let global = match self.beside(".global_scale").1 {
            Some(_) => Some(self.global(".global_scale", Global::Mlx, &mut parts)?),
            None => None,
        };
        let form = Form::Mx(Mx {
            code,
            codes,
            scales,
            group,
            global,
        });
        Ok((form, parts))
    }

    /// nvfp4 with its codes in bytes, as modelopt and compressed-tensors write it.
    pub(super) fn nvfp4(&self, global: &str, way: Global) -> Result<(Form<'a>, Parts<'a>)> {
        let (name, stored, scales) = self.scales("_scale")?;
        match self.layout(&name, &stored)? {
            (4, 16) if scales.kind == Kind::E4m3 => {}
            (bits, group) => {
                return self.bad(format!(
                    "{bits} bits in groups of {group} with {:?} scales; nvfp4 has 4 bits, groups of 16 and F8_E4M3 scales",
                    stored.dtype
                ));
            }
        }
        let mut parts = vec![(name, scales)];
        let global = Some(self.global(global, way, &mut parts)?);
        let form = Form::Mx(Mx {
            code: Code::E2m1,
            codes: self.weight.bytes,
            scales,
            group: 16,
            global,
        });
        Ok((form, parts))
    }

    /// The scale over whole matrices: one, or one for each expert.
    fn global(
        &self,
        suffix: &str,
        way: Global,
        parts: &mut Parts<'a>,
    ) -> Result<(Global, Floats<'a>, usize)> {
        let (name, _, floats) = self.scales(suffix)?;
        let (experts, n) = self.matrices();
        if ![1, experts].contains(&floats.len()) {
            return self.bad(format!(
                "{name} has {} values for {experts} matrices; download both from one revision",
                floats.len()
            ));
        }
        parts.push((name, floats));
        Ok((way, floats, n))
    }

    /// (bits, group): the shapes fix only their product, the model's columns give the rest.
    fn layout(&self, name: &str, scales: &Stored<'a>) -> Result<(usize, usize)> {
        let (Some((words, lead)), Some((groups, same))) =
            (self.weight.shape.split_last(), scales.shape.split_last())
        else {
            return self.bad(format!(
                "{name} or the weight has no dimensions; download it again"
            ));
        };
        let k = self.k;
        let word = if self.weight.dtype == Dtype::U32 {
            32
        } else {
            8
        };
        let fits = lead == same
            && *groups != 0
            && k.is_multiple_of(*groups)
            && (words * word).is_multiple_of(k)
            && words * word != 0;
        if !fits {
            return self.bad(format!(
                "shape {:?} of {:?} and {name} of {:?} do not hold rows of {k} columns; weights and config.json are of different models",
                self.weight.shape, self.weight.dtype, scales.shape
            ));
        }
        Ok((words * word / k, k / groups))
    }
}

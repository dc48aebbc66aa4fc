//! Which format a quantised tensor has: read from the shapes and types of the tensors of its unit.

use super::Checkpoint;
use super::floats::{Floats, Kind};
use super::fp8::{self, Fp8};
use super::mx::Global;
use super::shards::Stored;
use super::tensor::{Form, Tensor, whole};
use crate::error::{Error, Result};
use safetensors::tensor::Dtype;

/// What stands beside a weight, after its module's path.
const BESIDE_MODULE: [&str; 3] = [".scales", ".biases", ".global_scale"];
/// What stands beside a weight, after its own name.
const BESIDE_WEIGHT: [&str; 4] = ["_scale_inv", "_scale", "_scale_2", "_global_scale"];
/// Scales of activations and caches: those are quantised by our own rules.
const UNUSED: [&str; 7] = [
    ".activation_scale",
    ".input_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    "_activation_scale",
    "_input_scale",
];

/// Path of the module that has this weight.
pub(super) fn module(weight: &str) -> &str {
    weight.strip_suffix(".weight").unwrap_or(weight)
}

/// The weight that `name` belongs to, when it is one of the tensors beside a weight: the whole unit is kept,
/// renamed or dropped together.
pub(crate) fn owner(name: &str, has: impl Fn(&str) -> bool) -> Option<String> {
    let module = BESIDE_MODULE.iter().chain(&UNUSED);
    let of_module = module
        .filter_map(|suffix| name.strip_suffix(suffix))
        .flat_map(|path| [format!("{path}.weight"), path.to_string()]);
    let of_weight = BESIDE_WEIGHT
        .iter()
        .filter_map(|suffix| name.strip_suffix(suffix))
        .map(String::from);
    of_module.chain(of_weight).find(|weight| has(weight))
}

/// The tensors beside one weight, and how to name the trouble with them.
pub(super) struct Unit<'a, 'n> {
    pub(super) name: &'n str,
    pub(super) file: String,
    pub(super) weight: Stored<'a>,
    pub(super) checkpoint: &'a Checkpoint,
    /// Columns that the model needs.
    pub(super) k: usize,
}

impl<'a> Unit<'a, '_> {
    pub(super) fn bad<T>(&self, text: String) -> Result<T> {
        Err(Error::Input(format!(
            "{}: tensor {}: {text}",
            self.file, self.name
        )))
    }

    /// `suffix` begins with `.` beside the module, with `_` beside the weight.
    pub(super) fn beside(&self, suffix: &str) -> (String, Option<Stored<'a>>) {
        let base = match suffix.starts_with('.') {
            true => module(self.name),
            false => self.name,
        };
        let name = format!("{base}{suffix}");
        // An empty one is as good as none, and says so.
        let found = self.checkpoint.stored(&name);
        let found = found.filter(|stored| !stored.shape.contains(&0));
        (name, found)
    }

    /// Reads the unit.
    pub(super) fn tensor(&self) -> Result<Tensor<'a>> {
        // From here on every product of dimensions is bounded by the bytes there are.
        if self.weight.shape.contains(&0) {
            return self.bad(format!(
                "shape {:?} has no values; download it again",
                self.weight.shape
            ));
        }
        let (form, beside) = match self.weight.dtype {
            Dtype::U32 => self.packed()?,
            Dtype::F8_E4M3 => self.fp8(Kind::E4m3)?,
            Dtype::F8_E5M2 => self.fp8(Kind::E5m2)?,
            // MLX saves FP8 as U8, so only the neighbour tells.
            Dtype::U8 if self.beside("_scale_2").1.is_some() => {
                self.nvfp4("_scale_2", Global::Times)?
            }
            Dtype::U8 if self.beside("_global_scale").1.is_some() => {
                self.nvfp4("_global_scale", Global::Over)?
            }
            Dtype::U8 if self.checkpoint.quantisation.e5m2 => self.fp8(Kind::E5m2)?,
            Dtype::U8 => self.fp8(Kind::E4m3)?,
            dtype => match Kind::of(dtype) {
                Some(Kind::Plain(ty)) => (Form::Float(ty, self.weight.bytes), Vec::new()),
                _ => {
                    return self.bad(format!(
                        "{dtype:?} is not supported; supported are F32, F16, BF16, MLX's U32 and FP8 with scales"
                    ));
                }
            },
        };
        self.all_used(&beside)?;
        let mut shape = self.weight.shape.to_vec();
        if let (Form::Affine(_) | Form::Mx(_), Some(last)) = (&form, shape.last_mut()) {
            *last = self.k;
        }
        let count: usize = shape.iter().product();
        let mut parts = vec![(self.name.to_string(), whole(self.weight.bytes))];
        parts.extend(beside);
        Ok(Tensor {
            name: self.name.to_string(),
            file: self.file.clone(),
            rows: count / self.k.max(1),
            columns: self.k,
            shape,
            form,
            parts,
        })
    }

    /// Refuses a scale that the format of the weight has no use for: ignoring it would load a wrong model.
    fn all_used(&self, parts: &Parts<'a>) -> Result<()> {
        for suffix in BESIDE_MODULE.iter().chain(&BESIDE_WEIGHT) {
            let (name, found) = self.beside(suffix);
            if found.is_some() && !parts.iter().any(|(used, _)| *used == name) {
                return self.bad(format!(
                    "{name} stands beside it but a weight of {:?} has no use for it here; download both from one revision, or remove {name}",
                    self.weight.dtype
                ));
            }
        }
        Ok(())
    }

    /// The float tensor `suffix`, which must be there.
    pub(super) fn scales(&self, suffix: &str) -> Result<(String, Stored<'a>, Floats<'a>)> {
        let (name, found) = self.beside(suffix);
        let Some(stored) = found else {
            return self.bad(format!(
                "{:?} without {name}; the download is incomplete, get every shard of one revision",
                self.weight.dtype
            ));
        };
        let kind = match (Kind::of(stored.dtype), stored.dtype) {
            (Some(kind), _) => kind,
            (None, Dtype::U8) if self.checkpoint.quantisation.power_of_two_scales => Kind::E8m0,
            (None, dtype) => {
                return self.bad(format!(
                    "{name} is {dtype:?}; scales are F32, F16, BF16 or F8_E8M0, download it again"
                ));
            }
        };
        let bytes = stored.bytes;
        Ok((name, stored, Floats { kind, bytes }))
    }

    /// (experts, rows of each).
    pub(super) fn matrices(&self) -> (usize, usize) {
        match self.weight.shape {
            [lead @ .., n, _] => (lead.iter().product(), *n),
            _ => (1, 1),
        }
    }

    fn fp8(&self, kind: Kind) -> Result<(Form<'a>, Parts<'a>)> {
        let suffix = match self.beside("_scale").1 {
            Some(_) => "_scale",
            None => "_scale_inv",
        };
        let (name, stored, scales) = self.scales(suffix)?;
        let (experts, n) = self.matrices();
        let shape = self.weight.shape;
        let k = shape.last().copied().unwrap_or(0);
        let declared = self.checkpoint.quantisation.block();
        let Some(grid) = fp8::grid(stored.shape, (experts, n, k), declared) else {
            return self.bad(format!(
                "shape {shape:?}, {name} is {:?}; blocks of {declared:?} need {:?}, correct weight_block_size of config.json or download both from one revision",
                stored.shape,
                [n.div_ceil(declared.0), k.div_ceil(declared.1)]
            ));
        };
        let codes = Floats {
            kind,
            bytes: self.weight.bytes,
        };
        let form = Form::Fp8(Fp8 {
            codes,
            scales,
            n,
            grid,
        });
        Ok((form, vec![(name, scales)]))
    }
}

/// (name, values) of what stands beside a weight.
pub(super) type Parts<'a> = Vec<(String, Floats<'a>)>;

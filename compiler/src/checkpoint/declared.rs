//! What the configuration says about quantisation. Shapes and types decide; this cross-checks them, gives the
//! FP8 block, and refuses schemes whose tensors look like ours and mean something else.

use super::quantised::module;
use super::read_json;
use super::tensor::{Form, Tensor};
use crate::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Block of FP8 checkpoints that do not give one.
const BLOCK: (usize, usize) = (128, 128);
/// How a block of them is worded.
const FP8: &str = "fp8 blocks of ";

/// Read once per checkpoint.
pub(super) struct Quantisation {
    /// Rows and columns that share an FP8 scale, when the config says.
    block: Option<(usize, usize)>,
    /// FP8 bytes in a U8 tensor are E5M2.
    pub(super) e5m2: bool,
    /// Scales in a U8 tensor are E8M0.
    pub(super) power_of_two_scales: bool,
    /// Weights are called `weight_packed`.
    packed_names: bool,
    /// MLX's `quantization` object, or null.
    mlx: Value,
}

impl Quantisation {
    pub(super) fn read(dir: &Path, config: &Value) -> Result<Self> {
        let hf = match &config["quantization_config"] {
            Value::Null => &config["text_config"]["quantization_config"],
            found => found,
        };
        let mlx = match &config["quantization"] {
            // Older files and some tools have only the copy, which unlike Hugging Face's has no method.
            Value::Null if hf["quant_method"].is_null() && hf["bits"].is_u64() => hf.clone(),
            found => found.clone(),
        };
        let scheme = scheme(dir, hf)?;
        Ok(Self {
            block: block(&hf["weight_block_size"])?,
            e5m2: hf["fmt"] == "e5m2",
            power_of_two_scales: hf["scale_fmt"] == "ue8m0",
            packed_names: scheme == Some("nvfp4-pack-quantized"),
            mlx,
        })
    }

    /// Rows and columns that share an FP8 scale.
    pub(super) fn block(&self) -> (usize, usize) {
        self.block.unwrap_or(BLOCK)
    }

    /// Name of a tensor as everything else here calls it.
    pub(super) fn rename(&self, name: &str) -> String {
        match name.strip_suffix(".weight_packed") {
            Some(path) if self.packed_names => format!("{path}.weight"),
            _ => name.to_string(),
        }
    }

    /// A line for each kind of disagreement between tensors and config.
    pub(super) fn conflicts<'a>(
        &self,
        tensors: impl Iterator<Item = &'a Tensor<'a>>,
    ) -> Vec<String> {
        // (said, found) -> (first tensor, how many): a model has hundreds of the same.
        let mut kinds: BTreeMap<(String, String), (&str, usize)> = BTreeMap::new();
        for tensor in tensors {
            let found = describe(&tensor.form);
            if let Some(said) = self.said(module(&tensor.name), found.as_deref())
                && Some(&said) != found.as_ref()
            {
                let found = found.unwrap_or_else(|| "plain floats".into());
                let entry = kinds.entry((said, found)).or_insert((&tensor.name, 0));
                entry.1 += 1;
            }
        }
        kinds
            .into_iter()
            .map(|((said, found), (first, count))| {
                format!(
                    "config.json says {said} of {count} tensors ({first} is the first), their shapes say {found}; the shapes are believed"
                )
            })
            .collect()
    }

    /// What the config says of a module that was `found` so; `None` when it says nothing to compare.
    fn said(&self, path: &str, found: Option<&str>) -> Option<String> {
        if found.is_some_and(|f| f.starts_with(FP8)) {
            return self.block.map(|block| format!("{FP8}{block:?}"));
        }
        match spellings(path)
            .iter()
            .map(|p| &self.mlx[p])
            .find(|v| !v.is_null())
        {
            Some(Value::Bool(false)) => found.map(|_| "not quantised".to_string()),
            // The mode of an override does not come from the global one: absent is affine.
            Some(own @ Value::Object(_)) => line(own),
            // Modules whose columns are no multiple of the group stay floats without a word.
            _ if found.is_none() => None,
            _ => line(&self.mlx),
        }
    }
}

/// `None` where an object says neither bits nor group.
fn line(object: &Value) -> Option<String> {
    let (bits, group) = (object["bits"].as_u64()?, object["group_size"].as_u64()?);
    let mode = object["mode"].as_str().unwrap_or("affine");
    Some(format!("{mode} {bits} bit, group {group}"))
}

/// As [`line`] words it; `None` for what the config has no word for.
fn describe(form: &Form<'_>) -> Option<String> {
    match form {
        Form::Float(..) => None,
        Form::Affine(m) => Some(format!("affine {} bit, group {}", m.bits, m.group)),
        Form::Mx(m) => Some(m.name()),
        Form::Fp8(m) => m.grid.inferred.then(|| format!("{FP8}{:?}", m.grid.block)),
    }
}

/// A module's path, and what files from before a rename call it.
fn spellings(path: &str) -> Vec<String> {
    const PREFIXES: [&str; 3] = ["language_model.model.", "model.language_model.", "model."];
    let mut all = vec![path.to_string()];
    let rest = PREFIXES.iter().find_map(|prefix| path.strip_prefix(prefix));
    match (rest, path.strip_prefix("language_model.")) {
        (Some(rest), _) => all.extend(PREFIXES.iter().map(|prefix| format!("{prefix}{rest}"))),
        (None, Some(rest)) => all.push(rest.to_string()),
        (None, None) => all.push(format!("language_model.{path}")),
    }
    all
}

fn block(value: &Value) -> Result<Option<(usize, usize)>> {
    if value.is_null() {
        return Ok(None);
    }
    let side = |i: usize| value[i].as_u64().filter(|v| (1..=1 << 24).contains(v));
    match (side(0), side(1)) {
        (Some(rows), Some(columns)) => Ok(Some((rows as usize, columns as usize))),
        _ => Err(Error::Input(format!(
            "config.json: weight_block_size is {value}, expected two numbers above 0 such as [128, 128]"
        ))),
    }
}

/// The exact format of schemes whose tensors need it to be read; an error for those that are not.
fn scheme<'a>(dir: &Path, hf: &'a Value) -> Result<Option<&'a str>> {
    let refuse = |what: String, supported: &str| {
        Err(Error::Input(format!(
            "{}: {what} is not supported; supported are {supported}, use another quantisation of this model",
            dir.join("config.json").display()
        )))
    };
    let text = |key: &str| hf[key].as_str().unwrap_or("none");
    match hf["quant_method"].as_str() {
        None | Some("fp8" | "mxfp4" | "mxfp8") => {}
        Some("compressed-tensors") => {
            let format = text("format");
            if !["float-quantized", "nvfp4-pack-quantized"].contains(&format) {
                return refuse(
                    format!("compressed-tensors format \"{format}\""),
                    "float-quantized and nvfp4-pack-quantized",
                );
            }
            return Ok(hf["format"].as_str());
        }
        Some("modelopt") => return algorithm(text("quant_algo"), refuse).map(|()| None),
        Some(other) => {
            return refuse(
                format!("quant_method \"{other}\""),
                "MLX's own, fp8, compressed-tensors and modelopt",
            );
        }
    }
    // Older modelopt files say it in a file of their own.
    let path = dir.join("hf_quant_config.json");
    if path.is_file() {
        let json = read_json(&path)?;
        let algo = json["quantization"]["quant_algo"].as_str();
        algorithm(algo.unwrap_or("none"), refuse)?;
    }
    Ok(None)
}

fn algorithm(
    name: &str,
    refuse: impl Fn(String, &str) -> Result<Option<&'static str>>,
) -> Result<()> {
    match name {
        "FP8" | "NVFP4" => Ok(()),
        _ => refuse(format!("modelopt quant_algo \"{name}\""), "FP8 and NVFP4").map(drop),
    }
}

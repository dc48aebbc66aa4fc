//! Freezes the tokenizer and the prompt rules.

use crate::checkpoint::read_json;
use crate::error::{Error, Result};
use kitoken::{InsertionPosition, Kitoken, Processing};
use ork_formats::model::{Generation, Text};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// The kitoken definition of `tokenizer.json`, and the ids around prompts and at stops.
///
/// # Errors
/// [`Error::Input`] when the tokenizer is missing or cannot be frozen.
pub fn freeze(dir: &Path, config: &Value) -> Result<(Vec<u8>, Text)> {
    let path = dir.join("tokenizer.json");
    let json = read_json(&path)?;
    let empty = match &json["model"]["vocab"] {
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        _ => true,
    };
    if empty {
        return Err(Error::Input(format!(
            "{}: model.vocab is empty; download the tokenizer again",
            path.display()
        )));
    }
    let mut spelled = json.clone();
    spell_out(&mut spelled["pre_tokenizer"]);
    let tokenizer = Kitoken::from_tokenizers_slice(spelled.to_string().as_bytes())
        .map_err(|e| Error::Input(format!("{}: cannot be frozen: {e}", path.display())))?;
    // Prefix and suffix ids are ours to add, exactly once. kitoken keeps them as sequence templates
    // for others to look up; word templates (end-of-word markers) belong to encoding and stay.
    let mut definition = tokenizer.to_definition();
    use InsertionPosition::{WordContinuation, WordEnd, WordStart};
    definition
        .config
        .templates
        .retain(|t| matches!(t.position, WordStart | WordContinuation | WordEnd));
    // `fuse_unk` joins unknown characters inside the model. With byte fallback there are none, and
    // kitoken's rule would also join unknown tokens that a text spells out.
    if json["model"]["byte_fallback"] == true {
        let fuse = |p: &Processing| matches!(p, Processing::Collapse { .. });
        definition.config.processing.retain(|p| !fuse(p));
    }
    let (prefix, suffix) = around(&json["post_processor"])
        .ok_or_else(|| Error::Input(format!("{}: post_processor is malformed", path.display())))?;
    let optional = |name: &str| match dir.join(name) {
        path if path.is_file() => read_json(&path),
        _ => Ok(Value::Null),
    };
    let settings = optional("tokenizer_config.json")?;
    let generation = optional("generation_config.json")?;
    let mut stop = BTreeSet::new();
    let nested = &config["text_config"]["eos_token_id"];
    for value in [&config["eos_token_id"], nested, &generation["eos_token_id"]] {
        stop.extend(ids(value));
    }
    let eos = settings["eos_token"]
        .as_str()
        .or(settings["eos_token"]["content"].as_str());
    if let Some(eos) = eos {
        let added = json["added_tokens"].as_array().into_iter().flatten();
        for token in added.filter(|t| t["content"] == eos) {
            stop.extend(ids(&token["id"]));
        }
        stop.extend(ids(&json["model"]["vocab"][eos]));
    }
    let text = Text {
        prefix,
        suffix,
        stop: stop.into_iter().collect(),
        chat_template: template(dir, &settings)?,
        tokens: tokens(&settings),
        generation: defaults(&generation),
    };
    Ok((definition.to_vec(), text))
}

/// Writes out the split that `ByteLevel` with `use_regex` implies (GPT-2's, as in Hugging Face
/// tokenizers 0.22, `pre_tokenizers/byte_level.rs`). kitoken's own form of it lets any white space, not
/// just a space, join the word behind it.
fn spell_out(pre: &mut Value) {
    const GPT2: &str =
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    match pre["type"].as_str() {
        Some("Sequence") => {
            let steps = pre["pretokenizers"].as_array_mut();
            steps.into_iter().flatten().for_each(spell_out);
        }
        Some("ByteLevel") if pre["use_regex"] != false => {
            pre["use_regex"] = false.into();
            let split = json!({
                "type": "Split",
                "pattern": {"Regex": GPT2},
                "behavior": "Isolated",
                "invert": false,
            });
            *pre = json!({"type": "Sequence", "pretokenizers": [split, pre.take()]});
        }
        _ => {}
    }
}

/// `bos_token` and the like, as strings or as objects with `content`.
fn tokens(settings: &Value) -> Vec<(String, String)> {
    ["bos_token", "eos_token", "pad_token", "unk_token"]
        .into_iter()
        .filter_map(|name| {
            let value = &settings[name];
            let text = value.as_str().or(value["content"].as_str())?;
            Some((name.to_string(), text.to_string()))
        })
        .collect()
}

fn defaults(generation: &Value) -> Generation {
    let number = |key: &str| {
        let value = generation[key].as_f64().map(|v| v as f32);
        value.filter(|v| v.is_finite())
    };
    Generation {
        sample: generation["do_sample"].as_bool(),
        temperature: number("temperature"),
        top_k: generation["top_k"]
            .as_u64()
            .and_then(|k| u32::try_from(k).ok()),
        top_p: number("top_p"),
        min_p: number("min_p"),
        repetition_penalty: number("repetition_penalty"),
    }
}

/// A number or a list of numbers.
fn ids(value: &Value) -> Vec<u32> {
    match value {
        Value::Array(values) => values.iter().flat_map(ids).collect(),
        _ => {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.into_iter().collect()
        }
    }
}

/// (before, after) of a TemplateProcessing step, alone or in a sequence.
fn around(processor: &Value) -> Option<(Vec<u32>, Vec<u32>)> {
    let (mut before, mut after) = (Vec::new(), Vec::new());
    match processor["type"].as_str() {
        Some("Sequence") => {
            for step in processor["processors"].as_array()? {
                let (b, a) = around(step)?;
                before.extend(b);
                after.extend(a);
            }
        }
        Some("TemplateProcessing") => {
            let mut seen = false;
            for piece in processor["single"].as_array()? {
                if piece.get("Sequence").is_some() {
                    seen = true;
                    continue;
                }
                let name = piece["SpecialToken"]["id"].as_str()?;
                let found = ids(&processor["special_tokens"][name]["ids"]);
                match seen {
                    true => after.extend(found),
                    false => before.extend(found),
                }
            }
        }
        _ => {}
    }
    Some((before, after))
}

/// `chat_template.jinja`, else the config's string or its entry named "default".
fn template(dir: &Path, settings: &Value) -> Result<Option<String>> {
    let path = dir.join("chat_template.jinja");
    if path.is_file() {
        return std::fs::read_to_string(&path)
            .map(Some)
            .map_err(|source| Error::Io { path, source });
    }
    let found = match &settings["chat_template"] {
        Value::Array(list) => list
            .iter()
            .find(|t| t["name"] == "default")
            .and_then(|t| t["template"].as_str()),
        other => other.as_str(),
    };
    Ok(found.map(str::to_string))
}

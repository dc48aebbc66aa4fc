//! Checkpoints as the wild has them: each test is a fixture with one thing changed that has gone wrong for
//! somebody, and what must come of it.

mod changed;

use changed::{Tensors, compile_at, copy, fixture, plain, same, tensor};
use ork_compiler::against;
use ork_compiler::checkpoint::hub;
use ork_compiler::place::Scheme;
use ork_formats::model::{FloatType, HostForm};
use ork_formats::pack::Reader;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::path::Path;

const UP: &str = "model.layers.1.mlp.up_proj";

/// Row 3: what no graph reads is left out, the rest is refused.
#[test]
fn extra_tensors() {
    let name = "qwen3-affine4-g64";
    let one = || tensor(Dtype::F32, &[1], vec![0; 4]);
    let done = copy(name)
        .tensors(|t| {
            t.insert("mtp.fc.weight".into(), one());
            let table = "model.layers.0.self_attn.rotary_emb.inv_freq";
            t.insert(table.into(), one());
        })
        .warned(&["1 mtp.* tensors"]);
    same(&done, &plain(name));
    for extra in ["model.layers.0.surprise", "model.layers.0.surprise.scales"] {
        copy(name)
            .tensors(|t| drop(t.insert(extra.into(), one())))
            .refused(&[extra, "unexpected", "remove it"]);
    }
}

/// Rows 4 and 5: the whole head of a tied model goes, with all that stands beside it.
#[test]
fn tied_heads_are_dropped_as_a_unit() {
    let name = "qwen3-affine8-g32";
    for parts in [
        &["weight", "scales", "biases"][..],
        &["weight"],
        &["scales", "biases"],
    ] {
        let done = copy(name)
            .tensors(|t| {
                for part in parts {
                    let found = t[&format!("model.embed_tokens.{part}")].clone();
                    t.insert(format!("lm_head.{part}"), found);
                }
            })
            .warned(&["lm_head.", "left out"]);
        same(&done, &plain(name));
    }
    // Untied, what is left of a head is not one.
    let name = "qwen3-affine4-g64";
    for part in ["scales", "biases"] {
        let lost = format!("lm_head.{part}");
        copy(name).tensors(|t| drop(t.remove(&lost))).refused(&[
            "model.safetensors",
            "lm_head.weight",
            &lost,
            "get every shard",
        ]);
    }
    copy(name)
        .tensors(|t| drop(t.remove("lm_head.weight")))
        .refused(&["lm_head.weight is missing", "config.json", "set it to true"]);
}

/// Row 6: the flag may be nested.
#[test]
fn ties_are_found_where_wrapped_models_say_them() {
    let name = "qwen3-affine8-g32";
    let done = copy(name)
        .config(|c| {
            let flag = c["tie_word_embeddings"].take();
            c["text_config"] = json!({"tie_word_embeddings": flag});
        })
        .quiet();
    same(&done, &plain(name));
    copy(name)
        .config(|c| c["tie_word_embeddings"] = false.into())
        .refused(&["lm_head.weight", "tie_word_embeddings"]);
}

/// Rows 7 and 8: the index decides while it is true; without one the set of shards must be complete.
#[test]
fn shards() {
    let name = "qwen3-f16-sharded";
    let (index, stray) = ("model.safetensors.index.json", "model.safetensors");
    let quantised = fixture("qwen3-affine4-g64").join(stray);
    let with_stray = || {
        let copy = copy(name);
        std::fs::copy(&quantised, copy.file(stray)).unwrap();
        copy
    };
    same(&with_stray().quiet(), &plain(name));
    let no_index = with_stray();
    std::fs::remove_file(no_index.file(index)).unwrap();
    no_index.refused(&["is in another file too", "remove the stray file"]);

    let stale = copy(name).json(index, |json| {
        for file in json["weight_map"].as_object_mut().unwrap().values_mut() {
            *file = "model-00001-of-00010.safetensors".into();
        }
    });
    same(&stale.quiet(), &plain(name));
    let cut = "model-00002-of-00002.safetensors";
    std::fs::remove_file(stale.file(cut)).unwrap();
    stale.refused(&[cut, "1 of 2 are here", "finish the download"]);
    let broken = copy(name);
    std::fs::remove_file(broken.file(cut)).unwrap();
    broken.refused(&[cut, "finish the download"]);
}

/// Row 9: shapes decide about bits, group and mode; the config is only compared.
#[test]
fn configs_that_lie_about_quantisation() {
    let name = "qwen3-affine4-g64";
    let want = plain(name);
    let none = copy(name).config(|c| {
        c["quantization"] = Value::Null;
        c["quantization_config"] = Value::Null;
    });
    same(&none.quiet(), &want);
    let wrong = copy(name).config(|c| c["quantization"]["bits"] = 8.into());
    let words = [
        "affine 8 bit, group 64",
        "affine 4 bit, group 64",
        "30 tensors",
    ];
    same(&wrong.warned(&words), &want);
    let off = copy(name).config(|c| c["quantization"][UP] = false.into());
    same(&off.warned(&["not quantised", "1 tensors", UP]), &want);
    // By its own name and by the ones that older files use; a missing mode is affine.
    for path in [
        UP.to_string(),
        UP.replace("model.", "language_model.model."),
        UP.replace("model.", "model.language_model."),
    ] {
        let right = json!({"bits": 4, "group_size": 64});
        let own = copy(name).config(|c| c["quantization"][&path] = right);
        same(&own.quiet(), &want);
        let wrong = json!({"bits": 4, "group_size": 32});
        let own = copy(name).config(|c| c["quantization"][&path] = wrong);
        same(&own.warned(&["group 32", "1 tensors", UP]), &want);
    }
    let mx = copy("qwen3-mxfp4").config(|c| {
        c["quantization"][UP] = json!({"bits": 4, "group_size": 32});
    });
    mx.warned(&["affine 4 bit, group 32", "mxfp4 4 bit, group 32", UP]);
    // Columns that fit no width at all.
    copy(name)
        .config(|c| c["intermediate_size"] = 200.into())
        .refused(&["model.safetensors", "mlp.", "different models"]);
}

/// Row 10: a scheme is known by its exact name and the types of its tensors.
#[test]
fn schemes_by_exact_name() {
    let name = "qwen3-fp8-hf";
    let renamed = |t: &mut Tensors| {
        *t = std::mem::take(t)
            .into_iter()
            .map(|(n, v)| (n.replace("weight_scale_inv", "weight_scale"), v))
            .collect();
    };
    for scheme in [
        json!({"quant_method": "compressed-tensors", "format": "float-quantized"}),
        json!({"quant_method": "modelopt", "quant_algo": "FP8"}),
    ] {
        let done = copy(name)
            .tensors(renamed)
            .config(|c| c["quantization_config"] = scheme)
            .quiet();
        same(&done, &plain(name));
    }
    for (scheme, word) in [
        (
            json!({"quant_method": "compressed-tensors", "format": "int-quantized"}),
            "int-quantized",
        ),
        (json!({"quant_method": "gptq", "bits": 4}), "gptq"),
        (
            json!({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}),
            "W4A8_AWQ",
        ),
    ] {
        copy(name)
            .config(|c| c["quantization_config"] = scheme)
            .refused(&["config.json", word, "supported are"]);
    }
    let own_file = copy(name).config(|c| c["quantization_config"] = Value::Null);
    let said = r#"{"quantization": {"quant_algo": "W4A16"}}"#;
    std::fs::write(own_file.file("hf_quant_config.json"), said).unwrap();
    own_file.refused(&["W4A16", "supported are"]);
}

/// Row 11: FP8 with its scales in any type or layout, never without.
#[test]
fn fp8_needs_its_scales() {
    let name = "qwen3-fp8-hf";
    let (weight, scale) = (format!("{UP}.weight"), format!("{UP}.weight_scale_inv"));
    let file = "model.safetensors";
    copy(name).tensors(|t| drop(t.remove(&scale))).refused(&[
        file,
        &weight,
        &scale,
        "get every shard",
    ]);
    copy(name).tensors(|t| drop(t.remove(&weight))).refused(&[
        &weight,
        "missing",
        &scale,
        "get every shard",
    ]);
    copy(name)
        .tensors(|t| {
            let found = t[&scale].clone();
            t.insert("lm_head.weight_scale_inv".into(), found);
        })
        .refused(&[file, "lm_head.weight", "lm_head.weight_scale_inv", "remove"]);
    copy(name)
        .tensors(|t| t.get_mut(&scale).unwrap().1 = vec![2, 1, 1])
        .refused(&[&weight, "[192, 128]", "[2, 1, 1]", "[2, 1]"]);
    // MLX saves FP8 as U8.
    let bytes = copy(name).tensors(|t| {
        for (dtype, ..) in t.values_mut() {
            if *dtype == Dtype::F8_E4M3 {
                *dtype = Dtype::U8;
            }
        }
    });
    same(&bytes.quiet(), &plain(name));
    // Scales that BF16 holds exactly, in both types.
    let scaled = |dtype| {
        let copy = copy(name).tensors(|t| {
            for (name, (ty, _, data)) in t {
                if name.ends_with("_scale_inv") {
                    *ty = dtype;
                    let (words, _) = data.as_chunks::<4>();
                    let keep = if dtype == Dtype::F32 { 0..4 } else { 2..4 };
                    let cut = |w: &[u8; 4]| [0, 0, w[2], w[3]][keep.clone()].to_vec();
                    *data = words.iter().flat_map(cut).collect();
                }
            }
        });
        copy.quiet()
    };
    same(&scaled(Dtype::BF16), &scaled(Dtype::F32));
    // Scales of activations play no part: the values are quantised by our own rules.
    let activations = copy(name).tensors(|t| {
        let one = tensor(Dtype::F32, &[], vec![0, 0, 128, 63]);
        t.insert(format!("{UP}.input_scale"), one.clone());
        t.insert(format!("{UP}.activation_scale"), one);
    });
    same(&activations.quiet(), &plain(name));
    // The config's block is compared with what the shapes leave open.
    let odd = copy(name).config(|c| {
        c["quantization_config"]["weight_block_size"] = json!([64, 64]);
    });
    let done = odd.compile(Scheme::Lossless).unwrap();
    assert!(!done.warnings.is_empty());
    assert!(
        done.warnings[0].contains("fp8 blocks of (64, 64)"),
        "{:?}",
        done.warnings
    );
}

/// Row 12: NaN is named where it stands.
#[test]
fn values_that_are_not_finite() {
    for (name, part, at, bytes, words) in [
        ("qwen3-fp8-hf", "weight", 5, &[0x7f][..], "NaN at index 5"),
        (
            "qwen3-fp8-hf",
            "weight_scale_inv",
            4,
            &[0, 0, 0x80, 0x7f],
            "inf at index 1",
        ),
        ("qwen3-mxfp4", "scales", 3, &[255], "NaN at index 3"),
        ("qwen3-mxfp8", "scales", 3, &[255], "NaN at index 3"),
        ("qwen3-mxfp8", "weight", 7, &[0xff], "NaN at index 7"),
        ("qwen3-nvfp4", "scales", 2, &[0x7f], "NaN at index 2"),
        (
            "qwen3-affine4-g64",
            "scales",
            2,
            &[0xc0, 0x7f],
            "NaN at index 1",
        ),
        (
            "qwen3-affine4-g64",
            "biases",
            2,
            &[0x80, 0xff],
            "-inf at index 1",
        ),
    ] {
        let full = format!("{UP}.{part}");
        let copy = copy(name).tensors(|t| {
            t.get_mut(&full).unwrap().2[at..at + bytes.len()].copy_from_slice(bytes);
        });
        copy.refused(&[&full, words, "download it again"]);
    }
}

/// Row 13: scales that underflowed.
#[test]
fn underflown_nvfp4_scales_are_noticed() {
    let full = format!("{UP}.scales");
    copy("qwen3-nvfp4")
        .tensors(|t| t.get_mut(&full).unwrap().2[..100].fill(0))
        .warned(&[UP, "100 of 1536", "underflowed", "global scale"]);
}

/// Rows 14 and 15: every place that stop tokens and templates come from.
#[test]
fn stops_and_templates() {
    let name = "qwen3-mxfp4";
    let done = copy(name)
        .config(|c| {
            c["eos_token_id"] = 7.into();
            c["text_config"] = json!({"eos_token_id": 8});
        })
        .json("generation_config.json", |g| {
            g["eos_token_id"] = json!([9, 10])
        })
        .quiet();
    // 511 is the tokenizer's own.
    assert_eq!(done.manifest.text.stop, [7, 8, 9, 10, 511]);

    let template = plain(name).manifest.text.chat_template.unwrap();
    let other = json!({"name": "tool_use", "template": "no"});
    for value in [
        json!(template),
        json!([other, {"name": "default", "template": template}]),
    ] {
        let copy = copy(name).json("tokenizer_config.json", |c| c["chat_template"] = value);
        std::fs::remove_file(copy.file("chat_template.jinja")).unwrap();
        let text = copy.quiet().manifest.text;
        assert_eq!(text.chat_template.as_ref(), Some(&template));
    }
}

/// Row 17: rope numbers in the newer place, never by default.
#[test]
fn rope_numbers_moved() {
    let name = "qwen3-mxfp4";
    let moved = |kind: &str| {
        copy(name).config(|c| {
            let theta = c["rope_theta"].take();
            c["rope_parameters"] = json!({"rope_theta": theta, kind: "default"});
        })
    };
    let want = plain(name).manifest.model.ropes;
    for kind in ["rope_type", "type"] {
        assert_eq!(moved(kind).quiet().manifest.model.ropes, want);
    }
    copy(name)
        .config(|c| c["rope_theta"] = Value::Null)
        .refused(&["config.json", "rope_theta"]);
}

/// Row 19: no tensor needs an address.
#[test]
fn tensors_at_any_address() {
    for name in ["qwen3-affine4-g64", "qwen3-fp8-hf"] {
        let want = plain(name);
        for shift in 1..8 {
            let copy = copy(name);
            let path = copy.file("model.safetensors");
            let bytes = std::fs::read(&path).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let mut out = ((header + shift) as u64).to_le_bytes().to_vec();
            out.extend(&bytes[8..8 + header]);
            out.extend(vec![b' '; shift]);
            out.extend(&bytes[8 + header..]);
            std::fs::write(path, out).unwrap();
            same(&copy.quiet(), &want);
        }
    }
}

/// Lossless packs hold what the values need, and no more.
#[test]
fn lossless_forms() {
    for (name, want) in [
        ("qwen3-affine4-g64", FloatType::F32),
        ("qwen3-mxfp4", FloatType::Bf16),
        ("qwen3-mxfp8", FloatType::Bf16),
        ("qwen3-nvfp4", FloatType::Bf16),
        ("qwen3-fp8-hf", FloatType::F32),
    ] {
        let pack = plain(name);
        let up = format!("{UP}.weight");
        let tensor = pack.manifest.tensors.iter().find(|t| t.name == up).unwrap();
        let HostForm::Float { ty, .. } = tensor.host else {
            panic!("{name}: {:?}", tensor.host);
        };
        assert_eq!(ty, want, "{name}");
    }
}

/// A pack is of its checkpoint's scales as much as of its codes.
#[test]
fn verify_sees_every_companion() {
    for (name, part) in [
        ("qwen3-affine4-g64", "biases"),
        ("qwen3-nvfp4", "scales"),
        ("qwen3-fp8-hf", "weight_scale_inv"),
    ] {
        let pack = plain(name);
        let reader = Reader::parse(&pack.bytes).unwrap();
        against::check(&reader, &pack.bytes, &fixture(name)).unwrap();
        let copy = copy(name).tensors(|t| {
            t.get_mut(&format!("{UP}.{part}")).unwrap().2[0] ^= 1;
        });
        let error = against::check(&reader, &pack.bytes, copy.path()).unwrap_err();
        assert_eq!(error.exit_code(), 7);
        assert!(error.to_string().contains(UP), "{error}");
    }
}

/// `org/name` finds the snapshot in the local cache, whose files are links to blobs.
#[test]
#[cfg(unix)]
fn hub_names_resolve_in_the_cache() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--Acme--tiny-1.5");
    let snapshot = repository.join("snapshots/0123abcd");
    let blobs = repository.join("blobs");
    for folder in [&snapshot, &blobs, &repository.join("refs/pr")] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let name = "qwen3-mxfp4";
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        if file != "reference.safetensors" {
            let blob = format!("blob-{}", file.len());
            let blob = blob + &file.to_string_lossy().replace('.', "");
            std::fs::copy(&path, blobs.join(&blob)).unwrap();
            let target = Path::new("../../blobs").join(blob);
            std::os::unix::fs::symlink(target, snapshot.join(file)).unwrap();
        }
    }
    for reference in ["main", "v1", "pr/7"] {
        std::fs::write(repository.join("refs").join(reference), "0123abcd").unwrap();
    }
    let find = |name: &str| hub::resolve_in(Path::new(name), Some(cache.path()));
    for given in ["", "@main", "@v1", "@pr/7", "@0123abcd"] {
        let found = find(&format!("Acme/tiny-1.5{given}")).unwrap();
        assert_eq!(found, snapshot, "{given}");
    }
    same(
        &compile_at(&snapshot, Scheme::Lossless).unwrap(),
        &plain(name),
    );
    for (given, word) in [
        ("Acme/other", "hf download Acme/other"),
        (
            "Acme/tiny-1.5@v2",
            "hf download Acme/tiny-1.5 --revision v2",
        ),
    ] {
        let error = find(given).unwrap_err();
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains(word), "{error}");
    }
    // Folders and things that are no names are left alone.
    let folder = cache.path().to_str().unwrap();
    for given in [
        folder,
        "nowhere",
        "a/b/c",
        "../x",
        "Acme/..",
        "Acme/tiny-1.5@../../x",
    ] {
        assert_eq!(find(given).unwrap(), Path::new(given));
    }
}

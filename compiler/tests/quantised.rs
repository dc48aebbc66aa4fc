//! Every quantised format: MLX's own vectors to the bit, and the layouts that no vector has.

use ork_compiler::checkpoint::Checkpoint;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use std::path::Path;

type Named = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn f32s(bytes: &[u8]) -> Vec<f32> {
    let (words, rest) = bytes.as_chunks::<4>();
    assert!(rest.is_empty());
    words.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Runs `check` on a checkpoint of these tensors and this config.
fn with(config: &str, tensors: &[Named], check: impl FnOnce(&Checkpoint)) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    let file = safetensors::serialize(views, None).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    check(&Checkpoint::open(dir.path()).unwrap());
}

fn values(config: &str, tensors: &[Named], k: usize) -> Vec<f32> {
    let mut out = Vec::new();
    with(config, tensors, |c| {
        let tensor = c.tensor("m.weight", k).unwrap();
        tensor.check_finite().unwrap();
        out = tensor.values();
    });
    out
}

fn refused(config: &str, tensors: &[Named], k: usize, words: &[&str]) {
    with(config, tensors, |c| {
        let result = c.tensor("m.weight", k).and_then(|t| t.check_finite());
        let text = result.unwrap_err().to_string();
        assert!(!text.contains('\n'), "{text}");
        for word in words {
            assert!(text.contains(word), "{word:?} not in: {text}");
        }
    });
}

/// A checkpoint of MLX's vectors, with the header one byte longer for each step of `shift`: tensors at
/// any address decode the same.
fn vectors(shift: usize, check: impl Fn(&Checkpoint, &str)) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quant-vectors");
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), "{}").unwrap();
    for i in 0..2 {
        let bytes = std::fs::read(source.join(format!("vectors-{i}.safetensors"))).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut out = ((header + shift) as u64).to_le_bytes().to_vec();
        out.extend(&bytes[8..8 + header]);
        out.extend(vec![b' '; shift]);
        out.extend(&bytes[8 + header..]);
        std::fs::write(dir.path().join(format!("model-{i}.safetensors")), out).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let cases = std::fs::read_to_string(source.join("cases.json")).unwrap();
    let cases: serde_json::Value = serde_json::from_str(&cases).unwrap();
    for case in cases.as_array().unwrap() {
        check(&checkpoint, case["name"].as_str().unwrap());
    }
}

#[test]
fn mlx_vectors_decode_to_the_bit_at_any_address() {
    for shift in 0..8 {
        let count = std::cell::Cell::new(0);
        vectors(shift, |c, name| {
            let tensor = c.tensor(&format!("{name}.weight"), 256).unwrap();
            let want = c.tensor(&format!("{name}.dequant_f32"), 256).unwrap();
            assert_eq!(tensor.shape, [8, 256]);
            assert_eq!(bits(&tensor.values()), bits(&want.values()), "{name}");
            count.set(count.get() + 1);
        });
        assert_eq!(count.get(), 58);
    }
}

#[test]
fn every_e4m3_byte_decodes() {
    vectors(0, |_, _| {});
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/quant-vectors/vectors-1.safetensors");
    let file = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let want = f32s(file.tensor("fp8.e4m3_f32").unwrap().data());
    let codes = file.tensor("fp8.all_bytes").unwrap().data().to_vec();
    for dtype in [Dtype::F8_E4M3, Dtype::U8] {
        let tensors = [
            ("m.weight", dtype, vec![1, 256], codes.clone()),
            ("m.weight_scale", Dtype::F32, vec![], bytes(&[1.0])),
        ];
        with("{}", &tensors, |c| {
            let tensor = c.tensor("m.weight", 256).unwrap();
            let same =
                |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(tensor.values().iter().zip(&want).all(same));
            let text = tensor.check_finite().unwrap_err().to_string();
            assert!(text.contains("NaN at index 127, 2 of 256"), "{text}");
        });
    }
}

/// Experts are a leading dimension of everything: each decodes as it would alone.
#[test]
fn stacked_experts_decode_as_each_alone() {
    vectors(0, |c, name| {
        let stored = |suffix: &str| {
            c.stored_shape(&format!("{name}.{suffix}"))
                .map(<[usize]>::to_vec)
        };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quant-vectors");
        let files =
            [0, 1].map(|i| std::fs::read(source.join(format!("vectors-{i}.safetensors"))).unwrap());
        let mut tensors = Vec::new();
        for (suffix, to) in [
            ("weight", "m.weight"),
            ("scales", "m.scales"),
            ("biases", "m.biases"),
        ] {
            let Some(shape) = stored(suffix) else {
                continue;
            };
            let full = format!("{name}.{suffix}");
            let found = files.iter().find_map(|f| {
                let t = SafeTensors::deserialize(f).unwrap();
                t.tensor(&full).ok().map(|t| (t.dtype(), t.data().to_vec()))
            });
            let (dtype, data) = found.unwrap();
            // Eight rows as two experts of four.
            tensors.push((to, dtype, vec![2, 4, shape[1]], data));
        }
        let want = c
            .tensor(&format!("{name}.dequant_f32"), 256)
            .unwrap()
            .values();
        with("{}", &tensors, |stack| {
            let tensor = stack.tensor("m.weight", 256).unwrap();
            assert_eq!(tensor.shape, [2, 4, 256]);
            assert_eq!(tensor.rows(), 8);
            assert_eq!(bits(&tensor.values()), bits(&want), "{name}");
        });
    });
}

fn fp8(weight: Vec<usize>, scale: (&'static str, Dtype, Vec<usize>, Vec<u8>)) -> [Named; 2] {
    let count = weight.iter().product();
    [
        ("m.weight", Dtype::F8_E4M3, weight, vec![0x38; count]),
        scale,
    ]
}

/// E4M3 0x38 is 1, so the values are the scales.
#[test]
fn fp8_scales_of_every_shape_and_type() {
    let scale = |shape: &[usize], values: &[f32]| {
        ("m.weight_scale", Dtype::F32, shape.to_vec(), bytes(values))
    };
    assert_eq!(
        values("{}", &fp8(vec![2, 2], scale(&[], &[3.0])), 2),
        [3.0; 4]
    );
    assert_eq!(
        values("{}", &fp8(vec![2, 2], scale(&[1], &[3.0])), 2),
        [3.0; 4]
    );
    let rows = [3.0, 3.0, 5.0, 5.0];
    assert_eq!(
        values("{}", &fp8(vec![2, 2], scale(&[2], &[3.0, 5.0])), 2),
        rows
    );
    assert_eq!(
        values("{}", &fp8(vec![2, 2], scale(&[2, 1], &[3.0, 5.0])), 2),
        rows
    );
    let declared =
        r#"{"quantization_config": {"quant_method": "fp8", "weight_block_size": [2, 2]}}"#;
    let ragged = fp8(vec![3, 3], scale(&[2, 2], &[1.0, 2.0, 3.0, 4.0]));
    let want = [1.0, 1.0, 2.0, 1.0, 1.0, 2.0, 3.0, 3.0, 4.0];
    assert_eq!(values(declared, &ragged, 3), want);
    assert_eq!(values("{}", &ragged, 3), want, "inferred from the shapes");
    for (dtype, bytes) in [
        (Dtype::BF16, vec![0x40, 0x40]),
        (Dtype::F16, vec![0x00, 0x42]),
    ] {
        let scale = ("m.weight_scale_inv", dtype, vec![1, 1], bytes);
        assert_eq!(values("{}", &fp8(vec![1, 2], scale), 2), [3.0; 2]);
    }
    let power = ("m.weight_scale_inv", Dtype::F8_E8M0, vec![1, 1], vec![129]);
    assert_eq!(values("{}", &fp8(vec![1, 2], power), 2), [4.0; 2]);
    let experts = fp8(vec![2, 1, 2], scale(&[2, 1, 1], &[3.0, 5.0]));
    assert_eq!(values("{}", &experts, 2), rows);
    let mut e5m2 = fp8(vec![1, 2], scale(&[], &[3.0]));
    e5m2[0].1 = Dtype::F8_E5M2;
    e5m2[0].3 = vec![0x3c, 0xc0];
    assert_eq!(values("{}", &e5m2, 2), [3.0, -6.0]);
    let misshapen = fp8(vec![3, 3], scale(&[5], &[1.0; 5]));
    refused(
        "{}",
        &misshapen,
        3,
        &["m.weight", "model.safetensors", "[5]", "weight_block_size"],
    );
    let alone = &fp8(vec![2, 2], scale(&[], &[3.0]))[..1];
    refused("{}", alone, 2, &["m.weight", "without m.weight_scale_inv"]);
    let nan = fp8(vec![2, 2], scale(&[2], &[1.0, f32::NAN]));
    refused("{}", &nan, 2, &["m.weight_scale", "NaN at index 1"]);
}

fn nvfp4(extra: Named) -> Vec<Named> {
    let (dtype, shape) = match extra.0 {
        "m.global_scale" => (Dtype::U32, vec![1, 2]),
        _ => (Dtype::U8, vec![1, 8]),
    };
    let scales = match extra.0 {
        "m.global_scale" => ("m.scales", Dtype::U8, vec![1, 1], vec![0xb8]),
        _ => ("m.weight_scale", Dtype::F8_E4M3, vec![1, 1], vec![0xb8]),
    };
    // Codes 1 (0.5) and 15 (-6); the scale is -1.
    vec![("m.weight", dtype, shape, vec![0xf1; 8]), scales, extra]
}

#[test]
fn nvfp4_global_scales() {
    let pairs = |a: f32, b: f32| [a, b].repeat(8);
    let mlx = nvfp4(("m.global_scale", Dtype::F32, vec![1], bytes(&[5376.0])));
    assert_eq!(values("{}", &mlx, 16), pairs(-1.0, 12.0));
    let times = nvfp4(("m.weight_scale_2", Dtype::F32, vec![], bytes(&[2.0])));
    let config = r#"{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}"#;
    assert_eq!(values(config, &times, 16), pairs(-1.0, 12.0));
    let mut over = nvfp4(("m.weight_global_scale", Dtype::F32, vec![1], bytes(&[0.5])));
    over[0].0 = "m.weight_packed";
    let config = r#"{"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}"#;
    assert_eq!(values(config, &over, 16), pairs(-1.0, 12.0));
    let many = nvfp4(("m.global_scale", Dtype::F32, vec![2], bytes(&[1.0, 1.0])));
    refused(
        "{}",
        &many,
        16,
        &["m.global_scale has 2 values for 1 matrices"],
    );
}

#[test]
fn extreme_scales_decode_or_are_refused() {
    let mx = |scale: u8| {
        [
            ("m.weight", Dtype::U32, vec![1, 4], vec![0x22; 16]),
            ("m.scales", Dtype::U8, vec![1, 1], vec![scale]),
        ]
    };
    assert_eq!(values("{}", &mx(0), 32), [2f32.powi(-127); 32]);
    assert_eq!(values("{}", &mx(254), 32), [2f32.powi(127); 32]);
    refused("{}", &mx(255), 32, &["m.scales", "NaN at index 0"]);
    // 6 * 2^127 is beyond f32.
    let mut large = mx(254);
    large[0].3[3] = 0x77;
    refused("{}", &large, 32, &["m.weight", "inf at index 6, 2 of 32"]);
}

#[test]
fn other_schemes_are_refused_by_name() {
    for (config, word) in [
        (r#"{"quant_method": "awq", "bits": 4}"#, "awq"),
        (
            r#"{"quant_method": "compressed-tensors", "format": "pack-quantized"}"#,
            "pack-quantized",
        ),
        (r#"{"quant_method": "compressed-tensors"}"#, "none"),
        (
            r#"{"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}"#,
            "W4A16_AWQ",
        ),
        (
            r#"{"quant_method": "fp8", "weight_block_size": [128, 0]}"#,
            "weight_block_size",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let config = format!(r#"{{"quantization_config": {config}}}"#);
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let error = Checkpoint::open(dir.path()).err().unwrap();
        assert_eq!(error.exit_code(), 3);
        assert!(error.to_string().contains(word), "{error}");
    }
}

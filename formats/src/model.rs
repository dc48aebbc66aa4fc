//! The serialised model: what the loader executes, as data.
//!
//! The loader never learns a model family's name. It walks [`Model::ops`], a closed set of
//! operations over numbered f32 activation slots, once per chunk of rows.
//! A new family is a new list of these ops; a new op is a change of this file, the kernels and the
//! CPU engine.

pub use crate::op::{Activation, Op};
use serde::{Deserialize, Serialize};

/// Index into [`Manifest::tensors`].
pub type TensorId = u32;
/// Index into [`Model::slots`].
pub type Slot = u32;
/// Index into [`Model::caches`].
pub type CacheId = u32;
/// Index into [`Model::ropes`].
pub type RopeId = u32;
/// Index into [`Model::states`].
pub type StateId = u32;

/// Everything of a pack that is not bulk data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// What to execute.
    pub model: Model,
    /// Every tensor that an op names, with where its bytes are.
    pub tensors: Vec<Tensor>,
    /// The NPU plan; absent in lossless packs.
    pub npu: Option<NpuPlan>,
    /// Prompt and stop rules.
    pub text: Text,
    /// Where the pack came from.
    pub provenance: Provenance,
}

/// Dimensions and the op list.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// Rows of the embedding table and of the logits.
    pub vocab: u32,
    /// Most positions the model was made for.
    pub context: u32,
    /// Width in f32 elements of each activation slot; a slot holds `[rows, width]`.
    pub slots: Vec<u32>,
    /// One KV cache per attention layer.
    pub caches: Vec<Cache>,
    /// Recurrent states, zero at position 0; each belongs to one op.
    pub states: Vec<State>,
    /// Rotary tables.
    pub ropes: Vec<Rope>,
    /// Element type of the KV cache.
    pub kv: FloatType,
    /// Executed in order for every chunk, prefill and decode alike.
    pub ops: Vec<Op>,
    /// Slot that holds the final normed hidden state.
    pub hidden: Slot,
    /// Output matrix `[vocab, hidden]`; the embedding itself when tied.
    pub head: TensorId,
}

/// Shape of one layer's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cache {
    /// Key/value heads.
    pub kv_heads: u32,
    /// Elements per head.
    pub head_dim: u32,
}

/// Shape of one recurrent state, f32 `[heads, rows, width]`: constant in the length of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// Value heads of a delta rule; 1 for a convolution.
    pub heads: u32,
    /// Elements of a value head; taps less 1 for a convolution.
    pub rows: u32,
    /// Elements of a key head; channels for a convolution.
    pub width: u32,
}

/// One rotary position embedding.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Angle per position of lane pair i; `2 * inv_freq.len()` lanes are rotated.
    pub inv_freq: Vec<f32>,
    /// Factor on the rotated lanes (yarn, longrope); 1 otherwise.
    pub magnitude: f32,
    /// True: pairs are (2i, 2i+1); false: pairs are (i, i + dims/2).
    pub interleaved: bool,
}

/// Floating-point storage types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FloatType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl FloatType {
    /// Bytes per element.
    #[must_use]
    pub fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// A byte range of the host-weights section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// From the start of the section; a multiple of 64.
    pub offset: u64,
    /// Length.
    pub bytes: u64,
}

/// One tensor of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tensor {
    /// Name in the checkpoint.
    pub name: String,
    /// Matrices of one shape that lie one after the other in every form: experts; 1 otherwise.
    pub stack: u32,
    /// Rows (output channels) of one matrix; 1 for vectors.
    pub n: u32,
    /// Columns (input channels).
    pub k: u32,
    /// How the CPU reads it (decode, and prefill where there is no NPU form).
    pub host: HostForm,
    /// The int8 form for prefill.
    pub npu: Option<NpuForm>,
    /// The int8 form for prefill of experts, on the CPU.
    pub batch: Option<Tiles>,
    /// BLAKE3 of the source bytes: both forms come from this.
    pub source: [u8; 32],
}

/// Layouts of the host slice. Byte definitions are in [`crate::quant`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostForm {
    /// Row-major `[n][k]`, little endian.
    Float {
        /// Element type.
        ty: FloatType,
        /// Where.
        at: Span,
    },
    /// int8 codes row-major `[n][k]` and one f32 scale a row.
    Int8 {
        /// Codes.
        at: Span,
        /// `[n]` f32.
        scales: Span,
    },
    /// 4-bit codes -8..7 with an f16 scale per 32 along K; see [`crate::quant::int4`].
    Int4 {
        /// Panels.
        at: Span,
    },
}

/// int8 codes in native tiles for the CPU: each matrix of the stack padded with zeros to multiples of 32
/// both ways, one f32 scale per padded row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tiles {
    /// `stack` times `padded_n * padded_k` codes.
    pub at: Span,
    /// `stack` times `padded_n` f32.
    pub scales: Span,
}

/// The int8 NPU form of a matrix.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NpuForm {
    /// K of one slice after padding; `k_slices * slice_k >= k`.
    pub slice_k: u32,
    /// Number of equal K slices.
    pub k_slices: u32,
    /// One f32 scale per padded output channel.
    pub scales: Span,
    /// Weight blocks, each one native tile matrix.
    pub blocks: Vec<Block>,
    /// One chain per core, half and row class, sorted by (half, rows, core).
    pub chains: Vec<Chain>,
}

/// Place of some bytes in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Place {
    /// Index into [`NpuPlan::extents`].
    pub extent: u32,
    /// Byte offset inside the extent.
    pub offset: u32,
}

/// Weight columns `[n0, n0 + cols)` of K slice `slice`, resident for one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Owning core.
    pub core: u32,
    /// First output channel; a multiple of 32.
    pub n0: u32,
    /// Output channels, padded; a multiple of 32.
    pub cols: u32,
    /// K slice index.
    pub slice: u32,
    /// Where; `cols * slice_k` bytes in the native weight layout.
    pub at: Place,
}

/// A private, fully linked run of programs: one submit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chain {
    /// Core it runs on.
    pub core: u32,
    /// Half-chunk whose A buffer and ring half it uses.
    pub half: u32,
    /// Row class: rows it computes.
    pub rows: u32,
    /// First program (index into [`NpuPlan::programs`]).
    pub first: u32,
    /// Number of programs.
    pub count: u32,
}

/// One matmul program: `C[m, n] = A[m, k] W[n, k]^T` in int32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Rows.
    pub m: u32,
    /// Contracted length.
    pub k: u32,
    /// Columns.
    pub n: u32,
    /// First row inside the half-chunk.
    pub row0: u32,
    /// First output channel.
    pub n0: u32,
    /// K slice.
    pub slice: u32,
    /// int8 rows, row-major `[m][k]`.
    pub a: Place,
    /// int8 native weight tiles.
    pub w: Place,
    /// int32 rows, contiguous `[m][n]`.
    pub c: Place,
}

/// The five regions of the IOVA window, in allocation order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Region {
    /// Native weight tiles.
    Weights,
    /// Command streams.
    Programs,
    /// Task descriptors (kernel mapping).
    Tasks,
    /// Quantised activations, one buffer per core and half.
    A,
    /// int32 results, two halves.
    Ring,
}

/// One allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Region it belongs to.
    pub region: Region,
    /// Size; a multiple of the page.
    pub bytes: u64,
    /// For weights and programs: where its contents start inside the section.
    pub file_offset: u64,
}

/// Everything decided about the NPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NpuPlan {
    /// Cores the programs were compiled for.
    pub cores: u32,
    /// Most rows of a prefill chunk.
    pub chunk: u32,
    /// Rows of half 0 (and at most of half 1).
    pub half_rows: u32,
    /// Allocations, in order.
    pub extents: Vec<Extent>,
    /// A buffer of (half, core), index `half * cores + core`.
    pub a_buffers: Vec<Place>,
    /// Bytes of each A buffer.
    pub a_bytes: u32,
    /// Programs in file order; program i starts at word `i * WORDS` of the programs section.
    pub programs: Vec<Program>,
}

/// Prompt rules and defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Text {
    /// Ids put before every prompt (BOS), from the tokenizer's own post-processor.
    pub prefix: Vec<u32>,
    /// Ids put after every prompt.
    pub suffix: Vec<u32>,
    /// Union of every stop id the checkpoint names.
    pub stop: Vec<u32>,
    /// Jinja source.
    pub chat_template: Option<String>,
    /// Token names that templates use (`bos_token`, ...) with their text.
    pub tokens: Vec<(String, String)>,
    /// The checkpoint's own sampling defaults.
    pub generation: Generation,
}

/// Sampling defaults of the checkpoint's generation_config; `None` where it is silent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Generation {
    /// Whether to sample at all; false is greedy.
    pub sample: Option<bool>,
    /// Temperature.
    pub temperature: Option<f32>,
    /// Sample among the k likeliest.
    pub top_k: Option<u32>,
    /// Sample among the likeliest that sum to p.
    pub top_p: Option<f32>,
    /// Sample among those at least this share of the likeliest.
    pub min_p: Option<f32>,
    /// Divisor on logits of ids already there.
    pub repetition_penalty: Option<f32>,
}

/// Where a pack came from, with nothing that differs between two identical compiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// `orkc` version.
    pub compiler: String,
    /// The checkpoint's `model_type`, for people; the loader never reads it.
    pub family: String,
    /// (file name, BLAKE3) of every source file read.
    pub sources: Vec<(String, [u8; 32])>,
    /// Every option with the value used, defaults included.
    pub options: Vec<(String, String)>,
}

impl Manifest {
    /// A manifest with nothing in it, to be filled.
    #[must_use]
    pub fn empty() -> Self {
        Self {
            model: Model {
                vocab: 0,
                context: 0,
                slots: Vec::new(),
                caches: Vec::new(),
                states: Vec::new(),
                ropes: Vec::new(),
                kv: FloatType::F32,
                ops: Vec::new(),
                hidden: 0,
                head: 0,
            },
            tensors: Vec::new(),
            npu: None,
            text: Text::default(),
            provenance: Provenance {
                compiler: String::new(),
                family: String::new(),
                sources: Vec::new(),
                options: Vec::new(),
            },
        }
    }
}

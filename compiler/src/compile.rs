//! The pipeline: checkpoint in, pack out.

use crate::checkpoint::Checkpoint;
use crate::emit::{Emitted, emit};
use crate::error::{Error, Result};
use crate::graph::{self, Graph, TensorDecl};
use crate::memory::{self, Memory};
use crate::pack::{self, Bulk};
use crate::place::{Decode, Experts, Placed, Scheme, place};
use crate::report::{Facts, Report};
use crate::schedule::{Schedule, schedule};
use crate::tile::{Halves, halves, tile};
use crate::{room, text, verify};
use indicatif::ProgressBar;
use ork_caps::Caps;
use ork_formats::model::{FloatType, Manifest, Model, Provenance, Tensor, Text};
use ork_formats::pack::write::Writer;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// More threads than any machine this runs on; a typo must not start a million.
const MAX_JOBS: usize = 1024;

/// What to compile, and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// Directory of the checkpoint.
    pub checkpoint: PathBuf,
    /// Pack to write.
    pub output: PathBuf,
    /// Name of the SoC, as caps know it.
    pub soc: String,
    /// Compile for a SoC whose limits nobody has checked on silicon.
    pub allow_unvalidated: bool,
    /// Rows of a prefill chunk; `None` takes the SoC's default.
    pub chunk: Option<u32>,
    /// NPU cores to compile for; `None` takes all.
    pub cores: Option<u32>,
    /// What the matrices become.
    pub scheme: Scheme,
    /// What prefill multiplies routed experts with.
    pub experts: Experts,
    /// Most bytes of memory to plan for; `None` is unlimited.
    pub max_ram: Option<u64>,
    /// Threads; `None` takes one per CPU. Never changes the result.
    pub jobs: Option<usize>,
    /// Replace an existing pack.
    pub force: bool,
    /// Advanced by the source bytes of each finished tensor.
    pub progress: ProgressBar,
    /// Set from outside (a signal) to stop between two tensors.
    pub stop: Arc<AtomicBool>,
}

impl Options {
    /// Every default: the usual SoC, all cores, all CPUs, no overwrite, no progress bar.
    #[must_use]
    pub fn new(checkpoint: PathBuf, output: PathBuf) -> Self {
        Self {
            checkpoint,
            output,
            soc: ork_caps::DEFAULT.name.into(),
            allow_unvalidated: false,
            chunk: None,
            cores: None,
            scheme: Scheme::Quantised(Decode::Int4),
            experts: Experts::Int8,
            max_ram: None,
            jobs: None,
            force: false,
            progress: ProgressBar::hidden(),
            stop: Arc::default(),
        }
    }
}

/// Compiles a checkpoint into a pack.
///
/// # Errors
/// See [`Error`]; nothing is left at the output path when one occurs.
pub fn compile(options: &Options) -> Result<Report> {
    let started = Instant::now();
    let target = Target::resolve(options)?;
    let pool = pool(options.jobs)?;
    let writer = Writer::create(&options.output, options.force, target.caps)?;
    let checkpoint = Checkpoint::open(&options.checkpoint)?;
    let graph = graph::build(&checkpoint)?;
    let (tokenizer, text) = text::freeze(&options.checkpoint, &checkpoint.config)?;
    let placed = place(&graph, options.scheme, options.experts);
    let schedule = tile_and_schedule(&graph, &placed, &target)?;
    let memory = lay_out_npu(&schedule, &target)?;
    let emitted = emit_and_verify(&schedule, memory.as_ref(), target.caps)?;
    let (tensors, host) = pack::lay_out(&checkpoint, &graph, &placed, &schedule, memory.as_ref())?;
    let bulk = Bulk {
        npu: memory.as_ref().map_or(0, |m| m.weight_bytes),
        host,
    };
    room::check_memory(&graph, options.max_ram)?;
    room::check_disk(&options.output, bulk.npu + bulk.host)?;
    let provenance = provenance(&checkpoint, &target, options);
    let mut manifest = manifest(&graph, tensors, memory, text, provenance, options.scheme);
    options
        .progress
        .set_length(source_bytes(&checkpoint, &graph)?);
    let written = pool.install(|| {
        pack::write(
            writer,
            &checkpoint,
            &graph,
            &mut manifest,
            (&emitted, &tokenizer),
            bulk,
            (&options.progress, &options.stop),
        )
    })?;
    options.progress.finish_and_clear();
    Ok(Report::new(
        &manifest,
        target.caps,
        Facts {
            host_bytes: host,
            accumulator: Some(written.accumulator),
            hash: Some(written.hash),
            file_bytes: std::fs::metadata(&options.output).map(|m| m.len()).ok(),
            seconds: Some(started.elapsed().as_secs_f64()),
            provenance: false,
            warnings: checkpoint.warnings(),
        },
    ))
}

/// Options with every default filled in.
struct Target {
    caps: &'static Caps,
    cores: u32,
    chunk: u32,
    halves: Halves,
}

impl Target {
    fn resolve(options: &Options) -> Result<Self> {
        let usage = |text| Err(Error::Usage(text));
        let Some(caps) = ork_caps::find(&options.soc) else {
            let known: Vec<_> = ork_caps::all().iter().map(|c| c.name).collect();
            return Err(Error::Mismatch(format!(
                "SoC `{}` is unknown; --soc takes {}",
                options.soc,
                known.join(", ")
            )));
        };
        if caps.status() == ork_caps::Status::Inherited && !options.allow_unvalidated {
            return Err(Error::Mismatch(format!(
                "{}: {}; pass --allow-unvalidated to compile for it all the same",
                caps.name, caps.notes
            )));
        }
        let cores = options.cores.unwrap_or(caps.cores.value);
        if !(1..=caps.cores.value).contains(&cores) {
            return usage(format!(
                "--cores {cores}: {} has 1 to {}",
                caps.name, caps.cores.value
            ));
        }
        let chunk = options.chunk.unwrap_or(caps.chunk_default.value);
        let (granule, most) = (caps.row_granule.value, caps.chunk_max.value);
        if chunk == 0 || !chunk.is_multiple_of(granule) || most < chunk {
            return usage(format!(
                "--chunk {chunk}: must be a multiple of {granule} up to {most}"
            ));
        }
        Ok(Self {
            caps,
            cores,
            chunk,
            halves: halves(chunk, caps),
        })
    }
}

fn pool(jobs: Option<usize>) -> Result<rayon::ThreadPool> {
    if jobs.is_some_and(|jobs| MAX_JOBS < jobs) {
        return Err(Error::Usage(format!(
            "--jobs takes 0 (one per CPU) to {MAX_JOBS}"
        )));
    }
    rayon::ThreadPoolBuilder::new()
        // Zero lets rayon choose.
        .num_threads(jobs.unwrap_or(0))
        .build()
        .map_err(|e| Error::Usage(format!("--jobs: {e}")))
}

fn tile_and_schedule(graph: &Graph, placed: &[Placed], target: &Target) -> Result<Schedule> {
    let tiles: Result<Vec<_>> = (0..)
        .zip(graph.tensors.iter().zip(placed))
        .filter(|(_, (_, place))| place.npu)
        .map(|(id, (t, _))| Ok((id, tile(t.n, t.k, target.cores, target.caps)?)))
        .collect();
    schedule(tiles?, &target.halves, target.cores, target.caps)
}

/// `None` where nothing goes on the NPU.
fn lay_out_npu(schedule: &Schedule, target: &Target) -> Result<Option<Memory>> {
    if schedule.matrices.is_empty() {
        return Ok(None);
    }
    let Target {
        caps,
        cores,
        chunk,
        ref halves,
    } = *target;
    memory::plan(schedule, cores, chunk, halves.rows, caps).map(Some)
}

fn emit_and_verify(schedule: &Schedule, memory: Option<&Memory>, caps: &Caps) -> Result<Emitted> {
    let Some(memory) = memory else {
        return Ok(Emitted::default());
    };
    let emitted = emit(schedule, &memory.plan, caps);
    verify::verify(schedule, memory, &emitted, caps)?;
    Ok(emitted)
}

fn provenance(checkpoint: &Checkpoint, target: &Target, options: &Options) -> Provenance {
    let family = checkpoint.config["model_type"].as_str().unwrap_or_default();
    let settings = [
        ("soc", target.caps.name.to_string()),
        ("chunk", target.chunk.to_string()),
        ("cores", target.cores.to_string()),
        ("lossless", (options.scheme == Scheme::Lossless).to_string()),
        (
            "decode",
            match options.scheme {
                Scheme::Lossless => "source".into(),
                Scheme::Quantised(decode) => decode.name().into(),
            },
        ),
        (
            "expert-prefill",
            match options.scheme {
                Scheme::Lossless => "source".into(),
                Scheme::Quantised(_) => options.experts.name().into(),
            },
        ),
    ];
    Provenance {
        compiler: env!("CARGO_PKG_VERSION").to_string(),
        family: family.to_string(),
        sources: checkpoint.sources(),
        options: settings
            .map(|(name, value)| (name.to_string(), value))
            .into(),
    }
}

fn manifest(
    graph: &Graph,
    tensors: Vec<Tensor>,
    memory: Option<Memory>,
    text: Text,
    provenance: Provenance,
    scheme: Scheme,
) -> Manifest {
    let kv = if scheme == Scheme::Lossless {
        FloatType::F32
    } else {
        FloatType::F16
    };
    Manifest {
        model: Model {
            kv,
            ..graph.model.clone()
        },
        tensors,
        npu: memory.map(|m| m.plan),
        text,
        provenance,
    }
}

fn source_bytes(checkpoint: &Checkpoint, graph: &Graph) -> Result<u64> {
    let bytes = |t: &TensorDecl| Ok(t.rows(checkpoint)?.bytes());
    graph.tensors.iter().map(bytes).sum()
}

//! One sequence over one pack.

use crate::device::{Device, cpu::Cpu, sim::Sim};
use crate::error::{Error, Result};
use crate::exec::{Engine, Phase};
use crate::map::Pack;
use ork_formats::model::Manifest;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::path::Path;
use std::sync::Arc;

/// Rows of a chunk where the pack has no NPU plan to say.
const CHUNK: usize = 512;
/// Rows whose logits are computed together; bounds the scratch of the head.
const HEAD_ROWS: usize = 16;

/// Where prefill matmuls run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The bit-exact simulator, executing the pack's command streams.
    Sim,
    /// The same integer blocks computed by the CPU.
    Cpu,
}

/// How to open a session.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Where prefill matmuls run.
    pub backend: Backend,
    /// Worker threads; 0 is one per available core. Results do not depend on it.
    pub threads: usize,
    /// Positions to allow; the model's own context when absent.
    pub ctx: Option<u32>,
}

/// An open pack with one KV cache.
pub struct Session {
    pack: Arc<Pack>,
    pool: ThreadPool,
    engine: Engine,
    position: u32,
    context: u32,
    chunk: usize,
}

impl Session {
    /// Maps the pack at `path` and prepares the backend.
    ///
    /// # Errors
    /// As [`Pack::open`]; [`Error::Fit`] when `ctx` exceeds the model's context, [`Error::Usage`]
    /// when it is 0, [`Error::Failed`] when threads cannot be started.
    pub fn open(path: &Path, config: Config) -> Result<Self> {
        let pack = Arc::new(Pack::open(path)?);
        let manifest = pack.reader().manifest();
        let most = manifest.model.context;
        let context = match config.ctx {
            Some(0) => return Err(Error::Usage("a context of 0 positions holds nothing".into())),
            Some(ctx) if ctx > most => {
                return Err(Error::Fit(format!(
                    "context {ctx} exceeds the model's {most}; ask for {most} or less"
                )));
            }
            Some(ctx) => ctx,
            None => most,
        };
        let pool = ThreadPoolBuilder::new()
            .num_threads(config.threads)
            .thread_name(|i| format!("ork-{i}"))
            .build()
            .map_err(|e| Error::Failed(format!("cannot start worker threads: {e}")))?;
        let plan = manifest.npu.clone().map(Arc::new);
        let device = match &plan {
            None => None,
            Some(plan) => Some(match config.backend {
                Backend::Cpu => {
                    Box::new(Cpu::new(Arc::clone(&pack), Arc::clone(plan))) as Box<dyn Device>
                }
                Backend::Sim => {
                    let threads = pool.current_num_threads() as u32;
                    Box::new(Sim::new(&pack, Arc::clone(plan), threads)?)
                }
            }),
        };
        let chunk = plan.as_ref().map_or(CHUNK, |p| p.chunk as usize);
        Ok(Self {
            engine: Engine::new(Arc::clone(&pack), plan, device),
            pack,
            pool,
            position: 0,
            context,
            chunk,
        })
    }

    /// Appends `ids` through the prefill path; logits `[vocab]` of the last one.
    ///
    /// # Errors
    /// [`Error::Usage`] for no ids or an id outside the vocabulary, [`Error::Fit`] when they exceed
    /// the context (nothing is appended), [`Error::Failed`] when the device faults.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut last = 0;
        self.extend(ids, Phase::Prefill, |_, rows| last = rows)?;
        Ok(self.pool.install(|| self.engine.logits(last - 1, last)))
    }

    /// Appends one id through the decode path; its logits `[vocab]`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, id: u32) -> Result<Vec<f32>> {
        self.extend(&[id], Phase::Decode, |_, _| ())?;
        Ok(self.pool.install(|| self.engine.logits(0, 1)))
    }

    /// Appends `ids` through the prefill path; logits `[ids, vocab]` of all of them.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn logits_all(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut out = Vec::new();
        self.extend(ids, Phase::Prefill, |engine, rows| {
            for from in (0..rows).step_by(HEAD_ROWS) {
                out.extend(engine.logits(from, rows.min(from + HEAD_ROWS)));
            }
        })?;
        Ok(out)
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.engine.reset();
        self.position = 0;
    }

    /// Positions in the cache.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Positions the session allows.
    #[must_use]
    pub fn context(&self) -> u32 {
        self.context
    }

    /// The pack's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        self.pack.reader().manifest()
    }

    /// The mapped pack.
    #[must_use]
    pub fn pack(&self) -> &Pack {
        &self.pack
    }

    /// Runs `ids` chunk by chunk, calling `after(engine, rows)` after each, inside the pool. On a
    /// fault the position is what it was before.
    fn extend(
        &mut self,
        ids: &[u32],
        phase: Phase,
        mut after: impl FnMut(&Engine, usize) + Send,
    ) -> Result<()> {
        self.check(ids)?;
        let (engine, chunk) = (&mut self.engine, self.chunk);
        let mut position = self.position as usize;
        self.pool.install(|| {
            for ids in ids.chunks(chunk) {
                engine.forward(ids, position, phase)?;
                after(engine, ids.len());
                position += ids.len();
            }
            Ok::<(), Error>(())
        })?;
        self.position = position as u32;
        Ok(())
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        let vocab = self.manifest().model.vocab;
        if ids.is_empty() {
            return Err(Error::Usage("no token ids to run; give at least one".into()));
        }
        if let Some(id) = ids.iter().find(|id| **id >= vocab) {
            return Err(Error::Usage(format!(
                "token id {id} is outside the vocabulary of {vocab}"
            )));
        }
        let need = u64::from(self.position) + ids.len() as u64;
        if need > u64::from(self.context) {
            return Err(Error::Fit(format!(
                "the sequence needs {need} positions, the context has {}; shorten it, raise --ctx or start a new session",
                self.context
            )));
        }
        Ok(())
    }
}

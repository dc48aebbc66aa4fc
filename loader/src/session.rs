//! One sequence over one pack: the loader's whole public API.

use crate::cpu::linear;
pub use crate::device::Backend;
use crate::device::jobs::Jobs;
use crate::device::uapi::{kernel::Kernel, linux};
use crate::device::{self, Counters, Options, Picked};
use crate::error::{Error, Result};
pub use crate::exec::Times;
use crate::exec::{self, Engine, Phase, Slots};
use crate::map::Pack;
use crate::state::State;
use ork_formats::model::Manifest;
use ork_formats::pack::Reader;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Rows of a prefill chunk where the pack has no NPU plan.
const FLOAT_CHUNK: usize = 64;

/// More threads than any board or PC has; a typo must not start a million.
const MAX_THREADS: usize = 1024;

/// How to open a pack.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Where prefill runs.
    pub backend: Backend,
    /// Worker threads.
    pub threads: usize,
    /// Positions to allow; the model's own limit when `None`.
    pub ctx: Option<u32>,
}

/// What hardware backends need besides a [`Config`].
#[derive(Clone)]
pub struct Hardware {
    /// The operating system, or what stands in for it.
    pub kernel: Arc<dyn Kernel>,
    /// Driver options.
    pub options: Options,
    /// Two half-chunks in flight, so that CPU and NPU work at the same time. The numbers are the same
    /// without.
    pub overlap: bool,
}

impl Default for Hardware {
    fn default() -> Self {
        Self {
            kernel: linux::kernel(),
            options: Options::default(),
            overlap: true,
        }
    }
}

/// What happened since the pack was opened.
#[derive(Clone, Copy, Debug)]
pub struct Stats {
    /// Where host time went.
    pub times: Times,
    /// What the device did.
    pub device: Counters,
    /// Jobs that the CPU did in the device's place.
    pub fallbacks: u64,
}

/// An open pack and the state of one sequence.
pub struct Session {
    /// Before the pack: jobs in flight end before the map goes.
    engine: Engine,
    pack: Pack,
    picked: Option<Picked>,
    stop: Option<Arc<AtomicBool>>,
    pool: rayon::ThreadPool,
    slots: Slots,
    now: Snapshot,
    /// Where a model with recurrent layers can go back to, oldest first.
    marks: Vec<Snapshot>,
    context: usize,
}

/// A point of a sequence that its session can go back to.
#[derive(Clone)]
pub struct Snapshot {
    state: State,
    ids: Vec<u32>,
}

impl Snapshot {
    /// Tokens up to this point.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.ids.len() as u32
    }
}

/// Snapshots that [`Session::resume`] keeps: where the last prompt began to differ, and where it ended. A
/// chat's next turn shares at least the first of them.
const MARKS: usize = 2;

impl Session {
    /// Maps and proves the pack, sets up the backend.
    ///
    /// # Errors
    /// See [`Pack::open`]; [`Error::Usage`] when `ctx` exceeds what the model was made for;
    /// [`Error::Busy`] and [`Error::Fit`] when the device is absent, held or too small.
    pub fn open(path: &Path, config: Config) -> Result<Self> {
        Self::open_on(path, config, Hardware::default())
    }

    /// As [`Session::open`], with a say in how the hardware is driven.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn open_on(path: &Path, config: Config, mut hardware: Hardware) -> Result<Self> {
        let pack = Pack::open(path)?;
        let manifest = pack.reader().manifest();
        let limit = manifest.model.context;
        let context = config.ctx.unwrap_or(limit);
        if context == 0 || limit < context {
            return Err(Error::Usage(format!(
                "context of {context} positions: this model has 1..={limit}"
            )));
        }
        if MAX_THREADS < config.threads {
            return Err(Error::Usage(format!(
                "{} threads: at most {MAX_THREADS}",
                config.threads
            )));
        }
        let threads = config.threads.max(1);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .map_err(|e| Error::Failed(format!("cannot start {threads} threads: {e}")))?;
        let jobs = Arc::new(Jobs::new(pack.reader()));
        hardware.options.threads = threads;
        let (device, picked) = device::open(
            &hardware.kernel,
            &pack,
            &jobs,
            config.backend,
            &hardware.options,
        )?;
        let engine = Engine::new(&pack, device, jobs, hardware.overlap);
        Ok(Self {
            slots: Slots::new(manifest),
            now: Snapshot {
                state: State::new(&manifest.model),
                ids: Vec::new(),
            },
            marks: Vec::new(),
            engine,
            picked,
            stop: None,
            pool,
            context: context as usize,
            pack,
        })
    }

    /// Makes the sequence equal to `ids`, keeping what it already shares with them; returns the logits of
    /// the last one, and how many ids had to be computed.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn resume(&mut self, ids: &[u32]) -> Result<(Vec<f32>, usize)> {
        let held = self.now.ids.iter().zip(ids);
        let shared = held.take_while(|(a, b)| a == b).count();
        // The last id is always computed: its logits are not kept.
        let keep = self.truncate(shared.min(ids.len().saturating_sub(1)));
        self.mark();
        let rest = &ids[keep..];
        let logits = self.prefill(rest)?;
        self.mark();
        Ok((logits, rest.len()))
    }

    /// A flag that ends a prefill between two ops, with [`Error::Interrupted`]; what is in flight on the
    /// device ends first.
    pub fn stop_on(&mut self, flag: Arc<AtomicBool>) {
        self.stop = Some(flag);
    }

    /// The backend in use.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.engine.name()
    }

    /// What [`Backend::Auto`] chose and why.
    #[must_use]
    pub fn picked(&self) -> Option<&Picked> {
        self.picked.as_ref()
    }

    /// Whether real hardware is in use, which outlives a process that is killed.
    #[must_use]
    pub fn on_hardware(&self) -> bool {
        self.engine.is_hardware()
    }

    /// One line about trouble with the device since the last call.
    pub fn warning(&mut self) -> Option<String> {
        self.engine.warning.take()
    }

    /// Counts and times since the pack was opened.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            times: self.engine.times,
            device: self.engine.counters(),
            fallbacks: self.engine.fallbacks,
        }
    }

    /// Forgets all tokens past the first `len`; returns how many remain. With attention alone that is `len`
    /// (or what there was); recurrent layers go back to the last point before it that is known, which may
    /// be the start.
    pub fn truncate(&mut self, len: usize) -> usize {
        self.marks.retain(|mark| mark.ids.len() <= len);
        if self.now.ids.len() <= len {
            return self.now.ids.len();
        }
        if self.now.state.truncates() {
            self.now.state.truncate(len);
            self.now.ids.truncate(len);
            return len;
        }
        self.now = match self.marks.last() {
            Some(mark) => mark.clone(),
            None => Snapshot {
                state: State::new(&self.manifest().model),
                ids: Vec::new(),
            },
        };
        self.now.ids.len()
    }

    /// The sequence as it is now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        self.now.clone()
    }

    /// Makes the sequence what it was at `snapshot`.
    ///
    /// # Errors
    /// [`Error::Usage`] for a snapshot of a session over another model.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        if !self.now.state.fits(&snapshot.state) || self.context < snapshot.ids.len() {
            return Err(Error::Usage(format!(
                "a snapshot of {} tokens of another model or context, here are {}; take one of the same pack",
                snapshot.ids.len(),
                self.context
            )));
        }
        self.marks.clear();
        self.now = snapshot.clone();
        Ok(())
    }

    /// Remembers this point, where nothing but a snapshot leads back to it.
    fn mark(&mut self) {
        if self.now.state.truncates() || self.now.ids.is_empty() {
            return;
        }
        self.marks
            .retain(|mark| mark.ids.len() < self.now.ids.len());
        if self.marks.len() == MARKS {
            self.marks.remove(0);
        }
        self.marks.push(self.now.clone());
    }

    /// Appends prompt tokens; returns the logits `[vocab]` of the last one.
    ///
    /// # Errors
    /// [`Error::Fit`] past the context, [`Error::Usage`] for an empty prompt or an unknown id.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut last = Vec::new();
        self.chunks(ids, |session, hidden, width| {
            last = session.head(&hidden[hidden.len() - width..])?;
            Ok(())
        })?;
        Ok(last)
    }

    /// As [`Session::prefill`]; returns the logits of every row, `[ids, vocab]`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn logits_all(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        self.chunks(ids, |session, hidden, _| {
            all.extend(session.head(hidden)?);
            Ok(())
        })?;
        Ok(all)
    }

    /// Appends one generated token from the decode slice; returns its logits `[vocab]`.
    ///
    /// # Errors
    /// As [`Session::prefill`].
    pub fn decode(&mut self, id: u32) -> Result<Vec<f32>> {
        self.check(&[id])?;
        self.step(&[id], Phase::Decode)?;
        self.head(self.slots.rows(self.manifest().model.hidden))
    }

    /// Forgets the sequence.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// Tokens so far.
    #[must_use]
    pub fn position(&self) -> u32 {
        self.now.position()
    }

    /// Most tokens.
    #[must_use]
    pub fn context(&self) -> u32 {
        self.context as u32
    }

    /// The pack's manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        self.pack.reader().manifest()
    }

    /// The proven reader.
    #[must_use]
    pub fn reader(&self) -> &Reader {
        self.pack.reader()
    }

    /// The frozen tokenizer.
    #[must_use]
    pub fn tokenizer_bytes(&self) -> &[u8] {
        self.pack.reader().tokenizer()
    }

    fn check(&self, ids: &[u32]) -> Result<()> {
        let vocab = self.manifest().model.vocab;
        if ids.is_empty() {
            return Err(Error::Usage("the prompt is empty".into()));
        }
        if let Some(id) = ids.iter().find(|id| vocab <= **id) {
            return Err(Error::Usage(format!(
                "token id {id}: the vocabulary has {vocab}"
            )));
        }
        let position = self.now.ids.len();
        if self.context < position + ids.len() {
            return Err(Error::Fit(format!(
                "{} tokens after {position} exceed the context of {}; shorten the prompt",
                ids.len(),
                self.context
            )));
        }
        Ok(())
    }

    fn chunks(
        &mut self,
        ids: &[u32],
        mut each: impl FnMut(&Self, &[f32], usize) -> Result<()>,
    ) -> Result<()> {
        self.check(ids)?;
        self.engine.begin();
        let chunk = self
            .manifest()
            .npu
            .as_ref()
            .map_or(FLOAT_CHUNK, |p| p.chunk as usize);
        for ids in ids.chunks(chunk) {
            self.step(ids, Phase::Prefill)?;
            let slot = self.manifest().model.hidden;
            let width = self.manifest().model.slots[slot as usize] as usize;
            each(self, self.slots.rows(slot), width)?;
        }
        Ok(())
    }

    fn step(&mut self, ids: &[u32], phase: Phase) -> Result<()> {
        let Self {
            pack,
            engine,
            pool,
            slots,
            now,
            stop,
            ..
        } = self;
        // A generated token is short, and whoever generates looks at the flag between two of them.
        let stop = stop.as_deref().filter(|_| phase == Phase::Prefill);
        let position = now.ids.len();
        // Only the device fails, and only prefill uses it.
        let before = match phase {
            Phase::Prefill => Some(now.state.recurrent.clone()),
            Phase::Decode => None,
        };
        let memory = (&mut now.state, slots);
        let done = pool.install(|| exec::run(pack, engine, memory, ids, position, phase, stop));
        now.ids.extend(ids);
        if done.is_err() {
            // Some layers may have taken the tokens and others not.
            match before {
                Some(recurrent) => {
                    now.state.truncate(position);
                    now.state.recurrent = recurrent;
                    now.ids.truncate(position);
                }
                None => _ = self.truncate(position),
            }
        }
        done
    }

    /// Logits of rows of the final hidden state. A damaged weight shows here at the latest.
    fn head(&self, hidden: &[f32]) -> Result<Vec<f32>> {
        let manifest = self.manifest();
        let tensor = &manifest.tensors[manifest.model.head as usize];
        let rows = hidden.len() / tensor.k as usize;
        let mut out = vec![0.0; rows * tensor.n as usize];
        let host = self.pack.host();
        self.pool
            .install(|| linear::matmul(host, tensor, hidden, &mut out));
        match out.iter().position(|v| !v.is_finite()) {
            None => Ok(out),
            Some(at) => Err(Error::Failed(format!(
                "logit {} of id {} is {}: the pack's weights are damaged, run `orkc verify`",
                at / tensor.n as usize,
                at % tensor.n as usize,
                out[at]
            ))),
        }
    }
}

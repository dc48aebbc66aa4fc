//! What a sequence leaves behind: KV caches and recurrent states, as one value.

use crate::cpu::kv::Kv;
use ork_formats::model::Model;

/// The memory of one sequence. A clone is a snapshot: KV blocks are shared until one side writes them,
/// recurrent states are copied.
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) caches: Vec<Kv>,
    /// f32 `[heads, rows, width]` each.
    pub(crate) recurrent: Vec<Vec<f32>>,
}

impl State {
    /// The state before the first token.
    pub(crate) fn new(model: &Model) -> Self {
        let zeros = |s: &ork_formats::model::State| {
            vec![0.0; s.heads as usize * s.rows as usize * s.width as usize]
        };
        Self {
            caches: model.caches.iter().map(|c| Kv::new(c, model.kv)).collect(),
            recurrent: model.states.iter().map(zeros).collect(),
        }
    }

    /// Whether any past length can be had back; a recurrent state only knows the present one.
    pub(crate) fn truncates(&self) -> bool {
        self.recurrent.is_empty()
    }

    /// Whether `other` is a state of a model of the same shapes.
    pub(crate) fn fits(&self, other: &Self) -> bool {
        let same = |a: &Vec<f32>, b: &Vec<f32>| a.len() == b.len();
        self.caches.len() == other.caches.len()
            && self
                .caches
                .iter()
                .zip(&other.caches)
                .all(|(a, b)| a.fits(b))
            && self.recurrent.len() == other.recurrent.len()
            && self
                .recurrent
                .iter()
                .zip(&other.recurrent)
                .all(|(a, b)| same(a, b))
    }

    /// Forgets all tokens past the first `len`, in every cache.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.caches.iter_mut().for_each(|cache| cache.truncate(len));
    }
}

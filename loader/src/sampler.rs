//! Picks the next id from logits.

/// Sampling rules with their random state; the same seed gives the same ids.
pub struct Sampler {
    temperature: f32,
    top_k: usize,
    top_p: f32,
    state: u64,
}

impl Sampler {
    /// `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch their limits off.
    #[must_use]
    pub fn new(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Self {
        Self {
            temperature,
            top_k,
            top_p,
            state: seed,
        }
    }

    /// The next id; ties go to the lowest.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        if self.temperature <= 0.0 {
            let best = (0..logits.len()).fold(0, |b, i| if logits[b] < logits[i] { i } else { b });
            return best as u32;
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |id: u32| logits[id as usize];
        let by_logit = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
        // Selecting first spares sorting a whole vocabulary for a few ids.
        if (1..order.len()).contains(&self.top_k) {
            order.select_nth_unstable_by(self.top_k, by_logit);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(by_logit);
        let Some(top) = order.first().map(|id| logit(*id)) else {
            return 0;
        };
        // The top is subtracted before dividing: at tiny temperatures the quotients themselves would
        // overflow to infinity, whose differences are no numbers. 0 / temperature stays 0.
        let mut p: Vec<f32> = order
            .iter()
            .map(|id| (logit(*id) - top) / self.temperature)
            .collect();
        ork_kernels::softmax(&mut p);
        let mut sum = 0.0;
        let keep = p.iter().position(|p| {
            sum += p;
            self.top_p <= sum
        });
        p.truncate(keep.map_or(p.len(), |i| i + 1));
        let total: f32 = p.iter().sum();
        let mut left = self.uniform() * total;
        for (id, p) in order.iter().zip(&p) {
            left -= p;
            if left < 0.0 {
                return *id;
            }
        }
        order[p.len() - 1]
    }

    /// SplitMix64, top 24 bits as a number in 0..1.
    fn uniform(&mut self) -> f32 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u32 << 24) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(Sampler::new(0.0, 0, 1.0, 0).sample(&[1.0, 3.0, 3.0]), 1);
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let logits = [5.0, 9.0, 8.9, -4.0];
        for temperature in [1e-40, 1e-30, 1e-6] {
            let mut sampler = Sampler::new(temperature, 3, 0.95, 1);
            assert!(
                (0..50).all(|_| sampler.sample(&logits) == 1),
                "{temperature}"
            );
        }
    }

    #[test]
    fn a_top_k_of_the_vocabulary_or_more_is_no_limit() {
        let logits = [1.0, 1.5, 1.2, 0.5, 1.1];
        let draw = |k| -> Vec<u32> {
            let mut sampler = Sampler::new(1.0, k, 1.0, 3);
            (0..200).map(|_| sampler.sample(&logits)).collect()
        };
        assert!(draw(0) == draw(5) && draw(0) == draw(500));
        assert!((0..5).all(|id| draw(0).contains(&id)));
    }

    #[test]
    fn limits_hold_and_seeds_repeat() {
        let logits = [1.0, 5.0, 4.9, -3.0];
        let draw = |seed, k, p| -> Vec<u32> {
            let mut sampler = Sampler::new(1.0, k, p, seed);
            (0..200).map(|_| sampler.sample(&logits)).collect()
        };
        assert_eq!(draw(7, 0, 1.0), draw(7, 0, 1.0));
        assert!(draw(7, 1, 1.0).iter().all(|id| *id == 1));
        let two = draw(7, 2, 1.0);
        assert!(two.contains(&1) && two.contains(&2) && two.iter().all(|id| [1, 2].contains(id)));
        assert!(draw(7, 0, 0.1).iter().all(|id| *id == 1));
    }
}

//! Picks the next id from logits.

/// Sampling rules.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// 0 is greedy.
    pub temperature: f32,
    /// Sample among the k likeliest; 0 is all.
    pub top_k: usize,
    /// Sample among the likeliest that sum to p; 1 is all.
    pub top_p: f32,
    /// Sample among those at least this share of the likeliest; 0 is all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of ids seen lately; 1 is off.
    pub repeat_penalty: f32,
    /// Taken from the logits of ids seen lately; 0 is off.
    pub presence_penalty: f32,
    /// How many ids back "lately" reaches.
    pub repeat_last_n: usize,
    /// Added to the logits of single ids.
    pub bias: Vec<(u32, f32)>,
    /// The same seed gives the same ids.
    pub seed: u64,
}

impl Settings {
    /// Always the likeliest id.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repeat_penalty: 1.0,
        presence_penalty: 0.0,
        repeat_last_n: 64,
        bias: Vec::new(),
        seed: 0,
    };
}

/// Sampling rules with their random state.
pub struct Sampler {
    settings: Settings,
    state: u64,
}

impl Sampler {
    /// Starts from the settings' seed.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            state: settings.seed,
            settings,
        }
    }

    /// The next id after `history`; ties go to the lowest.
    pub fn sample(&mut self, logits: &[f32], history: &[u32]) -> u32 {
        let adjusted = self.adjust(logits, history);
        self.draw(adjusted.as_deref().unwrap_or(logits))
    }

    /// Logits with penalties and biases; `None` where there are none.
    fn adjust(&self, logits: &[f32], history: &[u32]) -> Option<Vec<f32>> {
        let s = &self.settings;
        let penalised = s.repeat_penalty != 1.0 || s.presence_penalty != 0.0;
        if !penalised && s.bias.is_empty() {
            return None;
        }
        let mut out = logits.to_vec();
        if penalised {
            let mut seen = history[history.len().saturating_sub(s.repeat_last_n)..].to_vec();
            seen.sort_unstable();
            seen.dedup();
            for id in seen {
                if let Some(logit) = out.get_mut(id as usize) {
                    *logit = match 0.0 < *logit {
                        true => *logit / s.repeat_penalty,
                        false => *logit * s.repeat_penalty,
                    } - s.presence_penalty;
                }
            }
        }
        for (id, bias) in &s.bias {
            if let Some(logit) = out.get_mut(*id as usize) {
                *logit += bias;
            }
        }
        Some(out)
    }

    fn draw(&mut self, logits: &[f32]) -> u32 {
        let s = &self.settings;
        if s.temperature <= 0.0 {
            let best = (0..logits.len()).fold(0, |b, i| if logits[b] < logits[i] { i } else { b });
            return best as u32;
        }
        let mut order: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |id: u32| logits[id as usize];
        let by_logit = |a: &u32, b: &u32| logit(*b).total_cmp(&logit(*a)).then(a.cmp(b));
        // Selecting first spares sorting a whole vocabulary for a few ids.
        if (1..order.len()).contains(&s.top_k) {
            order.select_nth_unstable_by(s.top_k, by_logit);
            order.truncate(s.top_k);
        }
        order.sort_unstable_by(by_logit);
        let Some(top) = order.first().map(|id| logit(*id)) else {
            return 0;
        };
        // The top is subtracted before dividing: at tiny temperatures the quotients themselves would
        // overflow to infinity, whose differences are no numbers. 0 / temperature stays 0.
        let mut p: Vec<f32> = order
            .iter()
            .map(|id| (logit(*id) - top) / s.temperature)
            .collect();
        ork_kernels::softmax(&mut p);
        let least = s.min_p * p[0];
        p.truncate(p.iter().position(|p| *p < least).unwrap_or(p.len()));
        let mut sum = 0.0;
        let keep = p.iter().position(|p| {
            sum += p;
            s.top_p <= sum
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

    fn sampler(temperature: f32, top_k: usize, top_p: f32, seed: u64) -> Sampler {
        Sampler::new(Settings {
            temperature,
            top_k,
            top_p,
            seed,
            ..Settings::GREEDY
        })
    }

    #[test]
    fn greedy_takes_the_first_of_equals() {
        assert_eq!(sampler(0.0, 0, 1.0, 0).sample(&[1.0, 3.0, 3.0], &[]), 1);
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let logits = [5.0, 9.0, 8.9, -4.0];
        for temperature in [1e-40, 1e-30, 1e-6] {
            let mut s = sampler(temperature, 3, 0.95, 1);
            assert!(
                (0..50).all(|_| s.sample(&logits, &[]) == 1),
                "{temperature}"
            );
        }
    }

    #[test]
    fn a_top_k_of_the_vocabulary_or_more_is_no_limit() {
        let logits = [1.0, 1.5, 1.2, 0.5, 1.1];
        let draw = |k| -> Vec<u32> {
            let mut s = sampler(1.0, k, 1.0, 3);
            (0..200).map(|_| s.sample(&logits, &[])).collect()
        };
        assert!(draw(0) == draw(5) && draw(0) == draw(500));
        assert!((0..5).all(|id| draw(0).contains(&id)));
    }

    #[test]
    fn limits_hold_and_seeds_repeat() {
        let logits = [1.0, 5.0, 4.9, -3.0];
        let draw = |seed, k, p| -> Vec<u32> {
            let mut s = sampler(1.0, k, p, seed);
            (0..200).map(|_| s.sample(&logits, &[])).collect()
        };
        assert_eq!(draw(7, 0, 1.0), draw(7, 0, 1.0));
        assert!(draw(7, 1, 1.0).iter().all(|id| *id == 1));
        let two = draw(7, 2, 1.0);
        assert!(two.contains(&1) && two.contains(&2) && two.iter().all(|id| [1, 2].contains(id)));
        assert!(draw(7, 0, 0.1).iter().all(|id| *id == 1));
    }

    #[test]
    fn penalties_biases_and_min_p_move_the_choice() {
        let logits = [2.0, 1.9, -1.0];
        let pick =
            |settings: Settings, history: &[u32]| Sampler::new(settings).sample(&logits, history);
        let penalty = |repeat_penalty, presence_penalty, repeat_last_n| Settings {
            repeat_penalty,
            presence_penalty,
            repeat_last_n,
            ..Settings::GREEDY
        };
        assert_eq!(pick(penalty(1.0, 0.0, 64), &[0]), 0);
        assert_eq!(pick(penalty(1.3, 0.0, 64), &[0]), 1);
        assert_eq!(pick(penalty(1.0, 0.5, 64), &[0, 0]), 1);
        assert_eq!(pick(penalty(1.3, 0.5, 1), &[0, 2]), 0, "out of reach");
        let biased = Settings {
            bias: vec![(2, 10.0), (9, 1.0)],
            ..Settings::GREEDY
        };
        assert_eq!(pick(biased, &[]), 2);
        let mut s = Sampler::new(Settings {
            temperature: 1.0,
            min_p: 0.5,
            ..Settings::GREEDY
        });
        assert!((0..200).all(|_| s.sample(&logits, &[]) != 2));
    }
}

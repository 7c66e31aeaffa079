//! Cost of a model on a GPU: the constants of the step time, and the sizes of batch and cache.
use lmetric_core::CoreError;
use serde::Deserialize;

/// The constants of one engine. The field names are those of the profile files (YAML), whose
/// `source` and `note` give the origin of the constants.
///
/// A step takes `fixed + a x decode sequences + b x their context tokens + c x prefill tokens + d x
/// attention pairs`, where a prefill chunk of `g` tokens behind `n` tokens of context has `g x (n +
/// g / 2)` pairs.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Profile {
    /// Seconds that every step takes.
    pub fixed_seconds: f64,
    /// `a`: seconds for each sequence that decodes.
    pub decode_seconds_per_sequence: f64,
    /// `b`: seconds for each token of context (prompt and output so far) of the sequences that
    /// decode.
    pub decode_seconds_per_context_token: f64,
    /// `c`: seconds for each prompt token computed.
    pub prefill_seconds_per_token: f64,
    /// `d`: seconds for each attention pair of the prompt tokens computed.
    pub prefill_seconds_per_attention_pair: f64,
    /// Largest number of tokens in one step, decodes counted first. At least `max_sequences`: every
    /// decode gets its token.
    pub max_batch_tokens: u32,
    /// Largest number of sequences that run at once.
    pub max_sequences: u32,
    /// Tokens per KV block.
    pub block_tokens: u32,
    /// Blocks that the KV memory holds.
    pub cache_blocks: u32,
    /// If given, sets the time of decodes instead of `fixed`, `a` and `b`; a step without decodes
    /// still takes `fixed`.
    #[serde(skip)]
    pub decode_throughput: Option<DecodeThroughput>,
}

/// Tokens per second that `n` decoding sequences make together: `alpha n^2 + beta n + gamma`,
/// whatever their context (SIBYL, Eq. 15).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct DecodeThroughput {
    /// Quadratic coefficient, below 0: the curve has a peak, at `-beta / 2 alpha`.
    pub alpha: f64,
    /// Linear coefficient.
    pub beta: f64,
    /// Constant coefficient.
    pub gamma: f64,
    /// Whether the curve keeps its peak value beyond the peak. As printed it falls below 0, and an
    /// engine that gets so far stands still forever.
    pub hold_peak: bool,
}

impl DecodeThroughput {
    /// Returns the tokens per second of all `sequences` together; not above 0: they stand still.
    pub fn tokens_per_second(&self, sequences: u32) -> f64 {
        let (peak, mut n) = (-self.beta / (2.0 * self.alpha), f64::from(sequences));
        if self.hold_peak {
            n = n.min(peak);
        }
        (self.alpha * n + self.beta) * n + self.gamma
    }

    /// Returns the seconds in which each sequence makes a token. Infinite: they stand still.
    pub fn step_seconds(&self, sequences: u32) -> f64 {
        let rate = self.tokens_per_second(sequences);
        if rate > 0.0 { f64::from(sequences) / rate } else { f64::INFINITY }
    }
}

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Sequences that decode one token each.
    pub decode_sequences: u32,
    /// Prompt and output tokens so far of the decoding sequences.
    pub context_tokens: u64,
    /// Prompt tokens computed.
    pub prefill_tokens: u32,
    /// `g x (n + g / 2)` summed over the prefill chunks.
    pub prefill_attention_pairs: f64,
}

impl StepWork {
    /// Adds a prefill chunk of `tokens` tokens behind `before` tokens of context.
    pub fn add_prefill(&mut self, before: u32, tokens: u32) {
        self.prefill_tokens += tokens;
        self.prefill_attention_pairs += f64::from(tokens) * (f64::from(before) + f64::from(tokens) / 2.0);
    }
}

impl Profile {
    /// Returns the seconds of a step with this work; infinite if a [`DecodeThroughput`] has fallen
    /// to 0 or below.
    pub fn step_seconds(&self, work: &StepWork) -> f64 {
        let decode = match &self.decode_throughput {
            Some(throughput) if work.decode_sequences > 0 => throughput.step_seconds(work.decode_sequences),
            _ => {
                self.fixed_seconds
                    + self.decode_seconds_per_sequence * f64::from(work.decode_sequences)
                    + self.decode_seconds_per_context_token * work.context_tokens as f64
            }
        };
        decode
            + self.prefill_seconds_per_token * f64::from(work.prefill_tokens)
            + self.prefill_seconds_per_attention_pair * work.prefill_attention_pairs
    }

    /// Returns the seconds that each decode step adds to the one before: `sequences` have one more
    /// token of context each.
    pub fn more_seconds(&self, sequences: u32) -> f64 {
        match self.decode_throughput {
            Some(_) => 0.0,
            None => self.decode_seconds_per_context_token * f64::from(sequences),
        }
    }

    /// Returns the seconds that a prompt of `tokens` tokens takes alone, in chunks of
    /// `max_batch_tokens`.
    pub fn prefill_seconds(&self, tokens: u32) -> f64 {
        let chunk = self.max_batch_tokens;
        (0..tokens.div_ceil(chunk))
            .map(|i| {
                let mut work = StepWork::default();
                work.add_prefill(i * chunk, chunk.min(tokens - i * chunk));
                self.step_seconds(&work)
            })
            .sum()
    }

    /// Returns the seconds that `tokens` prompt tokens behind `before` others take alone, in chunks
    /// of `max_batch_tokens`.
    pub fn prefill_seconds_behind(&self, before: u32, tokens: u32) -> f64 {
        let mut work = StepWork::default();
        work.add_prefill(before, tokens);
        // The pairs of the chunks add up to the pairs of the whole prompt, and each chunk takes a
        // step.
        let steps = tokens.div_ceil(self.max_batch_tokens);
        self.step_seconds(&work) + self.fixed_seconds * (f64::from(steps) - 1.0)
    }

    /// Returns the seconds that a request alone takes for `steps` decodes, the first behind
    /// `context` tokens.
    pub fn decode_seconds(&self, context: u32, steps: u32) -> f64 {
        let first =
            StepWork { decode_sequences: 1, context_tokens: u64::from(context), ..StepWork::default() };
        let n = f64::from(steps);
        n * self.step_seconds(&first) + self.more_seconds(1) * n * (n - 1.0) / 2.0
    }

    /// Checks the constants. Errors for constants that no engine can have.
    pub fn check(&self) -> Result<(), CoreError> {
        let bad = |field: &str, got: String, expected: String| {
            Err(CoreError::BadValue { what: format!("profile field {field}"), got, expected })
        };
        for (field, seconds) in [
            ("fixed_seconds", self.fixed_seconds),
            ("decode_seconds_per_sequence", self.decode_seconds_per_sequence),
            ("decode_seconds_per_context_token", self.decode_seconds_per_context_token),
            ("prefill_seconds_per_token", self.prefill_seconds_per_token),
            ("prefill_seconds_per_attention_pair", self.prefill_seconds_per_attention_pair),
        ] {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return bad(field, seconds.to_string(), "a finite number of seconds, 0 or more".into());
            }
        }
        if self.fixed_seconds == 0.0 {
            return bad("fixed_seconds", "0".into(), "more than 0: a step takes time".into());
        }
        for (field, count) in [
            ("max_sequences", self.max_sequences),
            ("block_tokens", self.block_tokens),
            ("cache_blocks", self.cache_blocks),
        ] {
            if count == 0 || count > 1 << 30 {
                return bad(field, count.to_string(), "1 to 2^30".into());
            }
        }
        if self.max_batch_tokens < self.max_sequences {
            let expected =
                format!("max_sequences ({}) or more: every decode gets its token", self.max_sequences);
            return bad("max_batch_tokens", self.max_batch_tokens.to_string(), expected);
        }
        if let Some(curve) = &self.decode_throughput {
            if !(curve.alpha < 0.0
                && curve.beta > 0.0
                && [curve.alpha, curve.beta, curve.gamma].iter().all(|x| x.is_finite()))
            {
                let got = format!("alpha {}, beta {}, gamma {}", curve.alpha, curve.beta, curve.gamma);
                return bad("decode_throughput", got, "finite numbers, alpha below 0, beta above".into());
            }
            if curve.tokens_per_second(1) <= 0.0 {
                let got = format!("{} tokens/s of one sequence", curve.tokens_per_second(1));
                return bad("decode_throughput", got, "more than 0".into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Round constants, so that step times can be worked out by hand.
    pub(crate) fn round() -> Profile {
        Profile {
            fixed_seconds: 1.0,
            decode_seconds_per_sequence: 0.1,
            decode_seconds_per_context_token: 0.001,
            prefill_seconds_per_token: 0.01,
            prefill_seconds_per_attention_pair: 0.0001,
            max_batch_tokens: 64,
            max_sequences: 8,
            block_tokens: 16,
            cache_blocks: 32,
            decode_throughput: None,
        }
    }

    fn eq15(hold_peak: bool) -> DecodeThroughput {
        DecodeThroughput { alpha: -0.423, beta: 44.766, gamma: -7.753, hold_peak }
    }

    #[test]
    fn equation_15_by_hand() {
        // -0.423 n^2 + 44.766 n - 7.753; the peak lies at 52.915 sequences: -7.753 + 44.766^2 / (4
        // x 0.423).
        let peak = 1176.6417;
        for (n, printed, held) in [
            (1, 36.59, 36.59),
            (10, 397.607, 397.607),
            (53, 1176.638, peak),
            (100, 238.847, peak),
            (105, 29.102, peak),
            (106, -15.385, peak),
        ] {
            assert!((eq15(false).tokens_per_second(n) - printed).abs() < 1e-3, "{n}");
            assert!((eq15(true).tokens_per_second(n) - held).abs() < 1e-3, "{n}");
        }
        assert!((eq15(false).step_seconds(10) - 10.0 / 397.607).abs() < 1e-12);
        assert!((eq15(true).step_seconds(100) - 100.0 / peak).abs() < 1e-7);
        assert_eq!(eq15(false).step_seconds(106), f64::INFINITY);
    }

    #[test]
    fn a_throughput_stands_for_the_decodes_of_a_step_alone() {
        let profile = Profile { decode_throughput: Some(eq15(true)), ..round() };
        let mut work = StepWork { decode_sequences: 10, context_tokens: 5000, ..Default::default() };
        assert_eq!(profile.step_seconds(&work), 10.0 / eq15(true).tokens_per_second(10));
        work.add_prefill(0, 20); // 20 x 0.01 + 20 x 10 x 0.0001
        assert!((profile.step_seconds(&work) - 10.0 / eq15(true).tokens_per_second(10) - 0.22).abs() < 1e-12);
        assert_eq!(profile.more_seconds(10), 0.0);
        // Alone, a prompt of 100 tokens takes a step of 64 and one of 36: 2 x 1 + 100 x 0.01 + 100
        // x 50 x 0.0001.
        assert!((profile.prefill_seconds(100) - 3.5).abs() < 1e-12);
        assert!((profile.prefill_seconds_behind(0, 100) - 3.5).abs() < 1e-12);
        assert!(
            (profile.prefill_seconds_behind(64, 36) - profile.prefill_seconds(100) + 1.8448).abs() < 1e-12
        );
        assert!(profile.prefill_seconds_behind(0, 0).abs() < 1e-12);
        assert_eq!(profile.decode_seconds(7, 4), 4.0 / eq15(true).tokens_per_second(1));
        // 3 x 1.1 + (50 + 51 + 52) x 0.001
        assert!((round().decode_seconds(50, 3) - 3.453).abs() < 1e-12);
    }

    #[test]
    fn a_step_is_the_sum_of_its_parts() {
        let mut work = StepWork { decode_sequences: 2, context_tokens: 150, ..Default::default() };
        work.add_prefill(100, 20);
        // 1 + 2 x 0.1 + 150 x 0.001 + 20 x 0.01 + 20 x (100 + 10) x 0.0001
        assert!((round().step_seconds(&work) - (1.0 + 0.2 + 0.15 + 0.2 + 0.22)).abs() < 1e-12);
    }

    #[test]
    fn bad_constants_are_named() {
        for (profile, field) in [
            (Profile { fixed_seconds: f64::NAN, ..round() }, "fixed_seconds"),
            (Profile { fixed_seconds: 0.0, ..round() }, "fixed_seconds"),
            (Profile { prefill_seconds_per_token: -1.0, ..round() }, "prefill_seconds_per_token"),
            (Profile { block_tokens: 0, ..round() }, "block_tokens"),
            (Profile { max_batch_tokens: 7, ..round() }, "max_batch_tokens"),
            (
                Profile { decode_throughput: Some(DecodeThroughput { alpha: 0.1, ..eq15(true) }), ..round() },
                "decode_throughput",
            ),
            (
                Profile {
                    decode_throughput: Some(DecodeThroughput { gamma: -50.0, ..eq15(true) }),
                    ..round()
                },
                "decode_throughput",
            ),
        ] {
            let message = profile.check().unwrap_err().to_string();
            assert!(message.contains(field), "{message}");
        }
        assert_eq!(round().check(), Ok(()));
    }
}

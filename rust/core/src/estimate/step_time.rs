//! The step-time model: seconds of one engine step from what is in its batch.
use super::attention_pairs;
use crate::ids::Seconds;

/// Step seconds = fixed + a x decode sequences + b x context tokens + c x prefill tokens + d x prefill attention pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Fixed part, seconds a step.
    pub fixed_seconds: f64,
    /// Seconds a decoding sequence.
    pub decode_seconds_per_sequence: f64,
    /// Seconds a context token of a decoding sequence.
    pub decode_seconds_per_context_token: f64,
    /// Seconds a prefill token.
    pub prefill_seconds_per_token: f64,
    /// Seconds a pair of (prefill token, token before it).
    pub prefill_seconds_per_attention_pair: f64,
    /// Tokens a step may hold.
    pub max_batch_tokens: f64,
    /// Sequences that a step may hold; infinite where it is not known.
    pub max_sequences: f64,
}

impl StepTime {
    /// Seconds of a step in which `decoding` sequences with `context` tokens make a token each, and nothing prefills.
    pub fn step(&self, decoding: f64, context: f64) -> Seconds {
        self.fixed_seconds
            + self.decode_seconds_per_sequence * decoding
            + self.decode_seconds_per_context_token * context
    }

    /// Seconds that prefills of so many tokens, with so many attention pairs, add to the steps that compute them.
    pub fn prefills(&self, tokens: f64, pairs: f64) -> Seconds {
        self.prefill_seconds_per_token * tokens + self.prefill_seconds_per_attention_pair * pairs
    }

    /// The same of `new` prompt tokens behind `hit` cached ones.
    pub fn prefill_seconds(&self, hit: f64, new: f64) -> Seconds {
        self.prefills(new, attention_pairs(hit, new))
    }

    /// Seconds until a prompt's first token, if `queued` prefill tokens go first, `decoding` sequences with `context` tokens run
    /// beside it, and of the prompt `hit` tokens are cached and `new` are not.
    pub fn ttft(&self, queued: f64, hit: f64, new: f64, decoding: f64, context: f64) -> Seconds {
        let prefill = queued + new;
        let budget = (self.max_batch_tokens - decoding).max(1.0);
        let steps = (prefill / budget).ceil().max(1.0);
        steps * self.step(decoding, context)
            + self.prefill_seconds_per_token * queued
            + self.prefill_seconds(hit, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_steps_by_hand() {
        let model = StepTime {
            fixed_seconds: 0.009,
            decode_seconds_per_sequence: 6e-5,
            decode_seconds_per_context_token: 3e-8,
            prefill_seconds_per_token: 1e-4,
            prefill_seconds_per_attention_pair: 1.3e-9,
            max_batch_tokens: 4096.0,
            max_sequences: f64::INFINITY,
        };
        // 1,000 queued + 4,000 new tokens beside 96 decodes of 1,000 tokens: two steps of 4,000 tokens each at most.
        let expected =
            2.0 * (0.009 + 96.0 * 6e-5 + 96_000.0 * 3e-8) + 0.5 + 1.3e-9 * 4000.0 * (512.0 + 2000.0);
        assert!((model.ttft(1000.0, 512.0, 4000.0, 96.0, 96_000.0) - expected).abs() < 1e-12);
    }
}

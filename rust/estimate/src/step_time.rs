//! Step-time model: seconds of one engine step, from its batch.
use crate::Seconds;
use crate::attention_pairs;

/// Step seconds = fixed + a x decode sequences + b x context tokens + c x prefill tokens
/// + d x prefill attention pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepTime {
    /// Fixed seconds per step.
    pub fixed_seconds: f64,
    /// Seconds per decoding sequence.
    pub decode_seconds_per_sequence: f64,
    /// Seconds per context token of a decoding sequence.
    pub decode_seconds_per_context_token: f64,
    /// Seconds per prefill token.
    pub prefill_seconds_per_token: f64,
    /// Seconds per pair of (prefill token, token before it).
    pub prefill_seconds_per_attention_pair: f64,
    /// Maximum tokens per step.
    pub max_batch_tokens: f64,
    /// Maximum sequences per step; infinite if unknown.
    pub max_sequences: f64,
}

/// Prefills that an instance computes before another one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Queued {
    /// Tokens left to compute.
    pub tokens: f64,
    /// Attention pairs of these tokens.
    pub pairs: f64,
}

impl StepTime {
    /// Returns the seconds of a step without prefill, in which `decoding` sequences with `context`
    /// tokens generate a token each.
    pub fn step(&self, decoding: f64, context: f64) -> Seconds {
        self.fixed_seconds
            + self.decode_seconds_per_sequence * decoding
            + self.decode_seconds_per_context_token * context
    }

    /// Returns the seconds that prefills of `tokens` tokens with `pairs` attention pairs add to
    /// their steps.
    pub fn prefills(&self, tokens: f64, pairs: f64) -> Seconds {
        self.prefill_seconds_per_token * tokens + self.prefill_seconds_per_attention_pair * pairs
    }

    /// Returns the seconds that a prefill of `new` prompt tokens after `hit` cached tokens adds to
    /// its steps.
    pub fn prefill_seconds(&self, hit: f64, new: f64) -> Seconds {
        self.prefills(new, attention_pairs(hit, new))
    }

    /// Returns the seconds until a prompt's first token, with `hit` cached and `new` uncached
    /// prompt tokens. The `queued` prefills go first, and `decoding` sequences with `context`
    /// tokens run beside it.
    pub fn ttft(&self, queued: Queued, hit: f64, new: f64, decoding: f64, context: f64) -> Seconds {
        let prefill = queued.tokens + new;
        let budget = (self.max_batch_tokens - decoding).max(1.0);
        let steps = (prefill / budget).ceil().max(1.0);
        steps * self.step(decoding, context)
            + self.prefills(queued.tokens, queued.pairs)
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
        // 1,000 queued + 4,000 new tokens beside 96 decodes of 1,000 tokens: two steps of at most
        // 4,000 tokens each. The queued tokens follow 20,000 others.
        let queued = Queued { tokens: 1000.0, pairs: attention_pairs(20_000.0, 1000.0) };
        let pairs = 1000.0 * 20_500.0 + 4000.0 * (512.0 + 2000.0);
        let expected = 2.0 * (0.009 + 96.0 * 6e-5 + 96_000.0 * 3e-8) + 0.5 + 1.3e-9 * pairs;
        assert!((model.ttft(queued, 512.0, 4000.0, 96.0, 96_000.0) - expected).abs() < 1e-12);
    }
}

//! Execution predictor (Libra, section 4.1): the time that an instance needs for all its assigned
//! work, in closed form.
//!
//! The paper simulates virtual passes: prefill chunks and one token of every active decode share a
//! pass under the token budget, until all is done. Each pass costs its step time, which is linear
//! in the work. So the sum over passes needs only their number:
//!
//! `T = fixed x passes + a x decodes + b x their contexts + c x prefill tokens + d x prefill pairs`
//!
//! `passes` is the larger of two numbers. The first is the passes for the decodes, at the
//! instance's batch size ("drawn from each instance's recent batching history"). The second is the
//! passes for the prefill, beside these decodes under the token budget. The batch size is assumed
//! constant: in a stream of requests, new requests replace finished ones. All decodes of a batch
//! are assumed equally far from their ends.
//!
//! The paper's N_max bounds the batch: [`StepTime::max_sequences`], which [`sequence_slots`] lowers
//! if memory holds fewer requests. The remaining requests wait for a slot. Without the bound, a
//! backlog looks like one large batch, in which decodes cost almost nothing.
use super::{Load, Whole};
use crate::estimate::{StepTime, attention_pairs};
use crate::ids::Seconds;

/// Work of one part of a request on one instance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    /// Prompt tokens to compute.
    pub prefill_tokens: f64,
    /// Attention pairs of these tokens.
    pub prefill_pairs: f64,
    /// Decode passes.
    pub decodes: f64,
    /// Context tokens of the decode passes, summed over the passes.
    pub contexts: f64,
}

impl Part {
    /// Returns the work of tokens `from..to` (prompt and output counted together). The leading
    /// `hit` tokens are cached.
    ///
    /// A pass computes one token's KV. A part that begins after the prompt's end first computes the
    /// KV of the last token that it received ([`crate::plan`]). So a later part needs
    /// `to - max(from, P)` decodes. If the prefill is on this instance and the request ends here,
    /// it
    /// needs one decode less, because the prefill makes the first token.
    pub fn of(prompt_tokens: u32, tokens: u32, hit: u32, from: u32, to: u32) -> Part {
        let p = f64::from(prompt_tokens);
        let begin = f64::from(from.max(hit).min(prompt_tokens));
        // The last prompt token is always computed if the part reaches the answer and includes the
        // prompt.
        let end = f64::from(to.min(prompt_tokens));
        let own_prompt = from < prompt_tokens;
        let least = if own_prompt && to >= prompt_tokens { 1.0 } else { 0.0 };
        let new = (end - begin).max(least);
        let from = f64::from(from.max(prompt_tokens));
        let mut decodes = (f64::from(to) - from).max(0.0);
        if own_prompt && to == tokens {
            decodes = (decodes - 1.0).max(0.0);
        }
        let ahead = if own_prompt { p + 1.0 } else { from };
        Part {
            prefill_tokens: new,
            prefill_pairs: attention_pairs(end - new, new),
            decodes,
            contexts: decodes * (ahead + (decodes - 1.0) / 2.0),
        }
    }

    /// Returns the sum of two parts on one instance.
    pub fn and(&self, other: &Part) -> Part {
        Part {
            prefill_tokens: self.prefill_tokens + other.prefill_tokens,
            prefill_pairs: self.prefill_pairs + other.prefill_pairs,
            decodes: self.decodes + other.decodes,
            contexts: self.contexts + other.contexts,
        }
    }
}

/// Returns the number of requests that run at once on an instance, at least 1: the model's maximum,
/// or the number that fits into `cache_tokens`. Each request counts with its mean context after
/// half of its remaining answer.
pub fn sequence_slots(load: &Load, step: &StepTime, cache_tokens: Option<f64>) -> f64 {
    let tokens = load.context_tokens + load.remaining_output_tokens / 2.0;
    match cache_tokens {
        Some(memory) if load.decoding > 0.0 && tokens > 0.0 => {
            step.max_sequences.min((memory * load.decoding / tokens).max(1.0))
        }
        _ => step.max_sequences,
    }
}

/// Precomputed load and rates of an instance.
#[derive(Clone, Copy, Debug)]
pub struct Instance {
    step: StepTime,
    /// Passes for the present decodes, queued prefill tokens with their attention pairs, and the
    /// cost of both without the fixed part.
    passes: f64,
    prefill_tokens: f64,
    prefill_pairs: f64,
    seconds: Seconds,
    /// Passes until a request that begins now has a slot.
    waiting_passes: f64,
    /// Sequences in the batch including the new one, and the token budget left by the present
    /// sequences.
    batch: f64,
    budget: f64,
    /// Seconds of a pass of the present batch with the new sequence, without the new sequence's
    /// context.
    pass_seconds: Seconds,
}

impl Instance {
    /// Returns `None` if a figure is NaN, negative or out of bounds, or a pass takes no time.
    pub fn new(load: &Load, step: &StepTime) -> Option<Instance> {
        let costs = [
            step.fixed_seconds,
            step.decode_seconds_per_sequence,
            step.decode_seconds_per_context_token,
            step.prefill_seconds_per_token,
            step.prefill_seconds_per_attention_pair,
        ];
        let sane = costs.iter().all(|cost| (0.0..1e6).contains(cost))
            && step.max_batch_tokens >= 1.0
            && step.max_sequences >= 1.0;
        // If prompts or answers cost nothing, the speeds are unknown.
        let known = costs[0] + costs[1] > 0.0 && costs[3] > 0.0;
        if !(load.check() && sane && known) {
            return None;
        }
        let present = load.decoding.max(1.0);
        let (remaining, each) = (load.remaining_output_tokens, load.remaining_output_tokens / present);
        let slots = step.max_sequences;
        let running = present.min(slots);
        // Sequences beside the new one, which has its own slot.
        let beside = load.decoding.min(slots - 1.0);
        let context = if beside < load.decoding {
            load.context_tokens * beside / load.decoding
        } else {
            load.context_tokens
        };
        // Each sequence starts with the mean context and grows by its remaining tokens.
        let contexts = remaining * (load.context_tokens / present + (each - 1.0).max(0.0) / 2.0);
        Some(Instance {
            step: *step,
            passes: remaining / running,
            waiting_passes: each * ((load.decoding - beside) / slots),
            prefill_tokens: load.queued_prefill_tokens,
            prefill_pairs: load.queued_prefill_pairs,
            seconds: step.decode_seconds_per_sequence * remaining
                + step.decode_seconds_per_context_token * contexts
                + step.prefill_seconds_per_token * load.queued_prefill_tokens
                + step.prefill_seconds_per_attention_pair * load.queued_prefill_pairs,
            batch: beside + 1.0,
            budget: (step.max_batch_tokens - load.decoding.min(slots)).max(1.0),
            pass_seconds: step.step(beside + 1.0, context),
        })
    }

    /// Returns T: seconds until all work is done, including `part`.
    pub fn seconds(&self, part: &Part) -> Seconds {
        let decode = self.passes + part.decodes / self.batch;
        let prefill = (self.prefill_tokens + part.prefill_tokens) / self.budget;
        self.seconds
            + self.step.fixed_seconds * decode.max(prefill)
            + self.step.decode_seconds_per_sequence * part.decodes
            + self.step.decode_seconds_per_context_token * part.contexts
            + self.step.prefill_seconds_per_token * part.prefill_tokens
            + self.step.prefill_seconds_per_attention_pair * part.prefill_pairs
    }

    /// Returns the seconds until `part` is done if it begins now: prefills go first come, first
    /// served beside the decodes, then each of its tokens takes a whole pass.
    pub fn until_done(&self, part: &Part) -> Seconds {
        let (mut seconds, mut passes) = (0.0, self.waiting_passes + part.decodes);
        if part.prefill_tokens > 0.0 {
            let tokens = self.prefill_tokens + part.prefill_tokens;
            passes += (tokens / self.budget).ceil();
            seconds += self.step.prefills(tokens, self.prefill_pairs + part.prefill_pairs);
        }
        seconds + passes * self.pass_seconds + self.step.decode_seconds_per_context_token * part.contexts
    }
}

/// Returns both parts of a request split at `token`, each with the prefix cached on its instance.
pub fn parts(whole: &Whole, token: u32) -> (Part, Part) {
    let Whole { prompt_tokens, first_hit_tokens, second_hit_tokens, .. } = *whole;
    let all = whole.tokens();
    (
        Part::of(prompt_tokens, all, first_hit_tokens, 0, token),
        Part::of(prompt_tokens, all, second_hit_tokens, token, all),
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn round() -> StepTime {
        StepTime {
            fixed_seconds: 0.01,
            decode_seconds_per_sequence: 1e-4,
            decode_seconds_per_context_token: 1e-6,
            prefill_seconds_per_token: 1e-4,
            prefill_seconds_per_attention_pair: 1e-8,
            max_batch_tokens: 512.0,
            max_sequences: f64::INFINITY,
        }
    }

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-9 * b.abs().max(1.0), "{a} is not {b}");
    }

    #[test]
    fn parts_by_hand() {
        // P = 100, D = 20. Split at 110: 100 prompt tokens and 10 decodes after 101 to 110 tokens;
        // then 10 after 110 to 119.
        let first = Part::of(100, 120, 0, 0, 110);
        assert_eq!(
            first,
            Part { prefill_tokens: 100.0, prefill_pairs: 5000.0, decodes: 10.0, contexts: 1055.0 }
        );
        let second = Part::of(100, 120, 0, 110, 120);
        assert_eq!(second, Part { decodes: 10.0, contexts: 1145.0, ..Part::default() });
        // Split at the prompt's end: no decode on the first instance and all 20 on the second. The
        // first of these computes the last prompt token again.
        assert_eq!(Part::of(100, 120, 0, 0, 100).decodes, 0.0);
        assert_eq!(Part::of(100, 120, 0, 100, 120).decodes, 20.0);
        // Split inside the prompt: the second instance computes 30 tokens after 70, and 19 decodes
        // follow.
        let late = Part::of(100, 120, 0, 70, 120);
        assert_eq!((late.prefill_tokens, late.prefill_pairs, late.decodes), (30.0, 30.0 * 85.0, 19.0));
        // Cached: the first instance holds 64; the second holds 96 and computes 4. If a prompt is
        // fully cached, its last token is still computed.
        assert_eq!(Part::of(100, 120, 64, 0, 70).prefill_tokens, 6.0);
        assert_eq!(Part::of(100, 120, 64, 0, 50).prefill_tokens, 0.0);
        assert_eq!(Part::of(100, 120, 96, 70, 120).prefill_tokens, 4.0);
        assert_eq!(Part::of(100, 120, 100, 0, 120).prefill_tokens, 1.0);
    }

    #[test]
    fn seconds_by_hand() {
        // 4 decodes of 1,000 tokens with 100 left each; queued: 1,000 prompt tokens, 500,000 pairs.
        let load = Load {
            queued_prefill_tokens: 1000.0,
            queued_prefill_pairs: 5e5,
            decoding: 4.0,
            context_tokens: 4000.0,
            remaining_output_tokens: 400.0,
        };
        let instance = Instance::new(&load, &round()).unwrap();
        let alone = 0.01 * 100.0 + 400.0 * 1e-4 + 400.0 * 1049.5 * 1e-6 + 0.1 + 0.005;
        close(instance.seconds(&Part::default()), alone);
        // 50 more decodes, at a fifth of a pass each.
        let part = Part { prefill_tokens: 100.0, prefill_pairs: 5000.0, decodes: 50.0, contexts: 6000.0 };
        close(instance.seconds(&part), alone + 0.01 * 10.0 + 0.005 + 0.006 + 0.01 + 5e-5);
        // 60,000 prompt tokens need more passes than the decodes: 61,000 / 508.
        let long = Part { prefill_tokens: 60_000.0, ..Part::default() };
        close(instance.seconds(&long), alone - 1.0 + 0.01 * 61_000.0 / 508.0 + 6.0);
        // The part's own end: 1,100 prompt tokens take 3 passes; each pass 10 ms + 5 x 0.1 ms +
        // 4,000 x 1 us.
        close(instance.until_done(&part), 0.11 + 0.005 + 5e-5 + 53.0 * 0.0145 + 0.006);
    }

    #[test]
    fn a_batch_has_no_more_requests_than_slots_by_hand() {
        // 40 requests of 1,000 tokens with 100 left each, 8 at a time.
        let load = Load {
            decoding: 40.0,
            context_tokens: 40_000.0,
            remaining_output_tokens: 4000.0,
            ..Load::default()
        };
        let bounded = StepTime { max_sequences: 8.0, ..round() };
        let of = |step: &StepTime| Instance::new(&load, step).unwrap();
        let work = 4000.0 * 1e-4 + 4000.0 * 1049.5 * 1e-6;
        close(of(&round()).seconds(&Part::default()), 0.01 * 100.0 + work);
        close(of(&bounded).seconds(&Part::default()), 0.01 * 500.0 + work);
        // 50 more decodes are 50 / 8 passes, not 50 / 41.
        let part = Part { decodes: 50.0, contexts: 6000.0, ..Part::default() };
        close(of(&bounded).seconds(&part), 0.01 * (500.0 + 6.25) + work + 0.005 + 0.006);
        // The part's own end: 33 requests go before it, 100 passes each at 8 a pass; then 50 passes
        // of 8 requests, 7 of them with 1,000 tokens.
        close(of(&bounded).until_done(&part), (33.0 / 8.0 * 100.0 + 50.0) * (0.01 + 8e-4 + 7e-3) + 0.006);
        // With at least as many slots as requests, the bound has no effect.
        let enough = StepTime { max_sequences: 41.0, ..round() };
        assert_eq!(of(&enough).seconds(&part), of(&round()).seconds(&part));
        assert_eq!(of(&enough).until_done(&part), of(&round()).until_done(&part));
        // Memory for 21,000 tokens: 20 requests of 1,050.
        assert_eq!(sequence_slots(&load, &round(), Some(21_000.0)), 20.0);
        assert_eq!(sequence_slots(&load, &bounded, Some(21_000.0)), 8.0);
        assert_eq!(sequence_slots(&load, &bounded, Some(10.0)), 1.0);
        assert_eq!(sequence_slots(&Load::default(), &bounded, Some(10.0)), 8.0);
        assert!(Instance::new(&load, &StepTime { max_sequences: 0.0, ..round() }).is_none());
    }

    #[test]
    fn an_idle_instance_takes_what_the_request_takes_alone() {
        let instance = Instance::new(&Load::default(), &round()).unwrap();
        let part = Part::of(256, 276, 0, 256, 276);
        close(instance.seconds(&part), instance.until_done(&part));
        close(instance.seconds(&part), 20.0 * 0.0101 + 20.0 * 265.5 * 1e-6);
    }

    #[test]
    fn what_is_no_figure_is_refused() {
        let good = Load { decoding: 4.0, ..Load::default() };
        assert!(Instance::new(&good, &round()).is_some());
        for bad in [f64::NAN, -1.0, f64::INFINITY] {
            assert!(Instance::new(&Load { decoding: bad, ..good }, &round()).is_none());
            assert!(Instance::new(&Load { queued_prefill_pairs: bad, ..good }, &round()).is_none());
            assert!(Instance::new(&good, &StepTime { fixed_seconds: bad, ..round() }).is_none());
        }
        assert!(Instance::new(&good, &StepTime { max_batch_tokens: f64::NAN, ..round() }).is_none());
        assert!(Instance::new(&good, &StepTime { prefill_seconds_per_token: 0.0, ..round() }).is_none());
    }
}

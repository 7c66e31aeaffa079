//! Number of requests at each stage on an instance, and their tokens.
use crate::ids::Seconds;
use crate::kv::tier::Tier;

/// Progress of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Bound to this instance; the previous segment runs on another instance.
    Coming,
    /// Placed, possibly sent; still in the engine's queue as far as known.
    Bound,
    /// Known to have left the engine's queue; in prefill.
    Scheduled,
    /// Past its first token.
    Decoding,
}

/// The ledger's entry of one open segment.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Prompt length in tokens.
    pub prompt_tokens: f64,
    /// Prompt tokens to compute on the instance, according to the KV index.
    pub new_tokens: f64,
    /// Output tokens counted.
    pub output_tokens: f64,
    /// Expected output tokens, if known.
    pub expected_output_tokens: Option<f64>,
    /// Progress of the segment.
    pub stage: Stage,
    /// Cached prompt tokens that the instance loads from a tier below the GPU.
    pub tier_tokens: f64,
    /// The tier that it loads them from.
    pub tier: Tier,
    /// Seconds until its first token, if its prefill ran alone and loaded tokens.
    pub load_seconds: Option<Seconds>,
    /// Hash of its LoRA adapter's name; 0: none.
    pub lora: u64,
    /// Hash of its tenant's name; 0: none.
    pub tenant: u64,
    /// Whether its answer comes whole, so that its first token is not seen.
    pub whole_answer: bool,
}

impl Entry {
    /// Returns the expected remaining output tokens; 0 if unknown.
    fn remaining(&self) -> f64 {
        self.expected_output_tokens.map_or(0.0, |e| (e - self.output_tokens).max(0.0))
    }

    /// Returns the tokens of the prompt and of the output so far.
    pub fn context(&self) -> f64 {
        self.prompt_tokens + self.output_tokens
    }

    /// Returns the prompt tokens that need no computation.
    pub fn cached(&self) -> f64 {
        (self.context() - self.new_tokens).max(0.0)
    }
}

/// The router's own requests on an instance. All numbers are integers in `f64`, so sums have no
/// rounding errors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Bound and not sent yet: another instance computes their prompts.
    pub coming: f64,
    /// Without a first token, still in the engine's queue as far as known.
    pub queued: f64,
    /// Without a first token, known to have left the engine's queue.
    pub scheduled: f64,
    /// Past their first token.
    pub decoding: f64,
    /// Requests in `queued` that have left the engine's queue by its last report (the oldest leave
    /// first).
    pub unqueued: f64,
    /// Context tokens of decoding requests, and of all others.
    pub decode_tokens: f64,
    pub bound_tokens: f64,
    /// Expected output tokens, if known: of requests that have left the queue, and of all others.
    pub remaining_tokens: f64,
    pub bound_remaining_tokens: f64,
}

impl Counts {
    /// Counts a segment at its stage.
    pub fn add(&mut self, entry: &Entry) {
        match entry.stage {
            Stage::Coming => self.coming += 1.0,
            Stage::Bound => self.queued += 1.0,
            Stage::Scheduled => self.scheduled += 1.0,
            Stage::Decoding => self.decoding += 1.0,
        }
        self.add_tokens(entry, 1.0);
    }

    /// Removes a segment from its stage.
    pub fn remove(&mut self, entry: &Entry) {
        match entry.stage {
            Stage::Coming => self.coming -= 1.0,
            Stage::Bound => {
                self.queued -= 1.0;
                // The oldest queued request leaves first; it is already counted in `unqueued`.
                self.unqueued = (self.unqueued - 1.0).max(0.0);
            }
            Stage::Scheduled => self.scheduled -= 1.0,
            Stage::Decoding => self.decoding -= 1.0,
        }
        self.add_tokens(entry, -1.0);
    }

    fn add_tokens(&mut self, entry: &Entry, sign: f64) {
        let decodes = entry.stage == Stage::Decoding;
        let context = if decodes { &mut self.decode_tokens } else { &mut self.bound_tokens };
        *context += sign * entry.context();
        let runs = decodes || entry.stage == Stage::Scheduled;
        let remaining = if runs { &mut self.remaining_tokens } else { &mut self.bound_remaining_tokens };
        *remaining += sign * entry.remaining();
    }

    /// Moves a segment to a later stage.
    pub fn advance(&mut self, entry: &mut Entry, to: Stage) {
        self.remove(entry);
        entry.stage = to;
        self.add(entry);
    }

    /// Records `tokens` more output tokens of a decoding segment.
    pub fn produced(&mut self, entry: &mut Entry, tokens: f64) {
        self.remaining_tokens -= entry.remaining();
        entry.output_tokens += tokens;
        self.remaining_tokens += entry.remaining();
        self.decode_tokens += tokens;
    }

    /// Returns the number of requests that the engine may have.
    pub fn at_engine(&self) -> f64 {
        self.queued + self.scheduled + self.decoding
    }
}

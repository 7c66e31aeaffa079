//! How many requests an instance has at each stage, and their tokens.

/// How far a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Bound here; the segment before it is at work elsewhere.
    Coming,
    /// Placed, perhaps sent; queued at the engine as far as we know.
    Bound,
    /// Known to have left the engine's queue; prefilling.
    Scheduled,
    /// Past its first token.
    Decoding,
}

/// What the ledger holds of one segment, as long as it is open.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Prompt length in tokens.
    pub prompt_tokens: f64,
    /// Prompt tokens to compute there, by the index's word.
    pub new_tokens: f64,
    /// Output tokens seen.
    pub output_tokens: f64,
    /// Output tokens it may produce, where known.
    pub expected_output_tokens: Option<f64>,
    /// How far it is.
    pub stage: Stage,
    /// Hash of its LoRA adapter's name and of its tenant's; 0: none.
    pub lora: u64,
    /// See above.
    pub tenant: u64,
}

impl Entry {
    /// Output tokens to come; 0 where nobody said.
    fn remaining(&self) -> f64 {
        self.expected_output_tokens.map_or(0.0, |e| (e - self.output_tokens).max(0.0))
    }

    /// Output tokens to come; without end where nobody said.
    pub fn left(&self) -> f64 {
        self.expected_output_tokens.map_or(f64::INFINITY, |e| (e - self.output_tokens).max(0.0))
    }

    /// Tokens of its prompt and its output so far.
    pub fn context(&self) -> f64 {
        self.prompt_tokens + self.output_tokens
    }

    /// Prompt tokens that are there already.
    pub fn cached(&self) -> f64 {
        (self.context() - self.new_tokens).max(0.0)
    }
}

/// The router's own requests on an instance. All numbers are integers in `f64`: adding and taking
/// away leaves no residue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    /// Bound here and not sent yet: their prompt is prefilled elsewhere.
    pub coming: f64,
    /// Without a first token, still in the engine's queue as far as we know.
    pub queued: f64,
    /// Without a first token, known to have left the engine's queue.
    pub scheduled: f64,
    /// Past their first token.
    pub decoding: f64,
    /// Of `queued`, those that have left the engine's queue by its last report (the oldest leave
    /// first).
    pub unqueued: f64,
    /// Context tokens of those that decode, and of all others.
    pub decode_tokens: f64,
    pub bound_tokens: f64,
    /// Output tokens to come, where known: of those that have left the queue, and of all others.
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

    /// Takes a segment off the stage that it is at.
    pub fn remove(&mut self, entry: &Entry) {
        match entry.stage {
            Stage::Coming => self.coming -= 1.0,
            Stage::Bound => {
                self.queued -= 1.0;
                // One of the queued is known to have left: the oldest, so one of those already
                // taken for gone.
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

    /// A segment goes on to a later stage.
    pub fn advance(&mut self, entry: &mut Entry, to: Stage) {
        self.remove(entry);
        entry.stage = to;
        self.add(entry);
    }

    /// A segment that decodes made `tokens` more.
    pub fn produced(&mut self, entry: &mut Entry, tokens: f64) {
        self.remaining_tokens -= entry.remaining();
        entry.output_tokens += tokens;
        self.remaining_tokens += entry.remaining();
        self.decode_tokens += tokens;
    }

    /// Requests that the engine may know of.
    pub fn at_engine(&self) -> f64 {
        self.queued + self.scheduled + self.decoding
    }
}

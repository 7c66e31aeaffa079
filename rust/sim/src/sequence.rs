//! A request inside the engine, and the store of these requests.
use crate::gaps::{Gaps, Makes};
use crate::pool::Held;
use crate::text::Rolling;
use lmetric_core::ids::Seconds;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    #[default]
    Vacant,
    Waiting,
    /// Its blocks are on their way from the host tier.
    Loading,
    Prefill,
    Decode,
    /// It decodes, but is left out of this step.
    Paused,
}

/// A request inside the engine. While it decodes, its length is not counted token by token: it
/// follows from the engine's tick.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    pub state: State,
    pub id: u64,
    pub priority: i64,
    /// Its rank in the local order when it last entered the queue.
    pub rank: i64,
    /// Its own SLO of a token, in seconds; None: the order's.
    pub own_slo: Option<Seconds>,
    /// Ordinal of the submission. It breaks ties of rank, and distinguishes requests in one slot.
    pub order: u64,
    /// Time of the submission, even after preemptions.
    pub arrival: Seconds,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Leading output tokens that are reasoning tokens. While it decodes: the tick from which its
    /// tokens are answer tokens (none if it ends before).
    pub think_tokens: u32,
    pub answers: u64,
    /// Prompt and output tokens so far; while decoding, their number at `since`.
    pub total: u32,
    /// Tick at which it began to decode.
    pub since: u64,
    /// Tick of its last token.
    pub end: u64,
    /// Tokens whose KV is computed; while decoding, all but the last.
    pub computed: u32,
    /// Cached prompt tokens at its first admission.
    pub cached: Option<u32>,
    /// Leading tokens whose KV is copied in at admission: from another engine or, after a
    /// preemption, from the host's memory.
    pub fetched: u32,
    /// Tokens whose KV the host's memory holds while it waits.
    pub in_host: u32,
    /// Tokens loaded from the host tier, in blocks that it holds while it waits.
    pub loaded: u32,
    /// Tokens that it did not have to compute at its first admission.
    pub spared: u32,
    /// Tokens computed for it before its last preemption, each counted once.
    pub attained: u32,
    /// Steps that the engine had run when it last entered the queue, and steps that it waited there
    /// until its last admission.
    pub queued_step: u64,
    pub waited_steps: u64,
    /// Count of slow steps when it began to make tokens of the current kind, its gaps before that,
    /// and the time of its last token before that.
    pub slow_mark: u64,
    pub gaps: Gaps,
    pub last_token: Option<Seconds>,
    /// The tick at which it got a token after a gap that was no step, and the gap's bin.
    pub waited: Option<(u64, usize)>,
    /// The latest plan that picked it, for orders that rank decodes.
    pub plan: u64,
    /// Position in the list of decoding or paused sequences, and in the list of sequences that
    /// cross a block edge at the same tick.
    pub at: u32,
    pub crossing_at: u32,
    /// Known hashes of its full blocks.
    pub chain: Vec<u64>,
    /// Start of the chain.
    pub root: u64,
    pub salt: Option<Arc<str>>,
    pub report_cached: bool,
    /// Its blocks.
    pub blocks: Held,
    /// Token IDs, if the request came with them, and the generator's state after them.
    pub tokens: Vec<u32>,
    pub read: Rolling,
}

impl Sequence {
    /// Returns the kind of token that the step at `tick` makes for it, if it decodes.
    pub fn makes(&self, tick: u64) -> Makes {
        if tick < self.answers { Makes::Thoughts } else { Makes::Answer }
    }

    /// Returns the kind of token that a prefill of all its tokens makes.
    pub fn prefill_makes(&self) -> Makes {
        if self.total < self.prompt_tokens + self.think_tokens { Makes::Thoughts } else { Makes::Answer }
    }

    pub fn total_at(&self, tick: u64) -> u32 {
        match self.state {
            State::Decode => self.total + (tick - self.since) as u32,
            _ => self.total,
        }
    }
}

/// Sequences by slot. Slots and their buffers are reused.
#[derive(Clone, Debug, Default)]
pub struct Sequences {
    slots: Vec<Sequence>,
    vacant: Vec<u32>,
}

impl Sequences {
    pub fn insert(&mut self) -> u32 {
        self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Sequence::default());
            self.slots.len() as u32 - 1
        })
    }

    pub fn remove(&mut self, slot: u32) {
        let sequence = &mut self[slot];
        let (mut chain, mut tokens) =
            (std::mem::take(&mut sequence.chain), std::mem::take(&mut sequence.tokens));
        chain.clear();
        tokens.clear();
        *sequence = Sequence { chain, tokens, ..Default::default() };
        self.vacant.push(slot);
    }
}

impl std::ops::Index<u32> for Sequences {
    type Output = Sequence;
    fn index(&self, slot: u32) -> &Sequence {
        &self.slots[slot as usize]
    }
}

impl std::ops::IndexMut<u32> for Sequences {
    fn index_mut(&mut self, slot: u32) -> &mut Sequence {
        &mut self.slots[slot as usize]
    }
}

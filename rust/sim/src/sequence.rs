//! One request inside the engine, and the store of them.
use crate::gaps::{Gaps, Makes};
use crate::text::Rolling;
use lmetric_core::ids::Seconds;
use std::sync::Arc;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    #[default]
    Vacant,
    Waiting,
    Prefill,
    Decode,
    /// It decodes, but not in this step.
    Paused,
}

/// A request. While it decodes, its length is not counted up token by token: it follows from the engine's tick.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    pub state: State,
    pub id: u64,
    pub priority: i64,
    /// Its rank in the local order when it last entered the queue.
    pub rank: i64,
    /// Ordinal of the submission: ties of rank are broken by it, and it tells requests in one slot apart.
    pub order: u64,
    /// When it came, whatever was put back since.
    pub arrival: Seconds,
    pub prompt_tokens: u32,
    pub output_tokens: u32,
    /// Of these, the first that are thoughts; while it decodes, the tick from which its tokens are the answer's (none, where it ends before).
    pub think_tokens: u32,
    pub answers: u64,
    /// Prompt and output tokens so far; while decoding, what they were at `since`.
    pub total: u32,
    /// Tick at which it began to decode.
    pub since: u64,
    /// Tick at which its last token comes.
    pub end: u64,
    /// Tokens whose KV is computed; while decoding, all but the last.
    pub computed: u32,
    /// Prompt tokens that came out of the cache when it was first admitted.
    pub cached: Option<u32>,
    /// Leading tokens whose KV comes from elsewhere when it is admitted: from another engine, or once it was put back from the host's memory.
    pub pulled: u32,
    /// Tokens whose KV the host's memory holds, while it waits.
    pub in_host: u32,
    /// Tokens it did not have to compute when it was first admitted.
    pub spared: u32,
    /// Tokens computed for it before it was last put back, each counted once.
    pub attained: u32,
    /// Steps that the engine had run when it last entered the queue, and those that it waited there until it was last taken off.
    pub queued_step: u64,
    pub waited_steps: u64,
    /// How many steps had been too slow when it began to make what it makes, its gaps before that, and when its last token before that was there.
    pub slow_mark: u64,
    pub gaps: Gaps,
    pub last_token: Option<Seconds>,
    /// The latest plan that picked it, under an order that ranks decodes.
    pub plan: u64,
    /// Place in the list of decoding or of paused sequences, and in the list of those that cross a block edge at the same tick.
    pub at: u32,
    pub crossing_at: u32,
    /// Hashes of its full blocks, as far as known.
    pub chain: Vec<u64>,
    /// Where the chain starts.
    pub root: u64,
    pub salt: Option<Arc<str>>,
    pub report_cached: bool,
    /// Its blocks, and how many leading ones carry their hash.
    pub blocks: Vec<u32>,
    pub named: usize,
    /// Token ids, where the request came with them, and what the generator has read.
    pub tokens: Vec<u32>,
    pub read: Rolling,
}

impl Sequence {
    /// What the step at `tick` makes for it, where it decodes.
    pub fn makes(&self, tick: u64) -> Makes {
        if tick < self.answers { Makes::Thoughts } else { Makes::Answer }
    }

    /// What the prefill of all that it has makes for it.
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

/// Sequences by slot. Slots and their buffers are used again.
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
        let (mut chain, mut blocks, mut tokens) = (
            std::mem::take(&mut sequence.chain),
            std::mem::take(&mut sequence.blocks),
            std::mem::take(&mut sequence.tokens),
        );
        chain.clear();
        blocks.clear();
        tokens.clear();
        *sequence = Sequence { chain, blocks, tokens, ..Default::default() };
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

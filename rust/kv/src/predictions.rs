//! Predictions of what the engines' caches hold, queued: who makes them holds the router, and
//! entering many blocks takes longer than a decision.
use crate::Slot;
use crate::expected::{Expected, PIECE};
use crate::index::KvIndex;
use crate::tiers::Tiers;
use std::collections::VecDeque;

/// Blocks that are queued, beside one chain, before they are entered at once.
const MAX_BLOCKS: usize = 1 << 16;

/// A prediction about blocks of an instance.
#[derive(Clone, Copy, Debug)]
pub enum Prediction {
    /// The blocks will be there: a prompt was sent there, or they were fetched.
    Holds {
        /// The instance.
        id: Slot,
        /// Leading blocks that it held when it was chosen; 0: not known.
        hit_blocks: u32,
    },
    /// The engine has computed the blocks, and will report them.
    Computed {
        /// The instance.
        id: Slot,
        /// As in [`Prediction::Holds`].
        hit_blocks: u32,
        /// Time of the first token in seconds.
        now: f64,
    },
    /// A chain up to this block is just used.
    Used {
        /// The instance.
        id: Slot,
        /// Whether it is used in the lower tiers, not on the GPU.
        below: bool,
    },
}

/// Predictions in the order in which they were made.
#[derive(Debug, Default)]
pub struct Predictions {
    /// Each with the number of its blocks.
    queued: VecDeque<(Prediction, usize)>,
    /// The blocks of all predictions.
    blocks: Vec<u64>,
    /// Blocks of predictions that are entered.
    entered: usize,
}

impl Predictions {
    /// Appends a prediction. Returns whether the queue was full before, so that it must be entered.
    /// A single long chain is entered after its router is released, and not by the holder.
    pub fn push(&mut self, prediction: Prediction, chain: &[u64]) -> bool {
        let was_full = self.blocks.len() > MAX_BLOCKS;
        self.queued.push_back((prediction, chain.len()));
        self.blocks.extend_from_slice(chain);
        was_full
    }

    /// Returns whether all predictions are entered.
    pub fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Enters predictions into the indexes: up to [`PIECE`] uses, or blocks of one prompt.
    pub fn enter_some(&mut self, gpu: &mut KvIndex, lower: &mut Tiers, expected: &mut Expected) {
        let mut left = PIECE;
        while left > 0
            && let Some((prediction, count)) = self.queued.front_mut()
        {
            let chain = &self.blocks[self.entered..][..*count];
            left -= 1;
            match prediction {
                Prediction::Holds { id, hit_blocks } => {
                    left = 0;
                    if let Some(held) = gpu.record_some(*id, chain, *hit_blocks, PIECE) {
                        *hit_blocks = held;
                        return;
                    }
                }
                Prediction::Computed { id, hit_blocks, now } => {
                    left = 0;
                    if let Some(held) = expected.enter_some((*id, *now), chain, *hit_blocks, gpu) {
                        *hit_blocks = held;
                        return;
                    }
                }
                Prediction::Used { id, below: false } => gpu.touch(*id, chain, 1),
                Prediction::Used { id, below: true } => lower.touch(*id, chain, 1),
            }
            self.entered += chain.len();
            self.queued.pop_front();
        }
        if self.queued.is_empty() {
            self.blocks.clear();
            self.entered = 0;
        }
    }
}

//! Predictions of what the engines' caches hold, queued: who makes them holds the router, and
//! entering many blocks takes tens of microseconds.
use crate::ids::InstanceId;
use crate::kv::index::KvIndex;
use crate::kv::tiers::Tiers;

/// Maximum blocks that are queued before they are entered at once.
const MAX_BLOCKS: usize = 1 << 16;

/// A prediction about blocks of an instance.
#[derive(Clone, Copy, Debug)]
pub(in crate::router) enum Prediction {
    /// A prompt was sent there, so its blocks will be there. The instance held the first
    /// `hit_blocks` when it was chosen.
    Sent { id: InstanceId, hit_blocks: u32 },
    /// The blocks of a prompt were fetched.
    Fetched { id: InstanceId },
    /// A chain up to this block is just used on the GPU.
    Used { id: InstanceId },
    /// A chain up to this block is just used in the lower tiers.
    UsedBelow { id: InstanceId },
}

/// Predictions in the order in which they were made.
#[derive(Debug, Default)]
pub(super) struct Predictions {
    /// Each with the number of its blocks.
    queued: Vec<(Prediction, usize)>,
    /// The blocks of all predictions.
    blocks: Vec<u64>,
}

impl Predictions {
    /// Appends a prediction. Returns whether the queue is full, so that it must be entered.
    pub fn push(&mut self, prediction: Prediction, chain: &[u64]) -> bool {
        self.queued.push((prediction, chain.len()));
        self.blocks.extend_from_slice(chain);
        self.blocks.len() > MAX_BLOCKS
    }

    /// Enters all predictions into the indexes; none is left.
    pub fn enter(&mut self, gpu: &mut KvIndex, lower: &mut Tiers) {
        let mut blocks = &self.blocks[..];
        for (prediction, count) in self.queued.drain(..) {
            let (chain, rest) = blocks.split_at(count);
            blocks = rest;
            match prediction {
                Prediction::Sent { id, hit_blocks } => gpu.record_hit(id, chain, hit_blocks),
                Prediction::Fetched { id } => gpu.record(id, chain),
                Prediction::Used { id } => gpu.touch(id, chain, count as u32),
                Prediction::UsedBelow { id } => lower.touch(id, chain, count as u32),
            }
        }
        self.blocks.clear();
    }
}

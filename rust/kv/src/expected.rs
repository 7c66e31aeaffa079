//! Blocks of prompts that engines have computed, before their events report them.
//!
//! Events come milliseconds after the first token, or a second over a slow link. Until then, the
//! index holds these blocks as expected ([`KvIndex::expect_some`]).
use crate::Slot;
use crate::index::KvIndex;
use std::collections::VecDeque;

/// Time in seconds for an event to report a computed prompt. The index drops blocks that no event
/// has reported by then.
const SECONDS: f64 = 2.0;
/// Blocks that are entered or dropped per lock of the caches, as for an event: about 3 us.
pub(crate) const PIECE: usize = 16;
/// Maximum pieces that are expected: 12 MB. More are not entered.
const MAX_PIECES: usize = 1 << 16;

/// Consecutive blocks of a prompt.
#[derive(Debug)]
struct Piece {
    computed_at: f64,
    instance: Slot,
    blocks: Box<[u64]>,
}

/// Blocks that the index expects, in the order in which they were entered.
#[derive(Debug, Default)]
pub struct Expected {
    pieces: VecDeque<Piece>,
    /// Slots whose engine has not reported its last piece: it may not cache prompts. Its prompts
    /// are not entered until it reports one.
    silent: Vec<bool>,
}

impl Expected {
    /// Enters blocks of a prompt that an engine has computed by `now` (in seconds), behind those
    /// that the instance holds. `hit_blocks`: their number; a wrong one costs a search. Returns
    /// `hit_blocks` of the next call, if more is left to do: each call enters or drops one piece.
    pub fn enter_some(
        &mut self,
        (instance, now): (Slot, f64),
        chain: &[u64],
        hit_blocks: u32,
        index: &mut KvIndex,
    ) -> Option<u32> {
        if self.drop_some(now, index) {
            return Some(hit_blocks);
        }
        if self.pieces.len() >= MAX_PIECES {
            return None;
        }
        let is_silent = self.silent.get(instance.index()) == Some(&true);
        let new = match is_silent {
            true => chain.len().saturating_sub(1)..chain.len(),
            false => index.expect_some(instance, chain, hit_blocks, PIECE),
        };
        if !new.is_empty() {
            let blocks = chain[new.clone()].into();
            self.pieces.push_back(Piece { computed_at: now, instance, blocks });
        }
        (new.len() == PIECE && new.end < chain.len()).then_some(new.end as u32)
    }

    /// Drops what no event has reported of a piece in time. Returns whether a piece was due.
    fn drop_some(&mut self, now: f64, index: &mut KvIndex) -> bool {
        if self.pieces.front().is_none_or(|piece| now - piece.computed_at <= SECONDS) {
            return false;
        }
        let Some(Piece { instance, blocks, .. }) = self.pieces.pop_front() else { return false };
        index.drop_expected(instance, &blocks);
        if self.silent.len() <= instance.index() {
            self.silent.resize(instance.index() + 1, false);
        }
        let last = blocks.last().expect("pieces have blocks");
        self.silent[instance.index()] = !index.holds(instance, *last);
        true
    }

    /// Forgets a removed instance.
    pub fn remove_instance(&mut self, instance: Slot) {
        self.pieces.retain(|piece| piece.instance != instance);
        self.silent.get_mut(instance.index()).into_iter().for_each(|silent| *silent = false);
    }
}

//! Steps under an order that ranks decodes, too: one order of all requests picks each step's batch,
//! as in UniBoost's Algorithm 1.
//!
//! From the first rank on, each request takes a slot in the batch and its tokens of the budget: one
//! token for a decode, the next chunk for a prompt. A decode without a slot pauses: it makes no
//! token in the step, and its KV stays. The profile's sequences bound the batch only; requests are
//! taken off the queue as long as memory lasts.
use super::{Admission, Engine};
use crate::gaps::GapHistogram;
use crate::sequence::State;
use std::cmp::Reverse;

impl Engine {
    /// Picks the decodes, prefills and waiting requests of the step.
    pub(super) fn plan_by_one_order(&mut self) {
        self.chunks.clear();
        (self.plan, self.picked) = (self.plan + 1, 0);
        let places = self.profile.max_sequences;
        let alone = self.prefilling.is_empty() && self.paused.is_empty() && self.waiting_requests == 0;
        if alone && self.decoding.len() as u32 <= places {
            return self.grow_decodes();
        }
        let running = self.prefilling.iter().chain(&self.decoding).chain(&self.paused);
        let mut running: Vec<_> = running.map(|&slot| (self.rank(slot), slot)).collect();
        running.sort_unstable();
        let mut open = true;
        let mut i = 0;
        while self.picked + (self.chunks.len() as u32) < places && self.budget() > 0 {
            let waiting = if open { self.next_waiting() } else { None };
            let next = running.get(i).copied();
            if let Some((rank, slot)) = next
                && waiting.is_none_or(|waiting| rank < (waiting.0, waiting.1))
            {
                i += 1;
                open &= self.pick(slot);
            } else if let Some((.., slot)) = waiting {
                open = self.admit_or_displace(slot, &running[i..]);
            } else {
                break;
            }
        }
        for at in (0..self.decoding.len()).rev() {
            if self.sequences[self.decoding[at]].plan != self.plan {
                self.pause(self.decoding[at]);
            }
        }
    }

    /// Gives a running request its slot and its tokens in the step. Returns false if a request was
    /// preempted for the blocks that it needs.
    fn pick(&mut self, slot: u32) -> bool {
        let sequence = &self.sequences[slot];
        let total = sequence.total_at(self.tick);
        let before = self.events.preempted.len();
        match sequence.state {
            State::Prefill => {
                self.plan_prefill(slot);
            }
            State::Decode | State::Paused => {
                let blocks = total.div_ceil(self.profile.block_tokens) as usize;
                if self.settings.admission == Admission::Vllm && sequence.blocks.len() < blocks {
                    self.name_blocks(slot, total - 1);
                    self.grow(slot, total);
                }
                match self.sequences[slot].state {
                    State::Waiting => return false, // it was preempted itself
                    State::Paused => self.resume(slot),
                    _ => {}
                }
                self.picked += 1;
            }
            // It was preempted for a request picked before it.
            _ => return true,
        }
        self.sequences[slot].plan = self.plan;
        self.events.preempted.len() == before
    }

    /// Leaves a decode out of the step.
    fn pause(&mut self, slot: u32) {
        let (gaps, total) = (self.gaps_of(slot), self.sequences[slot].total_at(self.tick));
        self.leave_decodes(slot);
        let sequence = &mut self.sequences[slot];
        (sequence.state, sequence.total, sequence.gaps) = (State::Paused, total, gaps);
        sequence.last_token = Some(self.begun);
        sequence.at = self.paused.len() as u32;
        self.paused.push(slot);
        self.paused_tokens += u64::from(total);
    }

    /// Resumes a paused decode.
    fn resume(&mut self, slot: u32) {
        self.leave_paused(slot);
        self.enter_decodes(slot);
        let sequence = &self.sequences[slot];
        self.ends.push(Reverse((sequence.end, sequence.order, slot)));
        self.resumed.push(slot);
    }

    /// Removes a sequence from the paused ones.
    pub(super) fn leave_paused(&mut self, slot: u32) {
        let (at, total) = (self.sequences[slot].at, self.sequences[slot].total);
        self.paused_tokens -= u64::from(total);
        self.paused.swap_remove(at as usize);
        if let Some(&moved) = self.paused.get(at as usize) {
            self.sequences[moved].at = at;
        }
    }

    /// Counts the gaps of requests that the step resumed: they waited longer than the step for
    /// their token. Such requests are in steps of their own.
    pub(super) fn count_pauses(&mut self) {
        for slot in std::mem::take(&mut self.resumed) {
            let sequence = &mut self.sequences[slot];
            if sequence.state != State::Decode {
                continue; // aborted while the step ran
            }
            let Some(before) = sequence.last_token.take() else { continue };
            let makes = sequence.makes(self.tick - 1);
            let waited = self.events.end - before;
            let gap = self.gaps.instead(waited, makes);
            sequence.waited = Some((self.tick, GapHistogram::place(waited)));
            sequence.gaps = sequence.gaps.and(gap);
            sequence.slow_mark = self.gaps.mark(makes);
        }
    }
}

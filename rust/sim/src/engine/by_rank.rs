//! Steps under an order that preempts: the prefills that run and the requests that wait share the budget by rank.
use super::order::{Exchange, Preemption};
use super::plan::Freed;
use super::{Admission, Chunk, Engine};
use crate::sequence::State;

impl Engine {
    /// Plans prefills and takes requests off the queue, lowest rank first. One that waits and finds no room gets that of running
    /// ones which yield, if they have enough; the queue is closed where not, and behind a request that was put back in this step.
    pub(super) fn plan_by_rank(&mut self) {
        self.chunks.clear();
        let mut prefills: Vec<_> = self.prefilling.iter().map(|&slot| (self.rank(slot), slot)).collect();
        prefills.sort_unstable();
        let mut open = self.events.preempted.is_empty();
        let mut i = 0;
        loop {
            let waiting = if open { self.next_waiting() } else { None };
            let running = prefills.get(i).copied();
            if let Some((rank, slot)) = running
                && waiting.is_none_or(|waiting| rank < (waiting.0, waiting.1))
            {
                i += 1;
                open &= self.plan_prefill(slot);
            } else if let Some((.., slot)) = waiting {
                open = self.admit_or_displace(slot, &prefills[i..]);
            } else {
                return;
            }
        }
    }

    /// Gives a running prefill its share of the budget. False: a request was put back for the blocks it needs.
    fn plan_prefill(&mut self, slot: u32) -> bool {
        let sequence = &self.sequences[slot];
        let tokens = self.share(sequence.computed, (sequence.total - sequence.computed).min(self.budget()));
        if sequence.state != State::Prefill || tokens == 0 {
            return true;
        }
        let (before, order) = (sequence.computed, sequence.order);
        let preempted = self.events.preempted.len();
        if self.settings.admission == Admission::Vllm {
            // Those planned before it have lower ranks: none of them is put back.
            self.grow(slot, before + tokens);
        }
        if self.sequences[slot].state == State::Prefill {
            self.chunks.push(Chunk { slot, order, before, tokens });
            self.name_blocks(slot, before + tokens);
        }
        self.events.preempted.len() == preempted
    }

    /// Admits the request that is next in the queue, in the place of others if need be. False: there is no room for it.
    fn admit_or_displace(&mut self, slot: u32, prefills: &[((i64, u64), u32)]) -> bool {
        if self.events.preempted.contains(&self.sequences[slot].id) {
            return false;
        }
        self.look_up(slot);
        let room = self.fits(slot, Freed::default()) || self.displace(slot, prefills);
        if room {
            self.admit_next(slot);
        }
        room
    }

    /// Puts back as many running requests as a waiting one needs to get in: of the decodes and of the prefills that have no share of
    /// this step, those that yield to it, the highest rank first. False, and nothing is done: they do not make room enough, it does not
    /// pay, or no token of the budget is left.
    fn displace(&mut self, slot: u32, prefills: &[((i64, u64), u32)]) -> bool {
        let Some(rules) = self.settings.order.rules().preemption() else { return false };
        if self.budget() == 0 {
            return false;
        }
        let running = prefills.iter().map(|(_, slot)| slot).chain(&self.decoding);
        let mut victims: Vec<_> = running
            .filter(|&&other| self.yields(rules, other, self.sequences[slot].rank))
            .map(|&other| (self.rank(other), other))
            .collect();
        victims.sort_unstable_by(|a, b| b.cmp(a));
        let mut freed = Freed::default();
        for i in 0..victims.len() {
            self.add_freed(victims[i].1, &mut freed);
            if self.fits(slot, freed) {
                let pays = rules.pays(&self.exchange(slot, &victims[..=i]));
                victims[..=i].iter().filter(|_| pays).for_each(|&(_, victim)| self.preempt(victim));
                return pays;
            }
        }
        false
    }

    fn yields(&self, rules: &dyn Preemption, slot: u32, waiting: i64) -> bool {
        let sequence = &self.sequences[slot];
        sequence.state != State::Waiting && rules.yields(&self.job(slot), sequence.rank, waiting)
    }

    fn exchange(&self, slot: u32, victims: &[((i64, u64), u32)]) -> Exchange {
        let running = self.prefilling.iter().chain(&self.decoding);
        let lost =
            |&(_, victim): &(_, u32)| self.profile.prefill_seconds_behind(0, self.job(victim).computed);
        Exchange {
            waiting: self.sequences[slot].rank,
            least: running.map(|&slot| self.rank(slot).0).min().unwrap_or(i64::MAX),
            running: self.running(),
            lost_seconds: victims.iter().map(lost).sum(),
        }
    }

    /// Adds what a running request would leave to the one that was looked up last.
    fn add_freed(&self, slot: u32, freed: &mut Freed) {
        let sequence = &self.sequences[slot];
        freed.requests += 1;
        freed.decodes += u32::from(sequence.state == State::Decode);
        freed.tokens += u64::from(sequence.total_at(self.tick));
        // What both hold makes no room. Equal blocks stand at equal places, for a block's hash covers all before it.
        let own =
            |&(i, &block): &(usize, &u32)| !self.pool.is_shared(block) && self.found.get(i) != Some(&block);
        freed.blocks += sequence.blocks.iter().enumerate().filter(own).count() as u32;
    }

    /// Decode steps for which nothing that runs comes to yield to what waits.
    pub(super) fn firm_steps(&self) -> u32 {
        match self.settings.order.rules().preemption() {
            Some(rules) if self.waiting_requests > 0 => {
                self.decoding.iter().map(|&slot| rules.firm_steps(&self.job(slot))).min().unwrap_or(u32::MAX)
            }
            _ => u32::MAX,
        }
    }
}

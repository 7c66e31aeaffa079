//! Steps under an order that preempts: running prefills and waiting requests share the budget by
//! rank.
use super::order::{Exchange, Preemption};
use super::plan::Freed;
use super::{Admission, Chunk, Engine};
use crate::sequence::State;

impl Engine {
    /// Plans prefills and takes requests off the queue, lowest rank first. A waiting request
    /// without room gets the room of running requests that yield, if that is enough. If it is not
    /// enough, or after a preemption in this step, the queue is closed.
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

    /// Gives a running prefill its share of the budget. Returns false if a request was preempted
    /// for the blocks it needs.
    pub(super) fn plan_prefill(&mut self, slot: u32) -> bool {
        let sequence = &self.sequences[slot];
        let tokens = self.share(sequence.computed, (sequence.total - sequence.computed).min(self.budget()));
        if sequence.state != State::Prefill || tokens == 0 {
            return true;
        }
        let (before, order) = (sequence.computed, sequence.order);
        let preempted = self.events.preempted.len();
        if self.settings.admission == Admission::Vllm {
            self.grow(slot, before + tokens);
            // Prefills planned earlier have lower ranks, but preempting one of them may be cheaper.
            let sequences = &self.sequences;
            self.chunks.retain(|chunk| sequences[chunk.slot].state == State::Prefill);
        }
        if self.sequences[slot].state == State::Prefill {
            self.chunks.push(Chunk { slot, order, before, tokens });
            self.name_blocks(slot, before + tokens);
        }
        self.events.preempted.len() == preempted
    }

    /// Admits the next request of the queue, in exchange for others if necessary. Returns false if
    /// there is no room for it.
    pub(super) fn admit_or_displace(&mut self, slot: u32, prefills: &[((i64, u64), u32)]) -> bool {
        if self.events.preempted.contains(&self.sequences[slot].id) {
            return false;
        }
        self.look_up(slot);
        let fits = self.fits(slot, Freed::default());
        let Some(victims) = (if fits { Some(vec![]) } else { self.displaced(slot, prefills) }) else {
            return false;
        };
        // Preempted requests may be next now.
        self.waiting.pop();
        if !victims.is_empty() {
            victims.into_iter().for_each(|victim| self.preempt(victim));
            self.look_up(slot); // the same blocks, in other runs
        }
        self.admit(slot);
        true
    }

    /// Returns the running requests that must go back so that a waiting request gets in, the last
    /// first. They are the requests that yield to it, among the decodes and `others`, which have no
    /// share of this step. None: they do not free enough, the exchange does not pay, or no token of
    /// the budget is left. Under an order that ranks decodes, `others` are all requests that the
    /// step has not picked yet.
    fn displaced(&self, slot: u32, others: &[((i64, u64), u32)]) -> Option<Vec<u32>> {
        let rules = self.settings.order.rules().preemption().filter(|_| self.budget() > 0)?;
        let ranked = self.settings.order.rules().ranks_decodes();
        let decoding = if ranked { &[][..] } else { &self.decoding };
        let running = others.iter().map(|(_, slot)| slot).chain(decoding);
        let mut victims: Vec<_> = running
            .filter(|&&other| self.yields(rules, other, self.sequences[slot].rank))
            .map(|&other| (self.last(other), other))
            .collect();
        victims.sort_unstable_by(|a, b| b.cmp(a));
        let mut freed = Freed::default();
        for i in 0..victims.len() {
            self.add_freed(victims[i].1, &mut freed);
            if self.fits(slot, freed) {
                let pays = rules.pays(&self.exchange(slot, &victims[..=i]));
                return pays.then(|| victims[..=i].iter().map(|&(_, victim)| victim).collect());
            }
        }
        None
    }

    fn yields(&self, rules: &dyn Preemption, slot: u32, waiting: i64) -> bool {
        let sequence = &self.sequences[slot];
        sequence.state != State::Waiting && rules.yields(&self.job(slot), sequence.rank, waiting)
    }

    fn exchange(&self, slot: u32, victims: &[((i64, u64), u32)]) -> Exchange {
        let running = self.prefilling.iter().chain(&self.decoding).chain(&self.paused);
        Exchange {
            waiting: self.sequences[slot].rank,
            least: running.map(|&slot| self.rank(slot).0).min().unwrap_or(i64::MAX),
            running: self.running(),
            lost_seconds: victims.iter().map(|&(_, victim)| self.lost_seconds(victim)).sum(),
        }
    }

    /// Adds what a running request would free for the request looked up last.
    fn add_freed(&self, slot: u32, freed: &mut Freed) {
        let sequence = &self.sequences[slot];
        freed.requests += 1;
        let has_token = sequence.state == State::Decode && !self.settings.order.rules().ranks_decodes();
        freed.decodes += u32::from(has_token);
        freed.tokens += u64::from(sequence.total_at(self.tick));
        // Blocks that both hold free no memory.
        freed.blocks += self.pool.own_blocks(&sequence.blocks, &self.found);
    }

    /// Returns (rank, order) for preemption, the greatest first: less the lost seconds, if the
    /// order weighs them.
    pub(super) fn last(&self, slot: u32) -> (i64, u64) {
        let (rank, order) = self.rank(slot);
        let weighs = self.settings.order.rules().preemption().is_some_and(|rules| rules.weighs_loss());
        (rank - if weighs { (self.lost_seconds(slot) * 1e9) as i64 } else { 0 }, order)
    }

    /// Returns the decode steps during which no running request is preempted for the next request
    /// of the queue. Running requests that yield now and are still here free too little, and will
    /// not free more. Or the exchange does not pay, and will not while the yielding requests go
    /// back in the same order.
    pub(super) fn firm_steps(&mut self) -> u32 {
        let waiting = self.next_waiting();
        let Some(rules) = self.settings.order.rules().preemption() else { return u32::MAX };
        let mut firm = u32::MAX;
        if let Some(paused) = self.paused.iter().map(|&slot| self.rank(slot).0).min() {
            let steps = self.decoding.iter().map(|&slot| rules.firm_steps(&self.job(slot), paused));
            firm = steps.fold(firm, u32::min);
        }
        let Some((waiting, ..)) = waiting else { return firm };
        let mut victims = Vec::new();
        for &slot in &self.decoding {
            if self.yields(rules, slot, waiting) {
                victims.push((self.last(slot), slot));
            } else {
                firm = firm.min(rules.firm_steps(&self.job(slot), waiting));
            }
        }
        victims.sort_unstable_by(|a, b| b.cmp(a));
        let pairs = victims.windows(2).map(|pair| (self.job(pair[0].1), self.job(pair[1].1)));
        pairs.fold(firm, |steps, (last, next)| steps.min(rules.lasting_steps(&last, &next)))
    }
}

//! Prefill backlogs: prefills of each instance not known to be over, and their drain rate between
//! events.
use super::counts::Entry;
use crate::estimate::{PrefillRate, Queued, attention_pairs};
use crate::ids::Seconds;
use crate::wide::greater;
use multiversion::multiversion;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;

/// A prefill not known to be over.
#[derive(Clone, Copy, Debug)]
struct Prefill {
    ticket: u32,
    /// Expected tokens to compute, and their attention pairs.
    tokens: f64,
    pairs: f64,
    /// Whether the prefill waits for a prefix fetch; later prefills do not wait for it.
    waits: bool,
    /// Whether its first token is seen.
    seen: bool,
    /// Learned seconds that it takes.
    seconds: Seconds,
    /// Tokens still to compute when the backlog was last settled.
    left: f64,
    /// Learned seconds per token; 0 if prefills do not drain between events.
    seconds_per_token: f64,
}

impl Prefill {
    fn left_seconds(&self) -> Seconds {
        self.left * self.seconds_per_token
    }

    /// Attention pairs of `tokens` of its tokens.
    fn pairs_of(&self, tokens: f64) -> f64 {
        if self.tokens > 0.0 { self.pairs * tokens / self.tokens } else { 0.0 }
    }
}

/// The prefills of one instance, in the order of placement.
#[derive(Clone, Debug, Default)]
struct Queue {
    prefills: VecDeque<Prefill>,
    /// Seconds that the remaining tokens take.
    left_seconds: Seconds,
    /// Time at which the first prefill became the first.
    head_since: Seconds,
}

/// Prefills that ended at the same event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::router) struct Ended {
    /// Computed tokens, and their attention pairs.
    pub tokens: f64,
    pub pairs: f64,
    /// Seconds since the first of the prefills began.
    pub seconds: Seconds,
    /// Whether there was only one prefill.
    pub single: bool,
}

/// Remaining work of some prefills: part of the sums of a backlog.
#[derive(Clone, Copy, Debug, Default)]
struct Rest {
    tokens: f64,
    pairs: f64,
    seconds: Seconds,
}

impl Rest {
    fn add(&mut self, prefill: &Prefill) {
        self.tokens += prefill.left;
        self.pairs += prefill.pairs_of(prefill.left);
        self.seconds += prefill.left_seconds();
    }

    fn of(prefill: &Prefill) -> Rest {
        let mut rest = Rest::default();
        rest.add(prefill);
        rest
    }
}

/// The prefill backlogs of all instances, by slot.
#[derive(Clone, Debug, Default)]
pub(in crate::router) struct Backlogs {
    queues: Vec<Queue>,
    /// Tokens left when a backlog was last settled, the time of the settlement, and the drain rate
    /// since. Separate columns allow one vectorized pass per decision.
    left: Vec<f64>,
    since: Vec<f64>,
    rate: Vec<f64>,
    /// Attention pairs of the tokens left.
    pairs: Vec<f64>,
    /// Remaining prefill tokens of peer routers and of external requests, as last reported, and the
    /// attention pairs of peer routers' tokens.
    others_left: Vec<f64>,
    others_pairs: Vec<f64>,
    /// Prefill rate in tokens/s until a rate is learned; 0 if exact progress is reported and
    /// nothing drains between events.
    prior_rate: f64,
}

impl Backlogs {
    /// Creates empty backlogs.
    pub fn new(prior_rate: f64) -> Backlogs {
        Backlogs { prior_rate, ..Backlogs::default() }
    }

    /// Makes room for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.queues.resize_with(slots, Queue::default);
        let Backlogs { left, since, rate, pairs, others_left, others_pairs, .. } = self;
        for column in [left, since, rate, pairs, others_left, others_pairs] {
            column.resize(slots, 0.0);
        }
    }

    /// Clears the backlog of a slot, for its next instance.
    pub fn clear(&mut self, slot: usize) {
        self.queues[slot] = Queue::default();
        (self.left[slot], self.since[slot], self.rate[slot]) = (0.0, 0.0, self.prior_rate);
        (self.pairs[slot], self.others_left[slot], self.others_pairs[slot]) = (0.0, 0.0, 0.0);
    }

    /// Returns whether no prefill is known to run.
    pub fn is_empty(&self, slot: usize) -> bool {
        self.queues[slot].prefills.is_empty()
    }

    /// Adds a placed prefill.
    pub fn push(&mut self, slot: usize, ticket: u32, entry: &Entry, learned: &PrefillRate, now: Seconds) {
        let queue = &mut self.queues[slot];
        if queue.prefills.iter().all(|prefill| prefill.waits) {
            queue.head_since = now;
        }
        self.settle(slot, now);
        let tokens = entry.new_tokens;
        self.left[slot] += tokens;
        let pairs = attention_pairs(entry.cached(), tokens);
        self.pairs[slot] += pairs;
        let seconds_per_token = seconds_per_token(learned, tokens, pairs, self.prior_rate);
        let queue = &mut self.queues[slot];
        queue.left_seconds += tokens * seconds_per_token;
        queue.prefills.push_back(Prefill {
            ticket,
            tokens,
            pairs,
            waits: false,
            seen: !entry.whole_answer,
            seconds: tokens * seconds_per_token,
            left: tokens,
            seconds_per_token,
        });
        self.drain_rate(slot);
    }

    /// Marks the last placed prefill as waiting for a prefix fetch.
    pub fn wait(&mut self, slot: usize) {
        if let Some(last) = self.queues[slot].prefills.back_mut() {
            last.waits = true;
        }
    }

    /// Ends a prefill's wait for a prefix fetch: the prefill moves behind all prefills placed
    /// since.
    pub fn requeue(&mut self, slot: usize, ticket: u32, entry: &Entry, learned: &PrefillRate, now: Seconds) {
        self.settle(slot, now);
        if let Some((_, gone)) = self.take(slot, ticket) {
            self.take_off(slot, Rest::of(&gone));
        }
        self.push(slot, ticket, entry, learned, now);
    }

    /// Sets the tokens of a prefill still to compute.
    pub fn set_left(&mut self, slot: usize, ticket: u32, left: f64, now: Seconds) {
        self.settle(slot, now);
        let queue = &mut self.queues[slot];
        if let Some(prefill) = queue.prefills.iter_mut().find(|p| p.ticket == ticket) {
            self.left[slot] = (self.left[slot] - prefill.left + left).max(0.0);
            self.pairs[slot] = (self.pairs[slot] + prefill.pairs_of(left - prefill.left)).max(0.0);
            queue.left_seconds += prefill.seconds_per_token * (left - prefill.left);
            prefill.left = left;
            self.drain_rate(slot);
        }
    }

    /// Records that `tokens` more of a prefill are computed.
    pub fn computed(&mut self, slot: usize, ticket: u32, tokens: f64, now: Seconds) {
        self.settle(slot, now);
        let queue = &mut self.queues[slot];
        if let Some(prefill) = queue.prefills.iter_mut().find(|p| p.ticket == ticket) {
            let done = tokens.min(prefill.left);
            prefill.left -= done;
            self.left[slot] = (self.left[slot] - done).max(0.0);
            self.pairs[slot] = (self.pairs[slot] - prefill.pairs_of(done)).max(0.0);
            queue.left_seconds -= done * prefill.seconds_per_token;
            self.drain_rate(slot);
        }
    }

    /// Ends a prefill that will have no first token. Returns false if there is none.
    pub fn cancel(&mut self, slot: usize, ticket: u32, now: Seconds) -> bool {
        self.settle(slot, now);
        let Some((place, gone)) = self.take(slot, ticket) else { return false };
        if place == 0 && !gone.waits {
            self.queues[slot].head_since = now;
        }
        self.take_off(slot, Rest::of(&gone));
        true
    }

    /// Ends a prefill whose first token arrived, and all prefills placed before it. Engines begin
    /// prefills in order, and requests without streaming send no first token.
    pub fn end_through(&mut self, slot: usize, ticket: u32, now: Seconds) -> Option<Ended> {
        self.settle(slot, now);
        let queue = &mut self.queues[slot];
        let last = queue.prefills.iter().position(|p| p.ticket == ticket)?;
        let mut ended = Ended { tokens: 0.0, pairs: 0.0, seconds: 0.0, single: false };
        let (mut rest, mut prefills) = (Rest::default(), 0);
        let mut waiting: SmallVec<[Prefill; 4]> = SmallVec::new();
        for gone in queue.prefills.drain(..=last) {
            if gone.waits && gone.ticket != ticket {
                waiting.push(gone);
                continue;
            }
            prefills += 1;
            ended.tokens += gone.tokens;
            ended.pairs += gone.pairs;
            rest.add(&gone);
        }
        waiting.into_iter().rev().for_each(|prefill| queue.prefills.push_front(prefill));
        ended.seconds = now - queue.head_since;
        ended.single = prefills == 1;
        queue.head_since = now;
        self.take_off(slot, rest);
        Some(ended)
    }

    /// Recomputes the drain time with the learned rate.
    pub fn price(&mut self, slot: usize, learned: &PrefillRate) {
        let queue = &mut self.queues[slot];
        for prefill in &mut queue.prefills {
            prefill.seconds_per_token =
                seconds_per_token(learned, prefill.tokens, prefill.pairs, self.prior_rate);
            prefill.seconds = prefill.tokens * prefill.seconds_per_token;
        }
        queue.left_seconds = queue.prefills.iter().map(Prefill::left_seconds).sum();
        self.pairs[slot] = queue.prefills.iter().map(|prefill| prefill.pairs_of(prefill.left)).sum();
        self.drain_rate(slot);
    }

    /// Sets the remaining prefills of peer routers and of external requests.
    pub fn set_others(&mut self, slot: usize, others: Queued) {
        (self.others_left[slot], self.others_pairs[slot]) = (others.tokens, others.pairs);
    }

    /// Returns the remaining tokens of the router's own prefills at `now`.
    pub fn own_tokens(&self, slot: usize, now: Seconds) -> f64 {
        Drains { others_left: &[0.0], ..self.drains(slot..slot + 1) }.tokens(0, now)
    }

    /// Returns the remaining tokens at `now`, including those of others.
    pub fn tokens(&self, slot: usize, now: Seconds) -> f64 {
        self.own_tokens(slot, now) + self.others_left[slot]
    }

    /// Returns the columns that the remaining tokens of `slots` follow from.
    #[inline]
    pub fn drains(&self, slots: Range<usize>) -> Drains<'_> {
        Drains {
            left: &self.left[slots.clone()],
            since: &self.since[slots.clone()],
            rate: &self.rate[slots.clone()],
            others_left: &self.others_left[slots],
        }
    }

    /// Returns the seconds for which the next first token is late; 0: it is not, or none is
    /// expected.
    pub fn overdue(&self, slot: usize, now: Seconds) -> Seconds {
        let queue = &self.queues[slot];
        let mut expected = queue.head_since;
        let mut prefills = queue.prefills.iter().filter(|prefill| !prefill.waits);
        let seen = prefills.any(|prefill| {
            expected += prefill.seconds;
            prefill.seen
        });
        if seen { (now - expected).max(0.0) } else { 0.0 }
    }

    /// Returns whether prefills run whose first tokens are not seen, and no others.
    pub fn is_unseen(&self, slot: usize) -> bool {
        let prefills = &self.queues[slot].prefills;
        !prefills.is_empty() && prefills.iter().all(|prefill| !prefill.seen)
    }

    /// Returns the attention pairs of the router's own prefills at `now`. Between settlements, they
    /// drain in proportion to the tokens.
    #[inline]
    pub fn own_pairs(&self, slot: usize, now: Seconds) -> f64 {
        let left = self.left[slot];
        let drained = self.rate[slot] * greater(now - self.since[slot], 0.0);
        if left > 0.0 { self.pairs[slot] * (greater(left - drained, 0.0) / left) } else { 0.0 }
    }

    /// Returns the attention pairs of the remaining tokens at `now`, including those of others.
    #[inline]
    pub fn pairs(&self, slot: usize, now: Seconds) -> f64 {
        self.own_pairs(slot, now) + self.others_pairs[slot]
    }

    /// Subtracts the tokens drained since the last settlement from the prefills, in order.
    fn settle(&mut self, slot: usize, now: Seconds) {
        let mut done = (self.rate[slot] * (now - self.since[slot])).clamp(0.0, self.left[slot]);
        self.since[slot] = now;
        if done <= 0.0 {
            return;
        }
        self.left[slot] -= done;
        let queue = &mut self.queues[slot];
        for prefill in &mut queue.prefills {
            if done <= 0.0 {
                break;
            }
            let part = done.min(prefill.left);
            prefill.left -= part;
            queue.left_seconds -= part * prefill.seconds_per_token;
            self.pairs[slot] -= prefill.pairs_of(part);
            done -= part;
        }
        self.pairs[slot] = self.pairs[slot].max(0.0);
        self.drain_rate(slot);
    }

    /// Sets the drain rate: the remaining tokens drain evenly over the seconds that their prefills
    /// take. Long prompts take longer per token.
    fn drain_rate(&mut self, slot: usize) {
        let seconds = self.queues[slot].left_seconds;
        self.rate[slot] = if seconds > 0.0 { self.left[slot] / seconds } else { 0.0 };
    }

    /// Removes a prefill from its queue; returns it with its position.
    fn take(&mut self, slot: usize, ticket: u32) -> Option<(usize, Prefill)> {
        let prefills = &mut self.queues[slot].prefills;
        let place = prefills.iter().position(|p| p.ticket == ticket)?;
        Some((place, prefills.remove(place)?))
    }

    /// Subtracts ended prefills from the sums. Rounding can bring a difference below zero, hence
    /// the bounds.
    fn take_off(&mut self, slot: usize, rest: Rest) {
        let queue = &mut self.queues[slot];
        let none_left = queue.prefills.is_empty();
        let without = |sum: f64, part: f64| if none_left { 0.0 } else { (sum - part).max(0.0) };
        self.left[slot] = without(self.left[slot], rest.tokens);
        self.pairs[slot] = without(self.pairs[slot], rest.pairs);
        queue.left_seconds = without(queue.left_seconds, rest.seconds);
        self.drain_rate(slot);
    }
}

/// Returns the learned seconds per token of such a prefill; 0 if prefills do not drain between
/// events.
fn seconds_per_token(learned: &PrefillRate, tokens: f64, pairs: f64, prior_rate: f64) -> Seconds {
    match learned.seconds(tokens, pairs) {
        _ if prior_rate == 0.0 => 0.0,
        Some(seconds) if tokens > 0.0 => seconds / tokens,
        _ => 1.0 / prior_rate,
    }
}

/// Remaining tokens of some slots. They follow from the tokens left when a backlog was last
/// settled, the time of the settlement and the drain rate since. The tokens left of peer routers
/// and of external requests are added.
#[derive(Clone, Copy)]
pub struct Drains<'a> {
    left: &'a [f64],
    since: &'a [f64],
    rate: &'a [f64],
    others_left: &'a [f64],
}

impl<'a> Drains<'a> {
    /// Returns the first `len` slots: loops over them need no further checks of bounds.
    #[inline(always)]
    pub fn first(self, len: usize) -> Drains<'a> {
        let Drains { left, since, rate, others_left } = self;
        Drains {
            left: &left[..len],
            since: &since[..len],
            rate: &rate[..len],
            others_left: &others_left[..len],
        }
    }

    /// Writes the remaining tokens at `now`, in one pass over four columns.
    #[inline]
    pub fn write(self, now: Seconds, out: &mut [f64]) {
        drained(self, now, out);
    }

    /// Returns the remaining tokens of the slot at place `i`.
    #[inline(always)]
    pub fn tokens(&self, i: usize, now: Seconds) -> f64 {
        let drained = self.rate[i] * greater(now - self.since[i], 0.0);
        greater(self.left[i] - drained, 0.0) + self.others_left[i]
    }
}

#[multiversion(targets("x86_64+avx2"))]
fn drained(drains: Drains<'_>, now: Seconds, out: &mut [f64]) {
    let drains = drains.first(out.len());
    for (i, out) in out.iter_mut().enumerate() {
        *out = drains.tokens(i, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::tier::Tier;
    use crate::router::ledger::counts::Stage;
    use proptest::prelude::*;

    fn entry(cached: f64, new_tokens: f64) -> Entry {
        Entry {
            prompt_tokens: cached + new_tokens,
            new_tokens,
            output_tokens: 0.0,
            expected_output_tokens: None,
            stage: Stage::Bound,
            tier_tokens: 0.0,
            tier: Tier::Gpu,
            load_seconds: None,
            lora: 0,
            tenant: 0,
            whole_answer: false,
        }
    }

    fn backlogs(prior_rate: f64) -> Backlogs {
        let mut backlogs = Backlogs::new(prior_rate);
        backlogs.resize(1);
        backlogs.clear(0);
        backlogs
    }

    proptest! {
        /// The sums that are kept are the sums over the queue, whatever happens.
        #[test]
        fn sums_are_those_of_the_queue(
            ops in prop::collection::vec((0u32..8, 0u32..12, 0.0f64..3.0, 1.0f64..5000.0), 1..200),
            prior_rate in prop::sample::select(vec![0.0, 1000.0]),
        ) {
            let (mut backlogs, mut rate, mut now) = (backlogs(prior_rate), PrefillRate::default(), 0.0);
            for (op, ticket, seconds, tokens) in ops {
                now += seconds;
                let prompt = entry(3.0 * tokens, tokens);
                let queued = backlogs.queues[0].prefills.iter().find(|p| p.ticket == ticket).copied();
                match (op, queued) {
                    (0..=2, None) => backlogs.push(0, ticket, &prompt, &rate, now),
                    (0, Some(_)) => backlogs.requeue(0, ticket, &prompt, &rate, now),
                    (1, Some(prefill)) => backlogs.set_left(0, ticket, prefill.left.min(tokens), now),
                    (2..=4, Some(_)) => backlogs.computed(0, ticket, tokens, now),
                    (5, _) => drop(backlogs.cancel(0, ticket, now)),
                    (6, _) => {
                        rate.observe(tokens, attention_pairs(0.0, tokens), seconds);
                        backlogs.price(0, &rate);
                    }
                    _ => drop(backlogs.end_through(0, ticket, now)),
                }
                let mut sums = Rest::default();
                backlogs.queues[0].prefills.iter().for_each(|prefill| sums.add(prefill));
                let kept = [backlogs.left[0], backlogs.pairs[0], backlogs.queues[0].left_seconds];
                for (kept, sum) in kept.into_iter().zip([sums.tokens, sums.pairs, sums.seconds]) {
                    prop_assert!((kept - sum).abs() <= 1e-3 + 1e-9 * sum, "{kept} {sum}");
                }
                if backlogs.is_empty(0) {
                    prop_assert_eq!(kept, [0.0; 3]);
                }
            }
        }
    }
}

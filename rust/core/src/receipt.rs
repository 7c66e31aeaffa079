//! Receipts: why a request went where it went, later joined with what happened.
use crate::ids::Seconds;
use crate::indicators::{DeclaredId, IndicatorSet};
use crate::plan::{Failure, Usage};
use crate::policy::Prefer;
use crate::priority::Priority;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;

/// Terms are kept for this many of the best instances.
pub const TERMS_KEPT: usize = 8;

/// One instance of the best few.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Its slot.
    pub slot: u32,
    /// Its score.
    pub score: f64,
}

/// Where a request goes on.
#[derive(Clone, Debug, PartialEq)]
pub struct Next {
    /// Slot and name of the instance.
    pub slot: u32,
    /// See above.
    pub name: Arc<str>,
    /// Its score under the decode policy.
    pub score: f64,
    /// Seconds from the choice until the request was expected to start there.
    pub handoff_seconds: Seconds,
}

/// Where it goes on, segment by segment.
pub type Nexts = SmallVec<[Next; 1]>;

/// What its instance pulled of its prompt before it began.
#[derive(Clone, Debug, PartialEq)]
pub struct Pulled {
    /// Slot and name of the holder.
    pub slot: u32,
    /// See above.
    pub name: Arc<str>,
    /// First token of what was to be pulled.
    pub from_token: u32,
    /// One past the last.
    pub to_token: u32,
    /// Seconds that it was expected to take.
    pub expected_seconds: Seconds,
    /// Tokens that came, once it is over.
    pub tokens: Option<u32>,
    /// What it took, once it is over.
    pub seconds: Option<Seconds>,
}

/// Seconds that places were expected to cost: all that is assigned to the instances, the request included (Libra, section 4.1), or what a place loses for all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// The first, with its part of the best cut; NaN where none was looked at.
    pub first_seconds: Seconds,
    /// The second, with its part.
    pub second_seconds: Seconds,
    /// The third, with its part; NaN where the request has two parts, or comes back to the first.
    pub third_seconds: Seconds,
    /// Two of them, the hand-over and the wait for it counted in; NaN where the request has three parts: whether these pay is not asked.
    pub cut_seconds: Seconds,
    /// The same with the request whole on the better of both.
    pub whole_seconds: Seconds,
    /// What all requests together lose if the request decodes where it is prefilled ([`crate::split::apart`]); NaN where that is not asked.
    pub stay_seconds: Seconds,
    /// The same of the best other instance; NaN where there is none.
    pub apart_seconds: Seconds,
}

impl Default for Balance {
    fn default() -> Balance {
        let none = f64::NAN;
        Balance {
            first_seconds: none,
            second_seconds: none,
            third_seconds: none,
            cut_seconds: none,
            whole_seconds: none,
            stay_seconds: none,
            apart_seconds: none,
        }
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// `None` while it runs; `Some(None)` where it ended well.
    pub ended: Option<Option<Failure>>,
    /// Closed without an end: the ticket was dropped.
    pub dropped: bool,
    /// What the engine says it did.
    pub usage: Usage,
    /// Time from the decision to the end of the first segment, where another follows it, in seconds.
    pub handed_over_seconds: Option<f64>,
    /// Time from the decision to the first token, in seconds.
    pub ttft_seconds: Option<f64>,
    /// Time from the decision to the end, in seconds.
    pub e2e_seconds: Option<f64>,
}

/// Why one request went where it went.
#[derive(Clone, Debug, Default)]
pub struct Receipt {
    /// Number of the decision.
    pub id: u64,
    /// When it was made.
    pub at: Seconds,
    /// The request's own id, where it was given.
    pub request_id: Option<Box<str>>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Which end of the scores is the best.
    pub prefer: Prefer,
    /// Names of all slots at that time.
    pub names: Arc<[Arc<str>]>,
    /// One score a slot; NaN where the slot was left out.
    pub scores: Vec<f32>,
    /// Indicators that the policy read.
    pub reads: IndicatorSet,
    /// Declared indicators that it read.
    pub declared: SmallVec<[DeclaredId; 4]>,
    /// The best few, best first (ties in slot order).
    pub best: SmallVec<[Candidate; TERMS_KEPT]>,
    /// Values of the indicators read (in the order of `reads`, then of `declared`) for the first of `best`, then for the second, and so on; NaN where
    /// absent. See [`Receipt::explained`].
    pub terms: SmallVec<[f64; 2 * TERMS_KEPT]>,
    /// Score of the best not chosen minus score of the chosen one; `None` with one candidate.
    pub margin: Option<f64>,
    /// Slot of the chosen instance.
    pub chosen: u32,
    /// Where it goes on after its first segment, and after that, as far as that is chosen.
    pub next: Nexts,
    /// Tokens at which the plan cuts the request, prompt and output counted through.
    pub cuts: SmallVec<[u32; 2]>,
    /// Why it was left in one piece, where requests are cut or move; or in two, where it was to have three.
    pub uncut: Option<Box<str>>,
    /// Why nothing was to be pulled for it, where prefixes are pulled and its caller said so.
    pub unpulled: Option<Box<str>>,
    /// What its instance was to pull before it began.
    pub pull: Option<Pulled>,
    /// What its instances were expected to take for all that they have, where a cut was looked for.
    pub balance: Option<Balance>,
    /// What it was given for its engine's queue, where requests are ordered.
    pub priority: Option<Priority>,
    /// Instances that it moved to while it ran: the token at which it did, slot and name.
    pub moves: Vec<(u32, u32, Arc<str>)>,
    /// Instances that the request moved to before its first token, in order: slot and name.
    pub moved: Vec<(u32, Arc<str>)>,
    /// Leading prompt tokens that the chosen instance was believed to hold.
    pub predicted_hit_tokens: u32,
    /// Age of the chosen instance's load report, where it sends any.
    pub report_age_seconds: Option<f64>,
    /// Eligible slots left out because an indicator was absent or the score was not a number.
    pub left_out: u32,
    /// The policy's filter left nothing and was waived.
    pub filter_waived: bool,
    /// The policy scored no candidate, so the fewest requests decided.
    pub unscored: bool,
    /// Slots that the hot-spot guard kept the request from.
    pub guard_excluded: u32,
    /// The hot-spot guard would have left nobody, so the least loaded was taken.
    pub balance_only: bool,
    /// What happened.
    pub outcome: Outcome,
}

impl Receipt {
    fn bytes(&self) -> usize {
        size_of::<Receipt>()
            + self.request_id.as_ref().map_or(0, |r| r.len())
            + self.uncut.as_ref().map_or(0, |r| r.len())
            + self.unpulled.as_ref().map_or(0, |r| r.len())
            + self.scores.capacity() * size_of::<f32>()
            + if self.declared.spilled() { self.declared.capacity() * size_of::<DeclaredId>() } else { 0 }
            + if self.next.spilled() { self.next.capacity() * size_of::<Next>() } else { 0 }
            + self.moved.capacity() * size_of::<(u32, Arc<str>)>()
            + self.moves.capacity() * size_of::<(u32, u32, Arc<str>)>()
            + if self.terms.spilled() { self.terms.capacity() * size_of::<f64>() } else { 0 }
    }

    /// The segment behind the token `behind` runs elsewhere than was said; `kept`: what follows it stays where it is, else nothing does.
    pub(crate) fn goes_on(&mut self, behind: u32, next: Next, kept: bool) {
        let place = self.cuts.iter().filter(|cut| **cut < behind).count().min(self.next.len());
        let after: Nexts = self.next.drain(place..).skip(1).collect();
        self.next.push(next);
        if kept {
            self.next.extend(after);
        }
    }

    /// Names of the instances tried, in order; the last is where the request is or was.
    pub fn tried(&self) -> impl Iterator<Item = &Arc<str>> {
        std::iter::once(&self.names[self.chosen as usize]).chain(self.moved.iter().map(|(_, name)| name))
    }

    /// The best few, each with the values of the indicators in `reads` and `declared`.
    pub fn explained(&self) -> impl Iterator<Item = (Candidate, &[f64])> {
        let width = self.reads.iter().count() + self.declared.len();
        self.best.iter().enumerate().map(move |(i, c)| (*c, &self.terms[i * width..(i + 1) * width]))
    }

    fn clear(&mut self) {
        let mut scores = std::mem::take(&mut self.scores);
        scores.clear();
        *self = Receipt { scores, ..Receipt::default() };
    }
}

/// Bytes of the names that consecutive receipts share; counted once, with the oldest of them.
fn names_bytes(names: &[Arc<str>]) -> usize {
    let own = |name: &Arc<str>| size_of::<Arc<str>>() + name.len();
    names.iter().map(own).sum()
}

/// The latest receipts, bounded in bytes. Ids are consecutive, so a look-up is an index.
#[derive(Debug)]
pub struct ReceiptRing {
    // Boxed, since each is filled in where one that fell out was: nothing is moved.
    receipts: VecDeque<Box<Receipt>>,
    spare: Option<Box<Receipt>>,
    bytes: usize,
    byte_bound: usize,
    next_id: u64,
}

impl ReceiptRing {
    /// An empty ring that keeps at most `byte_bound` bytes, and at least the latest receipt.
    pub fn new(byte_bound: usize) -> Self {
        ReceiptRing { receipts: VecDeque::new(), spare: None, bytes: 0, byte_bound, next_id: 1 }
    }

    /// A cleared receipt to fill in; its buffers are those of one that fell out.
    pub fn take(&mut self) -> Box<Receipt> {
        let mut receipt = self.spare.take().unwrap_or_default();
        receipt.clear();
        receipt
    }

    /// Takes a receipt back that is not kept, for its buffers.
    pub fn put_back(&mut self, receipt: Box<Receipt>) {
        self.spare = Some(receipt);
    }

    /// Keeps a receipt from [`ReceiptRing::take`]; returns its id.
    pub fn push(&mut self, mut receipt: Box<Receipt>) -> u64 {
        let id = self.next_id;
        receipt.id = id;
        self.next_id += 1;
        self.bytes += receipt.bytes();
        if self.receipts.back().is_none_or(|last| !Arc::ptr_eq(&last.names, &receipt.names)) {
            self.bytes += names_bytes(&receipt.names);
        }
        self.receipts.push_back(receipt);
        while self.bytes > self.byte_bound && self.receipts.len() > 1 {
            let old = self.receipts.pop_front().expect("more than one");
            self.bytes -= old.bytes();
            if self.receipts.front().is_none_or(|next| !Arc::ptr_eq(&next.names, &old.names)) {
                self.bytes -= names_bytes(&old.names);
            }
            self.spare = Some(old);
        }
        id
    }

    /// The receipt of that id, while it is kept.
    pub fn get(&self, id: u64) -> Option<&Receipt> {
        let first = self.receipts.front()?.id;
        self.receipts.get(usize::try_from(id.checked_sub(first)?).ok()?).map(|receipt| &**receipt)
    }

    /// The same, to join what happened. The byte count follows.
    pub fn update(&mut self, id: u64, change: impl FnOnce(&mut Receipt)) {
        let Some(first) = self.receipts.front().map(|r| r.id) else { return };
        let Some(i) = id.checked_sub(first) else { return };
        if let Some(receipt) = self.receipts.get_mut(i as usize) {
            let before = receipt.bytes();
            change(receipt);
            self.bytes = self.bytes + receipt.bytes() - before;
        }
    }

    /// Bytes kept.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Number kept.
    pub fn len(&self) -> usize {
        self.receipts.len()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.receipts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_bounded_and_finds_by_id() {
        let mut ring = ReceiptRing::new(20_000);
        for _ in 0..1000 {
            let mut receipt = ring.take();
            receipt.scores.resize(256, 0.0);
            ring.push(receipt);
            assert!(ring.bytes() <= 20_000);
        }
        assert!(ring.len() > 5);
        assert_eq!(ring.get(1000).unwrap().id, 1000);
        assert!(ring.get(1).is_none() && ring.get(1001).is_none());
        ring.update(1000, |r| r.request_id = Some("x".repeat(100).into()));
        let counted: usize = ring.receipts.iter().map(|r| r.bytes()).sum();
        assert_eq!(ring.bytes(), counted);
    }

    /// Rust B9: names that receipts keep of a fleet that has changed since count as theirs.
    #[test]
    fn kept_names_count() {
        let names = || -> Arc<[Arc<str>]> { (0..64).map(|i| format!("engine-{i:04}").into()).collect() };
        let one = names_bytes(&names());
        let bound = 20 * one;
        let mut ring = ReceiptRing::new(bound);
        let mut shared = names();
        for i in 0..1000 {
            if i % 3 == 0 {
                shared = names();
            }
            let mut receipt = ring.take();
            receipt.names = shared.clone();
            ring.push(receipt);
            let mut kept: Vec<_> = ring.receipts.iter().map(|r| r.names.as_ptr()).collect();
            kept.dedup();
            let own: usize = ring.receipts.iter().map(|r| r.bytes()).sum();
            assert_eq!(ring.bytes(), own + kept.len() * one);
            assert!(ring.bytes() <= bound);
        }
        assert!(ring.len() > 5);
    }
}

//! Decision records: why a request went where it went, later joined with the outcome.
use crate::admission::LevelNote;
use crate::ids::Seconds;
use crate::indicators::{DeclaredId, IndicatorSet};
use crate::plan::{Failure, Usage};
use crate::policy::Prefer;
use crate::priority::Priority;
use crate::program::ProgramNote;
use crate::request::Arm;
use hashbrown::HashMap;
use smallvec::SmallVec;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// Number of best instances that a record keeps, with their scores and terms. A record has the same
/// size in every fleet.
pub const BEST_KEPT: usize = 8;

/// One of the best instances.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Candidate {
    /// Slot.
    pub slot: u32,
    /// Score.
    pub score: f64,
}

/// The instance whose cached tokens of a prompt save most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Holder {
    /// Slot.
    pub slot: u32,
    /// Leading prompt tokens in its cache, lower tiers included.
    pub hit_tokens: u32,
    /// Of them, less what loading from a lower tier costs: what policies compare.
    pub saved_tokens: f64,
    /// Its requests (`bs`) at the decision.
    pub requests: f64,
}

/// The instance of a follow-up segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Next {
    /// Slot of the instance.
    pub slot: u32,
    /// Name of the instance.
    pub name: Arc<str>,
    /// Score under the decode policy.
    pub score: f64,
    /// Expected seconds from the choice to the start of the request there.
    pub handoff_seconds: Seconds,
}

/// Instances of all follow-up segments, in order.
pub type Nexts = SmallVec<[Next; 1]>;

/// Prefix fetch before the request began.
#[derive(Clone, Debug, PartialEq)]
pub struct FetchRecord {
    /// Slot of the holder.
    pub slot: u32,
    /// Name of the holder.
    pub name: Arc<str>,
    /// First token to fetch.
    pub from_token: u32,
    /// One past the last token to fetch.
    pub to_token: u32,
    /// Expected duration.
    pub expected_seconds: Seconds,
    /// Tokens that arrived; `None` while the fetch runs.
    pub tokens: Option<u32>,
    /// Actual duration; `None` while the fetch runs.
    pub seconds: Option<Seconds>,
}

/// The choice of a shadow policy, which placed nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct Shadow {
    /// Name of the policy.
    pub policy: Arc<str>,
    /// Name of its instance, predicted prompt tokens in the instance's cache, and predicted time to
    /// first token there. `None`: the policy failed or scored no instance.
    pub choice: Option<(Arc<str>, u32, Seconds)>,
    /// Predicted time to first token on the instance that got the request.
    pub chosen_ttft_seconds: Seconds,
}

/// Expected seconds per placement: each instance's assigned work, the request included (Libra,
/// section 4.1), or the time that all requests lose by a placement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Balance {
    /// The first instance's work, with its part of the best cut; NaN if no cut was considered.
    pub first_seconds: Seconds,
    /// The second instance's work, with its part.
    pub second_seconds: Seconds,
    /// The third instance's work, with its part; NaN if the request has two parts or returns to the
    /// first instance.
    pub third_seconds: Seconds,
    /// Time until both instances are done, split in two, including the handoff and the wait for it;
    /// NaN for three parts, whose benefit is not checked.
    pub cut_seconds: Seconds,
    /// Time until both instances are done if the better one runs the whole request.
    pub whole_seconds: Seconds,
    /// Time that all requests together lose if the request decodes on its prefill
    /// instance ([`crate::split::apart`]); NaN if not computed.
    pub stay_seconds: Seconds,
    /// Time that all requests together lose if the request decodes on the best other instance; NaN
    /// if there is none.
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

/// The outcome of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// `None` while the request runs; `Some(None)` after success.
    pub ended: Option<Option<Failure>>,
    /// Whether the ticket was dropped, which closed the request without an end event.
    pub dropped: bool,
    /// Token counts that the engine reported.
    pub usage: Usage,
    /// Seconds from the decision to the end of the first segment, if another segment follows.
    pub handed_over_seconds: Option<f64>,
    /// Seconds from the decision to the first token.
    pub ttft_seconds: Option<f64>,
    /// Seconds from the decision to the end.
    pub e2e_seconds: Option<f64>,
}

/// The decision record of one request.
#[derive(Clone, Debug, Default)]
pub struct DecisionRecord {
    /// Number of the decision.
    pub id: u64,
    /// Time of the decision.
    pub at: Seconds,
    /// The request's own id, if it has one.
    pub request_id: Option<Box<str>>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Name of the policy that decided.
    pub policy: Option<Arc<str>>,
    /// Arm of the request.
    pub arm: Arm,
    /// Choice of the shadow policy, if it scored the request.
    pub shadow: Option<Box<Shadow>>,
    /// Whether the lowest or the highest score wins.
    pub prefer: Prefer,
    /// Names of all slots at the decision.
    pub names: Arc<[Arc<str>]>,
    /// Number of slots with a score.
    pub scored: u32,
    /// Number of slots with the best score, before the tie-breaks.
    pub tied: u32,
    /// Number of slots that were still equal after the tie-breaks. Above 1: chance decided.
    pub drawn_from: u32,
    /// Indicators that the policy read.
    pub reads: IndicatorSet,
    /// Declared indicators that the policy read.
    pub declared: SmallVec<[DeclaredId; 4]>,
    /// The best instances, best first (ties in slot order).
    pub best: SmallVec<[Candidate; BEST_KEPT]>,
    /// Indicator values (in the order of `reads`, then of `declared`) for each instance of `best`,
    /// in order; NaN if absent. [`DecisionRecord::explained`] pairs them.
    pub terms: SmallVec<[f64; 2 * BEST_KEPT]>,
    /// Score of the best other instance minus the score of the chosen one; `None` with one
    /// candidate.
    pub margin: Option<f64>,
    /// The candidate whose cached tokens save most, if it has any and the policy reads them. The
    /// best instances may lack it.
    pub holder: Option<Holder>,
    /// Slot of the chosen instance.
    pub chosen: u32,
    /// Instances of the follow-up segments, as far as they are chosen.
    pub next: Nexts,
    /// Tokens at which the plan cuts the request, prompt and output counted together.
    pub cuts: SmallVec<[u32; 2]>,
    /// Why the request was not split (or split into two parts, not three), if requests are split or
    /// moved.
    pub split_reason: Option<Box<str>>,
    /// Why no prefix was fetched, if prefix fetches are on and the caller gave a reason.
    pub fetch_reason: Option<Box<str>>,
    /// Prefix fetch planned before the request began.
    pub fetch: Option<FetchRecord>,
    /// Expected work of the instances, if a cut was considered.
    pub balance: Option<Balance>,
    /// Priority for the engine's queue, if requests are ordered.
    pub priority: Option<Priority>,
    /// The request's agent program, if it belongs to one.
    pub program: Option<ProgramNote>,
    /// The request's priority level, if requests have levels.
    pub level: Option<Box<LevelNote>>,
    /// Instances that the request moved to while it ran: token position, slot and name.
    pub moves: Vec<(u32, u32, Arc<str>)>,
    /// Instances that the request moved to before its first token, in order: slot and name.
    pub moved: Vec<(u32, Arc<str>)>,
    /// Predicted number of leading prompt tokens in the chosen instance's cache, lower tiers
    /// included.
    pub predicted_hit_tokens: u32,
    /// How many of them come from a tier below the GPU.
    pub predicted_tier_tokens: u32,
    /// Age of the chosen instance's load report, if it sends reports.
    pub report_age_seconds: Option<f64>,
    /// Candidates left out because an indicator was absent or the score was not finite; all
    /// candidates if the policy scored none.
    pub left_out: u32,
    /// Candidates that the policy's filter excluded.
    pub filtered: u32,
    /// Whether the policy's filter passed no slot and was waived.
    pub filter_waived: bool,
    /// Whether the policy scored no candidate, so that the fewest requests decided.
    pub unscored: bool,
    /// Slots excluded by the hot-spot guard.
    pub guard_excluded: u32,
    /// Whether the hot-spot guard would have excluded all slots, so that the least loaded slot was
    /// chosen.
    pub balance_only: bool,
    /// The outcome.
    pub outcome: Outcome,
}

impl DecisionRecord {
    fn bytes(&self) -> usize {
        size_of::<DecisionRecord>()
            + self.request_id.as_ref().map_or(0, |r| r.len())
            + self.split_reason.as_ref().map_or(0, |r| r.len())
            + self.fetch_reason.as_ref().map_or(0, |r| r.len())
            + self.level.as_ref().map_or(0, |_| size_of::<LevelNote>())
            + self.shadow.as_ref().map_or(0, |_| size_of::<Shadow>())
            + if self.declared.spilled() { self.declared.capacity() * size_of::<DeclaredId>() } else { 0 }
            + if self.next.spilled() { self.next.capacity() * size_of::<Next>() } else { 0 }
            + self.moved.capacity() * size_of::<(u32, Arc<str>)>()
            + self.moves.capacity() * size_of::<(u32, u32, Arc<str>)>()
            + if self.terms.spilled() { self.terms.capacity() * size_of::<f64>() } else { 0 }
    }

    /// Replaces the instance of the segment after token `behind`. `kept`: later segments stay
    /// planned; otherwise they are removed.
    pub(crate) fn goes_on(&mut self, behind: u32, next: Next, kept: bool) {
        let place = self.cuts.iter().filter(|cut| **cut < behind).count().min(self.next.len());
        let after: Nexts = self.next.drain(place..).skip(1).collect();
        self.next.push(next);
        if kept {
            self.next.extend(after);
        }
    }

    /// Yields the names of the instances tried, in order; the last one has or had the request.
    pub fn tried(&self) -> impl Iterator<Item = &Arc<str>> {
        std::iter::once(&self.names[self.chosen as usize]).chain(self.moved.iter().map(|(_, name)| name))
    }

    /// Returns one score per slot; NaN unless the slot is one of the best.
    pub fn known_scores(&self) -> Vec<f32> {
        let mut scores = vec![f32::NAN; self.names.len()];
        self.best.iter().for_each(|best| scores[best.slot as usize] = best.score as f32);
        scores
    }

    /// Returns the names of the best instances, best first; the chosen instance comes before
    /// instances with equal scores.
    pub fn ranking(&self) -> Vec<&str> {
        let sign = if self.prefer == Prefer::Max { -1.0 } else { 1.0 };
        let mut best: SmallVec<[Candidate; BEST_KEPT]> =
            self.best.iter().filter(|best| best.score.is_finite()).copied().collect();
        let other = |candidate: &Candidate| candidate.slot != self.chosen;
        best.sort_by(|a, b| (sign * a.score).total_cmp(&(sign * b.score)).then(other(a).cmp(&other(b))));
        best.iter().map(|best| &*self.names[best.slot as usize]).collect()
    }

    /// Yields the best instances, each with the values of the indicators in `reads` and `declared`.
    pub fn explained(&self) -> impl Iterator<Item = (Candidate, &[f64])> {
        let width = self.reads.iter().count() + self.declared.len();
        self.best.iter().enumerate().map(move |(i, c)| (*c, &self.terms[i * width..(i + 1) * width]))
    }

    /// Returns whether the request has not ended.
    fn runs(&self) -> bool {
        self.outcome.ended.is_none() && !self.outcome.dropped
    }
}

/// Bytes of the names that consecutive records share; they count once, with the oldest record.
fn names_bytes(names: &[Arc<str>]) -> usize {
    let own = |name: &Arc<str>| size_of::<Arc<str>>() + name.len();
    names.iter().map(own).sum()
}

/// Records that have left the ring while their requests ran: their outcome is still to come.
#[derive(Debug, Default)]
struct Late {
    running: BTreeMap<u64, Box<DecisionRecord>>,
    ended: BTreeMap<u64, Box<DecisionRecord>>,
    /// Number of records with these names; their bytes count once.
    names: HashMap<usize, u32>,
    bytes: usize,
}

impl Late {
    fn push(&mut self, record: Box<DecisionRecord>) {
        let known = self.names.entry(record.names.as_ptr().addr()).or_default();
        *known += 1;
        let names = if *known == 1 { names_bytes(&record.names) } else { 0 };
        self.bytes += record.bytes() + names;
        self.running.insert(record.id, record);
    }

    /// Removes a record: the oldest one whose request has ended, else the oldest.
    fn pop(&mut self) -> Option<Box<DecisionRecord>> {
        let (_, record) = self.ended.pop_first().or_else(|| self.running.pop_first())?;
        self.bytes -= record.bytes();
        let place = record.names.as_ptr().addr();
        if let Some(known) = self.names.get_mut(&place) {
            *known -= 1;
            if *known == 0 {
                self.names.remove(&place);
                self.bytes -= names_bytes(&record.names);
            }
        }
        Some(record)
    }

    fn get(&self, id: u64) -> Option<&DecisionRecord> {
        self.running.get(&id).or_else(|| self.ended.get(&id)).map(|record| &**record)
    }

    fn update(&mut self, id: u64, change: impl FnOnce(&mut DecisionRecord)) {
        let Some(record) = self.running.get_mut(&id) else { return };
        let before = record.bytes();
        change(record);
        self.bytes = self.bytes + record.bytes() - before;
        if !record.runs()
            && let Some(record) = self.running.remove(&id)
        {
            self.ended.insert(id, record);
        }
    }
}

/// The latest decision records, bounded in bytes, and those of running requests. Ids are
/// consecutive, so a lookup is an index.
#[derive(Debug)]
pub struct RecordRing {
    // Boxed, so that a removed record's memory is reused for a new record without a copy.
    records: VecDeque<Box<DecisionRecord>>,
    spare: Option<Box<DecisionRecord>>,
    late: Late,
    bytes: usize,
    byte_bound: usize,
    next_id: u64,
}

/// Part of the ring's bytes that late records may take.
const LATE_PART: usize = 4;

impl RecordRing {
    /// Creates an empty ring that keeps at most `byte_bound` bytes, and at least the latest record.
    pub fn new(byte_bound: usize) -> Self {
        let (records, late) = (VecDeque::new(), Late::default());
        RecordRing { records, spare: None, late, bytes: 0, byte_bound, next_id: 1 }
    }

    /// Numbers the records from `first` on. The ring must be empty.
    pub fn begin_at(&mut self, first: u64) {
        debug_assert!(self.records.is_empty(), "numbers are consecutive");
        self.next_id = first;
    }

    /// Returns a cleared record to fill in; it reuses the memory of a removed record.
    pub fn take(&mut self) -> Box<DecisionRecord> {
        let mut record = self.spare.take().unwrap_or_default();
        *record = DecisionRecord::default();
        record
    }

    /// Returns an unused record, so that its memory is reused.
    pub fn put_back(&mut self, record: Box<DecisionRecord>) {
        self.spare = Some(record);
    }

    /// Stores a record from [`RecordRing::take`] and returns its id.
    pub fn push(&mut self, mut record: Box<DecisionRecord>) -> u64 {
        let id = self.next_id;
        record.id = id;
        self.next_id += 1;
        self.bytes += record.bytes();
        if self.records.back().is_none_or(|last| !Arc::ptr_eq(&last.names, &record.names)) {
            self.bytes += names_bytes(&record.names);
        }
        self.records.push_back(record);
        while self.bytes() > self.byte_bound && self.records.len() > 1 {
            let old = self.records.pop_front().expect("more than one");
            self.bytes -= old.bytes();
            if self.records.front().is_none_or(|next| !Arc::ptr_eq(&next.names, &old.names)) {
                self.bytes -= names_bytes(&old.names);
            }
            if old.runs() {
                self.late.push(old);
            } else {
                self.spare = Some(old);
            }
            while self.late.bytes > self.byte_bound / LATE_PART {
                self.spare = self.late.pop();
            }
        }
        id
    }

    /// Returns the record with this id, if it is still kept.
    pub fn get(&self, id: u64) -> Option<&DecisionRecord> {
        let first = self.records.front()?.id;
        let Some(place) = id.checked_sub(first) else { return self.late.get(id) };
        self.records.get(usize::try_from(place).ok()?).map(|record| &**record)
    }

    /// Changes the record with this id, for example to add the outcome. Updates the byte count.
    pub fn update(&mut self, id: u64, change: impl FnOnce(&mut DecisionRecord)) {
        let Some(first) = self.records.front().map(|r| r.id) else { return };
        let Some(i) = id.checked_sub(first) else { return self.late.update(id, change) };
        if let Some(record) = self.records.get_mut(i as usize) {
            let before = record.bytes();
            change(record);
            self.bytes = self.bytes + record.bytes() - before;
        }
    }

    /// Returns the id of the latest record; before the first record, an id without a record.
    pub fn last_id(&self) -> u64 {
        self.next_id - 1
    }

    /// Returns the number of bytes kept.
    pub fn bytes(&self) -> usize {
        self.bytes + self.late.bytes
    }

    /// Returns the number of records kept.
    pub fn len(&self) -> usize {
        self.records.len() + self.late.running.len() + self.late.ended.len()
    }

    /// Returns whether the ring is empty.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_is_bounded_and_finds_by_id() {
        let mut ring = RecordRing::new(20_000);
        for _ in 0..1000 {
            let mut record = ring.take();
            record.request_id = Some("x".repeat(1024).into());
            ring.push(record);
            assert!(ring.bytes() <= 20_000);
        }
        assert!(ring.len() > 5);
        assert_eq!(ring.get(1000).unwrap().id, 1000);
        assert!(ring.get(1).is_none() && ring.get(1001).is_none());
        ring.update(1000, |r| r.request_id = Some("x".repeat(100).into()));
        let counted: usize = ring.records.iter().map(|r| r.bytes()).sum();
        assert_eq!(ring.bytes, counted);
    }

    /// Defect 15 of the core review: a request that outlasts the ring keeps its record and outcome.
    #[test]
    fn the_outcome_of_a_running_request_is_kept_when_the_ring_wraps() {
        let bound = 100_000;
        let mut ring = RecordRing::new(bound);
        let push = |ring: &mut RecordRing, ended: bool| {
            let mut record = ring.take();
            record.request_id = Some("x".repeat(1024).into());
            record.outcome.ended = ended.then_some(None);
            ring.push(record)
        };
        let running = [push(&mut ring, false), push(&mut ring, false)];
        for _ in 0..1000 {
            push(&mut ring, true);
        }
        for id in running {
            assert!(ring.get(id).is_some_and(|record| record.id == id));
            ring.update(id, |record| record.outcome.ended = Some(None));
            assert_eq!(ring.get(id).unwrap().outcome.ended, Some(None));
            assert!(ring.bytes() <= bound);
        }
        assert!(ring.get(running[1] + 1).is_none());
        // Many running requests stay within the bound; records of ended ones go first.
        for _ in 0..1000 {
            push(&mut ring, false);
            let late = ring.late.running.values().chain(ring.late.ended.values());
            let names = size_of::<[Arc<str>; 0]>();
            assert_eq!(ring.late.bytes, late.map(|record| record.bytes()).sum::<usize>() + names);
            assert!(ring.bytes() <= bound && ring.late.bytes <= bound / LATE_PART);
        }
        assert!(running.iter().all(|id| ring.get(*id).is_none()) && !ring.late.running.is_empty());
    }

    /// Names of an earlier fleet count with the records that keep them.
    #[test]
    fn kept_names_count() {
        let names = || -> Arc<[Arc<str>]> { (0..64).map(|i| format!("engine-{i:04}").into()).collect() };
        let one = names_bytes(&names());
        let bound = 20 * one;
        let mut ring = RecordRing::new(bound);
        let mut shared = names();
        for i in 0..1000 {
            if i % 3 == 0 {
                shared = names();
            }
            let mut record = ring.take();
            record.names = shared.clone();
            ring.push(record);
            let mut kept: Vec<_> = ring.records.iter().map(|r| r.names.as_ptr()).collect();
            kept.dedup();
            let own: usize = ring.records.iter().map(|r| r.bytes()).sum();
            assert_eq!(ring.bytes, own + kept.len() * one);
            assert!(ring.bytes() <= bound);
        }
        assert!(ring.len() > 5);
    }
}

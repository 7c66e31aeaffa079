//! The in-flight ledger: open requests of this router on each instance, and loads reported by
//! engines and peers. Only the ledger writes the indicators that outlive a decision. Each event
//! updates the indicator columns, so that a decision only reads plain columns.
mod account;
mod ahead;
mod backlog;
mod changes;
mod counts;
mod declared;
mod external;
mod owners;
mod rates;
mod share;
mod tier_loads;
mod windows;

pub use ahead::{AHEAD, Ahead, PROJECTED};
pub use backlog::Drains;
pub use counts::{Entry, Stage};
pub use declared::DeclaredValues;
pub use external::Report;
pub use owners::Owners;
pub use share::{Share, Timed};
pub use tier_loads::TierLoads;

use crate::estimate::{Answers, DecodeCost, Prefilled, Queued, StepFit, attention_pairs};
use crate::ids::Seconds;
use crate::indicators::{Columns, DeclaredId, Indicator, IndicatorSet};
use account::Account;
use backlog::Backlogs;
use changes::Changes;
use rates::Rates;
use share::WINDOW_SECONDS;
use std::ops::Range;

/// The in-flight ledger of all instances, by slot.
#[derive(Debug)]
pub struct Ledger {
    columns: Columns,
    declared: DeclaredValues,
    owners: Vec<Owners>,
    accounts: Vec<Account>,
    pub(super) backlogs: Backlogs,
    /// Mean of the learned prefill rates.
    rates: Rates,
    /// Time constant of recent prefills.
    recent_seconds: Seconds,
    /// Learned lengths of answers.
    pub answers: Answers,
    /// Predicted loads, if a policy or a forecast needs them.
    ahead: Option<Ahead>,
    /// Slots whose own load has changed, for the other workers of the server.
    pub changes: Changes,
    /// Slots whose own load has changed, for peer routers.
    pub peer_changes: Changes,
}

impl Ledger {
    /// Creates an empty ledger. `prior_rate`: prefill rate in tokens/s until a rate is learned; 0:
    /// prefills do not drain between events.
    pub fn new(prior_rate: f64) -> Ledger {
        Ledger {
            columns: Columns::of(IndicatorSet::ALL.without(IndicatorSet::DERIVED)),
            declared: DeclaredValues::default(),
            owners: Vec::new(),
            accounts: Vec::new(),
            backlogs: Backlogs::new(prior_rate),
            rates: Rates::default(),
            recent_seconds: WINDOW_SECONDS,
            answers: Answers::default(),
            ahead: None,
            changes: Changes::default(),
            peer_changes: Changes::default(),
        }
    }

    /// Returns the indicators that the ledger keeps.
    #[inline]
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// Returns the column of an indicator that the ledger keeps.
    #[inline]
    pub fn get(&self, id: Indicator) -> &[f64] {
        self.columns.get(id)
    }

    /// Returns the mean of the learned prefill rates in tokens/s; `None`: none is learned.
    #[inline]
    pub fn mean_prefill_rate(&self) -> Option<f64> {
        self.rates.mean()
    }

    /// Returns the predicted loads; `None`: no reader needs them.
    #[inline]
    pub fn ahead(&self) -> Option<&Ahead> {
        self.ahead.as_ref()
    }

    /// Starts or stops to keep predicted loads.
    pub fn set_ahead(&mut self, ahead: Option<Ahead>) {
        self.ahead = ahead;
    }

    /// Makes room for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.columns.resize(slots);
        self.declared.resize(slots);
        self.owners.resize_with(slots, Owners::default);
        self.accounts.resize_with(slots, Account::default);
        self.backlogs.resize(slots);
        self.rates.resize(slots);
        self.ahead.iter_mut().for_each(|ahead| ahead.resize(slots));
    }

    /// Clears a slot for its next instance.
    pub fn clear(&mut self, slot: usize) {
        self.accounts[slot] = Account::default();
        self.backlogs.clear(slot);
        self.declared.clear(slot);
        self.owners[slot] = Owners::default();
        self.ahead.iter_mut().for_each(|ahead| ahead.clear(slot));
        self.write_columns(slot);
        self.rates.set(slot, f64::NAN);
        for id in [
            Indicator::KvUsage,
            Indicator::ReportedWaiting,
            Indicator::ReportedRunning,
            Indicator::PrefillTokensPerSecond,
            Indicator::PrefillRelativeError,
            Indicator::StepRelativeError,
        ] {
            self.columns.get_mut(id)[slot] = f64::NAN;
        }
        self.columns.get_mut(Indicator::Fetches)[slot] = 0.0;
    }

    /// Records a segment that is placed and sent to its engine.
    pub fn open(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        self.accounts[slot].own.add(entry);
        self.owners[slot].add(entry);
        self.queue(slot, ticket, entry, now);
        self.write(slot);
    }

    /// Records a follow-up segment that is placed but not sent. Its prompt tokens join the backlog
    /// when it is sent.
    pub fn bind(&mut self, slot: usize, entry: &Entry) {
        self.accounts[slot].own.add(entry);
        self.owners[slot].add(entry);
        self.write(slot);
    }

    /// Adds a decoding segment to the predicted loads, which started after its decode.
    pub fn resume(&mut self, slot: usize, key: (u32, u32), entry: &Entry, now: Seconds) {
        self.ahead.iter_mut().for_each(|ahead| ahead.resume(slot, key, entry, now));
    }

    /// Adds a segment (`PlacedSegment::key`) to the predicted loads; it decodes from `start` on.
    pub fn expect(&mut self, slot: usize, key: (u32, u32), entry: &Entry, start: Seconds) {
        self.ahead.iter_mut().for_each(|ahead| ahead.bind(slot, key, entry, start));
    }

    /// Adds a prompt to the backlog: at the placement or, for a follow-up segment, when it is sent.
    /// (Engines begin prefills in this order.)
    pub fn queue(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        let account = &mut self.accounts[slot];
        let pairs = attention_pairs(entry.cached(), entry.new_tokens);
        account.windows.placed(entry.new_tokens, pairs, self.recent_seconds, now);
        self.backlogs.push(slot, ticket, entry, &account.rate, now);
    }

    /// Marks the last placed prefill as waiting for a prefix fetch.
    pub fn wait(&mut self, slot: usize) {
        self.backlogs.wait(slot);
    }

    /// Ends a prefill's wait for a prefix fetch: it moves behind all prefills placed since.
    pub fn requeue(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        self.backlogs.requeue(slot, ticket, entry, &self.accounts[slot].rate, now);
    }

    /// Changes the number of prefix fetches that a slot serves.
    pub fn serve_fetch(&mut self, slot: usize, more: f64) {
        self.accounts[slot].fetches += more;
        self.write_fetches(slot);
        self.write(slot);
    }

    /// Records that a follow-up segment is sent to its engine.
    pub fn arrive(&mut self, slot: usize, entry: &mut Entry) {
        self.accounts[slot].own.advance(entry, Stage::Bound);
        self.write(slot);
    }

    /// Records that the engine took a segment off its queue.
    pub fn scheduled(&mut self, slot: usize, entry: &mut Entry) {
        if entry.stage == Stage::Bound {
            self.accounts[slot].own.advance(entry, Stage::Scheduled);
            self.write(slot);
        }
    }

    /// Sets the tokens of a prefill still to compute, as reported by the engine.
    pub fn rebook(&mut self, slot: usize, ticket: u32, left: f64, now: Seconds) {
        self.backlogs.set_left(slot, ticket, left, now);
    }

    /// Records that the engine computed `tokens` more of a prefill.
    pub fn prefilled(&mut self, slot: usize, ticket: u32, tokens: f64, now: Seconds) {
        self.backlogs.computed(slot, ticket, tokens, now);
    }

    /// Records the first token of a segment, which decodes from now on. `lag`: seconds since the
    /// end of the previous segment.
    pub fn begin_decoding(
        &mut self,
        slot: usize,
        key: (u32, u32),
        entry: &mut Entry,
        lag: Option<Seconds>,
        now: Seconds,
    ) {
        self.first_token(slot, key.0, entry, now);
        if let Some(ahead) = &mut self.ahead {
            ahead.start(slot, key, entry, now, lag);
            self.answers.passed(entry.output_tokens - 1.0, entry.output_tokens);
        }
    }

    /// Ends a prefill at the first token of its segment or of the next segment.
    pub fn first_token(&mut self, slot: usize, ticket: u32, entry: &mut Entry, now: Seconds) {
        if entry.stage == Stage::Decoding {
            return;
        }
        let (mut prefilled, mut idle_since) = (Prefilled::default(), None);
        if let Some(ended) = self.backlogs.end_through(slot, ticket, now) {
            prefilled = Prefilled { tokens: ended.tokens, pairs: ended.pairs };
            let account = &mut self.accounts[slot];
            let began = now - ended.seconds;
            let alone = account.own.decoding == 0.0 && account.decoded_until <= began;
            idle_since = alone.then_some(began);
            account.learn_prefill(&ended, entry);
            self.backlogs.price(slot, &account.rate);
            let rate = account.rate.tokens_per_second().unwrap_or(f64::NAN);
            self.rates.set(slot, rate);
            account.write_rate(slot, &mut self.columns);
        }
        self.accounts[slot].own.advance(entry, Stage::Decoding);
        self.count(slot, entry, 1.0, now);
        let account = &mut self.accounts[slot];
        let prefills = !self.backlogs.is_empty(slot);
        account.steps.first_token(ticket, prefilled, idle_since, now, account.batch(), prefills);
        self.write(slot);
    }

    /// Records `n` further output tokens.
    pub fn tokens(&mut self, slot: usize, key: (u32, u32), entry: &mut Entry, n: f64, now: Seconds) {
        if let Some(ahead) = &mut self.ahead {
            ahead.grow(slot, key, entry, n, now);
            self.answers.passed(entry.output_tokens, entry.output_tokens + n);
        }
        self.count(slot, entry, n, now);
        let account = &mut self.accounts[slot];
        let prefills = !self.backlogs.is_empty(slot);
        if account.steps.tokens(key.0, n, now, account.batch(), prefills) {
            self.columns.get_mut(Indicator::StepRelativeError)[slot] =
                account.steps.fit().relative_error().unwrap_or(f64::NAN);
        }
    }

    fn count(&mut self, slot: usize, entry: &mut Entry, n: f64, now: Seconds) {
        let account = &mut self.accounts[slot];
        account.own.produced(entry, n);
        account.windows.produced(n, now);
        account.write_tokens(slot, &mut self.columns);
    }

    /// Removes a segment that is over, for any reason.
    pub fn end(&mut self, slot: usize, key: (u32, u32), entry: &Entry, now: Seconds) {
        self.close(slot, key.0, entry, now);
        self.ahead.iter_mut().for_each(|ahead| ahead.end(slot, key, entry, now));
    }

    /// Computes the weights of predicted loads again. `cost`: cost of a decode step.
    pub fn renew_weights(&mut self, cost: DecodeCost, now: Seconds) {
        let both = self.ahead.iter_mut().zip(self.answers.curve());
        both.for_each(|(ahead, curve)| ahead.renew_weights(curve, cost, now));
    }

    /// Removes a segment that does not appear in the predicted loads.
    pub fn close(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        let account = &mut self.accounts[slot];
        if entry.stage == Stage::Decoding {
            account.decoded_until = now;
        } else if self.backlogs.cancel(slot, ticket, now) {
            account.steps.disturbed();
        }
        account.steps.ended(ticket);
        account.own.remove(entry);
        self.owners[slot].remove(entry);
        self.write(slot);
    }

    /// Applies an engine's report. With both waiting and running requests reported, requests
    /// beyond the known ones are external load. Own queued requests beyond the waiting ones have
    /// left the engine's queue. Prompt tokens beyond the known ones are external, too.
    pub fn report(&mut self, slot: usize, report: Report) {
        let account = &mut self.accounts[slot];
        if let Some(waiting) = report.waiting {
            account.own.unqueued = (account.own.queued - waiting).max(0.0);
        }
        let (known, queued) = (account.known(), account.own.queued + account.peers.share.queued);
        account.external.compare(&report, known, queued);
        let tokens = self.backlogs.own_tokens(slot, report.at) + account.peers.share.queued_prefill_tokens;
        account.external.compare_tokens(&report, tokens);
        account.external.keep(report).write(slot, &mut self.columns);
        self.write_others(slot);
        self.write_columns(slot);
    }

    /// Writes the queued prompt tokens of others: of peer routers, and external.
    fn write_others(&mut self, slot: usize) {
        let Account { peers, external, .. } = &self.accounts[slot];
        let tokens = peers.share.queued_prefill_tokens + external.prefill_tokens;
        self.backlogs.set_others(slot, Queued { tokens, pairs: peers.share.queued_prefill_pairs });
    }

    /// Returns the requests by LoRA adapter and by tenant, by slot.
    pub fn owners(&self) -> &[Owners] {
        &self.owners
    }

    /// Returns the loads of a slot from the tiers below the GPU.
    pub fn loads(&self, slot: usize) -> &TierLoads {
        &self.accounts[slot].loads
    }

    /// Returns the requests and the loads of a slot, for changes.
    pub fn parts_mut(&mut self, slot: usize) -> (&mut Owners, &mut TierLoads) {
        (&mut self.owners[slot], &mut self.accounts[slot].loads)
    }

    /// Sets the reported value of a declared indicator; `None`: the value is no longer known.
    pub fn set_declared(&mut self, slot: usize, id: DeclaredId, value: Option<f64>, at: Seconds) {
        self.declared.set(slot, id, value, at);
    }

    /// Returns the reported values of declared indicators.
    #[inline]
    pub fn declared(&self) -> &DeclaredValues {
        &self.declared
    }

    /// Returns the step time learned for the slot's instance.
    pub fn step_fit(&self, slot: usize) -> &StepFit {
        self.accounts[slot].steps.fit()
    }

    /// Returns the time of the instance's last load report.
    pub fn reported_at(&self, slot: usize) -> Option<Seconds> {
        self.accounts[slot].external.report.map(|report| report.at)
    }

    /// Returns this router's load on a slot.
    pub fn share(&self, slot: usize, now: Seconds) -> Share {
        Share {
            queued_prefill_tokens: self.backlogs.own_tokens(slot, now),
            queued_prefill_pairs: self.backlogs.own_pairs(slot, now),
            ..self.accounts[slot].share(self.recent_seconds, now)
        }
    }

    /// Returns the number of own requests on the slot, including bound ones.
    pub fn in_flight(&self, slot: usize) -> f64 {
        let own = &self.accounts[slot].own;
        own.coming + own.at_engine()
    }

    /// Returns the prefills queued on a slot at `now`.
    pub fn queued_on(&self, slot: usize, now: Seconds) -> Queued {
        Queued { tokens: self.backlogs.tokens(slot, now), pairs: self.backlogs.pairs(slot, now) }
    }

    /// Returns the columns that the queued prefill tokens of `slots` follow from.
    #[inline]
    pub fn drains(&self, slots: Range<usize>) -> Drains<'_> {
        self.backlogs.drains(slots)
    }

    /// Returns the attention pairs of the prefills queued on a slot at `now`.
    pub fn queued_pairs_on(&self, slot: usize, now: Seconds) -> f64 {
        self.backlogs.pairs(slot, now)
    }

    /// Returns the expected output tokens of a slot's queued requests, as far as known.
    pub fn bound_remaining_on(&self, slot: usize) -> f64 {
        let account = &self.accounts[slot];
        account.own.bound_remaining_tokens + account.peers.share.bound_remaining_tokens
    }

    fn write_fetches(&mut self, slot: usize) {
        let account = &self.accounts[slot];
        self.columns.get_mut(Indicator::Fetches)[slot] = account.fetches + account.peers.share.fetches;
    }

    /// Writes the columns of a slot whose own load has changed.
    fn write(&mut self, slot: usize) {
        self.write_columns(slot);
        self.changes.note(slot);
        self.peer_changes.note(slot);
    }

    fn write_columns(&mut self, slot: usize) {
        self.accounts[slot].write(slot, &mut self.columns);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::survival::{BUCKET_TOKENS, CurveSettings};
    use crate::estimate::{Answer, AnswerEnd};
    use crate::kv::tier::Tier;

    /// A segment that continues an answer, after a move or a cut, begins no other answer.
    #[test]
    fn an_answer_of_two_segments_is_one_answer() {
        let entry = |output_tokens: f64| Entry {
            prompt_tokens: 1000.0,
            new_tokens: 0.0,
            output_tokens,
            expected_output_tokens: None,
            stage: Stage::Bound,
            tier_tokens: 0.0,
            tier: Tier::Gpu,
            load_seconds: None,
            lora: 0,
            tenant: 0,
            whole_answer: false,
        };
        let learned = |moved_at: Option<f64>| {
            let mut ledger = Ledger::new(0.0);
            ledger.resize(2);
            ledger.set_ahead(Some(Ahead::new(2, BUCKET_TOKENS, None)));
            ledger.answers.keep_curve(CurveSettings::default());
            for answer in 0..100 {
                let key = (answer, 0);
                let mut decodes = |slot: usize, from: f64, to: f64| {
                    let mut entry = entry(from);
                    ledger.open(slot, answer, &entry, 0.0);
                    ledger.begin_decoding(slot, key, &mut entry, None, 0.0);
                    ledger.tokens(slot, key, &mut entry, to - from - 1.0, 0.0);
                    ledger.end(slot, key, &entry, 0.0);
                };
                decodes(0, 0.0, moved_at.unwrap_or(100.0));
                moved_at.into_iter().for_each(|at| decodes(1, at, 100.0));
                ledger.answers.ended(&Answer {
                    prompt_tokens: 1000,
                    length_class: None,
                    tokens: 100,
                    counted: 100.0,
                    end: AnswerEnd::Natural,
                });
            }
            ledger.answers.curve().unwrap().product_limit().boundaries().to_vec()
        };
        assert!(learned(None)[2] < 0.1);
        assert_eq!(learned(Some(50.0)), learned(None));
        assert_eq!(learned(Some(64.0)), learned(None));
    }
}

//! The in-flight ledger: what the router placed on each instance and has not seen end, beside what
//! engines and peers report. It is the only writer of the indicators that outlive a decision.
//!
//! Counts are written through to the columns at each event, so that a decision reads plain columns.
mod account;
mod ahead;
mod backlog;
mod counts;
mod declared;
mod external;
mod owners;
mod share;
mod windows;

pub use ahead::{AHEAD, Ahead, PROJECTED, WEIGHED};
pub use counts::{Entry, Stage};
pub use declared::DeclaredValues;
pub use external::Report;
pub use owners::Owners;
pub use share::Share;

use crate::estimate::step_watch::Prefilled;
use crate::estimate::{DecodeCost, StepFit, StepTime, attention_pairs};
use crate::ids::Seconds;
use crate::indicators::{Columns, DeclaredId, Indicator, IndicatorSet};
use account::Account;
use backlog::Backlogs;
use windows::WINDOW_SECONDS;

/// The in-flight ledger of all instances, by slot.
#[derive(Clone, Debug)]
pub struct Ledger {
    columns: Columns,
    declared: DeclaredValues,
    owners: Vec<Owners>,
    accounts: Vec<Account>,
    backlogs: Backlogs,
    /// Time constant of what counts as recent.
    recent_seconds: Seconds,
    /// What the load will be, if a policy or a forecast asks for it.
    ahead: Option<Ahead>,
}

impl Ledger {
    /// An empty ledger. `prior_rate`: tokens/s at which prefills drain until a rate was learned; 0:
    /// they do not drain by themselves.
    pub fn new(prior_rate: f64) -> Ledger {
        Ledger {
            columns: Columns::of(IndicatorSet::ALL.without(IndicatorSet::DERIVED)),
            declared: DeclaredValues::default(),
            owners: Vec::new(),
            accounts: Vec::new(),
            backlogs: Backlogs::new(prior_rate),
            recent_seconds: WINDOW_SECONDS,
            ahead: None,
        }
    }

    /// The indicators that the ledger keeps.
    #[inline]
    pub fn columns(&self) -> &Columns {
        &self.columns
    }

    /// The column of an indicator that the ledger keeps.
    #[inline]
    pub fn get(&self, id: Indicator) -> &[f64] {
        self.columns.get(id)
    }

    /// What the load will be; `None`: nothing asks for it.
    #[inline]
    pub fn ahead(&self) -> Option<&Ahead> {
        self.ahead.as_ref()
    }

    /// Keeps what the load will be from now on, or no more.
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
        self.ahead.iter_mut().for_each(|ahead| ahead.resize(slots));
    }

    /// Clears what is held of a slot, for its next instance.
    pub fn clear(&mut self, slot: usize) {
        self.accounts[slot] = Account::default();
        self.backlogs.clear(slot);
        self.declared.clear(slot);
        self.owners[slot] = Owners::default();
        self.ahead.iter_mut().for_each(|ahead| ahead.clear(slot));
        self.write(slot);
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
        self.columns.get_mut(Indicator::Pulls)[slot] = 0.0;
    }

    /// A segment was placed, and goes to its engine.
    pub fn open(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        self.accounts[slot].own.add(entry);
        self.owners[slot].add(entry);
        self.queue(slot, ticket, entry, now);
        self.write(slot);
    }

    /// A segment that follows another was placed: nothing of it is at the engine yet, and what of
    /// its prompt is computed here waits until it is.
    pub fn bind(&mut self, slot: usize, entry: &Entry) {
        self.accounts[slot].own.add(entry);
        self.owners[slot].add(entry);
        self.write(slot);
    }

    /// A segment decodes on a slot that began to before its load was looked ahead.
    pub fn resume(&mut self, slot: usize, entry: &Entry, now: Seconds) {
        self.ahead.iter_mut().for_each(|ahead| ahead.resume(slot, entry, now));
    }

    /// A segment (see `Leg::key`) that was placed is expected to decode from `start` on.
    pub fn expect(&mut self, slot: usize, key: (u32, u32), entry: &Entry, start: Seconds) {
        self.ahead.iter_mut().for_each(|ahead| ahead.bind(slot, key, entry, start));
    }

    /// A prompt joins the backlog: at the placement or, of a segment that follows another, when it
    /// is sent. (Engines begin prefills in this order.)
    pub fn queue(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        let account = &mut self.accounts[slot];
        let pairs = attention_pairs(entry.cached(), entry.new_tokens);
        account.windows.placed(entry.new_tokens, pairs, self.recent_seconds, now);
        self.backlogs.push(slot, ticket, entry, &account.rate, now);
    }

    /// The prefill that was placed last waits for what it pulls.
    pub fn wait(&mut self, slot: usize) {
        self.backlogs.wait(slot);
    }

    /// What a prefill waited for has come, or will not: it goes behind all that were placed
    /// meanwhile.
    pub fn requeue(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        self.backlogs.requeue(slot, ticket, entry, &self.accounts[slot].rate, now);
    }

    /// Counts what others pull from a slot.
    pub fn serve_pull(&mut self, slot: usize, more: f64) {
        self.accounts[slot].pulls += more;
        self.write_pulls(slot);
    }

    /// The turn of a segment that follows another has come: it goes to the engine.
    pub fn arrive(&mut self, slot: usize, entry: &mut Entry) {
        self.accounts[slot].own.advance(entry, Stage::Bound);
        self.write(slot);
    }

    /// The engine took a segment off its queue.
    pub fn scheduled(&mut self, slot: usize, entry: &mut Entry) {
        if entry.stage == Stage::Bound {
            self.accounts[slot].own.advance(entry, Stage::Scheduled);
            self.write(slot);
        }
    }

    /// The engine says that `left` tokens of a prefill are still to compute.
    pub fn rebook(&mut self, slot: usize, ticket: u32, left: f64, now: Seconds) {
        self.backlogs.set_left(slot, ticket, left, now);
    }

    /// The engine computed `tokens` more of a prefill.
    pub fn prefilled(&mut self, slot: usize, ticket: u32, tokens: f64, now: Seconds) {
        self.backlogs.computed(slot, ticket, tokens, now);
    }

    /// The first token of a segment came, which decodes from now on. `lag`: seconds since the
    /// segment before it ended.
    pub fn begin_decoding(
        &mut self,
        slot: usize,
        key: (u32, u32),
        entry: &mut Entry,
        lag: Option<Seconds>,
        now: Seconds,
    ) {
        self.first_token(slot, key.0, entry, now);
        self.ahead.iter_mut().for_each(|ahead| ahead.start(slot, key, entry, now, lag));
    }

    /// The first token came, here or of the next segment: the prefill is over.
    pub fn first_token(&mut self, slot: usize, ticket: u32, entry: &mut Entry, now: Seconds) {
        if entry.stage == Stage::Decoding {
            return;
        }
        let account = &mut self.accounts[slot];
        let (mut prefilled, mut idle_since) = (Prefilled::default(), None);
        if let Some(ended) = self.backlogs.end_through(slot, ticket, now) {
            prefilled = Prefilled { tokens: ended.tokens, pairs: ended.pairs };
            let began = now - ended.seconds;
            let alone = account.own.decoding == 0.0 && account.decoded_until <= began;
            idle_since = alone.then_some(began);
            account.rate.observe(ended.tokens, ended.pairs, ended.seconds);
            self.backlogs.price(slot, &account.rate);
            for (id, value) in [
                (Indicator::PrefillTokensPerSecond, account.rate.tokens_per_second()),
                (Indicator::PrefillRelativeError, account.rate.relative_error()),
            ] {
                self.columns.get_mut(id)[slot] = value.unwrap_or(f64::NAN);
            }
        }
        account.own.advance(entry, Stage::Decoding);
        self.count(slot, entry, 1.0, now);
        let account = &mut self.accounts[slot];
        let prefills = !self.backlogs.is_empty(slot);
        account.steps.first_token(ticket, prefilled, idle_since, now, account.batch(), prefills);
        self.write(slot);
    }

    /// `n` further output tokens came.
    pub fn tokens(&mut self, slot: usize, ticket: u32, entry: &mut Entry, n: f64, now: Seconds) {
        self.ahead.iter_mut().for_each(|ahead| ahead.grow(slot, entry, n, now));
        self.count(slot, entry, n, now);
        let account = &mut self.accounts[slot];
        let prefills = !self.backlogs.is_empty(slot);
        if account.steps.tokens(ticket, n, now, account.batch(), prefills) {
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

    /// A segment is over, however it ended.
    pub fn end(&mut self, slot: usize, key: (u32, u32), entry: &Entry, now: Seconds) {
        self.close(slot, key.0, entry, now);
        self.ahead.iter_mut().for_each(|ahead| ahead.end(slot, key, entry, now));
    }

    /// An answer ended well after so many tokens, of which `seen` were reported. `cost`: what a
    /// decode step costs.
    pub fn finished(&mut self, output_tokens: u32, seen: f64, cost: DecodeCost, now: Seconds) {
        self.ahead.iter_mut().for_each(|ahead| ahead.finished(output_tokens, seen, cost, now));
    }

    /// A segment that never decodes here is over: nothing was expected of it.
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

    /// Takes in an engine's report. What it counts beyond our own is others' load, where it reports
    /// both waiting and running; of our own, those beyond its waiting ones have left its queue.
    pub fn report(&mut self, slot: usize, report: Report) {
        let account = &mut self.accounts[slot];
        if let Some(waiting) = report.waiting {
            account.own.unqueued = (account.own.queued - waiting).max(0.0);
        }
        let (known, queued) = (account.known(), account.own.queued + account.peers.queued);
        account.external.compare(&report, known, queued);
        let kept = account.external.keep(report);
        for (id, value) in [
            (Indicator::ReportedWaiting, kept.waiting),
            (Indicator::ReportedRunning, kept.running),
            (Indicator::KvUsage, kept.kv_usage),
        ] {
            self.columns.get_mut(id)[slot] = value.unwrap_or(f64::NAN);
        }
        self.write(slot);
    }

    /// Requests by LoRA adapter and by tenant, by slot.
    pub fn owners(&self) -> &[Owners] {
        &self.owners
    }

    /// A producer reports a declared indicator of the slot's instance; `None`: its value is no longer known.
    pub fn set_declared(&mut self, slot: usize, id: DeclaredId, value: Option<f64>, at: Seconds) {
        self.declared.set(slot, id, value, at);
    }

    /// The reported values of declared indicators.
    #[inline]
    pub fn declared(&self) -> &DeclaredValues {
        &self.declared
    }

    /// The step time learned of the slot's instance.
    pub fn step_fit(&self, slot: usize) -> &StepFit {
        self.accounts[slot].steps.fit()
    }

    /// When the instance last reported its load.
    pub fn reported_at(&self, slot: usize) -> Option<Seconds> {
        self.accounts[slot].external.report.map(|report| report.at)
    }

    /// What the router has on a slot.
    pub fn share(&self, slot: usize, now: Seconds) -> Share {
        let Account { own, windows, pulls, .. } = &self.accounts[slot];
        let (recent_prefill_tokens, recent_prefill_pairs) = windows.recent(self.recent_seconds, now);
        let (window_prefill_tokens, window_output_tokens) = windows.sums(now);
        Share {
            coming: own.coming,
            queued: own.queued - own.unqueued,
            scheduled: own.scheduled + own.unqueued,
            decoding: own.decoding,
            decode_tokens: own.decode_tokens,
            bound_tokens: own.bound_tokens,
            remaining_tokens: own.remaining_tokens,
            bound_remaining_tokens: own.bound_remaining_tokens,
            queued_prefill_tokens: self.backlogs.own_tokens(slot, now),
            queued_prefill_pairs: self.backlogs.own_pairs(slot),
            recent_prefill_tokens,
            recent_prefill_pairs,
            window_prefill_tokens,
            window_output_tokens,
            pulls: *pulls,
        }
    }

    /// What peer routers have on a slot.
    pub fn peers(&self, slot: usize) -> &Share {
        &self.accounts[slot].peers
    }

    /// Sets what peer routers have on a slot.
    pub fn set_peers(&mut self, slot: usize, peers: Share, now: Seconds) {
        self.backlogs.set_peers(slot, peers.queued_prefill_tokens);
        let account = &mut self.accounts[slot];
        account.peers = peers;
        if peers.recent_prefill_tokens > 0.0 {
            account.windows.prefills_began(now);
        }
        self.write_pulls(slot);
        self.write(slot);
    }

    /// Own requests on the slot, bound ones included.
    pub fn in_flight(&self, slot: usize) -> f64 {
        let own = &self.accounts[slot].own;
        own.coming + own.at_engine()
    }

    /// Queued prefill tokens of a slot at `now`.
    pub fn queued_prefill_on(&self, slot: usize, now: Seconds) -> f64 {
        self.backlogs.tokens(slot, now)
    }

    /// Queued prefill tokens of each slot at `now`.
    #[inline]
    pub fn queued_prefill(&self, now: Seconds, out: &mut [f64]) {
        self.backlogs.all_tokens(now, out);
    }

    /// Attention pairs of the prefills queued on a slot, as far as they were not settled.
    pub fn queued_pairs_on(&self, slot: usize) -> f64 {
        self.backlogs.own_pairs(slot) + self.accounts[slot].peers.queued_prefill_pairs
    }

    /// Output tokens to come of those that have not left a slot's queue, where known.
    pub fn bound_remaining_on(&self, slot: usize) -> f64 {
        let account = &self.accounts[slot];
        account.own.bound_remaining_tokens + account.peers.bound_remaining_tokens
    }

    /// The decayed sums of each slot at `now`: prefill tokens placed, output tokens produced.
    pub fn windows(&self, now: Seconds, prefill: &mut [f64], output: &mut [f64]) {
        for ((account, prefill), output) in self.accounts.iter().zip(prefill).zip(output) {
            let (placed, produced) = account.windows.sums(now);
            *prefill = placed + account.peers.window_prefill_tokens;
            *output = produced + account.peers.window_output_tokens;
        }
    }

    /// Sets the time constant of what counts as recent.
    pub fn set_recent(&mut self, seconds: Seconds) {
        self.recent_seconds = seconds;
    }

    /// The share of its recent time that a slot spent on prefills, if they take what `step` says.
    pub fn prefill_share_on(&self, slot: usize, step: &StepTime, now: Seconds) -> f64 {
        let account = &self.accounts[slot];
        account.windows.prefill_share(&account.peers, step, self.recent_seconds, now)
    }

    fn write_pulls(&mut self, slot: usize) {
        let account = &self.accounts[slot];
        self.columns.get_mut(Indicator::Pulls)[slot] = account.pulls + account.peers.pulls;
    }

    fn write(&mut self, slot: usize) {
        self.accounts[slot].write(slot, &mut self.columns);
    }
}

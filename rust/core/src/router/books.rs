//! The router's own books: what it placed on each instance and has not seen end.
//!
//! Counts live beside the indicator columns and are written through to them at each event, so that a decision reads plain
//! columns. Everything here is integers in `f64`, so adding and taking away leaves no residue
//! (but for what drains between events, which is set to 0 with the last prefill).
use super::replicas::Share;
use crate::estimate::step_watch::{Batch, Prefilled, StepWatch};
use crate::estimate::{PrefillRate, StepFit, StepTime, attention_pairs};
use crate::ids::Seconds;
use crate::indicators::{Columns, Indicator};
use crate::wide::{greater, wide_fn};
use smallvec::SmallVec;
use std::collections::VecDeque;

/// Time constant of the `window_*` indicators, in seconds.
pub const WINDOW_SECONDS: f64 = 180.0;

/// Counts of one instance.
#[derive(Clone, Debug, Default)]
struct Counts {
    /// Ours bound here and not sent yet: their prompt is prefilled elsewhere.
    coming: f64,
    /// Ours without a first token, still in the engine's queue as far as we know.
    queued: f64,
    /// Ours without a first token, known to have left the engine's queue.
    scheduled: f64,
    /// Ours past their first token.
    decoding: f64,
    /// Of `queued`, those that have left the engine's queue by its last report (the oldest leave first).
    unqueued: f64,
    /// Others' waiting and running, from the last report.
    foreign_waiting: f64,
    foreign_running: f64,
    /// What the routers beside this one have here.
    replicas: Share,
    own_since: Span,
    /// What was last compared with our own: waiting, running, and the KV cache's usage, which tells two samples apart.
    compared: Option<(f64, f64, Option<f64>)>,
    decode_tokens: f64,
    bound_tokens: f64,
    remaining_tokens: f64,
    /// Output tokens to come of those that have not left the queue, where known.
    bound_remaining: f64,
    /// Prefixes that others pull from here.
    pulls: f64,
    /// Prefills not known to be over, in the order of placement.
    prefills: VecDeque<Prefill>,
    /// Seconds that what is left of them takes.
    left_seconds: Seconds,
    /// When the first of them became the first.
    head_since: Seconds,
    window_prefill: Decayed,
    /// The same over `Books::recent_seconds`, and the attention pairs of these.
    recent_prefill: Decayed,
    recent_pairs: Decayed,
    /// When the first of them was placed; infinite before.
    prefills_since: Seconds,
    window_output: Decayed,
    rate: PrefillRate,
    steps: StepWatch,
    /// When the last of those that decoded ended.
    decoded_until: Seconds,
    report: Option<Report>,
}

/// The fewest and the most requests of ours and of the routers beside us on an instance since its last report that said anything new: when in that time
/// a report was sampled is not known.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    least: f64,
    most: f64,
}

/// A prefill not known to be over.
#[derive(Clone, Copy, Debug)]
struct Prefill {
    ticket: u32,
    /// Tokens to compute, as booked, and their attention pairs.
    tokens: f64,
    pairs: f64,
    /// Whether it waits for what it pulls: prefills placed behind it do not.
    waits: bool,
    /// Of the tokens, still to compute when the backlog was last settled.
    left: f64,
    /// What one of them takes, by what is learned; 0 where nothing drains by itself.
    seconds_per_token: f64,
}

/// What an engine last said.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// When it was received.
    pub at: Seconds,
    /// Waiting requests.
    pub waiting: Option<f64>,
    /// Running requests.
    pub running: Option<f64>,
    /// Share of the KV cache in use, 0 to 1.
    pub kv_usage: Option<f64>,
}

/// A sum that fades with a time constant, which is the same at each call.
#[derive(Clone, Copy, Debug, Default)]
struct Decayed {
    value: f64,
    at: Seconds,
}

impl Decayed {
    fn now(&self, now: Seconds, over: Seconds) -> f64 {
        self.value * (-(now - self.at).max(0.0) / over).exp()
    }

    fn add(&mut self, amount: f64, now: Seconds, over: Seconds) {
        if now == self.at {
            self.value += amount; // many tokens of one moment
            return;
        }
        self.value = self.now(now, over) + amount;
        self.at = now;
    }
}

impl Counts {
    /// One of the queued is known to have left: the oldest, so one of those already taken for gone.
    fn leave_queue(&mut self) {
        self.queued -= 1.0;
        self.unqueued = (self.unqueued - 1.0).max(0.0);
    }

    /// What a token of such a prefill takes, by what is learned so far; 0 where nothing drains by itself.
    fn seconds_per_token(&self, tokens: f64, pairs: f64, prior_rate: f64) -> Seconds {
        match self.rate.seconds(tokens, pairs) {
            _ if prior_rate == 0.0 => 0.0,
            Some(seconds) if tokens > 0.0 => seconds / tokens,
            _ => 1.0 / prior_rate,
        }
    }

    /// Own requests that the engine may know of.
    fn own(&self) -> f64 {
        self.queued + self.scheduled + self.decoding
    }

    /// The same with those of the routers beside us.
    fn known(&self) -> f64 {
        self.own() + self.replicas.at_engine()
    }

    /// Their number may have changed.
    fn note_own(&mut self) {
        let own = self.known();
        self.own_since = Span { least: self.own_since.least.min(own), most: self.own_since.most.max(own) };
    }

    /// Others' requests: those of the report beyond our own. How many of ours the report counts depends on when it was sampled, so
    /// of the numbers that may be, the one closest to what was known counts.
    fn compare(&mut self, waiting: f64, running: f64, kv_usage: Option<f64>) {
        // The same figures to the last digit are the same sample: a page that somebody keeps. It tells nothing new.
        let told = Some((waiting, running, kv_usage));
        if self.compared == told {
            return;
        }
        // Only totals can be compared: what is ours of the engine's running requests depends on how far it is.
        let (all, own) = (waiting + running, self.known());
        let known = self.foreign_waiting + self.foreign_running;
        let foreign = known.min(all - self.own_since.least).max(all - self.own_since.most).max(0.0);
        self.foreign_waiting = foreign.min((waiting - self.queued - self.replicas.queued).max(0.0));
        self.foreign_running = foreign - self.foreign_waiting;
        (self.compared, self.own_since) = (told, Span { least: own, most: own });
    }

    /// What decodes.
    fn batch(&self) -> Batch {
        let (sequences, context) = (self.replicas.decoding, self.replicas.decode_tokens);
        Batch { sequences: self.decoding + sequences, context: self.decode_tokens + context }
    }

    fn write_tokens(&self, slot: usize, columns: &mut Columns) {
        let (bound, decode) = (
            self.bound_tokens + self.replicas.bound_tokens,
            self.decode_tokens + self.replicas.decode_tokens,
        );
        for (id, value) in [
            (Indicator::Tokens, bound + decode),
            (Indicator::DecodeTokens, decode),
            (Indicator::BoundTokens, bound),
            (Indicator::RemainingTokens, self.remaining_tokens + self.replicas.remaining_tokens),
        ] {
            columns.get_mut(id)[slot] = value;
        }
    }

    /// Attention pairs of its prefills, as far as they were not settled.
    fn queued_pairs(&self) -> f64 {
        let left = |p: &Prefill| if p.tokens > 0.0 { p.pairs * p.left / p.tokens } else { 0.0 };
        self.prefills.iter().map(left).sum()
    }

    /// Works out anew what all that is left takes.
    fn price(&mut self, prior_rate: f64) {
        let mut prefills = std::mem::take(&mut self.prefills);
        for prefill in &mut prefills {
            prefill.seconds_per_token = self.seconds_per_token(prefill.tokens, prefill.pairs, prior_rate);
        }
        self.left_seconds = prefills.iter().map(|p| p.left * p.seconds_per_token).sum();
        self.prefills = prefills;
    }
}

/// A ticket's share of the books, as long as it is open.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Prompt length in tokens.
    pub prompt_tokens: f64,
    /// Prompt tokens to compute there, by the index's word.
    pub new_tokens: f64,
    /// Output tokens seen.
    pub output_tokens: f64,
    /// Output tokens it may produce, where known.
    pub expected_output_tokens: Option<f64>,
    /// How far it is.
    pub stage: Stage,
}

impl Entry {
    fn remaining(&self) -> f64 {
        self.expected_output_tokens.map_or(0.0, |e| (e - self.output_tokens).max(0.0))
    }

    /// Output tokens to come; without end where nobody said.
    pub fn left(&self) -> f64 {
        self.expected_output_tokens.map_or(f64::INFINITY, |e| (e - self.output_tokens).max(0.0))
    }

    fn context(&self) -> f64 {
        self.prompt_tokens + self.output_tokens
    }
}

/// How far a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Bound here; the segment before it is at work elsewhere.
    Coming,
    /// Placed, perhaps sent; queued at the engine as far as we know.
    Bound,
    /// Known to have left the engine's queue; prefilling.
    Scheduled,
    /// Past its first token.
    Decoding,
}

/// Books of all instances, by slot.
#[derive(Clone, Debug, Default)]
pub struct Books {
    counts: Vec<Counts>,
    /// Backlog of prefill tokens by slot, in columns of their own for the decision's one pass: tokens left when it was last
    /// settled, when that was, and the rate at which it drains since.
    left: Vec<f64>,
    since: Vec<f64>,
    rate: Vec<f64>,
    /// The same of the routers beside this one, as they told it last.
    others_left: Vec<f64>,
    /// The rate until one was learned, tokens/s; 0 where exact progress is reported and nothing drains by itself.
    prior_rate: f64,
    /// Time constant of what counts as recent.
    recent_seconds: Seconds,
}

impl Books {
    /// Empty books. `prior_rate`: tokens/s at which prefills drain until a rate was learned; 0: they do not drain by themselves.
    pub fn new(prior_rate: f64) -> Books {
        Books { prior_rate, recent_seconds: WINDOW_SECONDS, ..Books::default() }
    }

    /// Opens books for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.counts.resize_with(slots, Counts::default);
        for column in [&mut self.left, &mut self.since, &mut self.rate, &mut self.others_left] {
            column.resize(slots, 0.0);
        }
    }

    /// Clears the books of a slot, for its next instance.
    pub fn clear(&mut self, slot: usize, columns: &mut Columns) {
        self.counts[slot] = Counts { prefills_since: f64::INFINITY, ..Counts::default() };
        (self.left[slot], self.since[slot], self.rate[slot]) = (0.0, 0.0, self.prior_rate);
        self.others_left[slot] = 0.0;
        self.write(slot, columns);
        for id in [
            Indicator::KvUsage,
            Indicator::ReportedWaiting,
            Indicator::ReportedRunning,
            Indicator::ReportAgeSeconds,
            Indicator::PrefillTokensPerSecond,
            Indicator::PrefillRelativeError,
            Indicator::StepRelativeError,
            Indicator::DecodeTokensPerSecond,
        ] {
            columns.get_mut(id)[slot] = f64::NAN;
        }
        columns.get_mut(Indicator::IndexBlocks)[slot] = 0.0;
        columns.get_mut(Indicator::Pulls)[slot] = 0.0;
    }

    /// Books a placement.
    pub fn open(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        c.queued += 1.0;
        c.bound_tokens += entry.context();
        c.bound_remaining += entry.remaining();
        self.queue(slot, ticket, entry, now);
        self.write(slot, columns);
    }

    /// Its prompt joins the backlog: at the placement or, of a segment that follows another, when it is sent. (Engines begin prefills in this order.)
    pub fn queue(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        let tokens = entry.new_tokens;
        let c = &mut self.counts[slot];
        c.window_prefill.add(tokens, now, WINDOW_SECONDS);
        c.prefills_since = c.prefills_since.min(now);
        c.recent_prefill.add(tokens, now, self.recent_seconds);
        let pairs = attention_pairs((entry.context() - tokens).max(0.0), tokens);
        c.recent_pairs.add(pairs, now, self.recent_seconds);
        self.push(slot, ticket, entry, now);
    }

    /// The prefill that was placed last waits for what it pulls.
    pub fn wait(&mut self, slot: usize) {
        if let Some(last) = self.counts[slot].prefills.back_mut() {
            last.waits = true;
        }
    }

    /// What a prefill waited for has come, or will not: it goes behind all that were placed meanwhile.
    pub fn requeue(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        self.settle(slot, now);
        let c = &mut self.counts[slot];
        if let Some(i) = c.prefills.iter().position(|p| p.ticket == ticket) {
            let gone = c.prefills.remove(i).expect("just found");
            self.take_off(slot, gone.left, gone.left * gone.seconds_per_token);
        }
        self.push(slot, ticket, entry, now);
    }

    /// Counts what others pull from a slot.
    pub fn serve_pull(&mut self, slot: usize, more: f64, columns: &mut Columns) {
        self.counts[slot].pulls += more;
        columns.get_mut(Indicator::Pulls)[slot] = self.counts[slot].pulls + self.counts[slot].replicas.pulls;
    }

    fn push(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds) {
        let c = &mut self.counts[slot];
        if c.prefills.iter().all(|prefill| prefill.waits) {
            c.head_since = now;
        }
        self.settle(slot, now);
        self.left[slot] += entry.new_tokens;
        let c = &mut self.counts[slot];
        let tokens = entry.new_tokens;
        let pairs = attention_pairs((entry.context() - tokens).max(0.0), tokens);
        let seconds_per_token = c.seconds_per_token(tokens, pairs, self.prior_rate);
        c.left_seconds += tokens * seconds_per_token;
        c.prefills.push_back(Prefill {
            ticket,
            tokens,
            pairs,
            waits: false,
            left: tokens,
            seconds_per_token,
        });
        self.drain_rate(slot);
    }

    /// Books a segment that follows another: nothing of it is at the engine yet, and what of its prompt is computed here waits until it is.
    pub fn bind(&mut self, slot: usize, entry: &Entry, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        c.coming += 1.0;
        c.bound_tokens += entry.context();
        c.bound_remaining += entry.remaining();
        self.write(slot, columns);
    }

    /// Its turn has come: it goes to the engine.
    pub fn arrive(&mut self, slot: usize, entry: &mut Entry, columns: &mut Columns) {
        entry.stage = Stage::Bound;
        let c = &mut self.counts[slot];
        c.coming -= 1.0;
        c.queued += 1.0;
        self.write(slot, columns);
    }

    /// The engine took it off its queue.
    pub fn scheduled(&mut self, slot: usize, entry: &mut Entry, columns: &mut Columns) {
        if entry.stage == Stage::Bound {
            entry.stage = Stage::Scheduled;
            let c = &mut self.counts[slot];
            c.leave_queue();
            c.scheduled += 1.0;
            c.remaining_tokens += entry.remaining();
            c.bound_remaining -= entry.remaining();
            self.write(slot, columns);
        }
    }

    /// The engine says that `left` tokens of its prefill are still to compute.
    pub fn rebook(&mut self, slot: usize, ticket: u32, left: f64, now: Seconds) {
        self.settle(slot, now);
        if let Some(prefill) = self.counts[slot].prefills.iter_mut().find(|p| p.ticket == ticket) {
            self.left[slot] = (self.left[slot] - prefill.left + left).max(0.0);
            let more = prefill.seconds_per_token * (left - prefill.left);
            prefill.left = left;
            self.counts[slot].left_seconds += more;
            self.drain_rate(slot);
        }
    }

    /// The engine computed `tokens` more of its prefill.
    pub fn prefilled(&mut self, slot: usize, ticket: u32, tokens: f64, now: Seconds) {
        self.settle(slot, now);
        if let Some(prefill) = self.counts[slot].prefills.iter_mut().find(|p| p.ticket == ticket) {
            let done = tokens.min(prefill.left);
            prefill.left -= done;
            let seconds = done * prefill.seconds_per_token;
            self.left[slot] = (self.left[slot] - done).max(0.0);
            self.counts[slot].left_seconds -= seconds;
            self.drain_rate(slot);
        }
    }

    /// The first token came: prefill is over.
    pub fn first_token(
        &mut self,
        slot: usize,
        ticket: u32,
        entry: &mut Entry,
        now: Seconds,
        columns: &mut Columns,
    ) {
        if entry.stage == Stage::Decoding {
            return;
        }
        let (mut ended, mut idle_since) = (Prefilled::default(), None);
        if let Some((tokens, pairs, seconds)) = self.end_prefills_to(slot, ticket, now) {
            let c = &mut self.counts[slot];
            ended = Prefilled { tokens, pairs };
            let alone = c.decoding == 0.0 && c.decoded_until <= now - seconds;
            idle_since = alone.then_some(now - seconds);
            c.rate.observe(tokens, pairs, seconds);
            c.price(self.prior_rate);
            self.drain_rate(slot);
            let rate = &self.counts[slot].rate;
            for (id, value) in [
                (Indicator::PrefillTokensPerSecond, rate.tokens_per_second()),
                (Indicator::PrefillRelativeError, rate.relative_error()),
            ] {
                columns.get_mut(id)[slot] = value.unwrap_or(f64::NAN);
            }
        }
        let c = &mut self.counts[slot];
        match entry.stage {
            Stage::Bound => {
                c.leave_queue();
                c.remaining_tokens += entry.remaining();
                c.bound_remaining -= entry.remaining();
            }
            Stage::Coming => {
                c.coming -= 1.0;
                c.remaining_tokens += entry.remaining();
                c.bound_remaining -= entry.remaining();
            }
            _ => c.scheduled -= 1.0,
        }
        c.decoding += 1.0;
        c.bound_tokens -= entry.context();
        c.decode_tokens += entry.context();
        entry.stage = Stage::Decoding;
        self.count(slot, entry, 1.0, now, columns);
        let c = &mut self.counts[slot];
        c.steps.first_token(ticket, ended, idle_since, now, c.batch(), !c.prefills.is_empty());
        self.write(slot, columns);
    }

    /// `n` further output tokens came.
    pub fn tokens(
        &mut self,
        slot: usize,
        ticket: u32,
        entry: &mut Entry,
        n: f64,
        now: Seconds,
        columns: &mut Columns,
    ) {
        self.count(slot, entry, n, now, columns);
        let c = &mut self.counts[slot];
        if c.steps.tokens(ticket, n, now, c.batch(), !c.prefills.is_empty()) {
            columns.get_mut(Indicator::StepRelativeError)[slot] =
                c.steps.fit().relative_error().unwrap_or(f64::NAN);
        }
    }

    fn count(&mut self, slot: usize, entry: &mut Entry, n: f64, now: Seconds, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        c.remaining_tokens -= entry.remaining();
        entry.output_tokens += n;
        c.remaining_tokens += entry.remaining();
        c.decode_tokens += n;
        c.window_output.add(n, now, WINDOW_SECONDS);
        c.write_tokens(slot, columns);
    }

    /// Takes a placement off the books, however it ended.
    pub fn close(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds, columns: &mut Columns) {
        if entry.stage != Stage::Decoding {
            self.end_prefill(slot, ticket, now);
        }
        let c = &mut self.counts[slot];
        c.steps.ended(ticket);
        match entry.stage {
            Stage::Coming => {
                c.coming -= 1.0;
                c.bound_remaining -= entry.remaining();
            }
            Stage::Bound => {
                c.leave_queue();
                c.bound_remaining -= entry.remaining();
            }
            Stage::Scheduled => {
                c.scheduled -= 1.0;
                c.remaining_tokens -= entry.remaining();
            }
            Stage::Decoding => {
                c.decoding -= 1.0;
                c.decoded_until = now;
                c.remaining_tokens -= entry.remaining();
            }
        }
        if entry.stage == Stage::Decoding {
            c.decode_tokens -= entry.context();
        } else {
            c.bound_tokens -= entry.context();
        }
        self.write(slot, columns);
    }

    /// Takes what drained since the backlog was last settled off the prefills, in their order.
    fn settle(&mut self, slot: usize, now: Seconds) {
        let mut done = (self.rate[slot] * (now - self.since[slot])).clamp(0.0, self.left[slot]);
        self.since[slot] = now;
        self.left[slot] -= done;
        let c = &mut self.counts[slot];
        for prefill in &mut c.prefills {
            if done <= 0.0 {
                break;
            }
            let part = done.min(prefill.left);
            prefill.left -= part;
            c.left_seconds -= part * prefill.seconds_per_token;
            done -= part;
        }
        self.drain_rate(slot);
    }

    /// What is left drains evenly in the seconds that its prefills take: long prompts take longer a token.
    fn drain_rate(&mut self, slot: usize) {
        let seconds = self.counts[slot].left_seconds;
        self.rate[slot] = if seconds > 0.0 { self.left[slot] / seconds } else { 0.0 };
    }

    /// Ends a prefill that will have no first token.
    fn end_prefill(&mut self, slot: usize, ticket: u32, now: Seconds) {
        self.settle(slot, now);
        let c = &mut self.counts[slot];
        let Some(i) = c.prefills.iter().position(|p| p.ticket == ticket) else { return };
        let gone = c.prefills.remove(i).expect("just found");
        c.steps.disturbed();
        if i == 0 && !gone.waits {
            c.head_since = now;
        }
        self.take_off(slot, gone.left, gone.left * gone.seconds_per_token);
    }

    /// Takes ended prefills off what is left. (A sum and its parts are rounded apart: a sum may end below zero.)
    fn take_off(&mut self, slot: usize, tokens: f64, seconds: Seconds) {
        let c = &mut self.counts[slot];
        (self.left[slot], c.left_seconds) = match c.prefills.is_empty() {
            true => (0.0, 0.0),
            false => ((self.left[slot] - tokens).max(0.0), (c.left_seconds - seconds).max(0.0)),
        };
        self.drain_rate(slot);
    }

    /// Ends a prefill whose first token came, and with it all that were placed before: engines begin prefills in order, and
    /// requests that do not stream never tell. Returns the tokens computed, their attention pairs, and the seconds since the
    /// first of them began.
    fn end_prefills_to(&mut self, slot: usize, ticket: u32, now: Seconds) -> Option<(f64, f64, Seconds)> {
        self.settle(slot, now);
        let c = &mut self.counts[slot];
        let last = c.prefills.iter().position(|p| p.ticket == ticket)?;
        let (mut tokens, mut pairs, mut left, mut left_seconds) = (0.0, 0.0, 0.0, 0.0);
        let mut waiting: SmallVec<[Prefill; 4]> = SmallVec::new();
        for gone in c.prefills.drain(..=last) {
            if gone.waits && gone.ticket != ticket {
                waiting.push(gone);
                continue;
            }
            tokens += gone.tokens;
            pairs += gone.pairs;
            left += gone.left;
            left_seconds += gone.left * gone.seconds_per_token;
        }
        waiting.into_iter().rev().for_each(|prefill| c.prefills.push_front(prefill));
        let seconds = now - c.head_since;
        c.head_since = now;
        self.take_off(slot, left, left_seconds);
        Some((tokens, pairs, seconds))
    }

    /// Takes in an engine's report. What it counts beyond our own is others' load, where it reports both waiting and running; of our
    /// own, those beyond its waiting ones have left its queue.
    pub fn report(&mut self, slot: usize, report: Report, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        if let Some(waiting) = report.waiting {
            c.unqueued = (c.queued - waiting).max(0.0);
        }
        if let (Some(waiting), Some(running)) = (report.waiting, report.running) {
            c.compare(waiting, running, report.kv_usage);
        }
        let last = c.report.get_or_insert(report);
        last.at = report.at;
        for (kept, new, id) in [
            (&mut last.waiting, report.waiting, Indicator::ReportedWaiting),
            (&mut last.running, report.running, Indicator::ReportedRunning),
            (&mut last.kv_usage, report.kv_usage, Indicator::KvUsage),
        ] {
            *kept = new.or(*kept);
            columns.get_mut(id)[slot] = kept.unwrap_or(f64::NAN);
        }
        self.write(slot, columns);
    }

    /// The step time learned of the slot's instance.
    pub fn step_fit(&self, slot: usize) -> &StepFit {
        self.counts[slot].steps.fit()
    }

    /// When the instance last reported its load.
    pub fn reported_at(&self, slot: usize) -> Option<Seconds> {
        self.counts[slot].report.map(|r| r.at)
    }

    /// What the router has on a slot.
    pub fn share(&self, slot: usize, now: Seconds) -> Share {
        let c = &self.counts[slot];
        Share {
            coming: c.coming,
            queued: c.queued - c.unqueued,
            scheduled: c.scheduled + c.unqueued,
            decoding: c.decoding,
            decode_tokens: c.decode_tokens,
            bound_tokens: c.bound_tokens,
            remaining_tokens: c.remaining_tokens,
            bound_remaining_tokens: c.bound_remaining,
            queued_prefill_tokens: self.own_queued_prefill_on(slot, now),
            queued_prefill_pairs: c.queued_pairs(),
            recent_prefill_tokens: c.recent_prefill.now(now, self.recent_seconds),
            recent_prefill_pairs: c.recent_pairs.now(now, self.recent_seconds),
            window_prefill_tokens: c.window_prefill.now(now, WINDOW_SECONDS),
            window_output_tokens: c.window_output.now(now, WINDOW_SECONDS),
            pulls: c.pulls,
        }
    }

    /// What the routers beside this one have on a slot.
    pub fn replicas(&self, slot: usize) -> &Share {
        &self.counts[slot].replicas
    }

    /// Says so.
    pub fn set_replicas(&mut self, slot: usize, replicas: Share, now: Seconds, columns: &mut Columns) {
        self.others_left[slot] = replicas.queued_prefill_tokens;
        let c = &mut self.counts[slot];
        c.replicas = replicas;
        if replicas.recent_prefill_tokens > 0.0 {
            c.prefills_since = c.prefills_since.min(now);
        }
        columns.get_mut(Indicator::Pulls)[slot] = self.counts[slot].pulls + replicas.pulls;
        self.write(slot, columns);
    }

    /// Own requests on the slot, bound ones included.
    pub fn in_flight(&self, slot: usize) -> f64 {
        let c = &self.counts[slot];
        c.coming + c.own()
    }

    /// Queued prefill tokens of a slot at `now`.
    pub fn queued_prefill_on(&self, slot: usize, now: Seconds) -> f64 {
        self.own_queued_prefill_on(slot, now) + self.others_left[slot]
    }

    fn own_queued_prefill_on(&self, slot: usize, now: Seconds) -> f64 {
        let mut out = [0.0];
        let at = slot..slot + 1;
        drained(&self.left[at.clone()], &self.since[at.clone()], &self.rate[at], &[0.0], now, &mut out);
        out[0]
    }

    /// Attention pairs of the prefills queued on a slot, as far as they were not settled.
    pub fn queued_pairs_on(&self, slot: usize) -> f64 {
        self.counts[slot].queued_pairs() + self.counts[slot].replicas.queued_prefill_pairs
    }

    /// Output tokens to come of those that have not left a slot's queue, where known.
    pub fn bound_remaining_on(&self, slot: usize) -> f64 {
        self.counts[slot].bound_remaining + self.counts[slot].replicas.bound_remaining_tokens
    }

    /// Queued prefill tokens of each slot at `now`, in one pass over four columns.
    #[inline]
    pub fn queued_prefill(&self, now: Seconds, out: &mut [f64]) {
        drained(&self.left, &self.since, &self.rate, &self.others_left, now, out);
    }

    /// The decayed sums of each slot at `now`: prefill tokens placed, output tokens produced.
    pub fn windows(&self, now: Seconds, prefill: &mut [f64], output: &mut [f64]) {
        for ((c, p), o) in self.counts.iter().zip(prefill).zip(output) {
            *p = c.window_prefill.now(now, WINDOW_SECONDS) + c.replicas.window_prefill_tokens;
            *o = c.window_output.now(now, WINDOW_SECONDS) + c.replicas.window_output_tokens;
        }
    }

    /// Sets the time constant of what counts as recent.
    pub fn set_recent(&mut self, seconds: Seconds) {
        self.recent_seconds = seconds;
    }

    /// The share of its time that a slot of late spent on prefills, if they take what `step` says: those placed there, older ones for less.
    pub fn prefill_share_on(&self, slot: usize, step: &StepTime, now: Seconds) -> f64 {
        let c = &self.counts[slot];
        let over = self.recent_seconds;
        let (tokens, pairs) = (c.recent_prefill.now(now, over), c.recent_pairs.now(now, over));
        let seconds =
            step.prefills(tokens + c.replicas.recent_prefill_tokens, pairs + c.replicas.recent_prefill_pairs);
        // The time that there is to tell of, faded as they are, and a thirtieth of all at least: a first prefill is not all that ever will be.
        let seen = over * (1.0 - ((c.prefills_since - now) / over).exp());
        if seconds > 0.0 { seconds / seen.max(over / 30.0) } else { 0.0 }
    }

    fn write(&mut self, slot: usize, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        c.note_own();
        let replicas = &c.replicas;
        let waiting =
            c.coming + c.queued - c.unqueued + c.foreign_waiting + replicas.coming + replicas.queued;
        let running = c.unqueued
            + c.scheduled
            + c.decoding
            + c.foreign_running
            + replicas.scheduled
            + replicas.decoding;
        for (id, value) in [
            (Indicator::QBs, waiting),
            (Indicator::RBs, running),
            (Indicator::Bs, waiting + running),
            (Indicator::DecodeBs, c.decoding + replicas.decoding),
            (
                Indicator::BoundBs,
                c.coming + c.queued + c.scheduled + replicas.coming + replicas.queued + replicas.scheduled,
            ),
        ] {
            columns.get_mut(id)[slot] = value;
        }
        c.write_tokens(slot, columns);
    }
}

wide_fn! {
    fn drained(left: &[f64], since: &[f64], rate: &[f64], more: &[f64], now: Seconds, out: &mut [f64]) {
        let slots = out.len();
        let (left, since, rate, more) = (&left[..slots], &since[..slots], &rate[..slots], &more[..slots]);
        for i in 0..slots {
            out[i] = greater(left[i] - rate[i] * greater(now - since[i], 0.0), 0.0) + more[i];
        }
    }
}

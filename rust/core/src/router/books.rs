//! The router's own books: what it placed on each instance and has not seen end.
//!
//! Counts live beside the indicator columns and are written through to them at each event, so that a decision reads plain
//! columns. Everything here is integers in `f64`, so adding and taking away leaves no residue.
use crate::estimate::PrefillRate;
use crate::ids::Seconds;
use crate::indicators::{Columns, Indicator};
use crate::wide::{greater, wide_fn};
use std::collections::VecDeque;

/// Time constant of the `window_*` indicators, in seconds.
pub const WINDOW_SECONDS: f64 = 180.0;

/// Counts of one instance.
#[derive(Clone, Debug, Default)]
struct Counts {
    /// Ours without a first token, still in the engine's queue as far as we know.
    queued: f64,
    /// Ours without a first token, known to have left the engine's queue.
    scheduled: f64,
    /// Ours past their first token.
    decoding: f64,
    /// Others' waiting and running, from the last report.
    foreign_waiting: f64,
    foreign_running: f64,
    decode_tokens: f64,
    bound_tokens: f64,
    remaining_tokens: f64,
    /// Tickets without a first token with their prefill tokens left, in the order of placement.
    prefills: VecDeque<(u32, f64)>,
    window_prefill: Decayed,
    window_output: Decayed,
    rate: PrefillRate,
    report: Option<Report>,
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

/// A sum that fades with [`WINDOW_SECONDS`].
#[derive(Clone, Copy, Debug, Default)]
struct Decayed {
    value: f64,
    at: Seconds,
}

impl Decayed {
    fn now(&self, now: Seconds) -> f64 {
        self.value * (-(now - self.at).max(0.0) / WINDOW_SECONDS).exp()
    }

    fn add(&mut self, amount: f64, now: Seconds) {
        self.value = self.now(now) + amount;
        self.at = now;
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

    fn context(&self) -> f64 {
        self.prompt_tokens + self.output_tokens
    }
}

/// How far a segment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
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
    /// Backlog of prefill tokens by slot, in columns of their own for the decision's one pass: the head prefill's tokens
    /// left when it became head, when that was, the sum of all behind it, and the learned rate (0 until learned).
    head: Vec<f64>,
    since: Vec<f64>,
    behind: Vec<f64>,
    rate: Vec<f64>,
    /// Whether the backlog drains between events at the learned rate. Off where exact progress is reported.
    drain: bool,
}

impl Books {
    /// Empty books. `drain`: see [`super::RouterConfig::drain`].
    pub fn new(drain: bool) -> Books {
        Books { drain, ..Books::default() }
    }

    /// Opens books for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.counts.resize_with(slots, Counts::default);
        for column in [&mut self.head, &mut self.since, &mut self.behind, &mut self.rate] {
            column.resize(slots, 0.0);
        }
    }

    /// Clears the books of a slot, for its next instance.
    pub fn clear(&mut self, slot: usize, columns: &mut Columns) {
        self.counts[slot] = Counts::default();
        for column in [&mut self.head, &mut self.since, &mut self.behind, &mut self.rate] {
            column[slot] = 0.0;
        }
        self.write(slot, columns);
        for id in [
            Indicator::KvUsage,
            Indicator::ReportedWaiting,
            Indicator::ReportedRunning,
            Indicator::ReportAgeSeconds,
            Indicator::PrefillTokensPerSecond,
        ] {
            columns.get_mut(id)[slot] = f64::NAN;
        }
        columns.get_mut(Indicator::IndexBlocks)[slot] = 0.0;
    }

    /// Books a placement.
    pub fn open(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        c.queued += 1.0;
        c.bound_tokens += entry.prompt_tokens;
        c.window_prefill.add(entry.new_tokens, now);
        if c.prefills.is_empty() {
            self.head[slot] = entry.new_tokens;
            self.since[slot] = now;
        } else {
            self.behind[slot] += entry.new_tokens;
        }
        c.prefills.push_back((ticket, entry.new_tokens));
        self.write(slot, columns);
    }

    /// The engine took it off its queue.
    pub fn scheduled(&mut self, slot: usize, entry: &mut Entry, columns: &mut Columns) {
        if entry.stage == Stage::Bound {
            entry.stage = Stage::Scheduled;
            let c = &mut self.counts[slot];
            c.queued -= 1.0;
            c.scheduled += 1.0;
            c.remaining_tokens += entry.remaining();
            self.write(slot, columns);
        }
    }

    /// The engine computed `tokens` more of its prefill.
    pub fn prefilled(&mut self, slot: usize, ticket: u32, tokens: f64) {
        let c = &mut self.counts[slot];
        if let Some(i) = c.prefills.iter().position(|(t, _)| *t == ticket) {
            let done = tokens.min(c.prefills[i].1);
            c.prefills[i].1 -= done;
            let left = if i == 0 { &mut self.head[slot] } else { &mut self.behind[slot] };
            *left -= done;
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
        if let Some(seconds) = self.end_prefill(slot, ticket, now) {
            let c = &mut self.counts[slot];
            c.rate.observe(entry.new_tokens, seconds);
            if let Some(rate) = c.rate.tokens_per_second() {
                self.rate[slot] = if self.drain { rate } else { 0.0 };
                columns.get_mut(Indicator::PrefillTokensPerSecond)[slot] = rate;
            }
        }
        let c = &mut self.counts[slot];
        match entry.stage {
            Stage::Bound => {
                c.queued -= 1.0;
                c.remaining_tokens += entry.remaining();
            }
            _ => c.scheduled -= 1.0,
        }
        c.decoding += 1.0;
        c.bound_tokens -= entry.prompt_tokens;
        c.decode_tokens += entry.context();
        entry.stage = Stage::Decoding;
        self.tokens(slot, entry, 1.0, now, columns);
        self.write(slot, columns);
    }

    /// `n` further output tokens came.
    pub fn tokens(&mut self, slot: usize, entry: &mut Entry, n: f64, now: Seconds, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        c.remaining_tokens -= entry.remaining();
        entry.output_tokens += n;
        c.remaining_tokens += entry.remaining();
        c.decode_tokens += n;
        c.window_output.add(n, now);
        columns.get_mut(Indicator::Tokens)[slot] = c.bound_tokens + c.decode_tokens;
        columns.get_mut(Indicator::DecodeTokens)[slot] = c.decode_tokens;
        columns.get_mut(Indicator::RemainingTokens)[slot] = c.remaining_tokens;
    }

    /// Takes a placement off the books, however it ended.
    pub fn close(&mut self, slot: usize, ticket: u32, entry: &Entry, now: Seconds, columns: &mut Columns) {
        if entry.stage != Stage::Decoding {
            self.end_prefill(slot, ticket, now);
        }
        let c = &mut self.counts[slot];
        match entry.stage {
            Stage::Bound => c.queued -= 1.0,
            Stage::Scheduled => {
                c.scheduled -= 1.0;
                c.remaining_tokens -= entry.remaining();
            }
            Stage::Decoding => {
                c.decoding -= 1.0;
                c.remaining_tokens -= entry.remaining();
            }
        }
        if entry.stage == Stage::Decoding {
            c.decode_tokens -= entry.context();
        } else {
            c.bound_tokens -= entry.prompt_tokens;
        }
        self.write(slot, columns);
    }

    /// Ends a prefill; seconds since it became the head, if it was.
    fn end_prefill(&mut self, slot: usize, ticket: u32, now: Seconds) -> Option<Seconds> {
        let prefills = &mut self.counts[slot].prefills;
        let i = prefills.iter().position(|(t, _)| *t == ticket)?;
        let (_, left) = prefills.remove(i).expect("just found");
        if i > 0 {
            self.behind[slot] -= left;
            return None;
        }
        let seconds = now - self.since[slot];
        let next = prefills.front().map_or(0.0, |(_, tokens)| *tokens);
        self.behind[slot] -= next;
        self.head[slot] = next;
        self.since[slot] = now;
        Some(seconds)
    }

    /// Takes in an engine's report. What it counts beyond our own is others' load: `max(0, report - own)`.
    pub fn report(&mut self, slot: usize, report: Report, columns: &mut Columns) {
        let c = &mut self.counts[slot];
        let own = c.queued + c.scheduled + c.decoding;
        if report.waiting.is_some() || report.running.is_some() {
            let (waiting, running) = (report.waiting.unwrap_or(0.0), report.running.unwrap_or(0.0));
            // Engines count a prefill in progress as running, we count it as queued until its first token: only the totals
            // can be compared; the waiting part of the rest is what their queue holds beyond ours.
            let foreign = (waiting + running - own).max(0.0);
            c.foreign_waiting = foreign.min((waiting - c.queued).max(0.0));
            c.foreign_running = foreign - c.foreign_waiting;
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

    /// When the instance last reported its load.
    pub fn reported_at(&self, slot: usize) -> Option<Seconds> {
        self.counts[slot].report.map(|r| r.at)
    }

    /// Own requests on the slot.
    pub fn in_flight(&self, slot: usize) -> f64 {
        let c = &self.counts[slot];
        c.queued + c.scheduled + c.decoding
    }

    /// Queued prefill tokens of each slot at `now`, in one pass over four columns. Only the head prefill drains between events:
    /// an engine that has not finished it cannot be far into the next.
    #[inline]
    pub fn queued_prefill(&self, now: Seconds, out: &mut [f64]) {
        drained(&self.head, &self.since, &self.behind, &self.rate, now, out);
    }

    /// The decayed sums of each slot at `now`: prefill tokens placed, output tokens produced.
    pub fn windows(&self, now: Seconds, prefill: &mut [f64], output: &mut [f64]) {
        for ((c, p), o) in self.counts.iter().zip(prefill).zip(output) {
            *p = c.window_prefill.now(now);
            *o = c.window_output.now(now);
        }
    }

    fn write(&self, slot: usize, columns: &mut Columns) {
        let c = &self.counts[slot];
        let waiting = c.queued + c.foreign_waiting;
        let running = c.scheduled + c.decoding + c.foreign_running;
        for (id, value) in [
            (Indicator::QBs, waiting),
            (Indicator::RBs, running),
            (Indicator::Bs, waiting + running),
            (Indicator::DecodeBs, c.decoding),
            (Indicator::BoundBs, c.queued + c.scheduled),
            (Indicator::Tokens, c.bound_tokens + c.decode_tokens),
            (Indicator::DecodeTokens, c.decode_tokens),
            (Indicator::BoundTokens, c.bound_tokens),
            (Indicator::RemainingTokens, c.remaining_tokens),
        ] {
            columns.get_mut(id)[slot] = value;
        }
    }
}

wide_fn! {
    fn drained(head: &[f64], since: &[f64], behind: &[f64], rate: &[f64], now: Seconds, out: &mut [f64]) {
        let slots = out.len();
        let (head, since, behind, rate) = (&head[..slots], &since[..slots], &behind[..slots], &rate[..slots]);
        for i in 0..slots {
            out[i] = behind[i] + greater(head[i] - rate[i] * (now - since[i]), 0.0);
        }
    }
}

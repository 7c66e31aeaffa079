//! Budgets: how much an account may use in a period, in requests or tokens.
//!
//! A request reserves what it may use at most, and settles what it has used. The reservation counts
//! from its time on. If the request uses less, the rest is given back there; if it uses more, the
//! excess counts from the settlement on. A request is checked against all windows of its account
//! before any window is charged.
//!
//! With a [`Board`], all workers of a server share the counts. Each worker checks and then charges,
//! so a window may be exceeded by at most one reservation for each further worker.
//!
//! With an [`Exchange`], routers share the counts by messages: each router counts what the others
//! had used at their last message.
mod calendar;
mod exchange;
mod message;
mod ring;
mod rows;
mod save;
#[cfg(test)]
mod tests;

use crate::board::Board;
use crate::ids::Seconds;
use hashbrown::HashMap;
use std::sync::Arc;

pub use calendar::{Period, Zone};
use exchange::Exchange;
use message::Kind;
pub use message::MOST_SKEW;
use ring::{CALENDAR, ROLLING, Shape, part_seconds};
pub use ring::{MOST, PARTS, WORDS};
use rows::{Row, Rows};
pub use save::Saving;

/// Most tokens of one request that an engine can have reported in earnest.
const MOST_TOKENS: u64 = 1 << 30;
/// Rows that [`Budgets::tidy`] checks at once: in some ten microseconds.
const TIDY_ROWS: usize = 64;

/// The unit of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Requests.
    Requests,
    /// Prompt tokens, cached ones by their weight.
    InputTokens,
    /// Tokens of answers.
    OutputTokens,
    /// Input and output tokens.
    TotalTokens,
    /// Prompt tokens that the engine had to compute.
    UncachedInputTokens,
}

impl Unit {
    /// All units, by name.
    pub const NAMES: [(&'static str, Unit); 5] = [
        ("requests", Unit::Requests),
        ("input_tokens", Unit::InputTokens),
        ("output_tokens", Unit::OutputTokens),
        ("total_tokens", Unit::TotalTokens),
        ("uncached_input_tokens", Unit::UncachedInputTokens),
    ];
}

/// The use of a request. Before it runs: the most that it may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Number of requests.
    pub requests: u64,
    /// Tokens of the prompts.
    pub input_tokens: u64,
    /// Part of `input_tokens` that the engine had in its cache.
    pub cached_tokens: u64,
    /// Tokens of the answer.
    pub output_tokens: u64,
}

/// The time at which something happens.
#[derive(Clone, Copy, Debug, Default)]
pub struct Now {
    /// A clock that never jumps, for rolling windows.
    pub steady: Seconds,
    /// The Unix time, for calendar windows.
    pub unix: Seconds,
}

/// A window of an account.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Identity of its counts; the limit is no part of it. Different windows differ in the first 60
    /// bits of their keys.
    pub key: u64,
    /// Name for messages.
    pub name: String,
    /// The unit of its counts.
    pub unit: Unit,
    /// Most that the account may use in a period.
    pub limit: u64,
    /// Length of the period.
    pub period: Period,
    /// Time zone of the calendar; `None`: the period is rolling.
    pub zone: Option<Arc<Zone>>,
    /// Weight of cached tokens in input and total tokens.
    pub cached_weight: f64,
    /// Whether each model has counts of its own.
    pub per_model: bool,
    /// Whether each API key has counts of its own.
    pub per_key: bool,
    /// Hash of the only SLO class whose requests count; `None`: all requests.
    pub slo_class: Option<u64>,
    /// Whether the window only counts, and refuses nothing.
    pub shadow: bool,
}

impl Window {
    fn amount(&self, amounts: &Amounts) -> u64 {
        let Amounts { requests, input_tokens, cached_tokens, output_tokens } = *amounts;
        let cached = cached_tokens.min(input_tokens);
        let uncached = input_tokens - cached;
        let input = uncached + (cached as f64 * self.cached_weight).ceil() as u64;
        match self.unit {
            Unit::Requests => requests,
            Unit::InputTokens => input,
            Unit::OutputTokens => output_tokens,
            Unit::TotalTokens => input + output_tokens,
            Unit::UncachedInputTokens => uncached,
        }
    }

    fn kind(&self) -> Kind {
        Kind::new(self.period, self.zone.is_some())
    }

    fn shape(&self) -> Shape {
        if self.zone.is_some() { CALENDAR } else { ROLLING }
    }

    /// Returns the number of the present sub-period.
    fn part(&self, now: Now) -> i64 {
        match &self.zone {
            Some(zone) => zone.number(self.period, now.unix),
            None => (now.steady / part_seconds(self.period.seconds())).floor() as i64,
        }
    }

    /// Returns the seconds until a sub-period begins that comes `parts` after the present one.
    fn seconds_until(&self, parts: i64, now: Now) -> Seconds {
        match &self.zone {
            Some(zone) => zone.end(self.period, now.unix) - now.unix,
            None => {
                let part = part_seconds(self.period.seconds());
                ((self.part(now) + parts) as f64 * part - now.steady).max(0.0)
            }
        }
    }
}

/// The parts of an account that may have windows or counts of their own.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scope {
    /// Hash of the model's name.
    pub model: u64,
    /// Hash of the API key.
    pub key: u64,
    /// Hash of the name of the SLO class.
    pub slo_class: u64,
}

impl Window {
    fn has(&self, scope: Scope) -> bool {
        self.slo_class.is_none_or(|slo_class| slo_class == scope.slo_class)
    }

    /// Returns the key of its counts for a scope.
    fn key_in(&self, scope: Scope) -> u64 {
        let model = if self.per_model { scope.model } else { 0 };
        let key = if self.per_key { scope.key.rotate_left(32) } else { 0 };
        self.kind().mark(self.key ^ model ^ key)
    }
}

/// A window after a reservation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State<'w> {
    /// The window.
    pub window: &'w Window,
    /// The account's use of the window, with the reservation.
    pub used: u64,
    /// Seconds until the window is unused, if there are no further requests.
    pub reset_seconds: Seconds,
}

/// A request that a window refuses.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// The window.
    pub window: Arc<Window>,
    /// The account's use of the window.
    pub used: u64,
    /// The request's own use.
    pub asked: u64,
    /// Seconds until the request fits; infinite: it asks for more than the limit.
    pub retry_after: Seconds,
}

#[derive(Debug)]
struct Charge {
    window: Arc<Window>,
    row: Row,
    part: i64,
    amount: u64,
    used: u64,
    reset_seconds: Seconds,
}

/// A request's part of its account's windows. Dropped without a settlement, it gives all back.
#[derive(Debug, Default)]
pub struct Reservation {
    asked: Amounts,
    charges: Vec<Charge>,
}

impl Reservation {
    /// Yields the windows as of the reservation.
    pub fn states(&self) -> impl Iterator<Item = State<'_>> {
        self.charges.iter().map(|charge| State {
            window: &charge.window,
            used: charge.used,
            reset_seconds: charge.reset_seconds,
        })
    }

    /// Replaces what the request reserved by what it used. A number of tokens that no request can
    /// use does not count; what was reserved does.
    pub fn settle(mut self, used: &Amounts, now: Now) {
        let possible = |tokens: u64, asked: u64| if tokens > MOST_TOKENS { asked } else { tokens };
        let used = Amounts {
            requests: used.requests,
            input_tokens: possible(used.input_tokens, self.asked.input_tokens),
            cached_tokens: possible(used.cached_tokens, 0),
            output_tokens: possible(used.output_tokens, self.asked.output_tokens),
        };
        for Charge { window, row, part, amount, .. } in std::mem::take(&mut self.charges) {
            let owed = window.amount(&used);
            if owed < amount {
                row.change(|words| window.shape().take(words, part, amount - owed));
            } else if owed > amount {
                row.change(|words| window.shape().add(words, window.part(now), owed - amount));
            }
        }
    }
}

impl Reservation {
    /// Counts what the request reserved as used.
    pub fn keep(mut self) {
        self.charges.clear();
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        for Charge { window, row, part, amount, .. } in &self.charges {
            row.change(|words| window.shape().take(words, *part, *amount));
        }
    }
}

/// The windows of all accounts, and their counts.
#[derive(Debug, Default)]
pub struct Budgets {
    accounts: HashMap<u64, Vec<Arc<Window>>>,
    rows: Rows,
    /// The counts of other routers, if there are any.
    exchange: Option<Exchange>,
}

impl Budgets {
    /// Creates budgets without windows. `board`: memory with the counts of all workers, which no
    /// other budgets of this process use.
    pub fn new(board: Option<Arc<Board>>) -> Budgets {
        Budgets { rows: Rows::new(board), ..Budgets::default() }
    }

    /// Checks the next rows: those that count no longer are dropped, so that the board has room for
    /// other windows. Call it some times a second. Returns false if this worker counts some windows
    /// for itself, because the board had no room for them, or a stopped worker has its lock.
    pub fn tidy(&mut self, now: Now) -> bool {
        self.rows.check(TIDY_ROWS, now);
        self.rows.is_shared()
    }

    /// Returns whether the last wait for the board's lock was in vain.
    pub fn lock_lost(&self) -> bool {
        self.rows.lock_lost()
    }

    /// Replaces the windows of all accounts. Counts stay, by the keys of their windows. Open
    /// reservations settle in the windows that they were made in.
    pub fn set(&mut self, accounts: impl IntoIterator<Item = (u64, Vec<Window>)>) {
        let shared =
            |(account, windows): (u64, Vec<Window>)| (account, windows.into_iter().map(Arc::new).collect());
        self.accounts = accounts.into_iter().map(shared).collect();
    }

    /// Reserves what a request may use at most. Returns `None` for an account without windows.
    ///
    /// # Errors
    /// The window without room that makes the request wait for longest. Then nothing is charged.
    pub fn reserve(
        &mut self,
        account: u64,
        scope: Scope,
        asked: Amounts,
        now: Now,
    ) -> Result<Option<Reservation>, Refusal> {
        let Some(windows) = self.accounts.get(&account) else { return Ok(None) };
        let mut charges = Vec::with_capacity(windows.len());
        let mut refusal: Option<Refusal> = None;
        for window in windows.iter().filter(|window| window.has(scope)) {
            let key = window.key_in(scope);
            let entry = self.rows.entry(key, now);
            let row = entry.row.clone();
            let (shape, part, amount) = (window.shape(), window.part(now), window.amount(&asked));
            let mut used = shape.used(shape.of(row.words()), part);
            if let Some(exchange) = &self.exchange {
                used += exchange.used(key, shape, part, &mut entry.others);
            }
            if used + amount > window.limit && amount > 0 && !window.shadow {
                let excess = used + amount - window.limit;
                let others = self.exchange.iter().flat_map(|exchange| exchange.words(key));
                let parts = shape.wait(shape.of(row.words()).chain(others), part, excess);
                let parts = parts.filter(|_| amount <= window.limit);
                let retry_after = parts.map_or(f64::INFINITY, |parts| window.seconds_until(parts, now));
                if refusal.as_ref().is_none_or(|other| other.retry_after < retry_after) {
                    refusal = Some(Refusal { window: window.clone(), used, asked: amount, retry_after });
                }
            }
            let reset_seconds = window.seconds_until(PARTS as i64 + 1, now);
            charges.push(Charge {
                window: window.clone(),
                row,
                part,
                amount,
                used: used + amount,
                reset_seconds,
            });
        }
        if let Some(refusal) = refusal {
            return Err(refusal);
        }
        for charge in &mut charges {
            let Charge { window, row, part, amount, .. } = charge;
            *part = row.change(|words| window.shape().add(words, *part, *amount));
        }
        Ok(Some(Reservation { asked, charges }))
    }
}

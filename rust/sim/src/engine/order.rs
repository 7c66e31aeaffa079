//! Local orders: in which order an engine takes requests from its queue and, where an order preempts, which of those it runs get a
//! step's prompt tokens and which go back for another.
//!
//! An order is a file here. It gives every request a rank, lower first; ties go by arrival. The rank of a request that waits is taken
//! when it enters the queue, for nothing that an order looks at changes while it waits (but for the cache, which is looked at once).
//! Decodes get their token in every step whatever the order, as in Sarathi and vLLM; an order may say how many prompt tokens go with them.
use crate::gaps::{Makes, TokenSlo};
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

mod fcfs;
mod las;
mod priority;
mod sjf;
mod slo;
mod spf;
mod srpt;
mod srpt_noisy;

pub use slo::{Slo, TOKEN_SECONDS};
pub use srpt_noisy::SrptNoisy;

/// Which order an engine goes by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// Arrival; priorities are ignored.
    Fcfs,
    /// Priority (lower first), then arrival.
    Priority,
    /// Shortest answer first, its length known.
    Sjf,
    /// Shortest uncached prompt first.
    Spf,
    /// Least remaining work first, lengths known; preempts.
    Srpt,
    /// The same with predicted lengths.
    SrptNoisy(SrptNoisy),
    /// Least attained service first, by levels; preempts.
    Las,
    /// Arrival, in steps that keep a token SLO.
    Slo(Slo),
}

impl Order {
    /// The orders' names, as [`Order::named`] takes them.
    pub const NAMES: [&str; 8] = ["fcfs", "priority", "sjf", "spf", "srpt", "srpt_noisy", "las", "slo"];

    /// The order of this name; `seed` is that of its predictions, where it makes any, and `slo` what it asks of tokens, where it does.
    ///
    /// # Errors
    /// `BadValue` for another name, and where the order is `slo` for a time that is none.
    pub fn named(name: &str, seed: u64, slo: TokenSlo) -> Result<Order, CoreError> {
        Ok(match name {
            "fcfs" => Order::Fcfs,
            "priority" => Order::Priority,
            "sjf" => Order::Sjf,
            "spf" => Order::Spf,
            "srpt" => Order::Srpt,
            "srpt_noisy" => Order::SrptNoisy(SrptNoisy { seed }),
            "las" => Order::Las,
            "slo" => {
                let slo = Slo { tokens: slo };
                slo.check()?;
                Order::Slo(slo)
            }
            other => {
                return Err(CoreError::BadValue {
                    what: "local order".into(),
                    got: format!("{other:?}"),
                    expected: format!("one of {}", Order::NAMES.join(", ")),
                });
            }
        })
    }

    pub(super) fn rules(&self) -> &dyn LocalOrder {
        match self {
            Order::Fcfs => &fcfs::Fcfs,
            Order::Priority => &priority::Priority,
            Order::Sjf => &sjf::Sjf,
            Order::Spf => &spf::Spf,
            Order::Srpt => &srpt::Srpt,
            Order::SrptNoisy(order) => order,
            Order::Las => &las::Las,
            Order::Slo(order) => order,
        }
    }
}

/// What an order says of requests.
pub(super) trait LocalOrder {
    /// Lower runs earlier.
    fn rank(&self, job: &Job<'_>) -> i64;

    /// Whether the rank of a request that waits depends on what the cache holds of it.
    fn reads_cache(&self) -> bool {
        false
    }

    /// How it preempts; None: only want of memory puts a request back.
    fn preemption(&self) -> Option<&dyn Preemption> {
        None
    }

    /// How it composes a step; None: prompt tokens fill the token budget.
    fn composition(&self) -> Option<&dyn Composition> {
        None
    }
}

/// How many prompt tokens a step takes.
pub(super) trait Composition {
    /// Tokens of a prompt, behind `before` of it and at most `most`, that a step takes in which `planned` is already; `makes`: an answer's tokens, or thoughts alone.
    fn prefill_tokens(
        &self,
        profile: &Profile,
        planned: &StepWork,
        makes: Makes,
        before: u32,
        most: u32,
    ) -> u32;
}

/// When running requests go back into the queue for another. What had been computed of them is lost, but for what the cache keeps.
pub(super) trait Preemption {
    /// Whether `running`, whose rank was `entered` when it last entered the queue, may go back for a waiting request of the rank
    /// `waiting`.
    fn yields(&self, running: &Job<'_>, entered: i64, waiting: i64) -> bool;

    /// Whether what those lose that would go back is worth it.
    fn pays(&self, _exchange: &Exchange) -> bool {
        true
    }

    /// Decode steps for which what is left in place stays there: as long as the batch only decodes, nothing that does not yield or pay
    /// begins to before `running` has made so many.
    fn firm_steps(&self, _running: &Job<'_>) -> u32 {
        u32::MAX
    }
}

/// A waiting request would get in for some that run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Exchange {
    /// Its rank.
    pub waiting: i64,
    /// The least rank of those that run.
    pub least: i64,
    /// How many run.
    pub running: u32,
    /// What it takes to compute again what those had that would go back, if the cache kept none of it.
    pub lost_seconds: Seconds,
}

/// What an order may look at of a request, at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<'a> {
    /// The engine's constants.
    pub profile: &'a Profile,
    pub id: u64,
    pub priority: i64,
    /// Output tokens that it gets in the end: only for orders that are told the length.
    pub output_tokens: u32,
    /// Output tokens that it has.
    pub made: u32,
    /// Prompt and output tokens that it has.
    pub context: u32,
    /// Of these, the leading ones whose KV is there; where it waits, what the cache holds or another engine sends of them.
    pub computed: u32,
    /// Leading tokens that were cached or sent when it was first admitted.
    pub spared: u32,
    /// Tokens ever computed for it, each counted once: prompt tokens that were cached or sent do not count.
    pub attained: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request of 100 prompt tokens and 10 output tokens of which nothing is computed.
    pub(super) fn job(profile: &Profile) -> Job<'_> {
        Job {
            profile,
            id: 7,
            priority: 3,
            output_tokens: 10,
            made: 0,
            context: 100,
            computed: 0,
            spared: 0,
            attained: 0,
        }
    }

    #[test]
    fn every_name_is_an_order_and_others_are_refused() {
        let orders: Vec<Order> =
            Order::NAMES.iter().map(|name| Order::named(name, 5, TokenSlo::same(0.2)).unwrap()).collect();
        for (i, order) in orders.iter().enumerate() {
            assert!(!orders[..i].contains(order));
        }
        assert_eq!(orders[5], Order::SrptNoisy(SrptNoisy { seed: 5 }));
        assert_eq!(orders[7], Order::Slo(Slo { tokens: TokenSlo::same(0.2) }));
        let preempting: Vec<&str> = Order::NAMES
            .into_iter()
            .filter(|name| {
                Order::named(name, 0, TokenSlo::same(TOKEN_SECONDS)).unwrap().rules().preemption().is_some()
            })
            .collect();
        assert_eq!(preempting, ["srpt", "srpt_noisy", "las"]);
        let error = Order::named("lifo", 0, TokenSlo::same(TOKEN_SECONDS)).unwrap_err().to_string();
        assert!(error.contains("\"lifo\"") && error.contains("srpt_noisy, las, slo"), "{error}");
    }
}

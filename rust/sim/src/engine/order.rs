//! Local orders: in which order an engine takes requests from its queue and, where an order preempts, which of those it runs get a
//! step's prompt tokens and which go back for another.
//!
//! An order is a file here. It gives every request a rank, lower first; ties go by arrival. The rank of a request that waits is taken
//! when it enters the queue, for nothing that an order looks at changes while it waits (but for the cache, which is looked at once), and again where the engine has learned something
//! that the order goes by.
//! Decodes get their token in every step whatever the order, as in Sarathi and vLLM; an order may say how many prompt tokens go with them.
use super::learned::Learned;
use crate::gaps::{Makes, TokenSlo};
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

mod boost;
mod fcfs;
mod gittins;
mod las;
mod ltr;
mod priority;
mod sjf;
mod slo;
mod spf;
mod srpt;
mod srpt_noisy;
mod trail;

pub use boost::Boost;
pub use ltr::Ltr;
pub use slo::{Slo, TOKEN_SECONDS};
pub use srpt_noisy::SrptNoisy;
pub use trail::Trail;

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
    /// Arrival less a boost that falls with the work; preempts, but for the first of them.
    Boost(Boost),
    /// Shortest answer first, its length known; who has waited long before all others.
    Ltr(Ltr),
    /// Least remaining work first, lengths known; who has made most of its answer stays.
    Trail(Trail),
    /// Gittins' index by the lengths that the engine has seen; preempts.
    Gittins,
}

impl Order {
    /// The orders' names, as [`Order::named`] takes them.
    pub const NAMES: [&str; 15] = [
        "fcfs",
        "priority",
        "sjf",
        "spf",
        "srpt",
        "srpt_noisy",
        "las",
        "slo",
        "distboost",
        "uniboost_base",
        "uniboost_memguard",
        "uniboost",
        "ltr",
        "trail",
        "gittins",
    ];

    /// The order of this name, or with settings of its own: `uniboost(gamma=0.2, bin_tokens=64)`. `seed` is that of its predictions, where it makes any,
    /// and `slo` what it asks of tokens, where it does.
    ///
    /// # Errors
    /// `BadValue` for another name, for a setting that it does not have, naming those it has, for one out of range, and where the order is `slo` for a time that is
    /// none.
    pub fn named(text: &str, seed: u64, slo: TokenSlo) -> Result<Order, CoreError> {
        let text = text.trim();
        let (name, inner) = match text.split_once('(') {
            Some((name, rest)) => (name.trim(), rest.strip_suffix(')')),
            None => (text, Some("")),
        };
        let plain = Order::plain(name, seed, slo)?;
        let each = inner.map(|inner| inner.split(',').map(str::trim).filter(|part| !part.is_empty()));
        let settings: Option<Vec<(&str, f64)>> = each.and_then(|parts| {
            parts
                .map(|part| part.split_once('=').and_then(|(k, v)| Some((k.trim(), v.trim().parse().ok()?))))
                .collect()
        });
        match settings {
            Some(settings) => plain.with(settings),
            None => bad("local order", format!("{text:?}"), format!("{name}(setting=number, …)")),
        }
    }

    fn plain(name: &str, seed: u64, slo: TokenSlo) -> Result<Order, CoreError> {
        Ok(match name {
            "fcfs" => Order::Fcfs,
            "priority" => Order::Priority,
            "sjf" => Order::Sjf,
            "spf" => Order::Spf,
            "srpt" => Order::Srpt,
            "srpt_noisy" => Order::SrptNoisy(SrptNoisy { seed }),
            "las" => Order::Las,
            "ltr" => Order::Ltr(Ltr::default()),
            "trail" => Order::Trail(Trail::default()),
            "gittins" => Order::Gittins,
            "slo" => {
                let slo = Slo { tokens: slo };
                slo.check()?;
                Order::Slo(slo)
            }
            other => match Boost::named(other) {
                Some(boost) => Order::Boost(boost),
                None => {
                    return bad(
                        "local order",
                        format!("{other:?}"),
                        format!("one of {}", Order::NAMES.join(", ")),
                    );
                }
            },
        })
    }

    fn with<'a>(mut self, settings: impl IntoIterator<Item = (&'a str, f64)>) -> Result<Order, CoreError> {
        for (name, value) in settings {
            let known = match &self {
                Order::Boost(boost) => boost.settings.names(),
                Order::Ltr(_) => Ltr::SETTINGS.to_vec(),
                Order::Trail(_) => vec!["threshold"],
                _ => vec![],
            };
            if !known.contains(&name) {
                let has = if known.is_empty() { "none: it has no settings".into() } else { known.join(", ") };
                return bad("setting of the local order", format!("{name:?}"), has);
            }
            match &mut self {
                Order::Boost(boost) => boost.settings.set(name, value)?,
                Order::Ltr(ltr) => ltr.set(name, value)?,
                Order::Trail(trail) if (0.0..=1.0).contains(&value) => trail.threshold = value,
                _ => return bad("local order: threshold", value.to_string(), "0 to 1".into()),
            }
        }
        if let Order::Boost(boost) = &self {
            boost.settings.check()?;
        }
        Ok(self)
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
            Order::Boost(order) => order,
            Order::Ltr(order) => order,
            Order::Trail(order) => order,
            Order::Gittins => &gittins::Gittins,
        }
    }
}

fn bad<T>(what: &str, got: String, expected: String) -> Result<T, CoreError> {
    Err(CoreError::BadValue { what: what.into(), got, expected })
}

/// Whole nanoseconds: ranks are compared exactly.
fn seconds_to_rank(seconds: Seconds) -> i64 {
    (seconds * 1e9) as i64
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

    /// Whether the rank of a request that runs moves.
    fn revises(&self) -> bool {
        self.preemption().is_some()
    }

    /// Steps after which a request that still waits has another rank; None: it keeps its own.
    fn promotes_after(&self) -> Option<u32> {
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

/// When running requests go back into the queue for another. [`super::Preempt`] says what becomes of what had been computed of them.
pub(super) trait Preemption {
    /// Whether `running`, whose rank was `entered` when it last entered the queue, may go back for a waiting request of the rank
    /// `waiting`.
    fn yields(&self, running: &Job<'_>, entered: i64, waiting: i64) -> bool;

    /// Whether what those lose that would go back is worth it.
    fn pays(&self, _exchange: &Exchange) -> bool {
        true
    }

    /// Whether the one that goes first is the last by its rank less what it loses, in nanoseconds; else by its rank alone.
    fn weighs_loss(&self) -> bool {
        false
    }

    /// Decode steps for which what is left in place stays there: as long as the batch only decodes, `running`, which does not yield to the rank `waiting`, does
    /// not begin to before it has made so many, and what does not pay does not come to while the same would go back.
    fn firm_steps(&self, _running: &Job<'_>, _waiting: i64) -> u32 {
        u32::MAX
    }

    /// Decode steps for which `last`, which would go back before `next`, stays the last of the two: only where an exchange must pay, for the other may have less to
    /// lose.
    fn lasting_steps(&self, _last: &Job<'_>, _next: &Job<'_>) -> u32 {
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
    /// What it takes to compute again, or to copy out and in, what those had that would go back, if the cache kept none of it.
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
    /// Leading tokens that were cached or sent when it was first admitted; until then, `computed`.
    pub spared: u32,
    /// Tokens ever computed for it, each counted once: prompt tokens that were cached or sent do not count.
    pub attained: u32,
    /// The same when it last entered the queue.
    pub attained_before: u32,
    /// Steps that it has waited, or had when it was last taken off the queue, and those that it has run since.
    pub waited_steps: u64,
    /// See above.
    pub served_steps: u64,
    /// When it came to the engine.
    pub arrival_seconds: Seconds,
    /// What the engine knows of its requests.
    pub learned: &'a Learned,
}

#[cfg(test)]
mod tests {
    use super::super::learned::tests::NOTHING;
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
            attained_before: 0,
            waited_steps: 0,
            served_steps: 0,
            arrival_seconds: 0.0,
            learned: &NOTHING,
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
        assert_eq!(
            preempting,
            [
                "srpt",
                "srpt_noisy",
                "las",
                "uniboost_base",
                "uniboost_memguard",
                "uniboost",
                "trail",
                "gittins"
            ]
        );
        let error = Order::named("lifo", 0, TokenSlo::same(TOKEN_SECONDS)).unwrap_err().to_string();
        assert!(error.contains("\"lifo\"") && error.contains("srpt_noisy, las, slo, distboost"), "{error}");
    }
}

//! Local orders: in which order an engine takes requests from its queue and, if an order preempts,
//! which running requests get a step's prompt tokens and which go back for another.
//!
//! An order is one file here and one row of `orders!`. It gives every request a rank; lower ranks
//! run first, ties go by arrival. The rank of a waiting request is computed when it enters the
//! queue, and again when the engine has learned something that the order reads: nothing else that
//! an order reads changes while a request waits. Decodes get their token in every step, as in
//! Sarathi and vLLM, unless the order ranks them as well; an order may limit the prompt tokens
//! beside them.
use super::learned::{Learned, Learns};
use crate::gaps::{Makes, TokenSlo};
use crate::profile::{Profile, StepWork};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::settings::SettingsReader;
use std::fmt::Debug;
use std::sync::Arc;

/// Each row is a file with a list `ORDERS`.
macro_rules! orders {
    ($($file:ident,)*) => {
        $(mod $file;)*
        static ORDERS: &[&[OrderSpec]] = &[$($file::ORDERS,)*];
    };
}

orders! {
    fcfs,
    priority,
    sjf,
    spf,
    srpt,
    srpt_noisy,
    las,
    slo,
    boost,
    ltr,
    trail,
    gittins,
}

pub use boost::Boost;
pub use slo::TOKEN_SECONDS;

/// The declaration of a local order.
pub struct OrderSpec {
    /// Its name in configuration.
    pub name: &'static str,
    /// Which request comes first.
    pub first: &'static str,
    /// What it needs to know.
    pub reads: &'static str,
    /// Where the rule was read.
    pub source: &'static str,
    /// Names of its settings.
    pub settings: &'static [&'static str],
    build: fn(&Given<'_>) -> Result<Box<dyn LocalOrder>, CoreError>,
}

/// What an order is built from.
struct Given<'a> {
    /// Seed of its predictions.
    seed: u64,
    /// Seconds that a token may take.
    slo: TokenSlo,
    /// Settings by name; all of them are the order's.
    settings: &'a [(&'a str, f64)],
}

impl Given<'_> {
    fn reader(&self) -> SettingsReader {
        let settings = self.settings.iter().map(|(name, value)| (name.to_string(), Ok(*value)));
        SettingsReader::new("local order", settings)
    }
}

/// The order that an engine goes by. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Order {
    text: String,
    rules: Arc<dyn LocalOrder>,
}

impl Default for Order {
    /// First come, first served.
    fn default() -> Order {
        Order { text: "fcfs".into(), rules: Arc::new(fcfs::Fcfs) }
    }
}

impl Order {
    /// Declarations of all orders, in the order of the registry.
    pub fn specs() -> impl Iterator<Item = &'static OrderSpec> {
        ORDERS.iter().copied().flatten()
    }

    /// The names that [`Order::named`] takes.
    pub fn names() -> Vec<&'static str> {
        Order::specs().map(|spec| spec.name).collect()
    }

    /// The order of this name, or with settings of its own: `uniboost(gamma=0.2, bin_tokens=64)`.
    /// `seed` is the seed of its predictions; `slo` is the SLO of tokens that `slo` keeps.
    ///
    /// # Errors
    /// `BadValue` for an unknown order or setting, a value out of range, or an SLO that is no time.
    pub fn named(text: &str, seed: u64, slo: TokenSlo) -> Result<Order, CoreError> {
        let text = text.trim();
        let (name, inner) = match text.split_once('(') {
            Some((name, rest)) => (name.trim(), rest.strip_suffix(')')),
            None => (text, Some("")),
        };
        let Some(spec) = Order::specs().find(|spec| spec.name == name) else {
            let names = Order::names().join(", ");
            return bad("local order", format!("{name:?}"), format!("one of {names}"));
        };
        let each = inner.map(|inner| inner.split(',').map(str::trim).filter(|part| !part.is_empty()));
        let settings: Option<Vec<(&str, f64)>> = each.and_then(|parts| {
            parts
                .map(|part| part.split_once('=').and_then(|(k, v)| Some((k.trim(), v.trim().parse().ok()?))))
                .collect()
        });
        let Some(settings) = settings else {
            return bad("local order", format!("{text:?}"), format!("{name}(setting=number, …)"));
        };
        if let Some((unknown, _)) = settings.iter().find(|(name, _)| !spec.settings.contains(name)) {
            let known = spec.settings.join(", ");
            let has = if known.is_empty() { "none: it has no settings".into() } else { known };
            return bad("setting of the local order", format!("{unknown:?}"), has);
        }
        let rules = (spec.build)(&Given { seed, slo, settings: &settings })?;
        Ok(Order { text: text.into(), rules: rules.into() })
    }

    /// Its name and settings, as given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether a waiting request can put a running one back into the queue.
    pub fn preempts(&self) -> bool {
        self.rules.preemption().is_some()
    }

    /// Whether it goes by the priorities that requests come with.
    pub fn reads_priority(&self) -> bool {
        self.rules.reads_priority()
    }

    pub(super) fn rules(&self) -> &dyn LocalOrder {
        &*self.rules
    }
}

fn bad<T>(what: &str, got: String, expected: String) -> Result<T, CoreError> {
    Err(CoreError::BadValue { what: what.into(), got, expected })
}

/// Whole nanoseconds: ranks are compared exactly.
fn seconds_to_rank(seconds: Seconds) -> i64 {
    (seconds * 1e9) as i64
}

/// How an order ranks requests.
pub(super) trait LocalOrder: Debug + Send + Sync {
    /// Lower runs earlier.
    fn rank(&self, job: &Job<'_>) -> i64;

    /// What the engine must learn of its requests for it.
    fn learns(&self) -> Learns {
        Learns::Nothing
    }

    /// Whether it reads the priority of a request.
    fn reads_priority(&self) -> bool {
        false
    }

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

    /// Whether decodes compete for the step as well, by their rank: for a place in the batch and a token of the budget. Then
    /// [`Profile::max_sequences`] bounds the batch, and memory alone what is taken off the queue. Only with a preemption.
    fn ranks_decodes(&self) -> bool {
        false
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
    fn names_are_unique_and_others_are_refused() {
        let named = |name| Order::named(name, 5, TokenSlo::same(TOKEN_SECONDS));
        let names = Order::names();
        assert!(names.iter().all(|name| names.iter().filter(|other| *other == name).count() == 1));
        assert_eq!(["fcfs", "srpt"].map(|name| named(name).unwrap().preempts()), [false, true]);
        let error = named("none such").unwrap_err().to_string();
        assert!(error.contains("\"none such\"") && error.contains("srpt_noisy, las, "), "{error}");
    }

    #[test]
    fn every_declared_setting_is_known() {
        for spec in Order::specs() {
            for setting in spec.settings {
                let text = format!("{}({setting}=1)", spec.name);
                // A value may be out of range, but the name is known.
                if let Err(error) = Order::named(&text, 0, TokenSlo::same(TOKEN_SECONDS)) {
                    assert!(!error.to_string().contains("setting"), "{error}");
                }
            }
        }
    }
}

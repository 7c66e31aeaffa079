//! Local orders: the order in which an engine takes requests from its queue. If an order preempts,
//! it also decides which running requests get a step's prompt tokens, and which go back for
//! another.
//!
//! An order is one file here and one row of `orders!`. It gives every request a rank; lower ranks
//! run first, ties go by arrival. The rank of a waiting request is computed when it enters the
//! queue, and again when the engine has learned something that the order reads. No other input of
//! an order changes while a request waits.
//!
//! Decodes get their token in every step, as in Sarathi and vLLM, unless the order ranks them as
//! well. An order may limit the prompt tokens beside them.
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
pub(super) use slo::check_token_seconds;

/// The declaration of a local order.
pub struct OrderSpec {
    /// Its name in configuration.
    pub name: &'static str,
    /// The request that comes first.
    pub first: &'static str,
    /// Values that it reads.
    pub reads: &'static str,
    /// Source of the rule.
    pub source: &'static str,
    /// Names of its settings.
    pub settings: &'static [&'static str],
    build: fn(&Given<'_>) -> Result<Box<dyn LocalOrder>, CoreError>,
}

/// The inputs for building an order.
struct Given<'a> {
    /// Seed of its predictions.
    seed: u64,
    /// SLO of a token, in seconds.
    slo: TokenSlo,
    /// Settings by name; the order knows all of them.
    settings: &'a [(&'a str, f64)],
}

impl Given<'_> {
    fn reader(&self) -> SettingsReader {
        let settings = self.settings.iter().map(|(name, value)| (name.to_string(), Ok(*value)));
        SettingsReader::new("local order", settings)
    }
}

/// The local order of an engine. Cloning shares it.
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
    /// Returns the declarations of all orders, in the order of the registry.
    pub fn specs() -> impl Iterator<Item = &'static OrderSpec> {
        ORDERS.iter().copied().flatten()
    }

    /// Returns the names that [`Order::named`] takes.
    pub fn names() -> Vec<&'static str> {
        Order::specs().map(|spec| spec.name).collect()
    }

    /// Builds the order of this name, with default settings or its own: `uniboost(gamma=0.2,
    /// bin_tokens=64)`. `seed` is the seed of its predictions; `slo` is the token SLO for the order
    /// `slo`.
    ///
    /// # Errors
    /// `BadValue` for an unknown order or setting, a value out of range, or an invalid SLO.
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

    /// Returns its name and settings, as given.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether a waiting request can put a running one back into the queue.
    pub fn preempts(&self) -> bool {
        self.rules.preemption().is_some()
    }

    /// Whether it reads the priorities of requests.
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

/// Converts to whole nanoseconds: ranks are compared exactly.
fn seconds_to_rank(seconds: Seconds) -> i64 {
    (seconds * 1e9) as i64
}

/// The rules of a local order.
pub(super) trait LocalOrder: Debug + Send + Sync {
    /// Returns the rank of a request; lower runs earlier.
    fn rank(&self, job: &Job<'_>) -> i64;

    /// The values that the engine must learn for it.
    fn learns(&self) -> Learns {
        Learns::Nothing
    }

    /// Whether it reads the priority of a request.
    fn reads_priority(&self) -> bool {
        false
    }

    /// Whether the rank of a waiting request depends on its cached tokens.
    fn reads_cache(&self) -> bool {
        false
    }

    /// Its preemption; None: requests are preempted only for want of memory.
    fn preemption(&self) -> Option<&dyn Preemption> {
        None
    }

    /// Whether the rank of a running request changes.
    fn revises(&self) -> bool {
        self.preemption().is_some()
    }

    /// Whether decodes compete for the step, too, by their rank: for a slot in the batch and a
    /// token of the budget. Then [`Profile::max_sequences`] bounds the batch, and only memory
    /// bounds the requests taken off the queue. Needs a preemption.
    fn ranks_decodes(&self) -> bool {
        false
    }

    /// Steps after which a waiting request gets another rank; None: it keeps its rank.
    fn promotes_after(&self) -> Option<u32> {
        None
    }

    /// Its composition of steps; None: prompt tokens fill the token budget.
    fn composition(&self) -> Option<&dyn Composition> {
        None
    }
}

/// The number of prompt tokens in a step.
pub(super) trait Composition {
    /// Returns the longest time of a step that makes such tokens.
    fn seconds(&self, makes: Makes) -> Seconds;

    /// Returns how many prompt tokens, behind `before` and at most `most`, a step takes that has
    /// `planned` already and may take `seconds`.
    fn prefill_tokens(
        &self,
        profile: &Profile,
        planned: &StepWork,
        seconds: Seconds,
        before: u32,
        most: u32,
    ) -> u32;
}

/// Rules for preempting running requests for waiting ones. [`super::Preempt`] defines what happens
/// to their KV.
pub(super) trait Preemption {
    /// Whether `running`, whose rank was `entered` when it last entered the queue, may go back for
    /// a waiting request of the rank `waiting`.
    fn yields(&self, running: &Job<'_>, entered: i64, waiting: i64) -> bool;

    /// Whether the exchange is worth the losses of the requests that would go back.
    fn pays(&self, _exchange: &Exchange) -> bool {
        true
    }

    /// Whether preemption takes the request with the last rank less its loss, in nanoseconds; else
    /// by rank alone.
    fn weighs_loss(&self) -> bool {
        false
    }

    /// Decode steps during which no running request begins to yield while the batch only decodes.
    /// `running` does not yield to the rank `waiting` before it has made this many tokens. An
    /// exchange that does not pay does not begin to pay while the same requests would go back.
    fn firm_steps(&self, _running: &Job<'_>, _waiting: i64) -> u32 {
        u32::MAX
    }

    /// Decode steps during which `last`, which would go back before `next`, stays the last of the
    /// two. Only for orders in which an exchange must pay, since the other may have less to lose.
    fn lasting_steps(&self, _last: &Job<'_>, _next: &Job<'_>) -> u32 {
        u32::MAX
    }
}

/// An exchange: a waiting request would get in for some running requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Exchange {
    /// Rank of the waiting request.
    pub waiting: i64,
    /// Least rank of the running requests.
    pub least: i64,
    /// Number of running requests.
    pub running: u32,
    /// Seconds to compute again, or to copy out and in, the tokens of the requests that would go
    /// back, if the cache kept none of them.
    pub lost_seconds: Seconds,
}

/// The values of a request that an order may read, at one moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job<'a> {
    /// The engine's constants.
    pub profile: &'a Profile,
    pub id: u64,
    pub priority: i64,
    /// Final number of output tokens, for orders that know the length.
    pub output_tokens: u32,
    /// Output tokens so far.
    pub made: u32,
    /// Prompt and output tokens so far.
    pub context: u32,
    /// Leading tokens of `context` whose KV is there; for a waiting request, tokens in the cache or
    /// sent by another engine.
    pub computed: u32,
    /// Leading tokens that were cached or sent at its first admission; until then, `computed`.
    pub spared: u32,
    /// Tokens ever computed for it, each counted once; cached or sent prompt tokens do not count.
    pub attained: u32,
    /// Value of `attained` when it last entered the queue.
    pub attained_before: u32,
    /// Steps that it has waited; for a running request, until its last admission.
    pub waited_steps: u64,
    /// Steps that it has run since its last admission.
    pub served_steps: u64,
    /// Its arrival at the engine.
    pub arrival_seconds: Seconds,
    /// Values that the engine has learned.
    pub learned: &'a Learned,
}

#[cfg(test)]
mod tests {
    use super::super::learned::tests::NOTHING;
    use super::*;

    /// A request of 100 prompt tokens and 10 output tokens, with no token computed.
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

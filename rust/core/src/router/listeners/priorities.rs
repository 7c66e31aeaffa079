//! Request priorities: the integer that orders an engine's queue, set at submission (UniBoost or
//! virtual token counters).
//!
//! An engine with priority scheduling takes one number per request and keeps it. UniBoost's number
//! is the boosted arrival time. Its work is the prompt tokens that the chosen instance does not
//! hold. Gamma is learned from this router's own requests as they end. Lower numbers go first.
//! Numbers are comparable across instances, and across routers with synchronized clocks. They stay
//! comparable while gamma is learned, because boosts are relative to a typical prompt.
use super::listener::{Ended, Listener, Placement};
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::priority::{Priority, Settings, TailRate, Work, boost_seconds};
use crate::record::DecisionRecord;
use crate::request::Tenant;
use crate::router::tickets::Kept;

/// Boosts are relative to a prompt of this length, whose number is its arrival time. Numbers
/// therefore stay comparable when gamma or the learned seconds per token change, and between
/// routers that learned different values.
const REFERENCE_TOKENS: u32 = 1024;

/// The order of requests.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Priorities {
    /// Boosted arrival, in milliseconds.
    UniBoost {
        /// Boost settings. A priority never changes here, so only the bins of MEMGUARD have an
        /// effect.
        settings: Settings,
        /// Maximum difference of two boosts, in seconds. A longer wait than this is never overtaken
        /// within a class.
        max_seconds: Seconds,
        /// Seconds added to the router's clock, so that all routers use the same time.
        clock_offset_seconds: Seconds,
    },
    /// Start tags, in thousandths of a virtual token. Admission owns the tenants' service and sets
    /// them.
    Vtc,
}

impl Priorities {
    /// Default of the maximum boost difference, in seconds.
    pub const MAX_SECONDS: Seconds = 60.0;

    /// Checks the settings.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let Priorities::UniBoost { settings, max_seconds, clock_offset_seconds } = self else {
            return Ok(());
        };
        settings.check()?;
        for (what, seconds) in [("most seconds", *max_seconds), ("clock offset", *clock_offset_seconds)] {
            if !(0.0..1e10).contains(&seconds) {
                return Err(CoreError::BadValue {
                    what: format!("priority: {what}"),
                    got: seconds.to_string(),
                    expected: "0 to 1e10 seconds".into(),
                });
            }
        }
        Ok(())
    }
}

/// Boosted arrivals.
pub struct Boosts {
    settings: Settings,
    max_seconds: Seconds,
    clock_offset_seconds: Seconds,
    tail: Option<TailRate>,
}

impl Boosts {
    /// `None` if admission sets the priorities.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(of: Priorities) -> Result<Option<Boosts>, CoreError> {
        of.check()?;
        let Priorities::UniBoost { settings, max_seconds, clock_offset_seconds } = of else {
            return Ok(None);
        };
        let adaptive = settings.adaptive;
        let tail = adaptive.map(|adaptive| TailRate::new(settings.gamma, adaptive)).transpose()?;
        Ok(Some(Boosts { settings, max_seconds, clock_offset_seconds, tail }))
    }

    /// Replaces `clock_offset_seconds`, and keeps what was learned.
    ///
    /// # Errors
    /// `BadValue` for an offset out of its range.
    pub fn set_clock_offset(&mut self, seconds: Seconds) -> Result<(), CoreError> {
        let Boosts { settings, max_seconds, .. } = *self;
        Priorities::UniBoost { settings, max_seconds, clock_offset_seconds: seconds }.check()?;
        self.clock_offset_seconds = seconds;
        Ok(())
    }

    /// Returns the current gamma in 1/s and the number of estimates.
    pub fn gamma(&self) -> (f64, u64) {
        self.tail.as_ref().map_or((self.settings.gamma, 0), |tail| (tail.gamma(), tail.estimates()))
    }

    /// Returns a request's boosted arrival. `prefill_rate`: computes an instance's prefill rate in
    /// tokens/s.
    fn prioritise(
        &self,
        prefill_rate: impl FnOnce() -> f64,
        tenant: &Tenant,
        prompt_tokens: u32,
        hit_tokens: u32,
        now: Seconds,
    ) -> Priority {
        let (gamma, _) = self.gamma();
        let token_seconds = 1.0 / prefill_rate();
        let work = Work { prompt_tokens, hit_tokens, attained_tokens: 0 };
        let at = |tokens: u32| boost_seconds(f64::from(tokens) * token_seconds, gamma);
        let boost = (at(self.settings.weighed_tokens(&work)) - at(REFERENCE_TOKENS))
            .clamp(-self.max_seconds / 2.0, self.max_seconds / 2.0);
        let arrival = now + self.clock_offset_seconds + tenant.handicap_seconds;
        let value = ((arrival - boost) * 1e3).round() as i64;
        Priority { value, boost_seconds: boost }
    }
}

impl Listener for Boosts {
    fn placed(&mut self, placement: &Placement<'_>, record: &mut DecisionRecord, _: &mut Kept) {
        let Placement { state, request, hit_tokens, now, .. } = *placement;
        let rate = || state.mean_prefill_rate();
        let (tenant, tokens) = (&request.tenant, request.prompt_tokens);
        record.priority = Some(self.prioritise(rate, tenant, tokens, hit_tokens as u32, now));
    }

    /// Learns from the duration of a successful request.
    fn ended(&mut self, ended: &Ended<'_>) {
        if let Some(tail) = self.tail.as_mut().filter(|_| ended.finished) {
            tail.ended(ended.now - ended.ticket.decided_at);
        }
    }
}

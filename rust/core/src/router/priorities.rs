//! What goes first: the integer that a request is given for its engine's queue, at submission
//! (UniBoost, or virtual token counters).
//!
//! An engine that orders its queue by priority takes one number and keeps it. UniBoost's is the
//! boosted arrival by the work that is known then, the prompt tokens that the chosen instance does
//! not hold; gamma is learned from this router's own requests as they end. Lower goes first;
//! numbers of all instances, and of several routers whose clocks agree, compare, and stay
//! comparable while gamma is learned: a boost is told against that of a typical prompt.
use super::tickets::TicketState;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::priority::vtc::{Place, VirtualTokens};
use crate::priority::{Priority, Settings, TailRate, Work, boost_seconds};
use crate::request::Tenant;

/// Boosts count against that of a prompt of so many tokens, so that its number is its arrival
/// whatever gamma and the tokens' seconds are: numbers given before one of these changed, or by a
/// router that has learned others, compare with those given after.
const REFERENCE_TOKENS: u32 = 1024;

/// By what requests are ordered.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Priorities {
    /// Boosted arrival, in milliseconds.
    UniBoost {
        /// Boosts; a priority never changes here, so of MEMGUARD only the bins count.
        settings: Settings,
        /// The most that one is boosted more than another, seconds: who has waited longer is
        /// overtaken by nobody of its class.
        most_seconds: Seconds,
        /// What is added to the router's clock, so that it is the same for all routers: seconds.
        clock_offset_seconds: Seconds,
    },
    /// Start tags, in thousandths of a virtual token.
    Vtc,
}

impl Priorities {
    /// The most that anyone is boosted where nothing is said, seconds.
    pub const MOST_SECONDS: Seconds = 60.0;

    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let Priorities::UniBoost { settings, most_seconds, clock_offset_seconds } = self else {
            return Ok(());
        };
        settings.check()?;
        for (what, seconds) in [("most seconds", *most_seconds), ("clock offset", *clock_offset_seconds)] {
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

/// What is kept for it.
pub(super) struct Ordering {
    of: Priorities,
    tail: Option<TailRate>,
    counters: VirtualTokens,
}

impl Ordering {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(of: Priorities) -> Result<Ordering, CoreError> {
        of.check()?;
        let tail = match of {
            Priorities::UniBoost { settings: Settings { gamma, adaptive: Some(adaptive), .. }, .. } => {
                Some(TailRate::new(gamma, adaptive)?)
            }
            _ => None,
        };
        Ok(Ordering { of, tail, counters: VirtualTokens::default() })
    }

    /// Replaces `clock_offset_seconds` of [`Priorities::UniBoost`] and keeps what was learned.
    /// Other orders have no clock.
    ///
    /// # Errors
    /// `BadValue` for an offset out of its range.
    pub fn set_clock_offset(&mut self, seconds: Seconds) -> Result<(), CoreError> {
        if let Priorities::UniBoost { settings, most_seconds, .. } = self.of {
            let of = Priorities::UniBoost { settings, most_seconds, clock_offset_seconds: seconds };
            of.check()?;
            self.of = of;
        }
        Ok(())
    }

    /// Gamma as it is now, 1/s, and how often it was estimated; `None` if nobody is boosted.
    pub fn gamma(&self) -> Option<(f64, u64)> {
        match (&self.tail, self.of) {
            (Some(tail), _) => Some((tail.gamma(), tail.estimates())),
            (None, Priorities::UniBoost { settings, .. }) => Some((settings.gamma, 0)),
            (None, Priorities::Vtc) => None,
        }
    }

    /// The priority of a request of which so many prompt tokens have to be computed, and its
    /// tenant's place. `prefill_rate`: works out how many prefill tokens an instance computes a
    /// second.
    pub fn prioritise(
        &mut self,
        prefill_rate: impl FnOnce() -> f64,
        tenant: &Tenant,
        prompt_tokens: u32,
        hit_tokens: u32,
        now: Seconds,
    ) -> (Option<Priority>, Option<Place>) {
        match self.of {
            Priorities::UniBoost { settings, most_seconds, clock_offset_seconds } => {
                let gamma = self.tail.as_ref().map_or(settings.gamma, TailRate::gamma);
                let token_seconds = 1.0 / prefill_rate();
                let work = Work { prompt_tokens, hit_tokens, attained_tokens: 0 };
                let at = |tokens: u32| boost_seconds(f64::from(tokens) * token_seconds, gamma);
                let boost = (at(settings.weighed_tokens(&work)) - at(REFERENCE_TOKENS))
                    .clamp(-most_seconds / 2.0, most_seconds / 2.0);
                let arrival = now + clock_offset_seconds + tenant.handicap_seconds;
                let value = ((arrival - boost) * 1e3).round() as i64;
                (Some(Priority { value, boost_seconds: boost }), None)
            }
            Priorities::Vtc => {
                let place =
                    self.counters.begin(tenant.id, prompt_tokens.saturating_sub(hit_tokens), tenant.weight);
                let value = i64::try_from(place.start).unwrap_or(i64::MAX);
                (Some(Priority { value, boost_seconds: 0.0 }), Some(place))
            }
        }
    }

    /// A request ended well.
    pub fn learn_tail(&mut self, seconds: Seconds) {
        if let Some(tail) = &mut self.tail {
            tail.ended(seconds);
        }
    }

    /// A request is over, however it ended.
    pub fn leave_queue(&mut self, state: &TicketState) {
        if let Some(place) = state.place {
            self.counters.charge(place, state.leg.entry.output_tokens as u32);
            self.counters.end(place);
        }
    }

    /// Its answer had so many tokens more than were seen.
    pub fn charge_unseen(&mut self, state: &TicketState, output_tokens: u32) {
        if let Some(place) = state.place {
            self.counters.charge(place, output_tokens);
        }
    }
}

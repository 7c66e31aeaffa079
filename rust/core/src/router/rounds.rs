//! Rounds of rescheduling: what runs where is put before the rescheduler, which names the moves (STAR, section 5.2). Making them is the caller's part: see `moves`.
use super::ledger::Stage;
use super::state::State;
use super::tickets::Leg;
use super::{Router, TicketId};
use crate::error::{CoreError, nearest};
use crate::estimate::length_error::{Bins, LengthError, Predictor};
use crate::estimate::remaining::{Remaining, RemainingCurve};
use crate::fleet::Role;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::Cuts;
use crate::reschedule::{
    INTERVAL_STEPS, InstanceLoad, Llumnix, LlumnixSettings, Move, Rescheduler, RunningRequest, Star,
    StarSettings, Stop,
};

/// Where the remaining length of a running request comes from.
#[derive(Clone, Debug, Default)]
pub enum Forecast {
    /// The mean of what answers as long as it already is still had to come, by the learned curve; never more than the request allows.
    #[default]
    Curve,
    /// The request says it: the oracle of a simulation.
    Given,
    /// The same, known by bins only (STAR, Table 3).
    Bins(Bins),
    /// The same, with the errors of a predictor (STAR, Table 1 and Figure 7).
    Predictor(LengthError),
}

impl Forecast {
    /// By name: `curve`, `given`, `bins_2`, `bins_4`, `bins_6`, or a predictor's (`llm_native`, `pia`, `mu_serve`, `tetri_infer`), whose errors `seed` draws.
    ///
    /// # Errors
    /// `BadValue` for another name.
    pub fn named(name: &str, seed: u64) -> Result<Forecast, CoreError> {
        Ok(match name {
            "curve" => Forecast::Curve,
            "given" => Forecast::Given,
            "bins_2" => Forecast::Bins(Bins::table_3(2)?),
            "bins_4" => Forecast::Bins(Bins::table_3(4)?),
            "bins_6" => Forecast::Bins(Bins::table_3(6)?),
            other => {
                match Predictor::from_name(other) {
                    Ok(predictor) => Forecast::Predictor(LengthError::new(predictor, PERSISTENCE, seed)?),
                    Err(_) => {
                        return Err(CoreError::BadValue {
                        what: "forecast of lengths".into(),
                        got: format!("{other:?}"),
                        expected: "curve, given, bins_2, bins_4, bins_6, llm_native, pia, mu_serve or tetri_infer".into(),
                    });
                    }
                }
            }
        })
    }
}

/// Share of a predictor's error that is a request's own and stays; the paper does not say.
const PERSISTENCE: f64 = 0.5;

/// How running requests are moved.
pub struct Rescheduling {
    /// The rule.
    pub rule: Box<dyn Rescheduler>,
    /// What it believes of lengths.
    pub forecast: Forecast,
    /// Output tokens of a request after which its length is predicted anew (STAR, section 5.3: 20).
    pub repredict_tokens: u32,
    /// Whether the expected length of a request is the most that it may get; else it is what it will get, which the curve must not know.
    pub expected_is_limit: bool,
}

/// The settings of [`Rescheduling`], to be told, kept and copied.
#[derive(Clone, Debug)]
pub struct RescheduleConfig {
    /// The rule with its settings.
    pub rule: Rule,
    /// See [`Rescheduling::forecast`].
    pub forecast: Forecast,
    /// See [`Rescheduling::repredict_tokens`].
    pub repredict_tokens: u32,
    /// See [`Rescheduling::expected_is_limit`].
    pub expected_is_limit: bool,
    /// Seconds between two rounds. 0.5: about [`INTERVAL_STEPS`] steps of 25 ms.
    pub period_seconds: Seconds,
}

/// A rule with its settings.
#[derive(Clone, Copy, Debug)]
pub enum Rule {
    /// STAR.
    Star(StarSettings),
    /// As Llumnix does it.
    Llumnix(LlumnixSettings),
}

impl RescheduleConfig {
    /// The names that [`RescheduleConfig::named`] takes.
    pub const NAMES: [&str; 4] = ["star", "star_current", "star_oracle", "llumnix"];

    /// By name, at its defaults: `star` predicts by the learned curve, `star_current` looks at present loads alone, `star_oracle` is told lengths.
    ///
    /// # Errors
    /// `UnknownName` with the nearest one.
    pub fn named(name: &str) -> Result<RescheduleConfig, CoreError> {
        let plain = RescheduleConfig {
            rule: Rule::Star(StarSettings::default()),
            forecast: Forecast::Curve,
            repredict_tokens: INTERVAL_STEPS,
            expected_is_limit: true,
            period_seconds: 0.5,
        };
        Ok(match name {
            "star" => plain,
            "star_current" => {
                let settings = StarSettings { prediction: false, ..StarSettings::default() };
                RescheduleConfig { rule: Rule::Star(settings), ..plain }
            }
            "star_oracle" => RescheduleConfig { forecast: Forecast::Given, ..plain },
            "llumnix" => RescheduleConfig { rule: Rule::Llumnix(LlumnixSettings::default()), ..plain },
            _ => {
                return Err(CoreError::UnknownName {
                    kind: "rescheduler".into(),
                    name: name.into(),
                    nearest: nearest(name, RescheduleConfig::NAMES),
                });
            }
        })
    }

    /// Ready to serve.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn build(&self) -> Result<Rescheduling, CoreError> {
        if !(self.period_seconds >= 1e-3 && self.period_seconds <= 1e9) {
            return Err(CoreError::BadValue {
                what: "rescheduling: period_seconds".into(),
                got: self.period_seconds.to_string(),
                expected: "0.001 to 1e9 seconds".into(),
            });
        }
        let rule: Box<dyn Rescheduler> = match self.rule {
            Rule::Star(settings) => Box::new(Star::new(settings)?),
            Rule::Llumnix(settings) => Box::new(Llumnix::new(settings)?),
        };
        Ok(Rescheduling {
            rule,
            forecast: self.forecast.clone(),
            repredict_tokens: self.repredict_tokens,
            expected_is_limit: self.expected_is_limit,
        })
    }
}

/// A move that a round names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NamedMove {
    /// The request's ticket.
    pub ticket: TicketId,
    /// Why.
    pub why: Move,
}

/// A decode step of an instance of which nothing is known takes as long as a token of a fluent reader's.
const STEP_SECONDS: Seconds = 0.05;

impl Router {
    /// Sets how running requests are moved from now on; `None`: not at all. With a curve as its forecast, answers are learned from now on.
    ///
    /// # Errors
    /// `BadValue` while requests are in flight of which nothing was kept for such a curve.
    pub fn set_rescheduling(&mut self, rescheduling: Option<Rescheduling>) -> Result<(), CoreError> {
        let curve = rescheduling.as_ref().is_some_and(|r| matches!(r.forecast, Forecast::Curve));
        if curve && self.state.ahead.is_none() && self.in_flight() > 0 {
            return Err(CoreError::BadValue {
                what: "rescheduling".into(),
                got: format!(
                    "a forecast by learned lengths while {} requests are in flight",
                    self.in_flight()
                ),
                expected: "one that is set before the first request".into(),
            });
        }
        self.state.rescheduling = rescheduling;
        if curve && self.state.ahead.is_none() {
            self.look_ahead()?;
        }
        Ok(())
    }

    /// Whether answers' lengths are to be learned for it.
    pub(super) fn forecasts(&self) -> bool {
        self.state.rescheduling.as_ref().is_some_and(|r| matches!(r.forecast, Forecast::Curve))
    }

    /// One round over all instances that decode: the moves that are worth making, and why there are no more. Nothing is booked; see [`Router::begin_move`].
    ///
    /// # Errors
    /// Never for what the router itself keeps.
    pub fn reschedule(&mut self, now: Seconds) -> Result<(Vec<NamedMove>, Stop), CoreError> {
        self.clock(now);
        let Router { state, tickets, .. } = self;
        let Some(by) = &state.rescheduling else { return Ok((Vec::new(), Stop::Off)) };
        let curve = state.ahead.as_ref().map(|ahead| RemainingCurve::new(&ahead.survival().product_limit()));
        let mut requests: Vec<Vec<RunningRequest>> = vec![Vec::new(); state.fleet.slots()];
        let mut coming = vec![(0.0, 0.0); state.fleet.slots()];
        let mut tokens_per_block = 0.0;
        for (ticket, request) in tickets.iter() {
            let leg = &request.leg;
            let slot = leg.segment.instance.index();
            let runs = leg.entry.stage == Stage::Decoding;
            // One whose KV is on its way is load of its target already: else each round until it is there sends that target one more.
            let comes = !runs && leg.segment.from_token > 0;
            if !(runs || comes) || !state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
                continue;
            }
            if comes {
                coming[slot].0 += 1.0;
                coming[slot].1 += leg.entry.prompt_tokens + leg.entry.output_tokens;
            }
            tokens_per_block = f64::max(tokens_per_block, request.tokens_per_block);
            requests[slot].push(RunningRequest {
                id: ticket.0,
                tokens: (leg.entry.prompt_tokens + leg.entry.output_tokens) as u32,
                remaining: remaining(by, curve.as_ref(), ticket, leg),
                priority: 0,
                movable: runs
                    && request.may_be_cut
                    && request.later.is_empty()
                    && leg.segment.to_token.is_none()
                    && state.instances[slot].cuts >= Cuts::Output,
            });
        }
        let pools = state.fleet.decoder_count() > 0;
        let slots = (0..state.fleet.slots() as u32).map(InstanceId);
        let loads: Vec<InstanceLoad<'_>> = slots
            .filter(|id| {
                let role = state.fleet.role(*id);
                state.fleet.is_live(*id) && if pools { role == Role::Decode } else { role == Role::Both }
            })
            .map(|id| state.load_to_balance(id, &requests[id.index()], coming[id.index()], tokens_per_block))
            .collect();
        let Some(by) = &mut state.rescheduling else { return Ok((Vec::new(), Stop::Off)) };
        let round = by.rule.round(&loads)?;
        let named = |why: &Move| NamedMove { ticket: TicketId(why.request), why: *why };
        Ok((round.moves.iter().map(named).collect(), round.stop))
    }
}

impl State {
    fn load_to_balance<'a>(
        &self,
        id: InstanceId,
        requests: &'a [RunningRequest],
        coming: (f64, f64),
        tokens_per_block: f64,
    ) -> InstanceLoad<'a> {
        let slot = id.index();
        let at = |indicator| self.ledger.get(indicator)[slot];
        let blocks = self.instances[slot].cache_blocks.map_or(f64::from(u32::MAX), f64::from);
        // Of those without a token here, `requests` has the ones whose KV comes.
        let (bound, bound_tokens) =
            (at(Indicator::BoundBs) - coming.0, at(Indicator::BoundTokens) - coming.1);
        let model = self.step_time_of(slot).or_else(|| self.ledger.step_fit(slot).step_time());
        let step = model.map(|model| model.step(at(Indicator::DecodeBs), at(Indicator::DecodeTokens)));
        InstanceLoad {
            instance: id,
            capacity_tokens: (blocks * tokens_per_block.max(1.0)) as u64,
            other_tokens: self.ledger.peers(slot).tokens() as u64,
            queued_tokens: if bound > 0.0 { (bound_tokens / bound) as u64 } else { 0 },
            step_seconds: step.filter(|seconds| *seconds > 0.0).unwrap_or(STEP_SECONDS),
            accepts: self.takes_over(id) && self.instances[slot].cuts >= Cuts::Output,
            requests,
        }
    }
}

/// Output tokens that a running request is believed to have still to come, as of its last prediction.
fn remaining(by: &Rescheduling, curve: Option<&RemainingCurve>, ticket: TicketId, leg: &Leg) -> Remaining {
    let made = leg.entry.output_tokens;
    let every = f64::from(by.repredict_tokens.max(1));
    let interval = (made / every).floor();
    let then = interval * every;
    // What is known or drawn is of the moment of the last prediction; since then `made - then` tokens have come.
    let truly = || leg.entry.expected_output_tokens.map_or(0.0, |all| (all - then).max(0.0));
    let believed = match (&by.forecast, curve) {
        (Forecast::Curve, Some(curve)) => {
            let limit = leg.entry.expected_output_tokens.filter(|_| by.expected_is_limit);
            curve.at(then, limit.unwrap_or(f64::INFINITY))
        }
        (Forecast::Curve, None) => Remaining::exact(0.0),
        (Forecast::Given, _) => Remaining::exact(truly()),
        (Forecast::Bins(bins), _) => bins.predict(truly()),
        (Forecast::Predictor(errs), _) => errs.predict(ticket.0, interval as u64, then, truly()),
    };
    Remaining { tokens: (believed.tokens - (made - then)).max(0.0), ..believed }
}

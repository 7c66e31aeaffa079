//! The state that planning reads. Planning shares it; only commits, request lifecycles, reports and
//! settings change it.
use super::caches::SharedCaches;
use super::context::DecisionContext;
use super::fetch_cost::Fetches;
use super::ledger::{AHEAD, Ahead, Ledger, PROJECTED};
use super::parts::Rest;
use super::settings::{IndexFeed, RouterConfig};
use crate::error::CoreError;
use crate::estimate::survival::BUCKET_TOKENS;
use crate::estimate::{OutputLength, StepTime, WeightsOf};
use crate::fleet::{Fleet, Member};
use crate::ids::{Seconds, Slot};
use crate::indicators::{DeclaredId, Indicator, IndicatorSet, Indicators};
use crate::plan::Cuts;
use crate::policy::{Policy, least_requests};
use crate::request::{Arm, Request};
use std::fmt::Debug;
use std::sync::Arc;

/// A policy that chooses the instances of segments.
pub(super) struct Selector {
    pub policy: Box<dyn Policy>,
    pub reads: IndicatorSet,
    /// Declared indicators that it reads.
    pub declared: Vec<DeclaredId>,
    /// Name of the policy.
    pub name: Arc<str>,
    /// Decisions made.
    pub made: u64,
    /// Whether the hot-spot guard filters its candidates.
    pub guarded: bool,
}

impl Selector {
    pub fn new(policy: Box<dyn Policy>) -> Selector {
        Selector {
            reads: policy.reads(),
            declared: policy.declared().to_vec(),
            name: policy.spec().name.as_ref().into(),
            policy,
            made: 0,
            guarded: true,
        }
    }

    /// Creates the selector of a policy on trial, and whether the guard filters its candidates.
    pub fn on_trial((policy, guarded): (Box<dyn Policy>, bool)) -> Selector {
        Selector { guarded, ..Selector::new(policy) }
    }
}

/// The interface between a planner and one request. The request's first segment is placed on a
/// `both` instance that can transfer KV. `plan/planners/view.rs` has the methods.
pub struct View<'a> {
    pub(super) state: &'a State,
    pub(super) context: &'a mut DecisionContext,
    pub(super) request: &'a Request<'a>,
    pub(super) first: Slot,
    /// Slots excluded from the plan.
    pub(super) failed: &'a [u32],
    pub(super) now: Seconds,
}

/// Plans the segments after a first segment, if roles do not.
pub trait Planner: Debug + Send + Sync {
    /// Returns the follow-up segments. If there are none, sets the reason in the view.
    fn rest(&self, view: &mut View<'_>) -> Rest;

    /// Returns the predictor of output lengths for this planner; `None`: requests bring them, or
    /// the planner needs none.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    fn lengths(&self) -> Result<Option<OutputLength>, CoreError> {
        Ok(None)
    }

    /// Returns the time constant of an instance's share of time spent on prefills, if the planner
    /// reads this share.
    fn recent_seconds(&self) -> Option<Seconds> {
        None
    }
}

/// Properties of an instance apart from its load.
#[derive(Clone, Debug)]
pub(super) struct InstanceState {
    /// Requests placed on the instance since it was added.
    pub placed: u64,
    /// Blocks in its KV cache, if known.
    pub cache_blocks: Option<u32>,
    /// Source of its KV index entries.
    pub index_feed: IndexFeed,
    /// Positions at which its engine can send or receive KV.
    pub cuts: Cuts,
    /// Step-time model of the instance's own profile, if it has one.
    pub step_time: Option<StepTime>,
}

/// The learned values that a forecast of rebalancing reads.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForecastReads {
    /// Survival curve of output lengths.
    pub curve: bool,
}

/// All state that decisions depend on.
pub(super) struct State {
    pub config: RouterConfig,
    pub fleet: Fleet,
    /// Properties of each instance apart from its load, by slot.
    pub instances: Vec<InstanceState>,
    pub ledger: Ledger,
    /// The engines' caches.
    pub caches: SharedCaches,
    /// Whether predictions of the holder of the router are queued.
    pub predicted: bool,
    /// Policies that choose the instances of first segments and of follow-up segments.
    pub first: Selector,
    pub later: Selector,
    /// Policies that choose or only score the instances of first segments, of requests on trial.
    pub canary: Option<Selector>,
    pub shadow: Option<Selector>,
    /// Plans the segments after a first segment; `None`: requests are not split, unless roles split
    /// them.
    pub planner: Option<Box<dyn Planner>>,
    pub fetches: Option<Fetches>,
    /// Reads of the forecast of rebalancing, if running requests are moved.
    pub forecast: Option<ForecastReads>,
    /// The indicator `recompute_ratio`.
    pub recompute_ratio: f64,
}

impl State {
    /// Creates a state without instances or planner. Follow-up segments go to the instance with the
    /// fewest requests.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn new(policy: Box<dyn Policy>, config: RouterConfig) -> Result<State, CoreError> {
        config.tiers.checked()?;
        let mut state = State {
            fleet: Fleet::default(),
            instances: Vec::new(),
            ledger: Ledger::new(if config.drain { config.prior_prefill_tokens_per_second } else { 0.0 }),
            caches: SharedCaches::new(&config),
            predicted: false,
            first: Selector { guarded: config.guard.on, ..Selector::new(policy) },
            later: Selector::new(least_requests()?),
            canary: None,
            shadow: None,
            planner: None,
            fetches: config.fetch.map(Fetches::new).transpose()?,
            forecast: None,
            recompute_ratio: 0.0,
            config,
        };
        state.look_ahead()?;
        Ok(state)
    }

    /// Changes the data of an instance that was added or removed. A new instance can transfer KV at
    /// any position and has no profile of its own. The pattern names every field, so that none can
    /// be forgotten.
    pub fn member(&mut self, member: Member) {
        let State {
            config,
            fleet,
            instances,
            ledger,
            caches,
            predicted: _,
            first: _,
            later: _,
            canary: _,
            shadow: _,
            planner: _,
            fetches: _,
            forecast: _,
            recompute_ratio: _,
        } = self;
        let (Member::Added { id, .. } | Member::Removed(id)) = member;
        caches.member(member, fleet.id_of(id), config.index_feed);
        match member {
            Member::Added { id, cache_blocks } => {
                let slots = fleet.slots();
                let state = InstanceState {
                    placed: 0,
                    cache_blocks,
                    index_feed: config.index_feed,
                    cuts: Cuts::Anywhere,
                    step_time: None,
                };
                instances.resize(slots, state.clone());
                instances[id.index()] = state;
                ledger.resize(slots);
                ledger.clear(id.index());
            }
            Member::Removed(id) => ledger.clear(id.index()),
        }
    }

    /// Starts to keep predicted loads, if a policy needs them. Predictions stay on once started,
    /// with everything learned. Returns whether the requests in flight must be added.
    ///
    /// # Errors
    /// `BadValue` if the two policies need different survival curves.
    pub fn look_ahead(&mut self) -> Result<bool, CoreError> {
        let reads = self.reads();
        let projects = self.selectors().find(|each| each.reads.intersects(PROJECTED));
        let curve = projects.map(|each| each.policy.length_curve()).unwrap_or_default();
        if reads.contains(Indicator::DecodePressure) && curve.bucket_tokens != BUCKET_TOKENS {
            let got = format!("{} beside a policy that reads decode_pressure", curve.bucket_tokens);
            return Err(CoreError::bad_value("bucket_tokens", got, BUCKET_TOKENS.to_string()));
        }
        let weights_of = self.weights_of()?;
        let forecasts = self.forecast.is_some_and(|reads| reads.curve);
        let wanted = reads.intersects(AHEAD) || forecasts;
        if !wanted {
            return Ok(false);
        }
        let same_curve = self.ledger.answers.keep_curve(curve);
        let ahead = match self.ledger.ahead() {
            Some(ahead) if same_curve && ahead.suits(weights_of) => return Ok(false),
            Some(ahead) => ahead.widened(curve.bucket_tokens, weights_of),
            None => Ahead::new(self.fleet.slots(), curve.bucket_tokens, weights_of),
        };
        self.ledger.set_ahead(Some(ahead));
        Ok(true)
    }

    /// Returns the source of the weights that the policies read.
    ///
    /// # Errors
    /// `BadValue` if each policy brings its own weights.
    fn weights_of(&self) -> Result<Option<WeightsOf>, CoreError> {
        let mut weights: Option<(WeightsOf, &Selector)> = None;
        for each in self.selectors() {
            match (weights, each.policy.decode_weights()) {
                (Some((known, by)), Some(own)) if !std::ptr::fn_addr_eq(known, own) => {
                    let (got, same) =
                        (format!("{} and {}", by.name, each.name), "policies with the same decode weights");
                    return Err(CoreError::bad_value("policies of one router", got, same));
                }
                (None, Some(own)) => weights = Some((own, each)),
                _ => {}
            }
        }
        Ok(weights.map(|(weights, _)| weights))
    }

    /// Yields the policies.
    fn selectors(&self) -> impl Iterator<Item = &Selector> {
        [&self.later, &self.first].into_iter().chain(&self.canary).chain(&self.shadow)
    }

    /// Returns the policy of first segments for requests of an arm.
    pub fn first_of(&self, arm: Arm) -> &Selector {
        let own = match arm {
            Arm::Stable => None,
            Arm::Canary => self.canary.as_ref(),
            Arm::Shadow => self.shadow.as_ref(),
        };
        own.unwrap_or(&self.first)
    }

    /// Counts a decision for the policy that made it.
    pub fn count_decision(&mut self, arm: Arm) {
        match (&mut self.canary, arm) {
            (Some(canary), Arm::Canary) => canary.made += 1,
            _ => self.first.made += 1,
        }
    }

    /// Returns the indicators that the policies read.
    pub fn reads(&self) -> IndicatorSet {
        self.selectors().fold(IndicatorSet::EMPTY, |all, each| all.union(each.reads))
    }

    /// Returns all indicators: those of the ledger and those derived for a decision.
    pub fn indicators<'a>(&'a self, context: &'a DecisionContext) -> Indicators<'a> {
        Indicators::new(self.ledger.columns(), &context.derived)
            .with_declared(&context.declared)
            .with_groups(self.fleet.groups())
    }

    /// Returns the properties of an instance, for changes.
    ///
    /// # Errors
    /// `BadValue` if there is no such slot.
    pub fn instance_mut(&mut self, id: Slot) -> Result<&mut InstanceState, CoreError> {
        self.fleet.check(id)?;
        Ok(&mut self.instances[id.index()])
    }

    /// Yields all slots, including those of removed instances.
    pub fn ids(&self) -> impl Iterator<Item = Slot> + use<> {
        (0..self.fleet.slots() as u32).map(Slot)
    }
}

/// Checks the number of blocks in an instance's cache: loads are divided by it.
pub fn check_cache_blocks(name: &str, cache_blocks: Option<u32>) -> Result<(), CoreError> {
    if cache_blocks != Some(0) {
        return Ok(());
    }
    let expected = "1 or more, or None if it is not known";
    Err(CoreError::bad_value(format!("cache_blocks of {name}"), 0, expected))
}

//! Startup check: policies that cannot score an idle fleet.
use crate::error::CoreError;
use crate::fleet::Role;
use crate::guard::GuardConfig;
use crate::ids::Seconds;
use crate::indicators::{Indicator, Scope, Snapshot};
use crate::policy::{PolicyRng, Scores, least_requests};
use crate::request::Request;
use crate::router::ledger::{AHEAD, Ahead, Report};
use crate::router::router::Router;
use crate::router::settings::RouterConfig;
use crate::router::state::Selector;
use rand::SeedableRng;

/// Cache blocks per instance of the idle fleet.
const CACHE_BLOCKS: u32 = 10_000;

/// Returns the scored request.
fn request() -> Request<'static> {
    Request {
        prompt_tokens: 1_000,
        tokens_per_block: 16.0,
        expected_output_tokens: Some(200),
        ..Request::default()
    }
}

impl Router {
    /// Returns a warning for each policy that scores no instance of an idle fleet: two instances
    /// without reported load or served requests. The router itself is unchanged.
    ///
    /// # Errors
    /// `Policy` if a policy function fails.
    pub fn policy_warnings(&self) -> Result<Vec<String>, CoreError> {
        let first = self.warning(&self.state.first, Role::Both, None)?;
        let later = self.warning(&self.state.later, Role::Decode, Some(0.1))?;
        let trials = [&self.state.canary, &self.state.shadow].into_iter().flatten();
        let trials = trials.map(|each| self.warning(each, Role::Both, None));
        let trials = trials.collect::<Result<Vec<_>, _>>()?;
        Ok(first.into_iter().chain(later).chain(trials.into_iter().flatten()).collect())
    }

    fn warning(
        &self,
        selector: &Selector,
        role: Role,
        handoff: Option<Seconds>,
    ) -> Result<Option<String>, CoreError> {
        let idle = self.idle_fleet(selector, role, handoff)?;
        let slots = idle.state.fleet.slots();
        let snapshot = Snapshot {
            columns: idle.state.indicators(&idle.context),
            eligible: &vec![true; slots],
            eligible_count: slots,
            name_hashes: idle.state.fleet.name_hashes(),
            ordinal: 0,
            session: None,
        };
        let mut scores = Scores::default();
        scores.reset(slots);
        selector.policy.score(&snapshot, &mut PolicyRng::seed_from_u64(0), &mut scores)?;
        if scores.score.iter().any(|score| score.is_finite()) {
            return Ok(None);
        }
        let absent = |id: &Indicator| {
            let slot = if id.decl().scope == Scope::Request { 0 } else { slots - 1 };
            idle.state.indicators(&idle.context).get(*id)[slot].is_nan()
        };
        let absent = selector.reads.iter().filter(absent).map(|id| id.decl());
        let mut absent: Vec<_> =
            absent.map(|decl| format!("{} is absent {}", decl.name, decl.absent)).collect();
        let declared = selector.declared.iter().map(|id| id.decl()).filter(|decl| decl.default.is_none());
        absent.extend(declared.map(|decl| format!("{} is absent until it is reported", decl.name)));
        let why = match absent.is_empty() {
            true => "its score is not a finite number (a division by 0?)".to_string(),
            false => absent.join("; "),
        };
        let spec = selector.policy.spec();
        Ok(Some(format!(
            "policy {} ({}) scores no instance of an idle fleet: {why}; such requests go to the instance with the fewest requests",
            spec.name, spec.formula
        )))
    }

    /// Returns a router with two idle instances and indicators filled in for [`request`].
    fn idle_fleet(
        &self,
        selector: &Selector,
        role: Role,
        handoff: Option<Seconds>,
    ) -> Result<Router, CoreError> {
        let config = RouterConfig {
            index_bytes: 1 << 20,
            record_bytes: 1 << 10,
            guard: GuardConfig { on: false, ..GuardConfig::default() },
            ..self.state.config.clone()
        };
        let mut idle = Router::new(least_requests()?, config)?;
        for name in ["a", "b"] {
            idle.add_instance(name, role, Some(CACHE_BLOCKS))?;
            let report = Report {
                at: 0.0,
                waiting: Some(0.0),
                running: Some(0.0),
                kv_usage: Some(0.0),
                ..Report::default()
            };
            idle.engine_report(name, report)?;
        }
        if selector.reads.intersects(AHEAD) {
            let (slots, policy) = (idle.state.fleet.slots(), &selector.policy);
            let curve = policy.length_curve();
            let ahead = Ahead::new(slots, curve.bucket_tokens, policy.decode_weights());
            idle.state.ledger.set_ahead(Some(ahead));
            idle.state.ledger.answers.keep_curve(curve);
        }
        let request = request();
        idle.match_prefix(&request);
        let able = idle.state.fleet.eligible_count();
        idle.state.derive(&mut idle.context, &request, selector.reads, able, handoff, 0.0);
        idle.state.derive_declared(&mut idle.context, &selector.declared, 0.0);
        Ok(idle)
    }
}

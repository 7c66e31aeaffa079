//! A Python policy, and the policy that replaces it after failures and overruns.
use super::callable::Callable;
use super::watchdog;
use lmetric_core::CoreError;
use lmetric_core::estimate::WeightsOf;
use lmetric_core::indicators::{DeclaredId, IndicatorSet, Snapshot};
use lmetric_core::policy::{Fallbacks, Policy, PolicyRng, PolicySpec, Scores};
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Failures and overruns in a row that pause the policy.
const MAX_IN_A_ROW: u32 = 3;
/// Length of the pause.
const PAUSE: Duration = Duration::from_secs(1);

/// A Python policy with a fallback. The fallback decides if the policy fails or exceeds its time
/// limit. After three such decisions in a row, the fallback decides for a second; then the policy
/// is tried again.
pub struct WithFallback {
    policy: Callable,
    fallback: Box<dyn Policy>,
    declared: Vec<DeclaredId>,
    limit: Option<Duration>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    fallbacks: Fallbacks,
    in_a_row: u32,
    paused_until: Option<Instant>,
}

impl WithFallback {
    pub fn new(policy: Callable, fallback: Box<dyn Policy>, limit: Option<Duration>) -> WithFallback {
        let declared = [policy.declared(), fallback.declared()].concat();
        WithFallback { policy, fallback, declared, limit, state: Mutex::default() }
    }

    /// Whether the policy is not paused.
    fn asks(&self) -> bool {
        let state = &mut *self.state.lock();
        match state.paused_until {
            Some(until) if Instant::now() < until => {
                state.fallbacks.paused += 1;
                false
            }
            _ => true,
        }
    }

    /// Counts a decision; `problem`: why the fallback made it.
    fn count(&self, problem: Option<(String, bool)>) {
        let state = &mut *self.state.lock();
        let Some((problem, overran)) = problem else {
            (state.in_a_row, state.paused_until) = (0, None);
            return;
        };
        match overran {
            true => state.fallbacks.overruns += 1,
            false => state.fallbacks.errors += 1,
        }
        state.fallbacks.problem = Some(problem);
        state.in_a_row += 1;
        if state.in_a_row >= MAX_IN_A_ROW {
            state.paused_until = Some(Instant::now() + PAUSE);
        }
    }
}

impl Policy for WithFallback {
    fn spec(&self) -> &PolicySpec {
        self.policy.spec()
    }

    fn reads(&self) -> IndicatorSet {
        self.policy.reads().union(self.fallback.reads())
    }

    fn declared(&self) -> &[DeclaredId] {
        &self.declared
    }

    fn decode_weights(&self) -> Option<WeightsOf> {
        self.fallback.decode_weights()
    }

    fn fallbacks(&self) -> Fallbacks {
        self.state.lock().fallbacks.clone()
    }

    fn score(
        &self,
        snapshot: &Snapshot<'_>,
        rng: &mut PolicyRng,
        scores: &mut Scores,
    ) -> Result<(), CoreError> {
        if self.asks() {
            let begin = Instant::now();
            let watched = self.limit.map(|limit| watchdog::watch(begin + limit));
            let scored = self.policy.score(snapshot, rng, scores);
            drop(watched);
            let taken = begin.elapsed();
            let problem = match (scored, self.limit) {
                (_, Some(limit)) if taken > limit => {
                    let name = &self.spec().name;
                    Some((format!("policy {name}: it took {taken:.1?}; its limit is {limit:.1?}"), true))
                }
                (Err(error), _) => Some((error.to_string(), false)),
                (Ok(()), _) => None,
            };
            let scored = problem.is_none();
            self.count(problem);
            if scored {
                return Ok(());
            }
            scores.reset(snapshot.slots());
        }
        self.fallback.score(snapshot, rng, scores)
    }
}

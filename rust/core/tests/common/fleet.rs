//! Hand-made snapshots for tests of policies, used by the unit tests and the conformance suite.
#![allow(dead_code)]
use lmetric_core::indicators::{Columns, INDICATORS, Indicator, Scope, Snapshot};
use lmetric_core::policy::{Policy, PolicyRng, Prefer, Scores, best};
use rand::SeedableRng;
use rand::seq::SliceRandom;

/// Indicators of some instances, initially 0.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub columns: Columns,
    pub eligible: Vec<bool>,
    pub names: Vec<u64>,
    pub ordinal: u64,
    pub session: Option<u64>,
    pub seed: u64,
}

impl Fleet {
    pub fn new(slots: usize) -> Fleet {
        let mut columns = Columns::default();
        columns.resize(slots);
        // Request indicators are in slot 0; a policy that reads them in other slots is wrong.
        for decl in INDICATORS.iter().filter(|d| d.scope == Scope::Request) {
            columns.get_mut(decl.id)[1..].fill(f64::NAN);
        }
        let names = (0..slots as u64).map(|i| (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        Fleet { columns, eligible: vec![true; slots], names, ordinal: 0, session: None, seed: 0 }
            .request(Indicator::Instances, slots as f64)
    }

    pub fn slots(&self) -> usize {
        self.eligible.len()
    }

    pub fn set(mut self, id: Indicator, values: &[f64]) -> Fleet {
        self.columns.get_mut(id).copy_from_slice(values);
        self
    }

    pub fn request(mut self, id: Indicator, value: f64) -> Fleet {
        self.columns.get_mut(id)[0] = value;
        self
    }

    /// Sets the prompt's length, the cached tokens per instance, and all indicators that follow
    /// from these and the queue.
    pub fn prompt(mut self, prompt_tokens: f64, hit_tokens: &[f64]) -> Fleet {
        for (i, hit) in hit_tokens.iter().enumerate() {
            let queued = self.columns.get(Indicator::QueuedPrefillTokens)[i];
            for (id, value) in [
                (Indicator::HitTokens, *hit),
                (Indicator::KvHit, if prompt_tokens > 0.0 { hit / prompt_tokens } else { 0.0 }),
                (Indicator::NewTokens, prompt_tokens - hit),
                (Indicator::PToken, (queued + prompt_tokens - hit).max(1.0)),
                (Indicator::PSeconds, (queued + prompt_tokens - hit).max(1.0) / 8000.0),
            ] {
                self.columns.get_mut(id)[i] = value;
            }
        }
        self.request(Indicator::PromptTokens, prompt_tokens)
    }

    /// Runs `policy` with this fleet's seed.
    pub fn scores(&self, policy: &dyn Policy) -> Scores {
        let mut scores = Scores::default();
        scores.reset(self.slots());
        self.rescore(policy, &mut PolicyRng::seed_from_u64(self.seed), &mut scores);
        scores
    }

    pub fn rescore(&self, policy: &dyn Policy, rng: &mut PolicyRng, scores: &mut Scores) {
        let snapshot = Snapshot {
            columns: (&self.columns).into(),
            eligible: &self.eligible,
            eligible_count: self.eligible.iter().filter(|e| **e).count(),
            name_hashes: &self.names,
            ordinal: self.ordinal,
            session: self.session,
        };
        policy.score(&snapshot, rng, scores).expect("a score");
    }

    /// Returns the scores alone.
    pub fn score(&self, policy: &dyn Policy) -> Vec<f64> {
        self.scores(policy).score
    }

    /// Returns the chosen slot.
    pub fn best(&self, policy: &dyn Policy) -> Option<usize> {
        best(&mut self.scores(policy), &self.eligible, &mut PolicyRng::seed_from_u64(self.seed))
    }

    /// Returns all slots, best first.
    pub fn order(&self, policy: &dyn Policy) -> Vec<u32> {
        ranking(&self.scores(policy), &self.eligible, &mut PolicyRng::seed_from_u64(self.seed))
    }
}

/// Returns the policy with this name in `REGISTRY` of the including file.
pub fn policy(name: &str, knobs: &[(&str, f64)]) -> Box<dyn Policy> {
    let knobs: Vec<_> = knobs.iter().map(|(name, value)| (name.to_string(), *value)).collect();
    super::REGISTRY.policy(name, &knobs).expect("a registered policy")
}

/// Returns all eligible slots with a finite score, best first; equal slots in random order.
pub fn ranking(scores: &Scores, eligible: &[bool], rng: &mut PolicyRng) -> Vec<u32> {
    let sign = if scores.prefer == Prefer::Max { -1.0 } else { 1.0 };
    let nan_last = |value: f64| if value.is_nan() { f64::INFINITY } else { value };
    let score = &scores.score[..eligible.len()];
    let mut order: Vec<u32> =
        (0..eligible.len()).filter(|&i| eligible[i] && score[i].is_finite()).map(|i| i as u32).collect();
    order.shuffle(rng);
    order.sort_by(|&a, &b| {
        let (a, b) = (a as usize, b as usize);
        let by_score = (sign * score[a]).partial_cmp(&(sign * score[b])).expect("finite scores");
        scores.then[..scores.then_count].iter().fold(by_score, |order, column| {
            order.then_with(|| nan_last(column[a]).partial_cmp(&nan_last(column[b])).expect("no NaN left"))
        })
    });
    order
}

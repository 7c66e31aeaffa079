//! Llumnix-style rebalancing: from the least free instances to the freest instances (Llumnix, OSDI
//! 2024, section 4.4; its public code).
//!
//! An instance's freeness is (capacity - virtual usage) / batch size, in tokens per request: the
//! steps that its batch can still run before the cache is full. Virtual usage includes the demand
//! of the first waiting request. Instances below one threshold are sources, instances above another
//! are targets. The least free source is paired with the freest target, the next with the next.
//! Each source gives up its shortest request: requests have no priorities here. As in the public
//! code's `balanced` pairing, a move is skipped if it brings the target below the threshold or
//! makes it less free than the source. In its moves, the loads are the freeness in steps, and the
//! variance is that of current tokens.
use lmetric_core::CoreError;
use lmetric_core::rebalance::{InstanceLoad, Move, Rebalancer, Round, Stop, ordered, setting};
use serde::Deserialize;

/// Settings of the Llumnix-style rebalancer.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct LlumnixSettings {
    /// An instance below this freeness, in steps, is a source. 48: the public code's 3 blocks of 16
    /// tokens per request.
    pub source_below_steps: f64,
    /// An instance above this freeness, in steps, is a target; at least `source_below_steps`. The
    /// public code has one threshold for both.
    pub target_above_steps: f64,
    /// Maximum moves per round, each from another source to another target.
    pub max_moves: usize,
}

impl Default for LlumnixSettings {
    fn default() -> LlumnixSettings {
        LlumnixSettings { source_below_steps: 48.0, target_above_steps: 48.0, max_moves: 1 }
    }
}

/// Llumnix-style rebalancer.
#[derive(Clone, Copy, Debug)]
pub struct Llumnix {
    settings: LlumnixSettings,
}

impl Llumnix {
    /// # Errors
    /// `BadValue` with the setting and its range.
    pub fn new(settings: LlumnixSettings) -> Result<Llumnix, CoreError> {
        let below = setting("source_below_steps", settings.source_below_steps, 0.0, f64::INFINITY)?;
        setting("target_above_steps", settings.target_above_steps, below, f64::INFINITY)?;
        if settings.max_moves == 0 {
            return Err(CoreError::BadValue {
                what: "rebalancing setting max_moves".into(),
                got: "0".into(),
                expected: "at least 1; to move nothing, use `none`".into(),
            });
        }
        Ok(Llumnix { settings })
    }
}

/// State of an instance in a round.
struct Place<'a> {
    load: &'a InstanceLoad<'a>,
    tokens: f64,
    freeness: f64,
}

impl Place<'_> {
    /// Returns the freeness with `tokens` and `requests` added. An empty instance is infinitely
    /// free.
    fn with(&self, tokens: f64, requests: f64) -> f64 {
        let batch = self.load.requests.len() as f64 + requests;
        if batch <= 0.0 {
            return f64::INFINITY;
        }
        let used = self.tokens + tokens + self.load.queued_tokens as f64;
        (self.load.capacity_tokens as f64 - used) / batch
    }
}

impl Rebalancer for Llumnix {
    fn name(&self) -> &'static str {
        "llumnix"
    }

    fn fresh(&self) -> Box<dyn Rebalancer> {
        Box::new(*self)
    }

    fn round(&mut self, loads: &[InstanceLoad]) -> Result<Round, CoreError> {
        let order = ordered(loads)?;
        let stop = |stop| Ok(Round { moves: Vec::new(), stop });
        if loads.len() < 2 {
            return stop(Stop::FewInstances);
        }
        let mut places: Vec<Place> = order
            .into_iter()
            .map(|i| Place { load: &loads[i], tokens: loads[i].tokens() as f64, freeness: 0.0 })
            .collect();
        places.iter_mut().for_each(|p| p.freeness = p.with(0.0, 0.0));
        let n = places.len() as f64;
        let mean_load = places.iter().map(|p| p.freeness).sum::<f64>() / n;
        let mean_tokens = places.iter().map(|p| p.tokens).sum::<f64>() / n;
        let mut variance = places.iter().map(|p| (p.tokens - mean_tokens).powi(2)).sum::<f64>() / n;
        // Stable sorts keep equal instances in their original order.
        let mut sources: Vec<&Place> =
            places.iter().filter(|p| p.freeness < self.settings.source_below_steps).collect();
        sources.sort_by(|a, b| a.freeness.total_cmp(&b.freeness));
        let mut targets: Vec<&Place> = places
            .iter()
            .filter(|p| p.load.accepts && p.freeness > self.settings.target_above_steps)
            .collect();
        targets.sort_by(|a, b| b.freeness.total_cmp(&a.freeness));
        if sources.is_empty() {
            return stop(Stop::NoneOverloaded);
        }
        if targets.is_empty() {
            return stop(Stop::NoneUnderloaded);
        }
        let (mut moves, mut movable, mut room) = (Vec::new(), false, false);
        for (source, target) in sources.into_iter().zip(targets) {
            let candidates = source.load.requests.iter().filter(|r| r.movable);
            let Some(request) = candidates.min_by_key(|r| (r.tokens, r.id)) else { continue };
            movable = true;
            let tokens = f64::from(request.tokens);
            let after = (source.with(-tokens, -1.0), target.with(tokens, 1.0));
            if after.1 < self.settings.target_above_steps {
                continue;
            }
            room = true;
            let empty = target.load.requests.is_empty();
            if !(empty || after.0 < after.1 && after.1 - after.0 < target.freeness - source.freeness) {
                continue;
            }
            let change = 2.0 * tokens * (tokens + target.tokens - source.tokens) / n;
            moves.push(Move {
                request: request.id,
                source: source.load.instance,
                target: target.load.instance,
                source_load: source.freeness,
                target_load: target.freeness,
                mean_load,
                variance_before: variance,
                variance_after: variance + change,
            });
            variance += change;
            if moves.len() == self.settings.max_moves {
                return Ok(Round { moves, stop: Stop::MaxMoves });
            }
        }
        let stop = match (movable, room) {
            (false, _) => Stop::NoneMovable,
            (_, false) => Stop::NoRoom,
            _ => Stop::NoGain,
        };
        Ok(Round { moves, stop })
    }
}

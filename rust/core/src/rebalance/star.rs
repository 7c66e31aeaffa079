//! STAR, Algorithm 1: moves the request that makes present and future token loads most even.
//!
//! Erratum 6 applies. Weights sum to 1. An instance is underloaded below (1 - theta) times the
//! mean. Source and target differ. The memory check also counts the request's current tokens.
//!
//! The paper evaluates each (request, source, target) in O(H). Here, each takes O(1), and the
//! result is exact. With L the loads and x_k the request's load at point k, a move changes the sum
//! of squares at k by `2 x_k (x_k + L_target - L_source)` and leaves the sum unchanged. With x_k =
//! N + t_k while the request runs (the first m points), the weighted sum over points is a constant
//! of request and source plus `N sum_{k<m} W_k L_target + sum_{k<m} W_k t_k L_target`. These are
//! two prefix sums per instance. The best target is the minimum over a row of targets, which the
//! processor evaluates with SIMD. A row is skipped if the sum of its least terms cannot beat the
//! best move so far.
use super::grid::Grid;
use super::{InstanceLoad, Move, Rebalancer, Round, Stop, bad, ordered, setting};
use crate::error::CoreError;
use crate::wide::lesser;
use multiversion::multiversion;
use serde::Deserialize;
use std::fmt::{self, Debug, Formatter};

/// Weight of a future step: beta_t, scaled to sum to 1.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(from = "f64")]
pub enum Weights {
    /// Equal weights.
    Uniform,
    /// The weight halves every `half_life_steps` steps (above 0).
    Geometric {
        /// Half-life in steps.
        half_life_steps: f64,
    },
}

impl From<f64> for Weights {
    /// Converts a half-life in steps; 0: equal weights.
    fn from(half_life_steps: f64) -> Weights {
        if half_life_steps == 0.0 { Weights::Uniform } else { Weights::Geometric { half_life_steps } }
    }
}

/// Settings of STAR. The paper gives none of these values (erratum 6).
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
pub struct StarSettings {
    /// H: horizon in decode steps. Default 2,048: in section 5.3, requests in decode instances are
    /// 2,000 long on average. So most current requests end within the horizon, and later load comes
    /// from requests not yet here, which no forecast covers.
    pub horizon_steps: u32,
    /// Number of points in the horizon at which loads are compared, at most one per step. Default
    /// 32: one point per 64 steps, finer than any predictor.
    pub points: u32,
    /// Weights of future steps. By default, weights halve every 512 steps: near loads are known
    /// better than far loads.
    #[serde(rename = "half_life_steps")]
    pub weights: Weights,
    /// theta: threshold, 0 to 1. Default 0.1: moving one request in ten changes the load by a
    /// tenth. A smaller threshold would move requests back and forth.
    pub threshold: f64,
    /// Fixed seconds of a move, independent of the request's size: the fixed part of C_mig.
    pub migration_seconds: f64,
    /// Seconds per moved token: a token's KV bytes over the link's bytes per second. Default 2e-5:
    /// 56 KiB (7B, grouped heads, 16 bit) at 25 Gbit/s.
    pub migration_seconds_per_token: f64,
    /// Number of standard deviations of the prediction that the memory check adds to the remaining
    /// tokens; the paper has 0.
    pub caution: f64,
    /// Maximum moves per round. Each move assumes that the previous moves are done.
    pub max_moves: usize,
}

impl Default for StarSettings {
    fn default() -> StarSettings {
        StarSettings {
            horizon_steps: 2048,
            points: 32,
            weights: Weights::Geometric { half_life_steps: 512.0 },
            threshold: 0.1,
            migration_seconds: 0.1,
            migration_seconds_per_token: 2e-5,
            caution: 0.0,
            max_moves: 1,
        }
    }
}

/// Maximum steps and points of a horizon: they bound the memory of a round.
const MAX_STEPS: u32 = 1 << 20;
const MAX_POINTS: u32 = 4096;
/// A gain below this fraction of the variance is rounding.
const ROUNDING: f64 = 1e-12;

/// STAR rebalancer, with buffers that it reuses in each round.
#[derive(Clone)]
pub struct Star {
    settings: StarSettings,
    grid: Grid,
    /// Load of each instance at each point: one row per instance.
    loads: Vec<f64>,
    /// Number of points at which each request runs, instance by instance; 0 if it may not be moved.
    /// `starts` has each instance's first index.
    lasts: Vec<u32>,
    starts: Vec<usize>,
    /// Prefix sums over points of weight x load and weight x time x load of the targets: one row
    /// for each number of points.
    sums: Vec<f64>,
    timed: Vec<f64>,
}

/// Best move so far: indices of source and target instances, and the index of the request in its
/// instance.
struct Best {
    gain: f64,
    request: (u64, usize),
    source: usize,
    target: usize,
}

impl Debug for Star {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.settings)
    }
}

impl Default for Star {
    fn default() -> Star {
        Star::new(StarSettings::default()).expect("the defaults are in range")
    }
}

impl Star {
    /// # Errors
    /// `BadValue` with the setting and its range.
    pub fn new(settings: StarSettings) -> Result<Star, CoreError> {
        let StarSettings { horizon_steps, points, .. } = settings;
        setting("horizon_steps", horizon_steps.into(), 1.0, MAX_STEPS.into())?;
        setting("points", points.into(), 1.0, MAX_POINTS.min(horizon_steps).into())?;
        setting("threshold", settings.threshold, 0.0, 1.0)?;
        setting("migration_seconds", settings.migration_seconds, 0.0, f64::INFINITY)?;
        setting("migration_seconds_per_token", settings.migration_seconds_per_token, 0.0, f64::INFINITY)?;
        setting("caution", settings.caution, 0.0, f64::INFINITY)?;
        if settings.max_moves == 0 {
            return Err(bad("rebalancing setting max_moves", 0, "at least 1; to move nothing, use `none`"));
        }
        let grid = match settings.weights {
            Weights::Uniform => Grid::future(horizon_steps, points, |_| 1.0),
            Weights::Geometric { half_life_steps } => {
                // Below one step, the weights of far points would be 0 and only the nearest point
                // would count.
                setting("half_life_steps", half_life_steps, 1.0, f64::INFINITY)?;
                Grid::future(horizon_steps, points, |t| (-t / half_life_steps).exp2())
            }
        };
        let none = Vec::new;
        Ok(Star { settings, grid, loads: none(), lasts: vec![], starts: vec![], sums: none(), timed: none() })
    }

    /// Returns the points at which loads are compared, and their weights.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// Returns the tokens that must fit on the target at the request's end (line 21, plus its
    /// current tokens).
    fn need(&self, request: &super::RunningRequest) -> f64 {
        let still = request.remaining.tokens + self.settings.caution * request.remaining.deviation;
        f64::from(request.tokens) + still
    }

    /// Computes summaries of all instances, and the requests that outlast their move (line 20).
    fn summarise(&mut self, loads: &[&InstanceLoad]) {
        let points = self.grid.len();
        self.loads.resize(loads.len() * points, 0.0);
        self.lasts.clear();
        self.starts.clear();
        let all: usize = loads.iter().map(|l| l.requests.len()).sum();
        self.lasts.reserve(all);
        for (load, row) in loads.iter().zip(self.loads.chunks_exact_mut(points)) {
            let start = self.lasts.len();
            self.starts.push(start);
            self.lasts.extend(load.requests.iter().map(|r| self.grid.lasts(r.remaining.tokens) as u32));
            let lasts = self.lasts[start..].iter().map(|m| *m as usize);
            self.grid.load(load.other_tokens, load.requests.iter().zip(lasts), row);
            for (m, r) in self.lasts[start..].iter_mut().zip(load.requests) {
                let seconds = self.settings.migration_seconds
                    + self.settings.migration_seconds_per_token * f64::from(r.tokens);
                let outlasts = r.remaining.tokens * load.step_seconds > seconds;
                *m *= u32::from(r.movable && outlasts);
            }
        }
    }

    /// Computes prefix sums of an instance's row, and calls `row(m, sum, timed)` for the first m
    /// points.
    fn prefix(&self, instance: usize, mut row: impl FnMut(usize, f64, f64)) {
        let points = self.grid.len();
        let (mut sum, mut timed) = (0.0, 0.0);
        row(0, sum, timed);
        for k in 0..points {
            let load = self.grid.variance_weights[k] * self.loads[instance * points + k];
            sum += load;
            timed += load * self.grid.times[k];
            row(k + 1, sum, timed);
        }
    }

    /// Returns the best move for the current summaries, or why there is none.
    fn best(&mut self, loads: &[&InstanceLoad]) -> Result<Placed, Stop> {
        let (n, points) = (loads.len(), self.grid.len());
        let now = |i: usize, this: &Star| this.loads[i * points];
        let weighted: Vec<f64> = self
            .loads
            .chunks_exact(points)
            .map(|row| row.iter().zip(&self.grid.load_weights).map(|(l, w)| l * w).sum())
            .collect();
        let mean = weighted.iter().sum::<f64>() / n as f64;
        let over: Vec<usize> =
            (0..n).filter(|i| weighted[*i] > (1.0 + self.settings.threshold) * mean).collect();
        if over.is_empty() {
            return Err(Stop::NoneOverloaded);
        }
        let under: Vec<usize> = (0..n)
            .filter(|&i| loads[i].accepts && now(i, self) < (1.0 - self.settings.threshold) * mean)
            .collect();
        if under.is_empty() {
            return Err(Stop::NoneUnderloaded);
        }
        let width = under.len();
        let (mut sums, mut timed) = (std::mem::take(&mut self.sums), std::mem::take(&mut self.timed));
        sums.resize((points + 1) * width, 0.0);
        timed.resize((points + 1) * width, 0.0);
        let mut least = vec![(f64::INFINITY, f64::INFINITY); points + 1];
        for (j, &t) in under.iter().enumerate() {
            self.prefix(t, |m, a, b| {
                (sums[m * width + j], timed[m * width + j]) = (a, b);
                least[m] = (lesser(a, least[m].0), lesser(b, least[m].1));
            });
        }
        let mut room: Vec<f64> =
            under.iter().map(|&t| loads[t].capacity_tokens as f64 - now(t, self)).collect();
        let before = self.grid.variance(&self.loads);
        let floor = before * ROUNDING * n as f64 / 2.0;
        let mut best: Option<Best> = None;
        let (mut movable, mut fits) = (false, false);
        let mut own = vec![(0.0, 0.0); points + 1];
        for &s in &over {
            self.prefix(s, |m, a, b| own[m] = (a, b));
            // An instance that is light now and heavy later can be both source and target; it must
            // not be its own target.
            let itself = under
                .iter()
                .position(|t| *t == s)
                .map(|j| (j, std::mem::replace(&mut room[j], f64::NEG_INFINITY)));
            let lasts = &self.lasts[self.starts[s]..][..loads[s].requests.len()];
            for (place, (request, &m)) in loads[s].requests.iter().zip(lasts).enumerate() {
                if m == 0 {
                    continue;
                }
                movable = true;
                let (m, tokens) = (m as usize, f64::from(request.tokens));
                let fixed = tokens * own[m].0 + own[m].1 - self.grid.square(tokens, m);
                let most = fixed - (tokens * least[m].0 + least[m].1);
                // If no candidate has fitted so far, the row is evaluated anyway, because the final
                // reason depends on it.
                if fits && (most <= floor || best.as_ref().is_some_and(|b| most < b.gain)) {
                    continue;
                }
                let row = m * width..(m + 1) * width;
                let need = self.need(request);
                let value = min_sum(&sums[row.clone()], &timed[row.clone()], &room, tokens, need);
                if value == f64::INFINITY {
                    continue;
                }
                fits = true;
                let gain = fixed - value;
                let better = |b: &Best| gain > b.gain || (gain == b.gain && request.id < b.request.0);
                if gain > floor && best.as_ref().is_none_or(better) {
                    let here = |j: &usize| {
                        room[*j] >= need && tokens * sums[row.start + j] + timed[row.start + j] == value
                    };
                    let j = (0..width).find(here).expect("the least is one of them");
                    best = Some(Best { gain, request: (request.id, place), source: s, target: under[j] });
                }
            }
            if let Some((j, free)) = itself {
                room[j] = free;
            }
        }
        (self.sums, self.timed) = (sums, timed);
        let best = best.ok_or(match (movable, fits) {
            (false, _) => Stop::NoneMovable,
            (_, false) => Stop::NoRoom,
            _ => Stop::NoGain,
        })?;
        let Best { gain, request: (request, place), source, target } = best;
        let found = Move {
            request,
            source: loads[source].instance,
            target: loads[target].instance,
            source_load: weighted[source],
            target_load: weighted[target],
            mean_load: mean,
            variance_before: before,
            variance_after: before - 2.0 * gain / n as f64,
        };
        Ok(Placed { found, place, source, target })
    }

    /// Applies the move to the summaries.
    fn apply(&mut self, done: &Placed, loads: &[&InstanceLoad]) {
        let points = self.grid.len();
        let lasts = std::mem::take(&mut self.lasts[self.starts[done.source] + done.place]) as usize;
        let tokens = f64::from(loads[done.source].requests[done.place].tokens);
        for k in 0..lasts {
            let load = tokens + self.grid.times[k];
            self.loads[done.source * points + k] -= load;
            self.loads[done.target * points + k] += load;
        }
    }
}

/// A move with its indices in the round.
struct Placed {
    found: Move,
    place: usize,
    source: usize,
    target: usize,
}

impl Rebalancer for Star {
    fn name(&self) -> &'static str {
        "star"
    }

    fn fresh(&self) -> Box<dyn Rebalancer> {
        Box::new(self.clone())
    }

    fn round(&mut self, loads: &[InstanceLoad]) -> Result<Round, CoreError> {
        let loads: Vec<&InstanceLoad> = ordered(loads)?.into_iter().map(|i| &loads[i]).collect();
        let mut moves = Vec::new();
        if loads.len() < 2 {
            return Ok(Round { moves, stop: Stop::FewInstances });
        }
        self.summarise(&loads);
        loop {
            match self.best(&loads) {
                Err(stop) => return Ok(Round { moves, stop }),
                Ok(done) => {
                    moves.push(done.found);
                    if moves.len() == self.settings.max_moves {
                        return Ok(Round { moves, stop: Stop::MaxMoves });
                    }
                    self.apply(&done, &loads);
                }
            }
        }
    }
}

/// Returns the minimum of `tokens x sums + timed` over targets with room for `need`; infinite if
/// none has room.
#[multiversion(targets("x86_64+avx2"))]
fn min_sum(sums: &[f64], timed: &[f64], room: &[f64], tokens: f64, need: f64) -> f64 {
    const LANES: usize = 8;
    let value = |a: f64, b: f64, free: f64| if free >= need { tokens * a + b } else { f64::INFINITY };
    let mut least = [f64::INFINITY; LANES];
    let rows = sums.chunks_exact(LANES).zip(timed.chunks_exact(LANES)).zip(room.chunks_exact(LANES));
    for ((a, b), free) in rows {
        for i in 0..LANES {
            least[i] = lesser(value(a[i], b[i], free[i]), least[i]);
        }
    }
    let mut all = f64::INFINITY;
    for j in sums.len() - sums.len() % LANES..sums.len() {
        all = lesser(value(sums[j], timed[j], room[j]), all);
    }
    for l in least {
        all = lesser(l, all);
    }
    all
}

//! STAR without prediction (STAR, Eq. 3): current token loads are made even.
//!
//! Remaining lengths do not count: any movable request may move, and the target needs room for its
//! current tokens only.
use lmetric_core::CoreError;
use lmetric_core::ids::Slot;
use lmetric_core::rebalance::{
    InstanceLoad, Move, Rebalancer, Round, RunningRequest, Star, StarSettings, Stop, Weights, ordered,
};

/// A gain below this fraction of the variance is rounding.
const ROUNDING: f64 = 1e-12;

/// STAR without prediction. Of its settings, only the threshold and the number of moves count.
#[derive(Clone, Copy, Debug)]
pub struct StarCurrent {
    threshold: f64,
    max_moves: usize,
}

/// State of an instance in a round.
struct Place<'a> {
    instance: Slot,
    capacity: f64,
    tokens: f64,
    accepts: bool,
    movable: Vec<&'a RunningRequest>,
}

/// Best move so far: indices of the places, and the request's index in its place.
struct Best {
    gain: f64,
    request: (u64, usize),
    source: usize,
    target: usize,
}

impl StarCurrent {
    /// # Errors
    /// `BadValue` with the setting and its range.
    pub fn new(settings: StarSettings) -> Result<StarCurrent, CoreError> {
        Star::new(StarSettings { weights: Weights::Uniform, ..settings })?;
        Ok(StarCurrent { threshold: settings.threshold, max_moves: settings.max_moves })
    }

    /// Makes the best move, or returns why there is none.
    fn step(&self, places: &mut [Place<'_>]) -> Result<Move, Stop> {
        let n = places.len() as f64;
        let mean = places.iter().map(|place| place.tokens).sum::<f64>() / n;
        let indices = || 0..places.len();
        let over: Vec<usize> =
            indices().filter(|i| places[*i].tokens > (1.0 + self.threshold) * mean).collect();
        if over.is_empty() {
            return Err(Stop::NoneOverloaded);
        }
        let is_under = |place: &Place<'_>| place.accepts && place.tokens < (1.0 - self.threshold) * mean;
        let under: Vec<usize> = indices().filter(|i| is_under(&places[*i])).collect();
        if under.is_empty() {
            return Err(Stop::NoneUnderloaded);
        }
        let off = |place: &Place<'_>| (place.tokens - mean) * (place.tokens - mean);
        let before = places.iter().map(off).sum::<f64>() / n;
        let floor = before * ROUNDING * n / 2.0;
        let mut best: Option<Best> = None;
        let (mut movable, mut fits) = (false, false);
        for &source in &over {
            for (at, request) in places[source].movable.iter().enumerate() {
                movable = true;
                let tokens = f64::from(request.tokens);
                let room = |target: &&usize| places[**target].capacity - places[**target].tokens >= tokens;
                let least = under
                    .iter()
                    .filter(room)
                    .min_by(|a, b| (tokens * places[**a].tokens).total_cmp(&(tokens * places[**b].tokens)));
                let Some(&target) = least else { continue };
                fits = true;
                let gain = tokens * places[source].tokens - tokens * tokens - tokens * places[target].tokens;
                let better = |b: &Best| gain > b.gain || (gain == b.gain && request.id < b.request.0);
                if gain > floor && best.as_ref().is_none_or(better) {
                    best = Some(Best { gain, request: (request.id, at), source, target });
                }
            }
        }
        let Best { gain, request: (request, at), source, target } = best.ok_or(match (movable, fits) {
            (false, _) => Stop::NoneMovable,
            (_, false) => Stop::NoRoom,
            _ => Stop::NoGain,
        })?;
        let found = Move {
            request,
            source: places[source].instance,
            target: places[target].instance,
            source_load: places[source].tokens,
            target_load: places[target].tokens,
            mean_load: mean,
            variance_before: before,
            variance_after: before - 2.0 * gain / n,
        };
        // A request moves at most once.
        let tokens = f64::from(places[source].movable.remove(at).tokens);
        places[source].tokens -= tokens;
        places[target].tokens += tokens;
        Ok(found)
    }
}

impl Rebalancer for StarCurrent {
    fn name(&self) -> &'static str {
        "star_current"
    }

    fn fresh(&self) -> Box<dyn Rebalancer> {
        Box::new(*self)
    }

    fn round(&mut self, loads: &[InstanceLoad]) -> Result<Round, CoreError> {
        let order = ordered(loads)?;
        let mut moves = Vec::new();
        if loads.len() < 2 {
            return Ok(Round { moves, stop: Stop::FewInstances });
        }
        let place = |i: usize| Place {
            instance: loads[i].instance,
            capacity: loads[i].capacity_tokens as f64,
            tokens: loads[i].tokens() as f64,
            accepts: loads[i].accepts,
            movable: loads[i].requests.iter().filter(|request| request.movable).collect(),
        };
        let mut places: Vec<Place<'_>> = order.into_iter().map(place).collect();
        loop {
            match self.step(&mut places) {
                Err(stop) => return Ok(Round { moves, stop }),
                Ok(found) => moves.push(found),
            }
            if moves.len() == self.max_moves {
                return Ok(Round { moves, stop: Stop::MaxMoves });
            }
        }
    }
}

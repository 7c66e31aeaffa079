//! Weights of the requests that decode on an instance, for the `decode_pressure` indicators. A policy
//! brings them ([`crate::policy::Policy::decode_weights`]); the ledger feeds them.
use super::decode_load::{DecodeLoad, Histogram};
use super::survival::Survival;
use crate::ids::Seconds;
use std::fmt::Debug;
use std::sync::Arc;

/// What a step costs for each sequence that decodes, and for each token of its context; only their ratio matters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DecodeCost {
    /// Seconds for each sequence.
    pub sequence_seconds: f64,
    /// Seconds for each token of context.
    pub context_token_seconds: f64,
}

/// From when to when requests are looked ahead, and how fast they go.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Seen at this moment.
    pub now: Seconds,
    /// When that is.
    pub then: Seconds,
    /// Tokens/s of a request. One for all: what an instance's own would change is small beside what a table for each would cost.
    pub rate: f64,
}

impl Outlook {
    /// Tokens that a request which decodes now will have made by then.
    pub fn further(&self) -> f64 {
        self.rate * (self.then - self.now).max(0.0)
    }

    /// Tokens of a request that starts to decode at `start` when the new one does; below 0: it will come so much later.
    pub fn age(&self, start: Seconds) -> f64 {
        // One that has not started by now starts no earlier than now, whatever was expected of it.
        (self.then - start.max(self.now)) * self.rate
    }
}

/// Weighs the requests of all instances, in requests that begin behind no prompt.
pub trait DecodeWeights: Debug + Send + Sync {
    /// Writes the weight of the requests of each slot: those that decode there and those bound
    /// there.
    fn weigh(&self, outlook: Outlook, loads: &[DecodeLoad], weights: &mut [f64]);

    /// Writes the weight of the requests of each slot if it is known how long each answer will be.
    /// `left`: the requests that decode, by the tokens they will still make.
    fn weigh_known(&self, outlook: Outlook, left: &[Histogram], loads: &[DecodeLoad], weights: &mut [f64]);
}

/// Makes weights of the learned curve of answer lengths, the costs of a step, and the mean prompt in
/// tokens. Called at most once a second, when an answer ends.
pub type WeightsOf = fn(&Survival, DecodeCost, f64) -> Arc<dyn DecodeWeights>;

/// Each request weighs 1: until enough answers ended.
#[derive(Clone, Copy, Debug)]
pub struct EqualWeights;

impl EqualWeights {
    fn count(running: &Histogram, load: &DecodeLoad) -> f64 {
        running.buckets().0.iter().sum::<f64>() + load.pending().count() as f64
    }
}

impl DecodeWeights for EqualWeights {
    fn weigh(&self, _: Outlook, loads: &[DecodeLoad], weights: &mut [f64]) {
        for (weight, load) in weights.iter_mut().zip(loads) {
            *weight = EqualWeights::count(load.decoding(), load);
        }
    }

    fn weigh_known(&self, _: Outlook, left: &[Histogram], loads: &[DecodeLoad], weights: &mut [f64]) {
        for ((weight, left), load) in weights.iter_mut().zip(left).zip(loads) {
            *weight = EqualWeights::count(left, load);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_weigh_the_same_until_answers_ended() {
        let outlook = Outlook { now: 0.0, then: 3.0, rate: 32.0 };
        let (mut load, mut left) = (DecodeLoad::default(), Histogram::default());
        load.enter(450.0, 10.0);
        load.bind((7, 0), 10.0, 5.0, 0.0);
        left.put(100.0, 460.0);
        let (loads, left, mut weights) =
            ([load, DecodeLoad::default()], [left, Histogram::default()], [9.0; 2]);
        EqualWeights.weigh(outlook, &loads, &mut weights);
        assert_eq!(weights, [2.0, 0.0]);
        EqualWeights.weigh_known(outlook, &left, &loads, &mut weights);
        assert_eq!(weights, [2.0, 0.0]);
    }
}

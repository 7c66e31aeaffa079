//! A sum with exponential decay.
use crate::Seconds;
use serde::{Deserialize, Serialize};

/// A sum with exponential decay. All calls must use the same time constant.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Decayed {
    value: f64,
    at: Seconds,
}

impl Decayed {
    /// Returns the sum. `over`: the time constant.
    pub fn now(&self, now: Seconds, over: Seconds) -> f64 {
        self.value * (-(now - self.at).max(0.0) / over).exp()
    }

    /// Returns the sum at the time of the last addition.
    pub fn last(&self) -> f64 {
        self.value
    }

    /// Adds to the sum.
    pub fn add(&mut self, amount: f64, now: Seconds, over: Seconds) {
        if now == self.at {
            self.value += amount; // several tokens at one time
            return;
        }
        self.value = self.now(now, over) + amount;
        self.at = now;
    }
}

//! The mean of the learned prefill rates, without a walk through all instances for each request.

/// The rate of each slot, their sum and their number. NaN: unknown.
#[derive(Clone, Debug, Default)]
pub(super) struct Rates {
    rates: Vec<f64>,
    sum: f64,
    known: usize,
    /// Changes since the last sum of all rates.
    changes: usize,
}

impl Rates {
    /// Makes room for `slots` slots.
    pub fn resize(&mut self, slots: usize) {
        self.rates.resize(slots, f64::NAN);
    }

    /// Returns the mean of the known rates.
    pub fn mean(&self) -> Option<f64> {
        (self.known > 0).then(|| self.sum / self.known as f64)
    }

    /// Sets the rate of a slot.
    pub fn set(&mut self, slot: usize, new: f64) {
        let known = |rate: f64| (!rate.is_nan()).then_some(rate);
        let old = known(std::mem::replace(&mut self.rates[slot], new));
        self.known = self.known + usize::from(!new.is_nan()) - usize::from(old.is_some());
        self.sum += known(new).unwrap_or(0.0) - old.unwrap_or(0.0);
        self.changes += 1;
        if self.changes > self.rates.len() {
            // Rounding errors do not add up.
            self.sum = self.rates.iter().filter(|rate| !rate.is_nan()).sum();
            self.changes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Defect 20 of the core review: the running mean is the mean of the column.
    #[test]
    fn the_mean_is_that_of_the_column() {
        let mut column = [f64::NAN; 7];
        let mut rates = Rates::default();
        rates.resize(7);
        assert_eq!(rates.mean(), None);
        for change in 0..1000usize {
            let slot = change * 5 % 7;
            let new = if change % 11 == 3 { f64::NAN } else { 1000.0 + (change * 7919 % 4093) as f64 / 3.0 };
            rates.set(slot, new);
            column[slot] = new;
            let known: Vec<f64> = column.iter().copied().filter(|rate| !rate.is_nan()).collect();
            let mean = known.iter().sum::<f64>() / known.len() as f64;
            match rates.mean() {
                Some(running) => assert!((running / mean - 1.0).abs() < 1e-12, "{running} {mean}"),
                None => assert!(known.is_empty()),
            }
        }
    }
}

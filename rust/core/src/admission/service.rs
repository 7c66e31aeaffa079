//! Rate at which waiting work is taken up, learned while requests wait.
use crate::ids::Seconds;

/// Time constant of the rate, in seconds during which requests wait.
const SECONDS: f64 = 20.0;
/// Seconds of waiting from which the learned rate counts fully.
const MIN_SECONDS: f64 = 2.0;

/// Learned service. Work is in tokens: prompt tokens to compute plus weighted answer tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Service {
    work: f64,
    seconds: f64,
    /// Start of the time since the last update during which requests waited.
    since: Option<Seconds>,
}

impl Service {
    /// Notes whether requests wait from now on.
    pub fn waits(&mut self, waits: bool, now: Seconds) {
        if let Some(since) = self.since {
            let passed = (now - since).max(0.0);
            let keep = (-passed / SECONDS).exp();
            self.work *= keep;
            self.seconds = self.seconds * keep + passed;
        }
        self.since = waits.then_some(now);
    }

    /// Notes work that is taken up. It counts only while requests wait: the rate needs its time.
    pub fn took(&mut self, work: f64) {
        if self.since.is_some() {
            self.work += work;
        }
    }

    /// Returns the rate in tokens of work per second. `prior`: the rate until one is learned.
    pub fn rate(&self, prior: f64) -> f64 {
        let seconds = self.seconds + MIN_SECONDS;
        ((self.work + prior * MIN_SECONDS) / seconds).max(1.0)
    }
}

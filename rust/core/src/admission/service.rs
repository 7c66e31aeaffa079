//! Rate at which waiting work is taken up, learned while requests wait, and the mean answer.
use crate::ids::Seconds;

/// Time constant of the rate, in seconds during which requests wait.
const SECONDS: f64 = 20.0;
/// Seconds of waiting from which the learned rate counts fully.
const MIN_SECONDS: f64 = 2.0;
/// Weight of the latest answer in the mean.
const ANSWER: f64 = 0.02;

/// Learned service. Work is in tokens: prompt tokens to compute plus weighted answer tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Service {
    work: f64,
    seconds: f64,
    /// Start of the time since the last update during which requests waited.
    since: Option<Seconds>,
    answer_tokens: Option<f64>,
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

    /// Learns from the length of an answer.
    pub fn answered(&mut self, tokens: u32) {
        let mean = self.answer_tokens.get_or_insert(f64::from(tokens));
        *mean += (f64::from(tokens) - *mean) * ANSWER;
    }

    /// Returns the mean answer in tokens.
    pub fn answer_tokens(&self) -> f64 {
        self.answer_tokens.unwrap_or(0.0)
    }

    /// Returns the rate in tokens of work per second. `prior`: the rate until one is learned.
    pub fn rate(&self, prior: f64) -> f64 {
        let seconds = self.seconds + MIN_SECONDS;
        ((self.work + prior * MIN_SECONDS) / seconds).max(1.0)
    }
}

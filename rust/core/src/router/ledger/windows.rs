//! Sums over the recent past that fade: prefill tokens placed on an instance, output tokens that it
//! produced.
use super::share::Share;
use crate::estimate::StepTime;
use crate::ids::Seconds;

/// Time constant of the `window_*` indicators, in seconds.
pub const WINDOW_SECONDS: f64 = 180.0;

/// A sum that fades with a time constant, which is the same at each call.
#[derive(Clone, Copy, Debug, Default)]
struct Decayed {
    value: f64,
    at: Seconds,
}

impl Decayed {
    fn now(&self, now: Seconds, over: Seconds) -> f64 {
        self.value * (-(now - self.at).max(0.0) / over).exp()
    }

    fn add(&mut self, amount: f64, now: Seconds, over: Seconds) {
        if now == self.at {
            self.value += amount; // many tokens of one moment
            return;
        }
        self.value = self.now(now, over) + amount;
        self.at = now;
    }
}

/// What an instance was given and produced recently.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows {
    prefill: Decayed,
    output: Decayed,
    /// Prefill tokens over a time constant of the caller's, and their attention pairs.
    recent_prefill: Decayed,
    recent_pairs: Decayed,
    /// When the first prefill was placed; infinite before.
    prefills_since: Seconds,
}

impl Default for Windows {
    fn default() -> Windows {
        Windows {
            prefill: Decayed::default(),
            output: Decayed::default(),
            recent_prefill: Decayed::default(),
            recent_pairs: Decayed::default(),
            prefills_since: f64::INFINITY,
        }
    }
}

impl Windows {
    /// A prefill was placed, or a peer router has placed some.
    pub fn prefills_began(&mut self, now: Seconds) {
        self.prefills_since = self.prefills_since.min(now);
    }

    /// A prefill of so many tokens and attention pairs was placed. `recent_seconds`: time constant
    /// of what counts as recent.
    pub fn placed(&mut self, tokens: f64, pairs: f64, recent_seconds: Seconds, now: Seconds) {
        self.prefill.add(tokens, now, WINDOW_SECONDS);
        self.prefills_began(now);
        self.recent_prefill.add(tokens, now, recent_seconds);
        self.recent_pairs.add(pairs, now, recent_seconds);
    }

    /// So many output tokens came.
    pub fn produced(&mut self, tokens: f64, now: Seconds) {
        self.output.add(tokens, now, WINDOW_SECONDS);
    }

    /// Prefill tokens placed and output tokens produced, faded.
    pub fn sums(&self, now: Seconds) -> (f64, f64) {
        (self.prefill.now(now, WINDOW_SECONDS), self.output.now(now, WINDOW_SECONDS))
    }

    /// Prefill tokens and attention pairs that count as recent.
    pub fn recent(&self, recent_seconds: Seconds, now: Seconds) -> (f64, f64) {
        (self.recent_prefill.now(now, recent_seconds), self.recent_pairs.now(now, recent_seconds))
    }

    /// Share of its recent time that the instance spent on prefills, those of peer routers
    /// included, if they take what `step` says.
    pub fn prefill_share(
        &self,
        peers: &Share,
        step: &StepTime,
        recent_seconds: Seconds,
        now: Seconds,
    ) -> f64 {
        let (tokens, pairs) = self.recent(recent_seconds, now);
        let seconds = step.prefills(tokens + peers.recent_prefill_tokens, pairs + peers.recent_prefill_pairs);
        // The time that was seen, faded as the sums are, and at least a thirtieth of all: the first
        // prefill is not all that ever will be.
        let seen = recent_seconds * (1.0 - ((self.prefills_since - now) / recent_seconds).exp());
        if seconds > 0.0 { seconds / seen.max(recent_seconds / 30.0) } else { 0.0 }
    }
}

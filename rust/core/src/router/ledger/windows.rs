//! Sums with exponential decay: prefill tokens placed on an instance and output tokens it produced.
use super::share::{Share, WINDOW_SECONDS};
use crate::estimate::{Decayed, StepTime};
use crate::ids::Seconds;
use std::ops::Range;

/// Recent input and output of an instance.
#[derive(Clone, Copy, Debug)]
pub(super) struct Windows {
    prefill: Decayed,
    output: Decayed,
    /// Prefill tokens and attention pairs, with the caller's time constant.
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
    /// Records that a prefill was placed by this router or a peer.
    pub fn prefills_began(&mut self, now: Seconds) {
        self.prefills_since = self.prefills_since.min(now);
    }

    /// Records a placed prefill of `tokens` tokens and `pairs` attention pairs. `recent_seconds`:
    /// time constant of recent prefills.
    pub fn placed(&mut self, tokens: f64, pairs: f64, recent_seconds: Seconds, now: Seconds) {
        self.prefill.add(tokens, now, WINDOW_SECONDS);
        self.prefills_began(now);
        self.recent_prefill.add(tokens, now, recent_seconds);
        self.recent_pairs.add(pairs, now, recent_seconds);
    }

    /// Records `tokens` output tokens.
    pub fn produced(&mut self, tokens: f64, now: Seconds) {
        self.output.add(tokens, now, WINDOW_SECONDS);
    }

    /// Returns the decayed sums of prefill tokens placed and output tokens produced.
    pub fn sums(&self, now: Seconds) -> (f64, f64) {
        (self.prefill.now(now, WINDOW_SECONDS), self.output.now(now, WINDOW_SECONDS))
    }

    /// Returns the recent prefill tokens and attention pairs.
    pub fn recent(&self, recent_seconds: Seconds, now: Seconds) -> (f64, f64) {
        (self.recent_prefill.now(now, recent_seconds), self.recent_pairs.now(now, recent_seconds))
    }

    /// Returns the share of its recent time that the instance spent on prefills, including prefills
    /// of peer routers, according to the model `step`.
    pub fn prefill_share(
        &self,
        peers: &Share,
        step: &StepTime,
        recent_seconds: Seconds,
        now: Seconds,
    ) -> f64 {
        let (tokens, pairs) = self.recent(recent_seconds, now);
        let seconds = step.prefills(tokens + peers.recent_prefill_tokens, pairs + peers.recent_prefill_pairs);
        // Observed time with the same decay as the sums, at least 1/30 of the time constant, so
        // that the first prefill is not taken for full load.
        let seen = recent_seconds * (1.0 - ((self.prefills_since - now) / recent_seconds).exp());
        if seconds > 0.0 { seconds / seen.max(recent_seconds / 30.0) } else { 0.0 }
    }
}

impl super::Ledger {
    /// Writes the decayed sums of `slots` at `now`: prefill tokens and output tokens.
    pub fn windows(&self, now: Seconds, slots: Range<usize>, prefill: &mut [f64], output: &mut [f64]) {
        for ((account, prefill), output) in self.accounts[slots].iter().zip(prefill).zip(output) {
            let (placed, produced) = account.windows.sums(now);
            let peers = &account.peers.share;
            let left = if peers.window_prefill_tokens + peers.window_output_tokens > 0.0 {
                (-(now - account.peers.at).max(0.0) / WINDOW_SECONDS).exp()
            } else {
                0.0
            };
            *prefill = placed + peers.window_prefill_tokens * left;
            *output = produced + peers.window_output_tokens * left;
        }
    }

    /// Sets the time constant of recent prefills.
    pub fn set_recent(&mut self, seconds: Seconds) {
        self.recent_seconds = seconds;
    }

    /// Returns the share of recent time that a slot spent on prefills, by the model `step`.
    pub fn prefill_share_on(&self, slot: usize, step: &StepTime, now: Seconds) -> f64 {
        let account = &self.accounts[slot];
        let peers = account.peers.now(now, self.recent_seconds);
        account.windows.prefill_share(&peers, step, self.recent_seconds, now)
    }
}

//! The ledger's account of one instance, without its prefill backlog.
use super::backlog::Ended;
use super::counts::{Counts, Entry};
use super::external::External;
use super::share::{Share, Timed, decaying};
use super::tier_loads::TierLoads;
use super::windows::Windows;
use crate::estimate::{Batch, PrefillRate, StepWatch};
use crate::ids::Seconds;
use crate::indicators::{Columns, Indicator};

/// The ledger's account of one instance, without its prefill backlog.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    pub own: Counts,
    /// Load of peer routers and workers.
    pub peers: Timed,
    pub external: External,
    pub windows: Windows,
    /// Prefix fetches that this instance serves.
    pub fetches: f64,
    pub rate: PrefillRate,
    /// Loads from the tiers below the GPU.
    pub loads: TierLoads,
    pub steps: StepWatch,
    /// End of the last own request that decoded.
    pub decoded_until: Seconds,
}

impl Account {
    /// Returns the own load without the prefill queue. `recent_seconds`: time constant of recent
    /// prefills.
    pub fn share(&self, recent_seconds: Seconds, now: Seconds) -> Share {
        let Account { own, windows, fetches, .. } = self;
        let (recent_prefill_tokens, recent_prefill_pairs) = windows.recent(recent_seconds, now);
        let (window_prefill_tokens, window_output_tokens) = windows.sums(now);
        Share {
            coming: own.coming,
            queued: own.queued - own.unqueued,
            scheduled: own.scheduled + own.unqueued,
            decoding: own.decoding,
            decode_tokens: own.decode_tokens,
            bound_tokens: own.bound_tokens,
            remaining_tokens: own.remaining_tokens,
            bound_remaining_tokens: own.bound_remaining_tokens,
            recent_prefill_tokens: decaying(recent_prefill_tokens),
            recent_prefill_pairs: decaying(recent_prefill_pairs),
            window_prefill_tokens: decaying(window_prefill_tokens),
            window_output_tokens: decaying(window_output_tokens),
            fetches: *fetches,
            ..Share::default() // `Router::share` adds the agent programs
        }
    }

    /// Returns the number of own and peer requests that the engine may have.
    pub fn known(&self) -> f64 {
        self.own.at_engine() + self.peers.share.at_engine()
    }

    /// Returns the decode batch of own and peer requests.
    pub fn batch(&self) -> Batch {
        Batch {
            sequences: self.own.decoding + self.peers.share.decoding,
            context: self.own.decode_tokens + self.peers.share.decode_tokens,
        }
    }

    /// Learns from prefills that a first token ended: the prefill rate, or the cost of loads.
    pub fn learn_prefill(&mut self, ended: &Ended, entry: &mut Entry) {
        if !self.loads.prefilled(ended, entry) {
            self.rate.observe(ended.tokens, ended.pairs, ended.seconds);
        }
    }

    /// Writes the learned prefill rate and its error.
    pub fn write_rate(&self, slot: usize, columns: &mut Columns) {
        for (id, value) in [
            (Indicator::PrefillTokensPerSecond, self.rate.tokens_per_second()),
            (Indicator::PrefillRelativeError, self.rate.relative_error()),
        ] {
            columns.get_mut(id)[slot] = value.unwrap_or(f64::NAN);
        }
    }

    /// Writes the indicators derived from request counts.
    pub fn write(&mut self, slot: usize, columns: &mut Columns) {
        self.external.note(self.known());
        let (own, peers, external) = (&self.own, &self.peers.share, &self.external);
        let waiting = own.coming + own.queued - own.unqueued + external.waiting + peers.coming + peers.queued;
        let running =
            own.unqueued + own.scheduled + own.decoding + external.running + peers.scheduled + peers.decoding;
        let bound = own.coming + own.queued + own.scheduled + peers.coming + peers.queued + peers.scheduled;
        for (id, value) in [
            (Indicator::QBs, waiting),
            (Indicator::RBs, running),
            (Indicator::Bs, waiting + running),
            (Indicator::DecodeBs, own.decoding + peers.decoding),
            (Indicator::BoundBs, bound),
        ] {
            columns.get_mut(id)[slot] = value;
        }
        self.write_tokens(slot, columns);
    }

    pub fn write_tokens(&self, slot: usize, columns: &mut Columns) {
        let (own, peers) = (&self.own, &self.peers.share);
        let bound = own.bound_tokens + peers.bound_tokens;
        let decode = own.decode_tokens + peers.decode_tokens;
        for (id, value) in [
            (Indicator::Tokens, bound + decode),
            (Indicator::DecodeTokens, decode),
            (Indicator::BoundTokens, bound),
            (Indicator::RemainingTokens, own.remaining_tokens + peers.remaining_tokens),
        ] {
            columns.get_mut(id)[slot] = value;
        }
    }
}

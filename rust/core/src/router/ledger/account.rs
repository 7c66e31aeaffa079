//! The ledger's account of one instance, without its prefill backlog.
use super::counts::Counts;
use super::external::External;
use super::share::Share;
use super::windows::Windows;
use crate::estimate::PrefillRate;
use crate::estimate::step_watch::{Batch, StepWatch};
use crate::ids::Seconds;
use crate::indicators::{Columns, Indicator};

/// The ledger's account of one instance, without its prefill backlog.
#[derive(Clone, Debug, Default)]
pub(super) struct Account {
    pub own: Counts,
    pub peers: Share,
    pub external: External,
    pub windows: Windows,
    /// Prefix fetches that this instance serves.
    pub pulls: f64,
    pub rate: PrefillRate,
    pub steps: StepWatch,
    /// End of the last own request that decoded.
    pub decoded_until: Seconds,
}

impl Account {
    /// Returns the number of own and peer requests that the engine may have.
    pub fn known(&self) -> f64 {
        self.own.at_engine() + self.peers.at_engine()
    }

    /// Returns the decode batch of own and peer requests.
    pub fn batch(&self) -> Batch {
        Batch {
            sequences: self.own.decoding + self.peers.decoding,
            context: self.own.decode_tokens + self.peers.decode_tokens,
        }
    }

    /// Writes the indicators derived from request counts.
    pub fn write(&mut self, slot: usize, columns: &mut Columns) {
        self.external.note(self.known());
        let (own, peers, external) = (&self.own, &self.peers, &self.external);
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
        let (own, peers) = (&self.own, &self.peers);
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

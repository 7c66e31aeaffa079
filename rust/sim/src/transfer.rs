//! What carries a prompt's KV cache from the engine that computed it to the one that decodes.
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

/// When a transfer may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overlap {
    /// When the prefill has ended (vLLM's NIXL connector: the decode engine pulls).
    #[default]
    End,
    /// With the prefill, layer by layer, where the decode instance is known by then: only what the prefill does not hide counts
    /// (P2P NCCL, SGLang's bootstrap; in the limit of many layers).
    Layers,
}

/// What moving KV costs.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Transfer {
    /// Seconds a token on a free link: its KV bytes over the link's bytes a second.
    pub seconds_per_token: Seconds,
    /// Seconds that each transfer takes besides.
    pub fixed_seconds: Seconds,
    /// When it may begin.
    pub overlap: Overlap,
}

impl Transfer {
    /// Refuses times that cannot be.
    pub(crate) fn check(&self) -> Result<(), CoreError> {
        for (what, seconds) in [
            ("transfer: seconds per token", self.seconds_per_token),
            ("transfer: fixed seconds", self.fixed_seconds),
        ] {
            if !(0.0..=1e6).contains(&seconds) {
                let (got, expected) = (seconds.to_string(), "0 to 1e6 seconds".into());
                return Err(CoreError::BadValue { what: what.into(), got, expected });
            }
        }
        Ok(())
    }
}

/// A prompt to be moved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// The sending and the receiving instance.
    pub from: usize,
    pub to: usize,
    /// Tokens of it that the receiver does not hold.
    pub tokens: u32,
    /// When its prefill began, where the receiver was known by then, and when it ended.
    pub began: Option<Seconds>,
    pub ended: Seconds,
}

/// Each instance sends one prompt at a time and receives one at a time, in the order in which their prefills end.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    transfer: Transfer,
    /// Until when each instance sends and receives.
    sends: Vec<Seconds>,
    receives: Vec<Seconds>,
}

impl Links {
    pub fn new(transfer: Transfer, instances: usize) -> Links {
        Links { transfer, sends: vec![0.0; instances], receives: vec![0.0; instances] }
    }

    /// Moves a prompt; gives when it is there, which is never before its prefill has ended.
    pub fn carry(&mut self, load: Load) -> Seconds {
        let Transfer { seconds_per_token, fixed_seconds, overlap } = self.transfer;
        let seconds = fixed_seconds + seconds_per_token * f64::from(load.tokens);
        if seconds == 0.0 || load.tokens == 0 || load.from == load.to {
            return load.ended;
        }
        let earliest = match overlap {
            Overlap::End => load.ended,
            Overlap::Layers => load.began.unwrap_or(load.ended),
        };
        let begin = earliest.max(self.sends[load.from]).max(self.receives[load.to]);
        let there = load.ended.max(begin + seconds);
        (self.sends[load.from], self.receives[load.to]) = (there, there);
        there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(overlap: Overlap) -> Links {
        Links::new(Transfer { seconds_per_token: 0.01, fixed_seconds: 0.5, overlap }, 4)
    }

    #[test]
    fn at_the_end_all_of_it_counts_and_links_take_one_at_a_time() {
        let mut links = links(Overlap::End);
        let load = Load { from: 0, to: 2, tokens: 100, began: Some(9.0), ended: 10.0 };
        assert_eq!(links.carry(load), 11.5);
        assert_eq!(links.carry(Load { to: 3, ended: 10.5, ..load }), 13.0); // the sender is busy until 11.5
        assert_eq!(links.carry(Load { from: 1, ended: 10.5, ..load }), 13.0); // and so is the receiver
        assert_eq!(links.carry(Load { from: 1, to: 3, ended: 20.0, ..load }), 21.5);
        assert_eq!(links.carry(Load { tokens: 0, ended: 21.0, ..load }), 21.0);
        assert_eq!(links.carry(Load { from: 2, ended: 21.0, ..load }), 21.0); // it is there already
    }

    #[test]
    fn layer_by_layer_only_the_tail_counts_where_the_receiver_was_known() {
        let load = Load { from: 0, to: 2, tokens: 100, began: Some(9.0), ended: 10.0 };
        assert_eq!(links(Overlap::Layers).carry(load), 10.5);
        assert_eq!(links(Overlap::Layers).carry(Load { began: Some(8.0), ..load }), 10.0);
        assert_eq!(links(Overlap::Layers).carry(Load { began: None, ..load }), 11.5);
    }

    #[test]
    fn bad_times_are_named() {
        for (transfer, what) in [
            (Transfer { seconds_per_token: f64::NAN, ..Transfer::default() }, "seconds per token"),
            (Transfer { fixed_seconds: -1.0, ..Transfer::default() }, "fixed seconds"),
        ] {
            let message = transfer.check().unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
        assert_eq!(Transfer::default().check(), Ok(()));
    }
}

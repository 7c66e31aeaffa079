//! KV transfers from the engine that computed a prompt to the engine that decodes.
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;

/// Earliest start of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Overlap {
    /// The end of the prefill (vLLM's NIXL connector: the decode engine fetches).
    #[default]
    End,
    /// With the prefill, layer by layer, if the decode instance is known by then. Only the time
    /// beyond the prefill counts (P2P NCCL, SGLang's bootstrap; in the limit of many layers).
    Layers,
    /// Chunk by chunk of prompt or answer, each when it is computed, if the receiver is known by
    /// then (Libra, section 4.3 and Figure 7). At the end of the first part, only the last chunk is
    /// left.
    Chunks {
        /// Tokens of a chunk; the last one may be smaller.
        tokens: u32,
    },
}

/// Cost of moving KV.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Transfer {
    /// Seconds per token on a free link: its KV bytes over the link's bytes per second.
    pub seconds_per_token: Seconds,
    /// Additional seconds per transfer.
    pub fixed_seconds: Seconds,
    /// Earliest start of a transfer.
    pub overlap: Overlap,
    /// Whether an instance sends and receives any number of prompts at once, each as if it were
    /// alone.
    pub unshared: bool,
}

impl Transfer {
    /// Checks the times. Errors for impossible times.
    pub(crate) fn check(&self) -> Result<(), CoreError> {
        if self.overlap == (Overlap::Chunks { tokens: 0 }) {
            let expected = "1 or more".into();
            return Err(CoreError::BadValue {
                what: "transfer: tokens of a chunk".into(),
                got: "0".into(),
                expected,
            });
        }
        if self.unshared && matches!(self.overlap, Overlap::Chunks { .. }) {
            return Err(CoreError::BadValue {
                what: "transfer".into(),
                got: "chunks over links that are not shared".into(),
                expected: "overlap end or layers there".into(),
            });
        }
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

/// A prompt whose KV is transferred.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// The sending and the receiving instance.
    pub from: usize,
    pub to: usize,
    /// Tokens of the prompt that the receiver does not hold.
    pub tokens: u32,
    /// Begin of its prefill, if the receiver was known by then, and end of its prefill.
    pub began: Option<Seconds>,
    pub ended: Seconds,
}

/// The instances' links. Each instance sends one prompt at a time and receives one at a time, in
/// the order in which the prefills end.
#[derive(Clone, Debug)]
pub(crate) struct Links {
    transfer: Transfer,
    /// Time until which each instance sends, and time until which each receives.
    sends: Vec<Seconds>,
    receives: Vec<Seconds>,
    /// The same times for last chunks alone: earlier chunks may be older than the links' work.
    last_sent: Vec<Seconds>,
    last_received: Vec<Seconds>,
}

impl Links {
    pub fn new(transfer: Transfer, instances: usize) -> Links {
        let free = vec![0.0; instances];
        Links {
            transfer,
            sends: free.clone(),
            receives: free.clone(),
            last_sent: free.clone(),
            last_received: free,
        }
    }

    /// Returns the time until which an instance sends.
    pub fn sends_until(&self, instance: usize) -> Seconds {
        self.sends[instance].max(self.last_sent[instance])
    }

    /// Transfers a prompt. Returns its arrival, which is never before the end of its prefill.
    pub fn carry(&mut self, load: Load) -> Seconds {
        let Transfer { seconds_per_token, fixed_seconds, overlap, unshared } = self.transfer;
        let seconds = fixed_seconds + seconds_per_token * f64::from(load.tokens);
        if seconds == 0.0 || load.tokens == 0 || load.from == load.to {
            return load.ended;
        }
        let earliest = match (overlap, load.began) {
            (Overlap::End, _) | (_, None) => load.ended,
            (Overlap::Layers, Some(began)) => began,
            (Overlap::Chunks { tokens }, Some(began)) => return self.carry_chunks(&load, tokens, began),
        };
        if unshared {
            return load.ended.max(earliest + seconds);
        }
        let begin = earliest.max(self.sends[load.from]).max(self.receives[load.to]);
        let there = load.ended.max(begin + seconds);
        (self.sends[load.from], self.receives[load.to]) = (there, there);
        there
    }

    /// Chunks are computed evenly from `began` on (a prompt's chunks come sooner, and wait for
    /// nothing). Chunks of several requests take turns on a link. So the work of a link adds up,
    /// but a slow request does not block other requests.
    fn carry_chunks(&mut self, load: &Load, chunk: u32, began: Seconds) -> Seconds {
        let Transfer { seconds_per_token, fixed_seconds, .. } = self.transfer;
        let moving = |tokens: u32| fixed_seconds + seconds_per_token * f64::from(tokens);
        let chunks = load.tokens.div_ceil(chunk);
        let last = moving(load.tokens - (chunks - 1) * chunk);
        let done = |k: u32| {
            let share = (f64::from(k) * f64::from(chunk) / f64::from(load.tokens)).min(1.0);
            began + (load.ended - began) * share
        };
        let (from, to) = (load.from, load.to);
        // All chunks, one behind the other, as soon as there is one and the links have time.
        let full = f64::from(chunks - 1) * moving(chunk) + last;
        let busy = done(1).max(self.sends[from]).max(self.receives[to]) + full;
        // Or the links wait for the chunks: the wait ends with the last chunk but one, or with the
        // last.
        let but_one = if chunks > 1 { done(chunks - 1) + moving(chunk) } else { began };
        let tail = load.ended.max(but_one).max(self.last_sent[from]).max(self.last_received[to]) + last;
        let there = busy.max(tail);
        (self.sends[from], self.receives[to]) = (busy, busy);
        (self.last_sent[from], self.last_received[to]) = (there, there);
        there
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(overlap: Overlap) -> Links {
        let transfer = Transfer { seconds_per_token: 0.01, fixed_seconds: 0.5, overlap, unshared: false };
        Links::new(transfer, 4)
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
    fn links_that_are_not_shared_never_wait() {
        let transfer =
            Transfer { seconds_per_token: 0.01, fixed_seconds: 0.5, unshared: true, ..Transfer::default() };
        let mut links = Links::new(transfer, 4);
        let load = Load { from: 0, to: 2, tokens: 100, began: None, ended: 10.0 };
        assert_eq!((links.carry(load), links.carry(load)), (11.5, 11.5));
        assert_eq!(links.carry(Load { tokens: 0, ..load }), 10.0);
        let chunks = Transfer { overlap: Overlap::Chunks { tokens: 4 }, ..transfer };
        assert!(chunks.check().unwrap_err().to_string().contains("not shared"));
    }

    #[test]
    fn layer_by_layer_only_the_tail_counts_where_the_receiver_was_known() {
        let load = Load { from: 0, to: 2, tokens: 100, began: Some(9.0), ended: 10.0 };
        assert_eq!(links(Overlap::Layers).carry(load), 10.5);
        assert_eq!(links(Overlap::Layers).carry(Load { began: Some(8.0), ..load }), 10.0);
        assert_eq!(links(Overlap::Layers).carry(Load { began: None, ..load }), 11.5);
    }

    #[test]
    fn chunk_by_chunk_only_the_last_one_is_left() {
        let chunks = |tokens| links(Overlap::Chunks { tokens });
        // 100 tokens within 10 s, in chunks of 40: done at 4, 8 and 10 s; the last one, of 20
        // tokens, takes 0.5 + 0.2 s.
        let load = Load { from: 0, to: 2, tokens: 100, began: Some(0.0), ended: 10.0 };
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        close(chunks(40).carry(load), 10.7);
        // Computed in 1 s: the first is done at 0.4 s, and all three take 0.9 + 0.9 + 0.7 s one
        // behind the other.
        close(chunks(40).carry(Load { ended: 1.0, ..load }), 2.9);
        // Computed in 2.5 s: the first moves 1.0 to 1.9 s, the second 2.0 to 2.9 s, and then the
        // last.
        close(chunks(40).carry(Load { ended: 2.5, ..load }), 3.6);
        // There is no overlap with one chunk, or if the receiver was not known.
        close(chunks(100).carry(load), 11.5);
        close(chunks(40).carry(Load { began: None, ..load }), 11.5);
        // Two that compute side by side share the link: 2.5 s of work each, long done except for
        // the last chunks.
        let mut shared = chunks(40);
        close(shared.carry(load), 10.7);
        close(shared.carry(load), 11.4);
        // Another receiver does not help if the sender is the same. With more, the link has no time
        // left: 2.5 s each from 4 s on.
        close(shared.carry(Load { to: 3, ..load }), 12.1);
        close((0..4).map(|_| shared.carry(load)).sum(), 14.0 + 16.5 + 19.0 + 21.5);
        close(shared.carry(load), 4.0 + 8.0 * 2.5);
    }

    #[test]
    fn bad_times_are_named() {
        for (transfer, what) in [
            (Transfer { seconds_per_token: f64::NAN, ..Transfer::default() }, "seconds per token"),
            (Transfer { fixed_seconds: -1.0, ..Transfer::default() }, "fixed seconds"),
            (Transfer { overlap: Overlap::Chunks { tokens: 0 }, ..Transfer::default() }, "tokens of a chunk"),
        ] {
            let message = transfer.check().unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
        assert_eq!(Transfer::default().check(), Ok(()));
    }
}

//! Load of one router on an instance, as its peers and other workers count it.
use crate::ids::Seconds;

/// Time constant of the `window_*` indicators, in seconds.
pub const WINDOW_SECONDS: f64 = 180.0;

/// Decaying sums below this count as zero, so that idle instances have no load.
const MIN_SUM: f64 = 0.5;
macro_rules! numbers {
    ($($(#[doc = $about:literal])* $name:ident),* $(,)?) => {
        /// Load of one router, or of several together, on an instance.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct Share { $($(#[doc = $about])* pub $name: f64),* }

        impl Share {
            /// Names of the numbers, in order.
            pub const NAMES: [&'static str; [$(stringify!($name)),*].len()] = [$(stringify!($name)),*];

            /// Returns the numbers, in the order of their names.
            pub fn numbers(&self) -> [f64; Share::NAMES.len()] {
                [$(self.$name),*]
            }

            /// Creates a load from its numbers.
            pub fn of([$($name),*]: [f64; Share::NAMES.len()]) -> Share {
                Share { $($name),* }
            }
        }
    };
}

numbers! {
    /// Bound requests whose prompts other instances compute.
    coming,
    /// Requests in the engine's queue.
    queued,
    /// Requests in prefill.
    scheduled,
    /// Requests past their first token.
    decoding,
    /// Context tokens of requests past their first token.
    decode_tokens,
    /// Context tokens of all other requests.
    bound_tokens,
    /// Expected remaining output tokens of running requests, if known.
    remaining_tokens,
    /// Expected remaining output tokens of requests that do not run yet, if known.
    bound_remaining_tokens,
    /// Prefill tokens placed and not computed yet.
    queued_prefill_tokens,
    /// Attention pairs of the prefills placed and not computed yet.
    queued_prefill_pairs,
    /// Prefill tokens placed recently, with exponential decay.
    recent_prefill_tokens,
    /// Attention pairs of the prefills placed recently, with exponential decay.
    recent_prefill_pairs,
    /// The indicator `window_prefill_tokens`.
    window_prefill_tokens,
    /// The indicator `window_output_tokens`.
    window_output_tokens,
    /// Prefix fetches that the instance serves.
    fetches,
    /// Tokens of running and recent requests outside agent programs, if programs are followed.
    other_tokens,
}

impl Share {
    /// Returns the number of requests that the engine may have.
    pub fn at_engine(&self) -> f64 {
        self.queued + self.scheduled + self.decoding
    }

    /// Returns the context tokens of all requests.
    pub fn tokens(&self) -> f64 {
        self.decode_tokens + self.bound_tokens
    }

    pub(in crate::router) fn add(&mut self, other: &Share) {
        let mut numbers = self.numbers();
        numbers.iter_mut().zip(other.numbers()).for_each(|(sum, more)| *sum += more);
        *self = Share::of(numbers);
    }

    pub(in crate::router) fn subtract(&mut self, other: &Share) {
        let mut numbers = self.numbers();
        numbers.iter_mut().zip(other.numbers()).for_each(|(sum, less)| *sum = (*sum - less).max(0.0));
        *self = Share::of(numbers);
    }

    pub(in crate::router) fn is_nothing(&self) -> bool {
        *self == Share::default()
    }

    /// Returns the load `seconds` later: the sums with exponential decay shrink. `recent_seconds`:
    /// time constant of recent prefills.
    pub(in crate::router) fn later(&self, seconds: Seconds, recent_seconds: Seconds) -> Share {
        if seconds <= 0.0 {
            return *self;
        }
        let [recent, window] = [recent_seconds, WINDOW_SECONDS].map(|over| (-seconds / over).exp());
        Share {
            recent_prefill_tokens: decaying(self.recent_prefill_tokens * recent),
            recent_prefill_pairs: decaying(self.recent_prefill_pairs * recent),
            window_prefill_tokens: decaying(self.window_prefill_tokens * window),
            window_output_tokens: decaying(self.window_output_tokens * window),
            ..*self
        }
    }
}

/// Returns a decaying sum, or 0 if little is left of it.
pub(super) fn decaying(sum: f64) -> f64 {
    if sum < MIN_SUM { 0.0 } else { sum }
}

/// Load of a router on an instance, as of a time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timed {
    /// The load then.
    pub share: Share,
    /// The time.
    pub at: Seconds,
}

impl Timed {
    /// Returns the load at `now`.
    pub(in crate::router) fn now(&self, now: Seconds, recent_seconds: Seconds) -> Share {
        self.share.later(now - self.at, recent_seconds)
    }
}

impl super::Ledger {
    /// Returns the load of peer routers on a slot.
    pub fn peers(&self, slot: usize) -> &Share {
        &self.accounts[slot].peers.share
    }

    /// Returns the time constant of recent prefills.
    pub fn recent_seconds(&self) -> Seconds {
        self.recent_seconds
    }

    /// Returns whether the own load of a slot changes between events: prefills progress, and
    /// streams produce tokens.
    pub fn moves(&self, slot: usize) -> bool {
        self.in_flight(slot) > 0.0 || !self.backlogs.is_empty(slot)
    }

    /// Sets the load of peer routers on a slot.
    pub fn set_peers(&mut self, slot: usize, peers: Share, now: Seconds) {
        let account = &mut self.accounts[slot];
        account.peers = Timed { share: peers, at: now };
        if peers.recent_prefill_tokens > 0.0 {
            account.windows.prefills_began(now);
        }
        self.write_others(slot);
        self.write_fetches(slot);
        self.write_columns(slot);
    }
}

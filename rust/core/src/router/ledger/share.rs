//! Published load: one router's load on an instance, for its peers.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::program::{MAX_ROOTS, PeerRoot};

/// Time constant of the `window_*` indicators, in seconds.
pub const WINDOW_SECONDS: f64 = 180.0;

/// Decaying sums below this count as zero, so that idle instances have no load.
const MIN_SUM: f64 = 0.5;
/// Relative difference below which two numbers are equal: messages have 24 bits of each number.
const ROUNDING: f64 = 1.0 / (1 << 22) as f64;
/// Relative difference from which peers need a new estimate of the tokens that programs wait for.
const DEMAND_TOLERANCE: f64 = 0.1;

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
    /// Expected tokens of agent programs and of requests outside them, without shared roots.
    program_tokens,
    /// Agent programs that count in the working set.
    programs,
    /// Tokens that held programs need: those of the router, divided by its instances. Peers receive
    /// changes of at least a tenth.
    held_program_tokens,
    /// Tokens of programs admitted recently, with exponential decay, divided likewise.
    admitted_program_tokens,
}

/// Load that a router publishes of one instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Published {
    /// The numbers.
    pub share: Share,
    /// Roots that the router's agent programs share.
    pub roots: Vec<PeerRoot>,
}

impl Published {
    /// Returns whether there is no load.
    pub fn is_nothing(&self) -> bool {
        self.share.is_nothing() && self.roots.is_empty()
    }

    /// Checks all numbers. `whose`: for the error, for example `on x in the load of router a`.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for too many roots.
    pub fn check(&self, whose: impl Fn() -> String) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: String| {
            Err(CoreError::BadValue { what: format!("{what} {}", whose()), got, expected })
        };
        let numbers = Share::NAMES.into_iter().zip(self.share.numbers());
        let roots = self.roots.iter().map(|root| ("tokens of a root", root.root.tokens));
        for (what, value) in numbers.chain(roots) {
            if !(0.0..=1e15).contains(&value) {
                return bad(what, value.to_string(), "0 to 1e15".into());
            }
        }
        if let Some(root) = self.roots.iter().find(|root| !(0.0..=1.0).contains(&root.probability)) {
            return bad("probability of a root", root.probability.to_string(), "0 to 1".into());
        }
        if self.roots.len() > MAX_ROOTS {
            return bad("roots", self.roots.len().to_string(), format!("at most {MAX_ROOTS}"));
        }
        Ok(())
    }

    /// Returns the load as a message holds it: 24 bits of each number.
    pub(in crate::router) fn rounded(mut self) -> Published {
        let round = |number: f64| f64::from(number as f32);
        self.share = Share::of(self.share.numbers().map(round));
        for root in &mut self.roots {
            (root.root.tokens, root.probability) = (round(root.root.tokens), round(root.probability));
        }
        self
    }

    /// Returns the load `seconds` later ([`Share::later`]).
    pub(in crate::router) fn later(&self, seconds: Seconds, recent_seconds: Seconds) -> Published {
        Published { share: self.share.later(seconds, recent_seconds), roots: self.roots.clone() }
    }

    /// Returns whether peers that received this load know `load`, which is `seconds` later.
    pub(in crate::router) fn stands_for(
        &self,
        load: &Published,
        seconds: Seconds,
        recent_seconds: Seconds,
    ) -> bool {
        let near = |a: f64, b: f64, tolerance: f64| (a - b).abs() <= tolerance * a.max(b);
        let (known, new) = (self.share.later(seconds, recent_seconds), load.share);
        let demand = |a, b| near(a, b, DEMAND_TOLERANCE);
        if self.roots != load.roots
            || !demand(known.held_program_tokens, new.held_program_tokens)
            || !demand(known.admitted_program_tokens, new.admitted_program_tokens)
        {
            return false;
        }
        let [known, new] = [known, new]
            .map(|share| Share { held_program_tokens: 0.0, admitted_program_tokens: 0.0, ..share }.numbers());
        known.into_iter().zip(new).all(|(a, b)| near(a, b, ROUNDING))
    }
}

impl From<Share> for Published {
    fn from(share: Share) -> Published {
        Published { share, roots: Vec::new() }
    }
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

    /// Returns the load `seconds` later: the sums with exponential decay shrink. The load of agent
    /// programs stays, because only their router knows it. `recent_seconds`: time constant of
    /// recent prefills.
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

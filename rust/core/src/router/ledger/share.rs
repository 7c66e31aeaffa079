//! Published load: one router's load on an instance, for its peers.
use crate::program::PeerRoot;

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
    /// Tokens that held programs need: those of the router, divided by its instances.
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
}

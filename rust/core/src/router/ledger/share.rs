//! What one router has on an instance, as its peers are told of it.

macro_rules! numbers {
    ($($(#[doc = $about:literal])* $name:ident),* $(,)?) => {
        /// What one router, or several together, have on an instance.
        #[derive(Clone, Copy, Debug, Default, PartialEq)]
        pub struct Share { $($(#[doc = $about])* pub $name: f64),* }

        impl Share {
            /// The names of its numbers, in order.
            pub const NAMES: [&'static str; [$(stringify!($name)),*].len()] = [$(stringify!($name)),*];

            /// Its numbers, in the order of their names.
            pub fn numbers(&self) -> [f64; Share::NAMES.len()] {
                [$(self.$name),*]
            }

            /// A share of these numbers.
            pub fn of([$($name),*]: [f64; Share::NAMES.len()]) -> Share {
                Share { $($name),* }
            }
        }
    };
}

numbers! {
    /// Requests bound there whose prompt is prefilled elsewhere.
    coming,
    /// Requests in the engine's queue.
    queued,
    /// Requests that prefill.
    scheduled,
    /// Requests past their first token.
    decoding,
    /// Context tokens of these.
    decode_tokens,
    /// Context tokens of all others.
    bound_tokens,
    /// Output tokens that the running ones have still to come, where known.
    remaining_tokens,
    /// The same of those that do not run yet.
    bound_remaining_tokens,
    /// Prefill tokens placed there and not computed, and their attention pairs.
    queued_prefill_tokens,
    /// See above.
    queued_prefill_pairs,
    /// Prefill tokens placed there of late, older ones for less, and their attention pairs.
    recent_prefill_tokens,
    /// See above.
    recent_prefill_pairs,
    /// The `window_*` indicators.
    window_prefill_tokens,
    /// See above.
    window_output_tokens,
    /// Prefixes that others pull from there.
    pulls,
}

impl Share {
    /// Requests that the engine may know of.
    pub fn at_engine(&self) -> f64 {
        self.queued + self.scheduled + self.decoding
    }

    /// Context tokens of all.
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

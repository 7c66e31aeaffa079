//! Input and output of admission: arriving requests, room on instances, and decisions.
use super::levels::LevelSnapshot;
use crate::ids::{ArrivalId, Seconds, Slot};
use crate::program::Hold;

/// Why a request waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeldFor {
    /// Its program has no place in a cache.
    Program(Hold),
    /// No instance has room, or other tenants are next.
    Room,
    /// Its tenant has as many requests on engines as its limit allows.
    Concurrency,
}

macro_rules! reasons {
    ($($name:ident $text:literal $about:literal,)*) => {
        /// Why a request is refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum RefusedFor { $(#[doc = $about] $name),* }

        impl RefusedFor {
            /// All reasons, with their names in metrics.
            pub const NAMES: [(&'static str, RefusedFor); 3] = [$(($text, RefusedFor::$name)),*];

            /// Returns the name.
            pub fn name(self) -> &'static str {
                match self { $(RefusedFor::$name => $text),* }
            }
        }
    };
}

reasons! {
    Programs "programs" "Its program would wait too long for a place in a cache.",
    Deadline "deadline" "Its first token would come after its deadline.",
    Queue "queue" "Its tenant, or all tenants together, have the maximum number of waiting requests.",
}

/// Decision on an arriving request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// It runs now; the policy chooses its instance.
    Free,
    /// It runs now, on the instance of its program.
    Run(Slot),
    /// It waits until [`Admission::release`](super::Admission::release) names it.
    Held {
        /// The reason of the wait.
        by: HeldFor,
        /// Predicted wait; infinite: unknown.
        expected_seconds: Seconds,
    },
    /// It is refused.
    Refused {
        /// The reason.
        by: RefusedFor,
        /// Predicted seconds until it would be admitted.
        retry_after_seconds: Seconds,
    },
}

/// Waiting requests whose wait has ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Released {
    /// Requests that may run now, with the seconds for which they were held.
    pub ready: Vec<(ArrivalId, Seconds)>,
    /// Requests that are refused, with the seconds after which their clients may try again.
    pub refused: Vec<(ArrivalId, RefusedFor, Seconds)>,
}

/// An arriving request, as far as admission by load needs it.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// Hash of the tenant's name.
    pub tenant: u64,
    /// The tenant's share relative to other tenants.
    pub weight: f64,
    /// Prompt tokens that the best instance has to compute.
    pub new_tokens: f64,
    /// Predicted seconds of their prefill.
    pub prefill_seconds: Seconds,
    /// Expected tokens of the answer.
    pub answer_tokens: f64,
    /// Deadline of the first token after the arrival; `None`: that of the settings.
    pub ttft_seconds: Option<Seconds>,
    /// Priority level; higher goes first. Without levels in the settings, it does not count.
    pub level: i8,
    /// Whether it is refused if it would have to wait.
    pub sheddable: bool,
}

/// State of the instances for a round of admission.
#[derive(Clone, Debug, Default)]
pub struct Room {
    /// Whether any instance takes requests.
    pub served: bool,
    /// Predicted seconds until the prefill of a further request starts, by slot; infinite: the
    /// instance takes no requests.
    pub waits: Vec<Seconds>,
    /// Used part of each instance's memory, batch and time between tokens, and the part of its
    /// batch that a request uses.
    pub used: Vec<(f64, f64)>,
    /// Prefill rate of all instances in tokens/s, until a rate of service is learned.
    pub prior_rate: f64,
}

/// Part of an instance that is kept for tenants with fewer requests than their share.
const KEPT: f64 = 0.1;

/// How full an instance is, apart from the wait for its prefills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fullness {
    /// It has room.
    #[default]
    Free,
    /// Its last room is kept for tenants with fewer requests than their share.
    Kept,
    /// It has no room.
    Full,
}

impl Room {
    /// Returns the instance with the shortest wait among those up to this fullness.
    pub(super) fn best(&self, most: Fullness) -> Option<(usize, Seconds)> {
        let waits = self.waits.iter().copied().enumerate();
        let open = waits.filter(|(slot, wait)| *wait < f64::INFINITY && self.fullness(*slot) <= most);
        open.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Returns how full an instance is.
    pub(super) fn fullness(&self, slot: usize) -> Fullness {
        match self.used[slot].0 {
            used if used >= 1.0 => Fullness::Full,
            used if used >= 1.0 - KEPT => Fullness::Kept,
            _ => Fullness::Free,
        }
    }

    /// Counts a request that goes to an instance.
    pub(super) fn take(&mut self, slot: usize, prefill_seconds: Seconds) {
        if let Some(wait) = self.waits.get_mut(slot) {
            *wait += prefill_seconds;
            self.used[slot].0 += self.used[slot].1;
        }
    }

    /// Returns whether an instance takes a further request of a tenant with its share or more, at
    /// most after `seconds`.
    pub(crate) fn is_open(&self, slot: usize, seconds: Seconds) -> bool {
        self.waits[slot] <= seconds && self.fullness(slot) < Fullness::Full
    }
}

/// Numbers since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Requests that ran at once.
    pub free: u64,
    /// Requests that had to wait for room or for their tenant's limit.
    pub held: u64,
    /// Such requests admitted later.
    pub admitted: u64,
    /// Sum of their waits in seconds.
    pub held_seconds: f64,
    /// Requests refused, by [`RefusedFor::NAMES`]; programs count their own.
    pub refused: [u64; 3],
}

/// The numbers of admission by load.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadSnapshot {
    /// Numbers since the start.
    pub counters: Counters,
    /// Waiting requests.
    pub waiting: usize,
    /// Waiting requests by the hash of the tenant's name; the longest lines first.
    pub waiting_by_tenant: Vec<(u64, usize)>,
    /// Levels with waiting requests, the highest first; empty without levels.
    pub levels: Vec<LevelSnapshot>,
    /// Rate of service in tokens of work per second.
    pub work_per_second: f64,
    /// Predicted wait of a request behind all waiting ones.
    pub expected_seconds: Seconds,
}

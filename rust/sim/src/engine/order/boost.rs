//! UniBoost's orders ("Beyond Prediction", section 3): by arrival, less a boost that falls with a
//! request's known work ([`lmetric_core::priority`]). The rank is the boosted arrival; lengths need
//! not be known.
//!
//! The ladder of Figure 7, each rung with the features of the rung before it:
//! - `distboost` (3.1): prompts go by their boosted arrival, by the tokens of them that must be
//!   computed; no request is preempted for another. Gamma is fixed.
//! - `uniboost_base` (3.2): the answer's tokens count, too, and a running request goes back for a
//!   request whose boosted arrival is earlier (Eq. 7).
//! - `uniboost_memguard` (3.3): priorities change when the work doubles. A request taken off the
//!   queue is not preempted before its next bin, and then only for a request that is ahead by the
//!   hysteresis. Preemption, also for want of memory, takes the request with the last boosted
//!   arrival less the seconds that bringing it back costs: the cost counts like an earlier arrival.
//!   (The paper names the swap cost, but not how it counts.)
//! - `uniboost` (3.4): gamma follows the tail of the engine's own end-to-end times.
//!
//! Decodes get their token in every step unless the setting `decodes_wait` is 1. The one order of
//! all phases then decides which requests share the step's prompt tokens, which are taken off the
//! queue, and which go back. With `decodes_wait=1` it picks the decodes of each step as well, as
//! the paper's Algorithm 1 does (lines 13 to 26).
//!
//! The paper's work is in tokens, and does not say how many seconds a token is. With
//! `whole_steps=1`, it is the mean time of a step, in which a request gets one token of its answer.
//! Otherwise, it is a token's share of the steps.
use super::super::learned::{Learns, TokenTime};
use super::{Given, Job, LocalOrder, OrderSpec, Preemption, seconds_to_rank};
use lmetric_core::CoreError;
use lmetric_core::ids::Seconds;
use lmetric_core::priority::{Settings, Work, boost_seconds};

pub(super) const ORDERS: &[OrderSpec] = &[
    OrderSpec {
        name: "distboost",
        first: "arrival less a boost by the prompt's uncached tokens (`gamma`)",
        reads: "the cache, the time per token",
        source: "UniBoost 3.1",
        settings: &["gamma", "whole_steps"],
        build: |given| Boost::rung(0).build(given),
    },
    OrderSpec {
        name: "uniboost_base",
        first: "as `distboost`, by prompt and answer so far",
        reads: "the cache, the time per token",
        source: "UniBoost 3.2",
        settings: &["gamma", "decodes_wait", "whole_steps"],
        build: |given| Boost::rung(1).build(given),
    },
    OrderSpec {
        name: "uniboost_memguard",
        first: "as `uniboost_base`, in bins (`bin_tokens`, `hysteresis_seconds`)",
        reads: "the cache, the time per token",
        source: "UniBoost 3.3",
        settings: &["gamma", "bin_tokens", "hysteresis_seconds", "decodes_wait", "whole_steps"],
        build: |given| Boost::rung(2).build(given),
    },
    OrderSpec {
        name: "uniboost",
        first: "as `uniboost_memguard`, gamma learned from the tail",
        reads: "the cache, the time per token, end-to-end times",
        source: "UniBoost 3.4",
        settings: &[
            "gamma",
            "bin_tokens",
            "hysteresis_seconds",
            "window",
            "min_requests",
            "every",
            "smoothing",
            "min_gamma",
            "max_gamma",
            "decodes_wait",
            "whole_steps",
        ],
        build: |given| Boost::rung(3).build(given),
    },
];

/// A rung of UniBoost's ladder.
#[derive(Clone, Copy, Debug)]
pub struct Boost {
    /// Gamma, and when priorities change.
    pub settings: Settings,
    /// Whether prompt and answer are one, and running requests are preempted; else only prompts are
    /// ordered.
    pub unified: bool,
    /// Whether decodes compete for each step by the same order.
    pub decodes_wait: bool,
    /// Whether a token of work counts as a whole step.
    pub whole_steps: bool,
}

impl Boost {
    /// Makes the rung of Figure 7 with its default settings.
    fn rung(rung: u32) -> Boost {
        let all = Settings::default();
        Boost {
            settings: Settings {
                adaptive: all.adaptive.filter(|_| rung >= 3),
                memguard: all.memguard.filter(|_| rung >= 2),
                ..all
            },
            unified: rung >= 1,
            decodes_wait: false,
            whole_steps: false,
        }
    }

    fn build(mut self, given: &Given<'_>) -> Result<Box<dyn LocalOrder>, CoreError> {
        let mut reader = given.reader();
        self.decodes_wait = reader.one("decodes_wait")?.unwrap_or(false);
        self.whole_steps = reader.one("whole_steps")?.unwrap_or(false);
        self.settings = self.settings.read(&mut reader)?;
        self.settings.check()?;
        Ok(Box::new(self))
    }

    /// Returns the known work of a request once `attained` of its tokens are computed.
    fn work(&self, job: &Job<'_>, attained: u32) -> Work {
        Work {
            prompt_tokens: job.context - job.made,
            hit_tokens: job.spared,
            attained_tokens: if self.unified { attained } else { 0 },
        }
    }

    fn hysteresis(&self) -> Seconds {
        self.settings.memguard.map_or(0.0, |guard| guard.hysteresis_seconds)
    }
}

impl LocalOrder for Boost {
    fn learns(&self) -> Learns {
        Learns::Tail(self.settings, if self.whole_steps { TokenTime::Step } else { TokenTime::Share })
    }

    fn rank(&self, job: &Job<'_>) -> i64 {
        let (work, learned) = (self.work(job, job.attained), job.learned);
        seconds_to_rank(self.settings.boosted_arrival(
            job.arrival_seconds,
            &work,
            learned.gamma(),
            learned.token_seconds(),
        ))
    }

    fn reads_cache(&self) -> bool {
        true
    }

    fn preemption(&self) -> Option<&dyn Preemption> {
        self.unified.then_some(self)
    }

    fn ranks_decodes(&self) -> bool {
        self.decodes_wait
    }
}

impl Preemption for Boost {
    fn yields(&self, running: &Job<'_>, _entered: i64, waiting: i64) -> bool {
        if let Some(guard) = self.settings.memguard {
            let bin = |attained| guard.bin(self.work(running, attained).tokens());
            if bin(running.attained) == bin(running.attained_before) {
                return false;
            }
        }
        waiting < self.rank(running).saturating_sub(seconds_to_rank(self.hysteresis()))
    }

    fn weighs_loss(&self) -> bool {
        self.settings.memguard.is_some()
    }

    fn firm_steps(&self, running: &Job<'_>, waiting: i64) -> u32 {
        let tokens = self.work(running, running.attained).tokens();
        if let Some(guard) = self.settings.memguard {
            return guard.next(tokens) - tokens;
        }
        // Its boost falls until it is ahead by no more than this. The boost is its own inverse: 1 -
        // e^-gw = e^-gb is the same with w and b exchanged.
        let ahead = running.arrival_seconds - waiting as f64 * 1e-9;
        if ahead <= 0.0 {
            return u32::MAX;
        }
        let until = boost_seconds(ahead, running.learned.gamma()) / running.learned.token_seconds();
        (until as u32).saturating_sub(tokens.saturating_add(1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::job;
    use super::*;
    use crate::profile::tests::round;

    fn boost(name: &str) -> Boost {
        let names = ["distboost", "uniboost_base", "uniboost_memguard", "uniboost"];
        Boost::rung(names.iter().position(|known| *known == name).unwrap() as u32)
    }

    /// Value of 1 / (1 - e^-(0.1 x 0.1 tokens)) at gamma 0.1 and 0.1 s per token.
    fn worth(tokens: f64) -> f64 {
        -10.0 * (1.0 - (-0.01 * tokens).exp()).ln()
    }

    fn seconds(rank: i64) -> f64 {
        rank as f64 * 1e-9
    }

    #[test]
    fn boosted_arrivals_by_hand() {
        let profile = round();
        let at_20 = Job { arrival_seconds: 20.0, ..job(&profile) };
        for name in ["distboost", "uniboost_base"] {
            assert!((seconds(boost(name).rank(&at_20)) - (20.0 - worth(100.0))).abs() < 1e-6);
            // 60 of its 100 tokens are cached.
            let cached = Job { computed: 60, spared: 60, ..at_20 };
            assert!((seconds(boost(name).rank(&cached)) - (20.0 - worth(40.0))).abs() < 1e-6);
        }
        // MEMGUARD: the first bin is 256 tokens, the second begins at 512.
        for (attained, bin) in [(0, 256.0), (511, 256.0), (512, 512.0), (1100, 1024.0)] {
            let running = Job { attained, made: attained, context: 100 + attained, ..at_20 };
            let rank = seconds(boost("uniboost").rank(&running));
            assert!((rank - (20.0 - worth(bin))).abs() < 1e-6, "{attained}");
        }
        // While it decodes, the work grows, but not for distboost.
        let running = Job { attained: 600, made: 501, context: 601, ..at_20 };
        assert!((seconds(boost("distboost").rank(&running)) - (20.0 - worth(100.0))).abs() < 1e-6);
        assert!((seconds(boost("uniboost_base").rank(&running)) - (20.0 - worth(600.0))).abs() < 1e-6);
    }

    #[test]
    fn who_runs_keeps_its_place_until_the_next_bin_and_the_hysteresis() {
        let profile = round();
        let order = boost("uniboost_memguard");
        let at = |attained, attained_before| Job {
            attained,
            attained_before,
            made: attained,
            context: 100 + attained,
            ..job(&profile)
        };
        let rank = order.rank(&at(600, 0));
        assert!(order.yields(&at(600, 0), 0, rank - 100_000_001));
        assert!(!order.yields(&at(600, 0), 0, rank - 100_000_000), "ahead by the hysteresis alone");
        assert!(!order.yields(&at(511, 0), 0, i64::MIN / 2), "still in its first bin");
        assert!(!order.yields(&at(600, 550), 0, i64::MIN / 2), "came back in this bin");
        assert!(order.yields(&at(1024, 550), 0, i64::MIN / 2));
        assert_eq!((order.firm_steps(&at(511, 0), 0), order.firm_steps(&at(600, 0), 0)), (1, 424));
        assert!(order.weighs_loss() && !boost("uniboost_base").weighs_loss());
    }

    #[test]
    fn no_step_is_taken_past_the_token_at_which_one_begins_to_yield() {
        let profile = round();
        let order = boost("uniboost_base");
        let at = |attained| Job { attained, made: attained, context: 100 + attained, ..job(&profile) };
        for waiting in [-20_000_000_000, -1_000_000_000, -1_000, 0, 5] {
            let (mut tokens, mut jumps) = (100, 0);
            while !order.yields(&at(tokens), 0, waiting) && tokens < 100_000 {
                let steps = order.firm_steps(&at(tokens), waiting).min(100_000);
                assert!(!order.yields(&at(tokens + steps - 1), 0, waiting), "{waiting} {tokens} {steps}");
                tokens += steps;
                jumps += 1;
            }
            assert!(jumps < 5, "{jumps}");
            assert_eq!(order.yields(&at(tokens), 0, waiting), waiting < 0, "{waiting} {tokens}");
        }
    }
}

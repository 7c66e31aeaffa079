//! Time between tokens (TBT): what each request waited from one output token to the next, and how all such gaps are distributed.
//!
//! A step gives every decoding request one token, so its length is a gap of each. Nothing is kept by request while it decodes: how many gaps were too long is the
//! difference of two counts, and the longest stands on a stack of steps of which none is longer than one before it. Thoughts have an SLO of their own, and a count of
//! their own: a request's gaps are slow by the one as long as it thinks, by the other from then on.
use lmetric_core::ids::Seconds;

/// The token SLO of Libra's evaluation (section 6.1).
pub const DEFAULT_TOKEN_SLO_SECONDS: Seconds = 0.1;

/// Shortest gap told apart, ratio of two edges, and edges of the histogram: up to 10,000 s.
const LEAST: Seconds = 1e-4;
const RATIO: f64 = 1.01;
const BINS: usize = 1852;

/// What a request makes: tokens that are read as they come, or thoughts before them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Makes {
    /// Tokens that are read.
    Answer,
    /// Tokens that nobody reads as they come.
    Thoughts,
}

/// What is asked of the gap before a token, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenSlo {
    /// Of an answer.
    pub answer_seconds: Seconds,
    /// Of thoughts.
    pub think_seconds: Seconds,
}

impl TokenSlo {
    /// One for all tokens.
    pub const fn same(seconds: Seconds) -> TokenSlo {
        TokenSlo { answer_seconds: seconds, think_seconds: seconds }
    }

    /// That of one stage.
    pub fn of(&self, makes: Makes) -> Seconds {
        match makes {
            Makes::Answer => self.answer_seconds,
            Makes::Thoughts => self.think_seconds,
        }
    }
}

/// Gaps of one request.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Gaps {
    /// Those longer than the SLO.
    pub slow: u32,
    /// The longest, in seconds; 0 without any.
    pub worst: Seconds,
}

impl Gaps {
    /// Those of both.
    pub fn and(self, other: Gaps) -> Gaps {
        Gaps { slow: self.slow + other.slow, worst: self.worst.max(other.worst) }
    }
}

/// Counts of gaps in bins of 1% each.
#[derive(Clone, Debug, PartialEq)]
pub struct GapHistogram {
    counts: Vec<u64>,
}

impl Default for GapHistogram {
    fn default() -> GapHistogram {
        GapHistogram { counts: vec![0; BINS] }
    }
}

impl GapHistogram {
    fn bin(seconds: Seconds) -> usize {
        (((seconds / LEAST).ln() / RATIO.ln()).max(0.0) as usize).min(BINS - 1)
    }

    /// Upper edge of a bin, in seconds.
    pub fn edge(bin: usize) -> Seconds {
        LEAST * RATIO.powi(bin as i32 + 1)
    }

    /// Counts by bin; the last holds all that is longer.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Adds what another counted.
    pub fn add(&mut self, other: &GapHistogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
    }

    /// Counts `requests` gaps of each of `steps` lengths: `first`, and each further one `more` longer.
    fn count(&mut self, requests: u64, first: Seconds, more: Seconds, steps: u32) {
        let mut counted = 0;
        let mut bin = GapHistogram::bin(first);
        while counted < steps {
            let within = match bin == BINS - 1 {
                true => steps,
                false => below(GapHistogram::edge(bin), first, more, steps).max(counted),
            };
            self.counts[bin] += requests * u64::from(within - counted);
            (counted, bin) = (within, bin + 1);
        }
    }
}

/// Of lengths `first`, `first + more` and so on, `steps` in all, how many are at most `limit`.
fn below(limit: Seconds, first: Seconds, more: Seconds, steps: u32) -> u32 {
    if first > limit {
        return 0;
    }
    if more <= 0.0 {
        return steps;
    }
    (((limit - first) / more) as u32).saturating_add(1).min(steps)
}

/// The gaps of an engine's requests.
#[derive(Clone, Debug)]
pub struct TokenGaps {
    slo: TokenSlo,
    /// Decode steps so far that took longer than the SLO of answers, and than that of thoughts.
    slow_steps: [u64; 2],
    /// (tick after it, seconds) of steps, later ones shorter.
    longest: Vec<(u64, Seconds)>,
    histogram: GapHistogram,
}

impl TokenGaps {
    /// None yet.
    pub fn new(slo: TokenSlo) -> TokenGaps {
        TokenGaps { slo, slow_steps: [0; 2], longest: Vec::new(), histogram: GapHistogram::default() }
    }

    /// How they are distributed.
    pub fn histogram(&self) -> &GapHistogram {
        &self.histogram
    }

    /// The count that [`TokenGaps::since`] wants of the moment at which a request begins to make such tokens.
    pub fn mark(&self, makes: Makes) -> u64 {
        self.slow_steps[makes as usize]
    }

    /// Steps since that moment that were too slow for such tokens.
    pub fn slow_since(&self, makes: Makes, mark: u64) -> u32 {
        (self.slow_steps[makes as usize] - mark) as u32
    }

    /// `steps` steps, of `first` seconds and each further one `more` longer, gave `requests` requests a token each; `tick`: after the last.
    pub fn steps(&mut self, tick: u64, requests: usize, first: Seconds, more: Seconds, steps: u32) {
        if requests == 0 || steps == 0 {
            self.longest.clear(); // nobody decodes who could ask for them
            return;
        }
        for makes in [Makes::Answer, Makes::Thoughts] {
            let slow = steps - below(self.slo.of(makes), first, more, steps);
            self.slow_steps[makes as usize] += u64::from(slow);
        }
        let last = first + more * f64::from(steps - 1);
        while self.longest.last().is_some_and(|(_, seconds)| *seconds <= last) {
            self.longest.pop();
        }
        self.longest.push((tick, last));
        self.histogram.count(requests as u64, first, more, steps);
    }

    /// The gaps of a request that has decoded since `tick`; those that were too slow since the mark of what it makes was `mark`.
    pub fn since(&self, tick: u64, makes: Makes, mark: u64) -> Gaps {
        let place = self.longest.partition_point(|(after, _)| *after <= tick);
        let worst = self.longest.get(place).map_or(0.0, |(_, seconds)| *seconds);
        Gaps { slow: self.slow_since(makes, mark), worst }
    }

    /// The latest step, of `seconds`, ended a longer gap of a request than itself: `gap`, before such a token.
    pub fn instead(&mut self, seconds: Seconds, gap: Seconds, makes: Makes) -> Gaps {
        self.histogram.counts[GapHistogram::bin(seconds)] -= 1;
        self.single(gap, makes)
    }

    /// A gap that was no step: a request waited in between, for such a token.
    pub fn single(&mut self, seconds: Seconds, makes: Makes) -> Gaps {
        self.histogram.count(1, seconds, 0.0, 1);
        Gaps { slow: u32::from(seconds > self.slo.of(makes)), worst: seconds }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn by_hand() {
        use Makes::{Answer, Thoughts};
        let mut gaps = TokenGaps::new(TokenSlo { answer_seconds: 0.1, think_seconds: 0.25 });
        gaps.steps(3, 2, 0.09, 0.01, 3); // 0.09, 0.10, 0.11
        let (tick, mark) = (3, gaps.mark(Answer));
        assert_eq!(gaps.since(0, Answer, 0), Gaps { slow: 1, worst: 0.11 });
        assert_eq!(gaps.since(0, Thoughts, 0), Gaps { slow: 0, worst: 0.11 });
        gaps.steps(4, 3, 0.05, 0.0, 1);
        gaps.steps(5, 3, 0.3, 0.0, 1);
        gaps.steps(6, 3, 0.2, 0.0, 1);
        assert_eq!(gaps.since(tick, Answer, mark), Gaps { slow: 2, worst: 0.3 });
        assert_eq!(gaps.since(tick, Thoughts, 0), Gaps { slow: 1, worst: 0.3 });
        assert_eq!(gaps.since(5, Answer, mark + 1), Gaps { slow: 1, worst: 0.2 });
        assert_eq!(gaps.since(6, Answer, gaps.mark(Answer)), Gaps::default());
        assert_eq!(gaps.single(0.2, Answer), Gaps { slow: 1, worst: 0.2 });
        assert_eq!(gaps.single(0.2, Thoughts), Gaps { slow: 0, worst: 0.2 });
        assert_eq!(gaps.histogram().counts().iter().sum::<u64>(), 2 * 3 + 3 * 3 + 2);
    }

    proptest! {
        #[test]
        fn as_if_each_gap_were_written_down(
            slo in 0.01f64..0.5,
            runs in prop::collection::vec((1usize..5, 0.001f64..1.0, 0.0f64..0.01, 1u32..200), 1..20),
            from in 0usize..20,
        ) {
            let (mut gaps, mut tick, mut begun, mut own) = (TokenGaps::new(TokenSlo::same(slo)), 0, (0, 0), Vec::new());
            let mut all = vec![0u64; BINS];
            for (i, &(requests, first, more, steps)) in runs.iter().enumerate() {
                if i == from.min(runs.len() - 1) {
                    begun = (tick, gaps.mark(Makes::Answer));
                    own.clear();
                }
                tick += u64::from(steps);
                gaps.steps(tick, requests, first, more, steps);
                for k in 0..steps {
                    let seconds = first + more * f64::from(k);
                    own.push(seconds);
                    all[GapHistogram::bin(seconds)] += requests as u64;
                }
            }
            let told = gaps.since(begun.0, Makes::Answer, begun.1);
            prop_assert!((told.worst - own.iter().copied().fold(0.0, f64::max)).abs() < 1e-12);
            let slow = own.iter().filter(|seconds| **seconds > slo).count() as i64;
            prop_assert!((i64::from(told.slow) - slow).abs() <= runs.len() as i64, "rounding at the SLO alone");
            let counted = gaps.histogram().counts();
            prop_assert_eq!(counted.iter().sum::<u64>(), all.iter().sum::<u64>());
            // Each within a bin of where it belongs.
            let (mut a, mut b) = (0u64, 0u64);
            for (bin, (told, own)) in counted.iter().zip(&all).enumerate() {
                a += told;
                b += own;
                let near = all[bin] + all.get(bin + 1).copied().unwrap_or(0) + counted[bin];
                prop_assert!(a.abs_diff(b) <= near, "{} {} {}", bin, a, b);
            }
        }
    }
}

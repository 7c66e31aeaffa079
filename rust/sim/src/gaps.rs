//! Time between tokens (TBT): each request's waits from one output token to the next, and the
//! distribution of all these gaps.
//!
//! A step gives every decoding request one token, so its length is a gap of each of them. The
//! engine keeps nothing per request while it decodes. The number of slow gaps is the difference of
//! two counts. The longest gap is on a stack of steps in which no step is longer than an earlier
//! step.
//!
//! Reasoning tokens have an SLO and a count of their own. A request's gaps count against the
//! reasoning SLO while it reasons, and against the answer SLO from then on.
use lmetric_core::ids::Seconds;

/// The token SLO of Libra's evaluation (section 6.1).
pub const DEFAULT_TOKEN_SLO_SECONDS: Seconds = 0.1;

/// Shortest gap that the histogram distinguishes, ratio of two edges, and edges of the histogram:
/// up to 10,000 s.
const LEAST: Seconds = 1e-4;
const RATIO: f64 = 1.01;
const BINS: usize = 1852;

/// Kind of output tokens: answer tokens that are read as they come, or reasoning tokens before
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Makes {
    /// Tokens that the user reads as they come.
    Answer,
    /// Reasoning tokens, which nobody reads as they come.
    Thoughts,
}

/// SLO of the gap before a token, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenSlo {
    /// SLO of answer tokens.
    pub answer_seconds: Seconds,
    /// SLO of reasoning tokens.
    pub think_seconds: Seconds,
}

impl TokenSlo {
    /// Makes one SLO for all tokens.
    pub const fn same(seconds: Seconds) -> TokenSlo {
        TokenSlo { answer_seconds: seconds, think_seconds: seconds }
    }

    /// Returns the SLO of one kind of tokens.
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
    /// Gaps longer than the SLO.
    pub slow: u32,
    /// The longest gap, in seconds; 0 without any gap.
    pub worst: Seconds,
}

impl Gaps {
    /// Combines the gaps of both.
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

    /// Returns the upper edge of a bin, in seconds.
    pub fn edge(bin: usize) -> Seconds {
        LEAST * RATIO.powi(bin as i32 + 1)
    }

    /// Returns the counts by bin; the last bin holds all longer gaps.
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Returns the bin that counts one gap.
    pub(crate) fn place(seconds: Seconds) -> usize {
        let mut bin = GapHistogram::bin(seconds);
        while bin < BINS - 1 && seconds > GapHistogram::edge(bin) {
            bin += 1; // rounding
        }
        bin
    }

    /// Counts one more gap in a bin.
    pub(crate) fn count_in(&mut self, bin: usize) {
        self.counts[bin] += 1;
    }

    /// Subtracts another histogram's counts, which this one includes.
    pub(crate) fn subtract(&mut self, other: &GapHistogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, less)| *count -= less);
    }

    /// Adds another histogram's counts.
    pub fn add(&mut self, other: &GapHistogram) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
    }

    /// Counts `requests` gaps for each of `steps` steps: the first step lasts `first` seconds, each
    /// further one `more` longer. Returns the bin of the last step.
    fn count(&mut self, requests: u64, first: Seconds, more: Seconds, steps: u32) -> usize {
        let mut counted = 0;
        let mut bin = GapHistogram::bin(first);
        loop {
            let within = match bin == BINS - 1 {
                true => steps,
                false => below(GapHistogram::edge(bin), first, more, steps).max(counted),
            };
            self.counts[bin] += requests * u64::from(within - counted);
            if within >= steps {
                return bin;
            }
            (counted, bin) = (within, bin + 1);
        }
    }
}

/// Returns how many of the `steps` lengths `first`, `first + more`, ... are at most `limit`.
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
    /// Decode steps so far that were longer than the answer SLO, and longer than the reasoning SLO.
    slow_steps: [u64; 2],
    /// (tick after it, seconds) of steps, later ones shorter.
    longest: Vec<(u64, Seconds)>,
    histogram: GapHistogram,
    /// Bin of the latest step.
    latest: usize,
}

impl TokenGaps {
    /// Makes an empty recorder.
    pub fn new(slo: TokenSlo) -> TokenGaps {
        TokenGaps {
            slo,
            slow_steps: [0; 2],
            longest: Vec::new(),
            histogram: GapHistogram::default(),
            latest: 0,
        }
    }

    /// Returns the bin of the latest step.
    pub fn latest(&self) -> usize {
        self.latest
    }

    /// Returns the distribution of the gaps.
    pub fn histogram(&self) -> &GapHistogram {
        &self.histogram
    }

    /// Returns the count that [`TokenGaps::since`] needs, at the moment at which a request begins
    /// to make such tokens.
    pub fn mark(&self, makes: Makes) -> u64 {
        self.slow_steps[makes as usize]
    }

    /// Returns the steps since that moment that were too slow for such tokens.
    pub fn slow_since(&self, makes: Makes, mark: u64) -> u32 {
        (self.slow_steps[makes as usize] - mark) as u32
    }

    /// Records `steps` steps that gave `requests` requests a token each: the first lasts `first`
    /// seconds, each further one `more` longer. `tick`: after the last step.
    pub fn steps(&mut self, tick: u64, requests: usize, first: Seconds, more: Seconds, steps: u32) {
        if requests == 0 || steps == 0 {
            self.longest.clear(); // no decoding request needs them
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
        self.latest = self.histogram.count(requests as u64, first, more, steps);
    }

    /// Returns the gaps of a request that has decoded since `tick`. `mark`: the count of slow steps
    /// when it began to make tokens of this kind.
    pub fn since(&self, tick: u64, makes: Makes, mark: u64) -> Gaps {
        let place = self.longest.partition_point(|(after, _)| *after <= tick);
        let worst = self.longest.get(place).map_or(0.0, |(_, seconds)| *seconds);
        Gaps { slow: self.slow_since(makes, mark), worst }
    }

    /// Replaces the latest step by the longer gap `gap` of a request before a token of this kind.
    pub fn instead(&mut self, gap: Seconds, makes: Makes) -> Gaps {
        self.histogram.counts[self.latest] -= 1;
        self.single(gap, makes)
    }

    /// Records a gap that was no step: a request waited before a token of this kind.
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
        assert_eq!(gaps.latest(), GapHistogram::place(0.2));
        // The last of several steps, and the gap that replaces it.
        gaps.steps(9, 1, 0.3, 0.1, 3);
        assert_eq!(gaps.latest(), GapHistogram::place(0.5));
        let before = gaps.histogram().clone();
        gaps.instead(0.7, Answer);
        let mut expected = before;
        expected.count_in(GapHistogram::place(0.7));
        let mut less = GapHistogram::default();
        less.count_in(GapHistogram::place(0.5));
        expected.subtract(&less);
        assert_eq!(*gaps.histogram(), expected);
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
            // Each gap is within a bin of its exact place.
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

//! Expected answer length: a quantile of the class's answers plus a margin (Libra, section 5). For
//! sums over many requests, it is the mean instead.
//!
//! A class groups requests with likely similar answers: a session, a tenant, a model, a bucket of
//! prompt lengths. The caller hashes it to 64 bits. Each class keeps counts by length in buckets
//! whose edges grow by a sixteenth (exact to 16 tokens). So a quantile is at most 6.25% too long
//! and never too short. Recent answers weigh more: the counts of a class are halved at 256 answers.
//! Memory is bounded: `classes` x `BUCKETS` x 2 bytes; the least recently used class is dropped
//! first.
use hashbrown::DefaultHashBuilder;
use lru::LruCache;
use std::num::NonZeroUsize;
use thiserror::Error;

/// Buckets per class: 16 of one token each, then 16 for every doubling to 2^20 tokens.
const BUCKETS: usize = 16 * 17;
/// Number of answers after which a class halves its counts.
const HALVED_AT: u32 = 256;
/// Minimum number of ended answers of a caller's class before its lengths replace those of all
/// prompts of that size. With 8 answers, one outlier moves the median by a sixteenth of its rank.
const MIN_OF_CLASS: u32 = 8;

/// Returns the classes whose answers predict a request's answer: prompts of the same power of two
/// of tokens, and among them the caller's class, if given.
fn classes(prompt_tokens: u32, length_class: Option<u64>) -> (u64, Option<u64>) {
    let length = u64::from(u32::BITS - prompt_tokens.leading_zeros());
    // The top bit separates the two kinds of classes.
    let mixed = |class: u64| (class ^ length.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1 << 63;
    (length, length_class.map(mixed))
}

/// Returns the bucket of a length. Longer lengths count in the last bucket.
fn bucket(tokens: u32) -> usize {
    if tokens < 16 {
        return tokens as usize;
    }
    let doublings = tokens.ilog2() - 4;
    let within = (tokens >> doublings) - 16;
    ((doublings + 1) as usize * 16 + within as usize).min(BUCKETS - 1)
}

/// Returns the longest length in a bucket.
fn longest(bucket: usize) -> u32 {
    let (octave, within) = (bucket as u32 / 16, bucket as u32 % 16);
    if octave == 0 { within } else { ((16 + within + 1) << (octave - 1)) - 1 }
}

#[derive(Clone, Debug)]
struct Class {
    counts: [u16; BUCKETS],
    seen: u32,
    /// Exact sum over the counted answers.
    sum_tokens: f64,
    /// The quantile or the mean, after the last answer.
    tokens: u32,
    /// Whether an answer has ended by itself.
    by_itself: bool,
}

impl Class {
    const EMPTY: Class =
        Class { counts: [0; BUCKETS], seen: 0, sum_tokens: 0.0, tokens: 0, by_itself: false };

    /// Drops all answers that are shorter than `tokens` by a bucket or more. The sum of the rest is
    /// exact to the bucket.
    fn drop_shorter(&mut self, tokens: u32) {
        self.counts[..bucket(tokens)].fill(0);
        let counted = || self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        self.seen = counted().map(|(_, count)| u32::from(*count)).sum();
        self.sum_tokens = counted().map(|(at, count)| f64::from(longest(at)) * f64::from(*count)).sum();
    }

    /// Halves all counts. The remainder of an odd count moves to the next nonempty bucket, so
    /// scattered answers with a count of one each last as long.
    fn halve(&mut self) {
        let mut left = 0;
        for count in &mut self.counts {
            let sum = *count + left;
            (*count, left) = (sum / 2, sum % 2);
        }
        self.sum_tokens *= f64::from(self.seen / 2) / f64::from(self.seen);
        self.seen /= 2;
    }

    fn quantile(&self, quantile: f64) -> u32 {
        let rank = (quantile * f64::from(self.seen)).ceil().max(1.0) as u32;
        let mut below = 0;
        let at = self.counts.iter().position(|&count| {
            below += u32::from(count);
            below >= rank
        });
        longest(at.unwrap_or(BUCKETS - 1))
    }
}

/// A setting of [`OutputLength`] that is out of range.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{what}: {got} is not valid; expected {expected}")]
pub struct OutputLengthError {
    /// Name of the setting.
    pub what: &'static str,
    /// The given value.
    pub got: String,
    /// The valid values.
    pub expected: &'static str,
}

fn bad(what: &'static str, got: String, expected: &'static str) -> OutputLengthError {
    OutputLengthError { what, got, expected }
}

/// Statistic that is expected of a class.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expected {
    Quantile { quantile: f64, margin_tokens: u32 },
    Mean { prior_tokens: u32 },
}

/// Answer lengths by class.
#[derive(Clone, Debug)]
pub struct OutputLength {
    expected: Expected,
    classes: LruCache<u64, Class, DefaultHashBuilder>,
}

impl OutputLength {
    /// Default quantile: the median.
    pub const QUANTILE: f64 = 0.5;
    /// Margin of the paper against answers that outlive their prediction, in tokens (section 5).
    pub const MARGIN_TOKENS: u32 = 20;

    /// Expects the `quantile` (0 to 1; default 0.5, the median) of a class's answers plus
    /// `margin_tokens`, for at most `classes` classes (1 to 2^20).
    ///
    /// # Errors
    /// A value out of range.
    pub fn new(quantile: f64, margin_tokens: u32, classes: u32) -> Result<OutputLength, OutputLengthError> {
        if !(0.0..=1.0).contains(&quantile) {
            return Err(bad("output length: quantile", quantile.to_string(), "0 to 1"));
        }
        OutputLength::of(Expected::Quantile { quantile, margin_tokens }, classes)
    }

    /// Expects the mean of a class's answers, or `prior_tokens` (1 or more) if too few are known,
    /// for at most `classes` classes (1 to 2^20).
    ///
    /// # Errors
    /// A value out of range.
    pub fn mean(prior_tokens: u32, classes: u32) -> Result<OutputLength, OutputLengthError> {
        if prior_tokens == 0 {
            return Err(bad("output length: prior tokens", "0".into(), "1 or more"));
        }
        OutputLength::of(Expected::Mean { prior_tokens }, classes)
    }

    fn of(expected: Expected, classes: u32) -> Result<OutputLength, OutputLengthError> {
        let most = NonZeroUsize::new(classes as usize).filter(|most| most.get() <= 1 << 20);
        let most = most.ok_or_else(|| bad("output length: classes", classes.to_string(), "1 to 2^20"))?;
        // `LruCache::with_hasher` would allocate space for all classes at once.
        let mut classes = LruCache::unbounded_with_hasher(DefaultHashBuilder::default());
        classes.resize(most);
        Ok(OutputLength { expected, classes })
    }

    /// Returns the expected tokens of an answer to a prompt of `prompt_tokens` tokens from the
    /// caller's class `length_class`, including the margin; `None`: unknown.
    pub fn expected_tokens(&self, prompt_tokens: u32, length_class: Option<u64>) -> Option<u32> {
        let (of_length, of_class) = classes(prompt_tokens, length_class);
        let of_class = of_class.and_then(|class| self.expected(class, MIN_OF_CLASS));
        let prior = match self.expected {
            Expected::Mean { prior_tokens } => Some(prior_tokens),
            Expected::Quantile { .. } => None,
        };
        // One answer is enough for a median, but not for a mean.
        let least = if prior.is_some() { MIN_OF_CLASS } else { 1 };
        of_class.or_else(|| self.expected(of_length, least)).or(prior)
    }

    /// Learns from an answer of `tokens` tokens, which ended by itself or at its limit. `of`: the
    /// arguments of [`OutputLength::expected_tokens`].
    pub(crate) fn observe(&mut self, of: (u32, Option<u64>), tokens: u32, at_limit: bool) {
        let (of_length, of_class) = classes(of.0, of.1);
        for class in of_class.into_iter().chain([of_length]) {
            match at_limit {
                true => self.cut(class, tokens),
                false => self.ended(class, tokens),
            }
        }
    }

    /// Returns the expected tokens of an answer of this class, including the margin; `None` until
    /// `least` (1 to 128) of its answers count. Until an answer has ended by itself, all answers
    /// cut at their limits count. Then cut answers count only if they are long: the first natural
    /// answer drops the shorter ones, and later ones must be as long as expected.
    fn expected(&self, class: u64, least: u32) -> Option<u32> {
        let class = self.classes.peek(&class)?;
        (class.seen >= least).then_some(class.tokens)
    }

    /// Records that an answer of this class ended by itself with `tokens` tokens. Omit answers that
    /// were cut short (client disconnected, engine failed): their lengths say too little.
    fn ended(&mut self, class: u64, tokens: u32) {
        let known = self.classes.get_or_insert_mut(class, || Class::EMPTY);
        if !known.by_itself {
            known.by_itself = true;
            known.drop_shorter(tokens);
        }
        self.count(class, tokens);
    }

    /// Records that an answer of this class reached its limit of `tokens` tokens. It would have
    /// been longer, so it counts only if it is as long as expected. Until an answer of the class
    /// has ended by itself, each limit counts: see [`OutputLength::expected`].
    fn cut(&mut self, class: u64, tokens: u32) {
        let margin = match self.expected {
            Expected::Quantile { margin_tokens, .. } => margin_tokens,
            Expected::Mean { .. } => 0,
        };
        let known = self.classes.get(&class).filter(|known| known.by_itself);
        if known.is_none_or(|known| tokens.saturating_add(margin) >= known.tokens) {
            self.count(class, tokens);
        }
    }

    fn count(&mut self, class: u64, tokens: u32) {
        let class = self.classes.get_or_insert_mut(class, || Class::EMPTY);
        class.counts[bucket(tokens)] += 1;
        class.sum_tokens += f64::from(tokens);
        class.seen += 1;
        if class.seen == HALVED_AT {
            class.halve();
        }
        class.tokens = match self.expected {
            Expected::Quantile { quantile, margin_tokens } => {
                class.quantile(quantile).saturating_add(margin_tokens)
            }
            Expected::Mean { .. } => (class.sum_tokens / f64::from(class.seen)).round() as u32,
        };
    }

    /// Returns the number of known classes.
    pub fn len(&self) -> usize {
        self.classes.len()
    }

    /// Returns whether no answer has ended yet.
    pub fn is_empty(&self) -> bool {
        self.classes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_a_sixteenth_wide_and_leave_no_gap() {
        for tokens in 0..70_000 {
            let top = longest(bucket(tokens));
            assert!(top >= tokens && f64::from(top - tokens) <= f64::from(tokens) / 16.0, "{tokens} {top}");
            assert_eq!(bucket(top), bucket(tokens));
            assert!(bucket(top + 1) == bucket(top) + 1);
        }
        assert_eq!((bucket(u32::MAX), longest(BUCKETS - 1)), (BUCKETS - 1, (1 << 20) - 1));
    }

    #[test]
    fn quantiles_by_hand() {
        let mut lengths = OutputLength::new(0.5, OutputLength::MARGIN_TOKENS, 4).unwrap();
        assert_eq!((lengths.expected(1, 1), lengths.is_empty()), (None, true));
        lengths.ended(1, 9);
        assert_eq!((lengths.expected(1, 1), lengths.expected(1, 2)), (Some(29), None));
        for tokens in [10, 11, 12, 1000] {
            lengths.ended(1, tokens);
        }
        // 9, 10, 11, 12 and 1,000: the third value. Another class has no answers.
        assert_eq!((lengths.expected(1, 5), lengths.expected(2, 1), lengths.len()), (Some(31), None, 1));
        let mut high = OutputLength::new(0.9, 0, 4).unwrap();
        (1..=10).for_each(|tokens| high.ended(7, tokens));
        assert_eq!(high.expected(7, 1), Some(9));
        // 1,000 falls into 992..1024.
        high.ended(8, 1000);
        assert_eq!(high.expected(8, 1), Some(1023));
    }

    #[test]
    fn means_by_hand() {
        let mut lengths = OutputLength::mean(300, 4).unwrap();
        assert_eq!((lengths.expected(1, 1), lengths.expected_tokens(1, None)), (None, Some(300)));
        for tokens in [10, 20, 1000] {
            lengths.ended(1, tokens);
        }
        // 1,030 / 3, exact to the token instead of the bucket.
        assert_eq!((lengths.expected(1, 3), lengths.expected(1, 4)), (Some(343), None));
        // The mean forgets as well: a long run of 10 tokens, then of 30.
        (0..1000).for_each(|_| lengths.ended(2, 10));
        (0..1000).for_each(|_| lengths.ended(2, 30));
        assert_eq!(lengths.expected(2, 128), Some(30));
    }

    #[test]
    fn answers_cut_at_their_limits_count_only_if_they_are_long() {
        for (mut lengths, expected) in
            [(OutputLength::new(0.5, 20, 4).unwrap(), 300 + 3 + 20), (OutputLength::mean(1, 4).unwrap(), 300)]
        {
            // Answers of one token say nothing of the others.
            (0..100).for_each(|_| lengths.ended(1, 300));
            (0..1000).for_each(|_| lengths.cut(1, 1));
            assert_eq!(lengths.expected(1, 100), Some(expected));
            // Limits that the answers outlive show that they are longer.
            (0..1000).for_each(|_| lengths.cut(1, 4000));
            assert!(lengths.expected(1, 100).unwrap() > 1000);
            // Limits alone count until an answer has ended by itself.
            (0..100).for_each(|_| lengths.cut(2, 1));
            assert!(lengths.expected(2, 100).unwrap() <= 21);
            (0..8).for_each(|_| lengths.ended(2, 300));
            assert_eq!((lengths.expected(2, 8), lengths.expected(2, 9)), (Some(expected), None));
            // A short answer that ends first leaves the long ones known.
            (0..100).for_each(|_| lengths.cut(3, 4000));
            lengths.ended(3, 3);
            assert!(lengths.expected(3, 101).unwrap() > 3900, "{:?}", lengths.expected(3, 101));
            assert_eq!(lengths.expected(3, 102), None);
        }
    }

    #[test]
    fn recent_answers_take_over() {
        let mut lengths = OutputLength::new(0.5, 0, 4).unwrap();
        (0..1000).for_each(|_| lengths.ended(1, 10));
        let mut answers = 0;
        while lengths.expected(1, 128) == Some(10) {
            lengths.ended(1, 15);
            answers += 1;
        }
        assert!((64..=256).contains(&answers), "{answers}");
        // Scattered lengths, few per bucket: no count is lost, no count grows without bound, and
        // the median stays correct.
        (0..100_000u32).for_each(|i| lengths.ended(2, i * 7919 % 50_000));
        let class = lengths.classes.peek(&2).unwrap();
        assert!(class.seen < HALVED_AT);
        assert_eq!(class.counts.iter().map(|&count| u32::from(count)).sum::<u32>(), class.seen);
        assert!((20_000..30_000).contains(&class.tokens), "{}", class.tokens);
    }

    #[test]
    fn the_class_used_least_recently_leaves() {
        let mut lengths = OutputLength::new(0.5, 0, 3).unwrap();
        for class in [1, 2, 3, 1, 4, 4, 5] {
            lengths.ended(class, class as u32);
        }
        let known: Vec<u64> = (1..=5).filter(|&class| lengths.expected(class, 1).is_some()).collect();
        assert_eq!((known, lengths.len()), (vec![1, 4, 5], 3));
        // After many classes, the three last ones remain.
        (0..10_000u64).for_each(|class| lengths.ended(class * 7919, 5));
        assert_eq!((lengths.len(), lengths.expected(9999 * 7919, 1)), (3, Some(5)));
    }

    #[test]
    fn figures_out_of_range_are_named() {
        for (quantile, classes, what) in
            [(f64::NAN, 1, "quantile"), (1.5, 1, "quantile"), (0.5, 0, "classes")]
        {
            let message = OutputLength::new(quantile, 0, classes).unwrap_err().to_string();
            assert!(message.contains(what), "{message}");
        }
        assert!(OutputLength::mean(0, 1).unwrap_err().to_string().contains("prior tokens"));
    }
}

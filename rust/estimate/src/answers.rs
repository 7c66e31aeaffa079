//! Lengths of answers, learned once at the end of each: expected lengths by class, the curve of
//! lengths, and the mean. Each of the three is kept only if a reader needs it.
use crate::output_length::OutputLength;
use crate::survival::{CurveSettings, Survival};

/// Weight of the latest answer in the mean.
const MEAN_WEIGHT: f64 = 0.02;

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerEnd {
    /// By itself.
    Natural,
    /// At its limit of tokens.
    AtLimit,
    /// By a failure, or because its client left.
    Cut,
}

/// An answer that ended.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Class of the caller, whose answers are likely similar; `None`: unknown.
    pub length_class: Option<u64>,
    /// Its tokens.
    pub tokens: u32,
    /// Tokens that [`Answers::passed`] has counted so far.
    pub counted: f64,
    /// How it ended.
    pub end: AnswerEnd,
}

/// Learned lengths of answers.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    lengths: Option<OutputLength>,
    curve: Option<Survival>,
    /// The mean, if it is kept and an answer has ended.
    mean: Option<Option<f64>>,
}

impl Answers {
    /// Keeps expected lengths by class from now on; `None`: no longer. If they are kept already,
    /// they stay, with their settings.
    pub fn keep_lengths(&mut self, lengths: Option<OutputLength>) {
        if lengths.is_none() || self.lengths.is_none() {
            self.lengths = lengths;
        }
    }

    /// Keeps the curve of lengths from now on. Returns whether it was kept with these settings; a
    /// curve with other settings is dropped.
    pub fn keep_curve(&mut self, settings: CurveSettings) -> bool {
        let kept = self.curve.as_ref().is_some_and(|curve| curve.settings() == settings);
        if !kept {
            self.curve = Some(Survival::new(settings));
        }
        kept
    }

    /// Sets whether the mean is kept.
    pub fn keep_mean(&mut self, keep: bool) {
        self.mean = keep.then(|| self.mean.flatten());
    }

    /// Returns the expected lengths by class, if they are kept.
    #[inline]
    pub fn lengths(&self) -> Option<&OutputLength> {
        self.lengths.as_ref()
    }

    /// Returns the curve of lengths, if it is kept.
    #[inline]
    pub fn curve(&self) -> Option<&Survival> {
        self.curve.as_ref()
    }

    /// Returns the mean length in tokens; 0 if it is unknown or not kept.
    pub fn mean_tokens(&self) -> f64 {
        self.mean.flatten().unwrap_or(0.0)
    }

    /// Records that a running answer grew from `before` to `after` tokens (from 0: it began).
    pub fn passed(&mut self, before: f64, after: f64) {
        if let Some(curve) = &mut self.curve {
            curve.passed(before, after.max(before));
        }
    }

    /// Learns from an answer that ended. Expected lengths and the curve omit answers that were cut,
    /// because their lengths say too little. Empty answers count nowhere.
    pub fn ended(&mut self, answer: &Answer) {
        let Answer { prompt_tokens, length_class, tokens, counted, end } = *answer;
        if tokens == 0 {
            return;
        }
        if let Some(mean) = &mut self.mean {
            let mean = mean.get_or_insert(f64::from(tokens));
            *mean += (f64::from(tokens) - *mean) * MEAN_WEIGHT;
        }
        if end == AnswerEnd::Cut {
            return;
        }
        let at_limit = end == AnswerEnd::AtLimit;
        if let Some(lengths) = &mut self.lengths {
            lengths.observe((prompt_tokens, length_class), tokens, at_limit);
        }
        self.passed(counted, f64::from(tokens));
        if let Some(curve) = &mut self.curve {
            curve.observe(tokens, at_limit);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(tokens: u32, end: AnswerEnd) -> Answer {
        Answer { prompt_tokens: 100, length_class: None, tokens, counted: 0.0, end }
    }

    fn all() -> Answers {
        let mut answers = Answers::default();
        answers.keep_lengths(Some(OutputLength::new(0.5, 0, 8).unwrap()));
        answers.keep_curve(CurveSettings::default());
        answers.keep_mean(true);
        answers
    }

    #[test]
    fn an_answer_that_was_cut_counts_in_the_mean_alone() {
        let mut answers = all();
        answers.ended(&answer(10, AnswerEnd::Natural));
        answers.ended(&answer(0, AnswerEnd::Natural));
        answers.ended(&answer(60, AnswerEnd::Cut));
        assert_eq!(answers.mean_tokens(), 11.0);
        assert_eq!(answers.curve().unwrap().seen(), 1);
        assert_eq!(answers.lengths().unwrap().expected_tokens(100, None), Some(10));
    }

    #[test]
    fn what_is_kept_on_stays_learned() {
        let mut answers = all();
        answers.ended(&answer(10, AnswerEnd::Natural));
        answers.keep_lengths(Some(OutputLength::mean(500, 8).unwrap()));
        assert!(answers.keep_curve(CurveSettings::default()));
        answers.keep_mean(true);
        assert_eq!(answers.lengths().unwrap().expected_tokens(100, None), Some(10));
        assert_eq!((answers.curve().unwrap().seen(), answers.mean_tokens()), (1, 10.0));
        answers.keep_lengths(None);
        assert!(!answers.keep_curve(CurveSettings { alpha: 0.5, ..CurveSettings::default() }));
        answers.keep_mean(false);
        answers.keep_mean(true);
        assert!(answers.lengths().is_none());
        assert_eq!((answers.curve().unwrap().seen(), answers.mean_tokens()), (0, 0.0));
    }

    #[test]
    fn nothing_is_kept_without_a_reader() {
        let mut answers = Answers::default();
        answers.passed(0.0, 5.0);
        answers.ended(&answer(10, AnswerEnd::AtLimit));
        assert!(answers.lengths().is_none() && answers.curve().is_none());
        assert_eq!(answers.mean_tokens(), 0.0);
    }
}

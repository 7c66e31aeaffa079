//! Cuts an instance's traffic into observations of its step time.
//!
//! Every decoding sequence gets one token a step, so the tokens of one stream, the *lead*, count the steps. An observation reaches
//! from one of its tokens to a later one. Both must be *clean*: no prefill half done, that is none in flight, or one just ended
//! (engines prefill in order). So each prefill's work falls between two cuts, whole but for what the next prefill took of its last step.
use super::step_fit::{StepFit, Work};
use crate::ids::Seconds;

/// Steps that an observation has at least: the time of a token at the router is its step's end, give or take the way.
const LEAST_STEPS: f64 = 8.0;
/// The same where the lead ends.
const LEAST_LAST_STEPS: f64 = 2.0;
/// Steps after which an observation without a clean end is given up.
const MOST_STEPS: f64 = 1024.0;

/// What is decoding on an instance: sequences, and their context tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Sequences.
    pub sequences: f64,
    /// Context tokens of them all.
    pub context: f64,
}

/// Watches one instance. Every event costs a few operations; one in eight of the lead's tokens a small system of equations.
#[derive(Clone, Debug, Default)]
pub struct StepWatch {
    fit: StepFit,
    /// Ticket of the stream whose tokens count the steps.
    lead: Option<u32>,
    /// When the lead's last token came, and the batch then.
    at: Seconds,
    batch: Batch,
    /// When the observation under way began, and its work up to `at`; None: it waits for a clean token.
    since: Option<Seconds>,
    work: Work,
    /// Whether a prefill ended since the lead's last token.
    just_ended: bool,
    /// The observation up to the last clean token.
    whole: Option<(Work, Seconds)>,
}

impl StepWatch {
    /// What was learned.
    pub fn fit(&self) -> &StepFit {
        &self.fit
    }

    /// Prefills of `tokens` tokens with so many attention `pairs` ended with a first token, `seconds` after the first of them could
    /// begin; `alone`: with no decoding beside them.
    pub fn prefilled(&mut self, tokens: f64, pairs: f64, seconds: Seconds, alone: bool) {
        if alone {
            self.fit.observe(&[self.fit.steps(tokens), 0.0, 0.0, tokens, pairs], seconds);
        }
        self.work[3] += tokens;
        self.work[4] += pairs;
        self.just_ended = true;
    }

    /// A prefill ended without a first token: nobody knows how much of it was computed.
    pub fn disturbed(&mut self) {
        self.since = None;
        self.whole = None;
    }

    /// A stream got `n` tokens by `now`, with `batch` decoding; `prefilling`: prefills are in flight. True: something was learned.
    pub fn tokens(&mut self, ticket: u32, n: f64, now: Seconds, batch: Batch, prefilling: bool) -> bool {
        let mut learned = false;
        match self.lead {
            None => self.lead = Some(ticket),
            Some(lead) if lead == ticket => {
                if let Some(since) = self.since {
                    self.work[0] += n;
                    // The batch has changed in between: take its mean.
                    self.work[1] += n * (self.batch.sequences + batch.sequences) / 2.0;
                    self.work[2] += n * (self.batch.context + batch.context) / 2.0;
                    if self.work[0] > MOST_STEPS {
                        self.disturbed();
                    } else if self.just_ended || !prefilling {
                        self.whole = Some((self.work, now - since));
                    }
                }
            }
            Some(_) => return false,
        }
        (self.at, self.batch) = (now, batch);
        if self.just_ended || !prefilling {
            learned = self.cut(LEAST_STEPS);
            if self.since.is_none() {
                self.since = Some(now);
                self.work = Work::default();
            }
        }
        self.just_ended = false;
        learned
    }

    /// A stream ended.
    pub fn ended(&mut self, ticket: u32) {
        if self.lead == Some(ticket) {
            self.cut(LEAST_LAST_STEPS);
            self.lead = None;
            self.disturbed();
        }
    }

    /// Takes in the observation up to the last clean token, if it has that many steps.
    fn cut(&mut self, least_steps: f64) -> bool {
        let Some((work, seconds)) = self.whole.take_if(|(work, _)| work[0] >= least_steps) else { return false };
        self.fit.observe(&work, seconds);
        self.fit.saw_chunks(work[3], work[0]);
        self.since = None;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Batch = Batch { sequences: 1.0, context: 100.0 };

    /// A step takes 10 ms, and one of 1,000 prefill tokens 60 ms more.
    #[test]
    fn prefills_fall_between_two_cuts() {
        let mut watch = StepWatch::default();
        let mut now = 0.0;
        watch.tokens(7, 1.0, now, ALONE, false);
        for _ in 0..60 {
            for step in 0..10 {
                now += if step == 5 { 0.07 } else { 0.01 };
                if step == 5 {
                    watch.prefilled(1000.0, 0.0, 0.07, false);
                }
                watch.tokens(9, 1.0, now, ALONE, false);
                watch.tokens(7, 1.0, now, ALONE, (2..5).contains(&step));
            }
        }
        let learned = watch.fit().step_time().unwrap();
        assert!((learned.step(1.0, 100.0) / 0.01 - 1.0).abs() < 0.02, "{learned:?}");
        assert!((learned.prefill_seconds_per_token / 6e-5 - 1.0).abs() < 0.02, "{learned:?}");
        assert!(watch.fit().relative_error().unwrap() < 0.02);
    }

    #[test]
    fn an_aborted_prefill_and_a_change_of_lead_leave_nothing_behind() {
        let mut watch = StepWatch::default();
        let mut now = 0.0;
        for round in 0..40 {
            let lead = round % 3;
            for step in 0..20 {
                now += 0.01;
                watch.tokens(lead, 1.0, now, ALONE, step == 7);
                if step == 8 {
                    now += 5.0; // a prefill that was given up; who knows how far it was
                    watch.disturbed();
                    watch.tokens(lead, 1.0, now, ALONE, false);
                }
            }
            watch.ended(lead);
            now += 100.0; // idle
        }
        let learned = watch.fit().step_time().unwrap();
        assert!((learned.step(1.0, 100.0) / 0.01 - 1.0).abs() < 1e-6, "{learned:?}");
    }
}

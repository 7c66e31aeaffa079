//! Converts an instance's traffic into observations of its step time.
//!
//! Every decoding sequence gets one token per step, so the tokens of one stream, the *lead*, count
//! the steps. An observation spans from one lead token to a later one. Both must be *clean*: no
//! prefill is half done. A prefill is not half done if none is in flight or one has just ended
//! (engines prefill in order). So each prefill's work falls entirely between two cuts, except for
//! the part of its last step that the next prefill uses. On an idle instance, the time up to the
//! first token is a separate observation.
use crate::Seconds;
use crate::step_fit::{StepFit, Work};

/// Minimum steps of an observation: a token's arrival time at the router is its step's end plus
/// network jitter.
const MIN_STEPS: f64 = 8.0;
/// Minimum steps of an observation at the lead's end.
const MIN_LAST_STEPS: f64 = 2.0;
/// Maximum steps of an observation without a clean end; then it is dropped.
const MAX_STEPS: f64 = 1024.0;
/// First tokens within this fraction of a decode step after the lead's token belong to the same
/// step.
const SAME_STEP: f64 = 0.25;

/// Decode batch of an instance: sequences and their context tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Sequences.
    pub sequences: f64,
    /// Context tokens of all sequences.
    pub context: f64,
}

/// Computed prompt tokens and their attention pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Prefilled {
    /// Computed tokens.
    pub tokens: f64,
    /// Attention pairs.
    pub pairs: f64,
}

/// Observer of one instance. Each event costs a few operations; every eighth token of the lead
/// solves a small system of equations.
#[derive(Clone, Debug, Default)]
pub struct StepWatch {
    fit: StepFit,
    /// Ticket of the stream whose tokens count the steps.
    lead: Option<u32>,
    /// Time of the lead's last token, end of the interval that counts as the same step, batch at
    /// that time, and whether the token was clean.
    at: Seconds,
    same_step_until: Seconds,
    batch: Batch,
    clean: bool,
    /// Start of the current observation, its work up to `at`, and its minimum steps; `None`: it
    /// waits for a clean token.
    since: Option<Seconds>,
    work: Work,
    min_steps: f64,
    /// Prefills that ended since `at`, and their number.
    ended: Prefilled,
    ends: u32,
}

impl StepWatch {
    /// Returns the learned model.
    pub fn fit(&self) -> &StepFit {
        &self.fit
    }

    /// Records a first token at `now`, with `ended` prefills. `batch`: the decodes from now on.
    /// `prefilling`: whether other prefills are in flight. `idle_since`: the earliest start of the
    /// first prefill, if nothing decoded beside it.
    pub fn first_token(
        &mut self,
        ticket: u32,
        ended: Prefilled,
        idle_since: Option<Seconds>,
        now: Seconds,
        batch: Batch,
        prefilling: bool,
    ) {
        if self.lead.is_some() {
            if now < self.same_step_until {
                self.add(ended);
                self.clean = true;
            } else {
                self.ended.tokens += ended.tokens;
                self.ended.pairs += ended.pairs;
                self.ends += 1;
            }
            return;
        }
        self.lead = Some(ticket);
        (self.since, self.work) = (idle_since, Work::default());
        if idle_since.is_some() {
            self.work[0] = self.fit.steps(ended.tokens);
            self.add(ended);
            self.min_steps = 1.0;
        }
        self.ends = 1;
        self.passed(now, batch, prefilling);
    }

    /// Records that a prefill ended without a first token, so its computed part is unknown.
    pub fn disturbed(&mut self) {
        (self.since, self.clean) = (None, false);
    }

    /// Records that a stream got `n` tokens by `now`. `batch`: the decodes. `prefilling`: whether
    /// prefills are in flight. Returns whether the model learned from it.
    pub fn tokens(&mut self, ticket: u32, n: f64, now: Seconds, batch: Batch, prefilling: bool) -> bool {
        let mut learned = false;
        match self.lead {
            None => self.lead = Some(ticket),
            Some(lead) if lead == ticket => {
                learned = self.cut();
                if self.since.is_some() {
                    self.work[0] += n;
                    // The batch changed in between, so its mean is used.
                    self.work[1] += n * (self.batch.sequences + batch.sequences) / 2.0;
                    self.work[2] += n * (self.batch.context + batch.context) / 2.0;
                    self.add(self.ended);
                    if self.work[0] > MAX_STEPS {
                        self.disturbed();
                    }
                }
            }
            Some(_) => return false,
        }
        self.passed(now, batch, prefilling);
        learned
    }

    /// Records the end of a stream.
    pub fn ended(&mut self, ticket: u32) {
        if self.lead == Some(ticket) {
            self.min_steps = self.min_steps.min(MIN_LAST_STEPS);
            self.cut();
            (self.lead, self.since) = (None, None);
        }
    }

    fn add(&mut self, ended: Prefilled) {
        self.work[3] += ended.tokens;
        self.work[4] += ended.pairs;
    }

    /// Records a token of the lead.
    fn passed(&mut self, now: Seconds, batch: Batch, prefilling: bool) {
        self.clean = self.ends > 0 || !prefilling;
        (self.at, self.batch, self.ended, self.ends) = (now, batch, Prefilled::default(), 0);
        self.same_step_until = now + SAME_STEP * self.fit.decode_seconds(batch.sequences, batch.context);
    }

    /// If the lead's last token was clean and the observation is long enough, ends it there and
    /// begins the next.
    fn cut(&mut self) -> bool {
        let mut learned = false;
        if let Some(since) = self.since {
            if !self.clean || self.work[0] < self.min_steps {
                return false;
            }
            self.fit.observe(&self.work, self.at - since);
            if self.work[1] > 0.0 {
                self.fit.saw_chunks(self.work[3], self.work[0]);
            }
            learned = true;
        }
        if self.clean {
            (self.since, self.work, self.min_steps) = (Some(self.at), Work::default(), MIN_STEPS);
        }
        learned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALONE: Batch = Batch { sequences: 1.0, context: 100.0 };

    /// A step takes 10 ms; a step with 1,000 prefill tokens takes 60 ms more.
    #[test]
    fn prefills_fall_between_two_cuts() {
        let mut watch = StepWatch::default();
        let mut now = 0.0;
        let prefill = Prefilled { tokens: 1000.0, pairs: 0.0 };
        watch.tokens(7, 1.0, now, ALONE, false);
        for _ in 0..60 {
            for step in 0..10 {
                now += if step == 5 { 0.07 } else { 0.01 };
                if step == 5 {
                    watch.first_token(8, prefill, None, now, ALONE, false);
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

    /// Two prompts end in the same step, before and after the lead's own token.
    #[test]
    fn whoever_tells_first_prefills_of_one_step_stay_together() {
        let mut watch = StepWatch::default();
        let (mut now, half) = (0.0, Prefilled { tokens: 500.0, pairs: 0.0 });
        for round in 0..200 {
            for step in 0..5 {
                now += if step == 3 { 0.07 } else { 0.01 };
                if step == 3 {
                    watch.first_token(8, half, None, now, ALONE, true);
                }
                watch.tokens(7, 1.0, now, ALONE, step == 2);
                if step == 3 {
                    let late = if round % 2 == 0 { 0.0 } else { 1e-3 };
                    watch.first_token(9, half, None, now + late, ALONE, false);
                }
            }
        }
        let learned = watch.fit().step_time().unwrap();
        assert!((learned.step(1.0, 100.0) / 0.01 - 1.0).abs() < 0.02, "{learned:?}");
        assert!((learned.prefill_seconds_per_token / 6e-5 - 1.0).abs() < 0.02, "{learned:?}");
    }

    #[test]
    fn an_idle_instance_teaches_by_its_first_tokens() {
        let mut watch = StepWatch::default();
        for i in 0..40 {
            let (start, tokens) = (f64::from(i) * 10.0, 100.0 * f64::from(1 + i % 5));
            let prefill = Prefilled { tokens, pairs: 0.0 };
            watch.first_token(i as u32, prefill, Some(start), start + 0.01 + 6e-5 * tokens, ALONE, false);
            watch.ended(i as u32);
        }
        let learned = watch.fit().step_time().unwrap();
        assert!((learned.prefill_seconds_per_token / 6e-5 - 1.0).abs() < 0.02, "{learned:?}");
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
                    now += 5.0; // a prefill was dropped with unknown progress
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

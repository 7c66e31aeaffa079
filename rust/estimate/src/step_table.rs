//! Recorded step times of an engine, and the prompt tokens that a step may take within a time
//! (Libra, Algorithm 2).
//!
//! The paper's table has a row per combination of prefill tokens, context and decodes. Here a cell
//! covers a factor of the square root of 2 in each of them. It corrects a step-time model: the
//! profile of the engine if one is given, else a fit to the recorded steps. So steps that were
//! never recorded have a time, too.
use crate::Seconds;
use crate::step_fit::{StepFit, Work};
use crate::{StepTime, attention_pairs};
use hashbrown::HashMap;

/// Steps that a cell keeps. Its correction is their median, so three outliers change nothing.
const KEPT: usize = 7;
/// Steps without which the correction of a cell is not trusted: the median is that of at least as
/// many values, and those that lack are guesses. So one outlier changes nothing either.
const LEAST: usize = 3;
/// Weight of a cell without steps beside one with `n` steps, when times are made monotone.
const GUESS: f64 = 0.5;
/// Half octaves of prefill tokens over which a correction is taken from the nearest steps.
const REACH: usize = 4;
/// Half octaves of prefill tokens: up to a million.
const COLUMNS: usize = 42;
/// Impossible times are ignored: nanoseconds, and more than a minute.
const SANE: std::ops::Range<f64> = 1e-6..60.0;

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepLoad {
    /// Sequences that decode a token each.
    pub decodes: u32,
    /// Their context tokens together.
    pub context_tokens: u64,
    /// Prompt tokens that the step computes.
    pub prefill_tokens: u32,
    /// Attention pairs of these prompt tokens.
    pub prefill_pairs: f64,
}

impl StepLoad {
    fn work(&self) -> Work {
        let (decodes, context) = (f64::from(self.decodes), self.context_tokens as f64);
        [1.0, decodes, context, f64::from(self.prefill_tokens), self.prefill_pairs]
    }

    fn key(&self) -> Key {
        let [_, decodes, context, prefill, _] = self.work();
        (half_octave(decodes), half_octave(context), half_octave(prefill))
    }

    /// Returns the same step with `tokens` prompt tokens behind `before` others.
    fn with_prefill(&self, before: f64, tokens: u32) -> StepLoad {
        StepLoad {
            prefill_tokens: tokens,
            prefill_pairs: attention_pairs(before, f64::from(tokens)),
            ..*self
        }
    }
}

/// Decodes, context and prefill tokens of a cell, as numbers of half octaves.
type Key = (u8, u8, u8);

/// Returns the half octave of a number: 0 for 0, 1 for 1, 3 for 2, 5 for 4.
fn half_octave(number: f64) -> u8 {
    if number < 1.0 { 0 } else { 1 + (2.0 * number.log2()).floor() as u8 }
}

/// Returns the least number of the next half octave.
fn end_of(half_octave: u8) -> f64 {
    2.0_f64.powf(f64::from(half_octave) / 2.0)
}

/// Steps of similar work.
#[derive(Clone, Debug, Default)]
struct Cell {
    steps: Vec<(Work, Seconds)>,
    next: usize,
}

impl Cell {
    fn add(&mut self, work: Work, seconds: Seconds) {
        if self.steps.len() < KEPT {
            self.steps.push((work, seconds));
        } else {
            self.steps[self.next] = (work, seconds);
            self.next = (self.next + 1) % KEPT;
        }
    }

    /// Returns the median of recorded over expected time. `guess`: its value without steps.
    fn correction(&self, model: &StepTime, guess: f64) -> f64 {
        let mut ratios = [guess; KEPT];
        for (ratio, (work, seconds)) in ratios.iter_mut().zip(&self.steps) {
            *ratio = seconds / expected(model, work);
        }
        let ratios = &mut ratios[..self.steps.len().max(LEAST)];
        ratios.sort_unstable_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    }
}

fn expected(model: &StepTime, work: &Work) -> Seconds {
    (model.step(work[1], work[2]) + model.prefills(work[3], work[4])).max(SANE.start)
}

/// Table of recorded step times.
#[derive(Clone, Debug)]
pub struct StepTable {
    /// The engine's profile, if it is known.
    profile: Option<StepTime>,
    fit: StepFit,
    cells: HashMap<Key, Cell>,
    /// The last steps of any decodes and context, by half octave of prefill tokens.
    columns: Vec<Cell>,
    recorded: u64,
}

impl StepTable {
    /// Creates an empty table. `profile`: the step-time model that the recorded times correct; by
    /// default, they make one.
    pub fn new(profile: Option<StepTime>) -> StepTable {
        let columns = vec![Cell::default(); COLUMNS];
        StepTable { profile, fit: StepFit::default(), cells: HashMap::new(), columns, recorded: 0 }
    }

    /// Returns the number of recorded steps.
    pub fn recorded(&self) -> u64 {
        self.recorded
    }

    /// Records a step (`RECORD`). Ignores impossible times.
    pub fn record(&mut self, step: &StepLoad, seconds: Seconds) {
        if !SANE.contains(&seconds) || step.prefill_pairs.is_nan() {
            return;
        }
        let work = step.work();
        if self.profile.is_none() {
            self.fit.observe(&work, seconds);
        }
        let key = step.key();
        self.cells.entry(key).or_default().add(work, seconds);
        self.columns[usize::from(key.2).min(COLUMNS - 1)].add(work, seconds);
        self.recorded += 1;
    }

    /// Returns the seconds of a step; `None` while nothing is known.
    pub fn seconds(&self, step: &StepLoad) -> Option<Seconds> {
        let model = self.model()?;
        Some(expected(&model, &step.work()) * self.correction(&model, step.key()).0)
    }

    /// Returns the most prompt tokens, up to `most`, that the step can take within `seconds`
    /// (`MAXPREFILLALLOWED`). `decodes`: the step without its prompt tokens; `before`: tokens of
    /// the prompt that are computed already. `None` while nothing is known.
    pub fn prefill_within(
        &self,
        seconds: Seconds,
        decodes: &StepLoad,
        before: u32,
        most: u32,
    ) -> Option<u32> {
        let model = self.model()?;
        let (decoding, context, _) = decodes.key();
        let before = f64::from(before);
        // Times at the ends of the cells, made monotone: longer steps of one row never take less.
        let mut points: Vec<Point> = Vec::with_capacity(2 + usize::from(half_octave(f64::from(most))));
        for cell in 0.. {
            // A cell ends before the first number of the next one.
            let last = (end_of(cell).ceil() - 1.0).min(f64::from(most)) as u32;
            let tokens = if cell == 0 { 0 } else { last };
            if points.last().is_some_and(|last| last.tokens == tokens) && cell > 0 {
                if tokens == most {
                    break;
                }
                continue; // No whole number is in this cell.
            }
            let (correction, weight) = self.correction(&model, (decoding, context, cell));
            let seconds = expected(&model, &decodes.with_prefill(before, tokens).work()) * correction;
            points.push(Point { tokens, seconds, weight });
            if tokens == most {
                break;
            }
        }
        let times = monotone(&points);
        let end = times.iter().position(|time| *time > seconds);
        Some(match end {
            None => most,
            Some(0) => 0,
            Some(end) => {
                let (from, to) = (points[end - 1].tokens, points[end].tokens);
                let share = (seconds - times[end - 1]) / (times[end] - times[end - 1]);
                from + (share * f64::from(to - from)) as u32
            }
        })
    }

    fn model(&self) -> Option<StepTime> {
        self.profile.or_else(|| self.fit.step_time())
    }

    /// Returns the correction of a cell and its weight. Without steps, it is that of the nearest
    /// steps with about as many prefill tokens, with any decodes.
    fn correction(&self, model: &StepTime, key: Key) -> (f64, f64) {
        let guess = self.column(usize::from(key.2)).map_or(1.0, |column| column.correction(model, 1.0));
        match self.cells.get(&key) {
            Some(cell) => (cell.correction(model, guess), cell.steps.len() as f64),
            None => (guess, GUESS),
        }
    }

    /// Returns the nearest column with steps. Steps without prefill say nothing about the time of
    /// prompt tokens.
    fn column(&self, prefill: usize) -> Option<&Cell> {
        let at = |column: usize| self.columns.get(column).filter(|column| !column.steps.is_empty());
        let near = (1..=REACH).find_map(|distance| {
            let below = prefill.checked_sub(distance).filter(|column| *column > 0);
            below.and_then(at).or_else(|| at(prefill + distance))
        });
        at(prefill).or(near.filter(|_| prefill > 0))
    }
}

/// Time of a step with some prompt tokens.
struct Point {
    tokens: u32,
    seconds: Seconds,
    weight: f64,
}

/// Returns the nearest times that never fall (pool adjacent violators).
fn monotone(points: &[Point]) -> Vec<Seconds> {
    let mut pools: Vec<(f64, f64, usize)> = Vec::with_capacity(points.len()); // sum, weight, count
    for point in points {
        let mut pool = (point.seconds * point.weight, point.weight, 1);
        while let Some(last) = pools.last()
            && last.0 / last.1 > pool.0 / pool.1
        {
            pool = (last.0 + pool.0, last.1 + pool.1, last.2 + pool.2);
            pools.pop();
        }
        pools.push(pool);
    }
    pools.iter().flat_map(|(sum, weight, count)| std::iter::repeat_n(sum / weight, *count)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 10 ms, 0.1 ms per decode, 1 us per context token, 0.1 ms per prompt token.
    const ENGINE: StepTime = StepTime {
        fixed_seconds: 0.01,
        decode_seconds_per_sequence: 1e-4,
        decode_seconds_per_context_token: 1e-6,
        prefill_seconds_per_token: 1e-4,
        prefill_seconds_per_attention_pair: 0.0,
        max_batch_tokens: 4096.0,
        max_sequences: f64::INFINITY,
    };

    fn load(decodes: u32, context_tokens: u64, prefill_tokens: u32) -> StepLoad {
        StepLoad { decodes, context_tokens, ..StepLoad::default() }.with_prefill(0.0, prefill_tokens)
    }

    fn record(table: &mut StepTable, step: StepLoad, factor: f64, times: usize) {
        let seconds = factor * expected(&ENGINE, &step.work());
        (0..times).for_each(|_| table.record(&step, seconds));
    }

    #[test]
    fn a_profile_alone_is_a_table() {
        let table = StepTable::new(Some(ENGINE));
        // 10 + 1 + 10 = 21 ms for the decodes; 29 ms are left, of 0.1 ms per token.
        let within = table.prefill_within(0.05, &load(10, 10_000, 0), 0, 4096).unwrap();
        assert!((288..=290).contains(&within), "{within}");
        assert_eq!(table.prefill_within(0.02, &load(10, 10_000, 0), 0, 4096), Some(0));
        assert_eq!(table.prefill_within(10.0, &load(10, 10_000, 0), 0, 4096), Some(4096));
        assert_eq!(table.prefill_within(10.0, &load(10, 10_000, 0), 0, 0), Some(0));
        assert!((table.seconds(&load(10, 10_000, 100)).unwrap() - 0.031).abs() < 1e-9);
    }

    #[test]
    fn any_number_can_be_the_most() {
        let mut table = StepTable::new(Some(ENGINE));
        record(&mut table, load(10, 10_000, 256), 1.0, 1);
        for most in [1 << 20, u32::MAX - 1, u32::MAX] {
            let within = table.prefill_within(0.05, &load(10, 10_000, 0), 0, most).unwrap();
            assert!((288..=290).contains(&within), "{within}");
            assert_eq!(table.prefill_within(1e9, &load(10, 10_000, 0), 0, most), Some(most));
        }
    }

    #[test]
    fn recorded_times_correct_the_profile_where_they_were_recorded() {
        let mut table = StepTable::new(Some(ENGINE));
        record(&mut table, load(10, 10_000, 256), 2.0, 3);
        assert!((table.seconds(&load(10, 10_000, 256)).unwrap() - 2.0 * 0.0466).abs() < 1e-9);
        // Steps without prompt tokens are another column.
        assert!((table.seconds(&load(10, 10_000, 0)).unwrap() - 0.021).abs() < 1e-9);
        // Other decodes have no steps: the column of 256 tokens counts.
        assert!((table.seconds(&load(200, 10_000, 256)).unwrap() - 2.0 * 0.0656).abs() < 1e-9);
        let within = table.prefill_within(0.05, &load(10, 10_000, 0), 0, 4096).unwrap();
        assert!(within < 180, "{within}");
    }

    #[test]
    fn outliers_change_nothing() {
        let mut table = StepTable::new(Some(ENGINE));
        let before = table.prefill_within(0.05, &load(10, 10_000, 0), 0, 4096);
        record(&mut table, load(10, 10_000, 64), 40.0, 1);
        record(&mut table, load(10, 10_000, 0), 40.0, 1);
        assert_eq!(table.prefill_within(0.05, &load(10, 10_000, 0), 0, 4096), before);
        record(&mut table, load(10, 10_000, 64), 1.0, 4);
        record(&mut table, load(10, 10_000, 64), 40.0, 3);
        assert_eq!(table.prefill_within(0.05, &load(10, 10_000, 0), 0, 4096), before);
        for seconds in [f64::NAN, -1.0, 0.0, 1e9, f64::INFINITY] {
            table.record(&load(10, 10_000, 64), seconds);
        }
        assert_eq!(table.recorded(), 9, "impossible times are ignored");
    }

    #[test]
    fn without_a_profile_the_recorded_steps_make_a_model() {
        let mut table = StepTable::new(None);
        assert_eq!(table.prefill_within(0.05, &load(10, 10_000, 0), 0, 4096), None);
        for round in 0..200_u32 {
            let (decodes, prefill) = (1 + round % 13, 64 * (round % 7));
            record(&mut table, load(decodes, u64::from(decodes) * 900, prefill), 1.0, 1);
        }
        let within = table.prefill_within(0.05, &load(10, 9_000, 0), 0, 4096).unwrap();
        assert!((270..=330).contains(&within), "{within}"); // exactly: 300
    }

    proptest! {
        /// More time never allows fewer tokens, and a time that was recorded often allows its step.
        #[test]
        fn more_time_allows_more(
            steps in prop::collection::vec((0_u32..64, 1_u32..1000, 0_u32..2048, 0.2_f64..5.0), 0..200),
            decodes in 0_u32..64,
            context in 1_u64..1000,
            before in 0_u32..10_000,
        ) {
            let mut table = StepTable::new(Some(ENGINE));
            for (decodes, context, prefill, factor) in steps {
                record(&mut table, load(decodes, u64::from(decodes * context), prefill), factor, 1);
            }
            let decodes = load(decodes, u64::from(decodes) * context, 0);
            let mut last = 0;
            for millis in [1, 5, 10, 20, 50, 100, 1000, 10_000] {
                let within = table.prefill_within(f64::from(millis) / 1e3, &decodes, before, 2048).unwrap();
                prop_assert!(within >= last && within <= 2048);
                last = within;
            }
            prop_assert_eq!(last, 2048);
        }
    }
}

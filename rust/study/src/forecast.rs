//! Forecasts made from the true lengths, which only a simulation knows: an oracle, and predictors
//! with the errors of STAR's predictors.
//!
//! [`Given`] is the oracle, [`Bins`] are the coarse predictors of Table 3. [`LengthError`] errs by
//! a mean absolute error (MAE): from Table 1 for the rivals, from section 4.3 for STAR's own. The
//! paper gives averages and a few points; each predictor documents its assumptions between them. No
//! state: an error is a hash of seed, request and interval.
use lmetric_core::CoreError;
use lmetric_core::estimate::{Remaining, RemainingCurve};
use lmetric_core::rebalance::{Forecast, Running};
use std::f64::consts::{PI, TAU};

/// Share of a predictor's error that belongs to the request and stays; not in the paper.
const PERSISTENCE: f64 = 0.5;

/// The names that [`named`] takes.
pub const NAMES: [&str; 8] =
    ["given", "bins_2", "bins_4", "bins_6", "llm_native", "pia", "mu_serve", "tetri_infer"];

/// Returns the forecast of that name; `seed` draws the errors of random predictors.
///
/// # Errors
/// `BadValue` for another name, with all known names, including the core's `curve`.
pub fn named(name: &str, seed: u64) -> Result<Box<dyn Forecast>, CoreError> {
    let errs = |predictor| LengthError::new(predictor, PERSISTENCE, seed);
    Ok(match name {
        "given" => Box::new(Given),
        "bins_2" => Box::new(Bins::table_3(2)?),
        "bins_4" => Box::new(Bins::table_3(4)?),
        "bins_6" => Box::new(Bins::table_3(6)?),
        "llm_native" => Box::new(errs(Predictor::LlmNative)?),
        "pia" => Box::new(errs(Predictor::Pia)?),
        "mu_serve" => Box::new(errs(Predictor::MuServe)?),
        "tetri_infer" => Box::new(errs(Predictor::TetriInfer)?),
        other => {
            let names = NAMES.join(", ");
            let expected = format!("curve, {names}, a predictor's file (.npz or .onnx), or file.py:name");
            return Err(bad("forecast of lengths", format!("{other:?}"), &expected));
        }
    })
}

/// The oracle: the true length.
#[derive(Clone, Copy, Debug)]
pub struct Given;

/// A stateless forecast that predicts each request by itself, from its true length.
trait FromTruth: Forecast + Clone + 'static {
    fn one(&self, running: &Running) -> Remaining;
}

impl FromTruth for Given {
    fn one(&self, running: &Running) -> Remaining {
        Remaining::exact(running.given())
    }
}

impl FromTruth for Bins {
    fn one(&self, running: &Running) -> Remaining {
        self.predict_one(running.given())
    }
}

impl FromTruth for LengthError {
    fn one(&self, running: &Running) -> Remaining {
        self.predict_one(draw(running.ticket), running.interval, running.output_tokens, running.given())
    }
}

macro_rules! forecasts {
    ($($kind:ty),*) => {
        $(impl Forecast for $kind {
            fn predict(
                &mut self,
                running: &[Running],
                _: Option<&RemainingCurve>,
                remaining: &mut Vec<Remaining>,
            ) -> Result<(), CoreError> {
                remaining.extend(running.iter().map(|request| self.one(request)));
                Ok(())
            }

            fn fresh(&self) -> Box<dyn Forecast> {
                Box::new(self.clone())
            }
        })*
    };
}

forecasts!(Given, Bins, LengthError);

/// A predictor that knows only the bin of the remaining length (STAR section 6.5, Table 3).
#[derive(Clone, Debug, PartialEq)]
pub struct Bins {
    /// Lower edges in tokens, rising, the first 0; and the end of the last bin.
    edges: Vec<f64>,
    /// Prediction in each bin.
    values: Vec<f64>,
    /// Standard deviation in each bin.
    deviations: Vec<f64>,
}

impl Bins {
    /// Table 3's settings of 2, 4 or 6 bins up to 32K tokens (K = 1,024); a prediction is the
    /// middle of its bin.
    ///
    /// # Errors
    /// `BadValue` for another number of bins.
    pub fn table_3(bins: u32) -> Result<Bins, CoreError> {
        let edges: &[f64] = match bins {
            2 => &[0.0, 8.0, 32.0],
            4 => &[0.0, 4.0, 8.0, 16.0, 32.0],
            6 => &[0.0, 2.0, 4.0, 6.0, 8.0, 16.0, 32.0],
            _ => return Err(bad("bins of a length predictor", bins, "2, 4 or 6 (STAR Table 3)")),
        };
        Bins::new(edges.iter().map(|k| k * 1024.0).collect())
    }

    /// Makes bins between these edges, in tokens.
    ///
    /// # Errors
    /// `BadValue` unless there are two or more edges, finite and rising from 0.
    pub fn new(edges: Vec<f64>) -> Result<Bins, CoreError> {
        let rising = edges.windows(2).all(|w| w[0] < w[1]) && edges.iter().all(|e| e.is_finite());
        if edges.len() < 2 || edges[0] != 0.0 || !rising {
            return Err(bad("edges of length bins", format!("{edges:?}"), "two or more, rising from 0"));
        }
        let values = edges.windows(2).map(|w| (w[0] + w[1]) / 2.0).collect();
        let deviations = edges.windows(2).map(|w| (w[1] - w[0]) / 12f64.sqrt()).collect();
        Ok(Bins { edges, values, deviations })
    }

    fn bin(&self, remaining: f64) -> usize {
        self.edges[1..self.values.len()].partition_point(|edge| *edge <= remaining)
    }

    /// Returns the prediction for a request that truly has `remaining` tokens to come. Lengths
    /// beyond the last edge count as in the last bin.
    pub fn predict_one(&self, remaining: f64) -> Remaining {
        let bin = self.bin(remaining);
        Remaining { tokens: self.values[bin], deviation: self.deviations[bin] }
    }
}

/// The predictors of STAR's Table 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predictor {
    /// STAR's own, from the model's last hidden state: MAE 3,873.2 on average. Figure 7's 18,256
    /// tokens before the first token and 2,929 after 8,000, both for answers of 30-32K tokens, are
    /// taken as fractions of the answer's length (of 31K). An exponential runs between them, and
    /// its value at 8,000 holds after that.
    LlmNative,
    /// PiA, which asks the model in the prompt: 14,169.3 at any time.
    Pia,
    /// mu-Serve, bert: 8,165.8 on average over contexts up to 32K, with the growth of section 2.3
    /// (3.2 times from 4K to 32K, a straight line).
    MuServe,
    /// TetriInfer, opt-125m: 7,658.1, as mu-Serve.
    TetriInfer,
}

impl Predictor {
    /// Returns the mean absolute error in tokens for an answer of `total` tokens with `generated`
    /// tokens so far.
    pub fn mae(self, generated: f64, total: f64) -> f64 {
        const LONG: f64 = 31_000.0;
        // Mean over contexts of 0 to 32K: 1 up to 4K, and a line to 3.2 from there.
        const MEAN_GROWTH: f64 = (4.0 + 28.0 * 2.1) / 32.0;
        let growth = 1.0 + 2.2 * ((generated / 1024.0 - 4.0) / 28.0).clamp(0.0, 1.0);
        match self {
            Predictor::LlmNative => {
                let part = (generated / 8000.0).clamp(0.0, 1.0);
                total / LONG * 18_256.0 * (2929.0f64 / 18_256.0).powf(part)
            }
            Predictor::Pia => 14_169.3,
            Predictor::MuServe => 8165.8 / MEAN_GROWTH * growth,
            Predictor::TetriInfer => 7658.1 / MEAN_GROWTH * growth,
        }
    }
}

/// A predictor with a normal error of the predictor's MAE.
///
/// Part of the error belongs to the request and stays; the rest is drawn anew in each interval.
/// (`persistence`, 0 to 1; not in the paper: a predictor that reads much the same state errs much
/// the same way.) Predictions below 0 become 0, which makes the error at short lengths smaller than
/// the MAE.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LengthError {
    predictor: Predictor,
    persistence: f64,
    seed: u64,
}

impl LengthError {
    /// Makes a predictor.
    ///
    /// # Errors
    /// `BadValue` for a persistence outside of 0 to 1.
    pub fn new(predictor: Predictor, persistence: f64, seed: u64) -> Result<LengthError, CoreError> {
        if !(0.0..=1.0).contains(&persistence) {
            return Err(bad("persistence of a length predictor", persistence, "a number from 0 to 1"));
        }
        Ok(LengthError { predictor, persistence, seed })
    }

    /// Returns the prediction in the request's `interval`-th interval, for an answer that has
    /// `generated` tokens and truly `remaining` to come.
    pub fn predict_one(&self, request: u64, interval: u64, generated: f64, remaining: f64) -> Remaining {
        // A normal error's standard deviation is sqrt(pi / 2) times its mean absolute value.
        let deviation = self.predictor.mae(generated, generated + remaining) * (PI / 2.0).sqrt();
        let own = normal(mix(self.seed ^ mix(request)));
        let fresh = normal(mix(mix(self.seed ^ mix(request)) ^ mix(!interval)));
        let error = self.persistence.sqrt() * own + (1.0 - self.persistence).sqrt() * fresh;
        Remaining { tokens: (remaining + deviation * error).max(0.0), deviation }
    }
}

/// Returns the number of a ticket that its errors are drawn from: how often its slot was used,
/// above the slot from 0. A slotmap counts slots from 1 and each use twice; the stored results
/// predate it.
fn draw(ticket: u64) -> u64 {
    let (version, slot) = (ticket >> 32, ticket & u64::from(u32::MAX));
    (version.div_ceil(2) << 32) | slot.saturating_sub(1)
}

/// Returns a number without a pattern for each number (SplitMix64's finalizer).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Returns a standard normal number from a hash (Box and Muller).
fn normal(hash: u64) -> f64 {
    let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    (-2.0 * unit(hash).ln()).sqrt() * (TAU * unit(mix(hash))).cos()
}

fn bad(what: &str, got: impl ToString, expected: &str) -> CoreError {
    CoreError::BadValue { what: what.into(), got: got.to_string(), expected: expected.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_make_forecasts_and_others_are_refused() {
        let running = Running {
            ticket: 7,
            interval: 2,
            output_tokens: 40.0,
            prompt_tokens: 100.0,
            expected_output_tokens: Some(3000.0),
            expected_is_limit: false,
            turn: lmetric_core::estimate::Turn::default(),
        };
        for name in NAMES {
            let mut forecast = named(name, 1).unwrap().fresh();
            let mut remaining = Vec::new();
            forecast.predict(&[running, running], None, &mut remaining).unwrap();
            assert_eq!((remaining.len(), remaining[0]), (2, remaining[1]), "{name}");
        }
        let mut remaining = Vec::new();
        named("given", 0).unwrap().predict(&[running], None, &mut remaining).unwrap();
        assert_eq!(remaining, [Remaining::exact(2960.0)]);
        let error = named("bins_3", 0).unwrap_err().to_string();
        assert!(
            error.starts_with("forecast of lengths: \"bins_3\" is not valid; expected curve, given,"),
            "{error}"
        );
    }

    #[test]
    fn bins_of_table_3() {
        let two = Bins::table_3(2).unwrap();
        let tokens = |b: &Bins, r: f64| b.predict_one(r).tokens;
        assert_eq!((tokens(&two, 0.0), tokens(&two, 8191.0)), (4096.0, 4096.0));
        assert_eq!((tokens(&two, 8192.0), tokens(&two, 1e9)), (20_480.0, 20_480.0));
        let six = Bins::table_3(6).unwrap();
        assert_eq!(
            [0.0, 3000.0, 5000.0, 7000.0, 9000.0, 20_000.0].map(|r| tokens(&six, r) / 1024.0),
            [1.0, 3.0, 5.0, 7.0, 12.0, 24.0]
        );
        let error = Bins::table_3(3).unwrap_err().to_string();
        assert_eq!(error, "bins of a length predictor: 3 is not valid; expected 2, 4 or 6 (STAR Table 3)");
        for edges in [vec![], vec![0.0], vec![1.0, 2.0], vec![0.0, 2.0, 2.0], vec![0.0, f64::NAN]] {
            assert!(Bins::new(edges).is_err());
        }
    }

    #[test]
    fn the_paper_s_points() {
        let native = |g: f64| Predictor::LlmNative.mae(g, 31_000.0);
        assert!((native(0.0) - 18_256.0).abs() < 1e-6 && (native(8000.0) - 2929.0).abs() < 1e-6);
        assert!(native(4000.0) < native(2000.0) && native(20_000.0) == native(8000.0));
        let auxiliary = |p: Predictor| {
            let grow = p.mae(32.0 * 1024.0, 0.0) / p.mae(4096.0, 0.0);
            ((0..3200).map(|i| p.mae(f64::from(i) * 10.24, 0.0)).sum::<f64>() / 3200.0, grow)
        };
        for (predictor, average) in [(Predictor::MuServe, 8165.8), (Predictor::TetriInfer, 7658.1)] {
            let (mean, grow) = auxiliary(predictor);
            assert!((mean / average - 1.0).abs() < 1e-3 && (grow - 3.2).abs() < 1e-9, "{mean} {grow}");
        }
    }

    #[test]
    fn errors_have_the_size_they_say_and_repeat() {
        for persistence in [0.0, 0.7, 1.0] {
            let model = LengthError::new(Predictor::Pia, persistence, 7).unwrap();
            let errors: Vec<f64> =
                (0..20_000).map(|id| model.predict_one(id, 3, 0.0, 1e6).tokens - 1e6).collect();
            let mae = errors.iter().map(|e| e.abs()).sum::<f64>() / 20_000.0;
            let mean = errors.iter().sum::<f64>() / 20_000.0;
            assert!((mae / 14_169.3 - 1.0).abs() < 0.02 && mean.abs() < 300.0, "{mae} {mean}");
            assert_eq!(model.predict_one(5, 3, 0.0, 1e6), model.predict_one(5, 3, 0.0, 1e6));
            let same = model.predict_one(5, 3, 0.0, 1e6) == model.predict_one(5, 4, 0.0, 1e6);
            assert_eq!(same, persistence == 1.0);
            let other = LengthError::new(Predictor::Pia, persistence, 8).unwrap();
            assert_ne!(model.predict_one(5, 3, 0.0, 1e6), other.predict_one(5, 3, 0.0, 1e6));
        }
        assert!(LengthError::new(Predictor::Pia, f64::NAN, 0).is_err());
        let short = LengthError::new(Predictor::Pia, 0.5, 0).unwrap();
        assert!((0..1000).all(|id| short.predict_one(id, 0, 0.0, 1.0).tokens >= 0.0));
    }
}

//! Splits each request at a fraction of its prompt and expected output, to test engines and
//! streams.
use lmetric_core::plan::Cuts;
use lmetric_core::policy::{Knob, Knobs};
use lmetric_core::router::planners::{Planner, PlannerSpec, View};
use lmetric_core::router::{Follow, Rest};
use lmetric_core::split::Whole;
use lmetric_core::{CoreError, Maturity};

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "force",
    about: "splits each request at a fraction of its prompt and expected output, to test engines and streams",
    source: "ours",
    maturity: Maturity::Experimental,
    settings: &[Knob::float("fraction", 0.0, 1.0, f64::NAN, "the fraction, above 0 and below 1; required")],
    keeps_tokens: false,
    build,
};

#[derive(Debug)]
struct Force {
    fraction: f64,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    let fraction = settings.get("fraction");
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(CoreError::BadValue {
            what: "parameter fraction of split force".into(),
            got: fraction.to_string(),
            expected: "a number above 0 and below 1".into(),
        });
    }
    Ok(Box::new(Force { fraction }))
}

impl Planner for Force {
    fn rest(&self, view: &mut View<'_>) -> Rest {
        let Some((second, follow)) = view.second() else { return Rest::new() };
        let cuts = view.cuts_of(&[view.first(), second]);
        match self.token(&view.whole(second), cuts) {
            Ok(from_token) => Rest::from_iter([Follow { from_token, ..follow }]),
            Err(reason) => view.leave_whole(reason),
        }
    }
}

impl Force {
    /// Returns the token at which the request is split, or the reason for no split. `able`:
    /// positions that both engines support.
    fn token(&self, whole: &Whole, able: Cuts) -> Result<u32, &'static str> {
        let wished = force_at(self.fraction, whole).ok_or("too short to split")?;
        let token = able.nearest(wished, whole.prompt_tokens).ok_or("its instances cannot transfer KV")?;
        // The last token is produced, but never computed as input.
        if token + 1 < whole.tokens() { Ok(token) } else { Err("too short to split") }
    }
}

/// Returns the split at `fraction` of P + D, clipped so that both parts have a token. Returns
/// `None` for a request of fewer than two tokens or if `fraction` is NaN.
fn force_at(fraction: f64, whole: &Whole) -> Option<u32> {
    let all = whole.tokens();
    (all >= 2 && !fraction.is_nan()).then(|| ((fraction * f64::from(all)).ceil() as u32).clamp(1, all - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forced_cut_leaves_both_sides_a_token() {
        let whole =
            Whole { prompt_tokens: 7, first_hit_tokens: 0, second_hit_tokens: 0, expected_output_tokens: 3 };
        for (fraction, token) in [(0.0, 1), (0.41, 5), (0.5, 5), (0.99, 9), (1.0, 9), (-3.0, 1)] {
            assert_eq!(force_at(fraction, &whole), Some(token), "{fraction}");
        }
        assert_eq!(force_at(f64::NAN, &whole), None);
        assert_eq!(force_at(0.5, &Whole { prompt_tokens: 1, expected_output_tokens: 0, ..whole }), None);
    }
}

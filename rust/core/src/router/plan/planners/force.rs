//! Splits each request at a fraction of its prompt and expected output, to test engines and
//! streams.
use super::*;
use crate::split::{self, Whole};

pub static SPEC: PlannerSpec = PlannerSpec {
    name: "force",
    about: "splits each request at a fraction of its prompt and expected output, to test engines and streams",
    source: "ours",
    maturity: Maturity::Experimental,
    settings: &[Knob::float("at", 0.0, 1.0, f64::NAN, "the fraction, above 0 and below 1; required")],
    keeps_tokens: false,
    build,
};

#[derive(Debug)]
struct Force {
    fraction: f64,
}

fn build(settings: &Knobs) -> Result<Box<dyn Planner>, CoreError> {
    let fraction = settings.get("at");
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(CoreError::BadValue {
            what: "parameter at of split force".into(),
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
        let wished = split::force_at(self.fraction, whole).ok_or("too short to split")?;
        let token = able.nearest(wished, whole.prompt_tokens).ok_or("its instances cannot transfer KV")?;
        // The last token is produced, but never computed as input.
        if token + 1 < whole.tokens() { Ok(token) } else { Err("too short to split") }
    }
}

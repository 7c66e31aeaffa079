//! A weighted sum of cache misses and load, as in production at BAILIAN.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "linear",
    "lam * (1 - kv_hit) + (1 - lam) * bs / max(bs), lowest",
    "LMETRIC Figure 6b (BAILIAN) and Figure 11",
    &[Knob::float(
        "lam",
        0.0,
        1.0,
        0.7,
        "weight of misses; 0.7 was best for the paper's ChatBot trace, 0.55 for API",
    )],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "lam * (1 - kv_hit) + (1 - lam) * norm(bs)", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn adds_misses_and_normalised_load() {
        let fleet = Fleet::new(3).set(Bs, &[0.0, 5.0, 10.0]).prompt(100.0, &[0.0, 50.0, 100.0]);
        let near = |lam: f64, expected: [f64; 3]| {
            let score = fleet.score(&*policy("linear", &[("lam", lam)]));
            assert!(score.iter().zip(expected).all(|(s, e)| (s - e).abs() < 1e-12), "{score:?}");
        };
        near(0.7, [0.7, 0.35 + 0.15, 0.3]);
        near(0.4, [0.4, 0.2 + 0.3, 0.6]);
    }

    #[test]
    fn an_idle_fleet_is_no_division_by_zero() {
        let fleet = Fleet::new(2).prompt(100.0, &[0.0, 100.0]);
        assert_eq!(fleet.score(&*policy("linear", &[])), [0.7, 0.0]);
    }
}

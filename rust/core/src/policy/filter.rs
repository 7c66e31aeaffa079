//! Load or prefix hits: a threshold on the spread of batch sizes selects the criterion.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "filter",
    "if max(bs) - min(bs) > range: lowest bs; else highest kv_hit, then lowest bs",
    "LMETRIC Figure 13 (after AIBrix)",
    &[Knob::float(
        "range",
        0.0,
        1e9,
        8.0,
        "spread of batch sizes (requests) above which hits are ignored; the paper sweeps 2 to 16",
    )],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "where(max(bs) - min(bs) > range, bs, -kv_hit)", &["bs"])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn follows_hits_within_the_range_and_load_beyond_it() {
        let fleet = |busiest| Fleet::new(3).set(Bs, &[busiest, 1.0, 3.0]).prompt(10.0, &[9.0, 0.0, 5.0]);
        assert_eq!(fleet(9.0).order(&*policy("filter", &[])), [0, 2, 1], "a spread of 8 is not above 8");
        assert_eq!(fleet(10.0).order(&*policy("filter", &[])), [1, 2, 0]);
        assert_eq!(fleet(10.0).order(&*policy("filter", &[("range", 16.0)])), [0, 2, 1]);
    }

    #[test]
    fn equal_hits_go_to_the_least_busy() {
        let fleet = Fleet::new(3).set(Bs, &[2.0, 1.0, 0.0]).prompt(10.0, &[5.0, 5.0, 0.0]);
        assert_eq!(fleet.order(&*policy("filter", &[])), [1, 0, 2]);
    }
}

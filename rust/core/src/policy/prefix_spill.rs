//! The best prefix match; requests spill to the lowest load if the match is far above the mean
//! load.
use super::*;

pub static SPEC: PolicySpec = PolicySpec::new(
    "prefix_spill",
    "highest kv_hit, then lowest bs; lowest bs if the match has bs > factor * mean(bs) and bs > mean(bs) + margin",
    "smg 1.13, prefix routing with spill",
    &[
        Knob::float("factor", 1.0, 1e6, 1.5, "load relative to the mean above which a match can be skipped"),
        Knob::float(
            "margin",
            0.0,
            1e9,
            64.0,
            "load above the mean (requests) that a match must also exceed to be skipped",
        ),
    ],
);

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(
        &SPEC,
        knobs,
        "where((kv_hit >= max(kv_hit)) & (bs <= maximum(factor * mean(bs), mean(bs) + margin)), -1, bs)",
        &["bs"],
    )
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn spills_when_the_match_is_over_both_marks() {
        // The mean of [b, 20, 40, 60] is 30 + b / 4: 64 above it at b = 125.33, half above it at b
        // = 72.
        let fleet = |b| Fleet::new(4).set(Bs, &[b, 20.0, 40.0, 60.0]).prompt(100.0, &[50.0, 10.0, 0.0, 0.0]);
        assert_eq!(fleet(125.0).order(&*policy("prefix_spill", &[])), [0, 1, 2, 3]);
        assert_eq!(fleet(126.0).order(&*policy("prefix_spill", &[])), [1, 2, 3, 0]);
        assert_eq!(fleet(72.0).best(&*policy("prefix_spill", &[("margin", 0.0)])), Some(0));
        assert_eq!(fleet(73.0).best(&*policy("prefix_spill", &[("margin", 0.0)])), Some(1));
    }

    #[test]
    fn without_a_match_takes_the_least_loaded() {
        let fleet = Fleet::new(3).set(Bs, &[3.0, 1.0, 2.0]).prompt(100.0, &[0.0; 3]);
        assert_eq!(fleet.order(&*policy("prefix_spill", &[])), [1, 2, 0]);
    }
}

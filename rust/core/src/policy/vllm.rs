//! vLLM's own balancer: a waiting request weighs as much as four running requests.
use super::*;

pub static SPEC: PolicySpec =
    PolicySpec::new("vllm", "4 * q_bs + r_bs, lowest", "LMETRIC Figure 6a (vLLM's load balancer)", &[])
        .stable();

pub fn build(knobs: &Knobs) -> Result<Box<dyn Policy>, CoreError> {
    lowest(&SPEC, knobs, "4 * q_bs + r_bs", &[])
}

#[cfg(test)]
mod tests {
    use crate::indicators::Indicator::*;
    use crate::policy::fleet::{Fleet, policy};

    #[test]
    fn weighs_waiting_four_times() {
        let fleet = Fleet::new(3).set(QBs, &[1.0, 0.0, 2.0]).set(RBs, &[0.0, 5.0, 1.0]);
        assert_eq!(fleet.score(&*policy("vllm", &[])), [4.0, 5.0, 9.0]);
    }
}

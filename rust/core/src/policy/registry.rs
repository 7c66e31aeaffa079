//! Names to policies: one line each. (Simple form, to be replaced.)
use super::expression::{ExpressionPolicy, ExpressionSource};
use super::{Policy, PolicySpec};
use crate::error::CoreError;

#[allow(missing_docs)]
pub fn specs() -> Vec<&'static PolicySpec> {
    Vec::new()
}

#[allow(missing_docs)]
pub fn build(name: &str, knobs: &[(String, f64)]) -> Result<Box<dyn Policy>, CoreError> {
    let text = match name {
        "lmetric" => "p_token * (bs + 1)",
        "vllm" => "4 * q_bs + r_bs",
        "round_robin" | "random" | "least_requests" => "bs",
        _ => return Err(CoreError::UnknownName { kind: "policy".into(), name: name.into(), nearest: None }),
    };
    let source = ExpressionSource { score: text.into(), ..ExpressionSource::default() };
    Ok(Box::new(ExpressionPolicy::custom(Some(name), source, knobs)?))
}

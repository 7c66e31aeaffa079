//! Splits at a fixed fraction, for tests of segments. The planner is a study's.
#[path = "../../../study/src/planner/force.rs"]
mod planner;

use lmetric_core::CoreError;
use lmetric_core::router::Split;

/// Splits each request at this fraction of its tokens.
pub fn force(fraction: f64) -> Result<Split, CoreError> {
    Split::by(&planner::SPEC, &[("fraction".into(), fraction)])
}

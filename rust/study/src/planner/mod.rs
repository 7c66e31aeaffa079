//! Planners for studies.
mod libra_three;
mod three;

use lmetric_core::router::planners::PlannerSpec;

pub use three::{Placed, Three, search_return, search_three};

/// The planners, in the order of the docs page.
pub(crate) static PLANNERS: &[&PlannerSpec] = &[&libra_three::SPEC];

//! Planners for studies.
mod force;
mod given;
mod libra_three;
mod three;

use lmetric_core::router::planners::PlannerSpec;

pub use given::given;
pub use three::{Placed, Three, search_return, search_three};

/// The planners, in the order of the docs page.
pub(crate) static PLANNERS: &[&PlannerSpec] = &[&force::SPEC, &libra_three::SPEC];

/// Planners that learn output lengths, so that [`given`] changes them.
pub const LEARNERS: [&str; 3] = ["libra", "apart", "libra_three"];

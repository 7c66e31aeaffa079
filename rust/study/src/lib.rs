//! Parts of the router for studies only: oracles, ablations, negative controls, and rules of papers
//! without a gain.
//!
//! Simulations and studies offer them. The server does not: `lmetric-core` does not depend on this
//! crate.
#![forbid(unsafe_code)]

pub mod forecast;
pub mod planner;
pub mod policy;
pub mod program;
pub mod rebalance;

use lmetric_core::Registry;
use lmetric_core::registry::{CORE, Rows};

/// The rows of this crate.
static STUDY: Rows = Rows { policies: policy::POLICIES, planners: planner::PLANNERS };

/// All policies and planners, including those for studies.
pub const REGISTRY: Registry = Registry::of(ROWS);

const ROWS: &[&Rows] = &[&CORE, &STUDY];

#[cfg(test)]
#[path = "../../core/tests/common/fleet.rs"]
mod fleet;

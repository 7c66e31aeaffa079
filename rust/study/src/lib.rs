//! Parts of the router for studies alone: oracles, ablations, and rules of papers that gain nothing.
//!
//! Simulations and studies offer them. The server does not: `lmetric-core` does not depend on this
//! crate.

pub mod forecast;

//! The indicator factory: a named number for each instance (or each instance and request), with unit, owner and age.
//!
//! [`table`] declares them once; the docs page, the names in expressions and the Python symbols are made from it.
//! [`columns`] holds their values, one dense `f64` column each, indexed by [`crate::InstanceId`].

pub mod columns;
pub mod snapshot;
pub mod table;

pub use columns::{Columns, Indicators};
pub use snapshot::Snapshot;
pub use table::{INDICATORS, Indicator, IndicatorDecl, IndicatorSet, Owner, Scope};

//! The indicator factory: a named number for each instance (or each instance and request), with unit, owner and age.
//!
//! [`table`] declares the built-in ones once; the docs page, the names in expressions and the Python symbols are made from it.
//! [`declared`] are those that a program or a configuration adds.
//! [`columns`] holds their values, one dense `f64` column each, indexed by [`crate::InstanceId`].

pub mod columns;
pub mod declared;
pub mod snapshot;
pub mod table;

pub use columns::{Columns, Indicators};
pub use declared::{DeclaredId, DeclaredIndicator};
pub use snapshot::Snapshot;
pub use table::{INDICATORS, Indicator, IndicatorDecl, IndicatorSet, Owner, Scope};

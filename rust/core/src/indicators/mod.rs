//! Indicators: named numbers per instance, or per instance and request, with unit, owner and age.
//!
//! [`table`] declares the built-in indicators. The docs page, the names in expressions and the
//! Python symbols are generated from it. [`declared`] holds indicators that a program or a
//! configuration adds. [`columns`] holds the values: one dense `f64` column per indicator, indexed
//! by [`crate::Slot`]. [`kernels`] computes those that depend on the request or the time.
//! [`expressions`] lets expressions read them.

pub mod columns;
pub mod declared;
pub mod expressions;
pub mod kernels;
pub mod snapshot;
pub mod table;

pub use columns::{Columns, Indicators};
pub use declared::{DeclaredId, DeclaredIndicator};
pub use expressions::Named;
pub use kernels::Kernels;
pub use snapshot::Snapshot;
pub use table::{INDICATORS, Indicator, IndicatorDecl, IndicatorSet, Owner, Scope};

//! Routing decisions for fleets of LLM engines: the instance that runs each request.
//!
//! The crate has no I/O, no clock, no Python and no global state except the names of declared
//! indicators. Time and randomness are arguments. Equal inputs therefore give equal decisions in
//! the server, in the simulator and in tests.
//!
//! To embed it: build a [`policy::Policy`] with [`Registry::policy`], make a [`router::Router`],
//! add the engines, and call `route` for each request. `route` counts the request on its instance
//! and returns a ticket; [`Router::advance`](router::Router::advance) takes the events of the
//! request. `examples/route.rs` is a complete program.
//!
//! ```
//! use lmetric_core::{CoreError, Registry, fleet::Role, request::Request};
//! use lmetric_core::plan::{Event, Usage};
//! use lmetric_core::router::{Router, RouterConfig};
//!
//! let mut router = Router::new(Registry::CORE.policy("lmetric", &[])?, RouterConfig::default())?;
//! router.add_instance("gpu-0", Role::Both, None)?;
//! let seconds = 0.0; // of your clock
//! let decision = router.route(&Request { prompt_tokens: 300, ..Request::default() }, seconds)?;
//! assert_eq!(&**router.fleet().name(decision.segment.instance), "gpu-0");
//! router.advance(decision.ticket, Event::FirstToken, seconds)?;
//! router.advance(decision.ticket, Event::Finished(Usage::default()), seconds)?;
//! assert_eq!(router.in_flight(), 0);
//! # Ok::<(), CoreError>(())
//! ```
//!
//! Dependencies go one way: `feed -> router -> policy -> indicators -> ids`, and all modules may
//! use the crates [`estimate`], [`expr`] and [`kv`]. `router` uses all modules but `feed`, which
//! applies the engines' events to its caches.

// Unit tests and integration tests share fixtures that import this crate by its name.
#[cfg(test)]
extern crate self as lmetric_core;

pub mod admission;
pub mod board;
pub mod budget;
mod codec;
pub mod error;
pub mod feed;
pub mod fleet;
pub mod guard;
pub mod ids;
pub mod indicators;
pub mod levels;
pub mod maturity;
pub mod plan;
pub mod policy;
pub mod priority;
pub mod program;
pub mod rebalance;
pub mod record;
pub mod registry;
pub mod request;
pub mod router;
pub mod settings;
pub mod split;
pub mod warm;
mod wide;

pub use error::CoreError;
pub use ids::Slot;
pub use lmetric_estimate as estimate;
pub use lmetric_expr as expr;
pub use lmetric_kv as kv;
pub use maturity::Maturity;
pub use registry::Registry;

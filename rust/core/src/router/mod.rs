//! The router: the only one that commits. It decides from a snapshot, counts the placement at once,
//! follows each ticket to its end and keeps the receipts. One router serves one pool: the instances
//! of one model.
//!
//! Imports go down this table, and files of one row do not import each other
//! (`tests/test_layers.py` reads it):
//!
//! | files | what they hold |
//! | --- | --- |
//! | `feed` | engines' KV events, applied to a shared router |
//! | `shared` | the router behind a lock, and tickets that close themselves |
//! | `decide`, `follow` | decisions; what callers tell of placed requests |
//! | `idle`, `rounds` | checks of a policy on an idle fleet; rescheduling |
//! | `configure`, `reports` | settings that can change; what engines and peers report |
//! | `router` | [`Router`] itself |
//! | `lifecycle` | the life of a request, from its commit on |
//! | `plan` | where a request runs, where it is split, what is fetched |
//! | `state` | everything that a decision depends on |
//! | `context` | everything that planning writes |
//! | `requests` | the requests in flight, and what is recorded and learned of all |
//! | `decision`, `priorities`, `replicas` | decisions and totals; what goes first; peers' loads |
//! | `parts` | what plans are made of |
//! | `tickets` | the requests in flight |
//! | `fetch_cost`, `ledger` | what prefix fetches cost; what is in flight on each instance |
//! | `settings` | what a router is set up with |

mod configure;
mod context;
mod decide;
mod decision;
pub mod feed;
mod fetch_cost;
mod follow;
mod idle;
pub mod ledger;
pub mod lifecycle;
mod parts;
mod plan;
pub mod priorities;
mod replicas;
mod reports;
mod requests;
mod rounds;
#[allow(clippy::module_inception)] // its one type is the module's
mod router;
mod settings;
pub mod shared;
mod state;
pub mod tickets;

pub use decision::{Decision, Totals};
pub use ledger::{Ahead, Share};
pub use lifecycle::Carry;
pub use parts::{Follow, Rest};
pub use plan::{TtftSource, planners};
pub use planners::Split;
pub use priorities::Priorities;
pub use replicas::MOST_REPLICAS;
pub use rounds::NamedMove;
pub use router::Router;
pub use settings::{IndexFeed, PullConfig, RescheduleConfig, Rescheduling, RouterConfig, Rule};
pub use shared::{SharedRouter, Ticket};
pub use tickets::TicketId;

//! The router. It decides from a snapshot, counts the placement at once, follows each ticket to its
//! end and keeps the decision records. Only the router commits placements. One router serves one
//! pool: the instances of one model.
//!
//! Imports go down this table; files of one row do not import each other (`tests/test_layers.py`
//! checks it):
//!
//! | files | what they hold |
//! | --- | --- |
//! | `shared` | the router behind a lock; tickets that close themselves |
//! | `decide`, `stages` | decisions; stages of decisions |
//! | `calls` | calls that no decision makes: of features, of placed requests, for metrics |
//! | `configure`, `reports` | settings; reports of engines |
//! | `router` | [`Router`] itself |
//! | `lifecycle` | the life of a request, from its commit on |
//! | `listeners` | features beside the core: guard, priorities, admission, rebalancing and others |
//! | `plan` | placement, splits and prefix fetches |
//! | `state` | state that decisions depend on |
//! | `context` | buffers that planning writes |
//! | `requests` | requests in flight, and records |
//! | `decision` | decisions and totals |
//! | `parts` | parts of plans |
//! | `tickets` | tickets of requests in flight |
//! | `fetch_cost`, `ledger` | cost of prefix fetches; in-flight ledger of each instance |
//! | `caches` | the engines' caches: indexes of blocks, behind a lock of their own |
//! | `settings`, `patience` | settings of a router; how work behind decisions lets them go first |

mod caches;
mod calls;
mod configure;
mod context;
mod decide;
mod decision;
mod fetch_cost;
pub mod ledger;
pub mod lifecycle;
mod listeners;
mod parts;
mod patience;
mod plan;
mod reports;
mod requests;
#[allow(clippy::module_inception)] // the module is named after its only type
mod router;
mod settings;
pub mod shared;
mod stages;
mod state;
pub mod tickets;

pub use caches::{Caches, PrefixMatch, Reading, SharedCaches, Writing};
pub use decision::{Decision, Totals};
pub use ledger::{Ahead, Share};
pub use lifecycle::Carry;
pub use listeners::message::{FORMAT as LOAD_FORMAT, Load, LoadMessage, MessageError};
pub use listeners::priorities::Priorities;
pub use listeners::published::Published;
pub use listeners::rebalancing::NamedMove;
pub use listeners::replicas::{MAX_REPLICAS, Message};
pub use parts::{Follow, Rest};
pub use plan::{TtftSource, planners};
pub use planners::Split;
pub use router::Router;
pub use settings::{FetchConfig, IndexFeed, RouterConfig, TierConfig};
pub use shared::{SharedRouter, Ticket};
pub use state::check_cache_blocks;
pub use tickets::TicketId;

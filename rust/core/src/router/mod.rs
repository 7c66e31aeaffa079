//! The router: the only one that commits. It decides from a snapshot, counts the placement at once, follows each ticket to its
//! end and keeps the receipts. One router serves one pool: the instances of one model.
//!
//! Imports go down this list (a test holds them to it):
//!
//! | file | what it holds |
//! | --- | --- |
//! | `feed`, `shared` | engines' KV events applied to a shared router; the router behind a lock, and tickets that close themselves |
//! | `idle`, `decide`, `rounds` | checks of a policy on an idle fleet; decisions; rounds of rescheduling |
//! | `lifecycle` | what becomes of a placed request |
//! | `reports`, `configure` | what engines and peers report; settings that can change |
//! | `router` | [`Router`] itself |
//! | `plan` | where a request runs, where it is cut, what is fetched; reads `State`, writes `DecisionContext` |
//! | `state` | everything that a decision depends on |
//! | `context` | everything that planning writes |
//! | `replicas`, `priorities` | peers' loads; what goes first |
//! | `tickets`, `decision` | the requests in flight; decisions and totals |
//! | `ledger` | what is in flight on each instance; the only writer of the indicators that outlive a decision |
//! | `fetch_cost`, `settings` | what prefix fetches cost, as learned; what a router is set up with |

mod configure;
mod context;
mod decide;
mod decision;
pub mod feed;
mod fetch_cost;
mod idle;
pub mod ledger;
pub mod lifecycle;
mod plan;
pub mod priorities;
mod replicas;
mod reports;
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
pub use plan::TtftSource;
pub use priorities::Priorities;
pub use replicas::MOST_REPLICAS;
pub use rounds::NamedMove;
pub use router::Router;
pub use settings::{
    Apart, Forecast, IndexFeed, Lengths, Libra, Mean, PullConfig, RescheduleConfig, Rescheduling,
    RouterConfig, Rule, Split,
};
pub use shared::{SharedRouter, Ticket};
pub use tickets::TicketId;

//! Calls of [`Router`](super::Router) that no decision makes (`tests/test_layers.py` checks it).
//! They pass on to a listener or to the lifecycle of a request, or return what metrics and pages
//! show. They change no decision, apart from what the listener or the lifecycle does.
mod arrivals;
mod features;
mod idle;
mod peers;
mod requests;
mod shown;
mod warm;
mod workers;

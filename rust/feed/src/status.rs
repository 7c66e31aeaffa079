//! Status of a source, as shown to users.
use crate::apply::Tally;
use crate::stream::{Counts, Standing};

/// Status of a source.
#[derive(Clone, Debug)]
pub struct Status {
    /// Whether the source sends load reports instead of block events.
    pub load: bool,
    /// Data-parallel rank of the source.
    pub rank: u32,
    /// Address of the subscription.
    pub endpoint: String,
    /// Whether engines connect to the endpoint, instead of the router to the engine.
    pub bound: bool,
    /// Address for replays of past batches.
    pub replay_endpoint: Option<String>,
    /// Required topic of the messages; empty accepts any topic.
    pub topic: String,
    /// How much of the engine's cache is known.
    pub standing: Standing,
    /// Whether a connection is up.
    pub connected: bool,
    /// Connections established.
    pub connections: u64,
    /// Messages received with the source's topic.
    pub messages: u64,
    /// Time of the last message, in seconds on the router's clock.
    pub last_message_at: Option<f64>,
    /// Smallest delay in seconds from a batch's creation (engine's clock) to its arrival (this
    /// machine's clock). Replayed batches do not count. Negative if the engine's clock is ahead.
    pub min_delay_seconds: Option<f64>,
    /// The limit that the source has exceeded: its events are ignored for a while.
    pub over_limit: Option<String>,
    /// Number of the last applied batch.
    pub last_sequence: Option<u64>,
    /// Last topic received that is not the source's topic.
    pub other_topic: Option<String>,
    /// Counts of the stream.
    pub counts: Counts,
    /// Counts of the events.
    pub tally: Tally,
}

//! What is shown of a source.
use crate::apply::Tally;
use crate::stream::{Counts, Standing};

/// What a source has come to.
#[derive(Clone, Debug)]
pub struct Status {
    /// Whether it is of load reports, not of blocks.
    pub load: bool,
    /// The data-parallel rank that it is of.
    pub rank: u32,
    /// Where it listens.
    pub endpoint: String,
    /// Whether engines connect there, rather than the router to them.
    pub bound: bool,
    /// Where the past can be asked for.
    pub replay_endpoint: Option<String>,
    /// The topic its messages must have; empty: any.
    pub topic: String,
    /// How much is known.
    pub standing: Standing,
    /// Whether a connection stands.
    pub connected: bool,
    /// Connections that came to stand.
    pub connections: u64,
    /// Messages of its topic.
    pub messages: u64,
    /// When the last one came, on the router's clock.
    pub last_message_at: Option<f64>,
    /// The least time from a batch's making, by the engine's clock, to its coming, by this machine's; of batches that came as they were
    /// published. Less than nothing: the engine's clock is ahead.
    pub least_delay_seconds: Option<f64>,
    /// Number of the last batch applied.
    pub last_sequence: Option<u64>,
    /// The last other topic heard.
    pub other_topic: Option<String>,
    /// Of its stream.
    pub counts: Counts,
    /// Of its events.
    pub tally: Tally,
}

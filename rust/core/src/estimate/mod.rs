//! What the router learns or is told about speed.
pub mod prefill_rate;
pub mod step_time;

pub use prefill_rate::{PrefillRate, attention_pairs};
pub use step_time::StepTime;

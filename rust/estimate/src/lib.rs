//! Learned and configured estimates: times of engine steps and prefills, load of decoding requests,
//! answer lengths, costs of prefix fetches, and turns of conversations.
//!
//! The caller reports what happened, with its time, and reads the estimates. The crate knows no
//! instances, no routers and no policies.
#![warn(unreachable_pub)]
mod answers;
mod decayed;
mod decode_load;
mod decode_weights;
mod fetch_cost;
mod output_length;
mod prefill_rate;
mod pressure;
mod remaining;
mod step_fit;
mod step_table;
mod step_time;
mod step_watch;
pub mod survival;
mod tier_load;
mod turns;

pub use answers::{Answer, AnswerEnd, Answers};
pub use decayed::Decayed;
pub use decode_load::{DecodeLoad, Histogram, Pending, Projection};
pub use decode_weights::{DecodeCost, DecodeWeights, Outlook, Progress, WeightsOf, weigh_equally};
pub use fetch_cost::FetchCost;
pub use output_length::{OutputLength, OutputLengthError};
pub use prefill_rate::{PrefillRate, attention_pairs};
pub use pressure::{LagWeights, learned_weights};
pub use remaining::{Remaining, RemainingCurve};
pub use step_fit::StepFit;
pub use step_table::{StepLoad, StepTable};
pub use step_time::{Queued, StepTime};
pub use step_watch::{Batch, Prefilled, StepWatch};
pub use survival::Survival;
pub use tier_load::TierLoad;
pub use turns::{Prompt, Turn, Turns};

/// Monotonic time in seconds; the caller chooses the origin.
pub type Seconds = f64;

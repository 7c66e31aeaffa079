//! Learned and configured estimates of speed, load and answer length.
pub(crate) mod decayed;
pub mod decode_load;
pub mod decode_weights;
pub mod fetch_cost;
pub mod output_length;
pub mod prefill_rate;
pub mod pressure;
pub mod remaining;
pub mod step_fit;
pub mod step_time;
pub mod step_watch;
pub mod survival;
pub mod tier_load;
pub mod turns;

pub use decode_load::{DecodeLoad, Histogram};
pub use decode_weights::{DecodeCost, DecodeWeights, EqualWeights, Outlook, WeightsOf};
pub use fetch_cost::FetchCost;
pub use output_length::OutputLength;
pub use prefill_rate::{PrefillRate, attention_pairs};
pub use remaining::{Remaining, RemainingCurve};
pub use step_fit::StepFit;
pub use step_time::StepTime;
pub use step_watch::StepWatch;
pub use survival::Survival;
pub use tier_load::TierLoad;
pub use turns::{Turn, Turns};

//! The load that a router publishes of one instance, for its peers.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::router::ledger::Share;

/// Relative difference below which two numbers are equal: messages have 24 bits of each number.
const ROUNDING: f64 = 1.0 / (1 << 22) as f64;

/// Load that a router publishes of one instance.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Published {
    /// The numbers.
    pub share: Share,
}

impl Published {
    /// Returns whether there is no load.
    pub fn is_nothing(&self) -> bool {
        self.share.is_nothing()
    }

    /// Checks all numbers. `whose`: for the error, for example `on x in the load of router a`.
    ///
    /// # Errors
    /// `BadValue` for an impossible number.
    pub fn check(&self, whose: impl Fn() -> String) -> Result<(), CoreError> {
        for (what, value) in Share::NAMES.into_iter().zip(self.share.numbers()) {
            if !(0.0..=1e15).contains(&value) {
                return Err(CoreError::BadValue {
                    what: format!("{what} {}", whose()),
                    got: value.to_string(),
                    expected: "0 to 1e15".into(),
                });
            }
        }
        Ok(())
    }

    /// Returns the load as a message holds it: 24 bits of each number.
    pub fn rounded(self) -> Published {
        Published { share: Share::of(self.share.numbers().map(|number| f64::from(number as f32))) }
    }

    /// Returns the load `seconds` later ([`Share::later`]).
    pub fn later(&self, seconds: Seconds, recent_seconds: Seconds) -> Published {
        Published { share: self.share.later(seconds, recent_seconds) }
    }

    /// Returns whether peers that received this load know `load`, which is `seconds` later.
    pub fn stands_for(&self, load: &Published, seconds: Seconds, recent_seconds: Seconds) -> bool {
        let known = self.share.later(seconds, recent_seconds).numbers();
        known.into_iter().zip(load.share.numbers()).all(|(a, b)| (a - b).abs() <= ROUNDING * a.max(b))
    }
}

impl From<Share> for Published {
    fn from(share: Share) -> Published {
        Published { share }
    }
}

//! The load that a router publishes of one instance, for its peers: numbers, and the roots of its
//! agent programs.
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::program::{MAX_ROOTS, PeerRoot};
use crate::router::ledger::Share;

/// Relative difference below which two numbers are equal: messages have 24 bits of each number.
const ROUNDING: f64 = 1.0 / (1 << 22) as f64;
/// Relative difference from which peers need a new estimate of the tokens that programs wait for.
const DEMAND_TOLERANCE: f64 = 0.1;

/// Load that a router publishes of one instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Published {
    /// The numbers.
    pub share: Share,
    /// Roots that the router's agent programs share.
    pub roots: Vec<PeerRoot>,
}

impl Published {
    /// Returns whether there is no load.
    pub fn is_nothing(&self) -> bool {
        self.share.is_nothing() && self.roots.is_empty()
    }

    /// Checks all numbers. `whose`: for the error, for example `on x in the load of router a`.
    ///
    /// # Errors
    /// `BadValue` for an impossible number, or for too many roots.
    pub fn check(&self, whose: impl Fn() -> String) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: String| {
            Err(CoreError::BadValue { what: format!("{what} {}", whose()), got, expected })
        };
        let numbers = Share::NAMES.into_iter().zip(self.share.numbers());
        let roots = self.roots.iter().map(|root| ("tokens of a root", root.root.tokens));
        for (what, value) in numbers.chain(roots) {
            if !(0.0..=1e15).contains(&value) {
                return bad(what, value.to_string(), "0 to 1e15".into());
            }
        }
        if let Some(root) = self.roots.iter().find(|root| !(0.0..=1.0).contains(&root.probability)) {
            return bad("probability of a root", root.probability.to_string(), "0 to 1".into());
        }
        if self.roots.len() > MAX_ROOTS {
            return bad("roots", self.roots.len().to_string(), format!("at most {MAX_ROOTS}"));
        }
        Ok(())
    }

    /// Returns the load as a message holds it: 24 bits of each number.
    pub fn rounded(mut self) -> Published {
        let round = |number: f64| f64::from(number as f32);
        self.share = Share::of(self.share.numbers().map(round));
        for root in &mut self.roots {
            (root.root.tokens, root.probability) = (round(root.root.tokens), round(root.probability));
        }
        self
    }

    /// Returns the load `seconds` later ([`Share::later`]).
    pub fn later(&self, seconds: Seconds, recent_seconds: Seconds) -> Published {
        Published { share: self.share.later(seconds, recent_seconds), roots: self.roots.clone() }
    }

    /// Returns whether peers that received this load know `load`, which is `seconds` later.
    pub fn stands_for(&self, load: &Published, seconds: Seconds, recent_seconds: Seconds) -> bool {
        let near = |a: f64, b: f64, tolerance: f64| (a - b).abs() <= tolerance * a.max(b);
        let (known, new) = (self.share.later(seconds, recent_seconds), load.share);
        let demand = |a, b| near(a, b, DEMAND_TOLERANCE);
        if self.roots != load.roots
            || !demand(known.held_program_tokens, new.held_program_tokens)
            || !demand(known.admitted_program_tokens, new.admitted_program_tokens)
        {
            return false;
        }
        let [known, new] = [known, new]
            .map(|share| Share { held_program_tokens: 0.0, admitted_program_tokens: 0.0, ..share }.numbers());
        known.into_iter().zip(new).all(|(a, b)| near(a, b, ROUNDING))
    }
}

impl From<Share> for Published {
    fn from(share: Share) -> Published {
        Published { share, roots: Vec::new() }
    }
}

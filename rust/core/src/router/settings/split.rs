//! How requests are cut that no roles cut, and how long answers are expected to get.
use crate::error::CoreError;
use crate::estimate::OutputLength;
use crate::estimate::output_length::{MARGIN_TOKENS, QUANTILE};
use crate::split::{self, Settings};

/// How requests are cut that no roles cut.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Split {
    /// Not at all.
    #[default]
    None,
    /// Each at this fraction of its prompt and expected output, 0 to 1: to test engines and streams
    /// with.
    ForceAt(f64),
    /// Where it balances its instances, if that pays (Libra, Algorithm 1); into three parts whether
    /// it pays or not (section 4.4).
    Libra(Libra),
    /// Behind its prompt, if all requests together lose less time where it then goes
    /// ([`split::apart`]).
    Apart(Apart),
}

/// How Libra cuts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Libra {
    /// The search; what engines are able to is filled in at each.
    pub settings: Settings,
    /// How long answers are expected to get.
    pub lengths: Lengths,
    /// Parts that a request is cut into at most: 2, or 3 for one that says how long it thinks
    /// ([`crate::request::Request::think_tokens`]; section 4.4).
    pub parts: u32,
}

impl Default for Libra {
    fn default() -> Libra {
        Libra { settings: Settings::default(), lengths: Lengths::default(), parts: 2 }
    }
}

/// Where the expected length of an answer comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// The request says it: the oracle of a simulation.
    Given,
    /// A quantile of the answers to prompts of about that length and of the request's class, and a
    /// margin in tokens; never more than the request allows.
    Estimated {
        /// 0 to 1.
        quantile: f64,
        /// See [`crate::estimate::output_length::MARGIN_TOKENS`].
        margin_tokens: u32,
    },
}

impl Default for Lengths {
    fn default() -> Lengths {
        Lengths::Estimated { quantile: QUANTILE, margin_tokens: MARGIN_TOKENS }
    }
}

/// When a request goes on elsewhere behind its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Apart {
    /// What the time lost is made of.
    pub settings: split::apart::Settings,
    /// How long answers are expected to get.
    pub lengths: Mean,
}

/// Where the mean length of answers comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mean {
    /// The request says it: the oracle of a simulation.
    Given,
    /// The mean of the answers to prompts of about that length, of the request's class where enough
    /// of these are known; never more than the request allows.
    Learned {
        /// Tokens that count as the mean until 8 answers of the kind have ended.
        prior_tokens: u32,
    },
}

impl Default for Mean {
    /// Answers of chats are 200 to 350 tokens long in the traces at hand.
    fn default() -> Mean {
        Mean::Learned { prior_tokens: 300 }
    }
}

impl Mean {
    /// What is to be learned of lengths for it.
    fn estimate(self) -> Result<Option<OutputLength>, CoreError> {
        match self {
            Mean::Given => Ok(None),
            Mean::Learned { prior_tokens } => OutputLength::mean(prior_tokens, CLASSES).map(Some),
        }
    }
}

/// Classes that lengths are kept of, 0.5 KiB each; the one used least recently leaves.
const CLASSES: u32 = 1024;

impl Split {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        match self {
            Split::ForceAt(fraction) if !(*fraction > 0.0 && *fraction < 1.0) => Err(CoreError::BadValue {
                what: "split: fraction".into(),
                got: fraction.to_string(),
                expected: "more than 0 and less than 1".into(),
            }),
            Split::Libra(libra) => {
                libra.settings.check()?;
                if !(2..=3).contains(&libra.parts) {
                    return Err(CoreError::BadValue {
                        what: "split: parts".into(),
                        got: libra.parts.to_string(),
                        expected: "2, or 3 for requests that think".into(),
                    });
                }
                libra.lengths.estimate().map(drop)
            }
            Split::Apart(apart) => {
                apart.settings.check()?;
                apart.lengths.estimate().map(drop)
            }
            _ => Ok(()),
        }
    }

    /// Whether the last token that an engine makes before a cut in the answer counts, its KV being
    /// left to who goes on.
    pub fn keeps_tokens(&self) -> bool {
        matches!(self, Split::Apart(_))
    }

    /// What is to be learned of lengths for it.
    pub(in crate::router) fn estimate(&self) -> Result<Option<OutputLength>, CoreError> {
        match self {
            Split::Libra(libra) => libra.lengths.estimate(),
            Split::Apart(apart) => apart.lengths.estimate(),
            _ => Ok(None),
        }
    }
}

impl Lengths {
    fn estimate(&self) -> Result<Option<OutputLength>, CoreError> {
        match *self {
            Lengths::Given => Ok(None),
            Lengths::Estimated { quantile, margin_tokens } => {
                OutputLength::new(quantile, margin_tokens, CLASSES).map(Some)
            }
        }
    }
}

//! Where a plan cuts a request: at its prompt's end where roles say so, elsewhere where the split does.
use super::Router;
use super::decide::Turn;
use crate::error::CoreError;
use crate::estimate::OutputLength;
use crate::estimate::output_length::{MARGIN_TOKENS, QUANTILE};
use crate::fleet::Role;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::{Binding, Cuts, Segment};
use crate::receipt::{Balance, Next};
use crate::request::Request;
use crate::split::{self, Load, Settings, Whole};
use smallvec::SmallVec;
use std::borrow::Cow;

/// A segment that follows another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Follow {
    /// Its first token: where the one before it ends.
    pub from_token: u32,
    /// Where it runs; `None`: chosen when its turn comes.
    pub instance: Option<InstanceId>,
    /// Seconds until it is expected to start.
    pub start_seconds: Seconds,
}

/// What follows a first segment, in order.
pub(super) type Rest = SmallVec<[Follow; 2]>;

/// How requests are cut that no roles cut.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub enum Split {
    /// Not at all.
    #[default]
    None,
    /// Each at this fraction of its prompt and expected output, 0 to 1: to test engines and streams with.
    ForceAt(f64),
    /// Where it balances its two instances, if that pays (Libra, Algorithm 1).
    Libra(Libra),
}

/// How Libra cuts.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Libra {
    /// The search; what engines are able to is filled in at each.
    pub settings: Settings,
    /// How long answers are expected to get.
    pub lengths: Lengths,
}

/// Where the expected length of an answer comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// The request says it: the oracle of a simulation.
    Given,
    /// A quantile of the answers to prompts of about that length, and a margin in tokens; never more than the request allows.
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

/// Classes of prompts that lengths are kept of: powers of two of their tokens.
const CLASSES: u32 = 33;

fn class(prompt_tokens: u32) -> u64 {
    u64::from(u32::BITS - prompt_tokens.leading_zeros())
}

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
                libra.lengths.estimate().map(drop)
            }
            _ => Ok(()),
        }
    }

    /// What is to be learned of lengths for it.
    pub(super) fn estimate(&self) -> Result<Option<OutputLength>, CoreError> {
        match self {
            Split::Libra(libra) => libra.lengths.estimate(),
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

impl Router {
    /// Sets how requests are cut from now on.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_split(&mut self, split: Split) -> Result<(), CoreError> {
        split.check()?;
        if split.estimate()?.is_none() || self.lengths.is_none() {
            self.lengths = split.estimate()?;
        }
        self.split = split;
        Ok(())
    }

    /// The request with the length that its answer is expected to get, where that is estimated: what it may get at most tells little.
    pub(super) fn estimated<'r>(&self, request: &'r Request<'r>) -> Cow<'r, Request<'r>> {
        match self.lengths.as_ref().and_then(|lengths| lengths.expected(class(request.prompt_tokens))) {
            Some(tokens) => {
                let most = request.expected_output_tokens.unwrap_or(u32::MAX);
                Cow::Owned(Request {
                    expected_output_tokens: Some(tokens.clamp(1, most.max(1))),
                    ..request.clone()
                })
            }
            None if self.lengths.is_some() => {
                Cow::Owned(Request { expected_output_tokens: None, ..request.clone() })
            }
            None => Cow::Borrowed(request),
        }
    }

    /// An answer ended by itself.
    pub(super) fn learn_length(&mut self, prompt_tokens: u32, output_tokens: u32) {
        if let Some(lengths) = &mut self.lengths {
            lengths.ended(class(prompt_tokens), output_tokens);
        }
    }

    /// How requests are cut.
    pub fn split(&self) -> Split {
        self.split
    }

    /// Says where an instance's engine can hand requests over and take them; a new one can anywhere.
    pub fn set_cuts(&mut self, id: InstanceId, cuts: Cuts) {
        self.cuts[id.index()] = cuts;
    }

    /// What follows a first segment on `first`; `failed`: slots that are not asked.
    pub(super) fn rest(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        (self.uncut, self.balance) = (None, None);
        if self.rescheduling.is_some() {
            self.uncut = request.uncut.map(Into::into); // what must not be cut does not move, either
        }
        match self.fleet.role(first) {
            Role::Prefill => self.rest_of_prefill(request, first, now),
            Role::Both if self.split != Split::None => Ok(self.rest_of_split(request, first, failed, now)),
            _ => Ok(Rest::new()),
        }
    }

    fn rest_of_prefill(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        if self.fleet.decoder_count() == 0 {
            return if self.config.colocate { Ok(Rest::new()) } else { Err(self.nobody(Turn::Later)) };
        }
        let handoff = self.expected_handoff(request, first, now);
        let instance = match self.config.binding {
            Binding::Early => Some(self.choose(request, Turn::Later, &[], Some(handoff), now)?),
            Binding::Late => None,
        };
        Ok(Rest::from_iter([Follow { from_token: request.prompt_tokens, instance, start_seconds: handoff }]))
    }

    /// The pair first, then the cut (Libra, section 4.1). Whatever stands against a cut leaves the request in one piece, with the reason.
    fn rest_of_split(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Rest {
        if let Some(reason) = request.uncut {
            return self.leave_whole(reason);
        }
        if self.cuts[first.index()] == Cuts::Nowhere {
            return self.leave_whole("its instance cannot hand over");
        }
        let handoff = self.expected_handoff(request, first, now);
        let Ok(second) = self.choose(request, Turn::Peer(Some(first)), failed, Some(handoff), now) else {
            return self.leave_whole("no second instance takes over");
        };
        let able = self.cuts[first.index()].min(self.cuts[second.index()]);
        match self.cut(request, first, second, able, now) {
            Ok(from_token) => {
                Rest::from_iter([Follow { from_token, instance: Some(second), start_seconds: handoff }])
            }
            Err(reason) => self.leave_whole(reason),
        }
    }

    /// The token at which a request is cut between two instances whose engines are able to at `able`; or why it is not.
    fn cut(
        &mut self,
        request: &Request<'_>,
        first: InstanceId,
        second: InstanceId,
        able: Cuts,
        now: Seconds,
    ) -> Result<u32, &'static str> {
        let hit = |id: InstanceId| self.saved_tokens(request, self.hit_blocks[id.index()]) as u32;
        let whole = Whole {
            prompt_tokens: request.prompt_tokens,
            first_hit_tokens: hit(first),
            second_hit_tokens: hit(second),
            expected_output_tokens: request.expected_output_tokens.unwrap_or(1),
        };
        match self.split {
            Split::None => Err("requests are not cut"),
            Split::ForceAt(fraction) => {
                let wished = split::force_at(fraction, &whole).ok_or("too short to be cut")?;
                let token =
                    able.nearest(wished, whole.prompt_tokens).ok_or("its instances cannot hand over")?;
                // The last token is never computed, only made.
                if token + 1 < whole.tokens() { Ok(token) } else { Err("too short to be cut") }
            }
            Split::Libra(_) if request.expected_output_tokens.is_none() => {
                Err("nothing is known of the length of answers")
            }
            Split::Libra(libra) => {
                let loads = [first, second].map(|id| self.load_of(id, now));
                let steps = [first, second].map(|id| self.step_time_of(id.index()));
                let [Some(step_first), Some(step_second)] = steps else {
                    return Err("nothing is known of the instances' speed");
                };
                let settings = Settings { cuts: able, ..libra.settings };
                let found = split::search(&whole, &loads[0], &loads[1], &step_first, &step_second, &settings);
                self.balance = Some(Balance {
                    first_seconds: found.seconds_first,
                    second_seconds: found.seconds_second,
                    cut_seconds: found.seconds_cut,
                    whole_seconds: found.seconds_whole,
                });
                found.cut_token.ok_or(found.why.text())
            }
        }
    }

    /// What is assigned to an instance.
    fn load_of(&self, id: InstanceId, now: Seconds) -> Load {
        let slot = id.index();
        let at = |indicator| self.columns.get(indicator)[slot];
        Load {
            queued_prefill_tokens: self.books.queued_prefill_on(slot, now),
            queued_prefill_pairs: self.books.queued_pairs_on(slot),
            decoding: at(Indicator::DecodeBs) + at(Indicator::BoundBs),
            context_tokens: at(Indicator::Tokens),
            remaining_output_tokens: at(Indicator::RemainingTokens) + self.books.bound_remaining_on(slot),
        }
    }

    fn leave_whole(&mut self, reason: &str) -> Rest {
        self.uncut = Some(reason.into());
        Rest::new()
    }

    /// Whether the segment that a segment leads to is on an equal of its instance, and not on one that decodes only.
    pub(super) fn peers(&self, segment: &Segment) -> bool {
        self.fleet.role(segment.instance) != Role::Prefill
    }

    /// For the receipt: the first of what follows, as far as its instance is chosen.
    pub(super) fn next_in(&self, rest: &Rest) -> Option<Next> {
        let follow = rest.first()?;
        Some(self.next_of(follow.instance?, follow.start_seconds))
    }
}

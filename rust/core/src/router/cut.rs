//! Where a plan cuts a request: at its prompt's end where roles say so, elsewhere where the split does.
use super::Router;
use super::apart::Apart;
use super::context::DecisionContext;
use super::select::Turn;
use super::state::State;
use crate::error::CoreError;
use crate::estimate::OutputLength;
use crate::estimate::output_length::{MARGIN_TOKENS, QUANTILE};
use crate::fleet::Role;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::{Binding, Cuts, Segment};
use crate::receipt::{Balance, Next, Nexts};
use crate::request::Request;
use crate::split::{self, Load, Placed, Settings, Whole};
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
    /// Score of the instance, where it is chosen.
    pub score: f64,
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
    /// Where it balances its instances, if that pays (Libra, Algorithm 1); into three parts whether it pays or not (section 4.4).
    Libra(Libra),
    /// Behind its prompt, if all requests together lose less time where it then goes ([`split::apart`]).
    Apart(Apart),
}

/// How Libra cuts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Libra {
    /// The search; what engines are able to is filled in at each.
    pub settings: Settings,
    /// How long answers are expected to get.
    pub lengths: Lengths,
    /// Parts that a request is cut into at most: 2, or 3 for one that says how long it thinks ([`Request::think_tokens`]; section 4.4).
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
    /// A quantile of the answers to prompts of about that length and of the request's class, and a margin in tokens; never more than the request allows.
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

/// Classes that lengths are kept of, 0.5 KiB each; the one used least recently leaves.
pub(super) const CLASSES: u32 = 1024;
/// Answers that must have ended of a caller's class before it is trusted more than all prompts of that length: of so many, one that is not like the others
/// moves the median by a sixteenth of its rank.
const LEAST_OF_CLASS: u32 = 8;

/// Whose answers tell how long a request's will be: prompts of that power of two of tokens, and among them those of the caller's class, where it has one.
fn classes(prompt_tokens: u32, length_class: Option<u64>) -> (u64, Option<u64>) {
    let length = u64::from(u32::BITS - prompt_tokens.leading_zeros());
    // The top bit keeps the two kinds apart.
    let mixed = |class: u64| (class ^ length.wrapping_mul(0x9E37_79B9_7F4A_7C15)) | 1 << 63;
    (length, length_class.map(mixed))
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

    /// Whether the last token that an engine makes before a cut in the answer counts, its KV being left to who goes on.
    pub fn keeps_tokens(&self) -> bool {
        matches!(self, Split::Apart(_))
    }

    /// What is to be learned of lengths for it.
    pub(super) fn estimate(&self) -> Result<Option<OutputLength>, CoreError> {
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

impl Router {
    /// Sets how requests are cut from now on.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_split(&mut self, split: Split) -> Result<(), CoreError> {
        split.check()?;
        if split.estimate()?.is_none() || self.state.lengths.is_none() {
            self.state.lengths = split.estimate()?;
        }
        if let Split::Apart(apart) = split {
            self.state.ledger.set_recent(apart.settings.recent_seconds);
        }
        self.state.split = split;
        Ok(())
    }

    /// An answer ended by itself.
    pub(super) fn learn_length(&mut self, prompt_tokens: u32, length_class: Option<u64>, output_tokens: u32) {
        if let Some(lengths) = &mut self.state.lengths {
            let (of_length, of_class) = classes(prompt_tokens, length_class);
            lengths.ended(of_length, output_tokens);
            of_class.iter().for_each(|class| lengths.ended(*class, output_tokens));
        }
    }

    /// How requests are cut.
    pub fn split(&self) -> Split {
        self.state.split
    }

    /// Says where an instance's engine can hand requests over and take them; a new one can anywhere.
    ///
    /// # Errors
    /// `BadValue` if the router has no such slot.
    pub fn set_cuts(&mut self, id: InstanceId, cuts: Cuts) -> Result<(), CoreError> {
        self.state.instance_mut(id)?.cuts = cuts;
        Ok(())
    }
}

impl State {
    /// The request with the length that its answer is expected to get, where that is estimated: what it may get at most tells little.
    pub fn estimated<'r>(&self, request: &'r Request<'r>) -> Cow<'r, Request<'r>> {
        let expected = self.lengths.as_ref().and_then(|lengths| {
            let (of_length, of_class) = classes(request.prompt_tokens, request.length_class);
            let of_class = of_class.and_then(|class| lengths.expected(class, LEAST_OF_CLASS));
            let prior = lengths.prior_tokens();
            // One answer says what a median may be; of a mean, it says little.
            let least = if prior.is_some() { LEAST_OF_CLASS } else { 1 };
            of_class.or_else(|| lengths.expected(of_length, least)).or(prior)
        });
        match expected {
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

    /// What follows a first segment on `first`; `failed`: slots that are not asked.
    pub fn rest(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        (context.uncut, context.balance) = (None, None);
        if self.rescheduling.is_some() {
            context.uncut = request.uncut.map(Into::into); // what must not be cut does not move, either
        }
        match self.fleet.role(first) {
            Role::Prefill => self.rest_of_prefill(context, request, first, now),
            Role::Both if self.split != Split::None => {
                Ok(self.rest_of_split(context, request, first, failed, now))
            }
            _ => Ok(Rest::new()),
        }
    }

    fn rest_of_prefill(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        first: InstanceId,
        now: Seconds,
    ) -> Result<Rest, CoreError> {
        if self.fleet.decoder_count() == 0 {
            return if self.config.colocate { Ok(Rest::new()) } else { Err(self.nobody(Turn::Later)) };
        }
        let handoff = self.expected_handoff(context, request, first, now);
        let instance = match self.config.binding {
            Binding::Early => Some(self.choose(context, request, Turn::Later, &[], Some(handoff), now)?),
            Binding::Late => None,
        };
        Ok(Rest::from_iter([self.follow(context, request.prompt_tokens, instance, handoff)]))
    }

    /// A segment on an instance that was chosen last, or is none yet.
    fn follow(
        &self,
        context: &DecisionContext,
        from_token: u32,
        instance: Option<InstanceId>,
        start_seconds: Seconds,
    ) -> Follow {
        let score = instance.and_then(|id| context.later.scores.score.get(id.index()).copied());
        Follow { from_token, instance, start_seconds, score: score.unwrap_or(f64::NAN) }
    }

    /// The pair first, then the cut (Libra, section 4.1). Whatever stands against a cut leaves the request in one piece, with the reason.
    fn rest_of_split(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        first: InstanceId,
        failed: &[u32],
        now: Seconds,
    ) -> Rest {
        if let Some(reason) = request.uncut {
            return context.leave_whole(reason);
        }
        if self.instances[first.index()].cuts == Cuts::Nowhere {
            return context.leave_whole("its instance cannot hand over");
        }
        if let Split::Apart(apart) = &self.split {
            return self.rest_apart(context, apart, request, first, failed, now);
        }
        let handoff = self.expected_handoff(context, request, first, now);
        let Ok(second) = self.choose(context, request, Turn::Peer(Some(first)), failed, Some(handoff), now)
        else {
            return context.leave_whole("no second instance takes over");
        };
        let follow = self.follow(context, 0, Some(second), handoff);
        if let Some(think_tokens) = self.thoughts(request) {
            match self.cut_in_three(context, request, think_tokens, (first, follow), failed, now) {
                Ok(rest) => return rest,
                Err(reason) => context.uncut = Some(format!("in three parts: {reason}").into()),
            }
        }
        let able = self.instances[first.index()].cuts.min(self.instances[second.index()].cuts);
        match self.cut(context, request, first, second, able, now) {
            Ok(from_token) => Rest::from_iter([Follow { from_token, ..follow }]),
            Err(reason) => context.leave_whole(reason),
        }
    }

    /// Thoughts of a request that may be cut into three.
    fn thoughts(&self, request: &Request<'_>) -> Option<u32> {
        match self.split {
            Split::Libra(Libra { parts: 3, .. }) => request.think_tokens.filter(|tokens| *tokens > 0),
            _ => None,
        }
    }

    /// Prefill on `first`, thinking on the instance of `second`, the answer on a third, or on `first` again where there are but two (Libra, section 4.4). The error says
    /// why the request is not cut so.
    fn cut_in_three(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        think_tokens: u32,
        (first, second): (InstanceId, Follow),
        failed: &[u32],
        now: Seconds,
    ) -> Result<Rest, &'static str> {
        let (Split::Libra(libra), Some(thinks)) = (self.split, second.instance) else {
            return Err("requests are not cut");
        };
        let expected_output_tokens =
            request.expected_output_tokens.ok_or("nothing is known of the length of answers")?;
        let mut taken: SmallVec<[u32; 8]> = SmallVec::from_slice(failed);
        taken.push(thinks.0);
        let start = Some(second.start_seconds);
        let answers =
            self.choose(context, request, Turn::Peer(Some(first)), &taken, start, now).unwrap_or(first);
        let third = self.follow(context, 0, Some(answers), second.start_seconds);
        let on = [first, thinks, answers];
        let settings = Settings {
            cuts: on.map(|id| self.instances[id.index()].cuts).into_iter().min().unwrap_or_default(),
            ..libra.settings
        };
        let loads = on.map(|id| self.load_of(id, now));
        let steps = on.map(|id| self.step_time_of(id.index()));
        let [Some(a), Some(b), Some(c)] = &steps else {
            return Err("nothing is known of the instances' speed");
        };
        let hit = |id: InstanceId| self.saved_tokens(request, context.hit_blocks[id.index()]) as u32;
        let placed = |i: usize, step| Placed { load: &loads[i], step, hit_tokens: hit(on[i]) };
        let placed = [placed(0, a), placed(1, b), placed(2, c)];
        let whole = Whole {
            prompt_tokens: request.prompt_tokens,
            first_hit_tokens: placed[0].hit_tokens,
            second_hit_tokens: placed[1].hit_tokens,
            expected_output_tokens,
        };
        let found = if answers == first {
            split::search_return(&whole, think_tokens, [placed[0], placed[1]], &settings)
        } else {
            split::search_three(&whole, think_tokens, placed, &settings)
        };
        let [from_token, answer_token] = found.cut_tokens.ok_or(found.why.text())?;
        let [first_seconds, second_seconds, third_seconds] = found.seconds;
        context.balance =
            Some(Balance { first_seconds, second_seconds, third_seconds, ..Balance::default() });
        let start_seconds = second.start_seconds + found.think_seconds;
        Ok(Rest::from_iter([
            Follow { from_token, ..second },
            Follow { from_token: answer_token, start_seconds, ..third },
        ]))
    }

    /// The token at which a request is cut between two instances whose engines are able to at `able`; or why it is not.
    fn cut(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        first: InstanceId,
        second: InstanceId,
        able: Cuts,
        now: Seconds,
    ) -> Result<u32, &'static str> {
        let hit = |id: InstanceId| self.saved_tokens(request, context.hit_blocks[id.index()]) as u32;
        let whole = Whole {
            prompt_tokens: request.prompt_tokens,
            first_hit_tokens: hit(first),
            second_hit_tokens: hit(second),
            expected_output_tokens: request.expected_output_tokens.unwrap_or(1),
        };
        match self.split {
            Split::None | Split::Apart(_) => Err("requests are not cut there"),
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
                context.balance = Some(Balance {
                    first_seconds: found.seconds_first,
                    second_seconds: found.seconds_second,
                    third_seconds: f64::NAN,
                    cut_seconds: found.seconds_cut,
                    whole_seconds: found.seconds_whole,
                    ..Balance::default()
                });
                found.cut_token.ok_or(found.why.text())
            }
        }
    }

    /// What is assigned to an instance.
    pub fn load_of(&self, id: InstanceId, now: Seconds) -> Load {
        let slot = id.index();
        let at = |indicator| self.ledger.get(indicator)[slot];
        Load {
            queued_prefill_tokens: self.ledger.queued_prefill_on(slot, now),
            queued_prefill_pairs: self.ledger.queued_pairs_on(slot),
            decoding: at(Indicator::DecodeBs) + at(Indicator::BoundBs),
            context_tokens: at(Indicator::Tokens),
            remaining_output_tokens: at(Indicator::RemainingTokens) + self.ledger.bound_remaining_on(slot),
        }
    }

    /// Whether the segment that a segment leads to is on an equal of its instance, and not on one that decodes only.
    pub fn peers(&self, segment: &Segment) -> bool {
        self.fleet.role(segment.instance) != Role::Prefill
    }

    /// For the receipt: what follows, as far as its instances are chosen.
    pub fn next_in(&self, rest: &Rest) -> Nexts {
        let chosen = rest.iter().filter_map(|follow| Some((follow, follow.instance?)));
        chosen
            .map(|(follow, instance)| Next {
                slot: instance.0,
                name: self.fleet.name(instance).clone(),
                score: follow.score,
                handoff_seconds: follow.start_seconds,
            })
            .collect()
    }
}

impl DecisionContext {
    /// Leaves the request in one piece, for this reason.
    pub fn leave_whole(&mut self, reason: &str) -> Rest {
        self.uncut = Some(reason.into());
        Rest::new()
    }
}

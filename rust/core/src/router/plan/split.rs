//! A cut that no roles make: the pair first, then the token, wherever the split says (Libra, or a
//! fraction).
use super::parts::{Follow, Rest, Turn};
use crate::ids::{InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::plan::Cuts;
use crate::receipt::Balance;
use crate::request::Request;
use crate::router::context::DecisionContext;
use crate::router::settings::{Libra, Split};
use crate::router::state::State;
use crate::split::{self, Load, Placed, Settings, Whole};
use smallvec::SmallVec;

impl State {
    /// The pair first, then the cut (Libra, section 4.1). Whatever stands against a cut leaves the
    /// request in one piece, with the reason.
    pub fn rest_of_split(
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

    /// Prefill on `first`, thinking on the instance of `second`, the answer on a third, or on
    /// `first` again where there are but two (Libra, section 4.4). The error says why the request
    /// is not cut so.
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

    /// The token at which a request is cut between two instances whose engines are able to at
    /// `able`; or why it is not.
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
}

//! Prefix pull: before a request begins, its instance fetches the part of the prompt's KV that another instance holds and it does not, where that takes less
//! time than computing it again. So a plan has two segments: `[0, H)` on the holder, where nothing is computed, and the rest on the chosen instance.
//!
//! The first of them is a [`Pull`] beside the plan's segments, not one of them: it is never open. No token comes of it, it waits in no queue and takes no place in the
//! holder's batch; if it fails, the request does not, since its instance computes what is missing; and a retry begins anew, at token 0. A segment that is open has
//! all of that in its books. What the holder does is counted by itself, in `pulls`.
//!
//! For each instance the best way is one of two: compute what it misses, or pull as much as the fullest holder with time has ([`Indicator::PullTokens`],
//! [`Indicator::PullCostTokens`]). Scores may read it; whatever they read, the instance that is chosen pulls where it pays.
use super::Router;
use super::context::DecisionContext;
use super::cut::Rest;
use super::state::State;
use super::tickets::{self, Leg, Pulling};
use super::{InstanceId, TicketId};
use crate::error::CoreError;
use crate::estimate::PullCost;
use crate::ids::Seconds;
use crate::indicators::{Indicator, IndicatorSet};
use crate::plan::{Cuts, Pull};
use crate::receipt::Pulled;
use crate::request::Request;
use rand::RngExt;

/// Indicators of what would be pulled.
pub(super) const PULL: IndicatorSet = IndicatorSet::of(&[Indicator::PullTokens, Indicator::PullCostTokens]);

/// When prefixes are pulled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PullConfig {
    /// What a pulled token takes until it was learned: its KV bytes over the link's bytes a second.
    pub seconds_per_token: Seconds,
    /// What a pull takes besides, until it was learned.
    pub fixed_seconds: Seconds,
    /// No pull of fewer tokens.
    pub least_tokens: u32,
    /// Most pulls that one holder serves at once.
    pub most_pulls: u32,
    /// An instance pulls nothing while it reports that this share of its KV cache, or more, is in use: engines may hold what they have pulled for a lease behind the
    /// request's end, and would be full of what nobody needs. 1: it pulls until it is full.
    pub most_kv_usage: f64,
}

impl Default for PullConfig {
    /// 100 KB a token over 200 Gbit/s, and 5 ms for the request and the holder's step; four at once are a guess.
    fn default() -> PullConfig {
        PullConfig {
            seconds_per_token: 4e-6,
            fixed_seconds: 0.005,
            least_tokens: 256,
            most_pulls: 4,
            most_kv_usage: 1.0,
        }
    }
}

impl PullConfig {
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn check(&self) -> Result<(), CoreError> {
        let bad = |what: &str, got: String, expected: &str| {
            Err(CoreError::BadValue { what: format!("pull: {what}"), got, expected: expected.into() })
        };
        for (what, seconds) in
            [("seconds_per_token", self.seconds_per_token), ("fixed_seconds", self.fixed_seconds)]
        {
            if !(0.0..=1e6).contains(&seconds) {
                return bad(what, seconds.to_string(), "0 to 1e6 seconds");
            }
        }
        if !(0.0..=1.0).contains(&self.most_kv_usage) {
            return bad("most_kv_usage", self.most_kv_usage.to_string(), "a share of the KV cache, 0 to 1");
        }
        for (what, number) in [("least_tokens", self.least_tokens), ("most_pulls", self.most_pulls)] {
            if number == 0 {
                return bad(what, "0".into(), "1 or more");
            }
        }
        Ok(())
    }
}

/// When prefixes are pulled, and what was learned of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pulls {
    config: PullConfig,
    cost: PullCost,
}

impl Pulls {
    pub fn new(config: PullConfig) -> Result<Pulls, CoreError> {
        config.check()?;
        Ok(Pulls { config, cost: PullCost::new(config.seconds_per_token, config.fixed_seconds) })
    }

    /// Seconds that a pulled token takes and that a pull takes besides, as learned, and how many pulls that was learned from.
    pub fn cost(&self) -> (Seconds, Seconds, u64) {
        let (per_token, fixed) = self.cost.cost();
        (per_token, fixed, self.cost.observed())
    }

    /// Whether to pull `tokens` is worth it where computing them takes `seconds`.
    fn pays(&self, tokens: f64, seconds: Seconds) -> bool {
        tokens >= f64::from(self.config.least_tokens) && self.cost.seconds(tokens) < seconds
    }
}

impl Router {
    /// Says whether prefixes are pulled from now on, and when; what was learned of their cost is forgotten.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_pull(&mut self, pull: Option<PullConfig>) -> Result<(), CoreError> {
        self.state.pulls = pull.map(Pulls::new).transpose()?;
        Ok(())
    }

    /// Seconds that a pulled token takes and that a pull takes besides, as learned, and how many pulls that was learned from; `None` where nothing is pulled.
    pub fn pull_cost(&self) -> Option<(Seconds, Seconds, u64)> {
        self.state.pulls.map(|pulls| pulls.cost())
    }

    /// What the open segment of a ticket pulls before it begins; `None` where it pulls nothing, or the pull is over.
    pub fn pull_of(&mut self, ticket: TicketId) -> Option<Pull> {
        let pulling = self.tickets.get(ticket).ok()?.leg.pull?;
        pulling.under_way.then_some(pulling.pull)
    }

    /// A leg's pull begins: its holder has one more to serve, and its prompt waits for it.
    pub(super) fn open_pull(&mut self, leg: &Leg) {
        let Some(pulling) = leg.pull else { return };
        self.state.ledger.wait(leg.segment.instance.index());
        self.totals.pulls += 1;
        self.serve(&pulling, 1.0);
    }

    /// What the open segment of a ticket pulls is over, or of no use any more. Does nothing where it pulls nothing.
    pub(super) fn end_pull(&mut self, ticket: TicketId) {
        let leg = self.tickets.get(ticket).ok().map(|state| &mut state.leg);
        if let Some(pulling) = leg.and_then(|leg| leg.pull.as_mut()).filter(|pulling| pulling.under_way) {
            pulling.under_way = false;
            let pulling = *pulling;
            self.serve(&pulling, -1.0);
        }
    }

    fn serve(&mut self, pulling: &Pulling, more: f64) {
        let holder = pulling.pull.holder;
        if self.state.fleet.is_current(holder, pulling.holder_generation) {
            self.state.ledger.serve_pull(holder.index(), more);
        }
    }

    /// `tokens` of what a ticket's open segment was to pull came, `seconds` after it was asked for; its instance computes the rest.
    pub(super) fn pulled(
        &mut self,
        ticket: TicketId,
        tokens: u32,
        seconds: Seconds,
        now: Seconds,
    ) -> Result<(), CoreError> {
        let state = self.tickets.get(ticket)?;
        let Some(pulling) = state.leg.pull else {
            let problem = "its open segment pulls nothing".into();
            return Err(CoreError::Ticket { ticket: ticket.0, problem });
        };
        let most = pulling.pull.tokens();
        if tokens > most || !(seconds >= 0.0 && seconds.is_finite()) {
            let (what, got) = ("pulled".into(), format!("{tokens} tokens in {seconds} s"));
            let expected = format!("at most the {most} tokens that were to be pulled, in 0 s or more");
            return Err(CoreError::BadValue { what, got, expected });
        }
        if !pulling.under_way {
            return Ok(()); // a first token came before: it is known to be over
        }
        self.end_pull(ticket);
        let state = self.tickets.get(ticket)?;
        let (leg, decision) = (&mut state.leg, state.decision);
        if let Some(pulling) = &mut leg.pull {
            pulling.pull.to_token = pulling.pull.from_token + tokens;
        }
        leg.entry.new_tokens += f64::from(most - tokens);
        let (slot, key) = (leg.segment.instance.index(), tickets::slot(ticket));
        if self.state.fleet.is_current(leg.segment.instance, leg.instance_generation) {
            self.state.ledger.requeue(slot, key, &leg.entry, now);
        }
        self.totals.pulled_tokens += u64::from(tokens);
        if let Some(pulls) = &mut self.state.pulls {
            pulls.cost.observe(f64::from(tokens), seconds);
        }
        self.receipts.update(decision, |r| {
            if let Some(pull) = &mut r.pull {
                (pull.tokens, pull.seconds) = (Some(tokens), Some(seconds));
            }
        });
        Ok(())
    }
}

impl State {
    /// Fills in what each instance would pull of the request's prompt, and what that costs.
    pub fn derive_pulls(&self, context: &mut DecisionContext, request: &Request<'_>, first: bool) {
        let reach = if first { self.reach(context, request) } else { 0.0 };
        let [tokens, cost, hits] = context.derived.several_mut([
            Indicator::PullTokens,
            Indicator::PullCostTokens,
            Indicator::HitTokens,
        ]);
        tokens.fill(0.0);
        cost.fill(0.0);
        let Some(pulls) = self.pulls.filter(|_| reach > 0.0) else { return };
        let mut mean_rate = None;
        for (slot, hit) in hits.iter().enumerate() {
            let gap = reach - hit;
            let computed = self.computing_seconds(slot, *hit, gap, &mut mean_rate);
            if self.may_pull(slot) && pulls.pays(gap, computed) {
                tokens[slot] = gap;
                cost[slot] = pulls.cost.seconds(gap) * gap / computed;
            }
        }
    }

    /// What `tokens` more of a prompt add to the steps of a slot if they are computed behind `hit` cached ones: by the step-time model where a profile gives one or it
    /// was learned, else at the rate of whole prefills, which counts what steps take in any case, too. `mean_rate`: the pool's, once it was worked out.
    fn computing_seconds(&self, slot: usize, hit: f64, tokens: f64, mean_rate: &mut Option<f64>) -> Seconds {
        match self.step_time_of(slot) {
            Some(model) => model.prefill_seconds(hit, tokens),
            None => {
                let rate = self.ledger.get(Indicator::PrefillTokensPerSecond)[slot];
                let mean = || self.mean_prefill_rate();
                tokens / if rate.is_nan() { *mean_rate.get_or_insert_with(mean) } else { rate }
            }
        }
    }

    /// The most tokens of the prompt that an instance holds which could hand them over now; none where nothing must be pulled.
    fn reach(&self, context: &DecisionContext, request: &Request<'_>) -> f64 {
        if self.pulls.is_none() || request.unpulled.is_some() {
            return 0.0;
        }
        let mut most = 0;
        for (slot, &blocks) in context.hit_blocks.iter().enumerate() {
            if blocks > most && self.hands_over(slot) {
                most = blocks;
            }
        }
        self.saved_tokens(request, most)
    }

    /// Whether a slot can pull a prefix now.
    fn may_pull(&self, slot: usize) -> bool {
        let most = self.pulls.map_or(0.0, |pulls| pulls.config.most_kv_usage);
        let full = most < 1.0 && self.ledger.get(Indicator::KvUsage)[slot] >= most; // never, where it is not told
        self.instances[slot].cuts == Cuts::Anywhere && !full
    }

    /// Whether a prefix can be pulled from a slot now.
    fn hands_over(&self, slot: usize) -> bool {
        let id = InstanceId(slot as u32);
        let most = self.pulls.map_or(0, |pulls| pulls.config.most_pulls);
        self.fleet.is_live(id)
            && self.fleet.state(id).0
            && self.instances[slot].cuts == Cuts::Anywhere
            && self.ledger.get(Indicator::Pulls)[slot] < f64::from(most)
    }

    /// What the chosen instance pulls, where that pays: from the holder of most; of several from one that serves the least pulls, then the least requests, then by
    /// lot. A segment that ends inside the prompt pulls nothing: where it is cut was worked out without.
    pub fn pull_for(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        chosen: InstanceId,
        rest: &Rest,
    ) -> Option<Pulling> {
        let pulls = self.pulls?;
        let cut = rest.first().is_some_and(|follow| follow.from_token < request.prompt_tokens);
        if cut || !self.may_pull(chosen.index()) {
            return None;
        }
        let reach = self.reach(context, request);
        let own = self.saved_tokens(request, context.hit_blocks[chosen.index()]);
        let tokens = reach - own;
        let computed = self.computing_seconds(chosen.index(), own, tokens, &mut None);
        if !pulls.pays(tokens, computed) {
            return None;
        }
        let holder = self.holder(context, request, reach)?;
        Some(Pulling {
            pull: Pull { holder, from_token: own as u32, to_token: reach as u32 },
            holder_generation: self.fleet.generation(holder),
            expected_seconds: pulls.cost.seconds(tokens),
            under_way: true,
        })
    }

    fn holder(&self, context: &mut DecisionContext, request: &Request<'_>, reach: f64) -> Option<InstanceId> {
        let (mut best, mut equals) = (None, 0u32);
        let blocks = (reach / request.tokens_per_block) as u32;
        for slot in 0..context.hit_blocks.len() {
            if context.hit_blocks[slot] < blocks {
                continue; // most, and by less than what rounding may hide
            }
            let holds =
                self.saved_tokens(request, context.hit_blocks[slot]) == reach && self.hands_over(slot);
            if !holds {
                continue;
            }
            let load = |id| self.ledger.get(id)[slot];
            let key = (load(Indicator::Pulls), load(Indicator::Bs));
            equals = match best {
                Some((least, _)) if key > least => continue,
                Some((least, _)) if key == least => equals + 1,
                _ => 1,
            };
            if equals == 1 || context.rng.random_range(0..equals) == 0 {
                best = Some((key, InstanceId(slot as u32)));
            }
        }
        best.map(|(_, holder)| holder)
    }

    /// For the receipt.
    pub fn pull_told(&self, pulling: &Pulling) -> Pulled {
        let Pull { holder, from_token, to_token } = pulling.pull;
        Pulled {
            slot: holder.0,
            name: self.fleet.name(holder).clone(),
            from_token,
            to_token,
            expected_seconds: pulling.expected_seconds,
            tokens: None,
            seconds: None,
        }
    }
}

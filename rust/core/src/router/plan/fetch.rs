//! Plans prefix fetches: the tokens that the chosen instance fetches, and the holder.
//!
//! Each instance can compute its missing tokens or fetch as many as the best available holder has
//! ([`Indicator::FetchTokens`], [`Indicator::FetchCostTokens`]). Scores can read these indicators.
//! Independent of the score, the chosen instance fetches if this saves time.
use crate::ids::{Seconds, Slot};
use crate::indicators::{Columns, Indicator, IndicatorSet};
use crate::plan::{Cuts, PrefixFetch};
use crate::record::FetchRecord;
use crate::request::Request;
use crate::router::caches::PrefixMatch;
use crate::router::context::DecisionContext;
use crate::router::fetch_cost::Fetches;
use crate::router::parts::Rest;
use crate::router::state::State;
use crate::router::tickets::PlannedFetch;
use rand::RngExt;
use std::ops::Range;

/// Indicators of possible prefix fetches.
pub(super) const FETCH: IndicatorSet =
    IndicatorSet::of(&[Indicator::FetchTokens, Indicator::FetchCostTokens]);

impl State {
    /// Computes the possible fetch of each instance and its cost. `within`: the longest prefix that
    /// an instance could fetch, in tokens, and the cost of fetches.
    pub fn derive_fetches(
        &self,
        request: &Request<'_>,
        matched: &PrefixMatch,
        within: Option<(f64, Fetches)>,
        slots: Range<usize>,
        part: Range<usize>,
        columns: &mut Columns,
    ) {
        let ids = [Indicator::FetchTokens, Indicator::FetchCostTokens, Indicator::HitTokens];
        let [tokens, cost, hits] = columns.several_mut(ids, part);
        tokens.fill(0.0);
        cost.fill(0.0);
        let Some((reach, fetches)) = within else { return };
        let mut mean_rate = None;
        for (i, (hit, slot)) in hits.iter().zip(slots).enumerate() {
            // A lower tier of the slot is nearer than another instance.
            let own = match matched.tier_blocks.get(slot) {
                Some(more) if *more > 0 => self.saved_tokens(request, matched.hit_blocks[slot] + more),
                _ => *hit,
            };
            let gap = reach - own;
            let computed = self.computing_seconds(slot, own, gap, &mut mean_rate);
            if self.may_fetch(slot) && fetches.pays(gap, computed) {
                tokens[i] = gap;
                cost[i] = fetches.cost.seconds(gap) * gap / computed;
            }
        }
    }

    /// Returns the seconds that `tokens` more prompt tokens after `hit` cached tokens add to a
    /// slot's steps. Uses the step-time model of a profile or a learned one. The fallback is the
    /// rate of whole prefills, which includes fixed step costs. `mean_rate` caches the pool's mean
    /// rate.
    pub fn computing_seconds(
        &self,
        slot: usize,
        hit: f64,
        tokens: f64,
        mean_rate: &mut Option<f64>,
    ) -> Seconds {
        match self.step_time_of(slot) {
            Some(model) => model.prefill_seconds(hit, tokens),
            None => {
                let rate = self.ledger.get(Indicator::PrefillTokensPerSecond)[slot];
                let mean = || self.mean_prefill_rate();
                tokens / if rate.is_nan() { *mean_rate.get_or_insert_with(mean) } else { rate }
            }
        }
    }

    /// Returns the longest prefix of the prompt, in tokens, on the GPU of an instance that can
    /// serve a fetch now; 0 if prefixes must not be fetched. `failed`: slots to exclude.
    pub fn reach(&self, hit_blocks: &[u32], request: &Request<'_>, failed: &[u32]) -> f64 {
        if self.fetches.is_none() || request.fetch_reason.is_some() {
            return 0.0;
        }
        let mut most = 0;
        for (slot, &blocks) in hit_blocks.iter().enumerate() {
            if blocks > most && self.hands_over(slot, failed) {
                most = blocks;
            }
        }
        self.saved_tokens(request, most)
    }

    /// Returns whether a slot can fetch a prefix now.
    fn may_fetch(&self, slot: usize) -> bool {
        let most = self.fetches.map_or(0.0, |fetches| fetches.config.max_kv_usage);
        // False without a reported usage.
        let full = most < 1.0 && self.ledger.get(Indicator::KvUsage)[slot] >= most;
        self.instances[slot].cuts == Cuts::Anywhere && !full
    }

    /// Returns whether a slot can serve a prefix fetch now to a request that the slots `failed`
    /// failed.
    fn hands_over(&self, slot: usize, failed: &[u32]) -> bool {
        let id = Slot(slot as u32);
        let most = self.fetches.map_or(0, |fetches| fetches.config.max_fetches);
        !failed.contains(&id.0)
            && self.fleet.is_live(id)
            && self.fleet.state(id).0
            && self.instances[slot].cuts == Cuts::Anywhere
            && self.ledger.get(Indicator::Fetches)[slot] < f64::from(most)
    }

    /// Plans the chosen instance's prefix fetch, if it saves time. The holder has the longest
    /// prefix. Ties are broken by the fewest fetches, then the fewest requests, then at random. A
    /// segment that ends inside the prompt fetches nothing, because its cut was planned without a
    /// fetch. `failed`: slots to exclude from the holders.
    pub fn fetch_for(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        chosen: Slot,
        rest: &Rest,
        failed: &[u32],
        now: Seconds,
    ) -> Option<PlannedFetch> {
        let fetches = self.fetches?.at(now);
        let cut = rest.first().is_some_and(|follow| follow.from_token < request.prompt_tokens);
        if cut || !self.may_fetch(chosen.index()) {
            return None;
        }
        let reach = self.reach(&context.matched.hit_blocks, request, failed);
        let (own, _) = self.reusable_tokens(request, context.matched.blocks_on(chosen.index()));
        let tokens = reach - own;
        let computed = self.computing_seconds(chosen.index(), own, tokens, &mut None);
        if !fetches.pays(tokens, computed) {
            return None;
        }
        let holder = self.holder(context, request, reach, failed)?;
        Some(PlannedFetch {
            fetch: PrefixFetch { holder, from_token: own as u32, to_token: reach as u32 },
            holder: self.fleet.id_of(holder),
            expected_seconds: fetches.cost.seconds(tokens),
            under_way: true,
        })
    }

    fn holder(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        reach: f64,
        failed: &[u32],
    ) -> Option<Slot> {
        let (mut best, mut equals) = (None, 0u32);
        let blocks = (reach / request.tokens_per_block) as u32;
        for slot in 0..context.matched.hit_blocks.len() {
            if context.matched.hit_blocks[slot] < blocks {
                continue; // fewer tokens, beyond rounding errors
            }
            let holds = self.saved_tokens(request, context.matched.hit_blocks[slot]) == reach
                && self.hands_over(slot, failed);
            if !holds {
                continue;
            }
            let load = |id| self.ledger.get(id)[slot];
            let key = (load(Indicator::Fetches), load(Indicator::Bs));
            equals = match best {
                Some((least, _)) if key > least => continue,
                Some((least, _)) if key == least => equals + 1,
                _ => 1,
            };
            if equals == 1 || context.rng.random_range(0..equals) == 0 {
                best = Some((key, Slot(slot as u32)));
            }
        }
        best.map(|(_, holder)| holder)
    }

    /// Returns the fetch for the decision record.
    pub fn fetch_record(&self, planned: &PlannedFetch) -> FetchRecord {
        let PrefixFetch { holder, from_token, to_token } = planned.fetch;
        FetchRecord {
            slot: holder.0,
            name: self.fleet.name(holder).clone(),
            from_token,
            to_token,
            expected_seconds: planned.expected_seconds,
            tokens: None,
            seconds: None,
        }
    }
}

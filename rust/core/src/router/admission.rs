//! Arrivals: which requests run now, which wait, and which are refused.
use super::context::{Arrived, DecisionContext};
use super::router::Router;
use crate::admission::{Admission, Asked, LoadConfig, LoadSnapshot, Released, Room, Verdict};
use crate::error::CoreError;
use crate::ids::{ArrivalId, InstanceId, Seconds};
use crate::indicators::Indicator;
use crate::kv::tier::Tier;
use crate::priority::vtc::check_weight;
use crate::program::capacity::FullCache;
use crate::program::{Arrival, ProgramConfig, Programs};
use crate::request::Request;
use std::borrow::Cow;

/// Reported use of a KV cache from which an instance has no room: further requests would make its
/// engine preempt others.
const FULL_USAGE: f64 = 0.95;
/// Time after an arrival for which its decision uses what the arrival computed.
const SAME_SECONDS: Seconds = 0.01;

impl Router {
    /// Records an arriving request before its decision, and decides whether it runs now, waits or
    /// is refused. The caller passes the arrival in [`Request::arrival`] to [`Router::route`]. A
    /// request that is never routed needs [`Router::drop_arrival`]. A refused request has no
    /// arrival. Returns `None` if neither programs are followed nor admission by load is on.
    ///
    /// # Errors
    /// `BadValue` for an invalid request.
    pub fn arrive(
        &mut self,
        request: &Request<'_>,
        now: Seconds,
    ) -> Result<Option<(Option<ArrivalId>, Verdict)>, CoreError> {
        if !self.requests.admission.is_on() {
            return Ok(None);
        }
        request.check()?;
        check_weight(request.tenant.weight)?;
        let now = self.clock(now);
        // Before the first request, the tokens of a block are unknown.
        let slots = self.state.fleet.slots();
        if self.programs().is_some_and(|all| all.instances().len() < slots || all.tokens_per_block() <= 0.0) {
            self.update_capacities(request.tokens_per_block, now);
        }
        let prompt = f64::from(request.prompt_tokens);
        let mut asked = Asked {
            tenant: request.tenant.id,
            weight: request.tenant.weight,
            new_tokens: prompt,
            prefill_seconds: 0.0,
            ttft_seconds: request.ttft_slo_seconds,
        };
        let mut room = Room::default();
        if self.requests.admission.load_config().is_some() {
            self.match_prefix(request);
            let most = self.context.hit_blocks.iter().copied().max().unwrap_or(0);
            asked.new_tokens = prompt - self.state.saved_tokens(request, most);
            asked.prefill_seconds = self.alone_seconds(prompt - asked.new_tokens, asked.new_tokens);
            room = self.room(now);
        }
        self.context.arrived_roomy.clear();
        if let Some(most) = self.requests.admission.room_seconds() {
            let is_open = |slot: usize| room.is_open(slot, most);
            self.context.arrived_roomy.extend((0..room.waits.len()).map(is_open));
        }
        let session = request.session.filter(|_| self.programs().is_some_and(|all| all.config().sessions));
        let turn = Arrival {
            chain: request.chain,
            prompt_tokens: request.prompt_tokens,
            tokens_per_block: request.tokens_per_block,
            session,
            tenant: request.tenant.id,
            weight: request.tenant.weight,
            last: request.session_final,
        };
        let (id, verdict) = self.requests.admission.arrive(&turn, asked, &mut room, now);
        let matched = id.filter(|_| self.requests.admission.load_config().is_some());
        let chain = (request.chain.len(), request.chain.last().copied());
        self.context.arrived = matched.map(|id| Arrived { id, calls: self.calls, at: now, chain });
        Ok(Some((id, verdict)))
    }

    /// Returns the seconds of a prefill that runs alone on an instance, with `hit` cached and `new`
    /// uncached tokens.
    fn alone_seconds(&self, hit: f64, new: f64) -> Seconds {
        let slots = self.state.ids().filter(|id| self.state.fleet.is_live(*id));
        match slots.map(InstanceId::index).find_map(|slot| self.state.step_time_of(slot)) {
            Some(model) => model.prefill_seconds(hit, new),
            None => new / self.state.mean_prefill_rate(),
        }
    }

    /// Returns the instances' room at `now`.
    fn room(&self, now: Seconds) -> Room {
        let state = &self.state;
        let (decoding, context) =
            (state.ledger.get(Indicator::RBs), state.ledger.get(Indicator::DecodeTokens));
        let reported = state.ledger.get(Indicator::ReportedWaiting);
        let usage = state.ledger.get(Indicator::KvUsage);
        let rates = state.ledger.get(Indicator::PrefillTokensPerSecond);
        let rate = state.mean_prefill_rate();
        let config = self.requests.admission.load_config();
        let max_tpot = config.and_then(|config| config.tpot_seconds).unwrap_or(f64::INFINITY);
        let (mut able, mut count) = (state.fleet.eligible(), state.fleet.eligible_count());
        if count == 0 && state.config.colocate {
            (able, count) = (state.fleet.decoders(), state.fleet.decoder_count());
        }
        let wait = |(slot, able): (usize, &bool)| {
            if !able {
                return f64::INFINITY;
            }
            let queued = state.ledger.queued_prefill_on(slot, now);
            let step = state.ttft(slot, queued, 0.0, 0.0, decoding[slot], context[slot], rate);
            let learned = if rates[slot] > 0.0 { queued / rates[slot] } else { 0.0 };
            let predicted = if queued > 0.0 { step.max(learned) } else { 0.0 };
            predicted.max(state.ledger.backlogs.overdue(slot, now))
        };
        let waits = able.iter().enumerate().map(wait).collect();
        // The used part of an instance's memory, of its batch's places and of its step time.
        let used = |slot: usize| {
            let memory = usage[slot] / FULL_USAGE;
            let stuck = state.ledger.backlogs.is_unseen(slot) && reported[slot] > 0.0;
            let batch = state.step_time_of(slot).map_or(0.0, |model| {
                let step = model.step(decoding[slot] + 1.0, context[slot]) / max_tpot;
                step.max(state.ledger.in_flight(slot) / model.max_sequences)
            });
            if stuck { 1.0 } else { memory.max(batch) } // memory is NaN if unknown
        };
        let each = |slot: usize| {
            state.step_time_of(slot).map_or(0.0, |model| {
                (model.decode_seconds_per_sequence / max_tpot).max(1.0 / model.max_sequences)
            })
        };
        // An idle instance always has room.
        let idle = |slot: usize| state.ledger.in_flight(slot) <= 0.0;
        let used = |slot: usize| if idle(slot) { 0.0 } else { used(slot) };
        let used = (0..able.len()).map(|slot| (used(slot), each(slot))).collect();
        Room { waits, used, prior_rate: rate * count.max(1) as f64 }
    }

    /// Returns a request with its arrival and its program's instance. A caller that only observes
    /// programs may route requests without [`Router::arrive`].
    pub(super) fn with_arrival<'r>(
        &mut self,
        request: Cow<'r, Request<'r>>,
        now: Seconds,
    ) -> Result<Cow<'r, Request<'r>>, CoreError> {
        let admission = &self.requests.admission;
        self.state.recompute_ratio = admission.recompute_ratio();
        self.context.roomy.clear();
        self.context.is_matched = false;
        if !admission.is_on() {
            return Ok(request);
        }
        if let Some(id) = request.arrival {
            let home = admission.home(id);
            // The call for this decision follows its arrival at once: nothing but cache events, of
            // some milliseconds, may have come between.
            let chain = (request.chain.len(), request.chain.last().copied());
            let known = self.context.arrived.take().is_some_and(|arrived| {
                let same = Arrived { id, calls: self.calls - 1, chain, ..arrived };
                arrived == same && now - arrived.at < SAME_SECONDS
            });
            self.context.is_matched = known;
            if let (None, Some(most)) = (home, admission.room_seconds()) {
                let DecisionContext { roomy, arrived_roomy, .. } = &mut self.context;
                if known && arrived_roomy.len() == self.state.fleet.slots() {
                    std::mem::swap(roomy, arrived_roomy);
                } else {
                    let room = self.room(now);
                    self.context.roomy.extend((0..room.waits.len()).map(|slot| room.is_open(slot, most)));
                }
            }
            return Ok(Cow::Owned(Request { home, ..request.into_owned() }));
        }
        if admission.admits() {
            return Err(CoreError::BadValue {
                what: "arrival".into(),
                got: "none".into(),
                expected: "the arrival that arrive() returned, because the router admits requests".into(),
            });
        }
        let arrival = self.arrive(&request, now)?.and_then(|(id, _)| id);
        // Programs are only observed: the policy chooses.
        Ok(Cow::Owned(Request { arrival, home: None, ..request.into_owned() }))
    }

    /// Ends an arrival that was not routed, for example because its client left.
    pub fn drop_arrival(&mut self, id: ArrivalId, now: Seconds) {
        let now = self.clock(now);
        self.requests.admission.remove(id, now);
    }

    /// Runs the periodic work on arrivals: about twice a second, after the end of each request,
    /// and, while requests wait ([`Router::waiting`]), after each first token and every 50 ms.
    /// Returns the requests whose wait has ended.
    pub fn release_held(&mut self, now: Seconds) -> Released {
        let now = self.clock(now);
        if !self.requests.admission.is_on() && self.waiting() == 0 {
            return Released::default();
        }
        if let Some(tokens_per_block) = self.programs().map(Programs::tokens_per_block) {
            self.update_capacities(tokens_per_block, now);
        }
        let mut room =
            if self.requests.admission.load_config().is_some() { self.room(now) } else { Room::default() };
        self.requests.admission.release(&mut room, now)
    }

    /// Returns the number of requests that wait, or whose wait has ended since the last
    /// [`Router::release_held`].
    pub fn waiting(&self) -> usize {
        self.requests.admission.waiting()
    }

    /// Passes the capacities of all instances to the programs.
    fn update_capacities(&mut self, tokens_per_block: f64, now: Seconds) {
        for slot in 0..self.state.fleet.slots() {
            let id = InstanceId(slot as u32);
            let seen = self.state.index.take_full(id);
            self.state.instances[slot].full.note(seen, now);
            let capacity = self.cached_blocks_at_most(id).map(|blocks| blocks * tokens_per_block.max(1.0));
            let available = self.state.fleet.eligible()[slot];
            if let Some(programs) = self.requests.admission.programs_mut() {
                programs.set_instance(id, capacity, available);
            }
        }
    }

    /// Returns the measured size of an instance's cache in blocks if it differs from
    /// [`Router::cache_blocks`].
    pub fn measured_cache_blocks(&self, id: InstanceId) -> Option<u32> {
        let instance = self.state.instances.get(id.index())?;
        instance.full.measured(instance.cache_blocks)
    }

    /// Forgets the measured size of an instance's cache: its engine may be another one.
    pub(super) fn forget_full(&mut self, id: InstanceId) {
        self.state.index.take_full(id);
        if let Some(instance) = self.state.instances.get_mut(id.index()) {
            instance.full = FullCache::default();
        }
    }

    /// Returns the blocks that an instance's cache holds: as reported, unless its engine removes
    /// blocks at another number; `None`: unknown. A lower tier that reports removals is full, so
    /// the number of its blocks is its capacity; one without has no limit yet.
    fn cached_blocks_at_most(&self, id: InstanceId) -> Option<f64> {
        let instance = &self.state.instances[id.index()];
        let gpu = f64::from(instance.full.blocks(instance.cache_blocks)?);
        match self.state.tiers.get(Tier::Cpu).map_or(0, |tier| tier.blocks(id)) {
            0 => Some(gpu),
            blocks if self.state.tiers.removes(Tier::Cpu, id) => Some(gpu.max(f64::from(blocks))),
            _ => None,
        }
    }

    /// Sets how programs are followed; `None`: not at all. The programs known so far are kept if
    /// programs stay on.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_programs(&mut self, config: Option<ProgramConfig>) -> Result<(), CoreError> {
        self.requests.admission.set_programs(config.clone(), self.latest)?;
        self.state.config.programs = config;
        Ok(())
    }

    /// Switches admission by load on or off, or changes its settings. Requests that wait stay.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_admission(&mut self, config: Option<LoadConfig>) -> Result<(), CoreError> {
        self.requests.admission.set_load(config, self.latest)
    }

    /// Returns the numbers of admission by load, if it is on.
    pub fn admission(&self, now: Seconds) -> Option<LoadSnapshot> {
        let admission: &Admission = &self.requests.admission;
        admission.load_config()?;
        admission.snapshot(&self.room(self.latest.max(now)))
    }

    /// Returns the agent programs, if they are followed.
    pub fn programs(&self) -> Option<&Programs> {
        self.requests.admission.programs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;
    use crate::fleet::Role;
    use crate::plan::{Event, Usage};
    use crate::request::Allowed;
    use crate::router::RouterConfig;

    /// Routes a request that has just arrived. In between, the arrival's results are replaced by
    /// results that nobody would compute, and `between` may change the router. Returns the chosen
    /// slot and the predicted hit.
    fn route(between: impl Fn(&mut Router)) -> (u32, u32) {
        let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        let ids = ["a", "b"].map(|name| router.add_instance(name, Role::Both, None).unwrap());
        let chain = [1, 2, 3, 4];
        let request =
            Request { chain: &chain, prompt_tokens: 65, tokens_per_block: 16.0, ..Request::default() };
        router.route(&Request { home: Some(ids[1]), ..request.clone() }, 0.0).unwrap();
        router
            .set_admission(Some(LoadConfig { ttft_seconds: Some(100.0), ..LoadConfig::default() }))
            .unwrap();

        let (arrival, verdict) = router.arrive(&request, 1.0).unwrap().unwrap();
        assert!(matches!(verdict, Verdict::Free), "{verdict:?}");
        assert_eq!(router.context.arrived_roomy, [true, true]);
        router.context.hit_blocks.fill(2);
        router.context.arrived_roomy = vec![false, true];
        between(&mut router);
        let decision = router.route(&Request { arrival, ..request }, 1.0).unwrap();
        (decision.segment.instance.0, router.record(decision.id).unwrap().predicted_hit_tokens)
    }

    /// rust 7.9: the decision of a request that has just arrived uses the arrival's room and prefix
    /// matches. It computes both again if the router has changed.
    #[test]
    fn room_and_prefixes_are_computed_once_for_a_request() {
        assert_eq!(route(|_| {}), (1, 32));
        assert_eq!(route(|router| _ = router.fleet_mut()), (0, 0));
    }

    #[test]
    fn contexts_that_are_computed_again_make_new_tokens_dearer() {
        let policy = Registry::CORE.policy("total_delay", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        for name in ["a", "b"] {
            router.add_instance(name, Role::Both, None).unwrap();
        }
        router.set_programs(Some(ProgramConfig::default())).unwrap();
        let chain: Vec<u64> = (1..=8).collect();
        let mut now = 0.0;
        // Turns of one program: on `a`, where a block is new, and on `b`, which computes all again.
        let mut turn = |blocks: usize, instance: &str| {
            now += 1.0;
            let only: Allowed = [instance.into()].into_iter().collect();
            let request = Request {
                chain: &chain[..blocks],
                prompt_tokens: 1024 * blocks as u32 + 1,
                tokens_per_block: 1024.0,
                instances: Some(&only),
                ..Request::default()
            };
            let (arrival, _) = router.arrive(&request, now).unwrap().unwrap();
            let chosen = router.route(&Request { arrival, ..request }, now).unwrap();
            router.advance(chosen.ticket, Event::Finished(Usage::default()), now).unwrap();
            router.state.recompute_ratio
        };
        assert_eq!([turn(4, "a"), turn(5, "a"), turn(6, "a")], [0.0; 3]);
        assert_eq!(turn(7, "b"), 0.0, "the decision of this request does not know its own work");
        assert!(turn(8, "b") > 0.0);
    }
}

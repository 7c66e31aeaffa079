//! Calls about arrivals: which requests run now, which wait, and which are refused.
use crate::admission::{Admission, LoadConfig, LoadSnapshot, Released, Verdict};
use crate::error::CoreError;
use crate::ids::{ArrivalId, Seconds, Slot};
use crate::program::ledger::InstanceLedger;
use crate::program::{ProgramConfig, Programs};
use crate::request::Request;
use crate::router::listeners::admission as arrivals;
use crate::router::listeners::{Before, Listeners};
use crate::router::router::Router;

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
        if !self.listeners.admission.is_on() {
            return Ok(None);
        }
        let now = self.clock(now);
        self.read_workers(now);
        let Router { state, context, listeners, calls, .. } = self;
        let mut before = Before { state, context, calls: *calls, now };
        arrivals::arrive(&mut listeners.admission, &mut before, request).map(Some)
    }

    /// Returns whether [`Router::arrive`] matches prompts, so that the decision need not do it.
    pub fn matches_arrivals(&self) -> bool {
        self.listeners.admission.load_config().is_some()
    }

    /// Ends an arrival that was not routed, for example because its client left.
    pub fn drop_arrival(&mut self, id: ArrivalId, now: Seconds) {
        let now = self.clock(now);
        self.listeners.admission.remove(id, now);
    }

    /// Ends the agent programs of a session ([`Request::session`]), whose client sends no more
    /// requests. Returns how many had not ended; `None`: programs are not followed.
    pub fn finish_session(&mut self, session: u64, now: Seconds) -> Option<usize> {
        let now = self.clock(now);
        self.read_workers(now);
        self.listeners.admission.finish_session(session, now)
    }

    /// Runs the periodic work on arrivals: about twice a second, after the end of each request,
    /// and, while requests wait ([`Router::waiting`]), after each first token and every 50 ms.
    /// Returns the requests whose wait has ended.
    pub fn release_held(&mut self, now: Seconds) -> Released {
        let now = self.clock(now);
        if !self.listeners.admission.is_on() && self.waiting() == 0 {
            return Released::default();
        }
        self.read_workers(now);
        arrivals::release(&mut self.listeners.admission, &mut self.state, now)
    }

    /// Returns the number of requests that wait, or whose wait has ended since the last
    /// [`Router::release_held`].
    pub fn waiting(&self) -> usize {
        self.listeners.admission.waiting()
    }

    /// Returns what programs need in an instance's cache, if programs are followed.
    pub fn program_ledger(&self, id: Slot) -> Option<&InstanceLedger> {
        self.listeners.admission.followed()?.ledger(id)
    }

    /// Returns the measured size of an instance's cache in blocks if it differs from
    /// [`Router::cache_blocks`].
    pub fn measured_cache_blocks(&self, id: Slot) -> Option<u32> {
        self.state.caches.read().full(id).measured(self.cache_blocks(id))
    }

    /// Sets how programs are followed; `None`: not at all. The programs known so far are kept if
    /// programs stay on.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_programs(&mut self, config: Option<ProgramConfig>) -> Result<(), CoreError> {
        let Listeners { admission, replicas, .. } = &mut self.listeners;
        admission.set_programs(config.clone(), self.latest)?;
        admission.followed_mut().into_iter().for_each(|programs| replicas.count_all_programs(programs));
        self.state.config.programs = config;
        Ok(())
    }

    /// Switches admission by load on or off, or changes its settings. Requests that wait stay.
    ///
    /// # Errors
    /// `BadValue` for a setting out of its range.
    pub fn set_admission(&mut self, config: Option<LoadConfig>) -> Result<(), CoreError> {
        let is_on = config.is_some();
        self.listeners.admission.set_load(config, self.latest)?;
        self.state.ledger.answers.keep_mean(is_on);
        Ok(())
    }

    /// Gives waiting requests their present levels; those without one get level 0. A change of
    /// settings calls it.
    pub fn set_levels(&mut self, level_of: impl Fn(ArrivalId) -> i8) {
        self.listeners.admission.set_levels(level_of);
    }

    /// Returns the numbers of admission by load, if it is on.
    pub fn admission(&self, now: Seconds) -> Option<LoadSnapshot> {
        let admission: &Admission = &self.listeners.admission;
        admission.load_config()?;
        let now = self.latest.max(now);
        admission.snapshot(&arrivals::room(admission, &self.state, now), now)
    }

    /// Returns the agent programs, if they are followed.
    pub fn programs(&self) -> Option<&Programs> {
        self.listeners.admission.programs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;
    use crate::fleet::Role;
    use crate::plan::{Event, Usage};
    use crate::program::tests::Returning;
    use crate::program::{ProgramMode, ProgramRules};
    use crate::request::{Allowed, Tenant};
    use crate::router::{Carry, Priorities, RouterConfig};
    use std::sync::Arc;

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
        router.context.matched.hit_blocks.fill(2);
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

    /// With admission by load and an order by service, one counter counts each tenant: a request
    /// goes to its engine with the place with which it left the queue.
    #[test]
    fn a_request_that_was_admitted_is_not_charged_again_for_its_order() {
        let mut router = ordered(LoadConfig::default());
        let arrive = |router: &mut Router, tenant| {
            let (arrival, verdict) = router.arrive(&of_tenant(tenant), 0.0).unwrap().unwrap();
            assert_eq!(verdict, Verdict::Free);
            Request { arrival, ..of_tenant(tenant) }
        };
        let route = |router: &mut Router, request: &Request<'_>| {
            let decision = router.route(request, 0.0).unwrap();
            (decision.ticket, decision.priority.unwrap().value)
        };
        let end = |router: &mut Router, ticket| {
            let usage = Usage { output_tokens: Some(30), ..Usage::default() };
            router.advance(ticket, Event::Finished(usage), 1.0).unwrap();
        };
        // In the order in which they left the queue, and not in that of their decisions.
        let first = arrive(&mut router, 1);
        let second = arrive(&mut router, 1);
        let (late, start) = route(&mut router, &second);
        assert_eq!(start, 100_000);
        let (early, start) = route(&mut router, &first);
        assert_eq!(start, 0);
        // Prompts and answers are charged once: 2 x 100 + 2 x 2 x 30.
        end(&mut router, early);
        end(&mut router, late);
        let third = arrive(&mut router, 1);
        let (third, start) = route(&mut router, &third);
        assert_eq!(start, 320_000);
        // Service still counts without admission. A new tenant begins at the least place in flight.
        router.set_admission(None).unwrap();
        assert_eq!(route(&mut router, &of_tenant(2)).1, 320_000);
        end(&mut router, third);
        assert_eq!(route(&mut router, &of_tenant(1)).1, 420_000);
    }

    /// Engines' queues have no levels: there, a tenant with requests of several levels has one
    /// share.
    #[test]
    fn levels_give_a_tenant_no_further_shares_of_the_engines() {
        let mut router = ordered(LoadConfig { aging_seconds: Some(30.0), ..LoadConfig::default() });
        let starts = [2, 2, -2, 1].map(|level| {
            let request = Request { level, ..of_tenant(1) };
            let (arrival, _) = router.arrive(&request, 0.0).unwrap().unwrap();
            router.route(&Request { arrival, ..request }, 0.0).unwrap().priority.unwrap().value
        });
        assert_eq!(starts, [0, 100_000, 200_000, 300_000]);
    }

    /// Requests whose clients leave before the decision cost their tenant nothing.
    #[test]
    fn a_request_that_no_engine_got_is_not_charged() {
        let mut router = ordered(LoadConfig::default());
        let place = |router: &mut Router, tenant| {
            let (arrival, _) = router.arrive(&of_tenant(tenant), 0.0).unwrap().unwrap();
            router.route(&Request { arrival, ..of_tenant(tenant) }, 0.0).unwrap().priority.unwrap().value
        };
        assert_eq!(place(&mut router, 2), 0);
        for _ in 0..5 {
            let (arrival, _) = router.arrive(&of_tenant(1), 0.0).unwrap().unwrap();
            router.drop_arrival(arrival.unwrap(), 0.0);
        }
        assert_eq!(place(&mut router, 1), 0);
        assert_eq!(place(&mut router, 1), 100_000);
    }

    /// A router of an instance, with this admission, whose engines' queues follow service.
    fn ordered(config: LoadConfig) -> Router {
        let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        router.add_instance("a", Role::Both, None).unwrap();
        router.set_admission(Some(config)).unwrap();
        router.set_priorities(Some(Priorities::Vtc)).unwrap();
        router
    }

    fn of_tenant(id: u64) -> Request<'static> {
        Request { prompt_tokens: 100, tenant: Tenant { id, ..Tenant::NOBODY }, ..Request::default() }
    }

    const CACHE_BLOCKS: u32 = 512;

    /// A router of some instances with admission of programs, each always at its instance.
    fn admitting<const N: usize>(roles: [Role; N]) -> (Router, [Slot; N]) {
        let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        let mut number = 0;
        let ids = roles.map(|role| {
            number += 1;
            router.add_instance(&format!("i{number}"), role, Some(CACHE_BLOCKS)).unwrap()
        });
        let (mode, rules) = (ProgramMode::Admit, Some(Arc::new(Returning) as Arc<dyn ProgramRules>));
        router.set_programs(Some(ProgramConfig { mode, rules, ..ProgramConfig::default() })).unwrap();
        (router, ids)
    }

    /// A prompt of a program with these blocks of 16 tokens.
    fn prompt(program: u64, blocks: u64) -> Vec<u64> {
        (0..blocks).map(|block| (program << 32 | block).wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect()
    }

    fn asked(chain: &[u64]) -> Request<'_> {
        let prompt_tokens = 16 * chain.len() as u32 + 1;
        Request { chain, prompt_tokens, tokens_per_block: 16.0, ..Request::default() }
    }

    fn arrive(router: &mut Router, chain: &[u64], now: Seconds) -> (Option<ArrivalId>, Verdict) {
        router.arrive(&asked(chain), now).unwrap().unwrap()
    }

    fn is_held(verdict: Verdict) -> bool {
        matches!(verdict, Verdict::Held { .. })
    }

    /// Without an instance that takes requests, no request is held for a cache: the decision says
    /// that there is none.
    #[test]
    fn programs_hold_nothing_while_no_instance_takes_requests() {
        let (mut router, ids) = admitting([Role::Both; 2]);
        let chains = [1, 2, 3, 4].map(|program| prompt(program, 300));
        for chain in &chains[..2] {
            let (arrival, _) = arrive(&mut router, chain, 0.0);
            router.route(&Request { arrival, ..asked(chain) }, 0.0).unwrap();
        }
        let (held, verdict) = arrive(&mut router, &chains[2], 1.0);
        assert!(is_held(verdict), "{verdict:?}");
        let healthy = |router: &mut Router, healthy: bool| {
            ids.iter().for_each(|id| router.fleet_mut().set_healthy(*id, healthy).unwrap());
        };
        healthy(&mut router, false);
        let (arrival, verdict) = arrive(&mut router, &chains[3], 2.0);
        assert_eq!(verdict, Verdict::Free);
        let refused = router.route(&Request { arrival, ..asked(&chains[3]) }, 2.0).unwrap_err();
        assert!(matches!(refused, CoreError::NoInstance(_)), "{refused:?}");
        // The held one goes the same way.
        let released = router.release_held(2.5);
        assert_eq!((released.ready.len(), released.ready[0].0), (1, held.unwrap()));
        let refused = router.route(&Request { arrival: held, ..asked(&chains[2]) }, 2.5).unwrap_err();
        assert!(matches!(refused, CoreError::NoInstance(_)), "{refused:?}");
        assert_eq!((router.waiting(), router.programs().unwrap().states()), (0, [2, 0, 0, 0]));
        healthy(&mut router, true);
        router.release_held(3.0);
        let verdict = arrive(&mut router, &chains[3], 3.0).1;
        assert!(is_held(verdict), "{verdict:?}");
    }

    #[test]
    fn programs_run_on_decode_instances_if_no_other_takes_prompts() {
        let (mut router, [prefills, decodes]) = admitting([Role::Prefill, Role::Decode]);
        router.fleet_mut().set_healthy(prefills, false).unwrap();
        let chains = [1, 2].map(|program| prompt(program, 300));
        let (arrival, verdict) = arrive(&mut router, &chains[0], 0.0);
        assert_eq!(verdict, Verdict::Run(decodes));
        let decision = router.route(&Request { arrival, ..asked(&chains[0]) }, 0.0).unwrap();
        assert_eq!(decision.segment.instance, decodes);
        let verdict = arrive(&mut router, &chains[1], 1.0).1;
        assert!(is_held(verdict), "its cache is full: {verdict:?}");
    }

    /// A request that moves takes its program along, and its tokens.
    #[test]
    fn a_program_is_where_its_request_has_moved() {
        let (mut router, ids) = admitting([Role::Both; 2]);
        let chain = prompt(1, 310);
        let (arrival, _) = arrive(&mut router, &chain[..300], 0.0);
        let decision = router.route(&Request { arrival, ..asked(&chain[..300]) }, 0.0).unwrap();
        let source = decision.segment.instance;
        let target = ids[1 - source.index()];
        let tokens = |router: &Router, id: Slot| router.program_ledger(id).unwrap().expected_tokens();
        router.advance(decision.ticket, Event::FirstToken, 1.0).unwrap();
        router.begin_move(decision.ticket, target, Carry::Recompute, 1.0).unwrap();
        assert!(tokens(&router, source) > 4800.0);
        let moved = router.advance(decision.ticket, Event::Moved, 2.0).unwrap().unwrap();
        assert_eq!((moved.instance, tokens(&router, source)), (target, 0.0));
        assert!(tokens(&router, target) > 4800.0);
        router.advance(decision.ticket, Event::Finished(Usage::default()), 3.0).unwrap();
        assert_eq!(arrive(&mut router, &chain, 4.0).1, Verdict::Run(target));
    }

    #[test]
    fn a_sheddable_request_beside_full_caches_counts_as_refused() {
        let (mut router, _) = admitting([Role::Both]);
        let chains = [1, 2].map(|program| prompt(program, 300));
        let (arrival, _) = arrive(&mut router, &chains[0], 0.0);
        router.route(&Request { arrival, ..asked(&chains[0]) }, 0.0).unwrap();
        let request = Request { sheddable: true, ..asked(&chains[1]) };
        let (arrival, verdict) = router.arrive(&request, 1.0).unwrap().unwrap();
        let by_programs =
            matches!(verdict, Verdict::Refused { by: crate::admission::RefusedFor::Programs, .. });
        assert!(by_programs && arrival.is_none(), "{verdict:?}");
        let counters = router.programs().unwrap().counters();
        assert_eq!((counters.held, counters.refused, router.waiting()), (0, 1, 0));
    }

    /// Its next prompt goes to the prefill instance, and so the program keeps its place there.
    #[test]
    fn a_move_between_decode_instances_takes_no_place_away() {
        let (mut router, [prefills, decodes, other]) = admitting([Role::Prefill, Role::Decode, Role::Decode]);
        let chain = prompt(1, 310);
        let (arrival, _) = arrive(&mut router, &chain[..300], 0.0);
        let decision = router.route(&Request { arrival, ..asked(&chain[..300]) }, 0.0).unwrap();
        assert_eq!(decision.segment.instance, prefills);
        let next = router.advance(decision.ticket, Event::Finished(Usage::default()), 1.0).unwrap().unwrap();
        let target = if next.instance == decodes { other } else { decodes };
        router.advance(decision.ticket, Event::FirstToken, 1.0).unwrap();
        router.begin_move(decision.ticket, target, Carry::Kv, 1.0).unwrap();
        let moved = router.advance(decision.ticket, Event::Moved, 2.0).unwrap().unwrap();
        assert_eq!(moved.instance, target);
        assert!(router.program_ledger(prefills).unwrap().expected_tokens() > 4800.0);
        let verdict = arrive(&mut router, &prompt(2, 300), 3.0).1;
        assert!(is_held(verdict), "{verdict:?}");
        router.advance(decision.ticket, Event::Finished(Usage::default()), 4.0).unwrap();
        assert_eq!(arrive(&mut router, &chain, 5.0).1, Verdict::Run(prefills));
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

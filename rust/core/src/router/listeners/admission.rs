//! Admission and agent programs as a listener ([`crate::admission`]): a request is admitted before
//! its decision, completed for it, and followed from its placement to its end.
use super::listener::{Before, Ended, Listener, Placement};
use crate::admission::{Admission, Asked, Released, Room, Verdict};
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::ids::{ArrivalId, Seconds, Slot};
use crate::indicators::Indicator;
use crate::kv::tier::Tier;
use crate::levels::LEVELS;
use crate::priority::Priority;
use crate::program::{Arrival, Followed, Work};
use crate::record::DecisionRecord;
use crate::request::Request;
use crate::router::caches::Caches;
use crate::router::context::{Arrived, DecisionContext};
use crate::router::state::State;
use crate::router::tickets::{Kept, TicketState};
use crate::wide::largest;
use smallvec::SmallVec;
use std::borrow::Cow;

/// Reported use of a KV cache from which an instance has no room: further requests would make its
/// engine preempt others.
const FULL_USAGE: f64 = 0.95;
/// Time after an arrival for which its decision uses what the arrival computed.
const SAME_SECONDS: Seconds = 0.01;
/// Slots whose capacities are read at a time: others wait for the caches for microseconds.
const SLOTS: usize = 64;

impl Listener for Admission {
    fn placed(&mut self, placement: &Placement<'_>, record: &mut DecisionRecord, kept: &mut Kept) {
        let Placement { state, request, first, hit_tokens, now, .. } = *placement;
        let new_tokens = request.prompt_tokens.saturating_sub(hit_tokens as u32);
        if let Some(place) = self.engine_place(request, new_tokens, &mut kept.place) {
            let value = i64::try_from(place.start).unwrap_or(i64::MAX);
            record.priority = Some(Priority { value, boost_seconds: 0.0 });
        }
        let Some(id) = request.arrival else { return };
        record.program = self.note(id, now);
        record.level = self.level_note(id, now).map(Box::new);
        let work = || {
            let new_tokens = f64::from(request.prompt_tokens) - hit_tokens;
            let seconds = state.computing_seconds(first.index(), hit_tokens, new_tokens, &mut None);
            let hit_seconds = state.computing_seconds(first.index(), 0.0, hit_tokens, &mut None);
            Work { new_tokens, hit_tokens, seconds, hit_seconds }
        };
        self.placed_first(id, first, work, now);
    }

    fn placed_again(&mut self, ticket: &TicketState, now: Seconds) {
        if let Some(id) = ticket.arrival {
            Admission::placed(self, id, ticket.open.segment.instance, now);
        }
    }

    fn ended(&mut self, ended: &Ended<'_>) {
        if let Some(id) = ended.ticket.arrival {
            Admission::ended(self, id, ended.made, ended.usage.finish, ended.now);
        }
        if let Some(place) = ended.ticket.kept.place {
            self.end_place(place, ended.made.max(ended.ticket.open.entry.output_tokens as u32));
        }
    }

    fn member(&mut self, member: Member, fleet: &Fleet) {
        Admission::member(self, member, fleet);
    }
}

/// Records an arriving request (`Router::arrive`).
///
/// # Errors
/// `BadValue` for an invalid request.
pub fn arrive(
    admission: &mut Admission,
    before: &mut Before<'_>,
    request: &Request<'_>,
) -> Result<(Option<ArrivalId>, Verdict), CoreError> {
    request.check()?;
    if !LEVELS.contains(&request.level) {
        return Err(CoreError::BadValue {
            what: "level".into(),
            got: request.level.to_string(),
            expected: format!("{} to {}", LEVELS.start(), LEVELS.end()),
        });
    }
    let Before { state, context, calls, now } = before;
    let now = *now;
    if let Some(programs) = admission.followed_mut() {
        // Before the first request, the tokens of a block are unknown.
        if programs.lacks_instances(state.fleet.slots()) || programs.programs().tokens_per_block() <= 0.0 {
            update_capacities(programs, state, request.tokens_per_block, now);
        }
    }
    let prompt = f64::from(request.prompt_tokens);
    let mut asked = Asked {
        tenant: request.tenant.id,
        weight: request.tenant.weight,
        new_tokens: prompt,
        prefill_seconds: 0.0,
        answer_tokens: state.ledger.answers.mean_tokens(),
        ttft_seconds: request.ttft_slo_seconds,
        level: request.level,
        sheddable: request.sheddable,
    };
    let mut room = Room { served: able(state).1 > 0, ..Room::default() };
    if admission.load_config().is_some() {
        state.match_prefix(context, request);
        let most = largest(&context.matched.hit_blocks);
        asked.new_tokens = prompt - state.saved_tokens(request, most);
        asked.prefill_seconds = alone_seconds(state, prompt - asked.new_tokens, asked.new_tokens);
        room = self::room(admission, state, now);
    }
    context.arrived_roomy.clear();
    if let Some(most) = admission.room_seconds() {
        let is_open = |slot: usize| room.is_open(slot, most);
        context.arrived_roomy.extend((0..room.waits.len()).map(is_open));
    }
    let session = request.session.filter(|_| admission.programs().is_some_and(|all| all.config().sessions));
    let turn = Arrival {
        chain: request.chain,
        prompt_tokens: request.prompt_tokens,
        tokens_per_block: request.tokens_per_block,
        session,
        tenant: request.tenant.id,
        weight: request.tenant.weight,
        level: request.level,
        last: request.session_final,
        sheddable: request.sheddable,
        worker: 0,
    };
    let (id, verdict) = admission.arrive(&turn, asked, &mut room, now);
    let matched = id.filter(|_| admission.load_config().is_some());
    let chain = (request.chain.len(), request.chain.last().copied());
    context.arrived = matched.map(|id| Arrived { id, calls: *calls, at: now, chain });
    Ok((id, verdict))
}

/// Returns a request with its arrival and its program's instance, and sets the instances with room
/// for it. A caller that only observes programs may route requests that have not arrived.
///
/// # Errors
/// `BadValue` for an invalid request, or for one without an arrival if requests are admitted.
#[inline]
pub fn prepare<'r>(
    admission: &mut Admission,
    before: &mut Before<'_>,
    request: Cow<'r, Request<'r>>,
) -> Result<Cow<'r, Request<'r>>, CoreError> {
    before.state.recompute_ratio = admission.recompute_ratio();
    before.context.roomy.clear();
    before.context.is_matched = false;
    if admission.is_on() { with_arrival(admission, before, request) } else { Ok(request) }
}

fn with_arrival<'r>(
    admission: &mut Admission,
    before: &mut Before<'_>,
    request: Cow<'r, Request<'r>>,
) -> Result<Cow<'r, Request<'r>>, CoreError> {
    let Before { state, context, calls, now } = before;
    if let Some(id) = request.arrival {
        let home = admission.home(id);
        // The call for this decision follows its arrival at once: nothing but cache events, of some
        // milliseconds, may have come between.
        let chain = (request.chain.len(), request.chain.last().copied());
        let known = context.arrived.take().is_some_and(|arrived| {
            let same = Arrived { id, calls: *calls - 1, chain, ..arrived };
            arrived == same && *now - arrived.at < SAME_SECONDS
        });
        context.is_matched = known;
        if let (None, Some(most)) = (home, admission.room_seconds()) {
            let DecisionContext { roomy, arrived_roomy, .. } = &mut **context;
            if known && arrived_roomy.len() == state.fleet.slots() {
                std::mem::swap(roomy, arrived_roomy);
            } else {
                let room = room(admission, state, *now);
                roomy.extend((0..room.waits.len()).map(|slot| room.is_open(slot, most)));
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
    let (arrival, _) = arrive(admission, before, &request)?;
    // Programs are only observed: the policy chooses.
    Ok(Cow::Owned(Request { arrival, home: None, ..request.into_owned() }))
}

/// Lets requests run whose wait has ended (`Router::release_held`).
pub fn release(admission: &mut Admission, state: &mut State, now: Seconds) -> Released {
    if let Some(programs) = admission.followed_mut() {
        update_capacities(programs, state, programs.programs().tokens_per_block(), now);
    }
    let mut room = match admission.load_config() {
        Some(_) => room(admission, state, now),
        None => Room { served: able(state).1 > 0, ..Room::default() },
    };
    admission.release(&mut room, now)
}

/// Returns the instances' room at `now`.
pub fn room(admission: &Admission, state: &State, now: Seconds) -> Room {
    let (decoding, context) = (state.ledger.get(Indicator::RBs), state.ledger.get(Indicator::DecodeTokens));
    let reported = state.ledger.get(Indicator::ReportedWaiting);
    let usage = state.ledger.get(Indicator::KvUsage);
    let rates = state.ledger.get(Indicator::PrefillTokensPerSecond);
    let rate = state.mean_prefill_rate();
    let config = admission.load_config();
    let max_tpot = config.and_then(|config| config.tpot_seconds).unwrap_or(f64::INFINITY);
    let (able, count) = able(state);
    let wait = |(slot, able): (usize, &bool)| {
        if !able {
            return f64::INFINITY;
        }
        let queued = state.ledger.queued_on(slot, now);
        let step = state.ttft(slot, queued, 0.0, 0.0, decoding[slot], context[slot], rate);
        let learned = if rates[slot] > 0.0 { queued.tokens / rates[slot] } else { 0.0 };
        let predicted = if queued.tokens > 0.0 { step.max(learned) } else { 0.0 };
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
    Room { served: count > 0, waits, used, prior_rate: rate * count.max(1) as f64 }
}

/// Returns which instances take prompts, and their number. If none does and `colocate` allows it,
/// decode instances take whole requests.
fn able(state: &State) -> (&[bool], usize) {
    match state.fleet.eligible_count() {
        0 if state.config.colocate => (state.fleet.decoders(), state.fleet.decoder_count()),
        count => (state.fleet.eligible(), count),
    }
}

/// Returns the seconds of a prefill that runs alone on the fastest instance that can take it, with
/// `hit` cached and `new` uncached tokens.
fn alone_seconds(state: &State, hit: f64, new: f64) -> Seconds {
    let slots = able(state).0.iter().enumerate().filter(|(_, able)| **able);
    let models = slots.filter_map(|(slot, _)| state.step_time_of(slot));
    let fastest = models.map(|model| model.prefill_seconds(hit, new)).min_by(f64::total_cmp);
    fastest.unwrap_or_else(|| new / state.mean_prefill_rate())
}

/// Passes the capacities of all instances to the programs. Programs may wait for other workers, so
/// the caches are free by then.
fn update_capacities(programs: &mut Followed, state: &State, tokens_per_block: f64, now: Seconds) {
    let able = able(state).0;
    for first in (0..able.len()).step_by(SLOTS) {
        let mut caches = state.caches.write();
        let capacity = |slot: usize| {
            let id = Slot(slot as u32);
            caches.note_full(id, now);
            cached_blocks_at_most(&caches, state, id).map(|blocks| blocks * tokens_per_block.max(1.0))
        };
        let capacities: SmallVec<[_; SLOTS]> = (first..able.len().min(first + SLOTS)).map(capacity).collect();
        drop(caches);
        for (slot, capacity) in (first..).zip(capacities) {
            programs.set_instance(Slot(slot as u32), capacity, able[slot], now);
        }
    }
}

/// Returns the blocks that an instance's cache holds: as reported, unless its engine removes
/// blocks at another number; `None`: unknown. A lower tier that reports removals is full, so
/// the number of its blocks is its capacity; one without has no limit yet.
fn cached_blocks_at_most(caches: &Caches, state: &State, id: Slot) -> Option<f64> {
    let gpu = f64::from(caches.full(id).blocks(state.instances[id.index()].cache_blocks)?);
    match caches.index(Tier::Cpu).map_or(0, |tier| tier.blocks(id)) {
        0 => Some(gpu),
        blocks if caches.removes(Tier::Cpu, id) => Some(gpu.max(f64::from(blocks))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Registry;
    use crate::board::{BYTES, Board, Memory};
    use crate::estimate::StepTime;
    use crate::fleet::Role;
    use crate::program::ProgramConfig;
    use crate::router::caches::check_free;
    use crate::router::{Router, RouterConfig};
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    fn model(prefill_seconds_per_token: Seconds) -> StepTime {
        StepTime {
            fixed_seconds: 0.01,
            decode_seconds_per_sequence: 1e-4,
            decode_seconds_per_context_token: 1e-6,
            prefill_seconds_per_token,
            prefill_seconds_per_attention_pair: 0.0,
            max_batch_tokens: 2048.0,
            max_sequences: f64::INFINITY,
        }
    }

    /// A fleet whose instances, in the order of joining, have these roles and seconds per token.
    fn fleet(instances: &[(Role, Seconds)]) -> Router {
        let policy = Registry::CORE.policy("least_requests", &[]).unwrap();
        let mut router = Router::new(policy, RouterConfig::default()).unwrap();
        for (i, (role, seconds)) in instances.iter().enumerate() {
            let id = router.add_instance(&format!("e{i}"), *role, None).unwrap();
            router.set_step_time(id, Some(model(*seconds))).unwrap();
        }
        router
    }

    /// Memory that no thread uses while it holds caches.
    struct Uncached(Box<[AtomicU64]>);

    impl Memory for Uncached {
        fn words(&self) -> &[AtomicU64] {
            check_free();
            &self.0
        }
    }

    #[test]
    fn the_caches_are_free_while_capacities_are_published() {
        let memory = (0..BYTES / size_of::<u64>()).map(|_| AtomicU64::new(0)).collect();
        let board = Arc::new(Board::new(Box::new(Uncached(memory)), 0).unwrap());
        let mut router = fleet(&[(Role::Both, 1e-3); 3]);
        router.set_programs(Some(ProgramConfig::default())).unwrap();
        router.join(board.clone(), 1).unwrap();
        router.publish_all(0.0);
        let before = board.log_end();
        router.release_held(1.0);
        let ledger = |id| router.listeners.admission.followed().unwrap().ledger(Slot(id));
        assert!(board.log_end() > before && (0..3).all(|id| ledger(id).is_some()));
    }

    #[test]
    fn a_prompt_takes_what_it_takes_on_the_fastest_instance_that_can_take_it() {
        let (slow, fast) = (1e-3, 1e-4);
        let alone = |router: &Router| alone_seconds(&router.state, 0.0, 1000.0);
        for order in [[slow, fast], [fast, slow]] {
            let mut router = fleet(&order.map(|seconds| (Role::Both, seconds)));
            assert_eq!(alone(&router), 0.1, "{order:?}");
            let faster = Slot(u32::from(order[0] == slow));
            router.fleet_mut().set_healthy(faster, false).unwrap();
            assert_eq!(alone(&router), 1.0, "{order:?}");
        }
        // A decode instance computes no prompts while another instance does.
        let mut router = fleet(&[(Role::Decode, fast), (Role::Prefill, slow)]);
        assert_eq!(alone(&router), 1.0);
        router.fleet_mut().set_draining(Slot(1), true).unwrap();
        assert_eq!(alone(&router), 0.1);
    }
}

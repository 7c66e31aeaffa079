//! The hot-spot guard as a listener ([`crate::guard`]): it counts the prefixes of placed requests.
use super::listener::{Listener, Placement};
use crate::fleet::{Fleet, Member};
use crate::guard::{Guard, GuardConfig, GuardEvent};
use crate::ids::Seconds;
use crate::record::DecisionRecord;
use crate::router::state::State;
use crate::router::tickets::Kept;
use crate::wide::largest;

impl Listener for Guard {
    fn placed(&mut self, placement: &Placement<'_>, _: &mut DecisionRecord, _: &mut Kept) {
        let Placement { state, context, request, first, now, .. } = placement;
        if self.config().on && state.first_of(request.arm).guarded {
            let matched = largest(&context.matched.hit_blocks);
            let (scores, eligible) = (&context.first.scores, &context.first.eligible);
            self.observe(*now, request.chain, matched, scores, eligible, *first);
        }
    }

    fn member(&mut self, member: Member, _: &Fleet) {
        if let Member::Removed(id) = member {
            self.instance_removed(id);
        }
    }
}

/// Turns the guard on or off. A guard that was turned off stays until its next tick, which returns
/// the releases of its alarms.
pub fn switch(guard: &mut Option<Guard>, on: bool, config: GuardConfig) {
    match guard {
        Some(guard) if guard.config().on != on => guard.set_on(on),
        None if on => *guard = Some(Guard::new(GuardConfig { on, ..config }).expect("checked before")),
        _ => {}
    }
}

/// Looks for hot prefixes, by their eligible holders. Returns the events since the last call.
pub fn tick(guard: &mut Option<Guard>, state: &State, now: Seconds) -> Vec<GuardEvent> {
    let Some(on) = guard else { return Vec::new() };
    let events = look(on, state, now);
    guard.take_if(|guard| !guard.config().on);
    events
}

fn look(guard: &mut Guard, state: &State, now: Seconds) -> Vec<GuardEvent> {
    let (caches, eligible) = (state.caches.read(), state.fleet.eligible());
    guard.tick(now, state.fleet.eligible_count(), |hash, out| {
        let before = out.len();
        caches.gpu().holders(hash, out);
        let mut place = before;
        for i in before..out.len() {
            if eligible[out[i].index()] {
                out.swap(place, i);
                place += 1;
            }
        }
        out.truncate(place);
    })
}

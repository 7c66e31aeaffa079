//! The hot-spot guard as a listener ([`crate::guard`]): it counts the prefixes of placed requests.
use super::listener::{Listener, Placement};
use crate::fleet::Member;
use crate::guard::{Guard, GuardEvent};
use crate::ids::Seconds;
use crate::record::DecisionRecord;
use crate::router::state::State;
use crate::router::tickets::Kept;

impl Listener for Guard {
    fn placed(&mut self, placement: &Placement<'_>, _: &mut DecisionRecord, _: &mut Kept) {
        let Placement { state, context, request, first, now, .. } = placement;
        if self.config().on && state.first_of(request.arm).guarded {
            let matched = context.hit_blocks.iter().copied().max().unwrap_or(0);
            let (scores, eligible) = (&context.first.scores, &context.first.eligible);
            self.observe(*now, request.chain, matched, scores, eligible, *first);
        }
    }

    fn member(&mut self, member: Member) {
        if let Member::Removed(id) = member {
            self.instance_removed(id);
        }
    }
}

/// Looks for hot prefixes, by their eligible holders. Returns the events since the last call.
pub fn tick(guard: &mut Guard, state: &State, now: Seconds) -> Vec<GuardEvent> {
    let (index, eligible) = (&state.index, state.fleet.eligible());
    guard.tick(now, state.fleet.eligible_count(), |hash, out| {
        let before = out.len();
        index.holders(hash, out);
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

//! The choice of an instance: eligible slots, indicators, scores, best slot.
use crate::error::CoreError;
use crate::fleet::Role;
use crate::guard::Restriction;
use crate::ids::{InstanceId, Seconds};
use crate::indicators::{Indicator, Indicators, Snapshot};
use crate::plan::Cuts;
use crate::policy::{Scores, select};
use crate::request::{Arm, Request};
use crate::router::context::{DecisionContext, Selection};
use crate::router::parts::Turn;
use crate::router::state::{Selector, State};

impl State {
    /// Returns the policy of a turn for requests of an arm.
    fn selector(&self, turn: Turn, arm: Arm) -> &Selector {
        match turn {
            Turn::First => self.first_of(arm),
            Turn::Later | Turn::Peer(_) => &self.later,
        }
    }

    /// Chooses the instance of a segment by the policy of its turn, without the slots in `failed`.
    /// `handoff`: expected seconds until a follow-up segment starts to decode.
    pub fn choose(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        turn: Turn,
        failed: &[u32],
        handoff: Option<Seconds>,
        now: Seconds,
    ) -> Result<InstanceId, CoreError> {
        let selector = self.selector(turn, request.arm);
        let eligible_count = match request.instance {
            Some(name) if turn == Turn::First => self.admit_only(context, name, failed)?,
            _ => self.admit(context, turn, failed),
        };
        if eligible_count == 0 {
            return Err(self.nobody(turn));
        }
        let eligible_count = match turn {
            Turn::First if !context.roomy.is_empty() && failed.is_empty() => {
                keep_roomy(&mut context.first.eligible, &context.roomy, eligible_count)
            }
            _ => eligible_count,
        };
        let eligible = &mut context.first.eligible;
        let home = request.home.filter(|home| turn == Turn::First && eligible[home.index()]);
        let eligible_count = if let Some(home) = home {
            eligible.fill(false);
            eligible[home.index()] = true;
            1
        } else {
            eligible_count
        };
        self.derive(context, request, selector.reads, eligible_count, handoff, now);
        self.derive_declared(context, &selector.declared, now);
        let DecisionContext { first, later, derived, declared, rng, restriction, unscored, .. } = context;
        let (selection, restriction) = match turn {
            Turn::First if home.is_some() => (first, Restriction::Free),
            Turn::First => {
                *restriction = match selector.guarded {
                    true => self.guard.restrict(request.chain, &mut first.eligible),
                    false => Restriction::Free,
                };
                (first, *restriction)
            }
            Turn::Later | Turn::Peer(_) => (later, Restriction::Free),
        };
        let Selection { scores, eligible } = selection;
        let excluded = if let Restriction::Filtered(out) = restriction { out } else { 0 };
        let slots = self.fleet.slots();
        let snapshot = Snapshot {
            columns: Indicators::new(self.ledger.columns(), derived)
                .with_declared(declared)
                .with_groups(self.fleet.groups()),
            eligible,
            eligible_count: eligible_count - excluded,
            name_hashes: self.fleet.name_hashes(),
            ordinal: selector.made,
            session: request.session,
        };
        scores.reset(slots);
        if restriction == Restriction::BalanceOnly {
            scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        } else {
            selector.policy.score(&snapshot, rng, scores)?;
            scores.check(slots, &selector.policy.spec().name)?;
        }
        leave_ineligible(scores, &snapshot);
        if let Some(best) = select::best(scores, snapshot.eligible, rng) {
            return Ok(InstanceId(best as u32));
        }
        // The fleet has an eligible instance, so the request must not fail: the fewest requests
        // win.
        *unscored += 1;
        scores.reset(slots);
        scores.unscored = true;
        scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        leave_ineligible(scores, &snapshot);
        let best = select::best(scores, snapshot.eligible, rng);
        best.map(|best| InstanceId(best as u32)).ok_or_else(|| self.nobody(turn))
    }

    /// Marks the slots that can take a segment; returns their number. If no instance accepts
    /// prompts and `colocate` allows it, decode instances take whole requests.
    pub fn admit(&self, context: &mut DecisionContext, turn: Turn, failed: &[u32]) -> usize {
        let fleet = &self.fleet;
        let (eligible, able, count) = match turn {
            Turn::First => (&mut context.first.eligible, fleet.eligible(), fleet.eligible_count()),
            Turn::Later => (&mut context.later.eligible, fleet.decoders(), fleet.decoder_count()),
            Turn::Peer(_) => (&mut context.later.eligible, fleet.eligible(), fleet.eligible_count()),
        };
        let mut mark = |able: &[bool], count: usize| {
            eligible.clear();
            eligible.extend_from_slice(able);
            failed.iter().for_each(|slot| eligible[*slot as usize] = false);
            if let Turn::Peer(first) = turn {
                // Engines of both instances must be able to transfer KV, and prefill-only instances
                // do not decode.
                for (slot, eligible) in eligible.iter_mut().enumerate() {
                    let id = InstanceId(slot as u32);
                    *eligible &= first != Some(id)
                        && fleet.role(id) == Role::Both
                        && self.instances[slot].cuts > Cuts::Nowhere;
                }
                return eligible.iter().filter(|e| **e).count();
            }
            if failed.is_empty() { count } else { eligible.iter().filter(|e| **e).count() }
        };
        match mark(able, count) {
            0 if turn == Turn::First && self.config.colocate => mark(fleet.decoders(), fleet.decoder_count()),
            count => count,
        }
    }

    /// Marks the slot of the only instance that may take a request; returns 1.
    fn admit_only(
        &self,
        context: &mut DecisionContext,
        name: &str,
        failed: &[u32],
    ) -> Result<usize, CoreError> {
        let refused = |why: &str| CoreError::NoInstance(format!("instance {name:?} {why}"));
        let id = self.fleet.find(name).map_err(|_| refused("is not in the router"))?;
        match self.fleet.state(id) {
            _ if failed.contains(&id.0) => return Err(refused("has failed the request")),
            (false, ..) => return Err(refused("is not healthy")),
            (_, true, _) => return Err(refused("is draining; it accepts no new requests")),
            (.., Role::Prefill) => return Err(refused("has the role prefill")),
            (true, false, Role::Both | Role::Decode) => {}
        }
        let eligible = &mut context.first.eligible;
        eligible.clear();
        eligible.resize(self.fleet.slots(), false);
        eligible[id.index()] = true;
        Ok(1)
    }

    pub fn nobody(&self, turn: Turn) -> CoreError {
        let live = self.fleet.live_count();
        CoreError::NoInstance(match (live, turn) {
            (0, _) => "the router has no instances".into(),
            (_, Turn::First) => {
                format!("none of the {live} instances is healthy, not draining and of a suitable role")
            }
            (_, Turn::Later) => {
                format!("none of the {live} instances is healthy, not draining and of the role decode")
            }
            (_, Turn::Peer(_)) => {
                format!("none of the {live} instances is healthy, not draining and able to take over")
            }
        })
    }
}

/// Excludes slots without room, unless none has room; returns the number of eligible slots.
fn keep_roomy(eligible: &mut [bool], roomy: &[bool], count: usize) -> usize {
    let both = eligible.iter().zip(roomy).filter(|(eligible, roomy)| **eligible && **roomy).count();
    if both == 0 {
        return count;
    }
    eligible.iter_mut().zip(roomy).for_each(|(eligible, roomy)| *eligible &= roomy);
    both
}

/// Sets the scores of ineligible slots to NaN, so that every later number belongs to an eligible
/// slot.
fn leave_ineligible(scores: &mut Scores, snapshot: &Snapshot<'_>) {
    if snapshot.eligible_count < snapshot.eligible.len() {
        for (score, _) in scores.score.iter_mut().zip(snapshot.eligible).filter(|(_, e)| !**e) {
            *score = f64::NAN;
        }
    }
}

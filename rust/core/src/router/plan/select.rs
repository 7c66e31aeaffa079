//! The choice of an instance: eligible slots, indicators, scores, best slot.
use crate::error::CoreError;
use crate::fleet::Role;
use crate::guard::slots::Restriction;
use crate::ids::{Seconds, Slot};
use crate::indicators::{Indicator, Indicators, Kernels, Snapshot};
use crate::plan::Cuts;
use crate::policy::select;
use crate::request::{Arm, Request};
use crate::router::context::{DecisionContext, Selection};
use crate::router::parts::Turn;
use crate::router::state::{Selector, State};

/// Number of instances that an error names.
const SHOWN: usize = 4;

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
    ) -> Result<Slot, CoreError> {
        let selector = self.selector(turn, request.arm);
        let eligible_count = self.mark_eligible(context, request, turn, failed);
        if eligible_count == 0 {
            return Err(self.nobody(request, turn, failed));
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
        self.derive_declared(context, &selector.declared, now);
        let DecisionContext {
            matched,
            derived,
            declared,
            first,
            later,
            rng,
            excluded,
            restriction,
            unscored,
            ..
        } = context;
        let (selection, restriction) = match turn {
            Turn::First => {
                *restriction = match excluded {
                    Some(slots) if selector.guarded && home.is_none() => {
                        slots.exclude_from(&mut first.eligible)
                    }
                    _ => Restriction::Free,
                };
                (first, *restriction)
            }
            Turn::Later | Turn::Peer(_) => (later, Restriction::Free),
        };
        let Selection { scores, eligible, able, candidates } = selection;
        let excluded = if let Restriction::Filtered(out) = restriction { out } else { 0 };
        (*able, *candidates) = (eligible_count, eligible_count - excluded);
        let slots = self.fleet.slots();
        let kernels = self.kernels(matched, request, selector.reads, handoff, failed, now);
        kernels.write_request(selector.reads, eligible_count, derived);
        let by_chunks = selector.policy.by_chunks();
        if !by_chunks {
            kernels.fill(selector.reads, 0..slots, 0, derived);
        }
        let columns = Indicators::new(self.ledger.columns(), derived)
            .with_declared(declared)
            .with_groups(self.fleet.groups());
        let snapshot = Snapshot {
            columns: if by_chunks { columns.with_kernels(&kernels) } else { columns },
            eligible,
            eligible_count: *candidates,
            name_hashes: self.fleet.name_hashes(),
            ordinal: selector.made,
            session: request.session,
        };
        if by_chunks || restriction == Restriction::BalanceOnly {
            scores.begin(slots);
        } else {
            scores.reset(slots);
        }
        if restriction == Restriction::BalanceOnly {
            scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        } else {
            selector.policy.score(&snapshot, rng, scores)?;
            scores.check(slots, &selector.policy.spec().name)?;
        }
        if let Some(best) = select::best(scores, snapshot.eligible, rng) {
            return Ok(Slot(best as u32));
        }
        // The fleet has an eligible instance, so the request must not fail: the fewest requests
        // win.
        *unscored += 1;
        scores.begin(slots);
        scores.unscored = true;
        scores.score.copy_from_slice(snapshot.column(Indicator::Bs));
        let best = select::best(scores, snapshot.eligible, rng);
        best.map(|best| Slot(best as u32)).ok_or_else(|| self.nobody(request, turn, failed))
    }

    /// Marks the slots that can take a segment; returns their number. If no instance accepts
    /// prompts and `colocate` allows it, decode instances take whole requests.
    pub fn mark_eligible(
        &self,
        context: &mut DecisionContext,
        request: &Request<'_>,
        turn: Turn,
        failed: &[u32],
    ) -> usize {
        let fleet = &self.fleet;
        let (eligible, decode) = match turn {
            Turn::First => (&mut context.first.eligible, false),
            Turn::Later => (&mut context.later.eligible, true),
            Turn::Peer(_) => (&mut context.later.eligible, false),
        };
        let mut mark = |decode: bool| {
            let (able, count) = match decode {
                false => (fleet.eligible(), fleet.eligible_count()),
                true => (fleet.decoders(), fleet.decoder_count()),
            };
            eligible.clear();
            match request.instances {
                None => eligible.extend_from_slice(able),
                Some(names) => fleet.mark_named(names, decode, eligible),
            }
            failed.iter().for_each(|slot| eligible[*slot as usize] = false);
            if let Turn::Peer(first) = turn {
                // Engines of both instances must be able to transfer KV, and prefill-only instances
                // do not decode.
                for (slot, eligible) in eligible.iter_mut().enumerate() {
                    let id = Slot(slot as u32);
                    *eligible &= first != Some(id)
                        && fleet.role(id) == Role::Both
                        && self.instances[slot].cuts > Cuts::Nowhere;
                }
                return eligible.iter().filter(|e| **e).count();
            }
            match request.instances {
                None if failed.is_empty() => count,
                _ => eligible.iter().filter(|e| **e).count(),
            }
        };
        match mark(decode) {
            0 if turn == Turn::First && self.config.colocate => mark(true),
            count => count,
        }
    }

    /// Returns the error of a segment that no instance can take.
    pub fn nobody(&self, request: &Request<'_>, turn: Turn, failed: &[u32]) -> CoreError {
        let live = self.fleet.live_count();
        if let Some(names) = request.instances.filter(|_| live > 0) {
            return CoreError::NoInstance(self.none_of(names, turn, failed));
        }
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

    /// Says why none of these instances can take a segment.
    fn none_of(&self, names: &[Box<str>], turn: Turn, failed: &[u32]) -> String {
        if names.is_empty() {
            return "the request allows no instance".into();
        }
        let why = |name: &str| {
            let Some(id) = self.fleet.get(name) else { return "is not in the router" };
            match (self.fleet.state(id), turn) {
                _ if failed.contains(&id.0) => "has failed the request",
                ((false, ..), _) => "is not healthy",
                ((_, true, _), _) => "is draining; it accepts no new requests",
                ((.., Role::Prefill), _) => "has the role prefill",
                ((.., Role::Decode), _) => "has the role decode",
                ((.., Role::Both), Turn::Peer(_)) => "cannot take over",
                ((.., Role::Both), _) => "has the role both",
            }
        };
        let mut each: Vec<_> =
            names.iter().take(SHOWN).map(|name| format!("instance {name:?} {}", why(name))).collect();
        if names.len() > SHOWN {
            each.push(format!("and {} more", names.len() - SHOWN));
        }
        each.join(", ")
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

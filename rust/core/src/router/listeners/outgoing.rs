//! Changes of this router's load, for its peers. Most instances change little: a message has only
//! those whose load is not what peers know from an earlier message. Peers let the sums with
//! exponential decay shrink by themselves, so an idle instance needs no message.
use super::listener::Listener;
use super::published::Published;
use crate::error::CoreError;
use crate::fleet::{Fleet, Member};
use crate::ids::{Seconds, Slot};
use crate::program::Followed;
use crate::router::ledger::{Ledger, Share};
use std::sync::Arc;

/// The load that peers know, and the versions in which it changed.
#[derive(Clone, Debug, Default)]
pub struct Outgoing {
    version: u64,
    sent: Vec<Sent>,
    /// Slots whose load may differ from `sent`.
    changed: Vec<u32>,
    /// Slots whose load changes between events.
    moving: Vec<u32>,
    /// Removed instances that had load, with the version of their removal.
    removed: Vec<(u64, Arc<str>)>,
}

/// The load of a slot in its last version.
#[derive(Clone, Debug, Default)]
struct Sent {
    version: u64,
    at: Seconds,
    load: Published,
}

impl Outgoing {
    /// Enters the load at `now` as version `version`. `oldest`: oldest version that a message can
    /// still change. `all`: whether the load of all instances may have changed. `load`: returns the
    /// load of an instance.
    ///
    /// # Errors
    /// `BadValue` for a version that is not above the last one.
    pub fn enter(
        &mut self,
        version: u64,
        oldest: u64,
        all: bool,
        ledger: &mut Ledger,
        fleet: &Fleet,
        now: Seconds,
        load: impl Fn(&Ledger, Slot) -> Published,
    ) -> Result<(), CoreError> {
        if version <= self.version {
            return Err(CoreError::BadValue {
                what: "version of the load".into(),
                got: version.to_string(),
                expected: format!("more than {}, the last one", self.version),
            });
        }
        let first = !ledger.peer_changes.is_on();
        if first {
            ledger.peer_changes.start();
        }
        ledger.peer_changes.take(&mut self.changed);
        if all || first {
            self.changed = (0..fleet.slots() as u32).collect();
            self.moving.clear();
        } else {
            self.changed.append(&mut self.moving);
            self.changed.sort_unstable();
            self.changed.dedup();
        }
        self.version = version;
        self.removed.retain(|(removed, _)| *removed > oldest);
        self.sent.resize(fleet.slots(), Sent::default());
        for slot in self.changed.drain(..) {
            let id = Slot(slot);
            if !fleet.is_live(id) {
                continue;
            }
            let load = load(ledger, id).rounded();
            let sent = &mut self.sent[id.index()];
            if !sent.load.stands_for(&load, now - sent.at, ledger.recent_seconds()) {
                *sent = Sent { version, at: now, load };
            }
            if ledger.moves(id.index()) {
                self.moving.push(slot);
            }
        }
        Ok(())
    }

    /// Returns the load at `now` of the instances that changed since the version `base`; `None`: of
    /// all that have load.
    pub fn since(
        &self,
        base: Option<u64>,
        ledger: &Ledger,
        fleet: &Fleet,
        now: Seconds,
    ) -> Vec<(Box<str>, Published)> {
        let removed = self.removed.iter().filter(|(version, _)| base.is_some_and(|base| *version > base));
        // An instance of the same name may have load again, so removed ones come first.
        let mut loads: Vec<(Box<str>, Published)> =
            removed.map(|(_, name)| ((&**name).into(), Published::default())).collect();
        let after = base.unwrap_or(0);
        for (slot, sent) in (0..).zip(&self.sent).filter(|(_, sent)| sent.version > after) {
            let load = sent.load.later(now - sent.at, ledger.recent_seconds()).rounded();
            if base.is_some() || !load.is_nothing() {
                loads.push(((&**fleet.name(Slot(slot))).into(), load));
            }
        }
        loads
    }
}

impl Listener for Outgoing {
    fn member(&mut self, member: Member, fleet: &Fleet) {
        if let Member::Removed(id) = member
            && let Some(sent) = self.sent.get_mut(id.index())
            && !std::mem::take(sent).load.is_nothing()
        {
            self.removed.push((self.version + 1, fleet.name(id).clone()));
        }
    }
}

/// Returns a function that returns a router's load on an instance at `now`.
pub fn published(programs: Option<&Followed>, now: Seconds) -> impl Fn(&Ledger, Slot) -> Published {
    move |ledger, id| {
        let other_tokens = programs.map_or(0.0, |programs| programs.others_on(id));
        Share { other_tokens, ..ledger.share(id.index(), now) }.into()
    }
}

//! The instances of one pool: names to slots, health, roles, draining.
use crate::error::CoreError;
use crate::ids::{MAX_INSTANCES, Slot};
use hashbrown::HashMap;
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::xxh3_64;

/// Work that an instance accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Role {
    /// Prefill and decode.
    #[default]
    Both,
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
}

/// An instance, as long as it is there: its slot may get another one. Keep this, and not a
/// [`Slot`], from one call to the next; [`Fleet::current`] returns the slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InstanceId {
    slot: Slot,
    /// Number of instances that the slot has had, this one included.
    generation: u32,
}

impl InstanceId {
    /// No instance.
    pub const NONE: InstanceId = InstanceId { slot: Slot(0), generation: 0 };

    /// Returns the instance's slot, which may have another instance now.
    #[inline]
    pub fn slot(self) -> Slot {
        self.slot
    }
}

/// A change of the fleet's instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Member {
    /// The instance was added. Its slot may have belonged to a removed instance.
    Added {
        /// Slot of the instance.
        id: Slot,
        /// Blocks in its KV cache, if known.
        cache_blocks: Option<u32>,
    },
    /// The instance was removed.
    Removed(Slot),
}

impl Role {
    /// All values, with their names.
    pub const NAMES: [(&'static str, Role); 3] =
        [("both", Role::Both), ("prefill", Role::Prefill), ("decode", Role::Decode)];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        Role::NAMES.iter().find(|(_, role)| *role == self).expect("every role has a name").0
    }
}

#[derive(Clone, Debug)]
struct Instance {
    name: Arc<str>,
    generation: u32,
    live: bool,
    healthy: bool,
    draining: bool,
    warming: bool,
    role: Role,
    group: Option<Arc<str>>,
    /// Whether it accepts prompts, and requests prefilled elsewhere, and is not warming.
    ready: [bool; 2],
}

impl Instance {
    /// Returns whether the instance accepts prompts, or with `decode` requests prefilled elsewhere.
    fn takes(&self, decode: bool) -> bool {
        self.live && self.healthy && !self.draining && (self.role == Role::Decode) == decode
    }
}

/// The instances of one pool.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    slots: Vec<Instance>,
    by_name: HashMap<Arc<str>, u32>,
    /// Built when it is read first: many instances may join at once.
    names: OnceLock<Arc<[Arc<str>]>>,
    name_hashes: Vec<u64>,
    eligible: Vec<bool>,
    eligible_count: usize,
    decoders: Vec<bool>,
    decoder_count: usize,
    /// Slots that are ready, by [`Instance::ready`].
    ready: [usize; 2],
    groups: Vec<u32>,
    /// Instances with a named group.
    grouped: usize,
}

impl Fleet {
    /// Adds an instance, healthy, in the lowest free slot.
    ///
    /// # Errors
    /// `BadValue` if the name is empty or taken, or if the fleet is full.
    pub fn add(&mut self, name: &str, role: Role) -> Result<Slot, CoreError> {
        let bad = |expected: String| CoreError::bad_value("instance name", format!("{name:?}"), expected);
        if name.is_empty() {
            return Err(bad("a name that is not empty".into()));
        }
        if self.by_name.contains_key(name) {
            return Err(bad("a name that is not in use in this router".into()));
        }
        let full = self.by_name.len() == self.slots.len();
        let free = if full { None } else { self.slots.iter().position(|s| !s.live) };
        let slot = free.unwrap_or(self.slots.len());
        if slot == MAX_INSTANCES {
            return Err(bad(format!("at most {MAX_INSTANCES} instances in one router")));
        }
        let name: Arc<str> = name.into();
        if slot == self.slots.len() {
            self.slots.push(Instance {
                name: name.clone(),
                generation: 0,
                live: false,
                healthy: false,
                draining: false,
                warming: false,
                role,
                group: None,
                ready: [false; 2],
            });
            self.name_hashes.push(0);
            self.eligible.push(false);
            self.decoders.push(false);
        }
        let generation = self.slots[slot].generation + 1;
        self.slots[slot] = Instance {
            name: name.clone(),
            generation,
            live: true,
            healthy: true,
            draining: false,
            warming: false,
            role,
            group: None,
            ready: self.slots[slot].ready,
        };
        self.name_hashes[slot] = xxh3_64(name.as_bytes());
        self.by_name.insert(name, slot as u32);
        self.names = OnceLock::new();
        self.refresh(slot);
        self.regroup();
        Ok(Slot(slot as u32))
    }

    /// Frees the slot of an instance.
    pub(crate) fn remove(&mut self, id: Slot) {
        let slot = &mut self.slots[id.index()];
        slot.live = false;
        let name = slot.name.clone();
        self.grouped -= usize::from(slot.group.take().is_some());
        self.by_name.remove(&name);
        self.names = OnceLock::new();
        self.refresh(id.index());
        self.regroup();
    }

    /// Returns the instance with this name.
    ///
    /// # Errors
    /// `UnknownName` with the nearest name.
    pub fn find(&self, name: &str) -> Result<Slot, CoreError> {
        self.get(name).ok_or_else(|| CoreError::unknown_name("instance", name, self.live_names()))
    }

    /// Returns the instance with this name, if there is one.
    pub fn get(&self, name: &str) -> Option<Slot> {
        self.by_name.get(name).map(|&slot| Slot(slot))
    }

    /// Checks that the fleet has this slot.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn check(&self, id: Slot) -> Result<(), CoreError> {
        if id.index() < self.slots.len() {
            return Ok(());
        }
        let expected = format!("one of the router's {} slots", self.slots.len());
        Err(CoreError::bad_value("instance", format!("slot {}", id.0), expected))
    }

    /// Sets whether an instance is healthy.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn set_healthy(&mut self, id: Slot, healthy: bool) -> Result<(), CoreError> {
        self.check(id)?;
        self.slots[id.index()].healthy = healthy;
        self.refresh(id.index());
        Ok(())
    }

    /// Sets whether an instance is draining; a draining instance accepts no new requests.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn set_draining(&mut self, id: Slot, draining: bool) -> Result<(), CoreError> {
        self.check(id)?;
        self.slots[id.index()].draining = draining;
        self.refresh(id.index());
        Ok(())
    }

    /// Sets whether an instance is warming: it fetches prefixes and accepts no new requests, unless
    /// no other instance does.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn set_warming(&mut self, id: Slot, warming: bool) -> Result<(), CoreError> {
        self.check(id)?;
        self.slots[id.index()].warming = warming;
        self.refresh(id.index());
        Ok(())
    }

    /// Returns whether an instance is warming.
    pub fn is_warming(&self, id: Slot) -> bool {
        self.slots.get(id.index()).is_some_and(|slot| slot.live && slot.warming)
    }

    /// Changes an instance's role. Running requests continue.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot.
    pub fn set_role(&mut self, id: Slot, role: Role) -> Result<(), CoreError> {
        self.check(id)?;
        self.slots[id.index()].role = role;
        self.refresh(id.index());
        Ok(())
    }

    /// Puts an instance into a named group, for data-parallel ranks that step together. `None`: a
    /// group of its own.
    ///
    /// # Errors
    /// `BadValue` if the fleet has no such slot or the name is empty.
    pub fn set_group(&mut self, id: Slot, group: Option<&str>) -> Result<(), CoreError> {
        self.check(id)?;
        if group == Some("") {
            let what = format!("group of {}", self.name(id));
            return Err(CoreError::bad_value(what, "an empty name", "a name that is not empty, or none"));
        }
        let slot = &mut self.slots[id.index()];
        let old = std::mem::replace(&mut slot.group, group.filter(|_| slot.live).map(Into::into));
        self.grouped += usize::from(slot.group.is_some());
        self.grouped -= usize::from(old.is_some());
        self.regroup();
        Ok(())
    }

    /// Returns the group of each slot: the first slot of its live instances. Empty if no two
    /// instances share a group.
    #[inline]
    pub fn groups(&self) -> &[u32] {
        &self.groups
    }

    fn regroup(&mut self) {
        self.groups.clear();
        if self.grouped == 0 {
            return;
        }
        let mut first: HashMap<Arc<str>, u32> = HashMap::new();
        for (slot, instance) in (0..).zip(&self.slots) {
            let group = instance.group.as_ref().filter(|_| instance.live);
            self.groups.push(group.map_or(slot, |group| *first.entry(group.clone()).or_insert(slot)));
        }
        if (0..).zip(&self.groups).all(|(slot, group)| slot == *group) {
            self.groups.clear();
        }
    }

    /// Returns an instance's role.
    ///
    /// # Panics
    /// If the fleet has no such slot.
    #[inline]
    pub fn role(&self, id: Slot) -> Role {
        self.slots[id.index()].role
    }

    /// Returns the name of a slot's instance; for a free slot, of its last instance.
    ///
    /// # Panics
    /// If the fleet has no such slot.
    pub fn name(&self, id: Slot) -> &Arc<str> {
        &self.slots[id.index()].name
    }

    /// Returns the names of all slots, empty for free ones. They change only when instances join or
    /// leave: each decision record keeps those of its time.
    pub fn names(&self) -> &Arc<[Arc<str>]> {
        self.names.get_or_init(|| {
            let free: Arc<str> = "".into();
            self.slots.iter().map(|s| if s.live { s.name.clone() } else { free.clone() }).collect()
        })
    }

    /// Yields the names of the live instances, in slot order.
    pub fn live_names(&self) -> impl Iterator<Item = &str> {
        self.slots.iter().filter(|s| s.live).map(|s| &*s.name)
    }

    /// Returns the last instance of a slot; none for an unknown slot.
    #[inline]
    pub fn id_of(&self, slot: Slot) -> InstanceId {
        let last = self.slots.get(slot.index());
        last.map_or(InstanceId::NONE, |last| InstanceId { slot, generation: last.generation })
    }

    /// Returns whether an instance is still there.
    #[inline]
    pub fn is_current(&self, instance: InstanceId) -> bool {
        self.is_last(instance) && self.is_live(instance.slot)
    }

    /// Returns whether no other instance has taken the instance's slot. The router's data of the
    /// slot are then those of this instance, even after its removal.
    #[inline]
    pub fn is_last(&self, instance: InstanceId) -> bool {
        self.id_of(instance.slot) == instance
    }

    /// Returns the slot of an instance that is still there.
    #[inline]
    pub fn current(&self, instance: InstanceId) -> Option<Slot> {
        self.is_current(instance).then_some(instance.slot)
    }

    /// Returns whether the slot holds an instance.
    #[inline]
    pub fn is_live(&self, id: Slot) -> bool {
        self.slots.get(id.index()).is_some_and(|s| s.live)
    }

    /// Returns whether the instance is healthy, whether it is draining, and its role.
    ///
    /// # Panics
    /// If the fleet has no such slot.
    pub fn state(&self, id: Slot) -> (bool, bool, Role) {
        let slot = &self.slots[id.index()];
        (slot.healthy, slot.draining, slot.role)
    }

    /// Returns the number of slots, including free ones.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Returns the number of live instances.
    pub fn live_count(&self) -> usize {
        self.by_name.len()
    }

    /// Returns which slots accept prompts: available instances that prefill only or do both.
    #[inline]
    pub fn eligible(&self) -> &[bool] {
        &self.eligible
    }

    /// Returns the number of slots that accept prompts.
    #[inline]
    pub fn eligible_count(&self) -> usize {
        self.eligible_count
    }

    /// Returns which slots accept requests prefilled elsewhere: available instances that decode
    /// only.
    #[inline]
    pub fn decoders(&self) -> &[bool] {
        &self.decoders
    }

    /// Returns the number of slots that accept requests prefilled elsewhere.
    #[inline]
    pub fn decoder_count(&self) -> usize {
        self.decoder_count
    }

    /// Marks which of the named instances accept prompts, or with `decode` requests prefilled
    /// elsewhere. Warming instances do if no other of them does.
    pub fn mark_named(&self, names: &[Box<str>], decode: bool, marks: &mut Vec<bool>) {
        marks.clear();
        marks.resize(self.slots.len(), false);
        let able = || {
            let ids = names.iter().filter_map(|name| self.get(name)).map(Slot::index);
            ids.filter(|slot| self.slots[*slot].takes(decode))
        };
        let ready = |slot: &usize| !self.slots[*slot].warming;
        let none = !able().any(|slot| ready(&slot));
        able().filter(|slot| none || ready(slot)).for_each(|slot| marks[slot] = true);
    }

    /// Returns stable hashes of the names, by slot.
    #[inline]
    pub fn name_hashes(&self) -> &[u64] {
        &self.name_hashes
    }

    /// Updates which slots accept requests after a change of one of them.
    fn refresh(&mut self, changed: usize) {
        let columns = [&mut self.eligible, &mut self.decoders];
        let counts = [&mut self.eligible_count, &mut self.decoder_count];
        for (decode, (column, count)) in columns.into_iter().zip(counts).enumerate() {
            let slot = &mut self.slots[changed];
            let ready = slot.takes(decode == 1) && !slot.warming;
            let had_none = self.ready[decode] == 0;
            let was_ready = std::mem::replace(&mut slot.ready[decode], ready);
            self.ready[decode] = self.ready[decode] - usize::from(was_ready) + usize::from(ready);
            let none = self.ready[decode] == 0;
            if !none && !had_none {
                column[changed] = ready;
                *count = self.ready[decode];
                continue;
            }
            // Warming instances help out if no other instance takes requests.
            for (takes_it, slot) in column.iter_mut().zip(&self.slots) {
                *takes_it = slot.ready[decode] || none && slot.takes(decode == 1);
            }
            *count = column.iter().filter(|takes_it| **takes_it).count();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_with_a_new_generation() {
        let mut fleet = Fleet::default();
        let a = fleet.add("a", Role::Both).unwrap();
        let b = fleet.add("b", Role::Both).unwrap();
        let old = fleet.id_of(a);
        assert!(fleet.is_current(old) && !fleet.is_current(InstanceId::NONE));
        fleet.remove(a);
        assert!(!fleet.is_current(old) && fleet.is_last(old));
        let c = fleet.add("c", Role::Both).unwrap();
        assert_eq!((c, fleet.current(fleet.id_of(c)), fleet.current(old)), (a, Some(c), None));
        assert!(!fleet.is_last(old));
        assert_eq!(fleet.eligible_count(), 2);
        fleet.set_draining(b, true).unwrap();
        assert_eq!(fleet.eligible(), [true, false]);
    }

    /// A health change keeps the shared names; a free slot has no name.
    #[test]
    fn names_change_only_with_the_members() {
        let mut fleet = Fleet::default();
        let a = fleet.add("a", Role::Both).unwrap();
        fleet.add("b", Role::Both).unwrap();
        let names = fleet.names().clone();
        fleet.set_healthy(a, false).unwrap();
        fleet.set_draining(a, true).unwrap();
        fleet.set_role(a, Role::Prefill).unwrap();
        assert!(Arc::ptr_eq(&names, fleet.names()));
        fleet.remove(a);
        let now: Vec<&str> = fleet.names().iter().map(|name| &**name).collect();
        assert_eq!(now, ["", "b"]);
        assert_eq!(&**fleet.name(a), "a"); // requests still on it need the name
        assert!(fleet.check(Slot(1)).is_ok() && fleet.set_healthy(Slot(2), true).is_err());
    }

    #[test]
    fn a_warming_instance_takes_requests_only_if_no_other_does() {
        let mut fleet = Fleet::default();
        let (a, b) = (fleet.add("a", Role::Both).unwrap(), fleet.add("b", Role::Both).unwrap());
        fleet.set_warming(b, true).unwrap();
        assert_eq!((fleet.eligible(), fleet.eligible_count()), ([true, false].as_slice(), 1));
        fleet.set_healthy(a, false).unwrap();
        assert_eq!((fleet.eligible(), fleet.eligible_count()), ([false, true].as_slice(), 1));
        fleet.set_healthy(a, true).unwrap();
        fleet.set_warming(b, false).unwrap();
        assert_eq!((fleet.eligible_count(), fleet.is_warming(b)), (2, false));
        // A new instance in the slot is not warming.
        fleet.set_warming(b, true).unwrap();
        fleet.remove(b);
        fleet.add("c", Role::Both).unwrap();
        assert_eq!(fleet.eligible_count(), 2);
    }

    /// Defect 19 of the core review: a change of one slot gives what a walk through all slots
    /// gives.
    #[test]
    fn one_change_at_a_time_agrees_with_a_walk_through_all_slots() {
        let mut fleet = Fleet::default();
        let mut state = 7u64;
        let mut random = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for step in 0..2000 {
            let slot = Slot(random(12) as u32);
            let known = slot.index() < fleet.slots();
            let on = random(2) == 0;
            match random(8) {
                0 if known && fleet.is_live(slot) => fleet.remove(slot),
                1 if known && fleet.is_live(slot) => {
                    fleet.set_group(slot, on.then_some("ranks")).unwrap();
                }
                2 | 3 if known => fleet.set_warming(slot, on).unwrap(),
                4 if known => fleet.set_healthy(slot, on).unwrap(),
                5 if known => fleet.set_draining(slot, on).unwrap(),
                6 if known => fleet.set_role(slot, Role::NAMES[random(3) as usize].1).unwrap(),
                _ if fleet.live_count() < 12 => {
                    fleet.add(&format!("e{step}"), Role::NAMES[random(3) as usize].1).unwrap();
                }
                _ => {}
            }
            for (decode, column, count) in [
                (false, fleet.eligible(), fleet.eligible_count()),
                (true, fleet.decoders(), fleet.decoder_count()),
            ] {
                let ready = |slot: &Instance| slot.takes(decode) && !slot.warming;
                let none = !fleet.slots.iter().any(ready);
                let whole: Vec<bool> =
                    fleet.slots.iter().map(|slot| ready(slot) || none && slot.takes(decode)).collect();
                assert_eq!((column, count), (&whole[..], whole.iter().filter(|takes| **takes).count()));
            }
            let live: Vec<&str> =
                fleet.names().iter().map(|name| &**name).filter(|n| !n.is_empty()).collect();
            assert_eq!(live, fleet.live_names().collect::<Vec<_>>());
            let grouped = fleet.slots.iter().filter(|slot| slot.live && slot.group.is_some());
            let groups: Vec<u32> = (0..)
                .zip(&fleet.slots)
                .filter(|(_, s)| s.live && s.group.is_some())
                .map(|(i, _)| i)
                .collect();
            assert_eq!(fleet.grouped, grouped.count());
            if groups.len() > 1 {
                assert!(groups.iter().all(|slot| fleet.groups()[*slot as usize] == groups[0]));
            } else {
                assert!(fleet.groups().is_empty());
            }
        }
    }

    #[test]
    fn unknown_and_taken_names_are_errors_that_help() {
        let mut fleet = Fleet::default();
        fleet.add("engine-0", Role::Both).unwrap();
        let error = fleet.find("engine_0").unwrap_err().to_string();
        assert!(error.contains("did you mean \"engine-0\""), "{error}");
        assert!(fleet.add("engine-0", Role::Both).is_err());
    }
}

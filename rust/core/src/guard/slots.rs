//! A set of instance slots, and its exclusion from a choice.
use crate::Slot;
use crate::ids::MAX_INSTANCES;
use fixedbitset::{Block, FixedBitSet};

/// Effect of [`SlotSet::exclude_from`] on a request's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restriction {
    /// No effect.
    Free,
    /// Number of instances filtered out.
    Filtered(usize),
    /// The filter would leave no instance, so it excludes none. The router chooses by load alone
    /// (least `bs`).
    BalanceOnly,
}

/// A set of instances as a bit set, with its size. [`crate::guard`] queries it for each request of
/// a class under alarm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSet {
    bits: FixedBitSet,
    len: usize,
}

impl Default for SlotSet {
    fn default() -> SlotSet {
        SlotSet { bits: FixedBitSet::with_capacity(MAX_INSTANCES), len: 0 }
    }
}

impl SlotSet {
    /// Number of slots per word.
    pub const WORD: usize = Block::BITS as usize;

    /// Returns words of [`SlotSet::WORD`] slots each, with the lowest slot in the lowest bit.
    pub fn words(&self) -> &[Block] {
        self.bits.as_slice()
    }

    /// Returns the number of members.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns whether `id` is a member.
    #[inline]
    pub fn contains(&self, id: Slot) -> bool {
        self.bits.contains(id.index())
    }

    /// Adds `id` and returns whether it is new.
    ///
    /// # Panics
    /// If `id` is [`MAX_INSTANCES`] or more.
    pub fn insert(&mut self, id: Slot) -> bool {
        let new = !self.bits.put(id.index());
        self.len += usize::from(new);
        new
    }

    /// Removes `id` and returns whether it was a member.
    pub fn remove(&mut self, id: Slot) -> bool {
        let member = self.contains(id);
        if member {
            self.bits.remove(id.index());
            self.len -= 1;
        }
        member
    }

    /// Removes the members from `eligible`, unless no instance would be left.
    pub fn exclude_from(&self, eligible: &mut [bool]) -> Restriction {
        let inside = |i: usize| self.contains(Slot(i as u32));
        let out = (0..eligible.len()).filter(|&i| eligible[i] && inside(i)).count();
        if out == 0 {
            return Restriction::Free;
        }
        if out == eligible.iter().filter(|e| **e).count() {
            return Restriction::BalanceOnly;
        }
        eligible.iter_mut().enumerate().for_each(|(i, e)| *e = *e && !inside(i));
        Restriction::Filtered(out)
    }

    /// Iterates over the members, in order.
    pub fn iter(&self) -> impl Iterator<Item = Slot> + '_ {
        self.bits.ones().map(|slot| Slot(slot as u32))
    }
}

impl FromIterator<Slot> for SlotSet {
    fn from_iter<I: IntoIterator<Item = Slot>>(ids: I) -> SlotSet {
        let mut set = SlotSet::default();
        for id in ids {
            set.insert(id);
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_count_and_order_and_compares_by_members() {
        let mut set: SlotSet = [130, 3, 64, 3].map(Slot).into_iter().collect();
        assert_eq!(set.len(), 3);
        assert_eq!(set.iter().map(|id| id.0).collect::<Vec<_>>(), [3, 64, 130]);
        assert!(set.remove(Slot(130)) && !set.remove(Slot(130)) && !set.remove(Slot(9999)));
        assert!(!set.contains(Slot(130)) && set.contains(Slot(64)));
        assert_eq!(set, [64, 3].map(Slot).into_iter().collect());
    }
}

//! A set of slots: who holds a class's prefix.
use crate::InstanceId;

const WORD: usize = SlotSet::WORD;

/// A set of instances as bits. The last word is never 0, so that equal sets compare equal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotSet {
    words: Vec<u64>,
    len: usize,
}

impl SlotSet {
    /// Slots that a word stands for.
    pub const WORD: usize = u64::BITS as usize;

    /// Slots `WORD * i` to `WORD * i + WORD - 1` as bits, the lowest first.
    #[inline]
    pub fn word(&self, i: usize) -> u64 {
        self.words.get(i).copied().unwrap_or(0)
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no member.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether `id` is a member.
    #[inline]
    pub fn contains(&self, id: InstanceId) -> bool {
        self.word(id.index() / WORD) >> (id.index() % WORD) & 1 == 1
    }

    /// Adds `id`; whether it is new.
    pub fn insert(&mut self, id: InstanceId) -> bool {
        let (word, bit) = (id.index() / WORD, 1 << (id.index() % WORD));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let new = self.words[word] & bit == 0;
        self.words[word] |= bit;
        self.len += usize::from(new);
        new
    }

    /// Takes `id` out; whether it was a member.
    pub fn remove(&mut self, id: InstanceId) -> bool {
        let member = self.contains(id);
        if member {
            self.words[id.index() / WORD] &= !(1 << (id.index() % WORD));
            self.len -= 1;
            while self.words.last() == Some(&0) {
                self.words.pop();
            }
        }
        member
    }

    /// Its members, in order.
    pub fn iter(&self) -> impl Iterator<Item = InstanceId> + '_ {
        self.words.iter().enumerate().flat_map(|(i, &word)| {
            (0..WORD)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| InstanceId((i * WORD + bit) as u32))
        })
    }
}

impl FromIterator<InstanceId> for SlotSet {
    fn from_iter<I: IntoIterator<Item = InstanceId>>(ids: I) -> SlotSet {
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
        let mut set: SlotSet = [130, 3, 64, 3].map(InstanceId).into_iter().collect();
        assert_eq!(set.len(), 3);
        assert_eq!(set.iter().map(|id| id.0).collect::<Vec<_>>(), [3, 64, 130]);
        assert!(set.remove(InstanceId(130)) && !set.remove(InstanceId(130)) && !set.remove(InstanceId(9999)));
        assert!(!set.contains(InstanceId(130)) && set.contains(InstanceId(64)));
        assert_eq!(set, [64, 3].map(InstanceId).into_iter().collect());
    }
}

//! Holders of a node: one holder in the node itself, a few in a list of cells, many in groups of 64
//! with one bit each. A directory finds a group in at most two steps. The word of the group's
//! number modulo 8 names the group. If several groups have the same word, it names a branch, which
//! has one word for each of them. The entries of a large group are in five lists, by instance. So
//! no list has more than [`LIST_MOST`] entries.
//!
//! Each instance that holds the block or a child of the block has an entry. An entry for a child
//! alone (copies 0) is a *hole*: the instance evicted the block before its children.
use super::Copies;
use super::cells::{CHILDREN, COUNT, Cell, Cells, DEPTH, ENTRIES, Id, LISTS, NEXT, PAIRS, PARENT, WHO};

const INSTANCE: u32 = (1 << 12) - 1;
const COPIES_AT: u32 = 12;
/// Maximum counted copies of one block on one instance; further copies are not counted.
const MAX_COPIES: u32 = (1 << 15) - 1;
/// The only copy is expected: the engine has not reported it.
const EXPECTED: u32 = 1 << 27;
/// The instance holds none of the node's children. Then the second half is a stamp, else a count of
/// those children.
const END: u32 = 1 << 28;
/// Matched since it last was an end, so eviction spares it once.
const TOUCHED: u32 = 1 << 29;
const KIND_AT: u32 = 30;
const SINGLE: u32 = 1;
const FEW: u32 = 2;
const MANY: u32 = 3;
/// Bit position of the entry count, above the number of holders, in the summary of a node of kind
/// FEW or MANY.
const ENTRIES_AT: u32 = 13;
const HOLDERS: u32 = (1 << ENTRIES_AT) - 1;
/// Words of a directory and of a branch.
const WORDS: u32 = 8;
/// The word of a directory names a branch.
const BRANCH: u32 = 1 << 28;
/// Branches whose groups are prefetched before they are read: 16 cache lines, about as many as a
/// core waits for at a time.
const BRANCHES_AHEAD: usize = 2;
/// Number of a group, in its word [`COUNT`].
const NUMBER: u32 = 255;
/// One entry of a group, in the same word.
const ENTRY: u32 = 1 << 8;
/// The entries of the group are in all of [`LISTS`], else in the list at [`ENTRIES`].
const SPLIT: u32 = 1 << 16;
/// Maximum entries in a group's only list before they are split. At half of it they are merged.
const LIST_MOST: u32 = 18;
/// Maximum entries in a list before they move to groups. At half of it they move back.
const FEW_MOST: u32 = 12;

/// Entry of one instance on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Holder {
    who: u32,
    aux: u32,
}

impl Holder {
    /// Creates an entry with one copy of the block and no children.
    #[inline(always)]
    pub(super) fn end(instance: u32) -> Holder {
        Holder { who: instance | 1 << COPIES_AT | END | SINGLE << KIND_AT, aux: 0 }
    }

    /// Creates an entry for a block that was not present, without children.
    #[inline(always)]
    pub(super) fn first(instance: u32, copies: Copies) -> Holder {
        Holder::end(instance).with_first(copies)
    }

    /// Returns this entry with one copy, for a block that was not present.
    #[inline(always)]
    pub(super) fn with_first(self, copies: Copies) -> Holder {
        if copies == Copies::Expect { self.expected() } else { self.with_copies(1) }
    }

    /// Creates an entry with one child, without the block itself.
    pub(super) fn hole(instance: u32) -> Holder {
        Holder { who: instance | SINGLE << KIND_AT, aux: 1 }
    }

    /// Writes this entry as the only entry of a node.
    #[inline(always)]
    pub(super) fn write(self, node: &mut Cell) {
        (node.0[WHO], node.0[WHO + 1]) = (self.who, self.aux);
    }

    #[inline(always)]
    pub(super) fn instance(self) -> u32 {
        self.who & INSTANCE
    }

    #[inline(always)]
    pub(super) fn copies(self) -> u32 {
        self.who >> COPIES_AT & MAX_COPIES
    }

    pub(super) fn with_copies(self, copies: u32) -> Holder {
        let who = self.who & !(MAX_COPIES << COPIES_AT | EXPECTED);
        Holder { who: who | copies.min(MAX_COPIES) << COPIES_AT, ..self }
    }

    /// Returns this entry with one copy that is only expected.
    pub(super) fn expected(self) -> Holder {
        let Holder { who, aux } = self.with_copies(1);
        Holder { who: who | EXPECTED, aux }
    }

    pub(super) fn is_expected(self) -> bool {
        self.who & EXPECTED != 0
    }

    #[inline(always)]
    pub(super) fn is_end(self) -> bool {
        self.who & END != 0
    }

    /// Returns the stamp of its last use, if it is an end.
    pub(super) fn stamp(self) -> Option<u32> {
        self.is_end().then_some(self.aux)
    }

    pub(super) fn stamped(self, stamp: u32) -> Holder {
        Holder { who: (self.who | END) & !TOUCHED, aux: stamp }
    }

    pub(super) fn is_touched(self) -> bool {
        self.who & TOUCHED != 0
    }

    pub(super) fn touched(self) -> Holder {
        Holder { who: self.who | TOUCHED, ..self }
    }

    /// Returns the number of the node's children that the instance holds.
    pub(super) fn children(self) -> u32 {
        if self.is_end() { 0 } else { self.aux }
    }

    pub(super) fn with_children(self, children: u32) -> Holder {
        if children == 0 {
            Holder { who: self.who | END, aux: 0 }
        } else {
            Holder { who: self.who & !END, aux: children }
        }
    }
}

/// Location of an entry: cell and word.
#[derive(Clone, Copy)]
pub(super) struct At {
    cell: Id,
    word: usize,
}

/// Nodes.
impl Cells {
    #[inline(always)]
    pub(super) fn hash(&self, node: Id) -> u64 {
        self[node].wide()
    }

    #[inline(always)]
    pub(super) fn parent(&self, node: Id) -> Id {
        self[node].0[PARENT]
    }

    #[inline(always)]
    pub(super) fn depth(&self, node: Id) -> usize {
        self[node].0[DEPTH] as usize
    }

    /// Returns whether nothing keeps the node: it has no holder, hole or child.
    pub(super) fn is_bare(&self, node: Id) -> bool {
        self[node].0[CHILDREN] == 0 && self.kind(node) == 0
    }

    #[inline(always)]
    fn kind(&self, node: Id) -> u32 {
        self[node].0[WHO] >> KIND_AT
    }

    #[inline(always)]
    fn pair(&self, at: At) -> Holder {
        let words = &self[at.cell].0;
        Holder { who: words[at.word & 7], aux: words[(at.word + 1) & 7] }
    }

    #[inline(always)]
    fn set_pair(&mut self, at: At, holder: Holder) {
        let words = &mut self[at.cell].0;
        words[at.word & 7] = holder.who;
        words[(at.word + 1) & 7] = holder.aux;
    }
}

/// Holders of a node.
impl Cells {
    /// Returns the number of instances that hold the node's block.
    #[inline(always)]
    pub(super) fn holders(&self, node: Id) -> u32 {
        let who = self[node].0[WHO];
        match who >> KIND_AT {
            0 => 0,
            SINGLE => u32::from(who >> COPIES_AT & MAX_COPIES != 0),
            _ => who & HOLDERS,
        }
    }

    /// Returns whether an instance holds a child of the node, but not the node's block.
    pub(super) fn has_hole(&self, node: Id) -> bool {
        let who = self[node].0[WHO];
        match who >> KIND_AT {
            0 => false,
            SINGLE => who >> COPIES_AT & MAX_COPIES == 0,
            _ => who & HOLDERS != who >> ENTRIES_AT & HOLDERS,
        }
    }

    /// Returns the node's entry if it has exactly one.
    #[inline(always)]
    pub(super) fn single(&self, node: Id) -> Option<Holder> {
        (self.kind(node) == SINGLE).then(|| self.pair(At { cell: node, word: WHO }))
    }

    /// Calls `each` with the number of each group of 64 instances and the bits of its holders. A
    /// group may be passed in several parts.
    #[inline(always)]
    pub(super) fn for_each_group(&self, node: Id, mut each: impl FnMut(usize, u64)) {
        let mut one = |h: Holder| {
            if h.copies() > 0 {
                each(h.instance() as usize / 64, 1 << (h.instance() % 64));
            }
        };
        match self.kind(node) {
            0 => {}
            SINGLE => one(self.pair(At { cell: node, word: WHO })),
            FEW => self.for_each_entry(self[node].0[WHO + 1], |_, h| one(h)),
            _ => self.for_each_group_cell(self[node].0[WHO + 1], |group| {
                let cell = &self[group];
                each((cell.0[COUNT] & NUMBER) as usize, cell.wide());
            }),
        }
    }

    /// Calls `each` with every entry of a node, and does nothing for a cell of another kind.
    pub(super) fn for_each_holder(&self, node: Id, mut each: impl FnMut(Holder)) {
        match self.kind(node) {
            0 => {}
            SINGLE => each(self.pair(At { cell: node, word: WHO })),
            FEW => self.for_each_entry(self[node].0[WHO + 1], |_, holder| each(holder)),
            _ => self.for_each_group_cell(self[node].0[WHO + 1], |group| {
                for word in LISTS {
                    self.for_each_entry(self[group].0[word], |_, holder| each(holder));
                }
            }),
        }
    }

    /// Returns whether the instance holds the node's block.
    #[inline(always)]
    pub(super) fn holds(&self, node: Id, instance: u32) -> bool {
        match self.kind(node) {
            MANY => self.group(node, instance).is_some_and(|g| self[g].wide() >> (instance % 64) & 1 == 1),
            _ => self.entry(node, instance).is_some_and(|(_, h)| h.copies() > 0),
        }
    }

    /// Returns the instance's entry on the node.
    #[inline(always)]
    pub(super) fn entry(&self, node: Id, instance: u32) -> Option<(At, Holder)> {
        let list = match self.kind(node) {
            0 => return None,
            SINGLE => {
                let at = At { cell: node, word: WHO };
                let holder = self.pair(at);
                return (holder.instance() == instance).then_some((at, holder));
            }
            FEW => self[node].0[WHO + 1],
            _ => {
                let group = self.group(node, instance)?;
                self[group].0[self.list_word(group, instance)]
            }
        };
        let mut cell = list;
        while cell != 0 {
            for &word in &PAIRS[..self[cell].0[COUNT] as usize & 3] {
                let at = At { cell, word };
                let holder = self.pair(at);
                if holder.instance() == instance {
                    return Some((at, holder));
                }
            }
            cell = self[cell].0[NEXT];
        }
        None
    }

    /// Adds an entry for an instance without one on the node. May take 33 cells: a directory with
    /// 6 branches, and 13 groups with one cell of entries each.
    pub(super) fn add_entry(&mut self, node: Id, holder: Holder) {
        let (who, aux) = (self[node].0[WHO], self[node].0[WHO + 1]);
        match who >> KIND_AT {
            0 => self.set_pair(At { cell: node, word: WHO }, holder),
            SINGLE => {
                let list = self.push(0, Holder { who, aux });
                self.set_pair(At { cell: node, word: WHO }, Holder { who: FEW << KIND_AT, aux: list });
                self.summarise(node, 1, i32::from(Holder { who, aux }.copies() > 0));
                self.add_entry(node, holder);
            }
            FEW if who >> ENTRIES_AT & HOLDERS == FEW_MOST => {
                let all = self.drain(aux);
                let directory = self.take();
                self.set_pair(At { cell: node, word: WHO }, Holder { who: MANY << KIND_AT, aux: directory });
                all.into_iter().for_each(|h| self.add_entry(node, h));
                self.add_entry(node, holder);
            }
            FEW => {
                self[node].0[WHO + 1] = self.push(aux, holder);
                self.summarise(node, 1, i32::from(holder.copies() > 0));
            }
            _ => {
                let group = self.group(node, holder.instance());
                let group = group.unwrap_or_else(|| self.open_group(aux, holder.instance() / 64));
                self.add_to_group(group, holder);
                self.set_bit(group, holder);
                self.summarise(node, 1, i32::from(holder.copies() > 0));
            }
        }
    }

    /// Overwrites an entry with a new one of the same instance.
    #[inline(always)]
    pub(super) fn set_entry(&mut self, node: Id, at: At, holder: Holder) {
        let was_held = self.pair(at).copies() > 0;
        self.set_pair(at, holder);
        let held = holder.copies() > 0;
        if at.cell != node && was_held != held {
            self.summarise(node, 0, i32::from(held) - i32::from(was_held));
            if self.kind(node) == MANY {
                let group = self.group(node, holder.instance()).expect("the group of an entry");
                self.set_bit(group, holder);
            }
        }
    }

    /// Removes an entry.
    pub(super) fn remove_entry(&mut self, node: Id, at: At) {
        let holder = self.pair(at);
        let held = -i32::from(holder.copies() > 0);
        match self.kind(node) {
            SINGLE => self.set_pair(at, Holder { who: 0, aux: 0 }),
            FEW => {
                self[node].0[WHO + 1] = self.pull(self[node].0[WHO + 1], at);
                if self.summarise(node, -1, held) == 1 {
                    let last = self.drain(self[node].0[WHO + 1]);
                    self.set_pair(At { cell: node, word: WHO }, last[0]);
                }
            }
            _ => {
                let group = self.group(node, holder.instance()).expect("the group of an entry");
                self.set_bit(group, holder.with_copies(0));
                let left_in_group = self.remove_from_group(group, holder.instance(), at);
                let left = self.summarise(node, -1, held);
                if left_in_group == 0 {
                    self.close_group(self[node].0[WHO + 1], group);
                }
                if left == FEW_MOST / 2 {
                    self.ungroup(node);
                }
            }
        }
    }

    /// Moves the entries of a node's groups to one list.
    fn ungroup(&mut self, node: Id) {
        let directory = self[node].0[WHO + 1];
        let (mut groups, mut all) = (Vec::new(), Vec::new());
        self.for_each_group_cell(directory, |group| groups.push(group));
        for group in groups {
            all.append(&mut self.drain_group(group));
            self.close_group(directory, group);
        }
        self.give(directory);
        self.set_pair(At { cell: node, word: WHO }, Holder { who: FEW << KIND_AT, aux: 0 });
        all.into_iter().for_each(|h| self.add_entry(node, h));
    }

    /// Updates the counts of a node of kind FEW or MANY, and returns the number of its entries.
    fn summarise(&mut self, node: Id, entries: i32, holders: i32) -> u32 {
        let who = &mut self[node].0[WHO];
        *who = who.wrapping_add_signed((entries << ENTRIES_AT) + holders);
        *who >> ENTRIES_AT & HOLDERS
    }

    fn set_bit(&mut self, group: Id, holder: Holder) {
        let bit = 1u64 << (holder.instance() % 64);
        let bits = self[group].wide() & !bit;
        self[group].set_wide(if holder.copies() > 0 { bits | bit } else { bits });
    }
}

/// Groups of a directory.
impl Cells {
    /// Returns the group of an instance on a node of kind MANY.
    #[inline(always)]
    fn group(&self, node: Id, instance: u32) -> Option<Id> {
        let number = instance / 64;
        let word = self[self[node].0[WHO + 1]].0[(number % WORDS) as usize];
        let group = match word & BRANCH {
            0 => word,
            _ => self[word ^ BRANCH].0[(number / WORDS % WORDS) as usize],
        };
        (group != 0 && self[group].0[COUNT] & NUMBER == number).then_some(group)
    }

    /// Calls `each` with the cell of each group.
    #[inline(always)]
    fn for_each_group_cell(&self, directory: Id, mut each: impl FnMut(Id)) {
        let words = self[directory].0;
        words.iter().for_each(|word| self.prefetch(word & !BRANCH));
        // Groups lie anywhere in memory: those of a branch arrive together, and while the groups
        // before are read.
        let fetch = |word: &u32| {
            if *word > BRANCH {
                self[*word ^ BRANCH].0.iter().for_each(|group| self.prefetch(*group));
            }
        };
        words.iter().take(BRANCHES_AHEAD).for_each(fetch);
        for (at, word) in words.into_iter().enumerate() {
            words.get(at + BRANCHES_AHEAD).into_iter().for_each(fetch);
            match word {
                0 => {}
                1..BRANCH => each(word),
                _ => self[word ^ BRANCH].0.into_iter().filter(|group| *group != 0).for_each(&mut each),
            }
        }
    }

    /// Adds an empty group and returns its cell.
    fn open_group(&mut self, directory: Id, number: u32) -> Id {
        let group = self.take();
        self[group].0[COUNT] = number;
        let at = (number % WORDS) as usize;
        let word = self[directory].0[at];
        if word == 0 {
            self[directory].0[at] = group;
            return group;
        }
        let mut branch = word ^ BRANCH;
        if word & BRANCH == 0 {
            branch = self.take();
            let before = self[word].0[COUNT] & NUMBER;
            self[branch].0[(before / WORDS) as usize] = word;
            self[directory].0[at] = branch | BRANCH;
        }
        self[branch].0[(number / WORDS) as usize] = group;
        group
    }

    /// Removes an empty group. A branch with one other group gives way to that group.
    fn close_group(&mut self, directory: Id, group: Id) {
        let number = self[group].0[COUNT] & NUMBER;
        let at = (number % WORDS) as usize;
        let word = self[directory].0[at];
        self.give(group);
        if word == group {
            self[directory].0[at] = 0;
            return;
        }
        let branch = word ^ BRANCH;
        self[branch].0[(number / WORDS) as usize] = 0;
        let mut others = self[branch].0.into_iter().filter(|other| *other != 0);
        if let (Some(last), None) = (others.next(), others.next()) {
            self[directory].0[at] = last;
            self.give(branch);
        }
    }
}

/// Entries of a group.
impl Cells {
    /// Returns the word of the group that begins the list with the instance's entry.
    #[inline(always)]
    fn list_word(&self, group: Id, instance: u32) -> usize {
        if self[group].0[COUNT] & SPLIT == 0 { ENTRIES } else { split_word(instance) }
    }

    fn add_to_group(&mut self, group: Id, holder: Holder) {
        let state = self[group].0[COUNT];
        if state & SPLIT == 0 && state / ENTRY == LIST_MOST {
            let all = self.drain_group(group);
            self[group].0[COUNT] |= SPLIT;
            all.into_iter().for_each(|h| self.push_in_group(group, h));
        }
        self.push_in_group(group, holder);
        self[group].0[COUNT] += ENTRY;
    }

    fn push_in_group(&mut self, group: Id, holder: Holder) {
        let word = self.list_word(group, holder.instance());
        self[group].0[word] = self.push(self[group].0[word], holder);
    }

    /// Removes the entry at `at` and returns the number of the group's other entries.
    fn remove_from_group(&mut self, group: Id, instance: u32, at: At) -> u32 {
        let word = self.list_word(group, instance);
        self[group].0[word] = self.pull(self[group].0[word], at);
        self[group].0[COUNT] -= ENTRY;
        let left = (self[group].0[COUNT] & !SPLIT) / ENTRY;
        if self[group].0[COUNT] & SPLIT != 0 && left == LIST_MOST / 2 {
            let all = self.drain_group(group);
            self[group].0[COUNT] &= !SPLIT;
            all.into_iter().for_each(|h| self.push_in_group(group, h));
        }
        left
    }

    /// Frees the lists of a group, but leaves its count, and returns their entries.
    fn drain_group(&mut self, group: Id) -> Vec<Holder> {
        let lists = LISTS.map(|word| std::mem::take(&mut self[group].0[word]));
        lists.into_iter().flat_map(|list| self.drain(list)).collect()
    }
}

/// Returns the word of a split group that begins the list with the instance's entry.
#[inline(always)]
fn split_word(instance: u32) -> usize {
    LISTS[(instance % 64) as usize % LISTS.len()]
}

/// Lists of entries: only the first cell may be partly filled.
impl Cells {
    #[inline(always)]
    fn for_each_entry(&self, list: Id, mut each: impl FnMut(At, Holder)) {
        let mut cell = list;
        while cell != 0 {
            for &word in &PAIRS[..self[cell].0[COUNT] as usize & 3] {
                let at = At { cell, word };
                each(at, self.pair(at));
            }
            cell = self[cell].0[NEXT];
        }
    }

    /// Adds an entry to the list and returns its first cell.
    fn push(&mut self, list: Id, holder: Holder) -> Id {
        let first = if list == 0 || self[list].0[COUNT] as usize == PAIRS.len() {
            let cell = self.take();
            self[cell].0[NEXT] = list;
            cell
        } else {
            list
        };
        let count = self[first].0[COUNT];
        self.set_pair(At { cell: first, word: PAIRS[count as usize] }, holder);
        self[first].0[COUNT] = count + 1;
        first
    }

    /// Removes the entry at `at` from the list and returns its first cell, or 0 if the list is
    /// empty.
    fn pull(&mut self, list: Id, at: At) -> Id {
        let count = self[list].0[COUNT] - 1;
        let last = self.pair(At { cell: list, word: PAIRS[count as usize] });
        self.set_pair(at, last);
        self[list].0[COUNT] = count;
        if count > 0 {
            return list;
        }
        let next = self[list].0[NEXT];
        self.give(list);
        next
    }

    /// Frees the list and returns its entries.
    fn drain(&mut self, list: Id) -> Vec<Holder> {
        let mut all = Vec::new();
        self.for_each_entry(list, |_, h| all.push(h));
        let mut cell = list;
        while cell != 0 {
            let next = self[cell].0[NEXT];
            self.give(cell);
            cell = next;
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    /// One block of all instances, as a system prompt has it, costs a few steps per instance.
    #[test]
    fn the_entry_of_an_instance_is_near() {
        let mut cells = Cells::default();
        let node = cells.take();
        for instance in 0..64 * 64 {
            cells.add_entry(node, Holder::end(instance));
        }
        let (mut groups, mut longest) = (0, 0);
        cells.for_each_group_cell(cells[node].0[WHO + 1], |group| {
            groups += 1;
            for word in LISTS {
                let mut entries = 0;
                cells.for_each_entry(cells[group].0[word], |_, _| entries += 1);
                longest = longest.max(entries);
            }
        });
        assert_eq!((groups, longest), (64, 13));
        assert!((0..64 * 64).all(|instance| cells.holds(node, instance)));
    }

    proptest! {
        /// The entries of a node behave like a map from instance to holder, and all cells are freed
        /// in the end.
        #[test]
        fn entries_behave_like_a_map(
            spread in prop::sample::select(vec![1u32, 40, 130]),
            (instances, adds) in (12u32..31, 1u32..6),
            steps in prop::collection::vec((0u32..6, 0u32..90, 0u32..3), 1..400),
        ) {
            let mut cells = Cells::default();
            let node = cells.take();
            let used = |cells: &Cells| cells.capacity() - cells.available();
            let empty = used(&cells);
            let mut model: BTreeMap<u32, (u32, u32)> = BTreeMap::new();
            // Few instances far apart, or more of one group; mostly added, or mostly removed.
            let instances = if spread == 1 { 3 * instances } else { instances };
            for (step, instance, copies) in steps {
                let instance = instance % instances * spread;
                let step = if step < adds { 0 } else { 1 + step % 2 };
                match (step, cells.entry(node, instance)) {
                    (0, None) => {
                        let holder = Holder::hole(instance).with_copies(copies);
                        cells.add_entry(node, holder);
                        model.insert(instance, (copies, 1));
                    }
                    (1, Some((at, h))) => {
                        let children = h.children() + 1;
                        cells.set_entry(node, at, h.with_copies(copies).with_children(children));
                        model.insert(instance, (copies, children));
                    }
                    (2, Some((at, _))) => {
                        cells.remove_entry(node, at);
                        model.remove(&instance);
                    }
                    _ => {}
                }
                let held: Vec<u32> = model.iter().filter(|(_, v)| v.0 > 0).map(|(i, _)| *i).collect();
                prop_assert_eq!(cells.holders(node) as usize, held.len());
                let mut listed = Vec::new();
                cells.for_each_group(node, |group, bits| {
                    listed.extend((0..64).filter(|b| bits >> b & 1 == 1).map(|b| group as u32 * 64 + b));
                });
                listed.sort_unstable();
                prop_assert_eq!(&listed, &held);
                for instance in (0..instances).map(|i| i * spread) {
                    let entry = cells.entry(node, instance).map(|(_, h)| (h.copies(), h.children()));
                    prop_assert_eq!(entry, model.get(&instance).copied());
                    prop_assert_eq!(cells.holds(node, instance), held.contains(&instance));
                }
                let mut entries = 0;
                cells.for_each_holder(node, |_| entries += 1);
                prop_assert_eq!(entries, model.len());
            }
            for instance in model.keys() {
                let (at, _) = cells.entry(node, *instance).unwrap();
                cells.remove_entry(node, at);
            }
            prop_assert!(cells.is_bare(node));
            prop_assert_eq!(used(&cells), empty);
        }
    }
}

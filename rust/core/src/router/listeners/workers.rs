//! Workers of one server: processes behind one port, each with a router of its own. Each router
//! writes its load on an instance to the shared [`Board`] when it changes, and reads that of the
//! others before each decision. So a decision counts all requests that any worker has placed.
//!
//! Learned values, and what single requests do, stay local to each router. Tokens that streams
//! produce change a row with the next request, or with [`Workers::publish_all`].
use super::replicas::Replicas;
use crate::board::{Board, NUMBERS, WRITERS};
use crate::fleet::{Fleet, Member};
use crate::ids::{Seconds, Slot};
use crate::router::ledger::{Ledger, Share};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

const _: () = assert!(Share::NAMES.len() == NUMBERS);

/// The load of one router, for the other workers, and what it has read of theirs.
pub struct Workers {
    board: Arc<Board>,
    /// Part of the keys of all instances, because a server may have several routers.
    model: u64,
    /// By slot: the row of the own load, once there is one.
    rows: Vec<Option<Row>>,
    slots: HashMap<u64, u32>,
    /// By worker: its changes that have been read; `None`: its rows must be read anew.
    seen: [Option<u64>; WRITERS],
    /// By worker and row: the slot whose load it has.
    known: [Vec<Option<u32>>; WRITERS],
    changed: Vec<u32>,
    /// Slots with load for which the board has no row.
    lacking: BTreeSet<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Row {
    number: u32,
    /// Whether the written load is zero.
    idle: bool,
}

impl Workers {
    /// Joins a board. `model`: a number that the routers of the same model in all workers share.
    pub fn new(board: Arc<Board>, model: u64, fleet: &Fleet) -> Workers {
        let mut workers = Workers {
            board,
            model,
            rows: vec![None; fleet.slots()],
            slots: HashMap::new(),
            seen: [None; WRITERS],
            known: Default::default(),
            changed: Vec::new(),
            lacking: BTreeSet::new(),
        };
        for slot in (0..fleet.slots()).filter(|slot| fleet.is_live(Slot(*slot as u32))) {
            workers.slots.insert(workers.key(fleet, slot), slot as u32);
        }
        workers
    }

    /// Gives all rows back: this router's load counts nowhere from then on.
    pub fn leave(self) {
        self.rows.iter().flatten().for_each(|row| self.board.give(row.number));
    }

    /// Returns whether an instance's load is not published, because the board has no row for it.
    pub fn is_full(&self) -> bool {
        !self.lacking.is_empty()
    }

    /// Returns the key of an instance; not 0, which marks free rows.
    fn key(&self, fleet: &Fleet, slot: usize) -> u64 {
        (fleet.name_hashes()[slot] ^ self.model).max(1)
    }

    /// Follows a change of the fleet.
    pub fn member(&mut self, member: Member, fleet: &Fleet) {
        match member {
            Member::Added { id, .. } => {
                self.rows.resize(fleet.slots(), None);
                self.slots.insert(self.key(fleet, id.index()), id.0);
                self.seen = [None; WRITERS]; // others may have placed requests there before
            }
            Member::Removed(id) => {
                self.slots.retain(|_, slot| *slot != id.0);
                for slot in self.known.iter_mut().flatten() {
                    *slot = slot.filter(|slot| *slot != id.0);
                }
                self.lacking.remove(&id.index());
                if let Some(row) = self.rows[id.index()].take() {
                    self.board.give(row.number);
                }
            }
        }
    }

    /// Writes the changed load.
    pub fn publish(&mut self, ledger: &mut Ledger, fleet: &Fleet, now: Seconds) {
        if ledger.changes.take(&mut self.changed) {
            let mut changed = std::mem::take(&mut self.changed);
            changed.drain(..).for_each(|slot| self.write(ledger, fleet, slot as usize, now));
            self.changed = changed;
        }
    }

    /// Writes the load on every slot that has any: queued prefills shrink and streams grow between
    /// the changes that are written at once.
    pub fn publish_all(&mut self, ledger: &Ledger, fleet: &Fleet, now: Seconds) {
        for slot in 0..self.rows.len() {
            if self.rows[slot].is_some_and(|row| !row.idle) || self.lacking.contains(&slot) {
                self.write(ledger, fleet, slot, now);
            }
        }
    }

    fn write(&mut self, ledger: &Ledger, fleet: &Fleet, slot: usize, now: Seconds) {
        if !fleet.is_live(Slot(slot as u32)) {
            return; // its row is given back
        }
        let share = ledger.share(slot, now);
        let idle = share.is_nothing();
        if self.rows[slot].is_none() && !idle {
            self.rows[slot] = self.board.take().map(|number| Row { number, idle });
        }
        match self.rows[slot].is_none() && !idle {
            true => self.lacking.insert(slot),
            false => self.lacking.remove(&slot),
        };
        if let Some(row) = self.rows[slot] {
            self.board.write(row.number, self.key(fleet, slot), &share.numbers());
            self.rows[slot] = Some(Row { idle, ..row });
        }
    }

    /// Reads what other workers have written since the last call.
    #[inline]
    pub fn read(&mut self, replicas: &mut Replicas, ledger: &mut Ledger, now: Seconds) {
        for worker in self.board.others() {
            let until = self.board.changes(worker);
            if self.seen[worker] != Some(until) {
                self.read_worker(worker, until, replicas, ledger, now);
            }
        }
    }

    #[cold]
    fn read_worker(
        &mut self,
        worker: usize,
        until: u64,
        replicas: &mut Replicas,
        ledger: &mut Ledger,
        now: Seconds,
    ) {
        let mut rows = std::mem::take(&mut self.changed);
        let follows =
            self.seen[worker].is_some_and(|since| self.board.changed(worker, since, until, &mut rows));
        if follows {
            rows.sort_unstable();
            rows.dedup();
        } else {
            rows.clear();
            rows.extend(0..self.board.rows(worker).max(self.known[worker].len() as u32));
        }
        for row in &rows {
            self.read_row(worker, *row, replicas, ledger, now);
        }
        rows.clear();
        self.changed = rows;
        self.seen[worker] = Some(until);
    }

    /// Reads a row.
    fn read_row(
        &mut self,
        worker: usize,
        row: u32,
        replicas: &mut Replicas,
        ledger: &mut Ledger,
        now: Seconds,
    ) {
        let Some((key, numbers)) = self.board.read(worker, row) else { return };
        let slot = self.slots.get(&key).copied();
        let known = &mut self.known[worker];
        if known.len() <= row as usize {
            known.resize(row as usize + 1, None);
        }
        if let Some(before) = std::mem::replace(&mut known[row as usize], slot)
            && Some(before) != slot
        {
            replicas.set_worker(ledger, worker, before as usize, Share::default(), now);
        }
        // Another process may write anything; a number that is no load would stay for ever.
        if let Some(slot) = slot
            && numbers.iter().all(|number| (0.0..=1e15).contains(number))
        {
            replicas.set_worker(ledger, worker, slot as usize, Share::of(numbers), now);
        }
    }
}

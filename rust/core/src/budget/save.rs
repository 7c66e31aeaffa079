//! Saves of all counts, in steps, so that no request waits for all rows.
use super::exchange::{Exchange, Origin};
use super::message::{Kind, Part, Words, read, write};
use super::ring::WORDS;
use super::rows::Row;
use super::{Board, Budgets, Now};
use crate::error::CoreError;
use hashbrown::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Rows of a step of a save: requests wait some 2 ms for it.
pub(super) const SAVED_ROWS: usize = 1024;

/// A save of all counts, in steps ([`Budgets::begin_save`]).
pub struct Saving {
    now: Now,
    /// The origin of this router's counts.
    own: u64,
    /// With other routers: the own windows whose rows are still to be entered, until all are.
    entering: Option<Entering>,
    /// Windows whose rows are still to be read.
    keys: Vec<u64>,
    board: Option<Arc<Board>>,
    parts: HashMap<u64, Part>,
    /// Rows that the board has got meanwhile: their counts replace those that it had before.
    moved: HashMap<u64, [u64; WORDS]>,
}

/// Rows of this router that a save has to enter.
struct Entering {
    /// The first version of the save.
    version: u64,
    /// Rows of the board.
    board: Range<usize>,
    /// Windows whose rows are of this process.
    keys: Vec<u64>,
}

impl Saving {
    /// Reads the board, which needs no [`Budgets`].
    pub fn read_board(&mut self) {
        let Some(board) = self.board.take() else { return };
        for row in board.budgets() {
            if let Some(words) = row.read() {
                self.add(row.key, words);
            }
        }
    }

    /// Begins to read the rows, which are entered.
    fn begin_rows(&mut self, exchange: &Exchange) {
        self.entering = None;
        let version = |(id, origin): (&u64, &Origin)| (*id, origin.changed);
        let origins = exchange.origins.iter().map(version).chain([(exchange.origin, exchange.changed)]);
        self.parts.extend(origins.map(|(id, changed)| (id, Part::whole(id, changed))));
        let others = exchange.others.keys().filter(|key| !exchange.published.contains_key(*key));
        self.keys.extend(exchange.published.keys().chain(others));
    }

    /// Adds a window of all origins. Drops what counts no more of it.
    fn add_all(&mut self, key: u64, exchange: &mut Exchange) {
        if let Some(published) = exchange.published.get(&key) {
            self.add(key, published.words);
        }
        let Some(others) = exchange.others.get_mut(&key) else { return };
        if !others.prune(Kind::of(key), self.now) {
            exchange.others.remove(&key);
            return;
        }
        for (id, words) in &others.by_origin {
            if let Some(part) = self.parts.get_mut(id) {
                part.rows.push((key, words.clone()));
            }
        }
    }

    /// Adds a row of this router.
    fn add(&mut self, key: u64, words: [u64; WORDS]) {
        let kind = Kind::of(key);
        let words: Words = (0..).zip(words).filter(|(_, word)| kind.counts(*word, self.now)).collect();
        if let Some(part) = self.parts.get_mut(&self.own).filter(|_| !words.is_empty()) {
            part.rows.push((key, words));
        }
    }

    /// Returns the counts as bytes for [`Budgets::restore`].
    pub fn finish(mut self) -> Vec<u8> {
        let moved = std::mem::take(&mut self.moved);
        if let Some(part) = self.parts.get_mut(&self.own).filter(|_| !moved.is_empty()) {
            part.rows.retain(|(key, _)| !moved.contains_key(key));
        }
        moved.into_iter().for_each(|(key, words)| self.add(key, words));
        let mut parts: Vec<Part> = self.parts.into_values().collect();
        // Equal counts are equal bytes.
        parts.sort_unstable_by_key(|part| part.origin);
        parts.iter_mut().for_each(|part| part.rows.sort_unstable_by_key(|(key, ..)| *key));
        write(&parts, Now::default())
    }
}

impl Budgets {
    /// Returns the counts of all windows, also of those that only other workers use, for a file.
    pub fn save(&mut self, now: Now) -> Vec<u8> {
        let mut saving = self.begin_save(now);
        saving.read_board();
        while self.save_rows(&mut saving) {}
        saving.finish()
    }

    /// Begins [`Budgets::save`] in steps, so that requests need not wait for all rows: then call
    /// [`Saving::read_board`], [`Budgets::save_rows`] while it returns true, and
    /// [`Saving::finish`]. Each row has the counts of its step.
    pub fn begin_save(&mut self, now: Now) -> Saving {
        self.tidy(now);
        let own_keys = self.rows.own_keys().collect();
        let (parts, moved) = (HashMap::new(), HashMap::new());
        let Some(exchange) = &self.exchange else {
            let (board, parts) = (self.rows.board(), HashMap::from([(0, Part::whole(0, 0))]));
            return Saving { now, own: 0, entering: None, keys: own_keys, board, parts, moved };
        };
        let version = exchange.version + 1;
        let entering = Some(Entering { version, board: self.rows.board_rows(), keys: own_keys });
        Saving { now, own: exchange.origin, entering, keys: Vec::new(), board: None, parts, moved }
    }

    /// Does the next step of a save. Returns whether there are more.
    pub fn save_rows(&mut self, saving: &mut Saving) -> bool {
        if let (Some(entering), Some(exchange)) = (&mut saving.entering, &mut self.exchange) {
            // Each step is a version: a message between two steps has what was entered before it.
            exchange.version += 1;
            let Entering { board, keys, version } = entering;
            let to = board.end.min(board.start + SAVED_ROWS);
            for row in self.rows.board_rows_in(board.start..to) {
                exchange.enter(row.key, row.changes, || row.read());
            }
            board.start = to;
            for key in keys.split_off(keys.len().saturating_sub(SAVED_ROWS)) {
                if let Some(row) = self.rows.get(key) {
                    exchange.enter(key, row.changes().load(Ordering::Acquire), || Some(row.load()));
                }
            }
            if board.start == board.end && keys.is_empty() {
                exchange.drop_unseen(*version);
                saving.begin_rows(exchange);
            }
            return true;
        }
        for key in saving.keys.split_off(saving.keys.len().saturating_sub(SAVED_ROWS)) {
            match &mut self.exchange {
                Some(exchange) => saving.add_all(key, exchange),
                None => match self.rows.get(key) {
                    Some(row @ Row::Own(_)) => saving.add(key, row.load()),
                    // The board has got the row since the begin of the save.
                    Some(row @ Row::Shared(_)) => _ = saving.moved.insert(key, row.load()),
                    None => {} // it counts no longer
                },
            }
        }
        if !saving.keys.is_empty() {
            return true;
        }
        if let Some(exchange) = &mut self.exchange {
            exchange.drop_silent(saving.now, |id| {
                saving.parts.get(&id).is_some_and(|part| !part.rows.is_empty())
            });
            let own = saving.own;
            saving.parts.retain(|id, _| *id == own || exchange.origins.contains_key(id));
        }
        false
    }

    /// Adds saved counts, before the first request.
    ///
    /// # Errors
    /// `BadValue` for bytes that [`Budgets::save`] has not returned, or not all of them. Then
    /// nothing is added.
    pub fn restore(&mut self, bytes: &[u8], now: Now) -> Result<(), CoreError> {
        let (parts, _) = read(bytes)?;
        if let Some(exchange) = &mut self.exchange {
            exchange.apply(parts, now);
            return Ok(());
        }
        for (key, words) in parts.into_iter().flat_map(|part| part.rows) {
            self.rows.restore(key, words, now);
        }
        Ok(())
    }
}

//! The counts of all windows as bytes, for a file.
use super::{Budgets, Row, WORDS, row};
use crate::error::CoreError;
use std::sync::atomic::{AtomicU64, Ordering};
use xxhash_rust::xxh3::xxh3_64;

const FORMAT: u64 = 0x6c6d_6275_6467_6531;

impl Budgets {
    /// Returns the counts of all windows, also of those that only other workers use.
    pub fn save(&self) -> Vec<u8> {
        let mut numbers = vec![FORMAT];
        for (key, words) in self.board.iter().flat_map(|board| board.budgets()) {
            push(&mut numbers, key, words);
        }
        for (key, row) in self.rows.iter().filter(|(_, row)| matches!(row, Row::Own(_))) {
            push(&mut numbers, *key, row.words());
        }
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Adds saved counts, before the first request.
    ///
    /// # Errors
    /// `BadValue` for bytes that [`Budgets::save`] has not returned, or not all of them. Then
    /// nothing is added.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), CoreError> {
        let bad = |got: String| CoreError::BadValue {
            what: "saved budgets".into(),
            got,
            expected: "a whole file of this version of the router".into(),
        };
        let numbers: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes")))
            .collect();
        let Some(([FORMAT, rows @ ..], sum)) = numbers.split_last().map(|(sum, rest)| (rest, *sum)) else {
            return Err(bad(format!("a file of {} bytes of another format", bytes.len())));
        };
        if !bytes.len().is_multiple_of(8) || sum != xxh3_64(&bytes[..bytes.len() - 8]) {
            return Err(bad(format!("{} bytes with a wrong checksum", bytes.len())));
        }
        let mut found = Vec::new();
        let mut rest = rows;
        while let [key, count, more @ ..] = rest {
            let length = usize::try_from(*count).ok().filter(|count| *count <= WORDS).map(|count| 2 * count);
            let pairs = length.and_then(|length| more.get(..length));
            let pairs = pairs.ok_or_else(|| bad("a row of a wrong length".into()))?;
            found.push((*key, pairs));
            rest = &more[pairs.len()..];
        }
        for (key, pairs) in found {
            let row = self.rows.entry(key).or_insert_with(|| row(self.board.as_ref(), key));
            for pair in pairs.chunks_exact(2) {
                row.words()[pair[0] as usize % WORDS].store(pair[1], Ordering::Release);
            }
        }
        Ok(())
    }
}

/// Adds a row: its key, the number of words in use, and each such word with its place.
fn push(numbers: &mut Vec<u64>, key: u64, words: &[AtomicU64]) {
    let words = words.iter().map(|word| word.load(Ordering::Acquire));
    let used: Vec<_> = words.enumerate().filter(|(_, word)| *word != 0).collect();
    if !used.is_empty() {
        numbers.extend([key, used.len() as u64]);
        numbers.extend(used.into_iter().flat_map(|(place, word)| [place as u64, word]));
    }
}

//! Counts of budgets as bytes, for other routers and for files.
//!
//! A message ([`crate::codec`]) has [`MAGIC`], the sender's two clocks, and the number of origins,
//! the sender first. An origin has its ID, its version, 1 plus the version that it changes (0: all
//! of its counts), and rows: key, and words with their places. A checksum ends the message.
use super::Now;
use super::calendar::{Period, Zone};
use super::ring::{AMOUNT_BITS, MOST, ROLLING, TAGS, WORDS, part_seconds};
use crate::codec::{Malformed, Reader, write_int};
use crate::error::CoreError;
use crate::ids::Seconds;
use xxhash_rust::xxh3::xxh3_64;

/// First bytes of a message; the last one is the format.
const MAGIC: &[u8; 8] = b"lmbudge2";
/// Most seconds between the clocks of two routers that share counts.
pub const MOST_SKEW: Seconds = 60.0;
/// Most origins whose counts are kept. Without room, the origin with the longest silence goes.
pub const MOST_ORIGINS: usize = 256;
const MOST_ROWS: usize = 1 << 20;
const DAY: Seconds = 86_400.0;

/// Words with their places in a row.
pub type Words = Vec<(u8, u64)>;

/// The kind of a window: when its counts no longer count. The last bits of a key have it, so that
/// whoever has only the counts knows it, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind(u8);

const KIND_BITS: u32 = 4;

impl Kind {
    /// Returns the kind of windows of a period.
    pub fn new(period: Period, is_calendar: bool) -> Kind {
        let place = Period::NAMES.iter().position(|(_, each)| *each == period).unwrap_or(0);
        Kind(2 * place as u8 + u8::from(is_calendar))
    }

    /// Returns the kind in a key.
    pub fn of(key: u64) -> Kind {
        Kind((key & ((1 << KIND_BITS) - 1)) as u8)
    }

    /// Returns a key with this kind.
    pub fn mark(self, key: u64) -> u64 {
        key >> KIND_BITS << KIND_BITS | u64::from(self.0)
    }

    /// Returns whether a word may still count, in any time zone.
    pub fn counts(self, word: u64, now: Now) -> bool {
        if word & MOST == 0 {
            return false;
        }
        let Some((_, period)) = Period::NAMES.get(usize::from(self.0 / 2)) else { return false };
        if self.0.is_multiple_of(2) {
            let part = (now.steady / part_seconds(period.seconds())).floor() as i64;
            return ROLLING.age(word, part).is_some();
        }
        let number = Zone::default().number(*period, now.unix);
        let behind = (number - (word >> AMOUNT_BITS) as i64).rem_euclid(TAGS);
        let behind = if behind < TAGS / 2 { behind } else { behind - TAGS };
        // Time zones differ by a day at most, routers by `MOST_SKEW`.
        let margin = 1 + ((DAY + MOST_SKEW) / period.seconds()).ceil() as i64;
        behind.abs() <= margin
    }
}

/// An origin's part of a message.
#[derive(Debug)]
pub struct Part {
    /// ID of the origin.
    pub origin: u64,
    /// Version of its counts.
    pub version: u64,
    /// Version that the part changes; none: it has all counts.
    pub base: Option<u64>,
    /// By window: key and counts.
    pub rows: Vec<(u64, Words)>,
}

impl Part {
    /// Creates a part for all counts of an origin.
    pub fn whole(origin: u64, version: u64) -> Part {
        Part { origin, version, base: None, rows: Vec::new() }
    }
}

/// Returns a message. `now`: the clocks of the sender.
pub fn write(parts: &[Part], now: Now) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(now.steady.to_le_bytes());
    out.extend(now.unix.to_le_bytes());
    write_int(&mut out, parts.len() as u64);
    for Part { origin, version, base, rows } in parts {
        out.extend(origin.to_le_bytes());
        write_int(&mut out, *version);
        write_int(&mut out, base.map_or(0, |base| base + 1));
        write_int(&mut out, rows.len() as u64);
        for (key, words) in rows {
            out.extend(key.to_le_bytes());
            out.push(words.len() as u8);
            for (place, word) in words {
                out.push(*place);
                out.extend(word.to_le_bytes());
            }
        }
    }
    let sum = xxh3_64(&out);
    out.extend(sum.to_le_bytes());
    out
}

/// Reads a message, and checks all of it. Returns the sender's clocks, too.
pub fn read(bytes: &[u8]) -> Result<(Vec<Part>, Now), CoreError> {
    let bad = |got: String| CoreError::BadValue {
        what: "counts of budgets".into(),
        got,
        expected: "all of them, of this version of the router".into(),
    };
    let inner = bytes.strip_prefix(MAGIC).and_then(|inner| inner.split_last_chunk::<8>());
    let Some((inner, sum)) = inner else {
        return Err(bad(format!("{} bytes of another format", bytes.len())));
    };
    if u64::from_le_bytes(*sum) != xxh3_64(&bytes[..bytes.len() - 8]) {
        return Err(bad(format!("{} bytes with a wrong checksum", bytes.len())));
    }
    parts(inner).map_err(|Malformed(problem)| bad(problem))
}

fn parts(bytes: &[u8]) -> Result<(Vec<Part>, Now), Malformed> {
    let mut rest = Reader(bytes);
    let mut clock = || {
        let seconds = f64::from_bits(rest.word("a clock")?);
        if seconds.is_finite() { Ok(seconds) } else { Err(Malformed(format!("a clock at {seconds}"))) }
    };
    let then = Now { steady: clock()?, unix: clock()? };
    let mut parts = Vec::new();
    for _ in 0..rest.count(MOST_ORIGINS + 1, "origins")? {
        let origin = rest.word("an origin")?;
        let version = rest.int("a version")?;
        let base = rest.int("the version that it changes")?.checked_sub(1);
        let mut rows = Vec::new();
        for _ in 0..rest.count(MOST_ROWS, "rows")? {
            let key = rest.word("a key")?;
            let mut words = Words::new();
            for _ in 0..rest.byte("the number of words")? {
                let place = rest.byte("a place")?;
                if usize::from(place) >= WORDS {
                    return Err(Malformed(format!("place {place} in a row of {WORDS} words")));
                }
                words.push((place, rest.word("a word")?));
            }
            rows.push((key, words));
        }
        parts.push(Part { origin, version, base, rows });
    }
    rest.end()?;
    Ok((parts, then))
}

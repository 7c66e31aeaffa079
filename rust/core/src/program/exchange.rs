//! Programs in load messages: what a router publishes of its programs, in binary form.
//!
//! [`crate::codec`] has the forms of numbers and texts. The programs of a model are
//!
//! 1. the router's measurements since its start: six numbers of prefill and of pauses (8 bytes
//!    each);
//! 2. the number of instances that the programs have as homes, and their names;
//! 3. the number of programs, and the programs;
//! 4. the number of keys of programs that ended, and the keys (8 bytes each).
//!
//! A program has hashes of its tenant, its session and its prompt, and no text.
use super::gaps::Finish;
use super::lineage::Prompt;
use super::types::{Root, State};
use super::waste::Measured;
use crate::codec::{Malformed, Reader, write_bytes, write_float, write_int};
use crate::ids::Seconds;
use crate::levels::LEVELS;

/// Most programs that a router publishes; those without a change for the longest time are left out.
pub const MAX_PUBLISHED: usize = 4096;
/// Most bytes of a program without its checkpoints: 12 of floats, 56 of words, 24 of integers, and
/// 3 others.
const ROW_BYTES: usize = 96;
/// Maximum number of checkpoints of a prompt: one of 2^32 blocks has 325.
const MAX_CHECKPOINTS: usize = 336;
/// Maximum number of bytes of an instance's name.
const MAX_NAME: usize = 200;
/// Tokens from which a context is impossible.
const MAX_TOKENS: u64 = 1 << 40;

/// Bits of a program's flags, above its state.
const STATE_BITS: u8 = 0b11;
const FINAL: u8 = 1 << 2;
const CAME_BACK: u8 = 1 << 3;
const FORGOTTEN: u8 = 1 << 4;
const HAS_RUN: u8 = 1 << 5;
const HAS_SESSION: u8 = 1 << 6;
const HAS_BASE: u8 = 1 << 7;

/// A program that a router publishes.
#[derive(Clone, Debug, PartialEq)]
pub struct PeerProgram {
    /// The number that all routers use for it.
    pub key: u64,
    /// Number of its turns. The router with the latest turn owns the program.
    pub turn: u64,
    /// State.
    pub state: State,
    /// Its home, as a place in [`PeerPrograms::instances`].
    pub home: Option<usize>,
    /// Hash of its tenant.
    pub tenant: u64,
    /// Share of its tenant.
    pub weight: f64,
    /// Priority level of its latest request.
    pub level: i8,
    /// Hash of its session.
    pub session: Option<u64>,
    /// Seconds since its first request.
    pub age_seconds: Seconds,
    /// Seconds since its last answer; of a held program, since its request.
    pub rest_seconds: Seconds,
    /// Tokens of its context.
    pub tokens: u64,
    /// The part of the context that it shares with other programs.
    pub base: Option<Root>,
    /// Key of the program whose context it continues; 0: none.
    pub parent: u64,
    /// Why its last answer ended.
    pub finish: Finish,
    /// Whether its client said that it ended, whether a request continued it, whether its gap
    /// counts as an end, and whether one of its turns has run.
    pub flags: [bool; 4],
    /// Its latest prompt.
    pub prompt: Prompt,
}

/// Programs that a router publishes, or the changes of them since an earlier message.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PeerPrograms {
    /// The router's measurements since its start.
    pub measured: Measured,
    /// Names of the programs' homes.
    pub instances: Vec<Box<str>>,
    /// The programs.
    pub programs: Vec<PeerProgram>,
    /// Keys of programs that ended.
    pub gone: Vec<u64>,
}

impl PeerPrograms {
    /// Returns a number of bytes that [`PeerPrograms::encode`] does not exceed.
    pub fn most_bytes(&self) -> usize {
        let names: usize = self.instances.iter().map(|name| name_bytes(name)).sum();
        let rows: usize = self.programs.iter().map(PeerProgram::most_bytes).sum();
        HEAD_BYTES + names + rows + 8 * self.gone.len()
    }

    /// Writes the programs.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.measured.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        write_int(out, self.instances.len() as u64);
        self.instances.iter().for_each(|name| write_bytes(out, name.as_bytes()));
        write_int(out, self.programs.len() as u64);
        self.programs.iter().for_each(|program| program.encode(out));
        write_int(out, self.gone.len() as u64);
        self.gone.iter().for_each(|key| out.extend_from_slice(&key.to_le_bytes()));
    }

    /// Reads programs, and checks all of them.
    ///
    /// # Errors
    /// `Malformed` for other bytes, an impossible number, or too many programs.
    pub fn decode(rest: &mut Reader<'_>) -> Result<PeerPrograms, Malformed> {
        let mut measured = Measured::default();
        for number in &mut measured {
            *number = in_range(f64::from_bits(rest.word("prefill")?), 0.0, 1e15, "of prefill or pauses")?;
        }
        let mut read = PeerPrograms { measured, ..PeerPrograms::default() };
        for _ in 0..rest.count(MAX_PUBLISHED, "homes of programs")? {
            read.instances.push(rest.text(MAX_NAME, "a home of programs")?.into());
        }
        for _ in 0..rest.count(MAX_PUBLISHED, "programs")? {
            read.programs.push(PeerProgram::decode(rest, read.instances.len())?);
        }
        for _ in 0..rest.count(MAX_ENDED, "ended programs")? {
            read.gone.push(rest.word("an ended program")?);
        }
        Ok(read)
    }
}

/// Most bytes of what was measured, and of the numbers of homes, programs and keys.
pub(super) const HEAD_BYTES: usize = 64;

/// Returns the most bytes of an instance's name.
pub(super) fn name_bytes(name: &str) -> usize {
    name.len() + 2
}

/// Maximum number of keys of ended programs in a message.
pub(super) const MAX_ENDED: usize = 1 << 16;

fn in_range(number: f64, least: f64, most: f64, what: &str) -> Result<f64, Malformed> {
    if (least..=most).contains(&number) {
        Ok(number)
    } else {
        Err(Malformed(format!("{number} {what}; expected {least} to {most}")))
    }
}

impl PeerProgram {
    /// Returns a number of bytes that the program's row does not exceed.
    pub(super) fn most_bytes(&self) -> usize {
        ROW_BYTES + 8 * self.prompt.checkpoints.len()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let word = |out: &mut Vec<u8>, word: u64| out.extend_from_slice(&word.to_le_bytes());
        let bits = [FINAL, CAME_BACK, FORGOTTEN, HAS_RUN].into_iter().zip(self.flags);
        let flags = bits.map(|(bit, set)| if set { bit } else { 0 }).sum::<u8>() | self.state as u8;
        let flags = flags | if self.session.is_some() { HAS_SESSION } else { 0 };
        out.push(flags | if self.base.is_some() { HAS_BASE } else { 0 });
        out.extend_from_slice(&[self.finish as u8, self.level as u8]);
        word(out, self.key);
        write_int(out, self.turn);
        write_int(out, self.home.map_or(0, |place| place as u64 + 1));
        word(out, self.tenant);
        [self.weight, self.age_seconds, self.rest_seconds].iter().for_each(|each| write_float(out, *each));
        self.session.iter().for_each(|session| word(out, *session));
        write_int(out, self.tokens);
        if let Some(base) = &self.base {
            word(out, base.hash);
            word(out, base.tokens.to_bits());
        }
        word(out, self.parent);
        write_int(out, self.prompt.blocks.into());
        write_int(out, self.prompt.checkpoints.len() as u64);
        self.prompt.checkpoints.iter().for_each(|hash| word(out, *hash));
        word(out, self.prompt.end);
    }

    fn decode(rest: &mut Reader<'_>, homes: usize) -> Result<PeerProgram, Malformed> {
        let flags = rest.byte("the flags of a program")?;
        let finish = usize::from(rest.byte("a finish")?);
        let (_, finish) =
            *Finish::NAMES.get(finish).ok_or_else(|| Malformed(format!("finish {finish} of a program")))?;
        let level = rest.byte("a level")? as i8;
        if !LEVELS.contains(&level) {
            return Err(Malformed(format!("level {level} of a program")));
        }
        let (key, turn) = (rest.word("a program")?, rest.int("a turn")?);
        let home = rest.count(homes, "as a home")?.checked_sub(1);
        let tenant = rest.word("a tenant")?;
        let weight = in_range(rest.float("a weight")?, 0.0, 1e15, "as the weight of a program")?;
        let mut seconds = || in_range(rest.float("an age")?, 0.0, 1e15, "seconds of a program");
        let (age_seconds, rest_seconds) = (seconds()?, seconds()?);
        let session = (flags & HAS_SESSION != 0).then(|| rest.word("a session")).transpose()?;
        let tokens = rest.int("the tokens of a program")?;
        if tokens > MAX_TOKENS {
            return Err(Malformed(format!("{tokens} tokens of a program; expected at most {MAX_TOKENS}")));
        }
        let mut base = None;
        if flags & HAS_BASE != 0 {
            let hash = rest.word("a root")?;
            let tokens = in_range(f64::from_bits(rest.word("a root")?), 0.0, 1e15, "tokens of a root")?;
            base = Some(Root { hash, tokens });
        }
        let parent = rest.word("a parent")?;
        let blocks = rest.count(u32::MAX as usize, "blocks")? as u32;
        let mut checkpoints = Vec::new(); // grows with what is read
        for _ in 0..rest.count(MAX_CHECKPOINTS, "checkpoints")? {
            checkpoints.push(rest.word("a checkpoint")?);
        }
        Ok(PeerProgram {
            key,
            turn,
            state: State::NAMES[usize::from(flags & STATE_BITS)].1,
            home,
            tenant,
            weight,
            level,
            session,
            age_seconds,
            rest_seconds,
            tokens,
            base,
            parent,
            finish,
            flags: [FINAL, CAME_BACK, FORGOTTEN, HAS_RUN].map(|bit| flags & bit != 0),
            prompt: Prompt { blocks, checkpoints, end: rest.word("the end of a prompt")? },
        })
    }
}

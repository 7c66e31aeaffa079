//! Conversation turns: which request continues which conversation, and the lengths of its previous
//! answers.
//!
//! The previous turn of a request is the latest request with the same session key. Without a
//! session key, it is the latest request whose whole prompt blocks begin this prompt. A prompt with
//! `SHARED_AFTER` or more different continuations is a system prompt and links no requests.
//! `train_lengths.from_trace` finds turns by the same rules, for training.
use crate::Seconds;
use hashbrown::DefaultHashBuilder;
use lru::LruCache;
use std::num::NonZeroUsize;

/// Number of different continuations from which a prompt counts as a system prompt.
const SHARED_AFTER: usize = 8;
/// Maximum number of prompts and sessions kept, about 150 bytes each; the least recently used is
/// dropped first.
const REMEMBERED: usize = 1 << 16;

/// The prompt of a request that arrives.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// Hash of the session key, if the request has a session.
    pub session: Option<u64>,
    /// Chained hashes of its blocks.
    pub chain: &'a [u64],
    /// Tokens per block of `chain`.
    pub tokens_per_block: f64,
    /// Its length in tokens.
    pub tokens: u32,
}

/// Known conversation history of a request at its arrival; all 0 in a first turn.
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct Turn {
    /// Number of previous turns.
    pub turns: u32,
    /// Prompt tokens that the previous turn did not have; all prompt tokens in a first turn.
    pub new_prompt_tokens: f64,
    /// Tokens of the previous answer.
    pub previous_answer_tokens: f64,
    /// Mean tokens of all previous answers in the conversation.
    pub mean_answer_tokens: f64,
    /// Seconds between the arrivals of the previous turn and this one.
    pub seconds_since_previous: Seconds,
    /// Key under which this turn's answer is recorded.
    key: u64,
}

#[derive(Debug)]
struct Record {
    /// Number of whole blocks in its prompt, the hash of the last block, and the prompt's tokens.
    blocks: usize,
    end: Option<u64>,
    prompt_tokens: u32,
    arrival: Seconds,
    turns: u32,
    /// Tokens of all previous answers, and of its own answer once it has ended.
    answers_tokens: f64,
    answer_tokens: f64,
    /// First blocks of the prompts that continue it, while they are few.
    continuations: Vec<u64>,
}

/// Latest turns, by session key or by the last whole block of the prompt.
#[derive(Debug)]
pub struct Turns {
    records: LruCache<u64, Record, DefaultHashBuilder>,
    known: Filter,
    /// Look-ups of blocks in `records`.
    #[cfg(test)]
    looked_up: usize,
}

/// Counts of the recorded keys by some of their bits. Most blocks of a prompt end no recorded
/// prompt; the filter shows that for 8 of 9 without a look-up, if [`REMEMBERED`] keys are recorded.
#[derive(Debug)]
struct Filter(Box<[u8]>);

impl Filter {
    const BITS: u32 = REMEMBERED.ilog2() + 3;

    fn slot(key: u64) -> usize {
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - Filter::BITS)) as usize
    }

    fn may_have(&self, key: u64) -> bool {
        self.0[Filter::slot(key)] > 0
    }

    fn add(&mut self, key: u64) {
        let count = &mut self.0[Filter::slot(key)];
        *count = count.saturating_add(1);
    }

    fn remove(&mut self, key: u64) {
        let count = &mut self.0[Filter::slot(key)];
        *count -= u8::from(*count < u8::MAX); // a full count is no longer known
    }
}

impl Default for Turns {
    fn default() -> Turns {
        // `LruCache::new` would allocate space for all records at once.
        let mut records = LruCache::unbounded_with_hasher(DefaultHashBuilder::default());
        records.resize(NonZeroUsize::new(REMEMBERED).expect("above 0"));
        Turns {
            records,
            known: Filter(vec![0; 1 << Filter::BITS].into()),
            #[cfg(test)]
            looked_up: 0,
        }
    }
}

impl Turns {
    /// Records the arrival of a request, and returns its conversation so far.
    pub fn arrived(&mut self, prompt: Prompt<'_>, now: Seconds) -> Turn {
        let tokens = f64::from(prompt.tokens);
        let whole = (tokens / prompt.tokens_per_block) as usize;
        let chain = &prompt.chain[..prompt.chain.len().min(whole)];
        let session = prompt.session.map(|session| session ^ 0x9e37_79b9_7f4a_7c15);
        let before = match session {
            Some(key) => self.records.peek(&key).map(|record| (record, shared(record, prompt, chain))),
            None => self.by_prefix(chain, prompt.tokens_per_block),
        };
        let mut turn = Turn { new_prompt_tokens: tokens, ..Turn::default() };
        let mut answers_tokens = 0.0;
        if let Some((record, shared)) = before {
            answers_tokens = record.answers_tokens + record.answer_tokens;
            turn.turns = record.turns + 1;
            turn.new_prompt_tokens = (tokens - shared).max(0.0);
            turn.previous_answer_tokens = record.answer_tokens;
            turn.mean_answer_tokens = answers_tokens / f64::from(turn.turns);
            turn.seconds_since_previous = (now - record.arrival).max(0.0);
        }
        let Some(key) = session.or(chain.last().copied()) else { return turn };
        turn.key = key;
        let before = self.records.pop(&key);
        if before.is_none() {
            self.known.add(key);
        }
        let record = Record {
            blocks: chain.len(),
            end: chain.last().copied(),
            prompt_tokens: prompt.tokens,
            arrival: now,
            turns: turn.turns,
            answers_tokens,
            answer_tokens: 0.0,
            continuations: before.map(|record| record.continuations).unwrap_or_default(),
        };
        if let Some((dropped, _)) = self.records.push(key, record) {
            self.known.remove(dropped);
        }
        turn
    }

    /// Records the end of a request's answer. Does nothing if a later turn has arrived or the turn
    /// was dropped.
    pub fn ended(&mut self, turn: &Turn, answer_tokens: u32) {
        if let Some(record) = self.records.get_mut(&turn.key).filter(|record| record.turns == turn.turns) {
            record.answer_tokens = f64::from(answer_tokens);
        }
    }

    /// Returns the latest turn with the most whole blocks that begin `chain`, and the tokens of
    /// these blocks.
    fn by_prefix(&mut self, chain: &[u64], tokens_per_block: f64) -> Option<(&Record, f64)> {
        let mut longest = None;
        for (place, hash) in chain.iter().enumerate() {
            if !self.known.may_have(*hash) {
                continue;
            }
            #[cfg(test)]
            {
                self.looked_up += 1;
            }
            let Some(record) = self.records.peek_mut(hash) else { continue };
            if let Some(next) = chain.get(place + 1)
                && record.continuations.len() < SHARED_AFTER
                && !record.continuations.contains(next)
            {
                record.continuations.push(*next);
            }
            if record.continuations.len() < SHARED_AFTER {
                longest = Some(*hash);
            }
        }
        let record = self.records.get(&longest?)?;
        Some((record, record.blocks as f64 * tokens_per_block))
    }
}

/// Returns the tokens of the previous turn that this prompt begins with.
fn shared(record: &Record, prompt: Prompt<'_>, chain: &[u64]) -> f64 {
    match record.end {
        // Prompts without blocks: a turn is assumed to repeat the previous turn.
        None => f64::from(record.prompt_tokens.min(prompt.tokens)),
        end if chain.get(record.blocks - 1).copied() == end => record.blocks as f64 * prompt.tokens_per_block,
        Some(_) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(chain: &[u64], tokens: u32, session: Option<u64>) -> Prompt<'_> {
        Prompt { session, chain, tokens_per_block: 16.0, tokens }
    }

    #[test]
    fn a_prompt_continues_the_latest_one_that_it_begins_with() {
        let mut turns = Turns::default();
        // 40 tokens: two whole blocks; the partial third block links nothing.
        let first = turns.arrived(prompt(&[1, 2, 3], 40, None), 10.0);
        assert_eq!((first.turns, first.new_prompt_tokens, first.previous_answer_tokens), (0, 40.0, 0.0));
        turns.ended(&first, 30);
        let second = turns.arrived(prompt(&[1, 2, 4, 5], 70, None), 25.0);
        assert_eq!((second.turns, second.new_prompt_tokens), (1, 70.0 - 32.0));
        assert_eq!((second.previous_answer_tokens, second.seconds_since_previous), (30.0, 15.0));
        turns.ended(&second, 50);
        let third = turns.arrived(prompt(&[1, 2, 4, 5, 6], 80, None), 26.0);
        assert_eq!((third.turns, third.previous_answer_tokens, third.mean_answer_tokens), (2, 50.0, 40.0));
        let other = turns.arrived(prompt(&[7, 8, 9, 10], 70, None), 27.0);
        assert_eq!((other.turns, other.new_prompt_tokens), (0, 70.0));
        // A request without blocks or session key cannot be remembered.
        assert_eq!(turns.arrived(prompt(&[], 9, None), 28.0).turns, 0);
        assert_eq!(turns.arrived(prompt(&[], 9, None), 29.0).turns, 0);
    }

    /// rust 7.25: most blocks of a prompt need no look-up, however full the table is.
    #[test]
    fn blocks_that_end_no_prompt_are_rarely_looked_up() {
        let mut turns = Turns::default();
        let mixed = |number: u64| number.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ number << 17;
        for number in 0..REMEMBERED as u64 + 5000 {
            turns.arrived(prompt(&[mixed(number)], 16, None), number as f64);
        }
        assert_eq!(turns.records.len(), REMEMBERED);
        let counted: usize = turns.known.0.iter().map(|count| usize::from(*count)).sum();
        assert_eq!(counted, REMEMBERED, "dropped prompts are not counted");
        let chain: Vec<u64> = (0..8192u64).map(|at| mixed(1 << 40 | at)).chain([mixed(70_000)]).collect();
        let before = turns.looked_up;
        let turn = turns.arrived(prompt(&chain, 16 * 8193, None), 1e6);
        assert_eq!(turn.turns, 1, "the prompt of block 70,000 is found");
        assert!(turns.looked_up - before < 8193 / 6, "{} look-ups", turns.looked_up - before);
    }

    #[test]
    fn a_prompt_that_many_continue_is_a_system_prompt() {
        let mut turns = Turns::default();
        turns.arrived(prompt(&[1], 16, None), 0.0);
        let found: Vec<u32> = (0..10)
            .map(|i| turns.arrived(prompt(&[1, 100 + i], 32, None), f64::from(i as u32)).turns)
            .collect();
        assert_eq!(found, [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]);
    }

    #[test]
    fn a_session_key_goes_before_prefixes() {
        let mut turns = Turns::default();
        let first = turns.arrived(prompt(&[1, 2], 32, Some(5)), 0.0);
        turns.ended(&first, 7);
        let other = turns.arrived(prompt(&[1, 2, 3], 48, Some(6)), 1.0);
        assert_eq!(other.turns, 0);
        let second = turns.arrived(prompt(&[1, 2, 3], 48, Some(5)), 2.0);
        assert_eq!((second.turns, second.new_prompt_tokens, second.previous_answer_tokens), (1, 16.0, 7.0));
        // The client truncated its history: no prompt token is known to be shared with the previous
        // turn.
        let third = turns.arrived(prompt(&[9, 3], 32, Some(5)), 3.0);
        assert_eq!((third.turns, third.new_prompt_tokens), (2, 32.0));
        // The second answer ends after the third turn has arrived.
        turns.ended(&second, 100);
        let fourth = turns.arrived(prompt(&[9, 3, 4], 48, Some(5)), 4.0);
        assert_eq!((fourth.turns, fourth.previous_answer_tokens), (3, 0.0));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut turns = Turns::default();
        for hash in 0..REMEMBERED as u64 + 10 {
            turns.arrived(prompt(&[hash + 1], 16, None), 0.0);
        }
        assert_eq!(turns.records.len(), REMEMBERED);
        assert_eq!(turns.arrived(prompt(&[1, 2], 32, None), 1.0).turns, 0);
        assert_eq!(turns.arrived(prompt(&[REMEMBERED as u64, 2], 32, None), 1.0).turns, 1);
    }
}

//! Prompts of recent requests, with their frequency and last use, in bounded memory.
use super::settings::WarmConfig;
use crate::ids::Seconds;
use hashbrown::DefaultHashBuilder;
use lru::LruCache;

/// Blocks at the end of a prompt among which the previous turn's end is looked for.
const LOOK_BACK_BLOCKS: usize = 512;
/// Prompts count until their weight has halved this often.
const HALVINGS: f64 = 10.0;

/// A remembered prompt: the latest turn of a conversation, or a prompt of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Prompt {
    /// Chained hashes of its whole blocks, at least one.
    pub chain: Vec<u64>,
    /// Tokens per block of `chain`.
    pub tokens_per_block: f64,
    /// Requests with this prompt and the turns before it; each halves in
    /// [`WarmConfig::half_life_seconds`]. As of `last`.
    weight: f64,
    /// Time of the latest request.
    last: Seconds,
}

/// Prompts of recent requests, by their last whole block. The least recently used prompts are
/// dropped first.
#[derive(Debug)]
pub struct Demand {
    prompts: LruCache<u64, Prompt, DefaultHashBuilder>,
    blocks: usize,
    max_blocks: usize,
    half_life_seconds: Seconds,
}

impl Demand {
    /// Creates an empty memory.
    pub fn new(config: &WarmConfig) -> Demand {
        Demand {
            prompts: LruCache::unbounded_with_hasher(DefaultHashBuilder::default()),
            blocks: 0,
            max_blocks: config.max_blocks,
            half_life_seconds: config.half_life_seconds,
        }
    }

    /// Returns the whole blocks of a prompt.
    pub fn whole(chain: &[u64], prompt_tokens: u32, tokens_per_block: f64) -> &[u64] {
        let whole = (f64::from(prompt_tokens) / tokens_per_block) as usize;
        &chain[..chain.len().min(whole)]
    }

    /// Records a request with this prompt. A prompt that continues a remembered one replaces it: it
    /// is the next turn of a conversation.
    pub fn note(&mut self, chain: &[u64], prompt_tokens: u32, tokens_per_block: f64, now: Seconds) {
        let chain = Demand::whole(chain, prompt_tokens, tokens_per_block);
        if chain.is_empty() || chain.len() > self.max_blocks {
            return;
        }
        let recent = chain.iter().rev().take(LOOK_BACK_BLOCKS);
        let before = recent.copied().find(|hash| self.prompts.contains(hash));
        let before = before.and_then(|key| self.prompts.pop(&key));
        let (weight, mut kept) = match before {
            Some(before) => {
                self.blocks -= before.chain.len();
                (before.weight * self.decay(now - before.last), before.chain)
            }
            None => (0.0, Vec::new()),
        };
        kept.clear();
        kept.extend_from_slice(chain);
        self.blocks += kept.len();
        let key = chain[chain.len() - 1];
        self.prompts.put(key, Prompt { chain: kept, tokens_per_block, weight: weight + 1.0, last: now });
        while self.blocks > self.max_blocks {
            let Some((_, oldest)) = self.prompts.pop_lru() else { break };
            self.blocks -= oldest.chain.len();
        }
    }

    /// Yields the prompts that still count, the latest first, with their weights at `now`.
    pub fn prompts(&self, now: Seconds) -> impl Iterator<Item = (&Prompt, f64)> {
        let longest = HALVINGS * self.half_life_seconds;
        let recent = self.prompts.iter().take_while(move |(_, prompt)| now - prompt.last <= longest);
        recent.map(move |(_, prompt)| (prompt, prompt.weight * self.decay(now - prompt.last)))
    }

    /// Returns the number of remembered prompts.
    pub fn len(&self) -> usize {
        self.prompts.len()
    }

    /// Returns whether no prompt is remembered.
    pub fn is_empty(&self) -> bool {
        self.prompts.is_empty()
    }

    /// Returns the number of remembered block hashes.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn decay(&self, seconds: Seconds) -> f64 {
        (-seconds.max(0.0) / self.half_life_seconds).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn demand(max_blocks: usize) -> Demand {
        Demand::new(&WarmConfig { max_blocks, half_life_seconds: 10.0, ..WarmConfig::default() })
    }

    fn note(demand: &mut Demand, chain: &[u64], now: Seconds) {
        demand.note(chain, 16 * chain.len() as u32, 16.0, now);
    }

    #[test]
    fn a_turn_replaces_the_turn_before_it_and_keeps_its_weight() {
        let mut demand = demand(100);
        note(&mut demand, &[1, 2], 0.0);
        note(&mut demand, &[1, 9], 0.0); // shares a block, but continues nothing
        note(&mut demand, &[1, 2, 3, 4], 10.0);
        let prompts: Vec<_> = demand.prompts(20.0).map(|(p, w)| (p.chain.clone(), w)).collect();
        assert_eq!(prompts, [(vec![1, 2, 3, 4], 0.75), (vec![1, 9], 0.25)]);
        assert_eq!((demand.len(), demand.blocks()), (2, 6));
        // The same prompt again.
        note(&mut demand, &[1, 9], 20.0);
        assert_eq!(demand.len(), 2);
        assert_eq!(demand.prompts(20.0).next().unwrap().1, 1.25);
        assert_eq!(demand.prompts(115.0).count(), 1, "older prompts do not count");
    }

    #[test]
    fn partial_blocks_do_not_count() {
        let mut demand = demand(100);
        demand.note(&[1, 2, 3], 40, 16.0, 0.0);
        assert_eq!(demand.prompts(0.0).next().unwrap().0.chain, [1, 2]);
        demand.note(&[7], 15, 16.0, 0.0);
        assert_eq!(demand.len(), 1);
    }

    proptest! {
        #[test]
        fn memory_is_bounded(chains in prop::collection::vec((0u64..6, 1u64..30), 1..200)) {
            let mut demand = demand(50);
            for (i, (family, length)) in chains.into_iter().enumerate() {
                let chain: Vec<u64> = (0..length).map(|block| family * 1000 + block).collect();
                note(&mut demand, &chain, i as f64);
                let kept: usize = demand.prompts(i as f64).map(|(prompt, _)| prompt.chain.len()).sum();
                prop_assert!(demand.blocks() <= 50 && kept <= demand.blocks());
                prop_assert_eq!(demand.prompts(i as f64).next().map(|(p, _)| &p.chain), Some(&chain));
            }
        }
    }
}

//! A tokenizer with a cache of what it tokenised before.
use crate::TokensError;
use crate::cache::{Cache, CacheStats};
use crate::cuts::Cuts;
use crate::libraries::Libraries;
use parking_lot::Mutex;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::ops::Range;
use std::sync::Arc;
use tokenizers::{AddedToken, Tokenizer};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Texts around the special tokens in the check of the cuts.
const PROBES: [&str; 9] =
    ["", " ", "a", " a", "a ", "\n\n", "Ünïcode 日本語 ", "a b\tc  d\n", "don't 123456 §½ ﬁ"];
/// Text longer than the shortest segment.
const FILLER: &str = "some words, so that what comes next is cut off from what was before them";
/// Texts up to this size are looked at while the caller's event loop waits: two milliseconds.
const AT_ONCE_BYTES: usize = 1 << 20;
/// Segments asked for or kept at a time, while other threads wait.
const BATCH: usize = 512;
/// Special tokens that the check uses at most.
const PROBED_TOKENS: usize = 24;

/// Ids before and after every text.
type Around = (Vec<u32>, Vec<u32>);

/// Turns texts into token ids. Threads may share it.
pub struct Encoder {
    libraries: Libraries,
    cuts: Result<Cuts, String>,
    /// What the tokenizer puts before and after a text where it is told to; `None`: it does something else.
    around: Option<Around>,
    seed: u64,
    cache: Mutex<Cache>,
}

impl Encoder {
    /// A tokenizer from the bytes of a `tokenizer.json`, with further added tokens (a JSON list of objects as there under
    /// `added_tokens`; in their order), and a cache of at most `cache_bytes`. `around`: names of the tokens put before and after a
    /// text, in place of what the tokenizer itself would put.
    ///
    /// # Errors
    /// `Unusable`: it is no tokenizer, a name in `around` is none of its tokens, or its ids are left to chance (BPE dropout).
    pub fn load(
        json: &[u8],
        added: &[u8],
        around: Option<(Vec<String>, Vec<String>)>,
        cache_bytes: usize,
    ) -> Result<Encoder, TokensError> {
        let unusable = |error: &dyn std::fmt::Display| TokensError::Unusable(error.to_string());
        let added: Vec<AddedToken> = serde_json::from_slice(added).map_err(|e| unusable(&e))?;
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(|e| unusable(&e))?;
        let value: serde_json::Value = serde_json::from_slice(json).map_err(|e| unusable(&e))?;
        if value["model"]["dropout"].as_f64().is_some_and(|dropout| dropout > 0.0) {
            return Err(unusable(&"its BPE has a dropout: the same text has other tokens each time"));
        }
        for token in added {
            let special = token.special;
            let result =
                if special { tokenizer.add_special_tokens([token]) } else { tokenizer.add_tokens([token]) };
            result.map_err(|e| unusable(&e))?;
        }
        // Both are the engine's to decide, by request.
        tokenizer.with_truncation(None).map_err(|e| unusable(&e))?;
        tokenizer.with_padding(None);
        let mut known: Vec<(u32, AddedToken)> = tokenizer.get_added_tokens_decoder().into_iter().collect();
        known.sort_unstable_by_key(|(id, _)| *id);
        let known: Vec<AddedToken> = known.into_iter().map(|(_, token)| token).collect();
        let probes = probes(&known);
        let mut encoder = Encoder {
            cuts: Cuts::new(&known),
            libraries: Libraries::new(tokenizer, &probes),
            around: None,
            seed: RandomState::new().build_hasher().finish(),
            cache: Mutex::new(Cache::new(cache_bytes)),
        };
        encoder.around = match around {
            Some((before, after)) => Some((encoder.ids_of(before)?, encoder.ids_of(after)?)),
            None => encoder.find_around()?,
        };
        if let Err(reason) = encoder.check_cuts(&probes)? {
            encoder.cuts = Err(reason);
        }
        Ok(encoder)
    }

    /// Why texts are tokenised whole, where they are: a conversation then pays for all its turns again.
    pub fn whole_because(&self) -> Option<&str> {
        self.cuts.as_ref().err().map(String::as_str)
    }

    /// Whether the faster of the two libraries is used.
    pub fn is_fast(&self) -> bool {
        self.libraries.is_fast()
    }

    /// What the cache holds and was asked.
    pub fn stats(&self) -> CacheStats {
        self.cache.lock().stats
    }

    /// The id of an added token or a word of the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.libraries.tokenizer.token_to_id(token)
    }

    /// The text of ids. Those that no token has are left out, and what is no whole character is U+FFFD.
    ///
    /// # Errors
    /// `Failed`: the tokenizer has no text for these ids.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokensError> {
        self.libraries.decode(ids, skip_special_tokens)
    }

    /// The ids of `text`; `None` where more than `at_most` bytes of it would have to be tokenised, or (with a bound) where it is so
    /// long that finding that out takes long. `add_special_tokens`: with
    /// what the tokenizer puts around a text (BOS), as engines do for completions; chat templates write it themselves.
    ///
    /// # Errors
    /// `Failed`: the tokenizer has no ids for this text.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        at_most: usize,
    ) -> Result<Option<Vec<u32>>, TokensError> {
        self.encode_in(0, text, add_special_tokens, at_most)
    }

    /// [`encode`](Self::encode) with a part of the cache of its own: texts of different scopes share no entry, so the time that this
    /// takes says nothing about the texts of another scope.
    ///
    /// # Errors
    /// `Failed`: the tokenizer has no ids for this text.
    pub fn encode_in(
        &self,
        scope: u64,
        text: &str,
        add_special_tokens: bool,
        at_most: usize,
    ) -> Result<Option<Vec<u32>>, TokensError> {
        if at_most < usize::MAX && text.len() > AT_ONCE_BYTES {
            return Ok(None);
        }
        let (before, after): (&[u32], &[u32]) = match (&self.around, add_special_tokens) {
            (_, false) => (&[], &[]),
            (Some((before, after)), true) => (before, after),
            (None, true) if text.len() > at_most => return Ok(None),
            (None, true) => return self.libraries.by_reference(text, true).map(Some),
        };
        let mut segments = Vec::new();
        match &self.cuts {
            Ok(cuts) => cuts.segments(text, &mut segments),
            Err(_) if text.is_empty() => {}
            Err(_) => segments.push(0..text.len()),
        }
        let seed = self.seed ^ scope;
        let keys: Vec<u128> =
            segments.iter().map(|s| xxh3_128_with_seed(&text.as_bytes()[s.clone()], seed)).collect();
        let (mut found, new_bytes) = self.look_up(&segments, &keys);
        if new_bytes > at_most {
            return Ok(None);
        }
        let mut new = Vec::new();
        for ((ids, segment), key) in found.iter_mut().zip(&segments).zip(&keys) {
            if ids.is_none() {
                let tokenised: Arc<[u32]> = self.tokenise(&text[segment.clone()])?.into();
                new.push((*key, tokenised.clone()));
                *ids = Some(tokenised);
            }
        }
        self.keep(new, text.len() - new_bytes, new_bytes);
        let parts = || found.iter().flatten();
        let count = before.len() + parts().map(|ids| ids.len()).sum::<usize>() + after.len();
        let mut out = Vec::with_capacity(count);
        out.extend_from_slice(before);
        parts().for_each(|ids| out.extend_from_slice(ids));
        out.extend_from_slice(after);
        Ok(Some(out))
    }

    fn ids_of(&self, names: Vec<String>) -> Result<Vec<u32>, TokensError> {
        let id = |name: &String| self.id_of(name).ok_or(format!("{name:?} is none of its tokens"));
        names.iter().map(id).collect::<Result<_, _>>().map_err(TokensError::Unusable)
    }

    /// What is known of each segment, and the bytes of those that are not.
    fn look_up(&self, segments: &[Range<usize>], keys: &[u128]) -> (Vec<Option<Arc<[u32]>>>, usize) {
        let mut found = Vec::with_capacity(keys.len());
        for batch in keys.chunks(BATCH) {
            let mut cache = self.cache.lock();
            found.extend(batch.iter().map(|key| cache.get(*key)));
        }
        let new = segments.iter().zip(&found).filter(|(_, ids)| ids.is_none()).map(|(s, _)| s.len()).sum();
        (found, new)
    }

    fn keep(&self, new: Vec<(u128, Arc<[u32]>)>, found_bytes: usize, new_bytes: usize) {
        let mut cache = self.cache.lock();
        cache.stats.found_bytes += found_bytes as u64;
        cache.stats.new_bytes += new_bytes as u64;
        drop(cache);
        let mut new = new.into_iter().peekable();
        while new.peek().is_some() {
            let mut cache = self.cache.lock();
            new.by_ref().take(BATCH).for_each(|(key, ids)| cache.put(key, ids));
        }
    }

    fn tokenise(&self, text: &str) -> Result<Vec<u32>, TokensError> {
        let mut ids = Vec::new();
        self.libraries.encode(text, &mut ids)?;
        Ok(ids)
    }

    /// What stands around every text, found by trying.
    fn find_around(&self) -> Result<Option<Around>, TokensError> {
        let reference = |text, special| self.libraries.by_reference(text, special);
        let (inner, outer) = (reference("a", false)?, reference("a", true)?);
        let at = outer.windows(inner.len().max(1)).position(|part| part == inner);
        let Some(at) = at.filter(|_| !inner.is_empty()) else { return Ok(None) };
        let around = (outer[..at].to_vec(), outer[at + inner.len()..].to_vec());
        for probe in PROBES {
            if reference(probe, true)? != [&around.0[..], &reference(probe, false)?, &around.1].concat() {
                return Ok(None);
            }
        }
        Ok(Some(around))
    }

    /// Whether cutting gives the ids of the whole text: true by construction for what is known of tokenizers; tried here for what
    /// is not.
    fn check_cuts(&self, probes: &[String]) -> Result<Result<(), String>, TokensError> {
        let Ok(cuts) = &self.cuts else { return Ok(Ok(())) };
        for text in probes {
            let mut segments = Vec::new();
            cuts.segments(text, &mut segments);
            let mut parts = Vec::new();
            for segment in segments {
                self.libraries.encode(&text[segment], &mut parts)?;
            }
            if parts != self.libraries.by_reference(text, false)? {
                return Ok(Err(format!("cut at special tokens, {text:?} has other ids")));
            }
        }
        Ok(Ok(()))
    }
}

/// Texts with added tokens between what could matter to them.
fn probes(added: &[AddedToken]) -> Vec<String> {
    let special = added.iter().filter(|t| t.special).take(PROBED_TOKENS);
    let others = added.iter().filter(|t| !t.special).take(PROBED_TOKENS);
    let tokens: Vec<&str> = special.chain(others).map(|t| t.content.as_str()).collect();
    let mut texts: Vec<String> = PROBES.iter().map(|p| p.to_string()).collect();
    for (i, token) in tokens.iter().enumerate() {
        let next = tokens[(i + 1) % tokens.len()];
        for (j, probe) in PROBES.iter().enumerate() {
            let other = PROBES[(i + j) % PROBES.len()];
            // Once as it is, once with segments long enough to be cut.
            texts.push(format!("{probe}{token}{other}{next}{probe}{token}"));
            texts.push(format!("{FILLER}{probe}{token}{other}{FILLER}{other}{next}{FILLER}{probe}{token}"));
        }
    }
    texts
}

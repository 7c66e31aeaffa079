//! A tokenizer with a cache of tokenized segments.
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
/// Texts up to this size are checked while the caller's event loop waits: two milliseconds.
const AT_ONCE_BYTES: usize = 1 << 20;
/// Segments read or written at a time, while other threads wait.
const BATCH: usize = 512;
/// Largest number of special tokens that the check uses.
const PROBED_TOKENS: usize = 24;

/// IDs before and after every text.
type Around = (Vec<u32>, Vec<u32>);

/// Encodes texts as token IDs. Threads may share an encoder.
pub struct Encoder {
    libraries: Libraries,
    cuts: Result<Cuts, String>,
    /// IDs that the tokenizer adds before and after a text with `add_special_tokens`; `None`: it
    /// changes the text in another way.
    around: Option<Around>,
    seed: u64,
    cache: Mutex<Cache>,
}

impl Encoder {
    /// Loads a tokenizer from the bytes of a `tokenizer.json`, with a cache of at most
    /// `cache_bytes`.
    ///
    /// The JSON list of `added_tokens` adds tokens in its order, as objects like those under
    /// `added_tokens` in the file. `around`: names of the tokens before and after a text, instead
    /// of the tokenizer's own.
    ///
    /// # Errors
    /// `Unusable`: the file is no tokenizer, a name in `around` is not one of its tokens, or its
    /// IDs are random (BPE dropout).
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
        // The engine decides about truncation and padding, by request.
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

    /// Why texts are tokenized whole, if they are: then each turn of a conversation tokenizes all
    /// earlier turns again.
    pub fn whole_because(&self) -> Option<&str> {
        self.cuts.as_ref().err().map(String::as_str)
    }

    /// Whether the faster library is in use.
    pub fn is_fast(&self) -> bool {
        self.libraries.is_fast()
    }

    /// Returns the contents and use of the cache.
    pub fn stats(&self) -> CacheStats {
        self.cache.lock().stats
    }

    /// Returns the ID of an added token or a word of the vocabulary.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.libraries.tokenizer.token_to_id(token)
    }

    /// Returns the text of IDs. IDs without a token are left out, and incomplete characters become
    /// U+FFFD.
    ///
    /// # Errors
    /// `Failed`: the tokenizer cannot decode these IDs.
    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokensError> {
        self.libraries.decode(ids, skip_special_tokens)
    }

    /// Returns the IDs of `text`. Returns `None` if more than `at_most` bytes of it would have to
    /// be tokenized, or (with a bound) if the text is so long that this check takes long.
    ///
    /// `add_special_tokens`: includes the tokens that the tokenizer puts around a text (BOS), as
    /// engines do for completions; chat templates write these tokens themselves.
    ///
    /// # Errors
    /// `Failed`: the tokenizer cannot encode this text.
    pub fn encode(
        &self,
        text: &str,
        add_special_tokens: bool,
        at_most: usize,
    ) -> Result<Option<Vec<u32>>, TokensError> {
        self.encode_in(0, text, add_special_tokens, at_most)
    }

    /// Encodes a text as [`encode`](Self::encode) does, in a scope of the cache. Texts of different
    /// scopes share no entry, so the duration of a call reveals nothing about the texts of another
    /// scope.
    ///
    /// # Errors
    /// `Failed`: the tokenizer cannot encode this text.
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
        let id = |name: &String| self.id_of(name).ok_or(format!("{name:?} is not one of its tokens"));
        names.iter().map(id).collect::<Result<_, _>>().map_err(TokensError::Unusable)
    }

    /// Returns the cached IDs of each segment, and the bytes of segments that are not cached.
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

    /// Finds the IDs that stand around every text, by trial.
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

    /// Checks that cutting gives the IDs of the whole text. For known tokenizers this holds by
    /// construction; the trial covers unknown tokenizers.
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

/// Texts with added tokens between characters that could matter to them.
fn probes(added: &[AddedToken]) -> Vec<String> {
    let special = added.iter().filter(|t| t.special).take(PROBED_TOKENS);
    let others = added.iter().filter(|t| !t.special).take(PROBED_TOKENS);
    let tokens: Vec<&str> = special.chain(others).map(|t| t.content.as_str()).collect();
    let mut texts: Vec<String> = PROBES.iter().map(|p| p.to_string()).collect();
    for (i, token) in tokens.iter().enumerate() {
        let next = tokens[(i + 1) % tokens.len()];
        for (j, probe) in PROBES.iter().enumerate() {
            let other = PROBES[(i + j) % PROBES.len()];
            // Once unchanged, and once with segments long enough to be cut.
            texts.push(format!("{probe}{token}{other}{next}{probe}{token}"));
            texts.push(format!("{FILLER}{probe}{token}{other}{FILLER}{other}{next}{FILLER}{probe}{token}"));
        }
    }
    texts
}

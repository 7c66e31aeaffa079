//! A tokenizer in the library that engines use and, with the feature `fast-tokenizer`, in that
//! library's successor. The successor is tens of times as fast. It does not read every tokenizer,
//! and is used only if both libraries return the same IDs in all trials.
use crate::TokensError;
use crate::fast::Fast;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::Tokenizer;

/// Number of words of the vocabulary on which the two libraries are compared.
const COMPARED_WORDS: u32 = 6000;

pub(crate) struct Libraries {
    pub(crate) tokenizer: Tokenizer,
    fast: Option<Fast>,
}

impl Libraries {
    /// Compares the two libraries on `texts` and on words of the vocabulary.
    pub(crate) fn new(tokenizer: Tokenizer, texts: &[String]) -> Libraries {
        let fast = catch_unwind(AssertUnwindSafe(|| Fast::load(&tokenizer))).ok().flatten();
        let mut libraries = Libraries { tokenizer, fast };
        if libraries.is_fast() {
            let agree = texts.iter().chain(&libraries.words()).all(|text| libraries.agree(text));
            libraries.fast = libraries.fast.filter(|_| agree);
        }
        libraries
    }

    /// Whether the faster library is in use.
    pub(crate) fn is_fast(&self) -> bool {
        self.fast.is_some()
    }

    /// Appends the IDs of a text, without the tokens that the tokenizer puts around it.
    pub(crate) fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), TokensError> {
        match self.by_fast(text) {
            Some(ids) => out.extend(ids),
            None => out.extend(self.by_reference(text, false)?),
        }
        Ok(())
    }

    /// Returns the IDs as engines make them.
    pub(crate) fn by_reference(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TokensError> {
        // The library can panic; one text must not crash the caller.
        let encode = || self.tokenizer.encode_fast(text, add_special_tokens);
        match catch_unwind(AssertUnwindSafe(encode)) {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) => Err(TokensError::Failed(error.to_string())),
            Err(_) => Err(TokensError::Failed("it panicked".into())),
        }
    }

    /// Returns the text of IDs, as engines make it.
    pub(crate) fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, TokensError> {
        let decode = || self.tokenizer.decode(ids, skip_special_tokens);
        match catch_unwind(AssertUnwindSafe(decode)) {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(error)) => Err(TokensError::Failed(error.to_string())),
            Err(_) => Err(TokensError::Failed("it panicked".into())),
        }
    }

    fn by_fast(&self, text: &str) -> Option<impl Iterator<Item = u32>> {
        let fast = self.fast.as_ref()?;
        catch_unwind(AssertUnwindSafe(|| fast.encode(text))).ok().flatten()
    }

    fn agree(&self, text: &str) -> bool {
        let fast = self.by_fast(text).map(Iterator::collect::<Vec<_>>);
        fast.is_some() && fast == self.by_reference(text, false).ok()
    }

    /// Returns words from the whole vocabulary, a few hundred per text.
    fn words(&self) -> Vec<String> {
        let size = self.tokenizer.get_vocab_size(true) as u32;
        let ids: Vec<u32> = (0..size).step_by((size / COMPARED_WORDS).max(1) as usize).collect();
        ids.chunks(300)
            .map(|ids| self.tokenizer.decode(ids, false).unwrap_or_default())
            .filter(|text| !text.is_empty())
            .collect()
    }
}

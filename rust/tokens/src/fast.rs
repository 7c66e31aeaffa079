//! The tokenizers library's successor, behind the feature `fast-tokenizer`.
use tokenizers::Tokenizer;

#[cfg(feature = "fast-tokenizer")]
mod library {
    use super::Tokenizer;
    use tokenizers_fast::pipeline::{EncodeOptions, PipelineToken, PipelineTokenizer};

    /// A tokenizer as read by the faster library.
    pub(crate) struct Fast(PipelineTokenizer);

    impl Fast {
        /// Reads a tokenizer; `None`: the library cannot read it.
        pub(crate) fn load(tokenizer: &Tokenizer) -> Option<Fast> {
            let json = tokenizers_fast::canonicalize_str(&tokenizer.to_string(false).ok()?).ok()?;
            tokenizers_fast::from_json(&json).ok().map(Fast)
        }

        /// Returns the IDs of a text, without the tokens that the tokenizer puts around it; `None`:
        /// the library failed.
        pub(crate) fn encode(&self, text: &str) -> Option<impl Iterator<Item = u32> + use<>> {
            let mut ids = Vec::with_capacity(text.len() / 3);
            self.0.encode_into(text, &EncodeOptions::no_specials(), &mut ids).ok()?;
            Some(ids.into_iter().map(PipelineToken::id))
        }
    }
}

#[cfg(not(feature = "fast-tokenizer"))]
mod library {
    use super::Tokenizer;

    /// No tokenizer: the library is not compiled in.
    pub(crate) enum Fast {}

    impl Fast {
        /// Reads nothing.
        pub(crate) fn load(_tokenizer: &Tokenizer) -> Option<Fast> {
            None
        }

        /// Has no text to tokenize, because no value of this type exists.
        pub(crate) fn encode(&self, _text: &str) -> Option<std::iter::Empty<u32>> {
            match *self {}
        }
    }
}

pub(crate) use library::Fast;

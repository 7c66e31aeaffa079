//! The text of the emulated engines: each token depends on all tokens before it and on nothing
//! else.
//!
//! So any engine continues any other's answer exactly: a test of failover or migration can compare
//! texts.
use lmetric_core::CoreError;

/// A 64-bit state of all tokens read so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rolling(u64);

impl Rolling {
    /// Reads one more token. For a given token this is a bijection of the state, so no earlier
    /// token is lost at once.
    #[inline]
    pub fn read(&mut self, token: u32) {
        let mixed = (self.0 ^ u64::from(token))
            .wrapping_add(0x9e37_79b9_7f4a_7c15)
            .wrapping_mul(0xd6e8_feb8_6659_fd93);
        self.0 = mixed ^ (mixed >> 32);
    }

    /// Reads tokens in order.
    pub fn read_all(&mut self, tokens: &[u32]) {
        tokens.iter().for_each(|&token| self.read(token));
    }
}

/// Chooses the next token among the words of a vocabulary.
#[derive(Clone, Debug)]
pub struct Generator {
    words: Vec<u32>,
    vocabulary: u32,
}

impl Generator {
    /// Makes a generator over `words` (token IDs below `vocabulary`, at least one). Each word must
    /// stay one token in any context, so that the text survives a second tokenization: see
    /// `scripts/make_tokenizer.py`.
    pub fn new(words: Vec<u32>, vocabulary: u32) -> Result<Generator, CoreError> {
        let bad = |got: String| CoreError::BadValue {
            what: "words of the generator".into(),
            got,
            expected: format!("token ids below {vocabulary}, at least one"),
        };
        match words.iter().find(|&&word| word >= vocabulary) {
            _ if words.is_empty() => Err(bad("an empty list".into())),
            Some(word) => Err(bad(word.to_string())),
            None => Ok(Generator { words, vocabulary }),
        }
    }

    /// Returns the token that follows the tokens read.
    #[inline]
    pub fn next(&self, read: Rolling) -> u32 {
        let spread = read.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        self.words[((u128::from(spread) * self.words.len() as u128) >> 64) as usize]
    }

    /// Checks that all token IDs are in the vocabulary.
    pub fn check(&self, tokens: &[u32]) -> Result<(), CoreError> {
        match tokens.iter().find(|&&token| token >= self.vocabulary) {
            None => Ok(()),
            Some(token) => Err(CoreError::BadValue {
                what: "token id of the prompt".into(),
                got: token.to_string(),
                expected: format!("0 to {}", self.vocabulary - 1),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(generator: &Generator, prompt: &[u32], n: usize) -> Vec<u32> {
        let mut read = Rolling::default();
        read.read_all(prompt);
        let mut tokens = prompt.to_vec();
        for _ in 0..n {
            let token = generator.next(read);
            read.read(token);
            tokens.push(token);
        }
        tokens
    }

    proptest! {
        #[test]
        fn any_cut_continues_alike(prompt in prop::collection::vec(0u32..2048, 0..50), n in 1usize..60, cut in 0usize..60) {
            let generator = Generator::new((100..1100).collect(), 2048).unwrap();
            let whole = run(&generator, &prompt, n);
            let cut = cut.min(n);
            let first = run(&generator, &prompt, cut);
            prop_assert_eq!(run(&generator, &first, n - cut), whole);
        }

        #[test]
        fn every_earlier_token_matters(prompt in prop::collection::vec(0u32..2048, 1..50), at in 0usize..50, other in 0u32..2048) {
            let generator = Generator::new((100..1100).collect(), 2048).unwrap();
            let at = at % prompt.len();
            let mut changed = prompt.clone();
            changed[at] = other;
            let n = prompt.len();
            let (a, b) = (run(&generator, &prompt, 12), run(&generator, &changed, 12));
            prop_assert_eq!(a[n..] == b[n..], prompt == changed);
        }
    }

    #[test]
    fn words_are_used_evenly_and_checked() {
        let generator = Generator::new((0..10).collect(), 10).unwrap();
        let tokens = run(&generator, &[], 10_000);
        for word in 0..10 {
            let count = tokens.iter().filter(|&&t| t == word).count();
            assert!((850..1150).contains(&count), "{word}: {count}");
        }
        assert!(Generator::new(vec![], 10).is_err());
        assert!(Generator::new(vec![10], 10).is_err());
        assert!(generator.check(&[9, 10]).unwrap_err().to_string().contains("10"));
    }
}

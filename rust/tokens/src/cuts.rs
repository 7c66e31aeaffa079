//! Positions at which a text may be cut, so that the IDs of its parts are the parts of its IDs.
//!
//! A tokenizer first splits a text at its added tokens, from left to right, the longest first. It
//! then normalizes, splits and tokenizes every piece between two added tokens by itself.
//!
//! So a text may be cut *before* a special token. The special token opens the right part and keeps
//! its pieces away from the start of the text (some tokenizers put a space before the first piece
//! only).
//!
//! Tokens that depend on text across the cut are excluded: tokens that take the space on their
//! left, and tokens that match as single words only.
use aho_corasick::{AhoCorasick, MatchKind};
use std::ops::Range;
use tokenizers::AddedToken;

/// Shortest segment, in bytes: a text of special tokens alone must not cost much more than other
/// texts of its length.
const SHORTEST: usize = 64;

#[derive(Debug)]
pub(crate) struct Cuts {
    finder: AhoCorasick,
    /// For each pattern: whether a text may be cut before it.
    before: Vec<bool>,
}

impl Cuts {
    /// Returns the cuts for these added tokens, or the reason why there are none.
    pub(crate) fn new(added: &[AddedToken]) -> Result<Cuts, String> {
        if let Some(token) = added.iter().find(|t| t.single_word) {
            return Err(format!("added token {:?} matches as a single word only", token.content));
        }
        // Normalized tokens are searched inside the pieces, later.
        let patterns: Vec<&AddedToken> =
            added.iter().filter(|t| !t.normalized && !t.content.is_empty()).collect();
        let starts_with_space = |token: &AddedToken| token.content.starts_with(char::is_whitespace);
        let before: Vec<bool> =
            patterns.iter().map(|t| t.special && !t.lstrip && !starts_with_space(t)).collect();
        if !before.contains(&true) {
            return Err("no special token at which a text may be cut".into());
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(patterns.iter().map(|t| &t.content))
            .map_err(|error| format!("special tokens: {error}"))?;
        Ok(Cuts { finder, before })
    }

    /// Returns the segments of `text`, in order; together they are the text. A prefix of a text has
    /// the segments of the text, except for its last segment.
    pub(crate) fn segments(&self, text: &str, out: &mut Vec<Range<usize>>) {
        let mut start = 0;
        for found in self.finder.find_iter(text) {
            if self.before[found.pattern().as_usize()] && found.start() - start >= SHORTEST {
                out.push(start..found.start());
                start = found.start();
            }
        }
        if start < text.len() {
            out.push(start..text.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn special(content: &str) -> AddedToken {
        AddedToken::from(content, true).normalized(false)
    }

    fn parts<'a>(cuts: &Cuts, text: &'a str) -> Vec<&'a str> {
        let mut out = Vec::new();
        cuts.segments(text, &mut out);
        out.into_iter().map(|range| &text[range]).collect()
    }

    fn long(text: &str) -> String {
        format!("{text}{}", ".".repeat(SHORTEST))
    }

    #[test]
    fn a_text_is_cut_before_each_special_token() {
        let cuts = Cuts::new(&[special("<s>"), special("<e>")]).unwrap();
        let pieces = [long("a"), long("<s>b"), long("<e>"), "<s>".into()];
        assert_eq!(parts(&cuts, &pieces.concat()), pieces);
        assert_eq!(parts(&cuts, "<s>b"), ["<s>b"]);
        assert!(parts(&cuts, "").is_empty());
    }

    #[test]
    fn segments_are_not_too_many_and_those_of_a_prefix_stay() {
        let cuts = Cuts::new(&[special("<s>")]).unwrap();
        let text = "<s>".repeat(10_000);
        let whole = parts(&cuts, &text);
        assert!(whole.len() <= text.len() / SHORTEST);
        assert_eq!(whole.concat(), text);
        let part = parts(&cuts, &text[..text.len() / 2]);
        assert_eq!(part[..part.len() - 1], whole[..part.len() - 1]);
    }

    #[test]
    fn the_longest_token_counts_wherever_it_stands() {
        let added = [special("<s>"), special("<s>x"), AddedToken::from("q<s>", false).normalized(false)];
        let cuts = Cuts::new(&added).unwrap();
        let pieces = [long("a"), "<s>xb".into()];
        assert_eq!(parts(&cuts, &pieces.concat()), pieces);
        let pieces = [long("a") + "q<s>b", "<s>c".into()];
        assert_eq!(parts(&cuts, &pieces.concat()), pieces);
    }

    #[test]
    fn tokens_that_look_over_the_cut_do_not_cut() {
        let cuts = Cuts::new(&[special("<s>"), special("<l>").lstrip(true), special("\n<n>")]).unwrap();
        let pieces = [long("a") + " <l>b" + &long("\n<n>c"), "<s>".into()];
        assert_eq!(parts(&cuts, &pieces.concat()), pieces);
        assert!(Cuts::new(&[special("<s>").single_word(true)]).unwrap_err().contains("single word"));
        assert!(Cuts::new(&[special("<s>").normalized(true)]).unwrap_err().contains("no special token"));
    }
}

//! A quick reader of the events of an observed stream.
//!
//! Engines write all events of a stream alike: only the text and the token IDs differ. A template
//! keeps the bytes around them of one event that was read as JSON. An event with the same bytes
//! around a plain text and a list of IDs has the same structure, so it needs no parser.
use memchr::memchr2;
use std::ops::Range;

/// The bytes of an event around its text and its token IDs.
#[derive(Debug)]
pub(crate) struct Template {
    /// Up to the quote before the text.
    before: Vec<u8>,
    /// From the quote after the text to the bracket before the IDs.
    between: Vec<u8>,
    /// From the bracket after the IDs to the end of the event.
    after: Vec<u8>,
}

/// Positions in an event that fits a template.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Parts<'a> {
    /// The text, which has no escapes.
    pub(crate) text: &'a str,
    /// The list of IDs, without brackets: digits and commas.
    pub(crate) ids: &'a str,
    /// Start of the list.
    pub(crate) ids_at: usize,
    /// End of the event.
    pub(crate) end: usize,
}

impl Template {
    /// Makes a template from an event. `text`: the text without its quotes. `ids`: the list with
    /// its brackets. Returns `None` if the event has them in another order.
    pub(crate) fn new(event: &[u8], text: Range<usize>, ids: Range<usize>) -> Option<Self> {
        let between = event.get(text.end..ids.start + 1)?;
        let quoted = event.get(..text.start)?.ends_with(b"\"") && between.starts_with(b"\"");
        let listed = between.ends_with(b"[") && event.get(ids.end - 1) == Some(&b']');
        (quoted && listed).then(|| Self {
            before: event[..text.start].to_vec(),
            between: between.to_vec(),
            after: event[ids.end - 1..].to_vec(),
        })
    }

    /// Reads the event at the start of `bytes`. Returns `None` if it does not fit.
    pub(crate) fn read<'a>(&self, bytes: &'a [u8]) -> Option<Parts<'a>> {
        let rest = bytes.strip_prefix(self.before.as_slice())?;
        let length = memchr2(b'"', b'\\', rest)?;
        let (text, rest) = rest.split_at(length);
        // JSON forbids control characters in strings.
        if text.iter().any(|byte| *byte < 0x20) {
            return None;
        }
        let rest = rest.strip_prefix(self.between.as_slice())?;
        let count = rest.iter().position(|byte| !(byte.is_ascii_digit() || *byte == b','))?;
        let (ids, rest) = rest.split_at(count);
        rest.strip_prefix(self.after.as_slice())?;
        let ids_at = self.before.len() + length + self.between.len();
        Some(Parts {
            text: std::str::from_utf8(text).ok()?,
            ids: std::str::from_utf8(ids).ok()?,
            ids_at,
            end: ids_at + count + self.after.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: &str = r#"data: {"delta":{"content":"ab"},"n":1,"token_ids":[3,4]}"#;

    fn range(part: &str) -> Range<usize> {
        let at = EVENT.find(part).unwrap();
        at..at + part.len()
    }

    fn template() -> Template {
        Template::new(EVENT.as_bytes(), range("ab"), range("[3,4]")).unwrap()
    }

    #[test]
    fn events_that_differ_in_text_and_ids_fit() {
        let parts = template().read(EVENT.as_bytes()).unwrap();
        assert_eq!((parts.text, parts.ids, parts.end), ("ab", "3,4", EVENT.len()));
        assert!(EVENT[parts.ids_at..].starts_with("3,4]"));
        let other = EVENT.replace("ab", "ü").replace("3,4", "") + "data";
        let parts = template().read(other.as_bytes()).unwrap();
        assert_eq!((parts.text, parts.ids, parts.end), ("ü", "", other.len() - 4));
    }

    #[test]
    fn all_others_do_not() {
        for (old, new) in [
            ("ab", r"a\n"),
            ("ab", r#"a"b"#),
            ("ab", "a\u{1}"),
            (r#""n":1"#, r#""n":2"#),
            ("[3,4]", "[3, 4]"),
            ("[3,4]", "[-3]"),
            ("[3,4]", "null"),
            ("[3,4]}", "[3,4]"),
            ("delta", "dElta"),
        ] {
            let event = EVENT.replace(old, new);
            assert_eq!(template().read(event.as_bytes()), None, "{event}");
        }
        let mut invalid = EVENT.as_bytes().to_vec();
        invalid[range("ab").start] = 0xff;
        assert_eq!(template().read(&invalid), None);
        assert_eq!(template().read(&EVENT.as_bytes()[..20]), None);
    }

    #[test]
    fn other_orders_have_no_template() {
        let make = |text, ids| Template::new(EVENT.as_bytes(), text, ids).is_some();
        assert!(make(range("ab"), range("[3,4]")));
        assert!(!make(range("[3,4]"), range("ab")));
        assert!(!make(range("\"ab"), range("[3,4]")));
        assert!(!make(range("ab"), range("3,4]")));
    }
}

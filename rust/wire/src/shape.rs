//! Bounds on the shape of a JSON document, checked before any parser reads it. A parser holds
//! Python's global lock, and some of its users recurse. So a small document with an absurd shape
//! could block every other request.

use std::fmt;

use memchr::{memchr_iter, memchr2, memchr2_iter};

/// Levels of lists and objects inside each other.
pub const MAX_DEPTH: usize = 200;
/// Lists and objects in one document, unless it is so long that [`BYTES_EACH`] allows more.
pub const MAX_CONTAINERS: usize = 50_000;
/// Members of objects in one document, unless it is so long that [`BYTES_EACH`] allows more.
pub const MAX_MEMBERS: usize = 50_000;
/// Bytes of a document for each list or object, and for each member. A list of many documents to
/// rank passes, and the time to read a byte stays bounded.
pub const BYTES_EACH: usize = 64;
/// Values in one document, counted by the separators between them. Token IDs do not count: a list
/// of them needs as few bytes in memory as in the document ([`crate::tree`]).
pub const MAX_VALUES: usize = 1_000_000;

/// The bound that a JSON document exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excess {
    /// More than [`MAX_DEPTH`] levels.
    Depth,
    /// More lists and objects than this.
    Containers(usize),
    /// More members of objects than this.
    Members(usize),
    /// More than [`MAX_VALUES`] values.
    Values,
}

/// Text for the document's sender.
impl fmt::Display for Excess {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bound, what) = match self {
            Self::Depth => (MAX_DEPTH, "levels of lists and objects inside each other"),
            Self::Containers(most) => (*most, "lists and objects"),
            Self::Members(most) => (*most, "members of objects"),
            Self::Values => (MAX_VALUES, "values"),
        };
        write!(to, "more than {bound} {what}")
    }
}

/// Returns the first bound that `data` exceeds. Malformed JSON is checked by its brackets outside
/// of strings; parsing it fails afterwards.
#[must_use]
pub fn excess(data: &[u8]) -> Option<Excess> {
    // Upper bounds, found by vector instructions: they settle almost every document.
    let openings = memchr2_iter(b'[', b'{', data).take(MAX_DEPTH + 1).count();
    let few = |byte: u8, max: usize| data.len() <= max || memchr_iter(byte, data).count() <= max;
    if openings <= MAX_DEPTH && few(b':', MAX_MEMBERS) && few(b',', MAX_VALUES - MAX_DEPTH) {
        return None;
    }
    exact(data)
}

fn exact(data: &[u8]) -> Option<Excess> {
    let (mut depth, mut containers, mut members, mut separators) = (0_usize, 0, 0, 0);
    let max_containers = MAX_CONTAINERS.max(data.len() / BYTES_EACH);
    let max_members = MAX_MEMBERS.max(data.len() / BYTES_EACH);
    // Whether a token ID may begin here, or ended before here.
    let (mut before_id, mut after_id) = (false, false);
    let mut at = 0;
    while let Some(&byte) = data.get(at) {
        at += 1;
        match byte {
            b'0'..=b'9' => {
                let digits = 1 + data[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                at += digits - 1;
                after_id = before_id && digits <= 10; // ten digits hold each token ID
                before_id = false;
                continue;
            }
            b' ' | b'\t' | b'\n' | b'\r' => continue,
            b'"' => at = string_end(data, at),
            b'[' | b'{' => {
                depth += 1;
                containers += 1;
                if depth > MAX_DEPTH {
                    return Some(Excess::Depth);
                }
                if containers > max_containers {
                    return Some(Excess::Containers(max_containers));
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b':' => {
                members += 1;
                if members > max_members {
                    return Some(Excess::Members(max_members));
                }
            }
            b',' if !after_id => separators += 1,
            _ => {}
        }
        (before_id, after_id) = (matches!(byte, b'[' | b','), false);
        if separators + containers > MAX_VALUES {
            return Some(Excess::Values);
        }
    }
    None
}

/// Returns the position behind the quote that ends the string whose content begins at `at`.
pub(crate) fn string_end(data: &[u8], mut at: usize) -> usize {
    loop {
        let Some(found) = data.get(at..).and_then(|rest| memchr2(b'"', b'\\', rest)) else {
            return data.len();
        };
        at += found + 1;
        if data[at - 1] == b'"' {
            return at;
        }
        at += 1; // what the backslash escapes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bounds_are_inclusive() {
        let nested = |levels: usize| [vec![b'['; levels], vec![b']'; levels]].concat();
        assert_eq!(excess(&nested(MAX_DEPTH)), None);
        assert_eq!(excess(&nested(MAX_DEPTH + 1)), Some(Excess::Depth));

        let flat = |lists: usize| format!("[{}]", vec!["[]"; lists - 1].join(","));
        assert_eq!(excess(flat(MAX_CONTAINERS).as_bytes()), None);
        assert_eq!(excess(flat(MAX_CONTAINERS + 1).as_bytes()), Some(Excess::Containers(MAX_CONTAINERS)));

        let members = |members: usize| format!("{{{}}}", vec![r#""":1"#; members].join(","));
        assert_eq!(excess(members(MAX_MEMBERS).as_bytes()), None);
        assert_eq!(excess(members(MAX_MEMBERS + 1).as_bytes()), Some(Excess::Members(MAX_MEMBERS)));

        for value in [r#""""#, "-1", "1.0", "1e9", "12345678901"] {
            let values = |values: usize| format!("[{}]", vec![value; values].join(","));
            assert_eq!(excess(values(MAX_VALUES).as_bytes()), None, "{value}");
            assert_eq!(excess(values(MAX_VALUES + 1).as_bytes()), Some(Excess::Values), "{value}");
        }
    }

    #[test]
    fn bounds_follow_the_bytes() {
        for separator in [",", ", ", " ,\n"] {
            let ids = vec!["4294967295"; 2 * MAX_VALUES].join(separator);
            assert_eq!(excess(format!("[{ids}]").as_bytes()), None, "{separator:?}");
            let lists = vec![format!("[{}]", vec!["1"; 1000].join(separator)); 1001].join(separator);
            assert_eq!(excess(format!("[{lists}]").as_bytes()), None, "{separator:?}");
        }
        let document = |text: usize| format!(r#"{{"id":"","text":"{}"}}"#, "x".repeat(text));
        let documents = |count: usize, text| format!("[{}]", vec![document(text); count].join(","));
        assert_eq!(excess(documents(60_000, 256).as_bytes()), None);
        let short = documents(60_000, BYTES_EACH);
        assert_eq!(excess(short.as_bytes()), Some(Excess::Members(short.len() / BYTES_EACH)));
        assert_eq!(excess(documents(60_000, 0).as_bytes()), Some(Excess::Members(MAX_MEMBERS)));
    }

    #[test]
    fn brackets_and_commas_inside_strings_do_not_count() {
        let text = "[{,:\\\"[".repeat(MAX_VALUES);
        assert_eq!(excess(format!(r#"{{"prompt":"{text}"}}"#).as_bytes()), None);
        // A backslash before the closing quote, itself escaped, does not escape the quote.
        let deep = format!(r#"["\\",{}"#, "[".repeat(MAX_DEPTH));
        assert_eq!(excess(deep.as_bytes()), Some(Excess::Depth));
        assert_eq!(excess(br#"["never closed \"#), None);
    }

    proptest! {
        /// The quick count never passes a document that the exact count refuses.
        #[test]
        fn the_quick_check_agrees_with_the_exact_one(
            data in proptest::collection::vec(
                proptest::sample::select(b"[]{}\",:\\a".to_vec()), 0..2_000)
        ) {
            prop_assert_eq!(excess(&data), exact(&data));
        }
    }
}

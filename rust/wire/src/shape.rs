//! Bounds on the shape of a JSON document, checked before any parser reads it. A parser holds
//! Python's global lock, and some of its users recurse. So a small document with an absurd shape
//! could block every other request.

use std::fmt;

use memchr::{memchr_iter, memchr2, memchr2_iter};

/// Levels of lists and objects inside each other.
pub const MAX_DEPTH: usize = 200;
/// Lists and objects in one document.
pub const MAX_CONTAINERS: usize = 50_000;
/// Members of objects in one document.
pub const MAX_MEMBERS: usize = 50_000;
/// Values in one document, counted by the separators between them.
pub const MAX_VALUES: usize = 1_000_000;

/// The bound that a JSON document exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Excess {
    /// More than [`MAX_DEPTH`] levels.
    Depth,
    /// More than [`MAX_CONTAINERS`] lists and objects.
    Containers,
    /// More than [`MAX_MEMBERS`] members of objects.
    Members,
    /// More than [`MAX_VALUES`] values.
    Values,
}

/// Text for the document's sender.
impl fmt::Display for Excess {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bound, what) = match self {
            Self::Depth => (MAX_DEPTH, "levels of lists and objects inside each other"),
            Self::Containers => (MAX_CONTAINERS, "lists and objects"),
            Self::Members => (MAX_MEMBERS, "members of objects"),
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
    let mut at = 0;
    while let Some(&byte) = data.get(at) {
        at += 1;
        match byte {
            b'"' => at = string_end(data, at),
            b'[' | b'{' => {
                depth += 1;
                containers += 1;
                if depth > MAX_DEPTH {
                    return Some(Excess::Depth);
                }
                if containers > MAX_CONTAINERS {
                    return Some(Excess::Containers);
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b':' => {
                members += 1;
                if members > MAX_MEMBERS {
                    return Some(Excess::Members);
                }
            }
            b',' => separators += 1,
            _ => {}
        }
        if separators + containers > MAX_VALUES {
            return Some(Excess::Values);
        }
    }
    None
}

/// Returns the position behind the quote that ends the string whose content begins at `at`.
fn string_end(data: &[u8], mut at: usize) -> usize {
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
        assert_eq!(excess(flat(MAX_CONTAINERS + 1).as_bytes()), Some(Excess::Containers));

        let members = |members: usize| format!("{{{}}}", vec![r#""":1"#; members].join(","));
        assert_eq!(excess(members(MAX_MEMBERS).as_bytes()), None);
        assert_eq!(excess(members(MAX_MEMBERS + 1).as_bytes()), Some(Excess::Members));

        let values = |values: usize| format!("[{}]", vec!["1"; values].join(","));
        assert_eq!(excess(values(MAX_VALUES).as_bytes()), None);
        assert_eq!(excess(values(MAX_VALUES + 1).as_bytes()), Some(Excess::Values));
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

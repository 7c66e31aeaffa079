//! The model's name in answers, as the client asked for it.
use memchr::memmem;

use crate::observe::Observer;
use crate::shape::string_end;

const MEMBER: &[u8] = b"\"model\"";
/// Longest member that is found across two pieces, in bytes. Names have at most 256 characters, and
/// JSON writes each in up to 12 bytes.
const MEMBER_LIMIT: usize = 4096;

/// Changes the name in each member `model` that has the name under which the engine was asked. All
/// other bytes stay as they are.
#[derive(Debug)]
pub(crate) struct Rename {
    served: String,
    /// As JSON.
    shown: String,
    /// The first pieces of JSON have passed.
    pub(crate) begun: bool,
}

impl Rename {
    pub(crate) fn new(served: &str, shown: &str) -> Self {
        let shown = serde_json::Value::from(shown).to_string();
        Self { served: served.to_owned(), shown, begun: false }
    }

    /// Appends `json`, one document or several, to `out`, with the changed name. Returns whether a
    /// name changed.
    ///
    /// The quotes of texts inside a document are escaped. So the name of a member is found by its
    /// bytes.
    pub(crate) fn write(&self, json: &[u8], out: &mut Vec<u8>) -> bool {
        let mut copied = 0;
        for name in memmem::find_iter(json, MEMBER) {
            let Some(start) = value(json, name).filter(|&at| json[at] == b'"') else { continue };
            let end = string_end(json, start + 1);
            if serde_json::from_slice::<String>(&json[start..end]).is_ok_and(|found| found == self.served) {
                out.extend_from_slice(&json[copied..start]);
                out.extend_from_slice(self.shown.as_bytes());
                copied = end;
            }
        }
        out.extend_from_slice(&json[copied..]);
        copied > 0
    }

    /// Appends a piece of a document to `out`, and returns whether a name changed. A member at its
    /// end that may be incomplete stays in `held`, which begins the piece.
    pub(crate) fn write_piece(&self, held: &mut Vec<u8>, piece: &[u8], out: &mut Vec<u8>) -> bool {
        let joined = (!held.is_empty()).then(|| [held, piece].concat());
        let json = joined.as_deref().unwrap_or(piece);
        let (whole, rest) = json.split_at(open_member(json).unwrap_or(json.len()));
        held.clear();
        held.extend_from_slice(rest);
        self.write(whole, out) || joined.is_some()
    }
}

/// Returns the start of a member `model` at the end of a piece that may be incomplete.
fn open_member(json: &[u8]) -> Option<usize> {
    let last = json.len().saturating_sub(MEMBER_LIMIT);
    let name = memmem::rfind(&json[last..], MEMBER).map(|at| last + at).filter(|&name| {
        value(json, name).is_none_or(|at| json[at] == b'"' && string_end(json, at + 1) == json.len())
    });
    let begins = |count: &usize| json.ends_with(&MEMBER[..*count]);
    name.or_else(|| (1..MEMBER.len()).rev().find(begins).map(|count| json.len() - count))
}

/// Returns the position of a member's value, or of another byte in its place; `None`: it comes
/// later.
fn value(json: &[u8], name: usize) -> Option<usize> {
    let colon = skip_blanks(json, name + MEMBER.len())?;
    if json[colon] == b':' { skip_blanks(json, colon + 1) } else { Some(colon) }
}

/// Returns the position of the first byte that is no blank; `None` at the end. A line end is none:
/// an event may end there, and the next one may come later.
fn skip_blanks(json: &[u8], at: usize) -> Option<usize> {
    json[at..].iter().position(|byte| !matches!(byte, b' ' | b'\t')).map(|blanks| at + blanks)
}

/// Appends the client's version of whole events, which the observer has read, to `out`.
pub(crate) fn write_events(
    observer: Option<&Observer>,
    rename: Option<&Rename>,
    events: &[u8],
    out: &mut Vec<u8>,
) {
    match (observer, rename) {
        (None, None) => out.extend_from_slice(events),
        (Some(observer), None) => observer.write(events, out),
        (None, Some(rename)) => {
            rename.write(events, out);
        }
        (Some(observer), Some(rename)) => {
            let mut shown = Vec::with_capacity(events.len());
            observer.write(events, &mut shown);
            rename.write(&shown, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn renamed(json: &str) -> String {
        let mut out = Vec::new();
        Rename::new("org/large", "gpt \"4\"").write(json.as_bytes(), &mut out);
        String::from_utf8(out).expect("UTF-8")
    }

    #[test]
    fn only_the_models_name_changes() {
        let shown = r#""gpt \"4\"""#;
        for (before, after) in [
            (
                r#"{"id":"a","model":"org/large","choices":[]}"#,
                format!(r#"{{"id":"a","model":{shown},"choices":[]}}"#),
            ),
            (r#"{"model" : "org\/large"}"#, format!(r#"{{"model" : {shown}}}"#)),
            (
                r#"{"response":{"model":"org/large","x":1}}"#,
                format!(r#"{{"response":{{"model":{shown},"x":1}}}}"#),
            ),
        ] {
            assert_eq!(renamed(before), after);
        }
        for same in [
            r#"{"model":"another"}"#,
            r#"{"model":null}"#,
            r#"{"model":{"model":7}}"#,
            r#"{"text":"{\"model\":\"org/large\"}"}"#,
            r#"{"text":"\"model\"","model_name":"org/large"}"#,
            r#"{"model":"org/large"#,
            r#"{"model":"#,
            r#""model""#,
            "{\"model\":\n\"org/large\"}",
            "",
        ] {
            assert_eq!(renamed(same), same);
        }
    }
}

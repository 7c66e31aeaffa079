//! A JSON document as a tree that borrows from its bytes.

use std::borrow::Cow;
use std::fmt;

use memchr::memchr3;
use serde_core::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Number;
use xxhash_rust::xxh3::Xxh3;

use crate::shape::MAX_VALUES;

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json<'a> {
    Null,
    Bool(bool),
    Number(Number),
    Text(Cow<'a, str>),
    /// A list of at least one whole number from 0 to [`u32::MAX`], and of nothing else: such lists
    /// of token IDs may be long.
    Ids(Vec<u32>),
    /// Any other list.
    List(Vec<Json<'a>>),
    Object(Members<'a>),
}

/// An object. If two members have the same name, the last one counts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Members<'a>(Vec<(Cow<'a, str>, Json<'a>)>);

impl<'a> Members<'a> {
    pub(crate) fn get(&self, name: &str) -> Option<&Json<'a>> {
        self.0.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    /// Returns a member's value and replaces it with null; null if there is no such member.
    pub(crate) fn take(&mut self, name: &str) -> Json<'a> {
        let found = self.0.iter_mut().rev().find(|(own, _)| own == name);
        found.map_or(Json::Null, |(_, value)| std::mem::replace(value, Json::Null))
    }

    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Json<'a>> {
        self.0.iter_mut().rev().find(|(own, _)| own == name).map(|(_, value)| value)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Json<'a>)> {
        self.0.iter().map(|(name, value)| (name.as_ref(), value))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A digest of the members with other names. It does not depend on their order.
    pub(crate) fn digest_without(&self, names: &[&str]) -> u128 {
        let mut hash = Xxh3::new();
        self.hash(&mut hash, names);
        hash.digest128()
    }

    fn hash(&self, hash: &mut Xxh3, without: &[&str]) {
        let mut sorted: Vec<_> =
            self.0.iter().filter(|(name, _)| !without.contains(&name.as_ref())).collect();
        sorted.sort_by(|a, b| a.0.cmp(&b.0)); // stable: of the same name, the last stays last
        sorted.dedup_by(|next, kept| {
            let same = next.0 == kept.0;
            if same {
                *kept = *next;
            }
            same
        });
        put(hash, b'{', sorted.len(), b"");
        for (name, value) in sorted {
            Json::Text(Cow::Borrowed(name)).hash(hash);
            value.hash(hash);
        }
    }
}

/// Hashes a value's kind, length and bytes: no two values give the same bytes.
fn put(hash: &mut Xxh3, kind: u8, length: usize, bytes: &[u8]) {
    hash.update(&[kind]);
    hash.update(&length.to_le_bytes());
    hash.update(bytes);
}

impl<'a> Json<'a> {
    /// Reads a document. The caller bounds its depth ([`crate::excess`]), since this recurses.
    pub(crate) fn read(document: &'a [u8]) -> Result<Self, serde_json::Error> {
        let mut reader = serde_json::Deserializer::from_slice(document);
        reader.disable_recursion_limit();
        let value = Self::deserialize(&mut reader)?;
        reader.end()?;
        Ok(value)
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// Whether the value is not null, false, 0 or empty.
    pub(crate) fn is_something(&self) -> bool {
        match self {
            Self::Null => false,
            Self::Bool(yes) => *yes,
            Self::Number(number) => number.as_f64() != Some(0.0),
            Self::Text(text) => !text.is_empty(),
            Self::Ids(_) => true,
            Self::List(values) => !values.is_empty(),
            Self::Object(members) => members.len() > 0,
        }
    }

    /// Writes JSON without spaces.
    pub(crate) fn write(&self, to: &mut String) {
        match self {
            Self::Null => to.push_str("null"),
            Self::Bool(yes) => to.push_str(if *yes { "true" } else { "false" }),
            Self::Number(number) => to.push_str(&number.to_string()),
            Self::Text(text) => write_string(to, text),
            Self::Ids(ids) => {
                to.push('[');
                write_list(to, ids, |to, id| to.push_str(&id.to_string()));
                to.push(']');
            }
            Self::List(values) => {
                to.push('[');
                write_list(to, values, |to, value| value.write(to));
                to.push(']');
            }
            Self::Object(members) => {
                to.push('{');
                write_list(to, &members.0, |to, (name, value)| {
                    write_string(to, name);
                    to.push(':');
                    value.write(to);
                });
                to.push('}');
            }
        }
    }

    fn hash(&self, hash: &mut Xxh3) {
        match self {
            Self::Null => put(hash, b'0', 0, b""),
            Self::Bool(yes) => put(hash, b'?', usize::from(*yes), b""),
            Self::Number(number) => {
                let digits = number.to_string();
                put(hash, b'1', digits.len(), digits.as_bytes());
            }
            Self::Text(text) => put(hash, b'"', text.len(), text.as_bytes()),
            Self::Ids(ids) => {
                put(hash, b'[', ids.len(), b"");
                ids.iter().for_each(|id| Json::Number((*id).into()).hash(hash));
            }
            Self::List(values) => {
                put(hash, b'[', values.len(), b"");
                values.iter().for_each(|value| value.hash(hash));
            }
            Self::Object(members) => members.hash(hash, &[]),
        }
    }
}

/// The kind of a value, in JSON's words, for errors.
impl fmt::Display for Json<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => to.write_str("null or absent"),
            Self::Bool(_) => to.write_str("a boolean"),
            Self::Number(number) => write!(to, "the number {number}"),
            Self::Text(_) => to.write_str("a string"),
            Self::List(values) if values.is_empty() => to.write_str("an empty list"),
            Self::List(_) | Self::Ids(_) => to.write_str("a list"),
            Self::Object(_) => to.write_str("an object"),
        }
    }
}

impl<'de> Deserialize<'de> for Json<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reads)
    }
}

/// The value as a token ID.
fn as_id(value: &Json<'_>) -> Option<u32> {
    if let Json::Number(number) = value { number.as_u64()?.try_into().ok() } else { None }
}

struct Reads;

impl<'de> Visitor<'de> for Reads {
    type Value = Json<'de>;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json<'de>, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, yes: bool) -> Result<Json<'de>, E> {
        Ok(Json::Bool(yes))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json<'de>, E> {
        Ok(Json::Number(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Json<'de>, E> {
        Ok(Json::Number(number.into()))
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<Json<'de>, E> {
        Number::from_f64(number).map(Json::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Json<'de>, E> {
        Ok(Json::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json<'de>, E> {
        Ok(Json::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Json<'de>, A::Error> {
        let mut ids = Vec::new();
        let mut values = Vec::new();
        while let Some(value) = from.next_element()? {
            match as_id(&value) {
                Some(id) if values.is_empty() => ids.push(id),
                _ => {
                    if values.is_empty() && !ids.is_empty() {
                        // As [`crate::shape`] counts such lists by their bytes only.
                        if ids.len() > MAX_VALUES {
                            return Err(de::Error::custom("a long list of numbers with another value"));
                        }
                        values.extend(ids.drain(..).map(|id| Json::Number(id.into())));
                    }
                    values.push(value);
                }
            }
        }
        Ok(if ids.is_empty() { Json::List(values) } else { Json::Ids(ids) })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Json<'de>, A::Error> {
        let mut members = Vec::new();
        while let Some(name) = from.next_key()? {
            let Json::Text(name) = name else { return Err(de::Error::custom("a name that is no string")) };
            members.push((name, from.next_value()?));
        }
        Ok(Json::Object(Members(members)))
    }
}

/// Writes a string with the escapes of `serde_json`.
fn write_string(to: &mut String, text: &str) {
    to.push('"');
    let mut rest = text;
    while let Some(at) = memchr3(b'"', b'\\', b'\n', rest.as_bytes()) {
        write_line(to, &rest[..at]);
        to.push_str(match rest.as_bytes()[at] {
            b'"' => "\\\"",
            b'\\' => "\\\\",
            _ => "\\n",
        });
        rest = &rest[at + 1..];
    }
    write_line(to, rest);
    to.push('"');
}

/// Writes text without quotes, backslashes and line feeds. Other control characters are rare.
fn write_line(to: &mut String, text: &str) {
    if text.bytes().fold(false, |any, byte| any | (byte < b' ')) {
        let escaped = serde_json::to_string(text).expect("a String takes all");
        to.push_str(&escaped[1..escaped.len() - 1]);
    } else {
        to.push_str(text);
    }
}

/// Writes values with commas between them.
fn write_list<T>(to: &mut String, values: &[T], write: impl Fn(&mut String, &T)) {
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            to.push(',');
        }
        write(to, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(document: &str) -> Json<'_> {
        Json::read(document.as_bytes()).expect(document)
    }

    fn written(document: &str) -> String {
        let mut text = String::new();
        read(document).write(&mut text);
        text
    }

    fn digest(document: &str) -> u128 {
        let Json::Object(members) = read(document) else { unreachable!() };
        members.digest_without(&[])
    }

    #[test]
    fn lists_of_token_ids_need_four_bytes_each() {
        assert_eq!(read("[1, 4294967295]"), Json::Ids(vec![1, u32::MAX]));
        for other in ["[]", "[1, 4294967296]", "[1, -1]", "[1.0]", "[1, \"a\", 2]", "[null, 1]", "[1, [2]]"] {
            assert!(matches!(read(other), Json::List(_)), "{other}");
            assert_eq!(written(other), other.replace(' ', ""));
        }
        let mixed = format!("[{}\"a\"]", "1,".repeat(MAX_VALUES + 1));
        assert!(Json::read(mixed.as_bytes()).is_err());
    }

    #[test]
    fn compact_and_in_order() {
        let document = r#"{ "b": [1, -2, 1.5, "x\u00e9\n"], "a": {"": null, "t": true} }"#;
        let compact = r#"{"b":[1,-2,1.5,"xé\n"],"a":{"":null,"t":true}}"#;
        assert_eq!(written(document), compact);
        assert!(matches!(read(r#""plain""#), Json::Text(Cow::Borrowed("plain"))));
        let all: String = (0..0x100).filter_map(char::from_u32).chain("\n\"\\🙂".chars()).collect();
        let document = serde_json::to_string(&[&all, "", "-0.5e-9"]).unwrap();
        assert_eq!(written(&document), document);
        for number in ["-1", "1.5", "1e300", "18446744073709551615", "0.1"] {
            let value: serde_json::Value = serde_json::from_str(number).unwrap();
            assert_eq!(written(number), value.to_string());
        }
    }

    #[test]
    fn of_the_same_name_the_last_counts() {
        let Json::Object(mut members) = read(r#"{"a": 1, "b": 2, "a": 3}"#) else { unreachable!() };
        assert_eq!(members.get("a"), Some(&Json::Number(3.into())));
        assert_eq!(members.take("a"), Json::Number(3.into()));
        assert_eq!((members.take("a"), members.take("c")), (Json::Null, Json::Null));
        assert_eq!(digest(r#"{"a": 1, "b": 2, "a": 3}"#), digest(r#"{"b": 2, "a": 3}"#));
    }

    #[test]
    fn equal_content_and_only_that_has_an_equal_digest() {
        let same = digest(r#"{"a": [1, {"x": "y"}], "b": null}"#);
        assert_eq!(digest(r#"{"b":null,"a":[1,{"x":"\u0079"}]}"#), same);
        let all = [
            "null",
            "false",
            "true",
            "0",
            "1",
            "\"\"",
            "\"1\"",
            "[]",
            "[[]]",
            "[null]",
            "[0]",
            "[1]",
            "[0,1]",
            "[0,1.5]",
            "{}",
            r#"{"":""}"#,
            r#"{"a":"b"}"#,
            r#"["a","b"]"#,
            r#"["ab"]"#,
            r#"[["a"],"b"]"#,
            r#"[["a","b"]]"#,
        ];
        let digests: std::collections::HashSet<_> =
            all.iter().map(|each| digest(&format!(r#"{{"":{each}}}"#))).collect();
        assert_eq!(digests.len(), all.len());
    }

    #[test]
    fn depth_is_the_callers_to_bound() {
        let deep = format!("{}{}", "[".repeat(crate::MAX_DEPTH), "]".repeat(crate::MAX_DEPTH));
        assert!(Json::read(deep.as_bytes()).is_ok());
    }
}

//! A JSON document as a tree that borrows from its bytes.

use std::borrow::Cow;
use std::fmt;

use serde_core::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_core::ser::{Serialize, Serializer};
use serde_json::Number;
use xxhash_rust::xxh3::Xxh3;

/// A value. It serializes to compact JSON with its members in their order.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Json<'a> {
    Null,
    Bool(bool),
    Number(Number),
    Text(Cow<'a, str>),
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

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_ref())
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
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
            Self::List(values) => !values.is_empty(),
            Self::Object(members) => members.len() > 0,
        }
    }

    /// A digest of the value that does not depend on the order of members.
    pub(crate) fn digest(&self) -> u128 {
        let mut hash = Xxh3::new();
        self.hash(&mut hash);
        hash.digest128()
    }

    fn hash(&self, hash: &mut Xxh3) {
        // Each value begins with its kind and its length, so that no two values give the same
        // bytes.
        let mut put = |kind: u8, length: usize, bytes: &[u8]| {
            hash.update(&[kind]);
            hash.update(&length.to_le_bytes());
            hash.update(bytes);
        };
        match self {
            Self::Null => put(b'0', 0, b""),
            Self::Bool(yes) => put(b'?', usize::from(*yes), b""),
            Self::Number(number) => {
                let digits = number.to_string();
                put(b'1', digits.len(), digits.as_bytes());
            }
            Self::Text(text) => put(b'"', text.len(), text.as_bytes()),
            Self::List(values) => {
                put(b'[', values.len(), b"");
                values.iter().for_each(|value| value.hash(hash));
            }
            Self::Object(members) => {
                let mut sorted: Vec<_> = members.0.iter().collect();
                sorted.sort_by(|a, b| a.0.cmp(&b.0)); // stable: of the same name, the last stays last
                sorted.dedup_by(|next, kept| {
                    let same = next.0 == kept.0;
                    if same {
                        *kept = *next;
                    }
                    same
                });
                put(b'{', sorted.len(), b"");
                for (name, value) in sorted {
                    Json::Text(Cow::Borrowed(name)).hash(hash);
                    value.hash(hash);
                }
            }
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
            Self::List(_) => to.write_str("a list"),
            Self::Object(_) => to.write_str("an object"),
        }
    }
}

impl<'de> Deserialize<'de> for Json<'de> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reads)
    }
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
        let mut values = Vec::new();
        while let Some(value) = from.next_element()? {
            values.push(value);
        }
        Ok(Json::List(values))
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

impl Serialize for Json<'_> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Null => to.serialize_unit(),
            Self::Bool(yes) => to.serialize_bool(*yes),
            Self::Number(number) => number.serialize(to),
            Self::Text(text) => to.serialize_str(text),
            Self::List(values) => to.collect_seq(values),
            Self::Object(members) => to.collect_map(members.0.iter().map(|(name, value)| (name, value))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(document: &str) -> Json<'_> {
        Json::read(document.as_bytes()).expect(document)
    }

    #[test]
    fn compact_and_in_order() {
        let document = r#"{ "b": [1, -2, 1.5, "x\u00e9\n"], "a": {"": null, "t": true} }"#;
        let compact = r#"{"b":[1,-2,1.5,"xé\n"],"a":{"":null,"t":true}}"#;
        assert_eq!(serde_json::to_string(&read(document)).unwrap(), compact);
        assert!(matches!(read(r#""plain""#), Json::Text(Cow::Borrowed("plain"))));
    }

    #[test]
    fn of_the_same_name_the_last_counts() {
        let Json::Object(mut members) = read(r#"{"a": 1, "b": 2, "a": 3}"#) else { unreachable!() };
        assert_eq!(members.get("a"), Some(&Json::Number(3.into())));
        assert_eq!(members.take("a"), Json::Number(3.into()));
        assert_eq!((members.take("a"), members.take("c")), (Json::Null, Json::Null));
        assert_eq!(read(r#"{"a": 1, "b": 2, "a": 3}"#).digest(), read(r#"{"b": 2, "a": 3}"#).digest());
    }

    #[test]
    fn equal_content_and_only_that_has_an_equal_digest() {
        let same = read(r#"{"a": [1, {"x": "y"}], "b": null}"#).digest();
        assert_eq!(read(r#"{"b":null,"a":[1,{"x":"\u0079"}]}"#).digest(), same);
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
            "{}",
            r#"{"":""}"#,
            r#"{"a":"b"}"#,
            r#"["a","b"]"#,
            r#"["ab"]"#,
            r#"[["a"],"b"]"#,
            r#"[["a","b"]]"#,
        ];
        let digests: std::collections::HashSet<_> = all.iter().map(|each| read(each).digest()).collect();
        assert_eq!(digests.len(), all.len());
    }

    #[test]
    fn depth_is_the_callers_to_bound() {
        let deep = format!("{}{}", "[".repeat(crate::MAX_DEPTH), "]".repeat(crate::MAX_DEPTH));
        assert!(Json::read(deep.as_bytes()).is_ok());
    }
}

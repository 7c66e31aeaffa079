//! Settings by name, deserialized into structs by serde.
//!
//! Several structs may share one set of settings: each takes its own fields. A struct declares its
//! settings with `#[derive(Deserialize)]`, and `#[serde(default)]` if all have defaults.
use crate::error::CoreError;
use serde::de::value::MapDeserializer;
use serde::de::{self, DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use std::collections::BTreeMap;
use std::fmt::Display;

/// Value of a setting: a number (true is 1, false is 0), or the text of any other value.
pub type Value = Result<f64, String>;

/// Settings by name that no struct has taken yet.
#[derive(Debug)]
pub struct SettingsReader {
    what: String,
    left: BTreeMap<String, Value>,
    known: Vec<&'static str>,
}

impl SettingsReader {
    /// Wraps `settings`. `what` names them in errors, e.g. `rebalance star`.
    pub fn new(what: &str, settings: impl IntoIterator<Item = (String, Value)>) -> SettingsReader {
        SettingsReader { what: what.into(), left: settings.into_iter().collect(), known: Vec::new() }
    }

    /// Takes the settings that are fields of `T`.
    ///
    /// # Errors
    /// `BadValue` for a value of the wrong type.
    pub fn read<T: DeserializeOwned>(&mut self) -> Result<T, CoreError> {
        T::deserialize(self)
    }

    /// Takes one setting; `None` if it is not given.
    ///
    /// # Errors
    /// `BadValue` for a value of the wrong type.
    pub fn one<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, CoreError> {
        self.known.push(name);
        self.take(name).map(T::deserialize).transpose()
    }

    fn take(&mut self, name: &str) -> Option<Setting> {
        let value = self.left.remove(name)?;
        Some(Setting { what: format!("{}: {name}", self.what), value })
    }

    /// Accepts a setting without reading it, because the caller reads it.
    pub fn skip(&mut self, name: &'static str) {
        self.left.remove(name);
        self.known.push(name);
    }

    /// Checks that no setting is left.
    ///
    /// # Errors
    /// `BadValue` for a setting that no struct has. The error lists the known settings.
    pub fn finish(self) -> Result<(), CoreError> {
        let Some(name) = self.left.into_keys().next() else { return Ok(()) };
        let expected = if self.known.is_empty() { "no settings".into() } else { self.known.join(", ") };
        Err(CoreError::BadValue { what: self.what, got: format!("setting {name:?}"), expected })
    }
}

impl<'de> Deserializer<'de> for &mut SettingsReader {
    type Error = CoreError;

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, CoreError> {
        self.known.extend(fields);
        let own = fields.iter().filter_map(|&name| Some((name, self.take(name)?)));
        visitor.visit_map(MapDeserializer::new(own))
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CoreError> {
        Err(de::Error::invalid_type(de::Unexpected::Map, &visitor))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

/// One setting, with its name for errors.
struct Setting {
    what: String,
    value: Value,
}

impl Setting {
    /// Returns the number converted by `accept`, or an error if it is not `expected`.
    fn number<T>(self, expected: &str, accept: impl Fn(f64) -> Option<T>) -> Result<T, CoreError> {
        let bad = |got| CoreError::BadValue { what: self.what, got, expected: expected.into() };
        match self.value {
            Ok(number) => accept(number).ok_or_else(|| bad(number.to_string())),
            Err(other) => Err(bad(other)),
        }
    }
}

impl IntoDeserializer<'_, CoreError> for Setting {
    type Deserializer = Setting;

    fn into_deserializer(self) -> Setting {
        self
    }
}

impl<'de> Deserializer<'de> for Setting {
    type Error = CoreError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CoreError> {
        visitor.visit_f64(self.number("a number", Some)?)
    }

    /// Accepts whole numbers up to [`u32::MAX`], also written as 5.0.
    fn deserialize_u64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CoreError> {
        let whole = |n: f64| n.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&n);
        let expected = "a whole number from 0 to 4294967295";
        visitor.visit_u64(self.number(expected, |n| whole(n).then_some(n as u64))?)
    }

    fn deserialize_u32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CoreError> {
        self.deserialize_u64(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CoreError> {
        let bit = |n: f64| (n == 0.0 || n == 1.0).then_some(n == 1.0);
        visitor.visit_bool(self.number("0 (false) or 1 (true)", bit)?)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, CoreError> {
        visitor.visit_some(self)
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u8 u16 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl de::Error for CoreError {
    fn custom<T: Display>(problem: T) -> CoreError {
        let expected = "a number, true or false".into();
        CoreError::BadValue { what: "settings".into(), got: problem.to_string(), expected }
    }

    fn missing_field(name: &'static str) -> CoreError {
        CoreError::BadValue { what: name.into(), got: "nothing".into(), expected: "a value".into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Debug, Default, PartialEq, Deserialize)]
    #[serde(default)]
    struct Ours {
        count: u32,
        most: Option<usize>,
        seconds: f64,
        on: bool,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    struct Theirs {
        rate: f64,
    }

    fn read(settings: &[(&str, f64)]) -> Result<(Ours, Option<u32>), CoreError> {
        let settings = settings.iter().map(|(name, value)| (name.to_string(), Ok(*value)));
        let mut reader = SettingsReader::new("test", settings);
        let both = (reader.read()?, reader.one("seed")?);
        reader.finish()?;
        Ok(both)
    }

    #[test]
    fn each_struct_takes_its_own_settings() {
        assert_eq!(read(&[]).unwrap(), (Ours::default(), None));
        let most = u32::MAX;
        let given = [("on", 1.0), ("seed", 7.0), ("count", f64::from(most)), ("most", 5.0), ("seconds", 2.0)];
        let ours = Ours { count: most, most: Some(5), seconds: 2.0, on: true };
        assert_eq!(read(&given).unwrap(), (ours, Some(7)));
    }

    #[test]
    fn wrong_values_are_named() {
        let told = |name, value| read(&[(name, value)]).unwrap_err().to_string();
        for wrong in [0.5, -1.0, 4_294_967_296.0, f64::NAN, f64::INFINITY] {
            let expected = "expected a whole number from 0 to 4294967295";
            assert_eq!(told("count", wrong), format!("test: count: {wrong} is not valid; {expected}"));
            assert_eq!(told("most", wrong), format!("test: most: {wrong} is not valid; {expected}"));
        }
        assert_eq!(told("on", 0.5), "test: on: 0.5 is not valid; expected 0 (false) or 1 (true)");
        assert_eq!(
            told("seed", 0.5),
            "test: seed: 0.5 is not valid; expected a whole number from 0 to 4294967295"
        );
        let mut reader = SettingsReader::new("test", [("seconds".to_string(), Err("'much'".to_string()))]);
        let error = reader.read::<Ours>().unwrap_err();
        assert_eq!(error.to_string(), "test: seconds: 'much' is not valid; expected a number");
        let error = reader.read::<Theirs>().unwrap_err();
        assert_eq!(error.to_string(), "rate: nothing is not valid; expected a value");
    }

    #[test]
    fn unknown_settings_are_named_with_those_that_exist() {
        let told = read(&[("cuont", 1.0)]).unwrap_err().to_string();
        let known = "count, most, seconds, on, seed";
        assert_eq!(told, format!("test: setting \"cuont\" is not valid; expected {known}"));
        let left = [("seed".to_string(), Ok(1.0))];
        let told = SettingsReader::new("test", left.clone()).finish().unwrap_err().to_string();
        assert_eq!(told, "test: setting \"seed\" is not valid; expected no settings");
        let mut reader = SettingsReader::new("test", left);
        reader.skip("seed");
        assert_eq!(reader.finish(), Ok(()));
    }
}

//! Reads from a tree the values of an engine's JSON that the router uses.
use lmetric_wire::{Finish, Found};
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// A JSON value that keeps the order of its members, and members of the same name.
#[derive(Debug)]
pub enum Json {
    /// Null, true, false, and numbers that are no `u64`.
    Other,
    Number(u64),
    Text(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

struct Reads;

impl<'de> Visitor<'de> for Reads {
    type Value = Json;

    fn expecting(&self, to: &mut std::fmt::Formatter) -> std::fmt::Result {
        to.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Json, E> {
        Ok(Json::Other)
    }

    fn visit_u64<E>(self, number: u64) -> Result<Json, E> {
        Ok(Json::Number(number))
    }

    fn visit_str<E>(self, text: &str) -> Result<Json, E> {
        Ok(Json::Text(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = from.next_element()? {
            values.push(value);
        }
        Ok(Json::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Json, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = from.next_entry()? {
            members.push(member);
        }
        Ok(Json::Object(members))
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Reads)
    }
}

/// Reads a document. Returns `None` if it is no JSON, or if names or words contain `\u` escapes,
/// which the router does not decode.
pub fn read(document: &str) -> Option<Found> {
    let tree: Json = serde_json::from_str(document).ok().filter(|_| !document.contains("\\u"))?;
    let mut found = Found::default();
    let Json::Object(members) = tree else { return Some(found) };
    for (name, value) in &members {
        match (name.as_str(), value) {
            ("choices", Json::Array(choices)) => {
                for choice in choices {
                    if let Json::Object(members) = choice {
                        found.choices = true;
                        read_choice(members, &mut found);
                    }
                }
            }
            ("delta", Json::Object(members)) => read_delta(members, &mut found),
            ("delta", Json::Text(text)) => found.content |= !text.is_empty(),
            ("message" | "response", Json::Object(members)) => {
                for (name, value) in members {
                    read_usage_or_error(name, value, &mut found);
                }
            }
            ("error", Json::Text(_)) => found.error = true,
            ("object", Json::Text(text)) => found.error |= text == "error",
            ("code", Json::Number(code)) => found.error_code = Some(*code),
            _ => read_usage_or_error(name, value, &mut found),
        }
    }
    Some(found)
}

fn is_text(name: &str) -> bool {
    matches!(name, "text" | "content" | "reasoning" | "reasoning_content" | "refusal")
}

fn read_choice(members: &[(String, Json)], found: &mut Found) {
    for (name, value) in members {
        match (name.as_str(), value) {
            (name, Json::Text(text)) if is_text(name) => found.content |= !text.is_empty(),
            ("delta" | "message", Json::Object(members)) => read_delta(members, found),
            ("token_ids", Json::Array(ids)) => {
                let scalars = ids.iter().filter(|id| matches!(id, Json::Other | Json::Number(_)));
                *found.token_ids.get_or_insert(0) += scalars.count() as u64;
            }
            ("finish_reason", Json::Text(reason)) => {
                found.finish = match reason.as_str() {
                    "abort" | "error" => Finish::Aborted,
                    "stop" => Finish::Stopped,
                    "tool_calls" => Finish::CalledTools,
                    _ => Finish::Done,
                };
            }
            _ => {}
        }
    }
}

fn read_delta(members: &[(String, Json)], found: &mut Found) {
    for (name, value) in members {
        match (name.as_str(), value) {
            (name, Json::Text(text)) if is_text(name) => found.content |= !text.is_empty(),
            ("role", Json::Text(_)) => found.role = true,
            ("tool_calls", Json::Array(calls)) => {
                found.content |= calls.iter().any(|call| matches!(call, Json::Array(_) | Json::Object(_)));
            }
            _ => {}
        }
    }
}

fn read_usage_or_error(name: &str, value: &Json, found: &mut Found) {
    let Json::Object(members) = value else { return };
    found.error |= name == "error";
    for (inner, value) in members {
        match (name, inner.as_str(), value) {
            ("error", "code", Json::Number(code)) => found.error_code = Some(*code),
            ("usage", "prompt_tokens" | "input_tokens", Json::Number(n)) => found.usage.prompt = Some(*n),
            ("usage", "completion_tokens" | "output_tokens", Json::Number(n)) => {
                found.usage.output = Some(*n)
            }
            ("usage", "prompt_tokens_details" | "input_tokens_details", Json::Object(details)) => {
                for (name, value) in details {
                    if let ("cached_tokens", Json::Number(n)) = (name.as_str(), value) {
                        found.usage.cached = Some(*n);
                    }
                }
            }
            _ => {}
        }
    }
}

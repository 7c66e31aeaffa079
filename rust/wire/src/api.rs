//! The parts of the OpenAI API that a router reads.
//!
//! Refuses a body that is no JSON object or has an absurd shape, and a model name that is no
//! string. Refuses fields for messages between engines: from a client, they could stop an engine,
//! or choose an adapter that the client must not use.
//! All other fields are the engine's to check. The router estimates the load of values that it
//! cannot read.

use std::borrow::Cow;

use crate::prompt_text::{self, compact};
use crate::shape::excess;
use crate::tree::{Json, Members};

/// SGLang's fields for an adapter. Clients name adapters as `model`, which is checked.
const ADAPTER_FIELDS: [&str; 2] = ["lora_path", "lora_id"];

/// Fields that only a router or another engine may send (vLLM, SGLang, Dynamo).
pub const INTERNAL_FIELDS: [&str; 12] = [
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "kv_cache_report_mode",
    "nvext",
    ADAPTER_FIELDS[0],
    ADAPTER_FIELDS[1],
];

/// The reason for refusing a body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Message for the client.
    pub message: String,
    /// The wrong field; `None`: the whole body.
    pub param: Option<String>,
}

fn refusal<T>(message: String, param: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { message, param: Some(param.into()) })
}

/// The way to read the prompt in a body. The server's table of paths names one for each path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PromptReader {
    /// `messages`: one conversation.
    Chat,
    /// `messages`: a list of conversations, which one answer without a stream answers.
    ChatBatch,
    /// `prompt`: a text, token IDs, or a list of either.
    Completion,
    /// `token_ids`, with `sampling_params` (vLLM's `/inference/v1/generate`).
    TokenIds,
    /// `system` and `messages` of Anthropic's API.
    Messages,
    /// `instructions` and `input` of OpenAI's Responses API.
    Responses,
    /// The prompts of another API: `messages`, texts, or pairs of texts to compare.
    Input,
    /// The engine computes no prompt and does not stream.
    Nothing,
}

impl PromptReader {
    /// Returns the reader with this name.
    pub fn named(name: &str) -> Option<Self> {
        Some(match name {
            "chat" => Self::Chat,
            "chat_batch" => Self::ChatBatch,
            "completion" => Self::Completion,
            "token_ids" => Self::TokenIds,
            "messages" => Self::Messages,
            "responses" => Self::Responses,
            "input" => Self::Input,
            "nothing" => Self::Nothing,
            _ => return None,
        })
    }

    /// Whether `stream: true` gives an event stream.
    fn streams(self) -> bool {
        !matches!(self, Self::ChatBatch | Self::Nothing)
    }

    /// Whether a body may hold other bodies or an engine's answer, so that fields for messages
    /// between engines occur at any depth, and unused ones as null.
    fn nests(self) -> bool {
        matches!(self, Self::ChatBatch | Self::TokenIds | Self::Nothing)
    }
}

/// The prompt that the router matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt<'a> {
    /// No prompt that the router can match.
    None,
    /// Text. For a conversation: its parts in the order in which a chat template writes them, so
    /// that equal prefixes stay equal.
    Text(Cow<'a, str>),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// The fields of a request's body that routing needs.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiRequest<'a> {
    /// `model`.
    pub model: Option<Cow<'a, str>>,
    /// `stream`.
    pub stream: bool,
    /// `vllm_xargs.session_id`, else `user`: session of a request that names none elsewhere.
    pub session: Option<Cow<'a, str>>,
    /// `session_id`, if it is a text that is not empty.
    pub session_id: Option<Cow<'a, str>>,
    /// `cache_salt`; JSON if it is no text.
    pub salt: Option<Cow<'a, str>>,
    /// Largest number of answer tokens.
    pub max_tokens: Option<u32>,
    /// The prompt, or the first of several prompts.
    pub prompt: Prompt<'a>,
    /// Bytes of further prompts, which count as load and match no prefix.
    pub more_bytes: usize,
    /// Tokens of further prompts.
    pub more_tokens: usize,
    /// `priority`; NaN if the field is not a number.
    pub priority: Option<f64>,
}

/// Returns a text that is not empty.
fn name(value: Json<'_>) -> Option<Cow<'_, str>> {
    if let Json::Text(text) = value { Some(text).filter(|text| !text.is_empty()) } else { None }
}

impl<'a> ApiRequest<'a> {
    /// Reads the body of a request, in UTF-8 ([`utf8`]).
    ///
    /// # Errors
    /// A [`Refusal`] that names the wrong field.
    pub fn read(reader: PromptReader, body: &'a [u8]) -> Result<Self, Refusal> {
        let mut fields = object(body)?;
        if !reader.nests() {
            internal(&fields, "")?;
        } else if let Some(parts) = internal_inside(&fields) {
            return not_from_clients(parts.into_iter().rev().collect());
        }
        let model = match fields.take("model") {
            Json::Text(model) => Some(model),
            Json::Null => None,
            other => return refusal(format!("model must be a string, not {other}"), "model"),
        };
        let stream = reader.streams() && truth(&fields.take("stream"));
        let salt = match fields.take("cache_salt") {
            Json::Text(salt) => Some(salt),
            Json::Null => None,
            other => Some(compact(&other).into()),
        };
        let mut session = None;
        if let Json::Object(mut inner) = fields.take("vllm_xargs") {
            internal(&inner, "vllm_xargs.")?;
            session = name(inner.take("session_id"));
        }
        let session = session.or_else(|| name(fields.take("user")));
        let session_id = name(fields.take("session_id"));
        let max_tokens = match (reader, fields.get_mut("sampling_params")) {
            (PromptReader::TokenIds | PromptReader::Input, Some(Json::Object(inner))) => max_tokens(inner),
            _ => max_tokens(&mut fields),
        };
        let mut read = Self {
            model,
            stream,
            session,
            session_id,
            salt,
            max_tokens,
            prompt: Prompt::None,
            more_bytes: 0,
            more_tokens: 0,
            priority: fields.get("priority").map(|value| match value {
                Json::Number(number) => number.as_f64().unwrap_or(f64::NAN),
                _ => f64::NAN,
            }),
        };
        let size = body.len();
        match reader {
            PromptReader::Chat => read.text(prompt_text::chat(&fields, fields.get("messages"), size)),
            PromptReader::ChatBatch => read.conversations(&fields, fields.get("messages"), size),
            PromptReader::Completion => {
                read.prompts(fields.take("prompt"));
                // Engines that fill in the middle write it into the prompt, in the model's own
                // form.
                read.more_bytes += fields.get("suffix").and_then(Json::as_str).map_or(0, str::len);
            }
            PromptReader::TokenIds => {
                read.prompts(fields.take("token_ids"));
                // The placeholders of different images have equal token IDs.
                let media = ["features", "content_parts"];
                if media.iter().any(|name| fields.get(name).is_some_and(Json::is_something))
                    && let Prompt::Tokens(ids) = std::mem::replace(&mut read.prompt, Prompt::None)
                {
                    read.more_tokens += ids.len();
                }
            }
            PromptReader::Messages => read.text(prompt_text::messages(&fields, size)),
            PromptReader::Responses => read.text(prompt_text::responses(&fields, size)),
            PromptReader::Input => read.other_prompt(&mut fields, size),
            PromptReader::Nothing => {}
        }
        Ok(read)
    }

    /// Sets the prompt to a text, unless it is empty.
    fn text(&mut self, text: String) {
        if !text.is_empty() {
            self.prompt = Prompt::Text(text.into());
        }
    }

    /// Reads a text, token IDs, or a list of either: the first is matched, others count as load.
    fn prompts(&mut self, prompt: Json<'a>) {
        match prompt {
            Json::Null => {}
            Json::Text(text) => self.prompt = Prompt::Text(text),
            Json::Ids(ids) => self.prompt = Prompt::Tokens(ids),
            Json::List(list) if matches!(list.first(), Some(Json::Number(_))) => {
                self.more_tokens = list.len()
            }
            Json::List(list) => {
                for (index, prompt) in list.into_iter().enumerate() {
                    match prompt {
                        Json::Text(text) if index == 0 => self.prompt = Prompt::Text(text),
                        Json::Ids(ids) if index == 0 => self.prompt = Prompt::Tokens(ids),
                        Json::Text(text) => self.more_bytes += text.len(),
                        Json::Ids(ids) => self.more_tokens += ids.len(),
                        Json::List(numbers) => self.more_tokens += numbers.len(),
                        other => self.more_bytes += compact(&other).len(),
                    }
                }
            }
            other => self.prompt = Prompt::Text(compact(&other).into()),
        }
    }

    /// Reads several conversations: the first is matched, and the others count as load.
    fn conversations(&mut self, fields: &Members<'a>, list: Option<&Json<'a>>, size: usize) {
        let Some(Json::List(list)) = list else {
            return self.text(prompt_text::chat(fields, list, size));
        };
        if let Some((first, others)) = list.split_first() {
            self.text(prompt_text::chat(fields, Some(first), size));
            self.more_bytes = prompt_text::chat_bytes(fields, others);
        }
    }

    /// Reads the prompts of an API without a reader of its own.
    fn other_prompt(&mut self, fields: &mut Members<'a>, size: usize) {
        let is_message =
            |value: &Json<'_>| matches!(value, Json::Object(fields) if fields.get("role").is_some());
        for name in ["messages", "input"] {
            let Some(given) = fields.get(name).filter(|given| given.is_something()) else { continue };
            let first = if let Json::List(list) = given { list.first() } else { None };
            match first {
                Some(Json::List(inner)) if inner.first().is_some_and(is_message) => {
                    return self.conversations(fields, Some(given), size);
                }
                _ if name == "messages" || first.is_some_and(is_message) => {
                    return self.text(prompt_text::chat(fields, Some(given), size));
                }
                _ => {}
            }
        }
        if let Some(pairs) = prompt_text::Pairs::of(fields) {
            self.more_bytes = pairs.other_bytes();
            return self.text(pairs.first());
        }
        let names = ["prompt", "input", "text", "input_ids", "token_ids", "data"];
        if let Some(name) = names.into_iter().find(|name| fields.get(name).is_some_and(Json::is_something)) {
            self.prompts(fields.take(name));
        }
    }
}

/// Returns the body in UTF-8 without a byte order mark. Engines in Python find out the encoding
/// (UTF-8, 16 or 32) as this function does (RFC 4627, 3). Bytes that are not of this encoding stay
/// as they are; reading them fails.
pub fn utf8(body: &[u8]) -> Cow<'_, [u8]> {
    let at = |index: usize| body.get(index).copied();
    let zero = |index: usize| at(index) == Some(0);
    if !matches!(at(0), Some(0 | 0xef | 0xfe | 0xff)) && !zero(1) {
        return Cow::Borrowed(body);
    }
    let (skip, width, big_endian) = match body {
        [0xef, 0xbb, 0xbf, rest @ ..] => return Cow::Borrowed(rest),
        [0xff, 0xfe, 0, 0, ..] => (4, 4, false),
        [0, 0, 0xfe, 0xff, ..] => (4, 4, true),
        [0xff, 0xfe, ..] => (2, 2, false),
        [0xfe, 0xff, ..] => (2, 2, true),
        [0, 0, _, _, ..] => (0, 4, true),
        [0, _, ..] => (0, 2, true),
        [_, 0, 0, 0, ..] => (0, 4, false),
        [_, 0, ..] => (0, 2, false),
        _ => return Cow::Borrowed(body),
    };
    let units = body[skip..].chunks(width).map(|unit| {
        let value = |value: u32, byte: &u8| value << 8 | u32::from(*byte);
        if big_endian { unit.iter().fold(0, value) } else { unit.iter().rev().fold(0, value) }
    });
    let text: Option<String> = if width == 4 {
        units.map(char::from_u32).collect()
    } else {
        char::decode_utf16(units.map(|unit| unit as u16)).collect::<Result<_, _>>().ok()
    };
    match text {
        Some(text) if (body.len() - skip).is_multiple_of(width) => Cow::Owned(text.into_bytes()),
        _ => Cow::Borrowed(body),
    }
}

/// Checks that a body is a JSON object whose shape is within bounds.
///
/// # Errors
/// A [`Refusal`] that names the place of the error.
pub fn check_object(body: &[u8]) -> Result<(), Refusal> {
    object(body).map(|_| ())
}

fn object(body: &[u8]) -> Result<Members<'_>, Refusal> {
    let refused = |message| Err(Refusal { message, param: None });
    if let Some(excess) = excess(body) {
        return refused(format!("the body has {excess}"));
    }
    match Json::read(body) {
        Ok(Json::Object(fields)) => Ok(fields),
        Ok(other) => refused(format!("the body must be a JSON object, not {other}")),
        Err(error) => {
            let (line, column) = (error.line(), error.column());
            let text = error.to_string();
            let what = text.rsplit_once(" at line ").map_or(&*text, |(what, _)| what);
            refused(format!("the body is not valid JSON: {what} at line {line}, column {column}"))
        }
    }
}

fn internal(fields: &Members<'_>, inside: &str) -> Result<(), Refusal> {
    // A null adapter is SGLang's default. It hides no other value, as the router adds no adapter.
    let mut given =
        fields.iter().filter(|&(name, value)| *value != Json::Null || !ADAPTER_FIELDS.contains(&name));
    match given.find(|&(name, _)| INTERNAL_FIELDS.contains(&name)) {
        Some((name, _)) => not_from_clients(format!("{inside}{name}")),
        None => Ok(()),
    }
}

fn not_from_clients<T>(place: String) -> Result<T, Refusal> {
    refusal(format!("{place} is internal to the engines and not accepted from clients"), place)
}

/// Returns the place of the first internal field with a value at any depth, in parts from the
/// inside out. The caller bounds the depth ([`excess`]). A client chooses the length of names, so
/// no part is written before a field is found.
fn internal_inside(fields: &Members<'_>) -> Option<Vec<String>> {
    fields.iter().find_map(|(name, value)| match value {
        Json::Null => None,
        _ if INTERNAL_FIELDS.contains(&name) => Some(vec![name.to_owned()]),
        Json::Object(inner) => within(internal_inside(inner), || format!("{name}.")),
        Json::List(list) => within(internal_in_list(list), || name.to_owned()),
        _ => None,
    })
}

fn internal_in_list(list: &[Json<'_>]) -> Option<Vec<String>> {
    list.iter().enumerate().find_map(|(index, value)| match value {
        Json::Object(inner) => within(internal_inside(inner), || format!("[{index}].")),
        Json::List(inner) => within(internal_in_list(inner), || format!("[{index}]")),
        _ => None,
    })
}

/// Adds the part of a place in front of the parts found.
fn within(found: Option<Vec<String>>, part: impl FnOnce() -> String) -> Option<Vec<String>> {
    let mut parts = found?;
    parts.push(part());
    Some(parts)
}

/// Reads a boolean as pydantic does. The engine refuses other values.
fn truth(value: &Json<'_>) -> bool {
    match value {
        Json::Bool(yes) => *yes,
        Json::Number(number) => number.as_f64() == Some(1.0),
        Json::Text(text) => {
            ["true", "1", "yes", "on", "t", "y"].iter().any(|yes| text.eq_ignore_ascii_case(yes))
        }
        _ => false,
    }
}

/// Returns the first limit that is present, if it is a whole number as pydantic reads it. Engines
/// refuse other limits, or take them as no limit.
fn max_tokens(fields: &mut Members<'_>) -> Option<u32> {
    let names = ["max_completion_tokens", "max_tokens", "max_output_tokens", "max_new_tokens"];
    let value = names.into_iter().map(|name| fields.take(name)).find(|value| *value != Json::Null)?;
    let limit = match value {
        Json::Number(number) => number.as_f64()?,
        Json::Text(text) => text.trim().parse().ok()?,
        _ => return None,
    };
    let most = f64::from(i32::MAX); // more tokens than any model's context
    (limit >= 0.0 && limit.fract() == 0.0).then_some(limit.min(most) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    fn refused(reader: PromptReader, body: &str) -> (String, String) {
        let refusal = ApiRequest::read(reader, body.as_bytes()).expect_err(body);
        (refusal.param.unwrap_or_default(), refusal.message)
    }

    fn read(reader: PromptReader, body: &str) -> ApiRequest<'_> {
        ApiRequest::read(reader, body.as_bytes()).expect(body)
    }

    #[test]
    fn other_apis_tell_their_prompts_where_they_have_some() {
        let read = |body| read(PromptReader::Input, body);
        let chat = read(r#"{"messages": [{"role": "user", "content": "c"}], "input": "x"}"#);
        assert_eq!(chat.prompt, Prompt::Text("\x1euser\nc".into()));
        let several = read(r#"{"input": ["é", "ab", 3, "é"]}"#);
        assert_eq!((several.prompt, several.more_bytes), (Prompt::Text("é".into()), 5));
        let ids = read(r#"{"input": [[1, 2], [3], [4, 5]]}"#);
        assert_eq!((ids.prompt, ids.more_tokens), (Prompt::Tokens(vec![1, 2]), 3));
        assert_eq!(read(r#"{"input": [7, 8]}"#).prompt, Prompt::Tokens(vec![7, 8]));
        assert_eq!(read(r#"{"data": {"b": 1}}"#).prompt, Prompt::Text(r#"{"b":1}"#.into()));
        let rank = read(r#"{"query": "q", "documents": ["a", "bc"]}"#);
        assert_eq!((rank.prompt, rank.more_bytes), (Prompt::Text("\x1eq\x1ea".into()), 3));
        let chats = r#"[[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]"#;
        for name in ["messages", "input"] {
            let body = format!(r#"{{"{name}": {chats}}}"#);
            let several = ApiRequest::read(PromptReader::Input, body.as_bytes()).unwrap();
            assert_eq!((several.prompt, several.more_bytes), (Prompt::Text("\x1euser\na".into()), 7));
        }
        let body = r#"{"input": [{"role": "user", "content": "a"}]}"#;
        assert_eq!(read(body).prompt, Prompt::Text("\x1euser\na".into()));
        let rollout = read(r#"{"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 9}}"#);
        assert_eq!((rollout.prompt, rollout.max_tokens), (Prompt::Tokens(vec![5, 6]), Some(9)));
        assert_eq!(read(r#"{"token_ids": [5, 6]}"#).prompt, Prompt::Tokens(vec![5, 6]));
        assert_eq!(read("{}").prompt, Prompt::None);
        assert_eq!(read(r#"{"messages": []}"#).prompt, Prompt::None);
    }

    #[test]
    fn agents_prompts_have_readers_of_their_own() {
        let body = r#"{"system": "s", "messages": [{"role": "user", "content": "c"}]}"#;
        assert_eq!(
            read(PromptReader::Messages, body).prompt,
            Prompt::Text("\x1esystem\ns\x1euser\nc".into())
        );
        let body = r#"{"instructions": "s", "input": "c"}"#;
        assert_eq!(
            read(PromptReader::Responses, body).prompt,
            Prompt::Text("\x1esystem\ns\x1euser\nc".into())
        );
    }

    #[test]
    fn a_batch_is_matched_by_its_first_conversation() {
        let body = r#"{"stream": true, "max_tokens": 3, "messages": [
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": "b"}, {"role": "tool", "content": "c"}]]}"#;
        let batch = read(PromptReader::ChatBatch, body);
        let further = "\x1euser\nb\x1etool\nc".len();
        assert_eq!((batch.prompt, batch.more_bytes), (Prompt::Text("\x1euser\na".into()), further));
        assert_eq!((batch.stream, batch.max_tokens), (false, Some(3)));
    }

    #[test]
    fn all_conversations_of_a_batch_count_with_their_tools() {
        let chats = r#"[{"role": "user", "content": "a"}], [{"role": "system", "content": "s"},
            {"role": "user", "content": "b"}], "c", [], {"role": "user", "content": "d"}"#;
        let common = r#""tools": [{"name": "f"}], "documents": ["d"], "reasoning_effort": "low""#;
        let bodies = ["messages", "input"].map(|name| format!(r#"{{{common}, "{name}": [{chats}]}}"#));
        let Ok(Json::Object(fields)) = Json::read(bodies[0].as_bytes()) else { unreachable!() };
        let Some(Json::List(list)) = fields.get("messages") else { unreachable!() };
        let texts: Vec<_> = list.iter().map(|each| prompt_text::chat(&fields, Some(each), 0)).collect();
        let further: usize = texts[1..].iter().map(String::len).sum();
        for (reader, body) in [
            (PromptReader::ChatBatch, &bodies[0]),
            (PromptReader::Input, &bodies[0]),
            (PromptReader::Input, &bodies[1]),
        ] {
            let several = read(reader, body);
            assert_eq!((several.prompt, several.more_bytes), (Prompt::Text((&*texts[0]).into()), further));
        }
    }

    /// The time was that of the tools for each conversation.
    #[test]
    fn the_tools_of_a_batch_are_measured_once() {
        let tool = "x".repeat(1 << 20);
        for (reader, name, chat, count, text) in [
            (PromptReader::ChatBatch, "messages", "[]", 49_990, ""),
            (PromptReader::Input, "input", r#"[{"role":"u"}]"#, 24_990, "\x1eu\n"),
        ] {
            let chats = vec![chat; count].join(",");
            let body = format!(r#"{{"tools": ["{tool}"], "{name}": [{chats}]}}"#);
            let start = Instant::now();
            let several = read(reader, &body);
            assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
            let each = "\x1f[\"\"]".len() + tool.len() + text.len();
            assert_eq!(several.more_bytes, (count - 1) * each);
        }
    }

    #[test]
    fn token_ids_are_read_with_their_sampling_parameters() {
        let body = r#"{"token_ids": [1, 2], "stream": true, "sampling_params": {"max_tokens": 7},
            "kv_transfer_params": null}"#;
        let ids = read(PromptReader::TokenIds, body);
        assert_eq!((ids.prompt, ids.stream, ids.max_tokens), (Prompt::Tokens(vec![1, 2]), true, Some(7)));
        let image = r#"{"token_ids": [1, 2], "features": {"mm_hashes": {}}, "content_parts": null}"#;
        let image = read(PromptReader::TokenIds, image);
        assert_eq!((image.prompt, image.more_tokens), (Prompt::None, 2));
    }

    #[test]
    fn what_the_engine_judges_is_estimated() {
        // Each value, at each place.
        let values = [
            "null",
            "true",
            "-1",
            "1.5",
            "1e400",
            r#""x""#,
            "[]",
            "[[]]",
            "[null]",
            "[1, -1]",
            "[[1], \"a\"]",
            "[\"a\", 1]",
            "{}",
            r#"{"a": [{}]}"#,
            r#"[{"role": 3, "content": {}}, 4]"#,
            "[4294967296]",
        ];
        let fields = [
            "messages",
            "prompt",
            "input",
            "token_ids",
            "system",
            "instructions",
            "tools",
            "stream",
            "max_tokens",
            "max_output_tokens",
            "cache_salt",
            "vllm_xargs",
            "user",
            "session_id",
            "priority",
            "query",
            "documents",
            "text_1",
            "text_2",
            "suffix",
            "prompt_embeds",
            "sampling_params",
        ];
        let readers = [
            PromptReader::Chat,
            PromptReader::ChatBatch,
            PromptReader::Completion,
            PromptReader::TokenIds,
            PromptReader::Messages,
            PromptReader::Responses,
            PromptReader::Input,
            PromptReader::Nothing,
        ];
        for (field, value) in fields.iter().flat_map(|field| values.iter().map(move |value| (field, value))) {
            let body = format!(r#"{{"{field}": {value}, "query": "q", "text_1": "t"}}"#);
            for reader in readers {
                let valid = *value != "1e400"; // JSON's numbers are read as 64-bit floats
                assert_eq!(ApiRequest::read(reader, body.as_bytes()).is_ok(), valid, "{reader:?} {body}");
            }
        }
    }

    #[test]
    fn completions_without_a_prompt_pass() {
        for body in [
            r#"{"prompt_embeds": "AAAA"}"#,
            r#"{"prompt_embeds": "AAAA", "prompt": null}"#,
            r#"{"prompt_embeds": "AAAA", "prompt": []}"#,
        ] {
            assert_eq!(read(PromptReader::Completion, body).prompt, Prompt::None, "{body}");
        }
    }

    #[test]
    fn numbers_and_booleans_are_read_as_pydantic_reads_them() {
        let limit = |value: &str| {
            let body = format!(r#"{{"prompt": "", "max_tokens": {value}}}"#);
            ApiRequest::read(PromptReader::Completion, body.as_bytes()).unwrap().max_tokens
        };
        for (value, expected) in
            [("2", 2), ("2.0", 2), ("\"2\"", 2), ("\" 2.0 \"", 2), ("0", 0), ("10000000000", i32::MAX as u32)]
        {
            assert_eq!(limit(value), Some(expected), "{value}");
        }
        for value in ["-1", "1.5", "\"x\"", "\"\"", "\"nan\"", "\"inf\"", "[]", "true", "null"] {
            assert_eq!(limit(value), None, "{value}");
        }
        let body = r#"{"max_output_tokens": 5, "max_tokens": "x", "max_completion_tokens": null}"#;
        assert_eq!(read(PromptReader::Input, body).max_tokens, None);
        let stream = |value: &str| {
            let body = format!(r#"{{"prompt": "", "stream": {value}}}"#);
            ApiRequest::read(PromptReader::Completion, body.as_bytes()).unwrap().stream
        };
        for value in [
            "true",
            "1",
            "1.0",
            r#""true""#,
            r#""TRUE""#,
            r#""1""#,
            r#""yes""#,
            r#""on""#,
            r#""t""#,
            r#""y""#,
        ] {
            assert!(stream(value), "{value}");
        }
        for value in ["false", "0", "null", r#""false""#, r#""0""#, r#""off""#, "2", "[]", r#""x""#, "{}"] {
            assert!(!stream(value), "{value}");
        }
    }

    #[test]
    fn a_salt_that_is_no_text_separates_too() {
        let salt = |value: &str| {
            let body = format!(r#"{{"prompt": "", "cache_salt": {value}}}"#);
            ApiRequest::read(PromptReader::Completion, body.as_bytes()).unwrap().salt.map(Cow::into_owned)
        };
        assert_eq!((salt("null"), salt("\"a\"")), (None, Some("a".into())));
        assert_eq!(salt(r#"["a", "b"]"#), Some(r#"["a","b"]"#.into()));
    }

    #[test]
    fn bodies_are_read_in_the_encodings_that_engines_read() {
        let text = r#"{"prompt": "é🙂"}"#;
        let utf16 = |big: bool| -> Vec<u8> {
            text.encode_utf16()
                .flat_map(|unit| if big { unit.to_be_bytes() } else { unit.to_le_bytes() })
                .collect()
        };
        let utf32 = |big: bool| -> Vec<u8> {
            text.chars()
                .map(u32::from)
                .flat_map(|c| if big { c.to_be_bytes() } else { c.to_le_bytes() })
                .collect()
        };
        for (mark, bytes) in [
            (vec![0xef, 0xbb, 0xbf], text.as_bytes().to_vec()),
            (vec![0xff, 0xfe], utf16(false)),
            (vec![0xfe, 0xff], utf16(true)),
            (vec![0xff, 0xfe, 0, 0], utf32(false)),
            (vec![0, 0, 0xfe, 0xff], utf32(true)),
        ] {
            assert_eq!(utf8(&bytes), text.as_bytes());
            assert_eq!(utf8(&[mark, bytes].concat()), text.as_bytes());
        }
        assert!(matches!(utf8(text.as_bytes()), Cow::Borrowed(_)));
        // A lone surrogate, a code point that is none, half a unit: no JSON.
        for bad in
            [&b"\xff\xfe{\0\x00\xd8"[..], b"\xff\xfe\0\0\xff\xff\xff\xff", b"\xff\xfe{", b"", b"\0", b"{\0"]
        {
            assert!(ApiRequest::read(PromptReader::Completion, &utf8(bad)).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn internal_fields_are_refused_at_any_depth_of_bodies_that_nest_others() {
        let nested = r#"{"generate_response": {"kv_transfer_params": null, "choices": []}, "prompt": 3}"#;
        let read = ApiRequest::read(PromptReader::Nothing, nested.as_bytes()).unwrap();
        assert_eq!((read.prompt, read.more_bytes), (Prompt::None, 0));
        for (body, place) in [
            (r#"{"kv_transfer_params": {}}"#, "kv_transfer_params"),
            (r#"{"generate_response": {"kv_transfer_params": {}}}"#, "generate_response.kv_transfer_params"),
            (r#"{"a": [[], [{"b": {"nvext": 1}}]]}"#, "a[1][0].b.nvext"),
            (
                r#"{"token_ids": [1], "sampling_params": {"extra_args": {"kv_transfer_params": {"a": 1}}}}"#,
                "sampling_params.extra_args.kv_transfer_params",
            ),
        ] {
            for reader in [PromptReader::Nothing, PromptReader::TokenIds, PromptReader::ChatBatch] {
                let (param, message) = refused(reader, body);
                assert_eq!(param, place);
                assert!(message.starts_with(place) && message.contains("not accepted from clients"));
            }
        }
    }

    /// The time was that of a long name for each value inside.
    #[test]
    fn a_long_name_is_written_only_for_a_refusal() {
        let name = "x".repeat(4 << 20);
        let inner = vec!["{}"; 60_000].join(",");
        let start = Instant::now();
        for inner in [&inner, &inner.replace("{}", "[]")] {
            let body = format!(r#"{{"{name}": [{inner}]}}"#);
            assert_eq!(read(PromptReader::Nothing, &body).prompt, Prompt::None);
        }
        let body = format!(r#"{{"{name}": [{inner}, {{"nvext": 1}}]}}"#);
        assert_eq!(refused(PromptReader::Nothing, &body).0, format!("{name}[60000].nvext"));
        assert!(start.elapsed().as_secs() < 2, "{:?}", start.elapsed());
    }

    /// SGLang serves the adapter of `lora_path`, whatever `model` says.
    #[test]
    fn adapters_are_named_by_model_alone() {
        let readers = [
            PromptReader::Chat,
            PromptReader::ChatBatch,
            PromptReader::Completion,
            PromptReader::TokenIds,
            PromptReader::Messages,
            PromptReader::Responses,
            PromptReader::Input,
            PromptReader::Nothing,
        ];
        for reader in readers {
            for name in ADAPTER_FIELDS {
                for value in [r#""a""#, r#"["a", null]"#, "[]", "1", r#""""#] {
                    for body in [
                        format!(r#"{{"model": "m", "{name}": {value}}}"#),
                        format!(r#"{{"{name}": null, "{name}": {value}}}"#),
                        format!(r#"{{"{name}": {value}, "{name}": null}}"#),
                    ] {
                        assert_eq!(refused(reader, &body).0, name, "{reader:?} {body}");
                    }
                }
                let body = format!(r#"{{"model": "m", "{name}": null}}"#);
                assert_eq!(read(reader, &body).model.as_deref(), Some("m"));
            }
        }
    }

    #[test]
    fn several_prompts_count_and_the_first_is_matched() {
        let read = |body| read(PromptReader::Completion, body);
        let texts = read(r#"{"prompt": ["a", "bc", "é"]}"#);
        assert_eq!((texts.prompt, texts.more_bytes, texts.more_tokens), (Prompt::Text("a".into()), 4, 0));
        let ids = read(r#"{"prompt": [[1, 4294967295], [3], [4, 5]]}"#);
        assert_eq!((ids.prompt, ids.more_bytes, ids.more_tokens), (Prompt::Tokens(vec![1, u32::MAX]), 0, 3));
        assert_eq!(read(r#"{"prompt": "a", "suffix": "bc"}"#).more_bytes, 2);
        let priority = |value: &str| {
            let body = format!(r#"{{"prompt": "", "priority": {value}}}"#);
            ApiRequest::read(PromptReader::Completion, body.as_bytes()).unwrap().priority
        };
        assert_eq!((priority("-3"), priority("0.5")), (Some(-3.0), Some(0.5)));
        for other in ["null", r#""3""#, "[1]", "true"] {
            assert!(priority(other).is_some_and(f64::is_nan), "{other}");
        }
        assert_eq!(read(r#"{"prompt": ""}"#).priority, None);
    }
}

//! The parts of the OpenAI API that a router reads.
//!
//! Checks only the fields that routing needs; the engine checks the other fields. Fields for
//! messages between engines are refused: from a client, they could stop an engine.

use std::borrow::Cow;

use crate::shape::excess;
use crate::tree::{Json, Members};

/// Largest number of texts in one completion request. More texts would block the server's event
/// loop while they are read.
pub const MAX_PROMPTS: usize = 10_000;
/// Fields that only a router or another engine may send (vLLM, SGLang, Dynamo).
pub const INTERNAL_FIELDS: [&str; 10] = [
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
    /// `messages`, `prompt` or `input` of another API; the engine checks the shape.
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
    /// Text. For a conversation: its messages in the order in which a chat template writes them, so
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
    /// `cache_salt`.
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
    /// Reads the body of a request.
    ///
    /// # Errors
    /// A [`Refusal`] that names the wrong field.
    pub fn read(reader: PromptReader, body: &'a [u8]) -> Result<Self, Refusal> {
        let mut fields = object(body)?;
        if reader.nests() {
            internal_inside(&fields, "")?;
        } else {
            internal(&fields, "")?;
        }
        let model = text(&mut fields, "model")?;
        let stream = match fields.take("stream") {
            Json::Bool(stream) => stream && reader.streams(),
            Json::Null => false,
            other => return must_be("stream", "true or false", &other),
        };
        let salt = text(&mut fields, "cache_salt")?;
        let mut session = None;
        match fields.take("vllm_xargs") {
            Json::Object(mut inner) => {
                internal(&inner, "vllm_xargs.")?;
                session = name(inner.take("session_id"));
            }
            Json::Null => {}
            other => return must_be("vllm_xargs", "an object", &other),
        }
        let session = session.or_else(|| name(fields.take("user")));
        let session_id = name(fields.take("session_id"));
        let max_tokens = match (reader, fields.get_mut("sampling_params")) {
            (PromptReader::TokenIds, Some(Json::Object(inner))) => max_tokens(inner, "sampling_params.")?,
            _ => max_tokens(&mut fields, "")?,
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
        match reader {
            PromptReader::Chat => {
                let messages = fields.take("messages");
                let rendered = conversation(&messages, "messages", fields.get("tools"), body.len())?;
                read.prompt = Prompt::Text(rendered.into());
            }
            PromptReader::ChatBatch => read.conversations(&fields.take("messages"), body.len())?,
            PromptReader::Completion => read.completion_prompt(fields.take("prompt"))?,
            PromptReader::TokenIds => match fields.take("token_ids") {
                Json::List(ids) if !ids.is_empty() => {
                    let ids = token_ids(&ids, "token_ids", "token_ids")?;
                    // The placeholders of different images have equal token IDs.
                    if ["features", "content_parts"]
                        .iter()
                        .any(|name| fields.get(name).is_some_and(Json::is_something))
                    {
                        read.more_tokens = ids.len();
                    } else {
                        read.prompt = Prompt::Tokens(ids);
                    }
                }
                other => return must_be("token_ids", "a list of at least one token id", &other),
            },
            PromptReader::Input => read.other_prompt(&mut fields, body.len())?,
            PromptReader::Nothing => {}
        }
        Ok(read)
    }

    /// Reads several conversations: the first is matched, and the others count as load.
    fn conversations(&mut self, list: &Json<'a>, size: usize) -> Result<(), Refusal> {
        let Json::List(list) = list else {
            return must_be("messages", "a list of conversations", list);
        };
        for (index, messages) in list.iter().enumerate() {
            let place = format!("messages[{index}]");
            let rendered = conversation(messages, &place, None, if index == 0 { size } else { 0 })?;
            if index == 0 {
                self.prompt = Prompt::Text(rendered.into());
            } else {
                self.more_bytes += rendered.len();
            }
        }
        if list.is_empty() {
            return refusal("messages must be a list of at least one conversation".into(), "messages");
        }
        Ok(())
    }

    /// Reads a completion's prompt: a text, token IDs, or a list of either.
    fn completion_prompt(&mut self, prompt: Json<'a>) -> Result<(), Refusal> {
        let list = match prompt {
            Json::Text(text) => {
                self.prompt = Prompt::Text(text);
                return Ok(());
            }
            Json::List(list) if !list.is_empty() => list,
            other => return must_be("prompt", "a string or a list of token ids", &other),
        };
        match &list[0] {
            Json::Number(_) => self.prompt = Prompt::Tokens(token_ids(&list, "prompt", "prompt")?),
            Json::Text(_) if list.len() > MAX_PROMPTS => {
                let count = list.len();
                let message = format!("prompt has {count} texts; at most {MAX_PROMPTS} are accepted");
                return refusal(message, "prompt");
            }
            Json::Text(_) => {
                for (index, text) in list.iter().enumerate().skip(1) {
                    let Json::Text(text) = text else {
                        return refusal(
                            format!("prompt[{index}] must be a string like prompt[0], not {text}"),
                            "prompt",
                        );
                    };
                    self.more_bytes += text.len();
                }
                if let Some(Json::Text(first)) = list.into_iter().next() {
                    self.prompt = Prompt::Text(first);
                }
            }
            Json::List(_) => {
                let mut prompts = list.iter().enumerate().map(|(index, ids)| {
                    let place = format!("prompt[{index}]");
                    match ids {
                        Json::List(ids) => token_ids(ids, &place, "prompt"),
                        other => {
                            refusal(format!("{place} must be a list of token ids, not {other}"), "prompt")
                        }
                    }
                });
                if let Some(first) = prompts.next() {
                    self.prompt = Prompt::Tokens(first?);
                }
                for ids in prompts {
                    self.more_tokens += ids?.len();
                }
            }
            other => {
                let expected = "a token id, a string or a list of token ids";
                return refusal(format!("prompt[0] must be {expected}, not {other}"), "prompt");
            }
        }
        Ok(())
    }

    /// Reads the prompt of another API's request, if it has one. The engine checks its shape.
    fn other_prompt(&mut self, fields: &mut Members<'a>, size: usize) -> Result<(), Refusal> {
        if let Json::List(messages) = fields.take("messages") {
            let system = fields.get("system").and_then(Json::as_str).unwrap_or_default();
            let rendered = render(system.to_owned(), &messages, "messages", fields.get("tools"), size)?;
            self.prompt = Prompt::Text(rendered.into());
            return Ok(());
        }
        let name = if fields.get("prompt").is_some() { "prompt" } else { "input" };
        let mut prompt = fields.take(name);
        if let Json::List(list) = &mut prompt
            && let Some(Json::Text(_)) = list.first()
        {
            self.more_bytes = list[1..].iter().filter_map(Json::as_str).map(str::len).sum();
            prompt = list.swap_remove(0);
        }
        self.prompt = match prompt {
            Json::Null => Prompt::None,
            Json::Text(text) => match fields.get("instructions").and_then(Json::as_str) {
                Some(instructions) => Prompt::Text(format!("{instructions}\x1e{text}").into()),
                None => Prompt::Text(text),
            },
            other => Prompt::Text(compact(&other).into()),
        };
        Ok(())
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
    match fields.names().find(|name| INTERNAL_FIELDS.contains(name)) {
        Some(name) => not_from_clients(format!("{inside}{name}")),
        None => Ok(()),
    }
}

fn not_from_clients<T>(place: String) -> Result<T, Refusal> {
    refusal(format!("{place} is internal to the engines and not accepted from clients"), place)
}

/// Refuses internal fields with a value at any depth. The caller bounds the depth ([`excess`]).
fn internal_inside(fields: &Members<'_>, inside: &str) -> Result<(), Refusal> {
    fields.iter().try_for_each(|(name, value)| match value {
        Json::Null => Ok(()),
        _ if INTERNAL_FIELDS.contains(&name) => not_from_clients(format!("{inside}{name}")),
        Json::Object(inner) => internal_inside(inner, &format!("{inside}{name}.")),
        Json::List(list) => internal_in_list(list, &format!("{inside}{name}")),
        _ => Ok(()),
    })
}

fn internal_in_list(list: &[Json<'_>], place: &str) -> Result<(), Refusal> {
    list.iter().enumerate().try_for_each(|(index, value)| match value {
        Json::Object(inner) => internal_inside(inner, &format!("{place}[{index}].")),
        Json::List(inner) => internal_in_list(inner, &format!("{place}[{index}]")),
        _ => Ok(()),
    })
}

fn must_be<T>(place: &str, expected: &str, got: &Json<'_>) -> Result<T, Refusal> {
    refusal(format!("{place} must be {expected}, not {got}"), place)
}

fn text<'a>(fields: &mut Members<'a>, name: &str) -> Result<Option<Cow<'a, str>>, Refusal> {
    match fields.take(name) {
        Json::Text(text) => Ok(Some(text)),
        Json::Null => Ok(None),
        other => must_be(name, "a string", &other),
    }
}

/// Returns the first limit that is present; the engine checks the other limits.
fn max_tokens(fields: &mut Members<'_>, inside: &str) -> Result<Option<u32>, Refusal> {
    for name in ["max_completion_tokens", "max_tokens", "max_output_tokens"] {
        let value = fields.take(name);
        if value == Json::Null {
            continue;
        }
        let given = if let Json::Number(number) = &value { number.as_u64() } else { None };
        return match given.and_then(|given| i32::try_from(given).ok()) {
            Some(limit) => Ok(Some(limit.unsigned_abs())),
            None => must_be(&format!("{inside}{name}"), "a whole number from 0", &value),
        };
    }
    Ok(None)
}

/// Reads token IDs. `place`: their position in the body; `param`: the field of the body.
fn token_ids(list: &[Json<'_>], place: &str, param: &str) -> Result<Vec<u32>, Refusal> {
    let id = |(index, value): (usize, &Json<'_>)| {
        let number = if let Json::Number(number) = value { number.as_u64() } else { None };
        number.and_then(|number| u32::try_from(number).ok()).ok_or_else(|| {
            let got: String = compact(value).chars().take(60).collect();
            let message = format!("{place}[{index}] must be a token id from 0 to {}, not {got}", u32::MAX);
            Refusal { message, param: Some(param.into()) }
        })
    };
    list.iter().enumerate().map(id).collect()
}

/// Writes a conversation of at least one message. `place`: its position in the body; `size`:
/// expected bytes.
fn conversation(
    messages: &Json<'_>,
    place: &str,
    tools: Option<&Json<'_>>,
    size: usize,
) -> Result<String, Refusal> {
    match messages {
        Json::List(list) if !list.is_empty() => render(String::new(), list, place, tools, size),
        other => must_be(place, "a list of at least one message", other),
    }
}

/// Appends a conversation to `text`, in the order in which a chat template writes it. `place`: the
/// position of its messages in the body; `size`: expected bytes.
fn render(
    mut text: String,
    messages: &[Json<'_>],
    place: &str,
    tools: Option<&Json<'_>>,
    size: usize,
) -> Result<String, Refusal> {
    text.reserve(size);
    if let Some(tools) = tools.filter(|tools| tools.is_something()) {
        text.push('\x1e');
        text.push_str(&compact(tools));
    }
    for (index, message) in messages.iter().enumerate() {
        let Json::Object(message) = message else {
            return must_be(&format!("{place}[{index}]"), "an object", message);
        };
        let role = message.get("role").unwrap_or(&Json::Null);
        let Json::Text(role) = role else {
            return must_be(&format!("{place}[{index}].role"), "a string", role);
        };
        text.extend(["\x1e", role, "\n"]);
        match message.get("content") {
            None | Some(Json::Null) => {}
            Some(Json::Text(content)) => text.push_str(content),
            Some(Json::List(parts)) => content_parts(&mut text, parts, &format!("{place}[{index}]"))?,
            Some(other) => {
                return must_be(&format!("{place}[{index}].content"), "a string or a list of parts", other);
            }
        }
        if message.len() > 2 {
            for name in ["name", "reasoning_content", "tool_calls", "tool_call_id"] {
                let Some(value) = message.get(name).filter(|value| value.is_something()) else { continue };
                text.push('\x1f');
                match value {
                    Json::Text(value) => text.push_str(value),
                    other => text.push_str(&compact(other)),
                }
            }
        }
    }
    Ok(text)
}

fn content_parts(text: &mut String, parts: &[Json<'_>], message: &str) -> Result<(), Refusal> {
    for (index, part) in parts.iter().enumerate() {
        let said = if let Json::Object(fields) = part { fields.get("text") } else { Some(part) };
        match (part, said) {
            (_, Some(Json::Text(said))) => text.push_str(said),
            // An image or sound counts by its digest, not by its bytes.
            (Json::Object(_), _) => text.push_str(&format!("\x1f{:032x}", part.digest())),
            _ => return must_be(&format!("{message}.content[{index}]"), "an object", part),
        }
    }
    Ok(())
}

fn compact(value: &Json<'_>) -> String {
    serde_json::to_string(value).expect("names are strings, and a String takes all")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(reader: PromptReader, body: &str) -> String {
        match ApiRequest::read(reader, body.as_bytes()).expect(body).prompt {
            Prompt::Text(text) => text.into_owned(),
            other => panic!("{body}: {other:?}"),
        }
    }

    fn refused(reader: PromptReader, body: &str) -> (String, String) {
        let refusal = ApiRequest::read(reader, body.as_bytes()).expect_err(body);
        (refusal.param.unwrap_or_default(), refusal.message)
    }

    #[test]
    fn a_chat_is_written_message_by_message() {
        let body = r#"{"tools": [{"b": 1, "a": [ ]}], "messages": [
            {"role": "system", "content": "be"},
            {"role": "user", "content": ["a", {"type": "text", "text": "b"}, "c"], "name": "n"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1"}], "name": ""},
            {"role": "tool", "tool_call_id": "1", "content": "x"}]}"#;
        assert_eq!(
            text_of(PromptReader::Chat, body),
            "\x1e[{\"b\":1,\"a\":[]}]\x1esystem\nbe\x1euser\nabc\x1fn\x1eassistant\n\x1f[{\"id\":\"1\"}]\x1etool\nx\x1f1"
        );
    }

    #[test]
    fn other_apis_tell_their_prompt_where_they_have_one() {
        let text = |body| text_of(PromptReader::Input, body);
        assert_eq!(text(r#"{"input": "a", "instructions": "b"}"#), "b\x1ea");
        assert_eq!(text(r#"{"input": [{"b": 1, "a": 2}]}"#), r#"[{"b":1,"a":2}]"#);
        assert_eq!(
            text(r#"{"system": "s", "messages": [{"role": "user", "content": "c"}]}"#),
            "s\x1euser\nc"
        );
        assert_eq!(text(r#"{"messages": []}"#), "");
        let read =
            ApiRequest::read(PromptReader::Input, r#"{"input": ["é", "ab", 3, "é"]}"#.as_bytes()).unwrap();
        assert_eq!((read.prompt, read.more_bytes), (Prompt::Text("é".into()), 4));
        assert_eq!(ApiRequest::read(PromptReader::Input, b"{}").unwrap().prompt, Prompt::None);
    }

    #[test]
    fn a_batch_is_matched_by_its_first_conversation() {
        let body = r#"{"stream": true, "max_tokens": 3, "messages": [
            [{"role": "user", "content": "a"}],
            [{"role": "user", "content": "b"}, {"role": "tool", "content": "c"}]]}"#;
        let read = ApiRequest::read(PromptReader::ChatBatch, body.as_bytes()).unwrap();
        let further = "\x1euser\nb\x1etool\nc".len();
        assert_eq!((read.prompt, read.more_bytes), (Prompt::Text("\x1euser\na".into()), further));
        assert_eq!((read.stream, read.max_tokens), (false, Some(3)));
        let param = |body| refused(PromptReader::ChatBatch, body).0;
        assert_eq!(param(r#"{"messages": []}"#), "messages");
        assert_eq!(param(r#"{"messages": [[]]}"#), "messages[0]");
        assert_eq!(param(r#"{"messages": [[{"role": "user"}], [{}]]}"#), "messages[1][0].role");
        assert_eq!(param(r#"{"messages": [{"role": "user", "content": "a"}]}"#), "messages[0]");
    }

    #[test]
    fn token_ids_are_read_with_their_sampling_parameters() {
        let body = r#"{"token_ids": [1, 2], "stream": true, "sampling_params": {"max_tokens": 7},
            "kv_transfer_params": null}"#;
        let read = ApiRequest::read(PromptReader::TokenIds, body.as_bytes()).unwrap();
        assert_eq!((read.prompt, read.stream, read.max_tokens), (Prompt::Tokens(vec![1, 2]), true, Some(7)));
        let image = br#"{"token_ids": [1, 2], "features": {"mm_hashes": {}}, "content_parts": null}"#;
        let read = ApiRequest::read(PromptReader::TokenIds, image).unwrap();
        assert_eq!((read.prompt, read.more_tokens), (Prompt::None, 2));
        let refused = |body| refused(PromptReader::TokenIds, body).0;
        assert_eq!(refused(r#"{"token_ids": []}"#), "token_ids");
        assert_eq!(refused(r#"{"token_ids": [1, -1]}"#), "token_ids");
        assert_eq!(
            refused(r#"{"token_ids": [1], "sampling_params": {"max_tokens": -1}}"#),
            "sampling_params.max_tokens"
        );
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

    #[test]
    fn several_prompts_count_and_the_first_is_matched() {
        let read = |body: &'static str| ApiRequest::read(PromptReader::Completion, body.as_bytes()).unwrap();
        let texts = read(r#"{"prompt": ["a", "bc", "é"]}"#);
        assert_eq!((texts.prompt, texts.more_bytes, texts.more_tokens), (Prompt::Text("a".into()), 4, 0));
        let ids = read(r#"{"prompt": [[1, 4294967295], [3], [4, 5]]}"#);
        assert_eq!((ids.prompt, ids.more_bytes, ids.more_tokens), (Prompt::Tokens(vec![1, u32::MAX]), 0, 3));
        assert_eq!(read(r#"{"prompt": [[]], "priority": null}"#).prompt, Prompt::Tokens(vec![]));
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

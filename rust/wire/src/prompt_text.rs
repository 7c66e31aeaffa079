//! The text of a prompt: each part of a request that a chat template writes, in its order.
//!
//! The text estimates the prompt's tokens and finds shared prefixes where the router has no
//! tokenizer. Templates of most models write the system message, the tools, then the conversation.
//! Only images, sound and files count by a digest. A value of an unknown shape counts as its JSON.

use crate::tree::{Json, Members};

/// Begins a message. No byte of a client's text is changed, so equal texts stay equal.
const MESSAGE: char = '\x1e';
/// Begins a part of a message that is not its text.
const PART: char = '\x1f';
/// Claude Code sends a line with this name in the system prompt. It changes with each request, so
/// engines drop it.
const BILLING_HEADER: &str = "x-anthropic-billing-header";
/// Types of content parts that engines do not write as text.
const MEDIA: [&str; 16] = [
    "image",
    "image_url",
    "input_image",
    "image_pil",
    "image_embeds",
    "audio",
    "audio_url",
    "input_audio",
    "audio_embeds",
    "video",
    "video_url",
    "video_embeds",
    "prompt_embeds",
    "file",
    "input_file",
    "document",
];
/// Fields that mark the end of a prefix to cache. Clients move them from message to message.
const CACHE_MARKS: [&str; 2] = ["cache_control", "prompt_cache_breakpoint"];
/// Settings of the templates of chats.
const CHAT_SETTINGS: [&str; 3] = ["reasoning_effort", "chat_template_kwargs", "response_format"];
/// Fields that no template writes.
const NOT_WRITTEN: [&str; 6] = ["type", "id", "status", "encrypted_content", CACHE_MARKS[0], CACHE_MARKS[1]];

/// Writes JSON without spaces.
pub(crate) fn compact(value: &Json<'_>) -> String {
    let mut text = String::new();
    value.write(&mut text);
    text
}

/// Returns the text of a conversation. `size`: expected bytes.
pub(crate) fn chat(fields: &Members<'_>, messages: Option<&Json<'_>>, size: usize) -> String {
    let mut text = String::with_capacity(size);
    let messages = messages.map_or(&[][..], listed);
    let first = match messages.first() {
        Some(Json::Object(first)) => first.get("role").and_then(Json::as_str),
        _ => None,
    };
    let (system, others) = messages.split_at(usize::from(matches!(first, Some("system" | "developer"))));
    system.iter().for_each(|each| message(&mut text, each));
    preamble(&mut text, fields);
    others.iter().for_each(|each| message(&mut text, each));
    settings(&mut text, fields, &CHAT_SETTINGS);
    text
}

/// Returns the bytes of the texts of several conversations ([`chat`]), together.
pub(crate) fn chat_bytes(fields: &Members<'_>, conversations: &[Json<'_>]) -> usize {
    if conversations.is_empty() {
        return 0;
    }
    // A conversation of a few bytes may come with tools of many: these are written once.
    let mut text = String::new();
    preamble(&mut text, fields);
    settings(&mut text, fields, &CHAT_SETTINGS);
    let common = text.len();
    conversations.iter().fold(0_usize, |bytes, messages| {
        text.clear();
        listed(messages).iter().for_each(|each| message(&mut text, each));
        bytes.saturating_add(common).saturating_add(text.len())
    })
}

/// Returns the values of a list, or the only value.
fn listed<'a, 'b>(value: &'b Json<'a>) -> &'b [Json<'a>] {
    if let Json::List(values) = value { values } else { std::slice::from_ref(value) }
}

/// Returns the text of a request of Anthropic's Messages API. `size`: expected bytes.
pub(crate) fn messages(fields: &Members<'_>, size: usize) -> String {
    let mut text = String::with_capacity(size);
    if let Some(system) = fields.get("system").filter(|system| system.is_something()) {
        begin(&mut text, "system");
        system_content(&mut text, system);
    }
    preamble(&mut text, fields);
    match fields.get("messages") {
        Some(Json::List(messages)) => messages.iter().for_each(|each| message(&mut text, each)),
        Some(other) => message(&mut text, other),
        None => {}
    }
    settings(&mut text, fields, &["output_config", "thinking", "chat_template_kwargs"]);
    text
}

/// Returns the text of a request of OpenAI's Responses API. `size`: expected bytes.
pub(crate) fn responses(fields: &Members<'_>, size: usize) -> String {
    let mut text = String::with_capacity(size);
    if let Some(instructions) = fields.get("instructions").filter(|given| given.is_something()) {
        begin(&mut text, "system");
        system_content(&mut text, instructions);
    }
    preamble(&mut text, fields);
    for name in ["prompt", "previous_input_messages"] {
        part_of(&mut text, fields.get(name));
    }
    match fields.get("input") {
        Some(Json::List(items)) => items.iter().for_each(|each| item(&mut text, each)),
        Some(Json::Null) | None => {}
        Some(other) => {
            begin(&mut text, "user");
            content(&mut text, other);
        }
    }
    settings(&mut text, fields, &["reasoning", "chat_template_kwargs"]);
    text
}

/// The texts that a model for scores and ranks compares: each query with each document.
pub(crate) struct Pairs<'a, 'b> {
    /// Texts that templates write in front of each pair.
    before: [Option<&'b Json<'a>>; 2],
    queries: &'b [Json<'a>],
    documents: &'b [Json<'a>],
}

impl<'a, 'b> Pairs<'a, 'b> {
    /// Returns the pairs of a request; `None`: it has other fields.
    pub(crate) fn of(fields: &'b Members<'a>) -> Option<Self> {
        let of = |names: &[&str]| names.iter().find_map(|name| fields.get(name)).map(listed);
        Some(Self {
            before: ["instruction", "chat_template_kwargs"].map(|name| fields.get(name)),
            queries: of(&["query", "queries", "text_1", "data_1"])?,
            documents: of(&["documents", "items", "text_2", "data_2"])?,
        })
    }

    /// Returns the text of the first pair.
    pub(crate) fn first(&self) -> String {
        let mut text = String::new();
        self.before.iter().for_each(|value| part_of(&mut text, *value));
        for value in [self.queries, self.documents].into_iter().filter_map(<[_]>::first) {
            text.push(MESSAGE);
            compared(&mut text, value);
        }
        text
    }

    /// Returns the bytes of all other pairs. A single query is compared with all documents.
    pub(crate) fn other_bytes(&self) -> usize {
        let Some(others) = self.queries.len().max(self.documents.len()).checked_sub(1) else { return 0 };
        let mut text = String::new();
        let mut bytes = |value: &Json<'_>, write: fn(&mut String, &Json<'_>)| {
            text.clear();
            write(&mut text, value);
            text.len()
        };
        let write = |text: &mut String, value: &Json<'_>| part_of(text, Some(value));
        let before: usize = self.before.iter().flatten().map(|value| bytes(value, write)).sum();
        let sides = [self.queries, self.documents].map(|side| {
            let sizes: Vec<_> = side.iter().map(|value| bytes(value, compared)).collect();
            // The last value stands for all values that are missing, the first one is matched.
            let last = sizes.last().copied().unwrap_or_default();
            let given: usize = sizes.iter().skip(1).sum();
            let missing = others - sizes.len().saturating_sub(1);
            given.saturating_add(last.saturating_mul(missing))
        });
        sides[0].saturating_add(sides[1]).saturating_add(before.saturating_mul(others))
    }
}

/// Writes a query or a document: a text, parts, or an object with one of them.
fn compared(text: &mut String, value: &Json<'_>) {
    match value {
        Json::Object(fields) => match fields.get("content") {
            Some(parts) => content(text, parts),
            None => part(text, value),
        },
        other => content(text, other),
    }
}

fn begin(text: &mut String, role: &str) {
    text.push(MESSAGE);
    text.push_str(role);
    text.push('\n');
}

/// Writes the tools and documents, which templates write in front of the conversation.
fn preamble(text: &mut String, fields: &Members<'_>) {
    for name in ["tools", "functions", "documents"] {
        part_of(text, fields.get(name));
    }
}

/// Writes settings of templates. Most templates write them behind the conversation.
fn settings(text: &mut String, fields: &Members<'_>, names: &[&str]) {
    names.iter().for_each(|name| part_of(text, fields.get(name)));
}

/// Writes a value behind a separator, unless it is empty.
fn part_of(text: &mut String, value: Option<&Json<'_>>) {
    match value {
        Some(Json::Text(value)) if !value.is_empty() => {
            text.push(PART);
            text.push_str(value);
        }
        Some(value) if value.is_something() => {
            text.push(PART);
            value.write(text);
        }
        _ => {}
    }
}

fn message(text: &mut String, message: &Json<'_>) {
    let Json::Object(fields) = message else {
        return part_of(text, Some(message));
    };
    let role = fields.get("role").and_then(Json::as_str);
    begin(text, role.unwrap_or_default());
    let said = fields.get("content");
    let said_by = |text: &mut String, said| match role {
        Some("system") => system_content(text, said),
        _ => content(text, said),
    };
    if let (Some(said), ..=2) = (said, fields.len()) {
        return said_by(text, said);
    }
    part_of(text, fields.get("name"));
    let reasoning = fields.get("reasoning").filter(|reasoning| reasoning.is_something());
    part_of(text, reasoning.or_else(|| fields.get("reasoning_content")));
    if let Some(said) = said {
        said_by(text, said);
    }
    match fields.get("tool_calls") {
        Some(Json::List(calls)) => calls.iter().for_each(|each| call(text, each)),
        other => part_of(text, other),
    }
    if let Some(old) = fields.get("function_call") {
        call(text, old);
    }
    for name in ["refusal", "audio", "tool_call_id", "tools", "task"] {
        part_of(text, fields.get(name));
    }
}

/// Writes a call of a tool: its name, arguments and ID.
fn call(text: &mut String, call: &Json<'_>) {
    let Json::Object(fields) = call else {
        return part_of(text, Some(call));
    };
    let inner = ["function", "custom"].iter().find_map(|name| match fields.get(name) {
        Some(Json::Object(inner)) => Some(inner),
        _ => None,
    });
    for name in ["namespace", "name", "arguments", "input"] {
        part_of(text, inner.unwrap_or(fields).get(name));
    }
    for name in ["call_id", "id"] {
        part_of(text, fields.get(name));
    }
}

/// Writes an item of the Responses API.
fn item(text: &mut String, item: &Json<'_>) {
    let Json::Object(fields) = item else {
        return message(text, item);
    };
    let kind = fields.get("type").and_then(Json::as_str).unwrap_or_default();
    match kind {
        "function_call" | "custom_tool_call" => {
            begin(text, kind);
            for name in ["namespace", "name", "arguments", "input", "call_id"] {
                part_of(text, fields.get(name));
            }
        }
        "function_call_output" | "custom_tool_call_output" => {
            begin(text, kind);
            part_of(text, fields.get("call_id"));
            fields.get("output").into_iter().for_each(|output| content(text, output));
        }
        "reasoning" => {
            begin(text, kind);
            let said = fields.get("content").filter(|content| content.is_something());
            said.or_else(|| fields.get("summary")).into_iter().for_each(|said| content(text, said));
        }
        _ if fields.get("role").is_some() => message(text, item),
        _ => {
            begin(text, kind);
            members(text, fields);
        }
    }
}

/// Writes all members of a value of an unknown kind, except those that no template writes.
fn members(text: &mut String, fields: &Members<'_>) {
    for (name, value) in fields.iter() {
        if !NOT_WRITTEN.contains(&name) {
            part_of(text, Some(value));
        }
    }
}

/// Writes the content of a system message without the line that engines drop.
fn system_content(text: &mut String, said: &Json<'_>) {
    match said {
        Json::Text(said) if said.starts_with(BILLING_HEADER) => {
            text.push_str(said.split_once('\n').map_or("", |(_, rest)| rest));
        }
        Json::List(parts) => {
            for each in parts {
                let said = if let Json::Object(fields) = each { fields.get("text") } else { Some(each) };
                if !said.and_then(Json::as_str).is_some_and(|said| said.starts_with(BILLING_HEADER)) {
                    part(text, each);
                }
            }
        }
        other => content(text, other),
    }
}

/// Writes the content of a message: a text or a list of parts.
fn content(text: &mut String, said: &Json<'_>) {
    match said {
        Json::Text(said) => text.push_str(said),
        Json::List(parts) => parts.iter().for_each(|each| part(text, each)),
        Json::Object(_) => part(text, said),
        other => part_of(text, Some(other)),
    }
}

fn part(text: &mut String, each: &Json<'_>) {
    let fields = match each {
        Json::Text(said) => return text.push_str(said),
        Json::Object(fields) => fields,
        other => return part_of(text, Some(other)),
    };
    if let Some(Json::Text(said)) = fields.get("text") {
        return text.push_str(said);
    }
    match fields.get("type").and_then(Json::as_str).unwrap_or_default() {
        // Opaque, or signed for the provider's own model.
        "redacted_thinking" => {}
        "thinking" => part_of(text, fields.get("thinking")),
        "tool_use" => call(text, each),
        "tool_result" => {
            part_of(text, fields.get("tool_use_id"));
            text.push(PART);
            fields.get("content").into_iter().for_each(|said| content(text, said));
        }
        kind if MEDIA.contains(&kind) || MEDIA.iter().any(|name| fields.get(name).is_some()) => {
            match fields.get("source") {
                // A document as text.
                Some(Json::Object(source)) if source.get("type").and_then(Json::as_str) == Some("text") => {
                    members(text, fields);
                }
                _ => text.push_str(&format!("{PART}{:032x}", fields.digest_without(&CACHE_MARKS))),
            }
        }
        _ => members(text, fields),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: fn(&Members<'_>, usize) -> String, body: &str) -> String {
        let Json::Object(fields) = Json::read(body.as_bytes()).expect(body) else { unreachable!() };
        write(&fields, 0)
    }

    fn of_chat(fields: &Members<'_>, size: usize) -> String {
        chat(fields, fields.get("messages"), size)
    }

    #[test]
    fn a_chat_is_written_as_templates_write_it() {
        let body = r#"{"tools": [{"b": 1, "a": [ ]}], "functions": ["f"], "documents": [{"text": "d"}],
            "reasoning_effort": "low", "messages": [
            {"role": "system", "content": "x-anthropic-billing-header: cch=1;\nbe"},
            {"role": "user", "content": ["a", {"type": "text", "text": "b"}, "c"], "name": "n"},
            {"role": "assistant", "content": "said", "name": "", "reasoning_content": "r",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "assistant", "content": null, "function_call": {"name": "g", "arguments": "[]"}},
            {"role": "tool", "tool_call_id": "1", "content": "x"}]}"#;
        assert_eq!(
            written(of_chat, body),
            "\x1esystem\nbe\x1f[{\"b\":1,\"a\":[]}]\x1f[\"f\"]\x1f[{\"text\":\"d\"}]\x1euser\n\x1fnabc\
             \x1eassistant\n\x1frsaid\x1ff\x1f{}\x1f1\x1eassistant\n\x1fg\x1f[]\x1etool\nx\x1f1\x1flow"
        );
        let body = r#"{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}"#;
        assert_eq!(written(of_chat, body), "\x1eassistant\n\x1ff");
        // Without a system message, the tools come first.
        let body = r#"{"tools": [1], "messages": [{"role": "user", "content": "a"}]}"#;
        assert_eq!(written(of_chat, body), "\x1f[1]\x1euser\na");
    }

    #[test]
    fn a_chat_of_an_unknown_shape_is_written_too() {
        let body = r#"{"messages": [3, {"role": 1, "content": {"a": "b"}}, {"content": 5}]}"#;
        assert_eq!(written(of_chat, body), "\x1f3\x1e\n\x1fb\x1e\n\x1f5");
        assert_eq!(written(of_chat, r#"{"messages": "hi"}"#), "\x1fhi");
        assert_eq!(written(of_chat, "{}"), "");
    }

    #[test]
    fn messages_of_anthropic_count_in_all_parts() {
        let body = r#"{"tools": [{"name": "f"}], "thinking": {"type": "adaptive"}, "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "AAAA"},
                {"type": "redacted_thinking", "data": "AAAA"},
                {"type": "text", "text": "I look", "cache_control": {"type": "ephemeral"}},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": "1"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "plain", "is_error": true}]}],
            "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=2;"},
                       {"type": "text", "text": "be"}]}"#;
        assert_eq!(
            written(messages, body),
            "\x1esystem\nbe\x1f[{\"name\":\"f\"}]\x1euser\ngo\x1eassistant\n\x1fhmI look\x1ff\x1f{\"a\":\"1\"}\x1ft1\
             \x1euser\n\x1ft1\x1fseen\x1ft2\x1fplain\x1f{\"type\":\"adaptive\"}"
        );
        assert_eq!(written(messages, r#"{"system": "s", "messages": "m"}"#), "\x1esystem\ns\x1fm");
    }

    #[test]
    fn images_count_by_a_digest_that_no_cache_mark_changes() {
        let image = |data: &str, mark: &str| {
            let source = format!(r#"{{"type": "base64", "media_type": "image/png", "data": "{data}"}}"#);
            let block = format!(r#"{{"type": "image"{mark}, "source": {source}}}"#);
            written(messages, &format!(r#"{{"messages": [{{"role": "user", "content": [{block}]}}]}}"#))
        };
        let long = "A".repeat(10_000);
        let marked = image(&long, r#", "cache_control": {"type": "ephemeral"}"#);
        assert_eq!(marked, image(&long, ""));
        assert!(marked.len() < 60);
        assert_ne!(marked, image(&"B".repeat(10_000), ""));
        let document = r#"{"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "data": "a long document"}}]}]}"#;
        assert!(written(messages, document).contains("a long document"));
    }

    #[test]
    fn items_of_responses_count_in_all_parts() {
        let body = r#"{"instructions": "be", "tools": [{"name": "f"}], "reasoning": {"effort": "low"}, "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "yes"}]},
            {"type": "function_call", "id": "fc", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "out"},
            {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "free"},
            {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "o2"}]},
            {"type": "local_shell_call", "id": "x", "status": "completed", "action": {"command": ["ls"]}}]}"#;
        assert_eq!(
            written(responses, body),
            "\x1esystem\nbe\x1f[{\"name\":\"f\"}]\x1euser\ngo\x1ereasoning\nhm\x1eassistant\nyes\
             \x1efunction_call\n\x1ff\x1f{}\x1f1\x1efunction_call_output\n\x1f1out\x1ecustom_tool_call\n\x1fg\x1ffree\x1f2\
             \x1ecustom_tool_call_output\n\x1f2o2\x1elocal_shell_call\n\x1f{\"command\":[\"ls\"]}\x1f{\"effort\":\"low\"}"
        );
        assert_eq!(written(responses, r#"{"input": "a", "instructions": "b"}"#), "\x1esystem\nb\x1euser\na");
    }

    #[test]
    fn each_query_is_compared_with_each_document() {
        let pairs = |body: &str| {
            let Json::Object(fields) = Json::read(body.as_bytes()).unwrap() else { unreachable!() };
            Pairs::of(&fields).map(|pairs| (pairs.first(), pairs.other_bytes()))
        };
        let rerank =
            r#"{"query": "qq", "documents": ["a", {"text": "bcd", "id": 3}, {"content": [{"text": "e"}]}]}"#;
        assert_eq!(pairs(rerank), Some(("\x1eqq\x1ea".into(), "qqbcdqqe".len())));
        let score = r#"{"text_1": ["a", "b"], "text_2": ["c", "d"], "instruction": "i"}"#;
        assert_eq!(pairs(score), Some(("\x1fi\x1ea\x1ec".into(), "\x1fibd".len())));
        assert_eq!(pairs(r#"{"query": "q", "documents": []}"#), Some(("\x1eq".into(), 0)));
        let none = r#"{"query": [], "documents": [], "instruction": "i"}"#;
        assert_eq!(pairs(none), Some(("\x1fi".into(), 0)));
        assert_eq!(pairs(r#"{"query": "q"}"#), None);
    }
}

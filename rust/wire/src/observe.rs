//! Observes a stream of completions while it passes to the client, and removes values that the
//! client must not see.
//!
//! Reads only whole events, each once and in place, and copies only their text and token IDs.
use crate::json::MAX_TOKENS;
use crate::sse;
use crate::template::Template;
use serde_core::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

/// Templates made for a stream. The events of some streams have further differences (usage so far).
const MAX_TEMPLATES: u8 = 8;
/// Longest event of an observed stream that is withheld until its end, in bytes: its first event
/// repeats the prompt as token IDs.
pub const OBSERVED_LIMIT: usize = 8 * 1024 * 1024;
/// Longest text, reasoning and tool calls that are recorded of a stream, in bytes, together.
const MAX_RECORDED_BYTES: usize = 64 * 1024 * 1024;
const NOT_ONE_CHOICE: &str = "the segment's answer does not have exactly one choice";
const NO_IDS: &str = "the engine does not tell token ids (return_token_ids)";
const BAD_IDS: &str = "the engine reports invalid token ids";
const TOO_LONG: &str = "an event is too long to be followed";
const TOO_MUCH: &str = "the answer is too long to be followed";
const SEVERAL_LINES: &str = "an event is in several lines";
const DECLARED: &str = "its length is declared";
const CODED: &str = "it has a content-encoding";
const FUNCTION_CALL: &str = "the engine sends a function_call";

fn no_completion(why: impl fmt::Display) -> String {
    format!("an event of the stream is not a completion's: {why}")
}

/// Values recorded from one stream.
#[derive(Debug, Default)]
pub struct Observer {
    hide_ids: bool,
    /// The stream can be neither observed nor rewritten.
    off: bool,
    prompt: Option<Vec<u32>>,
    ids: Vec<u32>,
    /// The number of token IDs in each event that has some.
    pieces: Vec<u32>,
    text: String,
    reasoning: String,
    /// The lists of tool calls, as JSON.
    calls: Vec<String>,
    /// Bytes of `calls` in memory.
    calls_bytes: usize,
    frame: Option<String>,
    over: bool,
    /// An event without choices followed the `finish_reason`: the usage.
    usage_sent: bool,
    /// The event `[DONE]` was read.
    done_sent: bool,
    lost: Option<String>,
    /// The loss was reported, or that the answer has more than text.
    told: bool,
    /// Part of an event went to the client: the last byte of that part.
    cut: Option<u8>,
    /// Values of the events read last that become null.
    hidden: Vec<Range<usize>>,
    template: Option<Template>,
    /// Templates made.
    templates: u8,
}

/// Values found in events that fit the template.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Quick {
    pub(crate) tokens: u64,
    /// Events with a token.
    pub(crate) progress: u64,
}

impl Observer {
    pub(crate) fn new(hide_ids: bool) -> Self {
        Self { hide_ids, ..Self::default() }
    }

    /// The prompt's token IDs, if the engine reports them.
    pub fn prompt(&self) -> Option<&[u32]> {
        self.prompt.as_deref()
    }

    /// The answer's token IDs.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The number of token IDs in each event that has some.
    pub fn pieces(&self) -> &[u32] {
        &self.pieces
    }

    /// The answer's text, as the engine sends it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The answer's reasoning, as the engine sends it.
    pub fn reasoning(&self) -> &str {
        &self.reasoning
    }

    /// The `tool_calls` of the answer's events, as JSON.
    pub fn calls(&self) -> &[String] {
        &self.calls
    }

    /// Whether the engine parses the answer into more than text: reasoning or tool calls.
    pub fn parsed(&self) -> bool {
        !self.reasoning.is_empty() || !self.calls.is_empty()
    }

    /// A JSON object of the first event's `id`, `created` and `model`; `None` before it.
    pub fn frame(&self) -> Option<&str> {
        self.frame.as_deref()
    }

    /// Whether a `finish_reason` was seen.
    pub fn over(&self) -> bool {
        self.over
    }

    /// Whether the usage followed the `finish_reason`.
    pub fn usage_sent(&self) -> bool {
        self.usage_sent
    }

    /// Whether the event `[DONE]` was read.
    pub fn done_sent(&self) -> bool {
        self.done_sent
    }

    /// Why the stream is no longer observed; `None`: it is observed.
    pub fn lost(&self) -> Option<&str> {
        self.lost.as_deref()
    }

    /// Whether the stream was lost since the last call, or has more than text for the first time.
    /// Returns true once.
    pub(crate) fn newly_lost(&mut self) -> bool {
        (self.lost.is_some() || self.parsed()) && !std::mem::replace(&mut self.told, true)
    }

    /// Records that the stream's length is declared, so it passes unchanged.
    pub(crate) fn declared(&mut self) {
        self.off = true;
        self.lose(DECLARED);
    }

    /// Records that the stream has a content-encoding, so it passes unread.
    pub(crate) fn coded(&mut self) {
        self.off = true;
        self.lose(CODED);
    }

    /// Records that a part of an event goes to the client, because the event is too long.
    pub(crate) fn part(&mut self, part: &[u8]) {
        self.cut = part.last().copied().or(self.cut);
        self.lose(TOO_LONG);
    }

    /// Reads `blocks`, which end at the end of an event. Returns whether they must be rewritten.
    pub(crate) fn read(&mut self, blocks: &[u8]) -> bool {
        self.hidden.clear();
        if self.off {
            return false;
        }
        let mut start = 0;
        if let Some(last) = self.cut {
            let Some(after) = rest_of_block(blocks, last) else {
                self.part(blocks);
                return false;
            };
            (self.cut, start) = (None, after);
        }
        let (mut data, mut several) = (None, false);
        for (line, next) in sse::lines(blocks, start) {
            if !line.is_empty() {
                if let Some(value) = sse::data_of(&blocks[line.clone()]) {
                    several |= data.is_some();
                    data = Some(line.end - value.len()..line.end);
                }
                continue;
            }
            if let Some(data) = data.take() {
                match &blocks[data.clone()] {
                    _ if line.start - start > OBSERVED_LIMIT => self.lose(TOO_LONG),
                    _ if several => self.lose(SEVERAL_LINES),
                    b"[DONE]" => self.done_sent = true,
                    value => {
                        let hidden = self.hidden.len();
                        if let Some((text, ids)) = self.event(value, data.start) {
                            self.learn(&blocks[start..next], start, text, ids, hidden);
                        }
                    }
                }
            }
            (start, several) = (next, false);
        }
        !self.hidden.is_empty()
    }

    /// As [`Observer::read`], for events that fit the template. Returns `None`, without any effect,
    /// unless all of them do.
    pub(crate) fn read_quickly(&mut self, blocks: &[u8]) -> Option<Quick> {
        let template = self.template.as_ref()?;
        if self.lost.is_some() || self.cut.is_some() {
            return None;
        }
        let (ids_before, text_before, pieces_before) = (self.ids.len(), self.text.len(), self.pieces.len());
        let (mut at, mut found) = (0, Quick::default());
        self.hidden.clear();
        while at < blocks.len() {
            let ids_here = self.ids.len();
            let parts = template.read(&blocks[at..]);
            let Some(parts) = parts.filter(|parts| read_ids(parts.ids, &mut self.ids).is_ok()) else {
                self.ids.truncate(ids_before);
                self.text.truncate(text_before);
                self.pieces.truncate(pieces_before);
                self.hidden.clear();
                return None;
            };
            self.text.push_str(parts.text);
            let tokens = add_piece(&mut self.pieces, self.ids.len() - ids_here);
            found.tokens += tokens;
            found.progress += u64::from(tokens > 0 || !parts.text.is_empty());
            if self.hide_ids {
                let start = at + parts.ids_at;
                self.hidden.push(start - 1..start + parts.ids.len() + 1);
            }
            at += parts.end;
        }
        if self.is_full() {
            self.lose(TOO_MUCH);
            self.forget();
        }
        Some(found)
    }

    /// Whether values of the events read last become null.
    pub(crate) fn rewrites(&self) -> bool {
        !self.hidden.is_empty()
    }

    /// Appends the client's version of the blocks read last to `out`.
    pub(crate) fn write(&self, blocks: &[u8], out: &mut Vec<u8>) {
        let mut at = 0;
        for hidden in &self.hidden {
            out.extend_from_slice(&blocks[at..hidden.start]);
            out.extend_from_slice(b"null");
            at = hidden.end;
        }
        out.extend_from_slice(&blocks[at..]);
    }

    /// Whether the stream is too long to be recorded.
    fn is_full(&self) -> bool {
        self.ids.len() as u64 > MAX_TOKENS
            || self.text.len() + self.reasoning.len() + self.calls_bytes > MAX_RECORDED_BYTES
    }

    /// Frees the recorded answer.
    fn forget(&mut self) {
        (self.ids, self.pieces, self.calls) = Default::default();
        (self.text, self.reasoning, self.calls_bytes) = Default::default();
    }

    fn lose(&mut self, reason: impl Into<String>) {
        if self.lost.is_none() {
            self.lost = Some(reason.into());
        }
    }

    /// Makes a template from an event at `start` of the blocks. `text`, `ids`: their positions in
    /// the blocks. `hidden`: values hidden in earlier events.
    fn learn(&mut self, event: &[u8], start: usize, text: Range<usize>, ids: Range<usize>, hidden: usize) {
        let only_ids = match &self.hidden[hidden..] {
            [] => !self.hide_ids,
            [only] => self.hide_ids && *only == ids,
            _ => false,
        };
        if only_ids && self.lost.is_none() && self.templates < MAX_TEMPLATES {
            self.templates += 1;
            let within = |range: Range<usize>| range.start - start..range.end - start;
            self.template = Template::new(event, within(text), within(ids));
        }
    }

    /// Reads an event's data, which starts at `start` of the blocks. Returns the positions of its
    /// text and token IDs if only these two matter.
    fn event(&mut self, data: &[u8], start: usize) -> Option<(Range<usize>, Range<usize>)> {
        let read = std::str::from_utf8(data)
            .map_err(no_completion)
            .and_then(|text| serde_json::from_str(text).map(|Object(event)| event).map_err(no_completion));
        let event: Event = match read {
            Ok(event) => event,
            Err(reason) => {
                self.lose(reason);
                return None;
            }
        };
        let place = |part: &str| {
            let at = part.as_ptr() as usize - data.as_ptr() as usize + start;
            at..at + part.len()
        };
        let first = self.hidden.len();
        let mut hide = |value: Option<&RawValue>| {
            if let Some(value) = value {
                self.hidden.push(place(value.get()));
            }
        };
        hide(event.transfer);
        if self.hide_ids {
            hide(event.prompt);
            for Object(choice) in event.choices.iter().flatten() {
                hide(choice.prompt);
                hide(choice.ids);
            }
        }
        self.hidden[first..].sort_unstable_by_key(|hidden| hidden.start);
        if self.lost.is_none()
            && let Err(reason) = self.note(&event)
        {
            self.lost = Some(reason);
        }
        let (Some([Object(choice)]), None) = (event.choices.as_deref(), &event.error) else { return None };
        let text = match &choice.delta {
            Some(Object(delta)) if delta.reasoning.is_some() || delta.calls.is_some() => None,
            Some(Object(delta)) => delta.content.as_ref(),
            None => choice.text.as_ref(),
        };
        match (text, choice.ids, &choice.finish) {
            (Some(Text(Cow::Borrowed(text))), Some(ids), None) => Some((place(text), place(ids.get()))),
            _ => None,
        }
    }

    fn note(&mut self, event: &Event<'_>) -> Result<(), String> {
        if event.error.is_some() {
            return Ok(());
        }
        let choice = match event.choices.as_deref() {
            None => return Err(no_completion("missing field `choices`")),
            Some([]) => {
                self.usage_sent |= self.over;
                return Ok(());
            }
            Some([Object(choice)]) => choice,
            Some(_) => return Err(NOT_ONE_CHOICE.into()),
        };
        let text = match &choice.delta {
            Some(Object(delta)) if delta.function_call => return Err(FUNCTION_CALL.into()),
            Some(Object(delta)) => &delta.content,
            None => &choice.text,
        };
        let text = text.as_ref().map_or("", |Text(text)| text);
        let (reasoning, calls) = match &choice.delta {
            Some(Object(delta)) => (delta.reasoning.as_ref().map_or("", |Text(text)| text), delta.calls),
            None => ("", None),
        };
        let calls = calls.filter(|calls| !empty(calls));
        let mut prompt = Vec::new();
        if self.frame.is_none() {
            let mut lists = [event.prompt, choice.prompt].into_iter().flatten().filter_map(list);
            read_ids(lists.find(|list| !list.is_empty()).unwrap_or_default(), &mut prompt)?;
        }
        match choice.ids.and_then(list) {
            Some(list) => {
                let start = self.ids.len();
                read_ids(list, &mut self.ids)?;
                add_piece(&mut self.pieces, self.ids.len() - start);
            }
            None if !text.is_empty() || !reasoning.is_empty() || calls.is_some() => return Err(NO_IDS.into()),
            None => {}
        }
        if self.frame.is_none() {
            self.prompt = Some(prompt).filter(|prompt| !prompt.is_empty());
            let json = |value: Option<&RawValue>| value.map_or("null", RawValue::get).to_owned();
            let (id, created, model) = (json(event.id), json(event.created), json(event.model));
            self.frame = Some(format!(r#"{{"id":{id},"created":{created},"model":{model}}}"#));
        }
        self.text.push_str(text);
        self.reasoning.push_str(reasoning);
        if let Some(calls) = calls {
            self.calls_bytes += size_of::<String>() + calls.get().len();
            self.calls.push(calls.get().to_owned());
        }
        self.over |= choice.finish.is_some();
        if self.is_full() {
            self.forget();
            return Err(TOO_MUCH.into());
        }
        Ok(())
    }
}

/// End, within `blocks`, of an event that began before them; its earlier part ended with `last`.
fn rest_of_block(blocks: &[u8], last: u8) -> Option<usize> {
    let mut inside = !matches!(last, b'\n' | b'\r');
    let start = usize::from(last == b'\r' && blocks.first() == Some(&b'\n'));
    for (line, next) in sse::lines(blocks, start) {
        if line.is_empty() && !inside {
            return Some(next);
        }
        inside = false;
    }
    None
}

/// Whether a list or string has no content.
fn empty(value: &RawValue) -> bool {
    value.get() == "\"\"" || list(value).is_some_and(str::is_empty)
}

/// Returns the text between the brackets of a list.
fn list(value: &RawValue) -> Option<&str> {
    value.get().strip_prefix('[')?.strip_suffix(']').map(str::trim_ascii)
}

/// Appends the IDs of a list, all or none.
fn read_ids(list: &str, ids: &mut Vec<u32>) -> Result<(), String> {
    let before = ids.len();
    for id in list.split(',').filter(|_| !list.is_empty()) {
        let Ok(id) = id.trim_ascii().parse() else {
            ids.truncate(before);
            return Err(BAD_IDS.into());
        };
        ids.push(id);
    }
    Ok(())
}

/// Adds an event's number of token IDs, unless it has none. Returns the number.
fn add_piece(pieces: &mut Vec<u32>, tokens: usize) -> u64 {
    if tokens > 0 {
        pieces.push(u32::try_from(tokens).unwrap_or(u32::MAX));
    }
    tokens as u64
}

// The parts of an event that are read. Structs made by serde's macro would accept lists for
// objects, too.

#[derive(Default)]
struct Event<'a> {
    id: Option<&'a RawValue>,
    created: Option<&'a RawValue>,
    model: Option<&'a RawValue>,
    choices: Option<Vec<Object<Choice<'a>>>>,
    error: Option<IgnoredAny>,
    prompt: Option<&'a RawValue>,
    transfer: Option<&'a RawValue>,
}

#[derive(Default)]
struct Choice<'a> {
    text: Option<Text<'a>>,
    delta: Option<Object<Delta<'a>>>,
    finish: Option<IgnoredAny>,
    prompt: Option<&'a RawValue>,
    ids: Option<&'a RawValue>,
}

#[derive(Default)]
struct Delta<'a> {
    content: Option<Text<'a>>,
    reasoning: Option<Text<'a>>,
    calls: Option<&'a RawValue>,
    function_call: bool,
}

/// Reads the members of an object.
trait Members<'a>: Default {
    fn member<M: MapAccess<'a>>(&mut self, name: &str, map: &mut M) -> Result<(), M::Error>;
}

impl<'a> Members<'a> for Event<'a> {
    fn member<M: MapAccess<'a>>(&mut self, name: &str, map: &mut M) -> Result<(), M::Error> {
        match name {
            "id" => once(&mut self.id, "id", map),
            "created" => once(&mut self.created, "created", map),
            "model" => once(&mut self.model, "model", map),
            "choices" => once(&mut self.choices, "choices", map),
            "error" => once(&mut self.error, "error", map),
            "prompt_token_ids" => once(&mut self.prompt, "prompt_token_ids", map),
            "kv_transfer_params" => once(&mut self.transfer, "kv_transfer_params", map),
            _ => map.next_value::<IgnoredAny>().map(drop),
        }
    }
}

impl<'a> Members<'a> for Choice<'a> {
    fn member<M: MapAccess<'a>>(&mut self, name: &str, map: &mut M) -> Result<(), M::Error> {
        match name {
            "text" => once(&mut self.text, "text", map),
            "delta" => once(&mut self.delta, "delta", map),
            "finish_reason" => once(&mut self.finish, "finish_reason", map),
            "prompt_token_ids" => once(&mut self.prompt, "prompt_token_ids", map),
            "token_ids" => once(&mut self.ids, "token_ids", map),
            _ => map.next_value::<IgnoredAny>().map(drop),
        }
    }
}

impl<'a> Members<'a> for Delta<'a> {
    fn member<M: MapAccess<'a>>(&mut self, name: &str, map: &mut M) -> Result<(), M::Error> {
        match name {
            "content" => once(&mut self.content, "content", map),
            // Engines use one of the two names.
            "reasoning" | "reasoning_content" if self.reasoning.is_none() => {
                self.reasoning = map.next_value()?;
                Ok(())
            }
            "tool_calls" => once(&mut self.calls, "tool_calls", map),
            "function_call" => {
                let value: Option<&RawValue> = map.next_value()?;
                self.function_call |= value.is_some_and(|value| !empty(value));
                Ok(())
            }
            _ => map.next_value::<IgnoredAny>().map(drop),
        }
    }
}

/// Reads a member's value; null counts as absent. A repeated member is an error: readers disagree
/// on which value counts.
fn once<'a, T, M>(slot: &mut Option<T>, name: &'static str, map: &mut M) -> Result<(), M::Error>
where
    T: Deserialize<'a>,
    M: MapAccess<'a>,
{
    if slot.is_some() {
        return Err(M::Error::duplicate_field(name));
    }
    *slot = map.next_value()?;
    Ok(())
}

struct Object<T>(T);

impl<'a, T: Members<'a>> Deserialize<'a> for Object<T> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader<T>(PhantomData<T>);

        impl<'a, T: Members<'a>> Visitor<'a> for Reader<T> {
            type Value = Object<T>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<M: MapAccess<'a>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut object = T::default();
                while let Some(Text(name)) = map.next_key()? {
                    object.member(&name, &mut map)?;
                }
                Ok(Object(object))
            }
        }

        deserializer.deserialize_map(Reader(PhantomData))
    }
}

/// A string, copied only if it has escapes.
struct Text<'a>(Cow<'a, str>);

impl<'a> Deserialize<'a> for Text<'a> {
    fn deserialize<D: Deserializer<'a>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;

        impl<'a> Visitor<'a> for Reader {
            type Value = Text<'a>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a string")
            }

            fn visit_borrowed_str<E>(self, text: &'a str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }

        deserializer.deserialize_str(Reader)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns an observer that read these events, and the client's version of the events.
    fn read(hide_ids: bool, events: &[&str]) -> (Observer, String) {
        let blocks: String = events.iter().map(|event| format!("data: {event}\n\n")).collect();
        let (mut observer, mut out) = (Observer::new(hide_ids), Vec::new());
        let rewritten = observer.read(blocks.as_bytes());
        observer.write(blocks.as_bytes(), &mut out);
        let out = String::from_utf8(out).unwrap();
        assert_eq!(rewritten, out != blocks);
        (observer, out)
    }

    fn lost(event: &str) -> Option<String> {
        read(false, &[event]).0.lost
    }

    const FIRST: &str = r#"{"id":"cmpl-1","created":1795158682,"model":"ti\u006ey","choices":[{"index":0,"text":" 6\"\u00e9","finish_reason":null,"prompt_token_ids":[7,8],"token_ids":[1465, 3]}]}"#;

    #[test]
    fn a_completion_is_noted() {
        let last = r#"{"choices":[{"text":"b","finish_reason":"stop","token_ids":[4294967295]}]}"#;
        let usage = r#"{"choices":[],"usage":{"prompt_tokens":2}}"#;
        let (observer, out) = read(false, &[FIRST, last, usage, "[DONE]"]);
        assert_eq!(out.matches("null").count(), 1, "{out}");
        assert_eq!(observer.lost(), None);
        assert_eq!(observer.prompt(), Some([7, 8].as_slice()));
        assert_eq!((observer.ids(), observer.text()), ([1465, 3, u32::MAX].as_slice(), " 6\"éb"));
        assert_eq!(observer.pieces(), [2, 1]);
        let frame = r#"{"id":"cmpl-1","created":1795158682,"model":"ti\u006ey"}"#;
        assert_eq!((observer.frame(), observer.over()), (Some(frame), true));
    }

    #[test]
    fn a_chat_is_noted() {
        let first =
            r#"{"id":1,"prompt_token_ids":[5],"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
        let next = r#"{"id":2,"prompt_token_ids":[6],"choices":[{"delta":{"content":"a"},"token_ids":[]}]}"#;
        let last = r#"{"choices":[{"delta":{"content":null},"finish_reason":"stop","token_ids":null}]}"#;
        let (observer, _) = read(false, &[first, next, last]);
        assert_eq!((observer.prompt(), observer.ids()), (Some([5].as_slice()), [].as_slice()));
        assert_eq!((observer.text(), observer.over(), observer.lost()), ("a", true, None));
        assert_eq!(observer.frame(), Some(r#"{"id":1,"created":null,"model":null}"#));
    }

    #[test]
    fn reasoning_and_tool_calls_are_noted() {
        let event = |delta: &str| format!(r#"{{"choices":[{{"delta":{{{delta}}},"token_ids":[1]}}]}}"#);
        let events = [
            event(r#""content":"","tool_calls":[],"reasoning":"""#),
            event(r#""reasoning":"a\n""#),
            event(r#""reasoning":null,"reasoning_content":"b","content":"c""#),
            event(r#""tool_calls":[{"index":0}]"#),
            event(""),
            event(r#""content":"d","tool_calls":[{"index":1}]"#),
        ];
        let (mut plain, _) = read(false, &[&events[0]]);
        assert!(!plain.parsed() && !plain.newly_lost());
        let (mut observer, _) = read(false, &events.each_ref().map(String::as_str));
        assert_eq!((observer.reasoning(), observer.text()), ("a\nb", "cd"));
        assert_eq!(observer.calls(), [r#"[{"index":0}]"#, r#"[{"index":1}]"#]);
        assert_eq!((observer.ids().len(), observer.pieces(), observer.lost()), (6, [1; 6].as_slice(), None));
        assert!(observer.newly_lost() && !observer.newly_lost());
        let choice = |delta: &str| lost(&format!(r#"{{"choices":[{{"delta":{{{delta}}}}}]}}"#));
        assert_eq!(choice(r#""function_call":{"name":"f"},"content":"""#).as_deref(), Some(FUNCTION_CALL));
        assert_eq!(choice(r#""reasoning":"a""#).as_deref(), Some(NO_IDS));
        assert_eq!(choice(r#""tool_calls":[{}]"#).as_deref(), Some(NO_IDS));
        assert_eq!(choice(r#""reasoning":"","tool_calls":[]"#), None);
    }

    #[test]
    fn events_that_differ_only_in_their_text_are_read_quickly_and_those_with_reasoning_are_not() {
        let event =
            |delta: &str| format!("data: {{\"choices\":[{{\"delta\":{{{delta}}},\"token_ids\":[1]}}]}}\n\n");
        let mut observer = Observer::new(false);
        let both = event(r#""content":"a","reasoning":"b""#);
        observer.read(both.as_bytes());
        assert!(observer.read_quickly(both.as_bytes()).is_none());
        let text = event(r#""content":"a""#);
        observer.read(text.as_bytes());
        assert!(observer.read_quickly(text.as_bytes()).is_some());
        assert_eq!((observer.text(), observer.reasoning()), ("aaa", "b"));
    }

    #[test]
    fn errors_and_events_without_choices_are_not_noted() {
        let (observer, _) = read(false, &[r#"{"error":{"code":503}}"#, r#"{"choices":[],"id":1}"#]);
        assert_eq!((observer.frame(), observer.lost()), (None, None));
        let (observer, _) = read(false, &[r#"{"error":null,"choices":[{"text":"a","token_ids":[1]}]}"#]);
        assert_eq!(observer.ids(), [1]);
    }

    #[test]
    fn what_cannot_be_noted_is_told() {
        let choices = |choices: &str| lost(&format!(r#"{{"choices":[{choices}]}}"#));
        assert_eq!(choices(r#"{"token_ids":[1]},{"token_ids":[1]}"#).as_deref(), Some(NOT_ONE_CHOICE));
        assert_eq!(choices(r#"{"text":"a"}"#).as_deref(), Some(NO_IDS));
        assert_eq!(choices(r#"{"text":"a","token_ids":"1"}"#).as_deref(), Some(NO_IDS));
        assert_eq!(choices(r#"{"text":""}"#), None);
        for ids in ["[-1]", "[1,4294967296]", "[1.0]", "[null]", "[[1]]", "[\"1,2\"]", "[1e2]"] {
            assert_eq!(choices(&format!(r#"{{"token_ids":{ids}}}"#)).as_deref(), Some(BAD_IDS), "{ids}");
            let prompt = format!(r#"{{"token_ids":[1],"prompt_token_ids":{ids}}}"#);
            assert_eq!(choices(&prompt).as_deref(), Some(BAD_IDS), "{ids}");
        }
        for no in [
            "",
            "[]",
            "1",
            "{}",
            "{\"choices\":null}",
            "{\"choices\":{}}",
            "{\"choices\":[1]}",
            "{\"choices\":[[]]}",
        ] {
            let reason = lost(no).unwrap_or_default();
            assert!(reason.starts_with("an event of the stream is not a completion's: "), "{no}: {reason}");
        }
        for no in [r#""text":1"#, r#""text":"\ud800""#, r#""delta":[]"#, r#""text":"","text":"""#] {
            let reason = choices(&format!("{{{no}}}")).unwrap_or_default();
            assert!(reason.starts_with("an event of the stream is not a completion's: "), "{no}: {reason}");
        }
        let bad = read(false, &[FIRST, r#"{"choices":[{"text":"b","token_ids":[9,-1]}]}"#, FIRST]).0;
        assert_eq!((bad.ids(), bad.text()), ([1465, 3].as_slice(), " 6\"é"));
    }

    #[test]
    fn a_long_answer_is_recorded_up_to_a_limit_and_then_forgotten() {
        let event =
            |delta: &str| format!("data: {{\"choices\":[{{\"delta\":{{{delta}}},\"token_ids\":[1]}}]}}\n\n");
        let (text, reasoning, calls) = (r#""content":"a""#, r#""reasoning":"a""#, r#""tool_calls":[{}]"#);
        for (delta, quickly) in [(text, true), (text, false), (reasoning, false), (calls, false)] {
            for many_ids in [true, false] {
                let event = event(delta);
                let mut observer = Observer::new(true);
                observer.read(event.as_bytes());
                if many_ids {
                    observer.ids.resize(MAX_TOKENS as usize, 1);
                } else {
                    let others = observer.reasoning.len() + observer.calls_bytes;
                    observer.text = "x".repeat(MAX_RECORDED_BYTES - others);
                }
                assert!(!observer.is_full() && observer.lost().is_none());
                if quickly {
                    assert!(observer.read_quickly(event.as_bytes()).is_some() && observer.rewrites());
                } else {
                    assert!(observer.read(event.as_bytes()));
                }
                assert_eq!(observer.lost(), Some(TOO_MUCH), "{delta} {many_ids}");
                assert!(observer.read(event.as_bytes()), "IDs stay hidden");
                let Observer { ids, pieces, text, reasoning, calls, .. } = &observer;
                let strings = text.capacity() + reasoning.capacity();
                assert_eq!(ids.capacity() + pieces.capacity() + calls.capacity() + strings, 0);
            }
        }
    }

    #[test]
    fn data_of_several_lines_or_that_is_no_text_is_told() {
        let mut observer = Observer::new(true);
        assert!(!observer.read(b": comment\nid: 1\ndata:{\"choices\":[]}\nevent: x\n\n: comment\r\r\n"));
        assert_eq!(observer.lost(), None);
        assert!(!observer.read(b"data: {\"choices\":\ndata: []}\n\n"));
        assert_eq!(observer.lost(), Some(SEVERAL_LINES));
        let mut observer = Observer::new(true);
        assert!(!observer.read(b"data: {\"choices\":[],\"x\":\"\xff\"}\n\n"));
        assert!(observer.lost().unwrap().contains("utf-8"));
    }

    #[test]
    fn what_is_to_be_hidden_becomes_null_and_all_else_stays() {
        let event = |secret: &str, prompt: &str, ids: &str| {
            format!(
                r#"{{ "kv_transfer_params" : {secret} ,"prompt_token_ids":{prompt}, "token_ids":[1],"choices":[{{"token_ids": {ids},"text":"\u0061","kv_transfer_params":{{}}}},{{"prompt_token_ids":{prompt}}}] ,"x":{{"kv_transfer_params":1}} }}"#
            )
        };
        let sent = event(r#"{"a":["]}\""]}"#, "[1, 2]", "[]");
        let hidden = event("null", "null", "null");
        assert_eq!(read(true, &[&sent, &sent]).1, format!("data: {hidden}\n\ndata: {hidden}\n\n"));
        assert_eq!(read(false, &[&sent]).1, format!("data: {}\n\n", event("null", "[1, 2]", "[]")));
        let escaped = r#"{"choices":[],"kv_transfer_p\u0061rams":"x"}"#;
        assert_eq!(read(false, &[escaped]).1, format!("data: {}\n\n", escaped.replace("\"x\"", "null")));
    }

    #[test]
    fn a_part_of_an_event_ends_the_observation_and_the_rest_of_it_is_no_event() {
        let whole = b"data: {\"choices\":[],\"kv_transfer_params\":1}\n\n".as_slice();
        for (part, rest) in
            [("data: {", "}\n\n"), ("data: {}\n", "\n"), ("data: {}\r", "\n\n"), ("a\r", "\r\n")]
        {
            let mut observer = Observer::new(false);
            observer.part(part.as_bytes());
            assert!(observer.newly_lost() && !observer.newly_lost());
            assert!(observer.read(&[rest.as_bytes(), whole].concat()), "{part:?} {rest:?}");
            let mut observer = Observer::new(false);
            observer.part(part.as_bytes());
            assert!(!observer.read(&[rest.as_bytes(), b": comment\n"].concat()));
        }
        let mut observer = Observer::new(false);
        observer.part(b"data: {");
        assert!(!observer.read(&[b"}\n".as_slice(), whole].concat()), "it is in the same event");
    }
}

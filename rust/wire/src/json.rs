//! A probe for the few facts a router needs from an engine's JSON, read byte by byte as it comes: no tree, no buffer.
//!
//! It is no validator: of malformed JSON it just finds less.

/// How a generation ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// No `finish_reason` seen.
    #[default]
    Open,
    /// By itself: `stop`, `length`, `tool_calls`, …
    Done,
    /// By the engine: `abort` or `error`.
    Aborted,
}

/// Token counts of a `usage` object; each `None` where absent or null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `prompt_tokens` or `input_tokens`.
    pub prompt: Option<u64>,
    /// `prompt_tokens_details.cached_tokens` (or `input_tokens_details`).
    pub cached: Option<u64>,
    /// `completion_tokens` or `output_tokens`.
    pub output: Option<u64>,
}

/// What one JSON document (a plain answer, or the data of one SSE event) says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// `choices` has an element.
    pub choices: bool,
    /// Some choice carries text, reasoning or tool calls.
    pub content: bool,
    /// Some choice's delta names a role.
    pub role: bool,
    /// Number of `token_ids` over all choices, where the engine lists them.
    pub token_ids: Option<u64>,
    /// The last `finish_reason`.
    pub finish: Finish,
    /// The document is an error object.
    pub error: bool,
    /// The error's numeric `code`.
    pub error_code: Option<u64>,
    /// The last usage.
    pub usage: Usage,
}

impl Found {
    /// Output tokens the document stands for when it is a stream's event. Engines hold back incomplete UTF-8, so an
    /// event with empty text counts too, unless it only opens or ends a choice.
    pub fn tokens(&self) -> u64 {
        match self.token_ids {
            Some(n) => n,
            None if self.content => 1,
            None => u64::from(self.choices && !self.role && self.finish == Finish::Open),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Root,
    Top,
    Wrapper,
    Choices,
    Choice,
    Delta,
    TokenIds,
    ToolCalls,
    Usage,
    Details,
    Error,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Other,
    Choices,
    Delta,
    Message,
    Wrapper,
    Text,
    TokenIds,
    ToolCalls,
    Role,
    FinishReason,
    Usage,
    Prompt,
    Output,
    Details,
    Cached,
    Error,
    Code,
    Object,
}

impl Key {
    fn of(word: &[u8]) -> Self {
        match word {
            b"choices" => Key::Choices,
            b"delta" => Key::Delta,
            b"message" => Key::Message,
            b"response" => Key::Wrapper,
            b"text" | b"content" | b"reasoning" | b"reasoning_content" | b"refusal" => Key::Text,
            b"token_ids" => Key::TokenIds,
            b"tool_calls" => Key::ToolCalls,
            b"role" => Key::Role,
            b"finish_reason" => Key::FinishReason,
            b"usage" => Key::Usage,
            b"prompt_tokens" | b"input_tokens" => Key::Prompt,
            b"completion_tokens" | b"output_tokens" => Key::Output,
            b"prompt_tokens_details" | b"input_tokens_details" => Key::Details,
            b"cached_tokens" => Key::Cached,
            b"error" => Key::Error,
            b"code" => Key::Code,
            b"object" => Key::Object,
            _ => Key::Other,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lex {
    Between,
    Text { key: bool },
    Escape { key: bool },
    Word,
}

const WORD: usize = 24;
/// Deepest nesting of places of interest: Top, Choices, Choice, Delta, ToolCalls.
const DEPTH: usize = 6;

/// The probe. Feed it a document in any pieces, then [`Probe::take`] what was found.
#[derive(Debug)]
pub(crate) struct Probe {
    places: [Place; DEPTH],
    depth: usize,
    /// Nesting inside a place of no interest.
    other: u64,
    lex: Lex,
    want_key: bool,
    key: Key,
    word: [u8; WORD],
    /// Length of the string or word so far; what goes beyond `WORD` is counted and not kept.
    length: usize,
    found: Found,
}

impl Default for Probe {
    fn default() -> Self {
        Self {
            places: [Place::Root; DEPTH],
            depth: 0,
            other: 0,
            lex: Lex::Between,
            want_key: false,
            key: Key::Other,
            word: [0; WORD],
            length: 0,
            found: Found::default(),
        }
    }
}

impl Probe {
    pub(crate) fn feed(&mut self, input: &[u8]) {
        let mut at = 0;
        while at < input.len() {
            match self.lex {
                Lex::Text { key } => {
                    let rest = &input[at..];
                    let end = memchr::memchr2(b'"', b'\\', rest);
                    let n = end.unwrap_or(rest.len());
                    self.keep(&rest[..n]);
                    at += n;
                    match end.map(|n| rest[n]) {
                        None => {}
                        Some(b'"') => {
                            self.lex = Lex::Between;
                            at += 1;
                            if key {
                                self.key = self.short().map_or(Key::Other, Key::of);
                                self.want_key = false;
                            } else if self.other == 0 {
                                self.string();
                            }
                        }
                        Some(_) => {
                            self.lex = Lex::Escape { key };
                            at += 1;
                        }
                    }
                }
                Lex::Escape { key } => {
                    // No word of interest has an escape: make it longer than any of them.
                    self.length += WORD;
                    self.lex = Lex::Text { key };
                    at += 1;
                }
                Lex::Word => {
                    let byte = input[at];
                    if byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.') {
                        self.keep(&input[at..=at]);
                        at += 1;
                    } else {
                        self.lex = Lex::Between;
                        self.scalar();
                    }
                }
                Lex::Between => {
                    self.between(input[at]);
                    at += 1;
                }
            }
        }
    }

    /// Ends the document and starts the next.
    pub(crate) fn take(&mut self) -> Found {
        if self.lex == Lex::Word {
            self.scalar();
        }
        std::mem::take(self).found
    }

    fn between(&mut self, byte: u8) {
        match byte {
            b'"' => {
                self.lex = Lex::Text { key: self.want_key && self.other == 0 };
                self.length = 0;
            }
            b'{' | b'[' => self.open(byte == b'{'),
            b'}' | b']' => {
                if self.other > 0 {
                    self.other -= 1;
                } else {
                    self.depth = self.depth.saturating_sub(1);
                }
                self.want_key = false;
            }
            b',' => self.want_key = true,
            b'0'..=b'9' | b'-' | b'a'..=b'z' if self.other == 0 => {
                self.lex = Lex::Word;
                self.length = 0;
                self.keep(&[byte]);
            }
            _ => {}
        }
    }

    fn place(&self) -> Place {
        if self.depth == 0 { Place::Root } else { self.places[self.depth - 1] }
    }

    fn open(&mut self, object: bool) {
        if self.other > 0 {
            self.other += 1;
            return;
        }
        let place = match (self.place(), self.key, object) {
            (Place::Root, _, true) => Place::Top,
            (Place::Top, Key::Choices, false) => Place::Choices,
            (Place::Choices, _, true) => {
                self.found.choices = true;
                Place::Choice
            }
            (Place::Choice, Key::Delta | Key::Message, true) | (Place::Top, Key::Delta, true) => Place::Delta,
            (Place::Choice, Key::TokenIds, false) => {
                self.found.token_ids.get_or_insert(0);
                Place::TokenIds
            }
            (Place::Delta, Key::ToolCalls, false) => Place::ToolCalls,
            (Place::Top, Key::Wrapper | Key::Message, true) => Place::Wrapper,
            (Place::Top | Place::Wrapper, Key::Usage, true) => Place::Usage,
            (Place::Usage, Key::Details, true) => Place::Details,
            (Place::Top | Place::Wrapper, Key::Error, true) => {
                self.found.error = true;
                Place::Error
            }
            (place, _, _) => {
                self.found.content |= place == Place::ToolCalls;
                self.other = 1;
                return;
            }
        };
        if self.depth == DEPTH {
            self.other = 1;
            return;
        }
        self.places[self.depth] = place;
        self.depth += 1;
        self.want_key = object;
        self.key = Key::Other;
    }

    fn keep(&mut self, bytes: &[u8]) {
        if self.length < WORD {
            let n = bytes.len().min(WORD - self.length);
            self.word[self.length..self.length + n].copy_from_slice(&bytes[..n]);
        }
        self.length += bytes.len();
    }

    fn short(&self) -> Option<&[u8]> {
        self.word.get(..self.length)
    }

    fn string(&mut self) {
        let filled = self.length > 0;
        match (self.place(), self.key) {
            (Place::Choice | Place::Delta, Key::Text) | (Place::Top, Key::Delta) => {
                self.found.content |= filled
            }
            (Place::Delta, Key::Role) => self.found.role = true,
            (Place::Choice, Key::FinishReason) => {
                let aborted = matches!(self.short(), Some(b"abort" | b"error"));
                self.found.finish = if aborted { Finish::Aborted } else { Finish::Done };
            }
            (Place::Top, Key::Error) => self.found.error = true,
            (Place::Top, Key::Object) => self.found.error |= self.short() == Some(b"error"),
            _ => {}
        }
    }

    fn scalar(&mut self) {
        let (place, key) = (self.place(), self.key);
        if place == Place::TokenIds {
            self.found.token_ids = self.found.token_ids.map(|n| n + 1);
            return;
        }
        let number =
            self.short().and_then(|word| std::str::from_utf8(word).ok()).and_then(|word| word.parse().ok());
        let Some(number) = number else { return };
        let usage = &mut self.found.usage;
        match (place, key) {
            (Place::Usage, Key::Prompt) => usage.prompt = Some(number),
            (Place::Usage, Key::Output) => usage.output = Some(number),
            (Place::Details, Key::Cached) => usage.cached = Some(number),
            (Place::Error | Place::Top, Key::Code) => self.found.error_code = Some(number),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probe(document: &str) -> Found {
        let mut probe = Probe::default();
        probe.feed(document.as_bytes());
        probe.take()
    }

    #[test]
    fn completion_chunk_as_vllm_sends_it() {
        let found = probe(
            r#"{"id":"cmpl-rid-2","object":"text_completion","created":1795158682,"model":"tiny","choices":[{"index":0,
            "text":" 6\"78","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":[1465, 3]}]}"#,
        );
        assert_eq!((found.choices, found.content, found.tokens()), (true, true, 2));
        assert_eq!((found.finish, found.error), (Finish::Open, false));
    }

    #[test]
    fn chat_chunks_count_what_carries_a_token() {
        let chunk = |delta: &str, finish: &str| {
            probe(&format!(r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":{finish}}}]}}"#))
                .tokens()
        };
        assert_eq!(chunk(r#"{"role":"assistant","content":""}"#, "null"), 0);
        assert_eq!(chunk(r#"{"role":"assistant","content":"a"}"#, "null"), 1);
        assert_eq!(chunk(r#"{"content":""}"#, "null"), 1);
        assert_eq!(chunk(r#"{"reasoning_content":"hm","content":null}"#, "null"), 1);
        assert_eq!(chunk(r#"{"role":"assistant","tool_calls":[{"function":{"arguments":"{"}}]}"#, "null"), 1);
        assert_eq!(chunk(r#"{"role":"assistant","tool_calls":[]}"#, "null"), 0);
        assert_eq!(chunk("{}", r#""stop""#), 0);
        assert_eq!(chunk(r#"{"content":"z"}"#, r#""length""#), 1);
        assert_eq!(probe(r#"{"choices":[],"usage":{"prompt_tokens":3}}"#).tokens(), 0);
    }

    #[test]
    fn usage_is_found_wherever_it_stands_and_only_there() {
        let usage = probe(
            r#"{"choices":[{"message":{"content":"\"usage\":{\"prompt_tokens\":9}","usage":{"prompt_tokens":8}}}],
            "usage":{"prompt_tokens":64,"total_tokens":70,"completion_tokens":6,"prompt_tokens_details":{"audio_tokens":null,"cached_tokens":32}}}"#,
        )
        .usage;
        assert_eq!(usage, Usage { prompt: Some(64), cached: Some(32), output: Some(6) });
        let usage = probe(r#"{"response":{"usage":{"input_tokens":5,"input_tokens_details":{"cached_tokens":0},"output_tokens":2}}}"#).usage;
        assert_eq!(usage, Usage { prompt: Some(5), cached: Some(0), output: Some(2) });
        assert_eq!(probe(r#"{"usage":null,"x":[{"usage":{"prompt_tokens":1}}]}"#).usage, Usage::default());
    }

    #[test]
    fn errors_and_aborts() {
        let busy = probe(r#"{"error": {"message": "The engine is currently busy", "code": 503}}"#);
        assert_eq!((busy.error, busy.error_code), (true, Some(503)));
        let old = probe(r#"{"object":"error","message":"too long","code":400}"#);
        assert_eq!((old.error, old.error_code), (true, Some(400)));
        assert!(!probe(r#"{"id":"1","error":null,"choices":[]}"#).error);
        assert_eq!(probe(r#"{"choices":[{"finish_reason":"abort"}]}"#).finish, Finish::Aborted);
        assert_eq!(probe(r#"{"choices":[{"finish_reason":"tool_calls"}]}"#).finish, Finish::Done);
    }

    #[test]
    fn garbage_and_depth_bombs_find_nothing() {
        assert_eq!(probe("}}}]]]{\"choices\":[[[{}}}"), Found::default());
        let bomb = format!("{}{}", "[".repeat(100_000), "{\"usage\":{".repeat(1000));
        assert_eq!(probe(&bomb), Found::default());
        assert_eq!(probe("[DONE]"), Found::default());
    }
}

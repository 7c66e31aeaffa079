//! A probe that reads the few values a router needs from an engine's JSON, byte by byte: no tree,
//! no buffer.
//!
//! The probe does not validate: in malformed JSON it finds fewer values.

/// How a generation ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Finish {
    /// No known reason seen.
    #[default]
    Open,
    /// By itself, for another reason.
    Done,
    /// At its limit of tokens: `length`, `max_tokens` or `max_output_tokens`.
    AtLimit,
    /// By itself: `stop`.
    Stopped,
    /// With a call of a tool: `tool_calls`.
    CalledTools,
    /// By the engine: `abort` or `error`. In Anthropic's API, vLLM gives an aborted message no
    /// `stop_reason`.
    Aborted,
}

/// Largest token count of one answer: more than any model's context. A higher count is an engine
/// error.
pub const MAX_TOKENS: u64 = 1 << 24;

/// Token counts of a `usage` object; each `None` if absent or null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// `prompt_tokens` or `input_tokens`. In Anthropic's API, `input_tokens` leaves out the tokens
    /// that its two counts of the cache have; they are added.
    pub prompt: Option<u64>,
    /// `prompt_tokens_details.cached_tokens` (or `input_tokens_details`), or
    /// `cache_read_input_tokens`.
    pub cached: Option<u64>,
    /// `completion_tokens` or `output_tokens`.
    pub output: Option<u64>,
}

impl Usage {
    /// Returns the counts without impossible values, and whether all were possible.
    pub fn plausible(self) -> (Self, bool) {
        let bounded = |count: Option<u64>| count.filter(|&count| count <= MAX_TOKENS);
        let prompt = bounded(self.prompt);
        let most = prompt.unwrap_or(MAX_TOKENS);
        let cached = bounded(self.cached).filter(|&cached| cached <= most);
        let kept = Self { prompt, cached, output: bounded(self.output) };
        (kept, kept == self)
    }
}

/// Values found in one JSON document (a plain answer, or the data of one SSE event).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// `choices` has an element.
    pub choices: bool,
    /// It has a list `choices`: it is a completion's.
    pub completion: bool,
    /// It is an event of type `ping`.
    pub ping: bool,
    /// It is an event that opens a response before the engine has computed anything:
    /// `response.created`, `response.queued` or `response.in_progress`. Not so of a response in the
    /// background: its client may leave from then on.
    pub opening: bool,
    /// It is an object with a member.
    pub named: bool,
    /// Some choice carries a part of the answer: text, reasoning, tool calls, audio and so on.
    pub content: bool,
    /// Some choice's delta names a role.
    pub role: bool,
    /// Number of `token_ids` over all choices, if the engine lists them.
    pub token_ids: Option<u64>,
    /// The last `finish_reason`.
    pub finish: Finish,
    /// The document is an error object.
    pub error: bool,
    /// The error's numeric `code`. Anthropic's errors have none: the status that its `type` means,
    /// if that is a failure of the engine.
    pub error_code: Option<u64>,
    /// The last usage.
    pub usage: Usage,
}

impl Found {
    /// Output tokens that the document counts as, for an event of a stream. Engines withhold
    /// incomplete UTF-8. So an event with empty text counts too, unless it only opens or ends a
    /// choice.
    pub fn tokens(&self) -> u64 {
        match self.token_ids {
            Some(n) => n,
            None if self.content => 1,
            None => u64::from(self.choices && !self.role && self.finish == Finish::Open),
        }
    }

    /// Whether an event of a stream carries a part of the answer, its end or an error. Engines and
    /// proxies send other events to keep a connection alive. Events of other APIs than completions
    /// count, except `ping`, empty ones and those that only open a response.
    pub fn progress(&self) -> bool {
        let part = if self.completion {
            self.content || self.token_ids.is_some_and(|n| n > 0)
        } else {
            self.named && !self.ping && !self.opening
        };
        part || self.finish != Finish::Open || self.error
    }

    /// Whether it is a message of Anthropic's API, or an event of it, that the engine aborted.
    pub(crate) fn aborted_message(&self) -> bool {
        self.finish == Finish::Aborted && !self.completion
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
    Incomplete,
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
    StopReason,
    IncompleteDetails,
    Reason,
    Usage,
    Prompt,
    Output,
    Details,
    Cached,
    CacheRead,
    CacheCreation,
    Error,
    Code,
    Object,
    Type,
    Background,
}

impl Key {
    fn of(word: &[u8]) -> Self {
        match word {
            b"choices" => Key::Choices,
            b"delta" => Key::Delta,
            b"message" => Key::Message,
            b"response" => Key::Wrapper,
            b"text" | b"content" | b"reasoning" | b"reasoning_content" | b"refusal" => Key::Text,
            b"thinking" | b"partial_json" => Key::Text,
            b"token_ids" => Key::TokenIds,
            b"tool_calls" => Key::ToolCalls,
            b"role" => Key::Role,
            b"finish_reason" => Key::FinishReason,
            b"stop_reason" => Key::StopReason,
            b"incomplete_details" => Key::IncompleteDetails,
            b"reason" => Key::Reason,
            b"usage" => Key::Usage,
            b"prompt_tokens" | b"input_tokens" => Key::Prompt,
            b"completion_tokens" | b"output_tokens" => Key::Output,
            b"prompt_tokens_details" | b"input_tokens_details" => Key::Details,
            b"cached_tokens" => Key::Cached,
            b"cache_read_input_tokens" => Key::CacheRead,
            b"cache_creation_input_tokens" => Key::CacheCreation,
            b"error" => Key::Error,
            b"code" => Key::Code,
            b"object" => Key::Object,
            b"type" => Key::Type,
            b"background" => Key::Background,
            _ => Key::Other,
        }
    }
}

/// The `type` of a document, as far as it matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Type {
    #[default]
    Other,
    Ping,
    /// A whole message.
    Message,
    /// The event with the end of a message.
    MessageDelta,
    /// An event that opens a response.
    Opening,
}

impl Type {
    fn of(word: &[u8]) -> Self {
        match word {
            b"ping" => Type::Ping,
            b"message" => Type::Message,
            b"message_delta" => Type::MessageDelta,
            b"response.created" | b"response.queued" | b"response.in_progress" => Type::Opening,
            _ => Type::Other,
        }
    }
}

/// The `stop_reason` of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StopReason {
    #[default]
    Absent,
    Null,
    Given,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lex {
    Between,
    Text { key: bool },
    Escape { key: bool },
    Word,
}

const WORD: usize = 32;
/// Deepest nesting of known places: Top, Choices, Choice, Delta, ToolCalls.
const DEPTH: usize = 6;

/// The probe. Feed it a document in any pieces, then call [`Probe::take`] for the values found.
#[derive(Debug)]
pub(crate) struct Probe {
    places: [Place; DEPTH],
    depth: usize,
    /// Nesting depth inside an unknown place.
    other: u64,
    lex: Lex,
    want_key: bool,
    key: Key,
    word: [u8; WORD],
    /// Length of the string or word so far; bytes beyond `WORD` are counted but not kept.
    length: usize,
    /// Prompt tokens of the last usage that its `input_tokens` leaves out.
    cache_tokens: u64,
    kind: Type,
    stop_reason: StopReason,
    /// It is a response in the background.
    background: bool,
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
            cache_tokens: 0,
            kind: Type::Other,
            stop_reason: StopReason::Absent,
            background: false,
            found: Found::default(),
        }
    }
}

impl Probe {
    pub(crate) fn feed(&mut self, input: &[u8]) {
        let mut at = 0;
        while at < input.len() {
            let rest = &input[at..];
            at += match self.lex {
                Lex::Between => self.between(rest),
                Lex::Text { key } => self.text(key, rest),
                Lex::Escape { key } => {
                    // No known word has an escape: make this word longer than any known word.
                    self.length += WORD;
                    self.lex = Lex::Text { key };
                    1
                }
                Lex::Word => self.letters(rest),
            };
        }
    }

    /// Reads on in a string, up to the end of `rest`. Returns the bytes read.
    fn text(&mut self, key: bool, rest: &[u8]) -> usize {
        let end = text_end(rest);
        let n = end.unwrap_or(rest.len());
        let part = &rest[..n];
        match end {
            None => {
                self.keep(part);
                return n;
            }
            Some(_) if rest[n] == b'\\' => {
                self.keep(part);
                self.lex = Lex::Escape { key };
            }
            Some(_) => {
                self.lex = Lex::Between;
                self.whole(part, |probe, word, length| match (key, probe.other) {
                    (true, _) => {
                        probe.found.named = true;
                        probe.key = word.map_or(Key::Other, Key::of);
                        probe.want_key = false;
                    }
                    (false, 0) => probe.string(word, length),
                    // Inside a part that the probe does not know: a list of contents, audio.
                    _ => probe.found.content |= length > 0 && probe.in_completions_delta(),
                });
            }
        }
        n + 1
    }

    /// Reads on in a number or name, up to the end of `rest`. Returns the bytes read.
    fn letters(&mut self, rest: &[u8]) -> usize {
        let word = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
        match rest.iter().position(|b| !word(b)) {
            None => {
                self.keep(rest);
                rest.len()
            }
            Some(n) => {
                self.lex = Lex::Between;
                self.whole(&rest[..n], |probe, word, _| probe.scalar(word));
                n
            }
        }
    }

    /// Calls `then` with the word that ends with `part` (`None` if longer than `WORD`) and its
    /// length.
    fn whole(&mut self, part: &[u8], then: impl FnOnce(&mut Self, Option<&[u8]>, usize)) {
        if self.length == 0 {
            return then(self, Some(part).filter(|part| part.len() <= WORD), part.len());
        }
        self.keep(part);
        let word = self.word;
        then(self, word.get(..self.length), self.length);
    }

    /// Ends the document and starts the next.
    pub(crate) fn take(&mut self) -> Found {
        if self.lex == Lex::Word {
            self.letters(b" ");
        }
        let Self { cache_tokens, kind, stop_reason, background, mut found, .. } = std::mem::take(self);
        if cache_tokens > 0 {
            found.usage.prompt = found.usage.prompt.map(|tokens| tokens.saturating_add(cache_tokens));
        }
        found.ping = kind == Type::Ping;
        found.opening = kind == Type::Opening && !background;
        // Other objects may be of the type `message`, too, but they report no output tokens.
        let aborted = match kind {
            Type::Message => stop_reason != StopReason::Given && found.usage.output.is_some(),
            Type::MessageDelta => stop_reason == StopReason::Null,
            _ => false,
        };
        let ended = kind == Type::MessageDelta && stop_reason == StopReason::Given;
        if (aborted || ended) && !found.completion && found.finish == Finish::Open {
            found.finish = if aborted { Finish::Aborted } else { Finish::Done };
        }
        found
    }

    fn between(&mut self, rest: &[u8]) -> usize {
        if self.other > 0 {
            // Numbers and names of an unknown place. Its end resets `want_key`.
            let mut n = 0;
            while n < rest.len() && !matches!(rest[n], b'"' | b'{' | b'[' | b'}' | b']') {
                n += 1;
            }
            if n > 0 {
                return n;
            }
        }
        let byte = rest[0];
        match byte {
            b'"' => {
                let key = self.want_key && self.other == 0;
                self.lex = Lex::Text { key };
                self.length = 0;
                return 1 + self.text(key, &rest[1..]);
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
            b'0'..=b'9' | b'-' | b'a'..=b'z' => {
                self.lex = Lex::Word;
                self.length = 0;
                return self.letters(rest);
            }
            _ => {}
        }
        1
    }

    fn place(&self) -> Place {
        if self.depth == 0 { Place::Root } else { self.places[self.depth - 1] }
    }

    fn in_completions_delta(&self) -> bool {
        self.found.completion && self.place() == Place::Delta
    }

    fn open(&mut self, object: bool) {
        if self.other > 0 {
            self.other += 1;
            return;
        }
        let place = match (self.place(), self.key, object) {
            (Place::Root, _, true) => Place::Top,
            (Place::Top, Key::Choices, false) => {
                self.found.completion = true;
                Place::Choices
            }
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
            (Place::Top | Place::Wrapper, Key::Usage, true) => {
                self.cache_tokens = 0;
                Place::Usage
            }
            (Place::Usage, Key::Details, true) => Place::Details,
            (Place::Top | Place::Wrapper, Key::IncompleteDetails, true) => Place::Incomplete,
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

    fn string(&mut self, word: Option<&[u8]>, length: usize) {
        match (self.place(), self.key) {
            (Place::Choice | Place::Delta, Key::Text) | (Place::Top, Key::Delta) => {
                self.found.content |= length > 0
            }
            (Place::Delta, Key::Role) => self.found.role = true,
            _ if self.in_completions_delta() => self.found.content |= length > 0,
            (Place::Choice, Key::FinishReason) => {
                self.found.finish = match word {
                    Some(b"abort" | b"error") => Finish::Aborted,
                    Some(b"stop") => Finish::Stopped,
                    Some(b"length") => Finish::AtLimit,
                    Some(b"tool_calls") => Finish::CalledTools,
                    _ => Finish::Done,
                };
            }
            // Anthropic's messages, whole and as events. OpenAI's choices have a key of this name
            // for stop strings.
            (Place::Top | Place::Delta, Key::StopReason) => {
                self.stop_reason = StopReason::Given;
                if !self.found.completion && word == Some(b"max_tokens") {
                    self.found.finish = Finish::AtLimit;
                }
            }
            // OpenAI's responses.
            (Place::Incomplete, Key::Reason) if word == Some(b"max_output_tokens") => {
                self.found.finish = Finish::AtLimit;
            }
            (Place::Top, Key::Error) => self.found.error = true,
            (Place::Top, Key::Object) => self.found.error |= word == Some(b"error"),
            (Place::Top, Key::Type) => self.kind = word.map_or(Type::Other, Type::of),
            (Place::Error, Key::Type) => {
                let code = match word {
                    Some(b"internal_error" | b"api_error") => 500,
                    Some(b"overloaded_error") => 503,
                    _ => return,
                };
                self.found.error_code.get_or_insert(code);
            }
            _ => {}
        }
    }

    fn scalar(&mut self, word: Option<&[u8]>) {
        let place = self.place();
        let Found { token_ids, error_code, usage, .. } = &mut self.found;
        let value =
            || word.and_then(|word| std::str::from_utf8(word).ok()).and_then(|word| word.parse().ok());
        let number = match (place, self.key) {
            (Place::Usage, Key::CacheRead | Key::CacheCreation) => {
                let tokens: Option<u64> = value();
                self.cache_tokens = self.cache_tokens.saturating_add(tokens.unwrap_or(0));
                if self.key == Key::CacheRead {
                    usage.cached = tokens.or(usage.cached);
                }
                return;
            }
            (Place::TokenIds, _) => {
                *token_ids = token_ids.map(|n| n + 1);
                return;
            }
            (Place::Top | Place::Delta, Key::StopReason) if word == Some(b"null") => {
                self.stop_reason = StopReason::Null;
                return;
            }
            (Place::Wrapper, Key::Background) => {
                self.background = word == Some(b"true");
                return;
            }
            (Place::Usage, Key::Prompt) => &mut usage.prompt,
            (Place::Usage, Key::Output) => &mut usage.output,
            (Place::Details, Key::Cached) => &mut usage.cached,
            (Place::Error | Place::Top, Key::Code) => error_code,
            _ => return,
        };
        *number = value().or(*number);
    }
}

/// Position of the first quote or backslash. Most strings are short: comparing 16 bytes at once
/// costs less than a call of `memchr2`.
fn text_end(rest: &[u8]) -> Option<usize> {
    const ONES: u128 = u128::MAX / 0xff;
    // Sets the top bit of the first zero byte, and maybe of some bytes after it.
    let zeros = |x: u128| x.wrapping_sub(ONES) & !x & (ONES << 7);
    let Some((first, after)) = rest.split_first_chunk() else { return memchr::memchr2(b'"', b'\\', rest) };
    let x = u128::from_le_bytes(*first);
    let found = zeros(x ^ (ONES * b'"' as u128)) | zeros(x ^ (ONES * b'\\' as u128));
    if found != 0 {
        return Some(found.trailing_zeros() as usize / 8);
    }
    memchr::memchr2(b'"', b'\\', after).map(|n| n + first.len())
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
    fn cached_tokens_of_messages_are_prompt_tokens() {
        let usage = r#"{"input_tokens":5,"output_tokens":7,"cache_creation_input_tokens":2,"cache_read_input_tokens":40}"#;
        let expected = Usage { prompt: Some(47), cached: Some(40), output: Some(7) };
        assert_eq!(probe(&format!(r#"{{"type":"message","usage":{usage}}}"#)).usage, expected);
        assert_eq!(
            probe(&format!(r#"{{"type":"message_start","message":{{"usage":{usage}}}}}"#)).usage,
            expected
        );
        let null = r#"{"usage":{"cache_read_input_tokens":null,"input_tokens":5}}"#;
        assert_eq!(probe(null).usage, Usage { prompt: Some(5), ..Usage::default() });
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
        assert_eq!(chunk(r#"{"role":"assistant","content":[{"type":"text","text":"a"}]}"#, "null"), 1);
        assert_eq!(chunk(r#"{"role":"assistant","content":null,"audio":{},"x":[[],{}]}"#, "null"), 0);
        assert_eq!(chunk("{}", r#""stop""#), 0);
        assert_eq!(chunk(r#"{"content":"z"}"#, r#""length""#), 1);
        assert_eq!(probe(r#"{"choices":[],"usage":{"prompt_tokens":3}}"#).tokens(), 0);
    }

    #[test]
    fn events_of_messages_count_what_carries_a_token() {
        let delta = |delta: &str| {
            probe(&format!(r#"{{"index":0,"type":"content_block_delta","delta":{delta}}}"#)).tokens()
        };
        assert_eq!(delta(r#"{"type":"text_delta","text":"a"}"#), 1);
        assert_eq!(delta(r#"{"type":"thinking_delta","thinking":"hm"}"#), 1);
        assert_eq!(delta(r#"{"type":"input_json_delta","partial_json":"{"}"#), 1);
        assert_eq!(delta(r#"{"type":"signature_delta","signature":"c2ln"}"#), 0);
        for event in [
            r#"{"type":"message_start","message":{"type":"message","content":[],"stop_reason":null}}"#,
            r#"{"index":0,"type":"content_block_start","content_block":{"type":"thinking","thinking":""}}"#,
            r#"{"index":1,"type":"content_block_start","content_block":{"type":"tool_use","id":"t","name":"n","input":{}}}"#,
            r#"{"index":1,"type":"content_block_stop"}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#,
            r#"{"type":"message_stop"}"#,
        ] {
            assert_eq!(probe(event).tokens(), 0, "{event}");
        }
    }

    #[test]
    fn counts_that_cannot_be_true_are_dropped() {
        let usage = |prompt, cached, output| Usage { prompt, cached, output };
        let most = Some(MAX_TOKENS);
        assert_eq!(usage(most, most, most).plausible(), (usage(most, most, most), true));
        assert_eq!(Usage::default().plausible(), (Usage::default(), true));
        let more = Some(MAX_TOKENS + 1);
        assert_eq!(usage(more, more, more).plausible(), (Usage::default(), false));
        assert_eq!(usage(Some(8), Some(9), Some(1)).plausible(), (usage(Some(8), None, Some(1)), false));
        assert_eq!(usage(None, Some(9), None).plausible(), (usage(None, Some(9), None), true));
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
        assert_eq!(probe(r#"{"choices":[{"finish_reason":"tool_calls"}]}"#).finish, Finish::CalledTools);
        assert_eq!(probe(r#"{"choices":[{"finish_reason":"stop"}]}"#).finish, Finish::Stopped);
        assert_eq!(probe(r#"{"choices":[{"finish_reason":"length"}]}"#).finish, Finish::AtLimit);
        assert_eq!(probe(r#"{"choices":[{"finish_reason":"content_filter"}]}"#).finish, Finish::Done);
    }

    #[test]
    fn limits_are_seen_in_each_api() {
        for at_limit in [
            r#"{"type":"message","content":[{"type":"text","text":"a"}],"stop_reason":"max_tokens","stop_sequence":null}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":"max_tokens","stop_sequence":null},"usage":{"output_tokens":1}}"#,
            r#"{"object":"response","status":"incomplete","incomplete_details":{"reason":"max_output_tokens"}}"#,
            r#"{"type":"response.incomplete","response":{"incomplete_details":{"reason":"max_output_tokens"},"usage":{}}}"#,
        ] {
            assert_eq!(probe(at_limit).finish, Finish::AtLimit, "{at_limit}");
        }
        for other in [
            r#"{"type":"message","content":[{"stop_reason":"max_tokens"}],"stop_reason":"end_turn"}"#,
            r#"{"type":"message_start","message":{"stop_reason":null}}"#,
            r#"{"type":"message_start","message":{"type":"message","stop_reason":null,"usage":{"output_tokens":0}}}"#,
            r#"{"object":"response","incomplete_details":null}"#,
            r#"{"object":"response","incomplete_details":{"reason":"content_filter"}}"#,
            r#"{"choices":[{"delta":{"stop_reason":"max_tokens"},"stop_reason":"max_tokens"}]}"#,
        ] {
            assert_eq!(probe(other).finish, Finish::Open, "{other}");
        }
    }

    /// vLLM leaves the reason out of a whole message: its null fields are not sent.
    #[test]
    fn a_message_without_a_reason_was_aborted() {
        for aborted in [
            r#"{"id":"m","type":"message","content":[],"usage":{"output_tokens":1}}"#,
            r#"{"stop_reason":null,"usage":{"output_tokens":1},"type":"message"}"#,
            r#"{"type":"message_delta","delta":{"stop_reason":null,"stop_sequence":null},"usage":{"output_tokens":1}}"#,
            r#"{"delta":{"stop_reason":null},"type":"message_delta"}"#,
        ] {
            assert_eq!(probe(aborted).finish, Finish::Aborted, "{aborted}");
            assert!(probe(aborted).aborted_message(), "{aborted}");
        }
        for other in [
            r#"{"type":"message","stop_reason":"end_turn","usage":{"output_tokens":1}}"#,
            r#"{"type":"message","role":"user","content":[]}"#,
            r#"{"type":"message_delta","delta":{},"usage":{"output_tokens":1}}"#,
            r#"{"type":"content_block_delta","delta":{"text":"a","stop_reason":null}}"#,
            r#"{"type":"message_delta","choices":[],"delta":{"stop_reason":null}}"#,
            r#"{"choices":[{"delta":{"stop_reason":null},"stop_reason":null}]}"#,
        ] {
            assert_eq!(probe(other).finish, Finish::Open, "{other}");
        }
        assert!(!probe(r#"{"choices":[{"finish_reason":"abort"}]}"#).aborted_message());
        let end = probe(r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#);
        assert_eq!(end.finish, Finish::Done);
    }

    #[test]
    fn the_type_of_an_error_without_a_code_means_a_status() {
        let code = |error: &str| probe(&format!(r#"{{"type":"error","error":{error}}}"#)).error_code;
        assert_eq!(code(r#"{"type":"internal_error","message":"dead"}"#), Some(500));
        assert_eq!(code(r#"{"type":"api_error","message":"dead"}"#), Some(500));
        assert_eq!(code(r#"{"type":"overloaded_error","message":"full"}"#), Some(503));
        assert_eq!(code(r#"{"type":"invalid_request_error","message":"too long"}"#), None);
        assert_eq!(code(r#"{"type":"api_error","code":400}"#), Some(400));
        assert_eq!(code(r#"{"code":400,"type":"api_error"}"#), Some(400));
    }

    #[test]
    fn events_that_only_keep_a_connection_alive_are_no_progress() {
        for event in [
            r#"{"choices":[]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":2}}"#,
            r#"{"choices":[{"text":"","finish_reason":null}]}"#,
            r#"{"choices":[{"text":"","token_ids":[],"finish_reason":null}]}"#,
            r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#,
            r#"{"choices":[{"delta":{"role":"assistant","content":[],"audio":{},"function_call":null,"x":""},"id":"a"}]}"#,
            r#"{"choices":[{"delta":{},"logprobs":{"content":["a"]},"filter":{"text":"safe"}}]}"#,
            r#"{"type":"ping"}"#,
            r#"{"type":"response.created","sequence_number":0,"response":{"status":"in_progress","background":false}}"#,
            r#"{"response":{"status":"queued"},"type":"response.queued"}"#,
            r#"{"type":"response.in_progress","response":{"background":null}}"#,
            "{}",
            "[]",
            "x",
            "",
        ] {
            assert!(!probe(event).progress(), "{event}");
        }
        for event in [
            r#"{"choices":[{"text":"a"}]}"#,
            r#"{"choices":[{"text":"","token_ids":[7]}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}"#,
            r#"{"choices":[{"delta":{"audio":{"id":"a","data":"QUJD"}}}]}"#,
            r#"{"choices":[{"delta":{"content":[{"type":"thinking","thinking":[{"text":"hm"}]}]}}]}"#,
            r#"{"choices":[{"delta":{"content":["\n"]}}]}"#,
            r#"{"choices":[{"delta":{"function_call":{"arguments":"{"}}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_details":[{"type":"reasoning.text","text":"hm"}]}}]}"#,
            r#"{"choices":[{"delta":{"annotation":"a"}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            r#"{"error":{"message":"m"}}"#,
            r#"{"type":"content_block_delta","delta":{"text":"a"}}"#,
            r#"{"type":"response.output_text.delta","delta":"a"}"#,
            r#"{"type":"response.created","response":{"background":true}}"#,
            r#"{"type":"response.output_item.added","item":{"type":"message"}}"#,
        ] {
            assert!(probe(event).progress(), "{event}");
        }
    }

    #[test]
    fn the_end_of_a_text_is_found_wherever_it_is() {
        for (end, filler) in [(b'"', b'a'), (b'\\', b'!'), (b'"', b'#'), (b'\\', b']'), (b'"', 0xff)] {
            for at in 0..40 {
                let mut text = vec![filler; 40];
                assert_eq!(text_end(&text), None);
                text[at] = end;
                assert_eq!(text_end(&text), Some(at));
                text[at + 1..].fill(b'"');
                assert_eq!(text_end(&text), Some(at));
            }
        }
    }

    #[test]
    fn garbage_and_depth_bombs_find_nothing() {
        let list = Found { completion: true, named: true, ..Found::default() };
        assert_eq!(probe("}}}]]]{\"choices\":[[[{}}}"), list);
        let bomb = format!("{}{}", "[".repeat(100_000), "{\"usage\":{".repeat(1000));
        assert_eq!(probe(&bomb), Found::default());
        assert_eq!(probe("[DONE]"), Found::default());
    }
}

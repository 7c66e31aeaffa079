//! Clients' request heads, and the parts of them that go to an engine.
use crate::WireError;
use crate::head::{end_to_end, tokens};
use memchr::{memchr, memchr_iter};
use std::mem::MaybeUninit;

/// Longest request id that is passed on, in bytes.
pub const REQUEST_ID_LIMIT: usize = 256;
/// Most fields of a head, and most fields that `connection` names. vLLM reads as many fields.
pub const REQUEST_FIELDS_LIMIT: usize = 256;
/// Longest name of a field that an error repeats.
const NAME_SHOWN: usize = 64;

/// Header fields that belong to one connection, that the router sets itself, or that only a router
/// may send.
const DROPPED: [&[u8]; 27] = [
    b"accept-encoding",
    b"connection",
    b"content-encoding",
    b"content-length",
    b"endpoint-load-metrics-format",
    b"expect",
    b"host",
    b"keep-alive",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"x-data-parallel-host-port",
    b"x-data-parallel-rank",
    b"x-encoder-hosts-ports",
    b"x-kv-cache-source-host-port",
    b"x-llm-d-data-parallel-host-port",
    b"x-llm-d-data-parallel-rank",
    b"x-llm-d-encoder-hosts-ports",
    b"x-llm-d-kv-cache-source-host-port",
    b"x-llm-d-prefiller-host-port",
    b"x-prefiller-host-port",
    b"x-request-id",
    b"x-tenant",
    b"x-vllm-priority",
];

/// Prefixes of fields that clients never send to engines: the router's own.
const OWN_PREFIX: &[u8] = b"x-lmetric-";
const FORWARDED_PREFIX: &[u8] = b"x-forwarded-";
const FORWARDED_FOR: &[u8] = b"x-forwarded-for";

/// Fields that carry a client's key. They reach the engine unless the router has keys of its own,
/// or a key for the engine.
const CREDENTIALS: [&[u8]; 3] = [b"authorization", b"x-api-key", b"api-key"];

fn credential(name: &[u8]) -> bool {
    matches!(name.len(), 7 | 9 | 13) && CREDENTIALS.iter().any(|other| other.eq_ignore_ascii_case(name))
}

/// The fields of a request. If a field occurs twice, the first one counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    /// Fields for the engine, each with its line end.
    pub lines: Vec<u8>,
    /// `x-request-id`, at most [`REQUEST_ID_LIMIT`] bytes; `None` also if it has other characters
    /// than visible ASCII.
    pub request_id: Option<Vec<u8>>,
    /// `x-session-id`, which is also passed on.
    pub session: Option<Vec<u8>>,
    /// `x-session-final`, which is also passed on: whether the request is its session's last one.
    pub session_final: Option<Vec<u8>>,
    /// `authorization`, which is passed on unless the router has keys of its own.
    pub authorization: Option<Vec<u8>>,
    /// `x-api-key`, as `authorization`.
    pub x_api_key: Option<Vec<u8>>,
    /// `api-key`, as `authorization`.
    pub api_key: Option<Vec<u8>>,
    /// `x-vllm-priority`, which is passed on unless the router sets a priority.
    pub priority: Option<Vec<u8>>,
    /// `x-tenant`, which is for the router only.
    pub tenant: Option<Vec<u8>>,
    /// `host`.
    pub host: Option<Vec<u8>>,
    /// All `x-forwarded-for` fields, as one list.
    pub forwarded_for: Option<Vec<u8>>,
    /// The other fields in which proxies describe their client, each with its line end.
    pub forwarded: Vec<u8>,
}

/// The sender of a request: a client, or a trusted proxy that describes its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// IP address; empty for clients of a unix socket.
    pub address: Vec<u8>,
    /// The connection uses TLS.
    pub secure: bool,
    /// Its forwarding fields are true.
    pub trusted: bool,
}

fn starts(name: &[u8], prefix: &[u8]) -> bool {
    name.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

/// Whether a proxy describes its client in this field.
fn forwards(name: &[u8]) -> bool {
    match name.len() {
        9 => name.eq_ignore_ascii_case(b"forwarded") || name.eq_ignore_ascii_case(b"x-real-ip"),
        _ => starts(name, FORWARDED_PREFIX),
    }
}

impl Fields {
    /// Sorts fields given as name and trimmed value. `own_keys`: credentials are for the router,
    /// not the engine.
    pub fn sort<'a>(fields: impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone, own_keys: bool) -> Self {
        let mut found = Self::default();
        let mut named: Vec<&[u8]> = Vec::new();
        for (name, value) in fields.clone() {
            let slot = match name.len() {
                4 if name.eq_ignore_ascii_case(b"host") => &mut found.host,
                7 if name.eq_ignore_ascii_case(b"api-key") => &mut found.api_key,
                8 if name.eq_ignore_ascii_case(b"x-tenant") => &mut found.tenant,
                9 if name.eq_ignore_ascii_case(b"x-api-key") => &mut found.x_api_key,
                10 if name.eq_ignore_ascii_case(b"connection") => {
                    named.extend(
                        tokens(value)
                            .filter(|token| !plain(token) && !end_to_end(token) && !credential(token)),
                    );
                    continue;
                }
                12 if name.eq_ignore_ascii_case(b"x-request-id") => &mut found.request_id,
                12 if name.eq_ignore_ascii_case(b"x-session-id") => &mut found.session,
                13 if name.eq_ignore_ascii_case(b"authorization") => &mut found.authorization,
                15 if name.eq_ignore_ascii_case(b"x-session-final") => &mut found.session_final,
                15 if name.eq_ignore_ascii_case(b"x-vllm-priority") => &mut found.priority,
                _ => continue,
            };
            slot.get_or_insert_with(|| value.to_vec());
        }
        if let Some(id) = &mut found.request_id {
            id.truncate(REQUEST_ID_LIMIT);
        }
        // Spaces and control characters do not belong in logs and records.
        found.request_id.take_if(|id| id.is_empty() || !id.iter().all(u8::is_ascii_graphic));
        let among = |list: &[&[u8]], name: &[u8]| list.iter().any(|other| other.eq_ignore_ascii_case(name));
        found.lines.reserve(fields.clone().map(|(name, value)| name.len() + value.len() + 4).sum());
        for (name, value) in fields {
            if forwards(name) {
                found.forward(name, value);
                continue;
            }
            let ours = (own_keys && credential(name)) || starts(name, OWN_PREFIX);
            if !ours && !among(&DROPPED, name) && !among(&named, name) {
                add_line(&mut found.lines, name, value);
            }
        }
        found
    }

    /// Keeps a field in which a proxy describes its client.
    fn forward(&mut self, name: &[u8], value: &[u8]) {
        if !name.eq_ignore_ascii_case(FORWARDED_FOR) {
            add_line(&mut self.forwarded, name, value);
            return;
        }
        let list = self.forwarded_for.get_or_insert_default();
        if !list.is_empty() {
            list.extend_from_slice(b", ");
        }
        list.extend_from_slice(value);
    }

    /// Writes the lines that describe the client to the engine. From a trusted proxy: its own
    /// lines, with the proxy's address added. From others: what the connection shows.
    pub fn write_forwarded(&self, peer: &Peer, out: &mut Vec<u8>) {
        let protocol: &[u8] = if peer.secure { b"https" } else { b"http" };
        let before = self.forwarded_for.as_deref().filter(|list| peer.trusted && !list.is_empty());
        if let Some(before) = before.filter(|_| !peer.address.is_empty()) {
            let parts: [&[u8]; 5] = [b"x-forwarded-for: ", before, b", ", &peer.address, b"\r\n"];
            parts.iter().for_each(|part| out.extend_from_slice(part));
        } else if let Some(address) = before.or(Some(&peer.address)).filter(|one| !one.is_empty()) {
            add_line(out, FORWARDED_FOR, address);
        }
        let said: &[u8] = if peer.trusted { &self.forwarded } else { b"" };
        out.extend_from_slice(said);
        let has = |name: &[u8]| said.split_inclusive(|byte| *byte == b'\n').any(|line| starts(line, name));
        if !has(b"x-forwarded-proto:") {
            add_line(out, b"x-forwarded-proto", protocol);
        }
        if let Some(host) = self.host.as_deref().filter(|_| !has(b"x-forwarded-host:")) {
            add_line(out, b"x-forwarded-host", host);
        }
    }
}

fn add_line(lines: &mut Vec<u8>, name: &[u8], value: &[u8]) {
    for part in [name, b": ", value, b"\r\n"] {
        lines.extend_from_slice(part);
    }
}

/// The first of these lines with a name, without the name.
pub fn field<'a>(lines: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    lines.split(|byte| *byte == b'\n').find_map(|line| {
        let (found, value) = line.split_at_checked(name.len())?;
        let value = value.strip_prefix(b":").filter(|_| found.eq_ignore_ascii_case(name))?;
        Some(value.trim_ascii())
    })
}

/// Kind of a request, by the framing of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A POST over HTTP/1.1 of a path, with one `host` and one `content-length`, and no other
    /// expectations.
    Plain,
    /// Another request with a known length.
    Framed,
    /// A request over HTTP/1.1 whose body is chunked; [`Request::length`] is 0.
    Chunked,
    /// A request without a known end: CONNECT, or contradicting fields; [`Request::length`] is 0.
    Other,
}

/// The head of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// How the end of the request is found.
    pub kind: Kind,
    /// Bytes of the head.
    pub start: usize,
    /// Bytes of the body.
    pub length: u64,
    /// The request target.
    pub target: Vec<u8>,
    /// The client did not ask to close the connection.
    pub keep_alive: bool,
    /// The header fields.
    pub fields: Fields,
}

impl Request {
    /// Reads the head at the start of `input`: `None` if incomplete.
    ///
    /// # Errors
    /// [`WireError::Malformed`] if the head is invalid, or if `connection` names more than
    /// [`REQUEST_FIELDS_LIMIT`] fields, [`WireError::HeadTooLarge`] if it is longer than `limit`
    /// bytes or has more than [`REQUEST_FIELDS_LIMIT`] fields. No error repeats a value.
    pub fn read(input: &[u8], own_keys: bool, limit: usize) -> Result<Option<Self>, WireError> {
        let mut fields = [MaybeUninit::uninit(); REQUEST_FIELDS_LIMIT];
        let mut request = httparse::Request::new(&mut []);
        let head = &input[..input.len().min(limit)];
        let start = match request.parse_with_uninit_headers(head, &mut fields) {
            Ok(httparse::Status::Partial) if input.len() < limit => return Ok(None),
            Ok(httparse::Status::Partial) => return Err(too_long(head)),
            Ok(httparse::Status::Complete(n)) => n,
            Err(httparse::Error::TooManyHeaders) => return Err(too_many(head)),
            Err(error) => return Err(WireError::malformed(error.to_string())),
        };
        // httparse accepts a bare line feed as a line's end. Other parsers may not, and would see
        // another request.
        let head = &input[..start];
        if memchr_iter(b'\n', head).any(|at| at == 0 || head[at - 1] != b'\r') {
            return Err(WireError::malformed("a line feed without carriage return"));
        }
        let method = request.method.unwrap_or("");
        let target = request.path.unwrap_or("").as_bytes();
        let (mut kind, mut length, mut keep_alive) = (Kind::Framed, None, true);
        let (mut hosts, mut seen, mut twice) = (0, 0, 0);
        let (mut codings, mut named) = (0, 0);
        if method == "CONNECT" {
            kind = Kind::Other;
        } else if method == "POST"
            && request.version == Some(1)
            && target.first() == Some(&b'/')
            && target.iter().all(|byte| IN_URI[usize::from(*byte)])
        {
            kind = Kind::Plain;
        }
        for field in request.headers.iter() {
            let (name, value) = (field.name, field.value.trim_ascii());
            let single = single(name);
            twice |= seen & single;
            seen |= single;
            match name.len() {
                4 if name.eq_ignore_ascii_case("host") => {
                    hosts += 1;
                    let sound = value.iter().all(|byte| IN_HOST[usize::from(*byte)]);
                    kind = if kind == Kind::Plain && !sound { Kind::Framed } else { kind };
                }
                6 | 7 | 16
                    if name.eq_ignore_ascii_case("expect")
                        || name.eq_ignore_ascii_case("upgrade")
                        || name.eq_ignore_ascii_case("content-encoding") =>
                {
                    kind = if kind == Kind::Plain { Kind::Framed } else { kind };
                }
                17 if name.eq_ignore_ascii_case("transfer-encoding") => {
                    codings += 1;
                    let chunked = request.version == Some(1) && value.eq_ignore_ascii_case(b"chunked");
                    kind = if chunked && kind != Kind::Other { Kind::Chunked } else { Kind::Other };
                }
                10 if name.eq_ignore_ascii_case("connection") => {
                    for token in tokens(value) {
                        keep_alive &= !token.eq_ignore_ascii_case(b"close");
                        named += 1;
                    }
                }
                14 if name.eq_ignore_ascii_case("content-length") => {
                    match crate::head::length_value(value).ok().filter(|_| length.is_none()) {
                        Some(n) => length = Some(n),
                        None => kind = Kind::Other,
                    }
                }
                _ => {}
            }
        }
        // Each field is compared with each of these names.
        if named > REQUEST_FIELDS_LIMIT {
            return Err(WireError::malformed(format!(
                "connection names more than {REQUEST_FIELDS_LIMIT} fields"
            )));
        }
        if kind == Kind::Plain && (length.is_none() || hosts != 1 || twice != 0) {
            kind = Kind::Framed;
        }
        if kind == Kind::Chunked && (length.is_some() || codings != 1) {
            kind = Kind::Other;
        }
        let pairs = request.headers.iter().map(|field| (field.name.as_bytes(), field.value.trim_ascii()));
        Ok(Some(Self {
            kind,
            start,
            length: if matches!(kind, Kind::Plain | Kind::Framed) { length.unwrap_or(0) } else { 0 },
            target: target.to_vec(),
            keep_alive,
            fields: Fields::sort(pairs, own_keys),
        }))
    }
}

/// Returns the error for a head of too many bytes, which names its longest field.
fn too_long(head: &[u8]) -> WireError {
    let lines = head.split(|byte| *byte == b'\n').enumerate();
    let (at, line) = lines.max_by_key(|(_, line)| line.len()).unwrap_or_default();
    let part = if at == 0 { "the request line".to_string() } else { shown(line) };
    WireError::HeadTooLarge(format!(
        "the request head has more than {} bytes; {part} has {}",
        head.len(),
        line.trim_ascii().len()
    ))
}

/// Returns the error for a head of too many fields, which names the first one above the limit.
fn too_many(head: &[u8]) -> WireError {
    let line = head.split(|byte| *byte == b'\n').nth(REQUEST_FIELDS_LIMIT + 1).unwrap_or_default();
    WireError::HeadTooLarge(format!(
        "the request head has more than {REQUEST_FIELDS_LIMIT} fields; {} is the first one above",
        shown(line)
    ))
}

/// Returns how an error names the field of this line. It shows no value, and no long or odd name.
fn shown(line: &[u8]) -> String {
    let name = line.split(|byte| *byte == b':').next().filter(|name| name.len() < line.len());
    match name.and_then(|name| std::str::from_utf8(name).ok()) {
        Some(name)
            if name.len() <= NAME_SHOWN
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte)) =>
        {
            format!("the field \"{name}\"")
        }
        _ => "one field".to_string(),
    }
}

/// Whether a client's key is among these fields.
pub fn has_credentials(fields: &Fields) -> bool {
    fields.authorization.is_some() || fields.x_api_key.is_some() || fields.api_key.is_some()
}

/// Returns the lines of header fields without a client's keys.
pub fn without_credentials(lines: &[u8]) -> Vec<u8> {
    let named = |line: &&[u8]| line.split(|byte| *byte == b':').next().is_some_and(credential);
    lines.split_inclusive(|byte| *byte == b'\n').filter(|line| !named(line)).collect::<Vec<_>>().concat()
}

/// The target without its query.
pub fn path(target: &[u8]) -> &[u8] {
    &target[..memchr(b'?', target).unwrap_or(target.len())]
}

/// Bytes that a path or query may hold (RFC 3986, 3.3 and 3.4).
static IN_URI: [bool; 256] = of_bytes(b"!$%&'()*+,-./:;=?@_~");
/// Bytes that `host` may hold (RFC 3986, 3.2.2 and 3.2.3).
static IN_HOST: [bool; 256] = of_bytes(b"!$%&'()*+,-.:;=[]_~");

/// Makes a table of letters, digits and these bytes.
const fn of_bytes(more: &[u8]) -> [bool; 256] {
    let mut table = [false; 256];
    let mut at = 0;
    while at < 256 {
        table[at] = (at as u8).is_ascii_alphanumeric();
        at += 1;
    }
    at = 0;
    while at < more.len() {
        table[more[at] as usize] = true;
        at += 1;
    }
    table
}

/// Returns a bit for each field that must not occur twice and has no other meaning here; 0 for
/// other fields. aiohttp refuses requests with two of them.
fn single(name: &str) -> u8 {
    let (other, bit) = match name.len() {
        4 => ("etag", 1),
        6 => ("server", 2),
        10 => ("user-agent", 4),
        12 if name.as_bytes()[0] | 0x20 == b'c' => ("content-type", 8),
        12 => ("max-forwards", 16),
        13 => ("content-range", 32),
        16 => ("content-location", 64),
        _ => return 0,
    };
    if name.eq_ignore_ascii_case(other) { bit } else { 0 }
}

fn plain(token: &[u8]) -> bool {
    token.eq_ignore_ascii_case(b"keep-alive") || token.eq_ignore_ascii_case(b"close")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 64 << 10;

    fn read(text: &str) -> Request {
        Request::read(text.as_bytes(), false, LIMIT).unwrap().expect("complete")
    }

    fn kind(first: &str, fields: &str) -> (Kind, u64) {
        let request = read(&format!("{first}\r\nhost: x\r\n{fields}\r\n"));
        (request.kind, request.length)
    }

    #[test]
    fn only_plain_posts_are_plain() {
        let post = "POST /v1/completions?a=1 HTTP/1.1";
        assert_eq!(kind(post, "Content-Length: 12\r\nConnection: keep-alive\r\n"), (Kind::Plain, 12));
        assert_eq!(kind(post, "content-length: 0\r\n"), (Kind::Plain, 0));
        assert_eq!(kind(post, ""), (Kind::Framed, 0));
        assert_eq!(kind(post, "content-length: 12\r\nexpect: 100-continue\r\n"), (Kind::Framed, 12));
        assert_eq!(kind(post, "content-length: 12\r\ncontent-encoding: gzip\r\n"), (Kind::Framed, 12));
        assert_eq!(kind("PUT / HTTP/1.1", "content-length: 12\r\n"), (Kind::Framed, 12));
        assert_eq!(kind("GET / HTTP/1.1", ""), (Kind::Framed, 0));
        for first in
            ["POST http://x/a HTTP/1.1", "POST a HTTP/1.1", "POST /a?\"b\" HTTP/1.1", "POST /\u{e9} HTTP/1.1"]
        {
            assert_eq!(kind(first, "content-length: 12\r\n"), (Kind::Framed, 12), "{first}");
        }
        for twice in [
            "Content-Type",
            "user-agent",
            "server",
            "etag",
            "max-forwards",
            "content-range",
            "content-location",
        ] {
            let field = format!("{twice}: a\r\n");
            assert_eq!(kind(post, &format!("content-length: 1\r\n{field}")), (Kind::Plain, 1), "{field}");
            let fields = format!("content-length: 1\r\n{field}{}", field.to_ascii_lowercase());
            assert_eq!(kind(post, &fields), (Kind::Framed, 1), "{fields}");
        }
        for hosts in ["", "host: x\r\nhost: x\r\n", "host: a/b\r\n", "host: u@a\r\n", "host: a b\r\n"] {
            let request = read(&format!("{post}\r\n{hosts}content-length: 12\r\n\r\n"));
            assert_eq!((request.kind, request.length), (Kind::Framed, 12), "{hosts:?}");
        }
        let literal = read("POST / HTTP/1.1\r\ncontent-length: 1\r\nHost: [::1]:80\r\n\r\n");
        assert_eq!(literal.kind, Kind::Plain);
        for (first, fields) in [
            (post, "content-length: 12\r\ncontent-length: 12\r\n"),
            (post, "content-length: +1\r\n"),
            (post, "content-length: 1\r\ntransfer-encoding: chunked\r\n"),
            (post, "transfer-encoding: chunked\r\ncontent-length: 1\r\n"),
            (post, "transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n"),
            (post, "transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n"),
            (post, "transfer-encoding: gzip, chunked\r\n"),
            ("POST / HTTP/1.0", "transfer-encoding: chunked\r\n"),
            ("CONNECT x:1 HTTP/1.1", "transfer-encoding: chunked\r\n"),
            ("CONNECT x:1 HTTP/1.1", "content-length: 1\r\n"),
            ("CONNECT x:1 HTTP/1.1", ""),
        ] {
            assert_eq!(kind(first, fields), (Kind::Other, 0), "{first} {fields:?}");
        }
        assert_eq!(kind(post, "content-length: 1\r\nupgrade: h2c\r\n"), (Kind::Framed, 1));
        assert_eq!(kind("POST / HTTP/1.0", "content-length: 1\r\n"), (Kind::Framed, 1));
        for fields in ["", "expect: 100-continue\r\n", "upgrade: h2c\r\n", "content-encoding: gzip\r\n"] {
            for method in [post, "GET / HTTP/1.1"] {
                let fields = format!("Transfer-Encoding: Chunked\r\n{fields}");
                assert_eq!(kind(method, &fields), (Kind::Chunked, 0), "{fields}");
            }
        }
    }

    #[test]
    fn what_two_readers_could_read_differently_is_refused() {
        for bad in [
            "POST / HTTP/1.1\nhost: x\r\n\r\n",
            "POST / HTTP/1.1\r\nhost: x\n\r\n",
            "POST / HTTP/1.1\r\nhost : x\r\n\r\n",
            "POST / HTTP/1.1\r\na: b\r\n c\r\n\r\n",
            "POST  / HTTP/1.1\r\n\r\n",
            "POST / HTTP/1.1\r\na: b\0\r\n\r\n",
            "SSH-2.0-OpenSSH\r\n\r\n",
        ] {
            assert!(Request::read(bad.as_bytes(), false, LIMIT).is_err(), "{bad:?}");
        }
    }

    /// Bugs 7: long heads are read, and above the limits the error names a field and no value.
    #[test]
    fn heads_up_to_the_limits_are_read() {
        let with =
            |fields: &str| format!("POST /?q={} HTTP/1.1\r\nhost: x\r\n{fields}\r\n", "q".repeat(9_000));
        let long = with(&format!("cookie: {}\r\n", "c".repeat(50_000)));
        let many = with(&"a: b\r\n".repeat(REQUEST_FIELDS_LIMIT - 1));
        for head in [&long, &many] {
            assert!(Request::read(head.as_bytes(), false, LIMIT).is_ok_and(|read| read.is_some()));
        }
        assert!(Request::read(long.as_bytes(), false, long.len()).is_ok_and(|read| read.is_some()));
        let refused =
            |head: &str, limit| Request::read(head.as_bytes(), false, limit).unwrap_err().to_string();
        let of_bytes = "the request head has more than";
        assert_eq!(
            refused(&long, long.len() - 1),
            format!("{of_bytes} {} bytes; the field \"cookie\" has 50008", long.len() - 1)
        );
        assert_eq!(refused(&long, 8_000), format!("{of_bytes} 8000 bytes; the request line has 8000"));
        assert_eq!(
            refused(&with(&("a: b\r\n".repeat(REQUEST_FIELDS_LIMIT - 1) + "x-one: secret\r\n")), LIMIT),
            format!("{of_bytes} 256 fields; the field \"x-one\" is the first one above")
        );
        for odd in ["secret secret", &format!("{}:", "n".repeat(65)), "a\u{e9}: b"] {
            let head = format!("GET / HTTP/1.1\r\n{odd}{}", "s".repeat(70_000));
            assert!(!refused(&head, LIMIT).contains("sss"), "{odd}");
        }
    }

    /// Bugs 8: all credentials reach the engine, or none.
    #[test]
    fn all_credentials_are_treated_alike() {
        let head = "POST / HTTP/1.1\r\nAuthorization: Bearer a\r\nX-Api-Key: b\r\nConnection: x-api-key\r\nApi-Key: c\r\nx-own: d\r\n\r\n";
        let read = |own_keys| Request::read(head.as_bytes(), own_keys, LIMIT).unwrap().unwrap().fields;
        let (passed, kept) = (read(false), read(true));
        assert_eq!(passed.lines, b"Authorization: Bearer a\r\nX-Api-Key: b\r\nApi-Key: c\r\nx-own: d\r\n");
        assert_eq!(kept.lines, b"x-own: d\r\n");
        assert_eq!(without_credentials(&passed.lines), b"x-own: d\r\n");
        let given = (kept.authorization, kept.x_api_key, kept.api_key);
        assert_eq!(given, (Some(b"Bearer a".to_vec()), Some(b"b".to_vec()), Some(b"c".to_vec())));
    }

    #[test]
    fn closing_is_heard_and_named_fields_are_the_connections() {
        let request = read(
            "POST /a?b HTTP/1.1\r\nConnection: Close, X-Hop, accept\r\nx-hop: 1\r\nX-Own:  2 \r\nAccept: a\r\n\r\nbody",
        );
        assert!(!request.keep_alive);
        assert_eq!(request.fields.lines, b"X-Own: 2\r\nAccept: a\r\n");
        assert_eq!(
            (request.target.as_slice(), path(&request.target)),
            (b"/a?b".as_slice(), b"/a".as_slice())
        );
    }

    /// Each field is compared with each name.
    #[test]
    fn connection_names_as_many_fields_as_a_head_may_have() {
        let named = |count: usize, more: &str| {
            let names = (0..count).map(|at| format!(",, x-{at}")).collect::<String>();
            let head = format!("GET / HTTP/1.1\r\nConnection: {names}\r\n{more}X-255: a\r\nX-Own: 1\r\n\r\n");
            Request::read(head.as_bytes(), false, LIMIT).map(|read| read.unwrap().fields.lines)
        };
        assert_eq!(named(REQUEST_FIELDS_LIMIT, "").unwrap(), b"X-Own: 1\r\n");
        let said = "malformed: connection names more than 256 fields";
        for (count, more) in [(REQUEST_FIELDS_LIMIT + 1, ""), (REQUEST_FIELDS_LIMIT, "Connection: close\r\n")]
        {
            assert_eq!(named(count, more).unwrap_err().to_string(), said);
        }
        assert!(named(0, &format!("Connection: {}\r\n", ",".repeat(LIMIT / 2))).is_ok());
    }

    #[test]
    fn lines_without_credentials() {
        let lines = b"X-Own: authorization: 1\r\nAUTHORIZATION: Bearer a\r\nAuthorization-Info: b\r\nauthorization: c\r\n";
        assert_eq!(without_credentials(lines), b"X-Own: authorization: 1\r\nAuthorization-Info: b\r\n");
        assert_eq!(without_credentials(b""), b"");
    }

    /// The same rules, implemented one at a time and without regard for speed.
    fn naive(fields: &[(String, String)], own_keys: bool) -> Fields {
        let lower: Vec<(String, String)> =
            fields.iter().map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_string())).collect();
        let first =
            |name: &str| lower.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone().into_bytes());
        let connection: Vec<String> = lower
            .iter()
            .filter(|(n, _)| n == "connection")
            .flat_map(|(_, v)| {
                v.split(',').map(|token| token.trim().to_ascii_lowercase()).collect::<Vec<_>>()
            })
            .filter(|token| {
                token != "close"
                    && token != "keep-alive"
                    && token != "content-type"
                    && !credential(token.as_bytes())
            })
            .collect();
        let mut lines = String::new();
        for ((name, _), (low, value)) in fields.iter().zip(&lower) {
            if DROPPED.contains(&low.as_bytes())
                || connection.contains(low)
                || own_keys && ["authorization", "x-api-key", "api-key"].contains(&low.as_str())
                || low.starts_with("x-lmetric-")
                || forwarding(low)
            {
                continue;
            }
            lines += &format!("{name}: {value}\r\n");
        }
        let proxies = lower.iter().filter(|(n, _)| n == "x-forwarded-for").map(|(_, value)| value.as_str());
        let mut forwarded = String::new();
        for ((name, _), (low, value)) in fields.iter().zip(&lower) {
            if forwarding(low) && low != "x-forwarded-for" {
                forwarded += &format!("{name}: {value}\r\n");
            }
        }
        Fields {
            lines: lines.into_bytes(),
            host: first("host"),
            forwarded: forwarded.into_bytes(),
            // An empty list before the first value has no comma.
            forwarded_for: first("x-forwarded-for").map(|_| {
                let mut list = String::new();
                for value in proxies {
                    list += if list.is_empty() { "" } else { ", " };
                    list += value;
                }
                list.into_bytes()
            }),
            request_id: first("x-request-id")
                .map(|id| id[..id.len().min(256)].to_vec())
                .filter(|id| !id.is_empty() && id.iter().all(|byte| (33..127).contains(byte))),
            session: first("x-session-id"),
            session_final: first("x-session-final"),
            authorization: first("authorization"),
            x_api_key: first("x-api-key"),
            api_key: first("api-key"),
            priority: first("x-vllm-priority"),
            tenant: first("x-tenant"),
        }
    }

    fn forwarding(low: &str) -> bool {
        ["forwarded", "x-real-ip"].contains(&low) || low.starts_with("x-forwarded-")
    }

    #[test]
    fn a_trusted_proxy_describes_its_client_and_others_only_themselves() {
        let head = "POST / HTTP/1.1\r\nHost: a:1\r\nX-Forwarded-For: 1.1.1.1\r\nx-forwarded-for: 2.2.2.2\r\n\
            Forwarded: for=1.1.1.1\r\nX-Real-IP: 1.1.1.1\r\nX-Forwarded-Port: 9\r\nX-Lmetric-Decision: 1\r\nX-Own: 1\r\n\r\n";
        let fields = read(head).fields;
        assert_eq!(fields.lines, b"X-Own: 1\r\n");
        let written = |address: &str, secure, trusted| {
            let mut out = Vec::new();
            let address = address.as_bytes().to_vec();
            fields.write_forwarded(&Peer { address, secure, trusted }, &mut out);
            String::from_utf8(out).unwrap()
        };
        let own = "x-forwarded-proto: https\r\nx-forwarded-host: a:1\r\n";
        assert_eq!(written("9.9.9.9", true, false), format!("x-forwarded-for: 9.9.9.9\r\n{own}"));
        assert_eq!(written("", true, false), own);
        let said = "Forwarded: for=1.1.1.1\r\nX-Real-IP: 1.1.1.1\r\nX-Forwarded-Port: 9\r\n";
        let list = "x-forwarded-for: 1.1.1.1, 2.2.2.2";
        assert_eq!(written("9.9.9.9", true, true), format!("{list}, 9.9.9.9\r\n{said}{own}"));
        assert_eq!(written("", true, true), format!("{list}\r\n{said}{own}"));
        let full =
            read("POST / HTTP/1.1\r\nHost: a\r\nX-Forwarded-Proto: wss\r\nX-FORWARDED-HOST: b\r\n\r\n")
                .fields;
        let mut out = Vec::new();
        full.write_forwarded(&Peer { address: b"9.9.9.9".to_vec(), secure: false, trusted: true }, &mut out);
        assert_eq!(out, b"x-forwarded-for: 9.9.9.9\r\nX-Forwarded-Proto: wss\r\nX-FORWARDED-HOST: b\r\n");
    }

    /// llm-d's sidecar sends requests to the addresses in these fields, in both spellings.
    #[test]
    fn clients_do_not_steer_a_sidecar() {
        let names = [
            "x-prefiller-host-port",
            "x-encoder-hosts-ports",
            "x-kv-cache-source-host-port",
            "x-data-parallel-host-port",
            "x-data-parallel-rank",
        ];
        for name in names {
            for name in [name.to_string(), name.replacen("x-", "X-LLM-D-", 1)] {
                let head = format!("POST / HTTP/1.1\r\nHost: a\r\n{name}: 10.0.0.1:1\r\nX-Own: 1\r\n\r\n");
                assert_eq!(read(&head).fields.lines, b"X-Own: 1\r\n", "{name}");
            }
        }
    }

    #[test]
    fn fields_are_found_in_lines_by_their_whole_name() {
        let lines = b"X-Content-Type: a\r\nContent-Type-2: b\r\ncontent-TYPE:  c; d\r\nContent-Type: e\r\n";
        assert_eq!(super::field(lines, b"content-type"), Some(b"c; d".as_slice()));
        assert_eq!(super::field(lines, b"origin"), None);
        assert_eq!(super::field(b"", b"origin"), None);
    }

    fn field() -> impl Strategy<Value = (String, String)> {
        let known = prop::sample::select(
            DROPPED
                .iter()
                .map(|name| String::from_utf8_lossy(name).into_owned())
                .chain(
                    [
                        "api-key",
                        "authorization",
                        "content-type",
                        "forwarded",
                        "x-api-key",
                        "x-forwarded-for",
                        "x-forwarded-proto",
                        "x-lmetric-instance",
                        "x-own",
                        "x-real-ip",
                        "x-session-final",
                        "x-session-id",
                    ]
                    .map(String::from),
                )
                .filter(|name| name != "content-length")
                .collect::<Vec<_>>(),
        );
        let cased =
            (known, any::<bool>()).prop_map(|(name, up)| if up { name.to_ascii_uppercase() } else { name });
        let value = prop_oneof![
            "[ -~]{0,20}",
            "(close|keep-alive|x-own|X-Own|te)(, ?(x-own|Close|a|Content-Type)){0,2}",
            "a{250,260}"
        ];
        (prop_oneof![cased, "[a-zA-Z-]{1,12}"], value)
    }

    proptest! {
        #[test]
        fn fields_are_sorted_as_the_rules_say(fields in prop::collection::vec(field(), 0..12), own_keys: bool) {
            let mut text = "POST /x HTTP/1.1\r\n".to_string();
            for (name, value) in &fields {
                text += &format!("{name}: {value}\r\n");
            }
            text += "\r\n";
            let request = Request::read(text.as_bytes(), own_keys, LIMIT).unwrap().expect("complete");
            prop_assert_eq!(request.fields, naive(&fields, own_keys));
        }

        #[test]
        fn a_head_is_read_when_it_is_whole_and_no_sooner(
            fields in prop::collection::vec(field(), 0..6), body in "[ -~]{0,30}", cut in 0.0..1.0f64,
        ) {
            let mut head = format!("POST /x HTTP/1.1\r\ncontent-length: {}\r\n", body.len());
            for (name, value) in &fields {
                head += &format!("{name}: {value}\r\n");
            }
            head += "\r\n";
            let whole = format!("{head}{body}");
            let once = Request::read(whole.as_bytes(), false, LIMIT).unwrap().expect("complete");
            prop_assert_eq!(once.start, head.len());
            let cut = (cut * whole.len() as f64) as usize;
            let part = Request::read(&whole.as_bytes()[..cut], false, LIMIT).unwrap();
            prop_assert_eq!(part, (cut >= head.len()).then_some(once));
        }

        #[test]
        fn no_bytes_bring_it_down(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Request::read(&bytes, true, LIMIT);
            let _ = Request::read(&[b"POST /x HTTP/1.1\r\n".as_slice(), &bytes].concat(), true, LIMIT);
        }
    }
}

//! Response heads: parsed, checked, and rewritten for the client.
use crate::WireError;
use crate::body::Framing;
use std::mem::MaybeUninit;

/// Header fields of one connection, and fields that the router sets itself; never passed on.
const DROPPED: [&str; 14] = [
    "connection",
    "content-length",
    "endpoint-load-metrics",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-lmetric-decision",
    "x-lmetric-instance",
    "x-lmetric-prefill",
    "x-lmetric-weights",
    "x-request-id",
];

/// Header fields for the far end, so that `connection` cannot name them (RFC 9110, 7.6.1). Without
/// them, the body changes its meaning, or the request its sender.
const END_TO_END: [&[u8]; 23] = [
    b"accept",
    b"accept-language",
    b"authorization",
    b"cache-control",
    b"content-disposition",
    b"content-encoding",
    b"content-language",
    b"content-range",
    b"content-type",
    b"cookie",
    b"date",
    b"location",
    b"retry-after",
    b"server",
    b"set-cookie",
    b"traceparent",
    b"tracestate",
    b"user-agent",
    b"vary",
    b"www-authenticate",
    b"x-session-final",
    b"x-session-id",
    b"x-vllm-priority",
];

/// Whether `connection` cannot name this field.
pub(crate) fn end_to_end(name: &[u8]) -> bool {
    END_TO_END.iter().any(|other| other.eq_ignore_ascii_case(name))
}

/// Most fields of a head, and most fields that `connection` names.
const MAX_HEADERS: usize = 128;

/// The elements of a list in a field, except empty ones.
pub(crate) fn tokens(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii).filter(|token| !token.is_empty())
}

/// Whether a media type is one JSON document. A stream of documents (`application/x-ndjson`) is
/// not.
fn is_json(kind: &[u8]) -> bool {
    let suffix = kind.len().checked_sub(b"+json".len()).map(|at| &kind[at..]);
    [b"application/json".as_slice(), b"text/json"].iter().any(|json| json.eq_ignore_ascii_case(kind))
        || suffix.is_some_and(|suffix| suffix.eq_ignore_ascii_case(b"+json"))
}

/// A parsed response head.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) framing: Framing,
    pub(crate) keep_alive: bool,
    /// A stream of events that can be read. An error answer is none, whatever its type is.
    pub(crate) event_stream: bool,
    /// JSON that can be read.
    pub(crate) json: bool,
    /// The `content-encoding`, except `identity`: the values in the body cannot be read.
    pub(crate) coding: Option<String>,
    /// The `endpoint-load-metrics` header (ORCA), if the engine sent one.
    pub(crate) load: Option<String>,
    /// Status line and the fields to pass on, each with its line end.
    pub(crate) lines: Vec<u8>,
}

/// Reads the head at the start of `input`: `None` if incomplete, else the head and its length.
/// `bodiless`: the response answers HEAD.
pub(crate) fn parse(input: &[u8], bodiless: bool) -> Result<Option<(Head, usize)>, WireError> {
    let mut fields = [MaybeUninit::uninit(); MAX_HEADERS];
    let mut response = httparse::Response::new(&mut []);
    let parsed = httparse::ParserConfig::default().parse_response_with_uninit_headers(
        &mut response,
        input,
        &mut fields,
    );
    let length = match parsed {
        Ok(httparse::Status::Partial) => return Ok(None),
        Ok(httparse::Status::Complete(n)) => n,
        Err(error) => return Err(WireError::malformed(format!("head: {error}"))),
    };
    let status = response.code.unwrap_or(0);
    if !(100..=599).contains(&status) || status == 101 {
        return Err(WireError::malformed(format!("status {status}")));
    }
    let mut lines = Vec::with_capacity(length + 256);
    lines.extend_from_slice(format!("HTTP/1.1 {status} {}\r\n", response.reason.unwrap_or("")).as_bytes());
    let mut head = Head {
        status,
        framing: Framing::Close,
        keep_alive: response.version == Some(1),
        event_stream: false,
        json: false,
        coding: None,
        load: None,
        lines: Vec::new(),
    };
    let (mut chunked, mut content_length, mut named) = (false, None, Vec::new());
    for field in response.headers.iter() {
        let value = field.value.trim_ascii();
        match field.name.len() {
            10 if field.name.eq_ignore_ascii_case("connection") => {
                for token in tokens(value) {
                    if token.eq_ignore_ascii_case(b"close") {
                        head.keep_alive = false;
                    } else if token.eq_ignore_ascii_case(b"keep-alive") {
                        head.keep_alive = true;
                    } else if named.len() == MAX_HEADERS {
                        return Err(WireError::malformed(format!(
                            "connection names more than {MAX_HEADERS} fields"
                        )));
                    } else if !end_to_end(token) {
                        named.push(token);
                    }
                }
            }
            14 if field.name.eq_ignore_ascii_case("content-length") => {
                let n = length_value(value)?;
                if content_length.is_some_and(|other| other != n) {
                    return Err(WireError::malformed("two different content-length fields"));
                }
                content_length = Some(n);
            }
            17 if field.name.eq_ignore_ascii_case("transfer-encoding") => {
                if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                    let value = String::from_utf8_lossy(value);
                    return Err(WireError::malformed(format!(
                        "transfer-encoding {value:?}, expected \"chunked\""
                    )));
                }
                chunked = true;
            }
            12 if field.name.eq_ignore_ascii_case("content-type") => {
                let kind = value.split(|b| *b == b';').next().unwrap_or(value).trim_ascii();
                head.event_stream = kind.eq_ignore_ascii_case(b"text/event-stream");
                head.json = is_json(kind);
            }
            16 if field.name.eq_ignore_ascii_case("content-encoding")
                && !value.is_empty()
                && !value.eq_ignore_ascii_case(b"identity") =>
            {
                head.coding = Some(String::from_utf8_lossy(value).into_owned());
            }
            21 if field.name.eq_ignore_ascii_case("endpoint-load-metrics") => {
                head.load = Some(String::from_utf8_lossy(value).into_owned());
            }
            _ => {}
        }
    }
    if chunked && content_length.is_some() {
        return Err(WireError::malformed("both content-length and transfer-encoding"));
    }
    head.json &= head.coding.is_none();
    head.event_stream &= head.coding.is_none() && status < 400;
    for field in response.headers.iter() {
        let name = field.name;
        if DROPPED.iter().any(|dropped| dropped.eq_ignore_ascii_case(name))
            || named.iter().any(|token| token.eq_ignore_ascii_case(name.as_bytes()))
        {
            continue;
        }
        lines.extend_from_slice(name.as_bytes());
        lines.extend_from_slice(b": ");
        lines.extend_from_slice(field.value);
        lines.extend_from_slice(b"\r\n");
    }
    head.lines = lines;
    head.framing = match content_length {
        _ if bodiless || status == 204 || status == 304 || status < 200 => Framing::Length(0),
        _ if chunked => Framing::Chunked,
        Some(n) => Framing::Length(n),
        None => Framing::Close,
    };
    head.keep_alive &= head.framing != Framing::Close;
    Ok(Some((head, length)))
}

/// The number in a field of digits only: `str::parse` alone would accept a sign.
pub(crate) fn length_value(value: &[u8]) -> Result<u64, WireError> {
    let digits = !value.is_empty() && value.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(value).ok().filter(|_| digits);
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| WireError::malformed(format!("content-length {:?}", String::from_utf8_lossy(value))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(fields: &str) -> Result<Head, WireError> {
        let text = format!("HTTP/1.1 200 OK\r\n{fields}\r\n");
        parse(text.as_bytes(), false).map(|parsed| parsed.expect("complete").0)
    }

    #[test]
    fn reads_what_matters_and_drops_what_is_the_connections() {
        let head = head(
            "Content-Type: application/json; charset=utf-8\r\nContent-Length: 12\r\nConnection: keep-alive, X-Hop, content-type\r\n\
             X-Hop: 1\r\nX-Request-ID: engine\r\nServer: uvicorn\r\nendpoint-load-metrics: TEXT a=1\r\n",
        )
        .unwrap();
        assert_eq!((head.status, head.framing, head.keep_alive), (200, Framing::Length(12), true));
        assert!(head.json && !head.event_stream);
        assert_eq!(head.load.as_deref(), Some("TEXT a=1"));
        let lines = String::from_utf8(head.lines).unwrap();
        assert_eq!(
            lines,
            "HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nServer: uvicorn\r\n"
        );
    }

    #[test]
    fn only_one_document_is_json() {
        let json = |kind: &str| head(&format!("Content-Type: {kind}\r\n")).unwrap().json;
        for kind in ["application/json", "Text/JSON; charset=utf-8", "application/problem+JSON"] {
            assert!(json(kind), "{kind}");
        }
        for kind in ["application/x-ndjson", "application/jsonl", "application/json-seq", "json", "+jso", ""]
        {
            assert!(!json(kind), "{kind}");
        }
    }

    /// Each field is compared with each name.
    #[test]
    fn connection_names_as_many_fields_as_a_head_may_have() {
        let named = |count: usize| {
            let names = (0..count).map(|at| format!(", ,x-{at}")).collect::<String>();
            head(&format!("Connection: close{names}\r\nX-127: a\r\nX-Own: a\r\n"))
        };
        let lines = named(MAX_HEADERS).unwrap().lines;
        assert_eq!(lines, b"HTTP/1.1 200 OK\r\nX-Own: a\r\n");
        let error = named(MAX_HEADERS + 1).unwrap_err().to_string();
        assert_eq!(error, "malformed: connection names more than 128 fields");
        let each = format!("Connection: {}\r\n", "a,".repeat(MAX_HEADERS / 2));
        assert!(head(&each.repeat(3)).is_err());
    }

    #[test]
    fn a_coded_answer_and_an_error_are_no_readable_stream() {
        let read = |status: u16, field: &str| {
            let text =
                format!("HTTP/1.1 {status} X\r\nContent-Type: text/event-stream\r\n{field}Server: x\r\n\r\n");
            let head = parse(text.as_bytes(), false).unwrap().unwrap().0;
            (head.event_stream, head.coding.as_deref().unwrap_or("").to_owned())
        };
        assert_eq!(read(200, ""), (true, String::new()));
        assert_eq!(read(200, "Content-Encoding: identity\r\n"), (true, String::new()));
        assert_eq!(read(200, "Content-Encoding: gzip\r\n"), (false, "gzip".into()));
        assert_eq!(read(429, ""), (false, String::new()));
        let json = head("Content-Type: application/json\r\nContent-Encoding: br\r\n").unwrap();
        assert!(!json.json && json.lines.ends_with(b"Content-Encoding: br\r\n"));
    }

    #[test]
    fn ambiguous_framing_is_refused() {
        for bad in [
            "Content-Length: 1\r\nContent-Length: 2\r\n",
            "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
            "Transfer-Encoding: gzip, chunked\r\n",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
            "Content-Length: +1\r\n",
            "Content-Length: \r\n",
            "Content-Length: 99999999999999999999\r\n",
        ] {
            assert!(head(bad).is_err(), "{bad:?}");
        }
        assert!(head("Content-Length: 1\r\nContent-Length: 1\r\n").is_ok());
    }

    #[test]
    fn http_1_0_and_missing_lengths_close() {
        let (old, _) = parse(b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n", false).unwrap().unwrap();
        assert!(!old.keep_alive);
        let open = head("").unwrap();
        assert_eq!((open.framing, open.keep_alive), (Framing::Close, false));
        let (none, _) = parse(b"HTTP/1.1 204 No Content\r\n\r\n", false).unwrap().unwrap();
        assert_eq!((none.framing, none.keep_alive), (Framing::Length(0), true));
        assert!(parse(b"HTTP/1.1 200 OK\r\nContent-", false).unwrap().is_none());
        assert!(parse(b"SSH-2.0-OpenSSH\r\n\r\n", false).is_err());
    }
}

//! Whatever the cuts between pieces: the same facts, the same payload to the client, and never a panic.
use lmetric_wire::{Finish, HOLD_LIMIT, Scanner, Step, Usage, WireError};
use proptest::prelude::*;

/// All that can be told from outside after one response.
#[derive(Debug, Default, PartialEq)]
struct Outcome {
    status: u16,
    payload: Vec<u8>,
    tokens: u64,
    usage: Usage,
    finish: Finish,
    ended: bool,
    incomplete: bool,
    error: Option<Option<u64>>,
    failure: bool,
    keep_alive: bool,
}

struct Run {
    scanner: Scanner,
    outcome: Outcome,
    to_client: Vec<u8>,
    passed: usize,
}

/// Plays `response` cut at `cuts` through a scanner as the relay does; the client commits as soon as it may.
fn play(response: &[u8], cuts: &[usize], http11: bool, eof: bool) -> Run {
    let mut run =
        Run { scanner: Scanner::default(), outcome: Outcome::default(), to_client: Vec::new(), passed: 0 };
    run.scanner.begin(http11, true, false);
    let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut % (response.len() + 1)).collect();
    bounds.extend([0, response.len()]);
    bounds.sort_unstable();
    let mut committed = false;
    let pieces = bounds.windows(2).map(|w| Some(&response[w[0]..w[1]])).chain(eof.then_some(None));
    for piece in pieces {
        let stepped = match piece {
            Some(piece) => run.scanner.feed(piece),
            None if run.outcome.ended || run.outcome.incomplete => break,
            None => run.scanner.eof(),
        };
        let Ok(step) = stepped else {
            run.outcome.failure = true;
            break;
        };
        if step.error {
            run.outcome.error = Some(run.scanner.error_code());
        }
        if step.ready {
            assert!(!step.pass && !step.out && !committed);
            committed = true;
            run.to_client.extend_from_slice(run.scanner.commit(b"x-extra: 1\r\n", false));
        } else if step.pass {
            run.passed += 1;
            run.to_client.extend_from_slice(piece.unwrap_or_default());
        } else if step.out {
            run.to_client.extend_from_slice(run.scanner.take());
        }
        run.outcome.ended |= step.end;
        run.outcome.incomplete |= step.incomplete;
        if step.end || step.incomplete {
            break;
        }
    }
    run.outcome.status = run.scanner.status();
    run.outcome.tokens = run.scanner.tokens();
    run.outcome.usage = run.scanner.usage();
    run.outcome.finish = run.scanner.finish();
    if committed {
        run.outcome.payload = deframe(&run.to_client, run.outcome.ended);
    }
    run
}

/// The payload a strict client reads.
fn deframe(bytes: &[u8], ended: bool) -> Vec<u8> {
    let head = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a head") + 4;
    let lines = std::str::from_utf8(&bytes[..head]).expect("text").to_lowercase();
    assert!(lines.starts_with("http/1.1 200 ok\r\n") && lines.contains("x-extra: 1\r\n"));
    let mut rest = &bytes[head..];
    if !lines.contains("transfer-encoding: chunked") {
        return rest.to_vec();
    }
    let mut payload = Vec::new();
    loop {
        let Some(line) = rest.windows(2).position(|w| w == b"\r\n") else {
            assert!(rest.is_empty() && !ended, "cut inside a chunk");
            return payload;
        };
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
        payload.extend_from_slice(&rest[line + 2..line + 2 + size]);
        assert_eq!(&rest[line + 2 + size..line + 4 + size], b"\r\n");
        rest = &rest[line + 4 + size..];
        if size == 0 {
            assert!(rest.is_empty() && ended);
            return payload;
        }
    }
}

fn frame(head: &str, payload: &[u8], framing: usize, chunk: usize) -> Vec<u8> {
    let mut out = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n".to_vec();
    out.extend_from_slice(head.as_bytes());
    match framing {
        0 => out.extend_from_slice(format!("content-length: {}\r\n\r\n", payload.len()).as_bytes()),
        1 => out.extend_from_slice(b"\r\n"),
        _ => {
            out.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
            for piece in payload.chunks(chunk) {
                out.extend_from_slice(format!("{:X}\r\n", piece.len()).as_bytes());
                out.extend_from_slice(piece);
                out.extend_from_slice(b"\r\n");
            }
            out.extend_from_slice(b"0\r\n\r\n");
            return out;
        }
    }
    out.extend_from_slice(payload);
    out
}

/// A stream without comment lines, and without the blank lines that follow nothing else.
fn without_comments(payload: &str) -> String {
    let (mut kept, mut rest, mut bare) = (String::new(), payload, true);
    while let Some(at) = rest.find(['\n', '\r']) {
        let end = at + if rest[at..].starts_with("\r\n") { 2 } else { 1 };
        let (line, after) = rest.split_at(end);
        if !(line.starts_with(':') || (at == 0 && bare)) {
            kept += line;
        }
        bare = at == 0 || (bare && line.starts_with(':'));
        rest = after;
    }
    kept + if rest.starts_with(':') { "" } else { rest }
}

fn event() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[ -~]{0,12}".prop_map(|text| {
            let text = text.replace(['\\', '"'], "'");
            format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":null}}]}}\n\n")
        }),
        1 => Just("data:{\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\r\n\r\n".to_string()),
        2 => prop::sample::select(&[": keep-alive\n\n", ": a\n", ":\r\n\r\n", ": data: {}\r\r", "\n"][..]).prop_map(String::from),
        1 => Just("event: x\r\rdata: {\"choices\":[],\rdata: \"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3}}\r\r".to_string()),
        1 => Just("data: {\"choices\":[{\"text\":\"\",\"token_ids\":[1,2,3],\"finish_reason\":\"stop\"}]}\n\n".to_string()),
        1 => Just("data: {\"error\":{\"message\":\"busy\",\"code\":503}}\n\n".to_string()),
        1 => Just("data: [DONE]\n\n".to_string()),
        1 => "[ -~\n\r]{0,20}",
    ]
}

proptest! {
    #[test]
    fn streams_read_the_same_however_cut(
        events in prop::collection::vec(event(), 0..12),
        framing in 0usize..3, chunk in 1usize..90, http11: bool,
        cuts in prop::collection::vec(0usize..100_000, 0..12),
    ) {
        let payload = events.concat();
        let response = frame("content-type: text/event-stream; charset=utf-8\r\n", payload.as_bytes(), framing, chunk);
        let whole = play(&response, &[], http11, framing == 1);
        let cut = play(&response, &cuts, http11, framing == 1);
        prop_assert_eq!(&cut.outcome, &whole.outcome);
        let every: Vec<usize> = (0..response.len()).collect();
        prop_assert_eq!(&play(&response, &every, http11, framing == 1).outcome, &whole.outcome);
        prop_assert!(whole.outcome.ended != whole.outcome.incomplete);
        let dropped_up_to = |at: &usize| [without_comments(&payload[..*at]), payload[*at..].to_string()].concat();
        let ends = payload.match_indices(['\n', '\r']).map(|(at, _)| at + 1);
        let possible: Vec<String> = ends.chain([0]).map(|at| dropped_up_to(&at)).collect();
        let got = String::from_utf8(whole.outcome.payload).unwrap();
        if whole.outcome.ended {
            prop_assert!(possible.contains(&got), "{:?} of {:?}", got, payload);
        } else {
            prop_assert!(possible.iter().any(|whole| whole.starts_with(&got)));
        }
    }

    #[test]
    fn plain_answers_read_the_same_however_cut(
        text in "[ -~]{0,300}", framing in 0usize..3, chunk in 1usize..90, http11: bool,
        cuts in prop::collection::vec(0usize..100_000, 0..12),
    ) {
        let text = text.replace(['\\', '"'], "'");
        let payload = format!(
            "{{\"choices\":[{{\"text\":\"{text}\",\"finish_reason\":\"length\"}}],\"usage\":{{\"prompt_tokens\":12,\
             \"prompt_tokens_details\":{{\"cached_tokens\":8}},\"completion_tokens\":5}}}}"
        );
        let response = frame("content-type: application/json\r\n", payload.as_bytes(), framing, chunk);
        let run = play(&response, &cuts, http11, framing == 1);
        prop_assert!(run.outcome.ended && !run.outcome.failure);
        prop_assert_eq!(&run.outcome.payload, payload.as_bytes());
        prop_assert_eq!(run.outcome.usage, Usage { prompt: Some(12), cached: Some(8), output: Some(5) });
    }

    #[test]
    fn no_bytes_make_it_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..400), start in 0usize..4,
        cuts in prop::collection::vec(0usize..400, 0..6),
    ) {
        let prefix: &[u8] = [
            b"".as_slice(),
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
        ][start];
        let response = [prefix, &bytes].concat();
        let mut scanner = Scanner::default();
        let mut at = 0;
        for cut in cuts.into_iter().chain([response.len()]) {
            let cut = (cut % (response.len() + 1)).max(at);
            let Ok(step) = scanner.feed(&response[at..cut]) else { break };
            if step.ready {
                scanner.commit(b"", true);
            }
            scanner.take();
            at = cut;
        }
        let _ = scanner.eof();
        scanner.end_with(b"{}");
    }
}

#[test]
fn whole_chunks_pass_untouched_and_cut_ones_are_framed_anew() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let event = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
    let chunk = [format!("{:x}\r\n", event.len()).as_bytes(), event, b"\r\n"].concat();
    let mut scanner = Scanner::default();
    assert!(!scanner.feed(head).unwrap().ready);
    let step = scanner.feed(&chunk).unwrap();
    assert!(step.ready && step.tokens == 1);
    scanner.commit(b"", false);
    let step = scanner.feed(&[chunk.clone(), chunk.clone()].concat()).unwrap();
    assert!(step.pass && step.tokens == 2);
    let (front, back) = chunk.split_at(10);
    let step = scanner.feed(front).unwrap();
    assert!(!step.pass && !step.out, "half an event is held back");
    let step = scanner.feed(back).unwrap();
    assert!(step.out && step.tokens == 1);
    assert_eq!(scanner.take(), chunk);
    let end = scanner.end_with(b"{\"error\":{}}");
    assert!(end.ends_with(b"data: {\"error\":{}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"));
}

#[test]
fn an_early_done_is_withheld_and_a_cut_is_told() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n".to_vec();
    let run = play(
        &[&head, b"data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n".as_slice()].concat(),
        &[],
        true,
        true,
    );
    assert!(run.outcome.incomplete && !run.outcome.ended);
    assert_eq!(run.outcome.payload, b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
    let mut scanner = Scanner::default();
    assert!(matches!(scanner.eof(), Err(WireError::CutOff(_))));
    scanner.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc").unwrap();
    assert!(matches!(scanner.eof(), Err(WireError::CutOff(_))));
}

/// Reliability M7: comments are no sign that the model works.
#[test]
fn comments_before_the_first_token_do_not_commit_and_are_dropped() {
    let event = b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n".as_slice();
    let role = b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\n".as_slice();
    let ping = b": ping\n\n".as_slice();
    for declared in [false, true] {
        let length = 2 * HOLD_LIMIT + 4 * ping.len() + role.len() + event.len();
        let framing = if declared { format!("content-length: {length}\r\n") } else { String::new() };
        let head = format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{framing}\r\n");
        let mut scanner = Scanner::default();
        scanner.begin(false, false, false);
        assert_eq!(scanner.feed(head.as_bytes()).unwrap(), Step::default());
        // More than is ever held back, in one comment and in many lines.
        let endless =
            [b":".as_slice(), &vec![b'a'; HOLD_LIMIT - 2], b"\n", &vec![b'\n'; HOLD_LIMIT]].concat();
        for piece in [ping, &endless, role, ping, b": pi", b"ng\n\n"] {
            assert_eq!(scanner.feed(piece).unwrap(), Step::default());
        }
        assert!(scanner.feed(event).unwrap().ready);
        let start = String::from_utf8(scanner.commit(b"", false).to_vec()).unwrap();
        let (lines, payload) = start.split_once("\r\n\r\n").unwrap();
        assert_eq!(payload.as_bytes(), [role, event].concat());
        let left = format!("content-length: {}", [role, event, ping].concat().len());
        assert_eq!(lines.contains(&left), declared, "{lines}");
        let later = scanner.feed(ping).unwrap();
        assert!(later.pass && later.end == declared, "{later:?}");
    }
}

#[test]
fn memory_is_bounded() {
    let mut scanner = Scanner::default();
    assert!(scanner.feed(&[b"HTTP/1.1 200 OK\r\nx: ".as_slice(), &vec![b'a'; 70_000]].concat()).is_err());
    scanner.begin(true, true, false);
    scanner.feed(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: ").unwrap();
    let mut ready = false;
    for _ in 0..10 {
        ready |= scanner.feed(&vec![b'a'; HOLD_LIMIT / 8]).unwrap().ready;
    }
    assert!(ready, "an event without end is let through");
}

#[test]
fn bytes_after_the_message_spoil_the_connection() {
    let mut scanner = Scanner::default();
    let step = scanner.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\naHTTP/1.1 200").unwrap();
    assert!(step.end && !scanner.keep_alive());
    scanner.begin(true, false, false);
    assert!(
        scanner.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na").unwrap().end && scanner.keep_alive()
    );
}

//! For any cuts between pieces: the same facts, the same payload to the client, and no panic.
use lmetric_wire::{Finish, HOLD_LIMIT, OBSERVED_LIMIT, Observer, Scanner, Step, Usage, WireError, split};
use proptest::prelude::*;

/// The observable results of one response.
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
    observed: Option<Observed>,
}

/// The recorded values of one response.
#[derive(Clone, Debug, Default, PartialEq)]
struct Observed {
    prompt: Option<Vec<u32>>,
    ids: Vec<u32>,
    text: String,
    frame: Option<String>,
    over: bool,
    lost: Option<String>,
}

impl From<&Observer> for Observed {
    fn from(observer: &Observer) -> Self {
        Self {
            prompt: observer.prompt().map(<[u32]>::to_vec),
            ids: observer.ids().to_vec(),
            text: observer.text().to_owned(),
            frame: observer.frame().map(str::to_owned),
            over: observer.over(),
            lost: observer.lost().map(str::to_owned),
        }
    }
}

struct Run {
    scanner: Scanner,
    outcome: Outcome,
    to_client: Vec<u8>,
    passed: usize,
}

/// Returns `response` cut at `cuts`.
fn pieces<'a>(response: &'a [u8], cuts: &[usize]) -> Vec<&'a [u8]> {
    let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut % (response.len() + 1)).collect();
    bounds.extend([0, response.len()]);
    bounds.sort_unstable();
    bounds.windows(2).map(|w| &response[w[0]..w[1]]).collect()
}

/// Plays `response` cut at `cuts` through a scanner as the relay does; the client commits as soon
/// as possible. `observe`: whether IDs are hidden.
fn play(response: &[u8], cuts: &[usize], http11: bool, eof: bool, observe: Option<bool>) -> Run {
    let mut scanner = Scanner::default();
    scanner.begin(http11, true, false);
    play_begun(scanner, response, cuts, eof, observe)
}

/// [`play`], in which the model `m` has the name `the asked one` for the client.
fn play_renamed(response: &[u8], cuts: &[usize], http11: bool, eof: bool, observe: Option<bool>) -> Run {
    let mut scanner = Scanner::default();
    scanner.begin(http11, true, false);
    scanner.rename("m", "the asked one");
    play_begun(scanner, response, cuts, eof, observe)
}

fn play_begun(scanner: Scanner, response: &[u8], cuts: &[usize], eof: bool, observe: Option<bool>) -> Run {
    let mut run = Run { scanner, outcome: Outcome::default(), to_client: Vec::new(), passed: 0 };
    if let Some(hide_ids) = observe {
        run.scanner.observe(hide_ids);
    }
    let mut committed = false;
    let mut unseen = 0;
    for piece in pieces(response, cuts).into_iter().map(Some).chain(eof.then_some(None)) {
        let stepped = match piece {
            Some(piece) => run.scanner.feed(piece),
            None if run.outcome.ended || run.outcome.incomplete => break,
            None => run.scanner.eof(),
        };
        let Ok(step) = stepped else {
            run.outcome.failure = true;
            break;
        };
        unseen += usize::from(step.unseen);
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
    run.outcome.observed = run.scanner.observer().map(Observed::from);
    let lost = run.outcome.observed.as_ref().is_some_and(|observed| observed.lost.is_some());
    assert!(unseen == usize::from(lost) || run.outcome.failure, "reported {unseen} times");
    if committed {
        run.outcome.payload = deframe(&run.to_client, run.outcome.ended);
    }
    run
}

/// Returns the events of `response` cut at `cuts`, as the router receives them when it merges
/// segments.
fn merged(response: &[u8], cuts: &[usize], eof: bool) -> Vec<String> {
    let mut scanner = Scanner::default();
    scanner.begin(false, true, false);
    scanner.commit_alone();
    let mut events = Vec::new();
    let mut committed = false;
    for piece in pieces(response, cuts).into_iter().map(Some).chain(eof.then_some(None)) {
        let step = match piece {
            Some(piece) => scanner.feed(piece),
            None => scanner.eof(),
        };
        let Ok(step) = step else { break };
        assert!(!step.pass || !committed);
        if step.ready {
            committed = true;
            scanner.commit_alone();
        }
        if committed {
            let on = |event: &[u8]| events.push(String::from_utf8_lossy(event).into_owned());
            split(scanner.take_payload(), on);
        }
        if step.end || step.incomplete {
            break;
        }
    }
    events
}

/// Returns the payload that a strict client reads.
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

/// Returns a stream without comment lines, and without the blank lines that follow nothing else.
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
        1 => Just("data: {\"kv_transfer_params\":{\"a\":[1]},\"choices\":[]}\r\n\r\n".to_string()),
        1 => "[ -~\n\r]{0,20}",
    ]
}

/// An event as engines send it, as the client receives it with and without IDs, and its addition to
/// the observed values.
#[derive(Clone, Debug)]
struct Told {
    sent: String,
    hidden: String,
    shown: String,
    adds: Observed,
}

fn told() -> impl Strategy<Value = Told> {
    let text = "[ -~é€]{0,12}".prop_map(|text| text.replace(['\\', '"'], "'"));
    let ids = prop::collection::vec(prop_oneof![0u32..9, any::<u32>()], 0..6);
    let line_end = prop::sample::select(&["\n", "\r\n", "\r"][..]);
    (text, ids, line_end, 0usize..12).prop_map(|(text, ids, end, kind)| {
        let list = format!("{ids:?}");
        let secret = r#"{"a": [1, "]}\"", {}], "b": null}"#;
        let event = |ids: &str, secret: &str| {
            let data = match kind {
                0 => format!(r#"{{"choices": [], "kv_transfer_params": {secret}, "usage":{{"prompt_tokens":3}}}}"#),
                1 => format!(r#"{{"error":{{"code":503}},"choices":[{{"token_ids":{ids}}}]}}"#),
                2 => return format!(": comment \"token_ids\":[1]{end}{end}"),
                3 => format!(
                    r#"{{"prompt_token_ids" : {ids},"choices":[{{"delta":{{"content":"{text}"}},"token_ids": {ids}}}],"id":"x"}}"#
                ),
                4 => format!(
                    r#"{{"choices":[{{"text":"{text}","prompt_token_ids":{ids},"token_ids":{ids} }}],"kv_transfer_params":{secret}}}"#
                ),
                5 => format!(r#"{{"choices":[{{"token_ids":{ids}}},{{"token_ids":{ids}}}]}}"#),
                6 => format!(r#"{{"choices":[{{"text":"x{text}","token_ids":null}}]}}"#),
                7 => "{\"choices\":[{\"text".to_string(),
                _ => format!(
                    r#"{{"token_ids":[1],"id":3,"choices":[{{"text":"{text}","finish_reason":null,"token_ids":{ids},"kv_transfer_params":1}}]}}"#
                ),
            };
            format!("data: {data}{end}{end}")
        };
        let mut adds = Observed::default();
        match kind {
            0..=2 => {}
            5 => adds.lost = Some("the segment's answer does not have exactly one choice".into()),
            6 => adds.lost = Some("the engine does not tell token ids (return_token_ids)".into()),
            7 => {
                let why = "EOF while parsing a string at line 1 column 18";
                adds.lost = Some(format!("an event of the stream is not a completion's: {why}"));
            }
            _ => {
                let id = match kind {
                    3 => "\"x\"",
                    4 => "null",
                    _ => "3",
                };
                adds.prompt = Some(ids.clone()).filter(|ids| matches!(kind, 3 | 4) && !ids.is_empty());
                adds.frame = Some(format!(r#"{{"id":{id},"created":null,"model":null}}"#));
                (adds.ids, adds.text) = (ids, text.clone());
            }
        }
        Told { sent: event(&list, secret), hidden: event("null", "null"), shown: event(&list, "null"), adds }
    })
}

proptest! {
    #[test]
    fn streams_are_observed_and_rewritten_the_same_however_cut(
        events in prop::collection::vec(told(), 0..8), hide_ids: bool,
        framing in 0usize..3, chunk in 1usize..400, http11: bool,
        cuts in prop::collection::vec(0usize..100_000, 0..12),
    ) {
        let (first, last) = (
            "data: {\"choices\":[{\"text\":\"a\",\"token_ids\":null}],\"error\":\"e\"}\n\n",
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n",
        );
        let all = |part: fn(&Told) -> &str| [first, &events.iter().map(part).collect::<String>(), last].concat();
        let mut expected = Observed::default();
        let end = Observed { frame: Some(r#"{"id":null,"created":null,"model":null}"#.into()), over: true, ..Observed::default() };
        for adds in events.iter().map(|event| &event.adds).chain([&end]) {
            if expected.lost.is_some() {
                break;
            }
            if expected.frame.is_none() {
                (expected.frame, expected.prompt) = (adds.frame.clone(), adds.prompt.clone());
            }
            expected.ids.extend(&adds.ids);
            expected.text += &adds.text;
            expected.lost = adds.lost.clone();
            expected.over |= adds.over;
        }
        let mut payload = all(if hide_ids { |event| &event.hidden } else { |event| &event.shown });
        if framing == 0 {
            expected = Observed { lost: Some("its length is declared".into()), ..Observed::default() };
            payload = all(|event| &event.sent);
        }
        let response = frame("content-type: text/event-stream\r\n", all(|event| &event.sent).as_bytes(), framing, chunk);
        // Positions between events, if there is no framing.
        let mut at = response.len().saturating_sub(all(|event| &event.sent).len()) + first.len();
        let mut between = vec![at];
        for event in &events {
            at += event.sent.len();
            between.push(at);
        }
        for cuts in [vec![], cuts, between, (0..response.len()).collect()] {
            let run = play(&response, &cuts, http11, framing == 1, Some(hide_ids));
            prop_assert!(run.outcome.ended);
            prop_assert_eq!(run.outcome.observed.as_ref(), Some(&expected));
            prop_assert_eq!(String::from_utf8(run.outcome.payload).unwrap(), payload.clone());
        }
    }

    #[test]
    fn events_for_merging_are_the_same_however_cut(
        events in prop::collection::vec(event(), 0..12), framing in 0usize..3, chunk in 1usize..90,
        cuts in prop::collection::vec(0usize..100_000, 0..12),
    ) {
        let head = "content-type: text/event-stream\r\n";
        let response = frame(head, events.concat().as_bytes(), framing, chunk);
        let whole = merged(&response, &[], framing == 1);
        prop_assert!(!whole.iter().any(|event| event == "[DONE]"));
        prop_assert_eq!(&merged(&response, &cuts, framing == 1), &whole);
        let every: Vec<usize> = (0..response.len()).collect();
        prop_assert_eq!(&merged(&response, &every, framing == 1), &whole);
    }

    #[test]
    fn streams_read_the_same_however_cut(
        events in prop::collection::vec(event(), 0..12),
        framing in 0usize..3, chunk in 1usize..90, http11: bool, hide_ids: bool,
        cuts in prop::collection::vec(0usize..100_000, 0..12),
    ) {
        let payload = events.concat();
        let response = frame("content-type: text/event-stream; charset=utf-8\r\n", payload.as_bytes(), framing, chunk);
        let whole = play(&response, &[], http11, framing == 1, None);
        let cut = play(&response, &cuts, http11, framing == 1, None);
        prop_assert_eq!(&cut.outcome, &whole.outcome);
        let every: Vec<usize> = (0..response.len()).collect();
        prop_assert_eq!(&play(&response, &every, http11, framing == 1, None).outcome, &whole.outcome);
        prop_assert!(whole.outcome.ended != whole.outcome.incomplete);
        let observed = play(&response, &[], http11, framing == 1, Some(hide_ids)).outcome;
        prop_assert_eq!(&play(&response, &cuts, http11, framing == 1, Some(hide_ids)).outcome, &observed);
        prop_assert_eq!(&play(&response, &every, http11, framing == 1, Some(hide_ids)).outcome, &observed);
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
    fn the_models_name_changes_however_cut(
        texts in prop::collection::vec("[ -~]{0,12}", 0..6), chat: bool,
        framing in 0usize..3, chunk in 1usize..400, http11: bool, observe in prop::option::of(any::<bool>()),
        cuts in prop::collection::vec(0usize..100_000, 0..12),
    ) {
        let events = |model: &str, hidden: bool| {
            let event = |text: &String| {
                let text = text.replace(['\\', '"'], "'");
                let ids = if hidden { "null" } else { "[7]" };
                let said = if chat { format!("\"delta\":{{\"content\":\"{text}\"}}") } else { format!("\"text\":\"{text}\"") };
                format!("data: {{\"id\":\"x\",\"model\":\"{model}\",\"choices\":[{{{said},\"finish_reason\":null,\"token_ids\":{ids}}}]}}\n\n")
            };
            let more = texts.iter().map(event).collect::<String>();
            let escaped = r#"data: {"choices":[{"text":"{\"model\":\"m\"}","token_ids":[],"finish_reason":"stop"}],"model": "MODEL"}"#;
            let escaped = if hidden { escaped.replace("[]", "null") } else { escaped.into() };
            format!("{}{more}{}\n\ndata: [DONE]\n\n", event(&"a".into()), escaped.replace("MODEL", model))
        };
        let sent = events("m", false);
        let response = frame("content-type: text/event-stream\r\n", sent.as_bytes(), framing, chunk);
        let hidden = observe == Some(true) && framing != 0;
        for cuts in [vec![], cuts, (0..response.len()).collect()] {
            let run = play_renamed(&response, &cuts, http11, framing == 1, observe);
            prop_assert!(run.outcome.ended && run.passed == 0);
            prop_assert_eq!(String::from_utf8(run.outcome.payload).unwrap(), events("the asked one", hidden));
            if observe.is_some() && framing != 0 {
                let frame = r#"{"id":"x","created":null,"model":"the asked one"}"#;
                prop_assert_eq!(run.scanner.observed_frame(), Some(frame.to_string()));
            }
        }
    }

    #[test]
    fn the_models_name_changes_in_plain_answers(
        text in "[ -~]{0,300}", long: bool, framing in 0usize..3, chunk in 1usize..90, http11: bool,
        mut cuts in prop::collection::vec(0usize..1_000_000, 0..12),
        late_cuts in prop::collection::vec(0usize..100, 0..6),
    ) {
        let text = text.replace(['\\', '"'], "'");
        let filler = if long { " ".repeat(HOLD_LIMIT + 10) } else { String::new() };
        let answer = |model: &str| format!("{{\"model\":\"{model}\",\"choices\":[{{\"text\":\"{text}\"}}],{filler}\"usage\":{{\"prompt_tokens\":12}},\"model\" : \"{model}\"}}");
        let chunk = if long { chunk * 1000 } else { chunk };
        let response = frame("content-type: application/json\r\n", answer("m").as_bytes(), framing, chunk);
        cuts.extend(late_cuts.iter().map(|cut| response.len() - cut));
        let run = play_renamed(&response, &cuts, http11, framing == 1, None);
        prop_assert!(run.outcome.ended && !run.outcome.failure);
        let expected = answer("the asked one");
        prop_assert!(run.outcome.payload == expected.as_bytes());
        let start = run.to_client.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let head = String::from_utf8_lossy(&run.to_client[..start + 2]).to_lowercase();
        let length = format!("content-length: {}\r\n", expected.len());
        prop_assert!(framing != 0 || long || head.contains(&length), "{}", head);
        prop_assert!(head.contains("content-length") == head.contains(&length), "{}", head);
        prop_assert_eq!(run.outcome.usage.prompt, Some(12));
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
        let run = play(&response, &cuts, http11, framing == 1, None);
        prop_assert!(run.outcome.ended && !run.outcome.failure);
        prop_assert_eq!(&run.outcome.payload, payload.as_bytes());
        prop_assert_eq!(run.outcome.usage, Usage { prompt: Some(12), cached: Some(8), output: Some(5) });
    }

    #[test]
    fn no_bytes_make_it_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..400), start in 0usize..4, observe: bool,
        rename: bool, cuts in prop::collection::vec(0usize..400, 0..6),
    ) {
        let prefix: &[u8] = [
            b"".as_slice(),
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
        ][start];
        let response = [prefix, &bytes].concat();
        let mut scanner = Scanner::default();
        scanner.begin(true, false, false);
        if observe {
            scanner.observe(true);
        }
        if rename {
            scanner.rename("", "m");
        }
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
        scanner.end_with(b"data: {}\n\n");
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
    assert!(!step.pass && !step.out, "half an event is withheld");
    let step = scanner.feed(back).unwrap();
    assert!(step.out && step.tokens == 1);
    assert_eq!(scanner.take(), chunk);
    let end = scanner.end_with(b"data: {\"error\":{}}\n\ndata: [DONE]\n\n");
    assert!(end.ends_with(b"data: {\"error\":{}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n"));
}

#[test]
fn a_byte_order_mark_does_not_pass_in_the_middle_of_the_clients_stream() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let event = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
    for (comment, alone) in [("", false), (": a\n\n", false), ("", true), (": a\n\n", true)] {
        let payload = format!("\u{feff}{comment}{event}");
        for cut in 0..payload.len() {
            let mut scanner = Scanner::default();
            scanner.feed(head).unwrap();
            if alone {
                scanner.commit_alone();
            }
            let mut comments = Vec::new();
            for piece in [&payload.as_bytes()[..cut], &payload.as_bytes()[cut..]] {
                if !piece.is_empty() {
                    let framed = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
                    scanner.feed(&framed).unwrap();
                    if !alone {
                        comments.extend(scanner.take_comments());
                    }
                }
            }
            if alone {
                let expected = format!("{comment}{event}");
                assert_eq!(scanner.take_payload(), expected.as_bytes(), "cut at {cut}");
            } else {
                let expected = format!("{:x}\r\n{event}\r\n", event.len());
                assert_eq!(scanner.continue_stream(), expected.as_bytes(), "cut at {cut}");
                assert_eq!(comments, comment.replace(": a\n\n", "a\n").as_bytes(), "cut at {cut}");
            }
        }
    }
}

#[test]
fn an_early_done_is_withheld_and_a_cut_is_told() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n".to_vec();
    let run = play(
        &[&head, b"data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n".as_slice()].concat(),
        &[],
        true,
        true,
        None,
    );
    assert!(run.outcome.incomplete && !run.outcome.ended);
    assert_eq!(run.outcome.payload, b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n");
    let mut scanner = Scanner::default();
    assert!(matches!(scanner.eof(), Err(WireError::CutOff(_))));
    scanner.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc").unwrap();
    assert!(matches!(scanner.eof(), Err(WireError::CutOff(_))));
}

/// Comments are no sign that the model works.
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
        // More bytes than are ever withheld, in one comment and in many lines.
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
    assert!(ready, "an event without end passes");
}

#[test]
fn an_event_that_is_too_long_is_not_followed_wherever_it_is_cut() {
    let event = |ids: &str| format!("data: {{\"choices\":[{{\"text\":\"a\",\"token_ids\":{ids}}}]}}");
    for end in ["\n", "\r", "\r\n"] {
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
        let start = [head, &event("[1]"), end, end].concat();
        let long = event(&format!("[2{}]", " ".repeat(OBSERVED_LIMIT)));
        let shown = |ids| [event("null"), long.clone(), event(ids), String::new()].join(&[end, end].concat());
        let response = [&start, &long, end, end, &event("[3]"), end, end].concat();
        let limit = start.len() + OBSERVED_LIMIT;
        for cut in (limit - 3..=limit + 60).step_by(9).chain([10, start.len() + 1]) {
            let run = play(response.as_bytes(), &[start.len(), cut], true, true, Some(true));
            let observed = run.outcome.observed.unwrap();
            assert_eq!(observed.lost.as_deref(), Some("an event is too long to be followed"));
            assert_eq!(observed.ids, [1]);
            assert!(run.outcome.payload == shown("null").as_bytes(), "{end:?}, cut at {cut}");
        }
    }
    // An event that is just short enough is observed.
    let room = OBSERVED_LIMIT - event("[1]").len();
    let response = [
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n",
        &event(&format!("[1{}]", " ".repeat(room - 1))),
        "\n\n",
    ]
    .concat();
    for cut in [0, response.len() - 2, response.len() - 1] {
        let run = play(response.as_bytes(), &[cut], true, true, Some(true));
        assert_eq!(run.outcome.observed.unwrap().ids, [1]);
    }
}

/// The first event of a stream that continues repeats the prompt as token IDs.
#[test]
fn an_event_for_merging_is_never_cut() {
    let ids = vec!["12345"; 100_000].join(",");
    let first = format!(r#"{{"choices":[{{"text":"a","prompt_token_ids":[{ids}],"token_ids":[1]}}]}}"#);
    let second = r#"{"choices":[{"text":"b","token_ids":[2],"finish_reason":"stop"}]}"#;
    let payload = format!(": ping\n\ndata: {first}\n\ndata: {second}\n\ndata: [DONE]\n\n");
    for framing in [1, 2] {
        let head = "content-type: text/event-stream\r\n";
        let response = frame(head, payload.as_bytes(), framing, 50_000);
        for size in [4_000, 60_000, response.len()] {
            let cuts: Vec<usize> = (0..response.len()).step_by(size).collect();
            let events = merged(&response, &cuts, framing == 1);
            assert!(events == [first.as_str(), second], "{} events in pieces of {size}", events.len());
        }
    }
}

#[test]
fn an_event_for_merging_that_is_too_long_is_an_error() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let start = r#"data: {"choices":[{"text":"a","token_ids":[1"#;
    let end = "]}]}\n\n";
    let data = start.len() + end.len() - "data: \n\n".len();
    for (excess, begun) in [(0, false), (1, false), (0, true), (1, true)] {
        let long = [start, &" ".repeat(OBSERVED_LIMIT - data + excess), end].concat();
        let before = if begun { "data: {\"choices\":[{\"text\":\"b\"}]}\n\n" } else { "" };
        let response = [head, before, &long].concat();
        for size in [60_000, 1 << 20, response.len()] {
            let mut scanner = Scanner::default();
            scanner.begin(false, true, false);
            scanner.commit_alone();
            let (mut payload, mut failed) = (Vec::new(), None);
            for piece in response.as_bytes().chunks(size) {
                match scanner.feed(piece) {
                    Ok(step) if step.ready => scanner.commit_alone(),
                    Ok(_) => {}
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
                payload.extend_from_slice(scanner.take_payload());
            }
            let expected = format!("an event of more than {OBSERVED_LIMIT} bytes");
            assert_eq!(failed, (excess > 0).then_some(WireError::Malformed(expected)), "pieces of {size}");
            let whole = if excess > 0 { before.to_owned() } else { [before, &long].concat() };
            let lost = excess > 0 && size == response.len(); // of the piece that failed
            assert!(lost || payload == whole.as_bytes(), "{} bytes in pieces of {size}", payload.len());
        }
    }
}

/// Events of one form are recognized by it; the results are those of reading each as JSON.
#[test]
fn events_of_one_form_are_observed_the_same_however_cut() {
    let texts = ["a", "\u{e9}\u{1f980}", r#"a \"quote\""#, "", r"\n", "b"];
    let lists: [&[u32]; 6] = [&[1], &[2, 30], &[4_000_000_000], &[], &[5, 6, 7], &[8]];
    for (usage, completion) in [(false, false), (false, true), (true, false)] {
        for hide_ids in [false, true] {
            let events = |hidden: bool| -> String {
                let event = |(n, (text, ids)): (usize, (&&str, &&[u32]))| {
                    let ids = if hidden { "null".into() } else { format!("{ids:?}").replace(' ', "") };
                    let text = if completion {
                        format!(r#""text":"{text}","prompt_token_ids":null"#)
                    } else {
                        format!(r#""delta":{{"content":"{text}"}}"#)
                    };
                    let usage = if usage {
                        format!(r#","usage":{{"completion_tokens":{n}}}"#)
                    } else {
                        String::new()
                    };
                    format!(
                        "data: {{\"id\":\"x\",\"choices\":[{{\"index\":0,{text},\"finish_reason\":null,\"token_ids\":{ids}}}]{usage}}}\n\n"
                    )
                };
                let all = texts.iter().zip(&lists).enumerate().map(event);
                all.collect::<String>()
                    + ": ping\n\n"
                    + "data: {\"choices\":[{\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n"
            };
            let payload = events(false);
            let ends: Vec<usize> = payload.match_indices("\n\n").map(|(at, _)| at + 2).collect();
            for (framing, chunk) in [(1, 1), (2, 1 << 20), (2, ends[0]), (2, 50)] {
                let head = "content-type: text/event-stream\r\n";
                let response = frame(head, payload.as_bytes(), framing, chunk);
                let start = response.len() - payload.len();
                let between: Vec<usize> = ends.iter().map(|at| start + at).collect();
                for cuts in [vec![], between, vec![start + 20, start + 333], (0..response.len()).collect()] {
                    let run = play(&response, &cuts, true, framing == 1, Some(hide_ids));
                    let observed = run.outcome.observed.unwrap();
                    assert_eq!(observed.ids, lists.concat());
                    assert_eq!(observed.text, "a\u{e9}\u{1f980}a \"quote\"\nb");
                    assert_eq!((run.outcome.tokens, observed.lost, observed.over), (8, None, true));
                    assert_eq!(String::from_utf8(run.outcome.payload).unwrap(), events(hide_ids));
                }
            }
        }
    }
}

#[test]
fn the_engines_failure_in_an_observed_stream_is_withheld() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let token = "data: {\"choices\":[{\"text\":\"a\",\"token_ids\":[1]}]}\n\n";
    let done = "data: [DONE]\n\n";
    for (event, withheld) in [
        (r#"{"error":{"message":"died","code":500}}"#, true),
        (r#"{"error":{"message":"died"}}"#, true),
        (r#"{"choices":[{"text":"","finish_reason":"abort"}]}"#, true),
        (r#"{"error":{"message":"too long","code":400}}"#, false),
    ] {
        let failure = format!("data: {event}\n\n");
        let response = [head, token, &failure, done].concat();
        for cuts in [vec![], vec![head.len() + token.len()], (0..response.len()).collect()] {
            let run = play(response.as_bytes(), &cuts, true, true, Some(false));
            assert_eq!((run.outcome.incomplete, run.outcome.ended), (withheld, !withheld), "{event}");
            let expected = if withheld { token.into() } else { [token, &failure, done].concat() };
            assert_eq!(String::from_utf8(run.outcome.payload).unwrap(), expected);
            assert_eq!(run.scanner.withheld().starts_with(failure.as_bytes()), withheld);
            // Before the first token, and in streams that are not observed, it passes.
            let early = [head, &failure, done].concat();
            assert!(play(early.as_bytes(), &[], true, true, Some(false)).scanner.withheld().is_empty());
            assert!(play(response.as_bytes(), &cuts, true, true, None).scanner.withheld().is_empty());
        }
    }
}

/// Without its end, a message that the engine aborted cannot look whole.
#[test]
fn the_end_of_an_aborted_message_is_withheld() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let event = |kind: &str, more: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
    let start = event("message_start", r#","message":{"type":"message","stop_reason":null}"#);
    let delta = event("content_block_delta", r#","delta":{"text":"a"}"#);
    let stop = event("message_stop", "");
    for (reason, aborted) in [("null", true), (r#""end_turn""#, false)] {
        let end = event(
            "message_delta",
            &format!(r#","delta":{{"stop_reason":{reason}}},"usage":{{"output_tokens":1}}"#),
        );
        for begun in [[&start, &delta].map(String::as_str).concat(), start.clone()] {
            let response = [head, &begun, &end, &stop].concat();
            for cuts in [vec![], vec![head.len() + begun.len()], (0..response.len()).collect()] {
                let mut scanner = Scanner::default();
                scanner.begin(true, false, false);
                scanner.withhold_abort();
                let run = play_begun(scanner, response.as_bytes(), &cuts, true, None);
                assert_eq!((run.outcome.incomplete, run.outcome.ended), (aborted, !aborted));
                assert_eq!(run.outcome.finish == Finish::Aborted, aborted);
                let expected = if aborted { begun.clone() } else { [begun.as_str(), &end, &stop].concat() };
                assert_eq!(String::from_utf8(run.outcome.payload).unwrap(), expected);
                assert_eq!(run.scanner.withheld().starts_with(end.as_bytes()), aborted);
            }
        }
    }
}

/// Engines may report the usage so far in events that have no reason.
#[test]
fn a_message_continues_after_an_event_without_a_reason() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let event = |kind: &str, delta: &str| format!("data: {{\"type\":\"{kind}\",\"delta\":{delta}}}\n\n");
    let text = event("content_block_delta", r#"{"text":"a"}"#);
    let usage = event("message_delta", r#"{"stop_reason":null}"#);
    let end = event("message_delta", r#"{"stop_reason":"end_turn"}"#);
    let begun = [text.as_str(), &usage, &text].concat();
    for (payload, finish) in [([begun.as_str(), &end].concat(), Finish::Done), (begun, Finish::Aborted)] {
        let response = [head, &payload].concat();
        for cuts in [vec![], (0..response.len()).collect()] {
            let mut scanner = Scanner::default();
            scanner.begin(true, false, false);
            let run = play_begun(scanner, response.as_bytes(), &cuts, true, None);
            assert!(run.outcome.ended && run.scanner.withheld().is_empty());
            assert_eq!((run.outcome.finish, run.outcome.tokens), (finish, 2));
            assert_eq!(String::from_utf8(run.outcome.payload).unwrap(), payload);
        }
    }
}

/// vLLM sends these events before it computes anything.
#[test]
fn events_that_open_a_response_do_not_commit() {
    let head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n";
    let event = |kind: &str, more: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
    let opened = |more: &str| {
        ["created", "queued", "in_progress"].map(|kind| event(&format!("response.{kind}"), more)).concat()
    };
    let delta = event("response.output_text.delta", r#","delta":"a""#);
    let mut scanner = Scanner::default();
    scanner.begin(false, false, false);
    scanner.feed(head).unwrap();
    let events = opened(r#","response":{"background":false}"#);
    assert_eq!(scanner.feed(events.as_bytes()).unwrap(), Step::default());
    assert_eq!(scanner.progress(), 0);
    let step = scanner.feed(delta.as_bytes()).unwrap();
    assert!(step.ready && step.tokens == 1 && scanner.progress() == 1);
    assert!(scanner.commit(b"", false).ends_with((events + &delta).as_bytes()));
    // Its client may leave a response in the background, and ask for it later.
    scanner.begin(false, false, false);
    scanner.feed(head).unwrap();
    assert!(scanner.feed(opened(r#","response":{"background":true}"#).as_bytes()).unwrap().ready);
}

#[test]
fn only_streams_of_status_200_are_observed() {
    let body = b"data: {\"kv_transfer_params\":1}\n\n".as_slice();
    for head in ["200 OK\r\ncontent-type: application/json", "500 X\r\ncontent-type: text/event-stream"] {
        let mut scanner = Scanner::default();
        scanner.begin(true, false, false);
        scanner.observe(true);
        let response = [format!("HTTP/1.1 {head}\r\n\r\n").as_bytes(), body].concat();
        assert!(!scanner.feed(&response).unwrap().unseen);
        scanner.eof().unwrap();
        let sent = scanner.commit(b"", false);
        assert!(sent.windows(body.len()).any(|part| part == body));
        assert!(scanner.observer().is_none());
    }
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

//! Valid and invalid messages.
use lmetric_feed::event::{Batch, Event, Removed, Scratch, moment_of, read_batch};
use lmetric_feed::load::{Load, read_load, read_load_event};
use proptest::prelude::*;
use rmp::encode as pack;

/// Decodes hexadecimal digits; spaces are ignored.
fn bytes(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|c| u8::from_str_radix(std::str::from_utf8(c).unwrap(), 16).unwrap()).collect()
}

fn events(message: &[u8]) -> (Option<Batch>, Vec<String>) {
    let (mut scratch, mut all) = (Scratch::default(), Vec::new());
    let batch = read_batch(message, &mut scratch, |event| {
        all.push(match event {
            Event::Stored(s) => format!(
                "stored {:x?} behind {:x?}: {:?} by {} on {:?}, adapter {:?}, salt {:?}, group {:?} {:?}, keys {:02x?}, reused {:?}",
                s.hashes, s.parent, s.tokens, s.block_size, s.medium, s.lora_name, s.cache_salt, s.group, s.kind,
                s.extra_keys(0), s.reused
            ),
            Event::Removed(Removed { hashes, medium, group }) => {
                format!("removed {hashes:x?} of {medium:?}, group {group:?}")
            }
            Event::Cleared => "cleared".into(),
            Event::Other(name) => format!("other {name}"),
        });
    });
    (batch.ok(), all)
}

#[test]
fn a_value_that_is_refused_is_not_skipped() {
    let batch = bytes("93 cb3ff8000000000000 90 00");
    assert_eq!(events(&batch).0, Some(Batch { rank: Some(0), events: 0, malformed: 0, steps: 0 }));
    // A marker that MessagePack does not define, then a string that is not UTF-8 as the first
    // value.
    assert_eq!(events(&[b"\xc1".as_slice(), &batch].concat()).0, None);
    assert_eq!(events(&[b"\x94\xa1\xff".as_slice(), &batch[1..]].concat()).0, None);
}

/// Message of vLLM 0.32.0: a map with a type.
#[test]
fn vllm_maps() {
    // [ts, [{type: BlockStored, block_hashes: [13202869615131507453],
    //   parent_block_hash: 2423506087337615109, token_ids: [548, 2, 70000], block_size: 3,
    //   lora_id: nil, medium: GPU, lora_name: nil, extra_keys: [nil], group_idx: 0,
    //   kv_cache_spec_kind: full_attention}], 0]
    let message = bytes(
        "93 cb41dabfcb7dd57ce4 91 8b
         a474797065 ab426c6f636b53746f726564
         ac626c6f636b5f686173686573 91 cfb739fb07c6fbf2fd
         b1706172656e745f626c6f636b5f68617368 cf21a20a81eb271f05
         a9746f6b656e5f696473 93 cd0224 02 ce00011170
         aa626c6f636b5f73697a65 03
         a76c6f72615f6964 c0
         a66d656469756d a3475055
         a96c6f72615f6e616d65 c0
         aa65787472615f6b657973 91 c0
         a967726f75705f696478 00
         b26b765f63616368655f737065635f6b696e64 ae66756c6c5f617474656e74696f6e
         00",
    );
    let (batch, all) = events(&message);
    assert_eq!(batch, Some(Batch { rank: Some(0), events: 1, malformed: 0, steps: 2 }));
    assert_eq!(moment_of(&message), Some(f64::from_bits(0x41da_bfcb_7dd5_7ce4)));
    assert_eq!(
        all,
        [
            "stored [b739fb07c6fbf2fd] behind Some(21a20a81eb271f05): [548, 2, 70000] by 3 on Some(\"GPU\"), adapter None, \
          salt None, group Some(0) Some(\"full_attention\"), keys Some([c0]), reused None"
        ]
    );
    // A message cut off at any byte is an error, not a panic.
    for end in 0..message.len() {
        assert_eq!(events(&message[..end]).0, None, "{end} bytes");
    }
}

/// Message of older vLLM: an array with its name first, and a batch without a rank.
#[test]
fn vllm_arrays() {
    let message = bytes(
        "92 cb41dabfcb7dd57ce4 93
         96 ab426c6f636b53746f726564 92 cf00000000ffffffff 05 c0 94 01 02 03 04 02 c0
         93 ac426c6f636b52656d6f766564 91 05 a3475055
         91 b0416c6c426c6f636b73436c6561726564",
    );
    let (batch, all) = events(&message);
    assert_eq!(batch, Some(Batch { rank: None, events: 3, malformed: 0, steps: 6 }));
    assert_eq!(
        all,
        [
            "stored [ffffffff, 5] behind None: [1, 2, 3, 4] by 2 on None, adapter None, salt None, group None None, keys \
             None, reused None",
            "removed [5] of Some(\"GPU\"), group None",
            "cleared"
        ]
    );
}

/// Message of SGLang: signed hashes, a field for the salt, and additions of later versions.
#[test]
fn sglang_and_what_is_to_come() {
    let mut message = bytes("93 00 92 88 a474797065 ab426c6f636b53746f726564");
    for (key, value) in [
        ("block_hashes", "91 d3fffffffffffffffb"),
        ("token_ids", "91 07"),
        ("block_size", "01"),
        ("cache_salt", "a161"),
        ("origin", "a6524555534544"),
        ("medium", "aa4350555f50494e4e4544"),
        ("new", "82 01 92 c3 cb0000000000000000 a162 c4020102"),
    ] {
        pack::write_str(&mut message, key).unwrap();
        message.extend(bytes(value));
    }
    message.extend(bytes("81 a474797065 ab426c6f636b734d6f766564  03"));
    let (batch, all) = events(&message);
    assert_eq!(batch, Some(Batch { rank: Some(3), events: 2, malformed: 0, steps: 3 }));
    assert_eq!(
        all,
        [
            "stored [fffffffffffffffb] behind None: [7] by 1 on Some(\"CPU_PINNED\"), adapter None, salt Some(\"a\"), group \
             None None, keys None, reused Some(true)",
            "other BlocksMoved"
        ]
    );
    // A batch as a map, and a single malformed event.
    let message = bytes(
        "83 a27473 01 a66576656e7473 93
           92 ac426c6f636b52656d6f766564 91 c2
           91 b0416c6c426c6f636b73436c6561726564
           01
         b2646174615f706172616c6c656c5f72616e6b c0",
    );
    assert_eq!(moment_of(&message), Some(1.0));
    assert_eq!(
        events(&message),
        (Some(Batch { rank: None, events: 3, malformed: 2, steps: 3 }), vec!["cleared".to_string()])
    );
}

#[test]
fn digests_count_by_their_last_bytes() {
    let mut message = bytes("92 00 91 92 ac426c6f636b52656d6f766564 92 c420");
    message.extend([7; 24]);
    message.extend(0x0102_0304_0506_0708u64.to_be_bytes());
    message.extend(bytes("c402 0102"));
    assert_eq!(events(&message).1, ["removed [102030405060708, 102] of None, group None"]);
}

#[test]
fn load_reports() {
    let message = bytes("97 a84c6f616453746174 03 05 cc fa cd03e8 cb3ff0000000000000 a178");
    let load = Load { running: 3.0, waiting: 5.0, kv_usage: Some(0.25), prefill_tokens: None };
    assert_eq!(read_load(&message), Ok(load));
    assert_eq!(read_load(&bytes("95 a84c6f616453746174 00 00 00 00")).unwrap().kv_usage, None);
    for wrong in ["", "95", "94 a84c6f616453746174 00 00 00", "95 a84c6f616453746174 ff 00 00 00", "c0"] {
        assert!(read_load(&bytes(wrong)).is_err(), "{wrong}");
    }
}

/// A batch with one event: its number of fields, and the fields after the type.
fn load_event(fields: &[(&str, f64)]) -> Vec<u8> {
    let mut out = bytes("93 cb41d9000000000000 91");
    pack::write_map_len(&mut out, fields.len() as u32 + 1).unwrap();
    for text in ["type", "LmetricLoad"] {
        pack::write_str(&mut out, text).unwrap();
    }
    for (name, value) in fields {
        pack::write_str(&mut out, name).unwrap();
        pack::write_f64(&mut out, *value).unwrap();
    }
    out.push(0);
    out
}

#[test]
fn load_events() {
    let all = [("running", 3.0), ("waiting", 5.0), ("kv_usage", 0.25), ("prefill_tokens", 900.0)];
    let load = Load { running: 3.0, waiting: 5.0, kv_usage: Some(0.25), prefill_tokens: Some(900.0) };
    assert_eq!(read_load_event(&load_event(&all)), Ok(Some(load)));
    let least = Load { kv_usage: None, prefill_tokens: None, ..load };
    assert_eq!(read_load_event(&load_event(&all[..2])), Ok(Some(least)));
    // A later version may add fields.
    let more = [all[0], ("later", 1.0), all[1]];
    assert_eq!(read_load_event(&load_event(&more)), Ok(Some(least)));
    // The parser of cache events skips them.
    let (batch, events) = events(&load_event(&all));
    assert_eq!((batch.unwrap().events, events), (1, vec!["other LmetricLoad".to_string()]));
    // Batches of other events.
    for other in ["", "c0", "92 00 90", "92 00 91 80", "92 00 91 81 a474797065 a178", "92 00 91 91 a178"] {
        assert_eq!(read_load_event(&bytes(other)), Ok(None), "{other}");
    }
    // A map without fields, and then the words of a load.
    let trap = bytes("92 00 93 80 a474797065 ab4c6d65747269634c6f6164");
    assert_eq!(read_load_event(&trap), Ok(None));
}

#[test]
fn load_events_that_no_engine_sends() {
    let (running, waiting) = (("running", 3.0), ("waiting", 5.0));
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e10, f64::MAX] {
        for name in ["running", "waiting", "kv_usage", "prefill_tokens"] {
            let event = load_event(&[running, waiting, (name, bad)]);
            assert!(read_load_event(&event).is_err(), "{name} {bad}");
        }
    }
    assert!(read_load_event(&load_event(&[running, waiting, ("kv_usage", 1.01)])).is_err());
    for few in [&[][..], &[running], &[waiting]] {
        assert!(read_load_event(&load_event(few)).is_err(), "{few:?}");
    }
    let whole = load_event(&[running, waiting]);
    for length in 0..whole.len() - 1 {
        assert!(!matches!(read_load_event(&whole[..length]), Ok(Some(_))), "{length} bytes");
    }
    // Texts for numbers, fields that are promised and never come, and a long event.
    let start = "92 00 91 df00ffffff a474797065 ab4c6d65747269634c6f6164";
    for wrong in [start.to_string(), format!("{start} a772756e6e696e67 a133")] {
        assert!(read_load_event(&bytes(&wrong)).is_err(), "{wrong}");
    }
    let long: Vec<(&str, f64)> = std::iter::repeat_n(running, 100).chain([waiting]).collect();
    assert!(read_load_event(&load_event(&long)).is_err());
}

#[test]
fn nothing_is_set_aside_for_what_is_only_promised() {
    // 2^32 - 1 announced events, hashes and nested arrays that never come.
    for wrong in [
        "92 00 ddffffffff",
        "92 00 91 92 ac426c6f636b52656d6f766564 ddffffffff",
        "92 00 91 81 a474797065 dfffffffff dfffffffff",
        "92 00 91 c6ffffffff",
    ] {
        assert_eq!(events(&bytes(wrong)).0, None, "{wrong}");
    }
    let mut deep = bytes("92 00 91");
    deep.extend(std::iter::repeat_n(0x91, 1 << 20));
    assert_eq!(events(&deep).0, None);
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_harm(message in prop::collection::vec(any::<u8>(), 0..300)) {
        events(&message);
        let _ = (read_load(&message), read_load_event(&message), moment_of(&message));
    }

    /// Nearly valid messages are harder than random bytes.
    #[test]
    fn nearly_right_bytes_too(at in 0usize..60, byte in any::<u8>(), cut in 0usize..60) {
        let mut message = bytes(
            "93 00 92 96 ab426c6f636b53746f726564 92 01 05 c0 94 01 02 03 04 02 c0 92 ac426c6f636b52656d6f766564 91 05 00",
        );
        let end = message.len() - cut.min(message.len());
        if let Some(changed) = message.get_mut(at) {
            *changed = byte;
        }
        events(&message[..end]);
        let (batch, _) = events(&message);
        prop_assert!(batch.is_none_or(|b| b.malformed <= b.events));
    }
}

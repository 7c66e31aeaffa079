//! Load messages between routers, in binary form.
//!
//! A message begins with [`MAGIC`] and a byte for [`FORMAT`]. [`crate::codec`] has the forms of
//! numbers and texts. Then follow:
//!
//! 1. the sender's id;
//! 2. the message's version, and 1 plus the version that it changes (0: it is the whole load);
//! 3. the number of models, and of each the name, the number of its instances, and the instances;
//! 4. the number of bytes of the budgets, and the budgets.
//!
//! An instance has a name, a mask, numbers, the number of its roots, and the roots. The mask has a
//! bit for each number of [`Share`]; numbers that are zero are left out. A root has its hash
//! (8 bytes), tokens and probability. An instance without numbers and roots has no load any more.
use super::published::Published;
use crate::codec::{Malformed, Reader, write_bytes, write_float, write_int};
use crate::error::CoreError;
use crate::program::{MAX_ROOTS, PeerRoot, Root};
use crate::router::ledger::Share;
use thiserror::Error;

/// First bytes of a message.
const MAGIC: &[u8; 6] = b"lmload";
/// Format of the messages. A change of the layout, of [`Share::NAMES`] or of the meaning of a
/// number needs a new one.
pub const FORMAT: u8 = 2;
/// Maximum number of instances in a message, over all models.
pub const MAX_INSTANCES: usize = 65_536;
const MAX_MODELS: usize = 1_024;
/// Maximum number of bytes of a name.
const MAX_NAME: usize = 200;
const MAX_SENDER: usize = 64;
const MAX_BUDGETS: usize = 16 << 20;

/// Instances and their load.
pub type Loads = Vec<(Box<str>, Published)>;

/// The load that a router publishes, or the changes of it since an earlier message.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadMessage {
    /// Id of the router that sends it, in hexadecimal digits.
    pub sender: Box<str>,
    /// Version of the load.
    pub version: u64,
    /// Version that the message changes; none: the message has the whole load.
    pub base: Option<u64>,
    /// By model: instances and their load. In changes, no load stands for an instance that has none
    /// any more.
    pub models: Vec<(Box<str>, Loads)>,
    /// Counts of budgets ([`crate::budget::Budgets::encode`]).
    pub budgets: Box<[u8]>,
}

/// Why bytes are not a load message.
#[derive(Debug, Error, PartialEq)]
pub enum MessageError {
    /// A message of another version of the router.
    #[error(
        "load message of format {0}; this router reads format {own}; run the same version on all routers",
        own = FORMAT
    )]
    Format(u8),
    /// Not a message.
    #[error("not a load message: {0}")]
    Malformed(String),
    /// An impossible number.
    #[error("{0}")]
    Number(#[from] CoreError),
}

impl From<Malformed> for MessageError {
    fn from(Malformed(problem): Malformed) -> MessageError {
        MessageError::Malformed(problem)
    }
}

impl LoadMessage {
    /// Returns the message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let instances: usize = self.models.iter().map(|(_, instances)| instances.len()).sum();
        let mut out = Vec::with_capacity(128 + 64 * instances);
        out.extend_from_slice(MAGIC);
        out.push(FORMAT);
        write_bytes(&mut out, self.sender.as_bytes());
        write_int(&mut out, self.version);
        write_int(&mut out, self.base.map_or(0, |base| base + 1));
        write_int(&mut out, self.models.len() as u64);
        for (model, instances) in &self.models {
            write_bytes(&mut out, model.as_bytes());
            write_int(&mut out, instances.len() as u64);
            for (name, load) in instances {
                write_bytes(&mut out, name.as_bytes());
                write_load(&mut out, load);
            }
        }
        write_bytes(&mut out, &self.budgets);
        out
    }

    /// Reads a message, and checks all of it.
    ///
    /// # Errors
    /// See [`MessageError`].
    pub fn decode(bytes: &[u8]) -> Result<LoadMessage, MessageError> {
        let Some(bytes) = bytes.strip_prefix(MAGIC) else {
            return malformed("it does not begin with \"lmload\"");
        };
        let mut rest = Reader(bytes);
        match rest.byte("its format")? {
            FORMAT => {}
            other => return Err(MessageError::Format(other)),
        }
        let sender = rest.text(MAX_SENDER, "the sender")?;
        if sender.is_empty() || !sender.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return malformed(format!("sender {sender:?}; expected 1 to {MAX_SENDER} hexadecimal digits"));
        }
        let version = rest.int("the version")?;
        let base = rest.int("the version that it changes")?.checked_sub(1);
        if base.is_some_and(|base| base > version) {
            return malformed(format!("version {version} changes a later version"));
        }
        let mut models = Vec::new();
        let mut instances_left = MAX_INSTANCES;
        for _ in 0..rest.count(MAX_MODELS, "models")? {
            let model: Box<str> = rest.text(MAX_NAME, "a model")?.into();
            let count = rest.count(instances_left, "instances")?;
            instances_left -= count;
            let mut instances = Vec::new(); // grows with what is read
            for _ in 0..count {
                let name = rest.text(MAX_NAME, "an instance")?;
                let load = read_load(&mut rest, name)?;
                load.check(|| format!("on {name} in the load of router {sender}"))?;
                instances.push((name.into(), load));
            }
            models.push((model, instances));
        }
        let length = rest.count(MAX_BUDGETS, "bytes of budgets")?;
        let budgets = rest.take(length, "the budgets")?.into();
        rest.end()?;
        Ok(LoadMessage { sender: sender.into(), version, base, models, budgets })
    }
}

fn malformed<T>(problem: impl Into<String>) -> Result<T, MessageError> {
    Err(MessageError::Malformed(problem.into()))
}

fn write_load(out: &mut Vec<u8>, load: &Published) {
    let numbers = load.share.numbers();
    let set = |number: &&f64| (**number as f32) != 0.0;
    let mask = numbers.iter().rev().fold(0, |mask, number| (mask << 1) | u64::from(set(&number)));
    write_int(out, mask);
    numbers.iter().filter(set).for_each(|number| write_float(out, *number));
    write_int(out, load.roots.len() as u64);
    for PeerRoot { root, probability } in &load.roots {
        out.extend_from_slice(&root.hash.to_le_bytes());
        write_float(out, root.tokens);
        write_float(out, *probability);
    }
}

/// Reads the load on an instance.
fn read_load(rest: &mut Reader<'_>, name: &str) -> Result<Published, MessageError> {
    let mask = rest.int("a mask")?;
    if mask >> Share::NAMES.len() != 0 {
        return malformed(format!("mask {mask:#x} of {name}; expected at most {} bits", Share::NAMES.len()));
    }
    let mut numbers = [0.0; Share::NAMES.len()];
    for (bit, number) in numbers.iter_mut().enumerate().filter(|(bit, _)| (mask >> bit) & 1 == 1) {
        *number = rest.float(Share::NAMES[bit])?;
    }
    let mut roots = Vec::new();
    for _ in 0..rest.count(MAX_ROOTS, "roots")? {
        let root = Root { hash: rest.word("a root")?, tokens: rest.float("a root")? };
        roots.push(PeerRoot { root, probability: rest.float("a root")? });
    }
    Ok(Published { share: Share::of(numbers), roots })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads() -> impl Strategy<Value = Published> {
        let number = prop_oneof![Just(0.0), (0u32..1 << 24).prop_map(f64::from)];
        let root = (any::<u64>(), 0u32..1 << 24, 0u8..=4).prop_map(|(hash, tokens, quarters)| PeerRoot {
            root: Root { hash, tokens: f64::from(tokens) },
            probability: f64::from(quarters) / 4.0,
        });
        let numbers = prop::array::uniform19(number);
        (numbers, prop::collection::vec(root, 0..=MAX_ROOTS))
            .prop_map(|(numbers, roots)| Published { share: Share::of(numbers), roots })
    }

    fn messages() -> impl Strategy<Value = LoadMessage> {
        let instances = prop::collection::vec(("[a-zé:/.0-9]{0,20}", loads()), 0..4);
        let models = prop::collection::vec(("[a-z]{0,5}", instances), 0..3);
        let budgets = prop::collection::vec(any::<u8>(), 0..20);
        ("[0-9a-f]{1,64}", 0..1u64 << 62, any::<Option<u8>>(), models, budgets).prop_map(
            |(sender, version, back, models, budgets)| LoadMessage {
                budgets: budgets.into(),
                sender: sender.into(),
                version,
                base: back.and_then(|back| version.checked_sub(back.into())),
                models: models
                    .into_iter()
                    .map(|(model, all)| {
                        (model.into(), all.into_iter().map(|(name, load)| (name.into(), load)).collect())
                    })
                    .collect(),
            },
        )
    }

    proptest! {
        #[test]
        fn a_message_is_read_as_it_was_written(message in messages()) {
            prop_assert_eq!(LoadMessage::decode(&message.encode()), Ok(message));
        }

        /// Broken messages are errors; what is read can be written again.
        #[test]
        fn broken_messages_are_refused(message in messages(), cut in any::<prop::sample::Index>(), to in any::<u8>()) {
            let mut bytes = message.encode();
            let place = cut.index(bytes.len());
            prop_assert!(LoadMessage::decode(&bytes[..place]).is_err());
            prop_assert!(LoadMessage::decode(&[&bytes[..], b"\0"].concat()).is_err());
            bytes[place] = to;
            if let Ok(read) = LoadMessage::decode(&bytes) {
                prop_assert_eq!(LoadMessage::decode(&read.encode()), Ok(read));
            }
        }

        #[test]
        fn any_bytes_can_follow_the_format(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop(LoadMessage::decode(&[&b"lmload\x02\x01a"[..], &bytes].concat()));
        }
    }

    /// The format stands for the numbers and their order: a change of them needs a new format.
    #[test]
    fn the_format_has_these_numbers() {
        let names = "coming queued scheduled decoding decode_tokens bound_tokens remaining_tokens \
            bound_remaining_tokens queued_prefill_tokens queued_prefill_pairs recent_prefill_tokens \
            recent_prefill_pairs window_prefill_tokens window_output_tokens fetches program_tokens programs \
            held_program_tokens admitted_program_tokens";
        assert_eq!((FORMAT, Share::NAMES.join(" ")), (2, names.to_owned()));
        let other = LoadMessage::decode(b"lmload\x03anything").unwrap_err().to_string();
        assert_eq!(
            other,
            "load message of format 3; this router reads format 2; run the same version on all routers"
        );
    }

    #[test]
    fn counts_are_bounded_before_anything_is_read() {
        let head = b"lmload\x02\x01a\x00\x00";
        let cases: [(&[u8], &str); 9] = [
            (b"\xff\xff\x03", "65535 models; expected at most 1024"),
            (b"\x01\x01m\xff\xff\xff\x7f", "268435455 instances; expected at most 65536"),
            (b"\x01\x01m\x01\xc9\x01", "201 bytes of an instance; expected at most 200"),
            (b"\x01\x01m\x01\x01e\x80\x80\x20", "mask 0x80000 of e; expected at most 19 bits"),
            (b"\x01\x01m\x01\x01e\x00\x11", "17 roots; expected at most 16"),
            (b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", "the number of models is not below 2^63"),
            (b"\x01\x01\xff", "a model is not UTF-8"),
            (b"\x01\x01m\x01\x01e\x01\x00\x00\xc0\x7f\x00", "coming on e in the load of router a: NaN"),
            (b"\x01\x01m\x01\x01e\x01\x00\x00\x80", "it ends in coming"),
        ];
        for (rest, problem) in cases {
            let error = LoadMessage::decode(&[&head[..], rest].concat()).unwrap_err().to_string();
            assert!(error.contains(problem), "{error}");
        }
    }
}

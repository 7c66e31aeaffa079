//! Load messages between routers, in binary form.
//!
//! A message begins with [`MAGIC`] and a byte for [`FORMAT`]. [`crate::codec`] has the forms of
//! numbers and texts. Then follow:
//!
//! 1. the sender's id;
//! 2. the message's version, and 1 plus the version that it changes (0: it is the whole load);
//! 3. the number of models, and of each the name, the number of its instances, the instances, and
//!    its agent programs ([`crate::program::exchange`]);
//! 4. the number of bytes of the budgets, and the budgets.
//!
//! An instance has a name, a mask, and numbers. The mask has a bit for each number of [`Share`];
//! numbers that are zero are left out. An instance without numbers has no load any more.
use super::published::Published;
use crate::codec::{Malformed, Reader, write_bytes, write_float, write_int};
use crate::error::CoreError;
use crate::program::PeerPrograms;
use crate::router::ledger::Share;
use thiserror::Error;

/// First bytes of a message.
const MAGIC: &[u8; 6] = b"lmload";
/// Format of the messages. A change of the layout, of [`Share::NAMES`] or of the meaning of a
/// number needs a new one.
pub const FORMAT: u8 = 4;
/// Maximum number of instances in a message, over all models.
pub const MAX_INSTANCES: usize = 65_536;
const MAX_MODELS: usize = 1_024;
/// Most bytes of the agent programs of all models in a message. It takes some 40 ms to make them,
/// and the router does nothing else meanwhile.
pub const MOST_PROGRAM_BYTES: usize = 4 << 20;
/// Most bytes of a model, of an instance, and of the rest of a message, without names and budgets.
const MODEL_BYTES: usize = 64;
const INSTANCE_BYTES: usize = 8 + 4 * Share::NAMES.len();
const REST_BYTES: usize = 256;
/// Maximum number of bytes of a name.
const MAX_NAME: usize = 200;
const MAX_SENDER: usize = 64;
const MAX_BUDGETS: usize = 16 << 20;

/// The load of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// Instances and their load.
    pub instances: Vec<(Box<str>, Published)>,
    /// Agent programs.
    pub programs: PeerPrograms,
}

/// The load that a router publishes, or the changes of it since an earlier message.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadMessage {
    /// Id of the router that sends it, in hexadecimal digits.
    pub sender: Box<str>,
    /// Version of the load.
    pub version: u64,
    /// Version that the message changes; none: the message has the whole load.
    pub base: Option<u64>,
    /// By model. In changes, no load stands for an instance that has none any more.
    pub models: Vec<(Box<str>, Load)>,
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
    /// Maximum number of bytes of a message that peers read.
    pub const MOST_BYTES: usize = 16 << 20;

    /// Adds the agent programs. They fill at most [`MOST_PROGRAM_BYTES`] over all models, and what
    /// the rest of the message leaves. Models with few programs are complete before others.
    ///
    /// `counts`: number of programs of each model. `of`: returns the programs of a model in at most
    /// this number of bytes.
    ///
    /// # Errors
    /// Those of `of`.
    pub fn add_programs<E>(
        &mut self,
        counts: &[usize],
        mut of: impl FnMut(usize, usize) -> Result<PeerPrograms, E>,
    ) -> Result<(), E> {
        let rest: usize = self.models.iter().map(|(name, load)| most_bytes(name, &load.instances)).sum();
        let rest = rest + self.budgets.len() + REST_BYTES;
        let mut left = Self::MOST_BYTES.saturating_sub(rest).min(MOST_PROGRAM_BYTES);
        let mut places: Vec<usize> = (0..self.models.len()).collect();
        places.sort_by_key(|place| counts[*place]);
        for (done, place) in places.iter().enumerate() {
            let programs = of(*place, left / (places.len() - done))?;
            left = left.saturating_sub(programs.most_bytes());
            self.models[*place].1.programs = programs;
        }
        Ok(())
    }

    /// Returns the message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let instances: usize = self.models.iter().map(|(_, load)| load.instances.len()).sum();
        let mut out = Vec::with_capacity(128 + 64 * instances);
        out.extend_from_slice(MAGIC);
        out.push(FORMAT);
        write_bytes(&mut out, self.sender.as_bytes());
        write_int(&mut out, self.version);
        write_int(&mut out, self.base.map_or(0, |base| base + 1));
        write_int(&mut out, self.models.len() as u64);
        for (model, load) in &self.models {
            write_bytes(&mut out, model.as_bytes());
            write_int(&mut out, load.instances.len() as u64);
            for (name, load) in &load.instances {
                write_bytes(&mut out, name.as_bytes());
                write_load(&mut out, load);
            }
            load.programs.encode(&mut out);
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
        let (mut instances_left, mut program_bytes) = (MAX_INSTANCES, 0);
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
            let before = rest.0.len();
            let programs = PeerPrograms::decode(&mut rest)?;
            program_bytes += before - rest.0.len();
            if program_bytes > MOST_PROGRAM_BYTES {
                return malformed(format!(
                    "{program_bytes} bytes of programs up to {model}; expected at most {MOST_PROGRAM_BYTES}"
                ));
            }
            models.push((model, Load { instances, programs }));
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

/// Returns the most bytes of a model without programs.
fn most_bytes(model: &str, instances: &[(Box<str>, Published)]) -> usize {
    let names: usize = instances.iter().map(|(name, _)| name.len()).sum();
    MODEL_BYTES + model.len() + names + INSTANCE_BYTES * instances.len()
}

fn write_load(out: &mut Vec<u8>, load: &Published) {
    let numbers = load.share.numbers();
    let set = |number: &&f64| (**number as f32) != 0.0;
    let mask = numbers.iter().rev().fold(0, |mask, number| (mask << 1) | u64::from(set(&number)));
    write_int(out, mask);
    numbers.iter().filter(set).for_each(|number| write_float(out, *number));
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
    Ok(Share::of(numbers).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::{Finish, PeerProgram, Prompt, Root, State};
    use proptest::prelude::*;

    fn loads() -> impl Strategy<Value = Published> {
        let number = prop_oneof![Just(0.0), (0u32..1 << 24).prop_map(f64::from)];
        prop::array::uniform16(number).prop_map(|numbers| Share::of(numbers).into())
    }

    fn program() -> impl Strategy<Value = PeerProgram> {
        let words = prop::array::uniform4(any::<u64>());
        let numbers = (0u64..1 << 62, 0u64..1 << 40, prop::array::uniform3(any::<u16>()), -9i8..=9);
        let kind = (0..State::NAMES.len(), 0..Finish::NAMES.len(), prop::array::uniform4(any::<bool>()));
        let base = prop::option::of((any::<u64>(), any::<u32>()));
        let prompt = (any::<u32>(), prop::collection::vec(any::<u64>(), 0..30), any::<u64>());
        let session = prop::option::of(any::<u64>());
        (words, numbers, kind, base, prompt, session, prop::option::of(0..2usize)).prop_map(
            |(words, (turn, tokens, numbers, level), (state, finish, flags), base, prompt, session, home)| {
                let [weight, age_seconds, rest_seconds] = numbers.map(f64::from);
                let (blocks, checkpoints, end) = prompt;
                PeerProgram {
                    key: words[0],
                    turn,
                    state: State::NAMES[state].1,
                    home,
                    tenant: words[1],
                    weight,
                    level,
                    session,
                    age_seconds,
                    rest_seconds,
                    tokens,
                    base: base.map(|(hash, tokens)| Root { hash, tokens: f64::from(tokens) / 3.0 }),
                    parent: words[2],
                    finish: Finish::NAMES[finish].1,
                    flags,
                    prompt: Prompt { blocks, checkpoints, end },
                }
            },
        )
    }

    fn programs() -> impl Strategy<Value = PeerPrograms> {
        let rows = prop::collection::vec(program(), 0..3);
        let (measured, gone) = (prop::array::uniform6(0.0..1e9), prop::collection::vec(any::<u64>(), 0..3));
        ("[a-z]{0,5}", "[a-zé]{0,5}", rows, measured, gone).prop_map(
            |(one, two, programs, measured, gone)| PeerPrograms {
                measured,
                instances: vec![one.into(), two.into()],
                programs,
                gone,
            },
        )
    }

    fn messages() -> impl Strategy<Value = LoadMessage> {
        let instances = prop::collection::vec(("[a-zé:/.0-9]{0,20}", loads()), 0..4);
        let models = prop::collection::vec(("[a-z]{0,5}", instances, programs()), 0..3);
        let budgets = prop::collection::vec(any::<u8>(), 0..20);
        ("[0-9a-f]{1,64}", 0..1u64 << 62, any::<Option<u8>>(), models, budgets).prop_map(
            |(sender, version, back, models, budgets)| LoadMessage {
                budgets: budgets.into(),
                sender: sender.into(),
                version,
                base: back.and_then(|back| version.checked_sub(back.into())),
                models: models
                    .into_iter()
                    .map(|(model, all, programs)| {
                        let instances = all.into_iter().map(|(name, load)| (name.into(), load)).collect();
                        (model.into(), Load { instances, programs })
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
            drop(LoadMessage::decode(&[&b"lmload\x04\x01a"[..], &bytes].concat()));
        }
    }

    /// The format stands for the numbers and their order: a change of them needs a new format.
    #[test]
    fn the_format_has_these_numbers() {
        let names = "coming queued scheduled decoding decode_tokens bound_tokens remaining_tokens \
            bound_remaining_tokens queued_prefill_tokens queued_prefill_pairs recent_prefill_tokens \
            recent_prefill_pairs window_prefill_tokens window_output_tokens fetches other_tokens";
        assert_eq!((FORMAT, Share::NAMES.join(" ")), (4, names.to_owned()));
        let other = LoadMessage::decode(b"lmload\x02anything").unwrap_err().to_string();
        assert_eq!(
            other,
            "load message of format 2; this router reads format 4; run the same version on all routers"
        );
    }

    /// A message of 1,024 models once had room for 4,096 programs of each.
    #[test]
    fn programs_are_bounded_over_all_models() {
        let row = PeerProgram {
            key: 1,
            turn: 0,
            state: State::NAMES[0].1,
            home: None,
            tenant: 0,
            weight: 0.0,
            level: 0,
            session: None,
            age_seconds: 0.0,
            rest_seconds: 0.0,
            tokens: 0,
            base: None,
            parent: 0,
            finish: Finish::NAMES[0].1,
            flags: [false; 4],
            prompt: Prompt { blocks: 0, checkpoints: vec![0; 300], end: 0 },
        };
        let load = Load {
            programs: PeerPrograms { programs: vec![row; 1000], ..PeerPrograms::default() },
            ..Load::default()
        };
        let read = |models: &[&str]| {
            let models = models.iter().map(|name| ((*name).into(), load.clone())).collect();
            let message =
                LoadMessage { sender: "a".into(), version: 1, base: None, models, budgets: [].into() };
            LoadMessage::decode(&message.encode())
        };
        assert!(read(&["one"]).is_ok());
        let error = read(&["one", "two"]).unwrap_err().to_string();
        assert!(error.ends_with("bytes of programs up to two; expected at most 4194304"), "{error}");
    }

    #[test]
    fn counts_are_bounded_before_anything_is_read() {
        let head = b"lmload\x04\x01a\x00\x00";
        let cases: [(&[u8], &str); 9] = [
            (b"\xff\xff\x03", "65535 models; expected at most 1024"),
            (b"\x01\x01m\xff\xff\xff\x7f", "268435455 instances; expected at most 65536"),
            (b"\x01\x01m\x01\xc9\x01", "201 bytes of an instance; expected at most 200"),
            (b"\x01\x01m\x01\x01e\x80\x80\x04", "mask 0x10000 of e; expected at most 16 bits"),
            (
                b"\x01\x01m\x00\
                \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
                \0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\
                \x00\x81\x20",
                "4097 programs; expected at most 4096",
            ),
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

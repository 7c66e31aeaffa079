//! Tickets: one for each request in flight, in a slot map whose keys never come back.
use super::ledger::Entry;
use crate::error::CoreError;
use crate::ids::Seconds;
use crate::plan::{Pull, Segment, Usage};
use crate::priority::vtc::Place;
use crate::request::{Request, Tenant};
use slotmap::{DefaultKey, Key, KeyData, SlotMap};

/// Key of a ticket: slot and generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TicketId(pub u64);

impl TicketId {
    fn of(key: DefaultKey) -> TicketId {
        TicketId(key.data().as_ffi())
    }

    fn key(self) -> DefaultKey {
        KeyData::from_ffi(self.0).into()
    }
}

/// What a segment's instance fetches from another before it begins.
#[derive(Clone, Copy, Debug)]
pub struct Pulling {
    /// What is fetched; once it is over, what came.
    pub pull: Pull,
    /// Generation of the holder when it was decided.
    pub holder_generation: u32,
    /// What it was expected to take.
    pub expected_seconds: Seconds,
    /// Whether the holder still serves it.
    pub under_way: bool,
}

/// One segment of a ticket's plan, with what the ledger holds of it.
#[derive(Clone, Debug)]
pub struct Leg {
    /// The segment.
    pub segment: Segment,
    /// Generation of the instance when it was placed.
    pub instance_generation: u32,
    /// What the ledger holds of it.
    pub entry: Entry,
    /// Blocks of the chain that the instance was believed to hold.
    pub hit_blocks: u32,
    /// Whether the index was told that the prompt is on its way there.
    pub told: bool,
    /// Whether what it computes of the prompt is in its instance's backlog.
    pub queued: bool,
    /// What is pulled before it begins.
    pub pull: Option<Pulling>,
    /// When it is expected to begin to decode; `None`: once its own prefill is over.
    pub start: Option<Seconds>,
}

impl Leg {
    /// What tells it from its request's other segments, which may be on the same instance: the
    /// ticket's slot, and its first token.
    pub fn key(&self, ticket: u32) -> (u32, u32) {
        (ticket, self.segment.from_token)
    }

    /// One past the last token that need not be computed because it comes from elsewhere; 0 where
    /// none does.
    pub fn carried(&self) -> u32 {
        let pulled = self.pull.map(|pulling| pulling.pull).filter(|pull| pull.tokens() > 0);
        self.segment.from_token.max(pulled.map_or(0, |pull| pull.to_token))
    }

    /// Whether it ends before its request's first output token, or with it.
    pub fn prefills_only(&self) -> bool {
        self.segment.to_token.is_some_and(|to| f64::from(to) <= self.entry.prompt_tokens)
    }
}

/// A request in flight.
#[derive(Clone, Debug)]
pub struct TicketState {
    /// The open segment.
    pub leg: Leg,
    /// Segments bound behind it, in order.
    pub later: Vec<Leg>,
    /// When the segment before the open one ended, and what its engine said.
    pub handed_over: Option<(Seconds, Usage)>,
    /// Its receipt.
    pub decision: u64,
    /// When it was decided.
    pub decided_at: Seconds,
    /// Tokens that one block of `chain` stands for.
    pub tokens_per_block: f64,
    /// Its prompt's chain, kept for the index and for a retry elsewhere; its length, and that of
    /// its answer where known.
    pub chain: Vec<u64>,
    /// See above.
    pub prompt_tokens: u32,
    /// See above.
    pub expected_output_tokens: Option<u32>,
    /// Of these, thoughts; and the class of lengths that the caller named.
    pub think_tokens: Option<u32>,
    /// See above.
    pub length_class: Option<u64>,
    /// Whether it may be cut at other places than its prompt's end.
    pub may_be_cut: bool,
    /// Its instance may pull a prefix of its prompt.
    pub may_be_pulled_for: bool,
    /// Hash of its session key, where it has one.
    pub session: Option<u64>,
    /// Whose it is, the hash of its LoRA adapter's name, and the priority that it brought.
    pub tenant: Tenant,
    /// See above.
    pub lora: Option<u64>,
    /// See above.
    pub priority: Option<f64>,
    /// Its tenant's place, where tenants are served in turn.
    pub place: Option<Place>,
    /// Slots that failed the open segment.
    pub failed: Vec<u32>,
    /// Slots that failed the running request: not asked for any segment of it again.
    pub lost: Vec<u32>,
}

impl TicketState {
    /// The request, as far as it is kept.
    pub fn request(&self) -> Request<'_> {
        Request {
            chain: &self.chain,
            prompt_tokens: self.prompt_tokens,
            tokens_per_block: self.tokens_per_block,
            expected_output_tokens: self.expected_output_tokens,
            think_tokens: self.think_tokens,
            length_class: self.length_class,
            session: self.session,
            uncut: (!self.may_be_cut).then_some("it must stay in one piece"),
            unpulled: (!self.may_be_pulled_for).then_some("nothing must be pulled for it"),
            tenant: self.tenant,
            lora: self.lora,
            priority: self.priority,
        }
    }
}

/// All open tickets.
#[derive(Debug, Default)]
pub struct Tickets {
    open: SlotMap<DefaultKey, TicketState>,
    chains: Vec<Vec<u64>>,
}

/// Spare chain buffers kept for the next tickets.
const SPARE_CHAINS: usize = 64;

impl Tickets {
    /// Opens a ticket.
    pub fn open(&mut self, state: TicketState) -> TicketId {
        TicketId::of(self.open.insert(state))
    }

    /// The state of an open ticket.
    ///
    /// # Errors
    /// `Ticket` where it is closed.
    pub fn get(&mut self, id: TicketId) -> Result<&mut TicketState, CoreError> {
        let closed = || CoreError::Ticket { ticket: id.0, problem: "it is closed".into() };
        self.open.get_mut(id.key()).ok_or_else(closed)
    }

    /// Closes a ticket; `None` where it was closed before.
    pub fn close(&mut self, id: TicketId) -> Option<TicketState> {
        self.open.remove(id.key())
    }

    /// All open tickets, in the order of the slots.
    pub fn iter(&self) -> impl Iterator<Item = (TicketId, &TicketState)> {
        self.open.iter().map(|(key, state)| (TicketId::of(key), state))
    }

    /// Number of open tickets.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether none is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// An empty buffer for a chain, one used before where there is one.
    pub fn spare_chain(&mut self) -> Vec<u64> {
        self.chains.pop().unwrap_or_default()
    }

    /// Gives a chain's buffer back.
    pub fn return_chain(&mut self, mut chain: Vec<u64>) {
        if self.chains.len() < SPARE_CHAINS {
            chain.clear();
            chain.shrink_to(16 * 1024);
            self.chains.push(chain);
        }
    }
}

/// The slot of a ticket: its name in the ledger, unique among the open ones.
pub fn slot(id: TicketId) -> u32 {
    id.0 as u32
}

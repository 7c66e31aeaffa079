//! Tickets of requests in flight, in a slot map whose keys are never reused.
use super::ledger::Entry;
use crate::error::CoreError;
use crate::estimate::Turn;
use crate::fleet::{InstanceId, Role};
use crate::ids::{ArrivalId, Seconds};
use crate::plan::{PrefixFetch, Segment, Usage};
use crate::priority::vtc::Place;
use crate::request::{Allowed, Arm, Request, Tenant};
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

/// A prefix fetch before a segment begins.
#[derive(Clone, Copy, Debug)]
pub struct PlannedFetch {
    /// The planned fetch; once it is over, the fetched tokens.
    pub fetch: PrefixFetch,
    /// Its holder.
    pub holder: InstanceId,
    /// Expected duration.
    pub expected_seconds: Seconds,
    /// Whether the fetch still runs.
    pub under_way: bool,
}

/// One segment of a ticket's plan, with its entry in the ledger.
#[derive(Clone, Debug)]
pub struct PlacedSegment {
    /// The segment.
    pub segment: Segment,
    /// The instance whose ledger counts it; [`InstanceId::NONE`]: none counts it any more.
    pub at: InstanceId,
    /// Role of the instance at the placement.
    pub role: Role,
    /// Entry in the ledger.
    pub entry: Entry,
    /// Blocks of the chain that the instance was predicted to hold on the GPU.
    pub hit_blocks: u32,
    /// Blocks behind them that it was predicted to load from a lower tier.
    pub tier_blocks: u32,
    /// Whether the index already contains the prompt for this instance.
    pub told: bool,
    /// Whether its prefill counts in the instance's backlog.
    pub queued: bool,
    /// Prefix fetch before the segment begins.
    pub fetch: Option<PlannedFetch>,
    /// Expected start of decoding; `None`: after its own prefill.
    pub start: Option<Seconds>,
}

impl PlacedSegment {
    /// Returns the ticket's slot and the segment's first token, which identify the segment among
    /// its request's segments on one instance.
    pub fn key(&self, ticket: u32) -> (u32, u32) {
        (ticket, self.segment.from_token)
    }

    /// Returns the prompt tokens that its engine was predicted to have or to fetch.
    pub fn predicted_cached_tokens(&self) -> f64 {
        self.entry.prompt_tokens - self.entry.new_tokens
    }

    /// Returns one past the last token that arrives by transfer and needs no computation; 0 if
    /// there is none.
    pub fn carried(&self) -> u32 {
        let fetched = self.fetch.map(|planned| planned.fetch).filter(|fetch| fetch.tokens() > 0);
        self.segment.from_token.max(fetched.map_or(0, |fetch| fetch.to_token))
    }

    /// Returns whether the segment ends before or with the request's first output token.
    pub fn prefills_only(&self) -> bool {
        self.segment.to_token.is_some_and(|to| f64::from(to) <= self.entry.prompt_tokens)
    }
}

/// Data of listeners, kept with a request until its end.
#[derive(Clone, Copy, Debug, Default)]
pub struct Kept {
    /// Turn of its conversation, if a forecast reads turns.
    pub turn: Turn,
    /// Its place among its tenant's requests, if service orders the engines' queues and the request
    /// did not wait for room in the router.
    pub place: Option<Place>,
}

/// The handoff from one segment to the next.
#[derive(Clone, Copy, Debug)]
pub struct HandedOver {
    /// Time of the handoff.
    pub at: Seconds,
    /// Usage that the first segment's engine reported.
    pub usage: Usage,
    /// Cached tokens predicted for the first segment.
    pub predicted_cached_tokens: f64,
}

/// A request in flight.
#[derive(Clone, Debug)]
pub struct TicketState {
    /// The open segment.
    pub open: PlacedSegment,
    /// Segments bound after the open segment, in order.
    pub later: Vec<PlacedSegment>,
    /// The last handoff, if there was one.
    pub handed_over: Option<HandedOver>,
    /// Number of its decision record.
    pub decision: u64,
    /// Time of its decision.
    pub decided_at: Seconds,
    /// Tokens per block of `chain`.
    pub tokens_per_block: f64,
    /// Chain of the prompt, kept for the index and for retries.
    pub chain: Vec<u64>,
    /// Prompt length in tokens.
    pub prompt_tokens: u32,
    /// Expected output tokens, if known.
    pub expected_output_tokens: Option<u32>,
    /// Reasoning tokens among the expected output tokens, if known.
    pub think_tokens: Option<u32>,
    /// Length class given by the caller.
    pub length_class: Option<u64>,
    /// Whether the request may be cut at positions other than the end of the prompt.
    pub may_be_cut: bool,
    /// Whether its instance may fetch a prefix of its prompt.
    pub may_fetch: bool,
    /// The only instances that may take the request; `None`: all instances may.
    pub instances: Option<Allowed>,
    /// Hash of its session key, if it has one.
    pub session: Option<u64>,
    /// Tenant of the request.
    pub tenant: Tenant,
    /// Hash of its LoRA adapter's name, if it names one.
    pub lora: Option<u64>,
    /// Priority that the request brought.
    pub priority: Option<f64>,
    /// Its arrival, if arrivals are recorded.
    pub arrival: Option<ArrivalId>,
    /// Whether its answer comes whole.
    pub whole_answer: bool,
    /// Policy that decides it.
    pub arm: Arm,
    /// Data of listeners.
    pub kept: Kept,
    /// Instances that failed the open segment.
    pub failed: Vec<InstanceId>,
    /// Instances that failed the running request; they get no further segment of it.
    pub lost: Vec<InstanceId>,
}

impl TicketState {
    /// Returns the request, as far as it is kept.
    pub fn request(&self) -> Request<'_> {
        Request {
            chain: &self.chain,
            prompt_tokens: self.prompt_tokens,
            tokens_per_block: self.tokens_per_block,
            expected_output_tokens: self.expected_output_tokens,
            think_tokens: self.think_tokens,
            length_class: self.length_class,
            session: self.session,
            split_reason: (!self.may_be_cut).then_some("it must not be split"),
            instances: self.instances.as_ref(),
            fetch_reason: (!self.may_fetch).then_some("no prefix must be fetched for it"),
            arrival: self.arrival,
            ttft_slo_seconds: None, // it has been admitted
            level: 0,
            sheddable: false,
            whole_answer: self.whole_answer,
            session_final: false, // its arrival says it
            home: None,
            tenant: self.tenant,
            lora: self.lora,
            priority: self.priority,
            arm: self.arm,
            shadow: false, // it is placed
        }
    }
}

/// All open tickets.
#[derive(Debug, Default)]
pub struct Tickets {
    open: SlotMap<DefaultKey, TicketState>,
    chains: Vec<Vec<u64>>,
}

/// Number of spare chain buffers to keep for new tickets.
const SPARE_CHAINS: usize = 64;

impl Tickets {
    /// Opens a ticket.
    pub fn open(&mut self, state: TicketState) -> TicketId {
        TicketId::of(self.open.insert(state))
    }

    /// Returns the state of an open ticket.
    ///
    /// # Errors
    /// `Ticket` if the ticket is closed.
    pub fn get(&mut self, id: TicketId) -> Result<&mut TicketState, CoreError> {
        let closed = || CoreError::Ticket { ticket: id.0, problem: "it is closed".into() };
        self.open.get_mut(id.key()).ok_or_else(closed)
    }

    /// Closes a ticket; returns `None` if it was already closed.
    pub fn close(&mut self, id: TicketId) -> Option<TicketState> {
        self.open.remove(id.key())
    }

    /// Yields all open tickets, in slot order.
    pub fn iter(&self) -> impl Iterator<Item = (TicketId, &TicketState)> {
        self.open.iter().map(|(key, state)| (TicketId::of(key), state))
    }

    /// Returns the number of open tickets.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Returns whether no ticket is open.
    pub fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns an empty chain buffer, reused if possible.
    pub fn spare_chain(&mut self) -> Vec<u64> {
        self.chains.pop().unwrap_or_default()
    }

    /// Returns a chain's buffer for reuse.
    pub fn return_chain(&mut self, mut chain: Vec<u64>) {
        if self.chains.len() < SPARE_CHAINS {
            chain.clear();
            chain.shrink_to(16 * 1024);
            self.chains.push(chain);
        }
    }
}

/// Returns the slot of a ticket: its key in the ledger, unique among open tickets.
pub fn slot(id: TicketId) -> u32 {
    id.0 as u32
}

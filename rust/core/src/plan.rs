//! Plans: a request is a chain of segments placed on instances.
//!
//! A plan holds the open segment and the segments bound after it. If a segment ends before the
//! request does, another segment follows. Its instance is chosen at the decision or when its turn
//! comes ([`Binding`]). Prefill/decode disaggregation is two segments, cut at the end of the
//! prompt. A request can be cut at any other token ([`Cuts`]). A running request can move, which
//! cuts it at its current token.
//!
//! A cut at token `s` means that the first segment computes the KV cache of the first `s` tokens.
//! With a prompt of `P` tokens and `s >= P`, the first segment produces `s - P` output tokens that
//! count. An engine that transfers KV with its last token, as vLLM does, produces one token more,
//! and the next segment produces it again. If the next instance can compute a token after the
//! fetched KV, `s - P` tokens suffice; the last token then has no KV yet.
use crate::ids::{Seconds, Slot};
use crate::program::Finish;

/// A range of a request's tokens (prompt and output counted together) on one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Instance that runs the segment.
    pub instance: Slot,
    /// First token.
    pub from_token: u32,
    /// One past the last token; `None`: open, to the end of the request.
    pub to_token: Option<u32>,
}

/// When the instance of a follow-up segment is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Binding {
    /// At the decision, by predicted load. Engines that move KV during prefill need this (SGLang's
    /// bootstrap).
    #[default]
    Early,
    /// When the previous segment has ended.
    Late,
}

/// Positions at which an instance's engine can send or receive a request's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Cuts {
    /// No position.
    Nowhere,
    /// The end of the prompt (SGLang's prefill engines stop at the first token).
    PromptEnd,
    /// The end of the prompt and after any output token (vLLM's NIXL connector).
    Output,
    /// Any position, also inside the prompt (vLLM's NIXL connector in bidirectional mode).
    #[default]
    Anywhere,
}

impl Cuts {
    /// All values, with their names.
    pub const NAMES: [(&'static str, Cuts); 4] = [
        ("nowhere", Cuts::Nowhere),
        ("prompt_end", Cuts::PromptEnd),
        ("output", Cuts::Output),
        ("anywhere", Cuts::Anywhere),
    ];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        Cuts::NAMES.iter().find(|(_, cuts)| *cuts == self).expect("every value has a name").0
    }

    /// Returns the allowed cut for a wanted cut at `token`: `token`, the end of the prompt
    /// (`prompt_tokens`), or `None`.
    pub fn nearest(self, token: u32, prompt_tokens: u32) -> Option<u32> {
        match self {
            Cuts::Nowhere => None,
            Cuts::PromptEnd => Some(prompt_tokens),
            Cuts::Output => Some(token.max(prompt_tokens)),
            Cuts::Anywhere => Some(token),
        }
    }
}

/// A prefix fetch: the instance fetches KV of a part of the prompt from another instance before the
/// request begins. The plan then has one more segment, `[0, to_token)` on the holder, without
/// computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixFetch {
    /// Instance that holds the KV.
    pub holder: Slot,
    /// First token. Earlier tokens are in the instance's own cache.
    pub from_token: u32,
    /// One past the last token. The instance computes the rest.
    pub to_token: u32,
}

impl PrefixFetch {
    /// Returns the number of tokens to transfer.
    pub fn tokens(&self) -> u32 {
        self.to_token - self.from_token
    }
}

/// An event of a ticket's open segment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The request was sent to the instance; an approximate index records its prompt now.
    Sent,
    /// The prefix fetch is over. The instance computes the missing tokens and begins now.
    Fetched {
        /// Fetched tokens, counted from the start of the fetch; 0: none arrived.
        tokens: u32,
        /// Seconds from the start of the fetch, waiting included.
        seconds: Seconds,
        /// Whether it was given up because it took too long.
        late: bool,
    },
    /// The engine took the request off its queue (optional; reported by simulators and some
    /// engines). The value, if reported, is the number of prompt tokens found in its cache, fetched
    /// tokens included. The engine computes the rest, even if the ledger expected another number.
    Scheduled(Option<u32>),
    /// The engine computed this many more prefill tokens (optional; exact).
    Prefilled(u32),
    /// The first output token arrived. If the open segment ends with the prompt and the next
    /// segment runs at the same time, the open segment is over.
    FirstToken,
    /// This many further output tokens arrived.
    Tokens(u32),
    /// The segment ended as planned: the request ended, or the next segment begins.
    Finished(Usage),
    /// The segment was closed early, after all output tokens reported so far. The segment that a
    /// move bound after it continues.
    Moved,
    /// The request completed inside this segment: the output was shorter than expected, and no
    /// further segment runs.
    Ended(Usage),
    /// The segment failed. Another instance may take the request.
    Failed(Failure),
    /// The segment failed, and no other instance is tried.
    GaveUp(Failure),
}

/// Token counts and the end of an answer that the engine reported; `None`: not reported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: Option<u32>,
    /// Prompt tokens found in the engine's cache.
    pub cached_tokens: Option<u32>,
    /// Output tokens.
    pub output_tokens: Option<u32>,
    /// Why the answer ended.
    pub finish: Finish,
}

impl Usage {
    /// Returns whether the answer ended at its limit of tokens.
    pub fn at_limit(&self) -> bool {
        self.finish == Finish::Length
    }
}

/// Why a segment failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The instance's address refuses connections.
    Refused,
    /// The host name cannot be resolved.
    Dns,
    /// TLS failed: a certificate or another TLS error.
    Tls,
    /// The connection failed for another reason (for example, no route to the host).
    Unreachable,
    /// The connection broke.
    Reset,
    /// A time limit passed.
    Timeout,
    /// The engine declined the request (busy, shutting down).
    Status,
    /// The client disconnected.
    Cancelled,
    /// The engine reported an internal error.
    EngineError,
    /// The router lacks a file descriptor, a port or memory for a connection; the instance is not
    /// at fault.
    Resources,
}

impl Failure {
    /// All values, with their names in decision records and metrics.
    pub const NAMES: [(&'static str, Failure); 10] = [
        ("refused", Failure::Refused),
        ("dns", Failure::Dns),
        ("tls", Failure::Tls),
        ("unreachable", Failure::Unreachable),
        ("reset", Failure::Reset),
        ("timeout", Failure::Timeout),
        ("status", Failure::Status),
        ("cancelled", Failure::Cancelled),
        ("engine_error", Failure::EngineError),
        ("resources", Failure::Resources),
    ];

    /// Returns whether another instance may take the request, if no token was received.
    pub fn may_move(self) -> bool {
        !matches!(self, Failure::Cancelled | Failure::EngineError | Failure::Resources)
    }

    /// Returns the name.
    pub fn name(self) -> &'static str {
        Failure::NAMES.iter().find(|(_, f)| *f == self).expect("every failure has a name").0
    }
}

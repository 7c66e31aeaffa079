//! Plans: a request is a chain of segments placed on instances.
//!
//! A plan is made segment by segment: the open one, and those bound behind it. Where a segment ends before the request does, another follows: bound
//! at the decision, or chosen when its turn comes ([`Binding`]). Prefill/decode is two segments cut at the prompt's end; a request may be
//! cut at any other token, too ([`Cuts`]), and a running one moved, which cuts it where it is.
//!
//! A cut at token `s` means: the KV cache of the first `s` tokens is computed before it. Of a prompt of `P` tokens, a first segment with `s >= P` makes
//! `s - P` output tokens that count; an engine that hands over with its last token, as vLLM does, makes one more, which is made again behind the cut,
//! unless the next one can compute a token behind what it fetches: then `s - P` are enough, the last without its KV.
use crate::ids::{InstanceId, Seconds};

/// A range of a request's tokens, prompt and output counted through, on one instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where it runs.
    pub instance: InstanceId,
    /// Its first token.
    pub from_token: u32,
    /// One past its last token; `None`: open, to the request's end.
    pub to_token: Option<u32>,
}

/// When the instance of a segment that follows another is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Binding {
    /// At the decision, by what is expected then; engines that move KV while they prefill need to know it (SGLang's bootstrap).
    #[default]
    Early,
    /// When the segment before it has ended.
    Late,
}

/// Where an instance can hand a request over, or take one, by what its engine can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Cuts {
    /// Nowhere.
    Nowhere,
    /// Where the prompt ends (SGLang's prefill engines stop at the first token).
    PromptEnd,
    /// There and behind any output token (vLLM's NIXL connector).
    Output,
    /// Anywhere, inside the prompt, too (the same in bidirectional mode).
    #[default]
    Anywhere,
}

impl Cuts {
    /// All of them, with their names.
    pub const NAMES: [(&'static str, Cuts); 4] = [
        ("nowhere", Cuts::Nowhere),
        ("prompt_end", Cuts::PromptEnd),
        ("output", Cuts::Output),
        ("anywhere", Cuts::Anywhere),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Cuts::NAMES.iter().find(|(_, cuts)| *cuts == self).expect("every value has a name").0
    }

    /// The cut that it allows for one wished for at `token` of a prompt of `prompt_tokens`: the same, the prompt's end, or none.
    pub fn nearest(self, token: u32, prompt_tokens: u32) -> Option<u32> {
        match self {
            Cuts::Nowhere => None,
            Cuts::PromptEnd => Some(prompt_tokens),
            Cuts::Output => Some(token.max(prompt_tokens)),
            Cuts::Anywhere => Some(token),
        }
    }
}

/// What a request's instance fetches before the request begins there: the KV of a part of its prompt that another instance holds. With it the plan has one more
/// segment, `[0, to_token)` on the holder, of which nothing is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pull {
    /// Who holds it.
    pub holder: InstanceId,
    /// Its first token: what comes before is in the instance's own cache.
    pub from_token: u32,
    /// One past its last token: the rest is computed.
    pub to_token: u32,
}

impl Pull {
    /// Tokens to be moved.
    pub fn tokens(&self) -> u32 {
        self.to_token - self.from_token
    }
}

/// What happened to the open segment of a ticket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event {
    /// The request was written to the instance; an approximate index learns of it now.
    Sent,
    /// Its pull is over: so many tokens came (0: none did), so many seconds after they were asked for. The instance computes the rest, and begins now.
    Pulled {
        /// Of the tokens to be pulled, the leading ones that are there by now.
        tokens: u32,
        /// What it took, with all that it waited for.
        seconds: Seconds,
    },
    /// The engine took it off its queue (optional; known from a simulator or a talkative engine) and found this many tokens of its
    /// prompt in its cache, what came from elsewhere included, where it says so: the rest is what it has to compute, whatever was booked.
    Scheduled(Option<u32>),
    /// The engine computed this many more of its prefill tokens (optional; exact).
    Prefilled(u32),
    /// The first output token came back. Where the open segment ends with the prompt, the next one is at work with it (both legs run at once), and
    /// the open one is over.
    FirstToken,
    /// This many further output tokens came back.
    Tokens(u32),
    /// The segment ended well, as planned: the request did, or the next segment's turn has come.
    Finished(Usage),
    /// The segment was closed early, with all output tokens told of so far; the one that was bound behind it by a move goes on.
    Moved,
    /// The request ended well inside this segment, whatever was to follow: its answer was shorter than expected.
    Ended(Usage),
    /// It did not; another instance may take it.
    Failed(Failure),
    /// It did not, and no other instance shall be tried.
    GaveUp(Failure),
}

/// What the engine says it did, where it says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Prompt tokens.
    pub prompt_tokens: Option<u32>,
    /// Prompt tokens found in its cache.
    pub cached_tokens: Option<u32>,
    /// Output tokens.
    pub output_tokens: Option<u32>,
}

/// Why a segment failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nobody listens at the instance's address.
    Refused,
    /// Its host name cannot be resolved.
    Dns,
    /// No secure connection: a certificate, or another error of TLS.
    Tls,
    /// No connection, for another reason (no route to its host).
    Unreachable,
    /// The connection broke.
    Reset,
    /// A time limit passed.
    Timeout,
    /// The engine declined (busy, shutting down).
    Status,
    /// The client left.
    Cancelled,
    /// The engine reported an error of its own.
    EngineError,
    /// The router lacks a file descriptor, a port or memory for a connection; no instance is to blame.
    Resources,
}

impl Failure {
    /// All of them, with the names used in receipts and metrics.
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

    /// Whether another instance may take the request, as long as no token was seen.
    pub fn may_move(self) -> bool {
        !matches!(self, Failure::Cancelled | Failure::EngineError | Failure::Resources)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        Failure::NAMES.iter().find(|(_, f)| *f == self).expect("every failure has a name").0
    }
}

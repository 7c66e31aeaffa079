//! The declarations: one row an indicator. Source, unit, owner, freshness, and what its absence means.

/// Whose knowledge an indicator is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The router: known at once, from what it sent and what came back.
    Router,
    /// The engine: reported, with an age.
    Engine,
    /// Both: the router's own count plus what the engine reports beyond it.
    Merged,
    /// The request itself.
    Request,
}

/// What an indicator has one value for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Each instance.
    Instance,
    /// Each pair of instance and request.
    Pair,
    /// The request: the same for all instances.
    Request,
}

/// One declaration.
#[derive(Clone, Copy, Debug)]
pub struct IndicatorDecl {
    /// The indicator.
    pub id: Indicator,
    /// Name in expressions, YAML and receipts; Python's symbol is the same in capitals.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// What it has one value for.
    pub scope: Scope,
    /// Whose knowledge it is.
    pub owner: Owner,
    /// How fresh it is.
    pub freshness: &'static str,
    /// What it means when it is absent, and when that happens.
    pub absent: &'static str,
    /// What it is.
    pub about: &'static str,
}

macro_rules! indicators {
    ($($id:ident $name:literal, $unit:literal, $scope:ident, $owner:ident, $fresh:literal, $absent:literal, $about:literal;)*) => {
        /// Every indicator, in the order of [`INDICATORS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Indicator { $(#[doc = $about] $id),* }

        /// The one table that the docs page, the expressions and the Python symbols are made from.
        pub const INDICATORS: &[IndicatorDecl] = &[$(IndicatorDecl {
            id: Indicator::$id, name: $name, unit: $unit, scope: Scope::$scope, owner: Owner::$owner,
            freshness: $fresh, absent: $absent, about: $about,
        }),*];
    };
}

indicators! {
    Bs "bs", "requests", Instance, Merged, "at once; foreign part as old as the last report", "never",
        "Batch size: requests on the instance, queued and running (`q_bs + r_bs`).";
    QBs "q_bs", "requests", Instance, Merged, "at once; foreign part as old as the last report", "never",
        "Requests waiting: placed here without a first token (their prompt may be prefilled elsewhere), less those that have left the engine's queue by its last report, and others' as it reports them.";
    RBs "r_bs", "requests", Instance, Merged, "at once; foreign part as old as the last report", "never",
        "Requests running: past their first token, or gone from the engine's queue by its last report, and others' as it reports them.";
    DecodeBs "decode_bs", "requests", Instance, Router, "at once", "never",
        "Requests of ours past their first token.";
    BoundBs "bound_bs", "requests", Instance, Router, "at once", "never",
        "Requests of ours bound to the instance without a first token yet, those included whose prompt is prefilled elsewhere.";
    QueuedPrefillTokens "queued_prefill_tokens", "tokens", Instance, Router, "at once; drains by the learned cost of tokens and attention", "never",
        "Prefill tokens placed on the instance and not yet computed.";
    Tokens "tokens", "tokens", Instance, Router, "at each token", "never",
        "Context tokens (prompt and generated) of all our requests on the instance, queued ones included.";
    DecodeTokens "decode_tokens", "tokens", Instance, Router, "at each token", "never",
        "Context tokens of our requests past their first token.";
    BoundTokens "bound_tokens", "tokens", Instance, Router, "at once", "never",
        "Prompt tokens of our requests without a first token yet.";
    RemainingTokens "remaining_tokens", "tokens", Instance, Router, "at each token", "a request whose output length is unknown counts 0",
        "Output tokens still to come from requests running on the instance, as far as they are known.";
    IndexBlocks "index_blocks", "blocks", Instance, Router, "at each event or placement", "never",
        "Blocks that the KV index holds for the instance (the size of its tree).";
    Pulls "pulls", "requests", Instance, Router, "at once", "never",
        "Prefixes that other instances are pulling from this one now.";
    CacheFreeTokens "cache_free_tokens", "tokens", Instance, Router, "as fresh as the KV index", "where the instance's cache size is unknown",
        "Tokens that the instance's KV cache can still take before it evicts, by the KV index: its capacity less what it holds, at least 0.";
    PrefillTokensPerSecond "prefill_tokens_per_second", "tokens/s", Instance, Router, "learned from first tokens", "until the first prefill was seen",
        "Prefill rate learned from our own traffic.";
    PrefillRelativeError "prefill_relative_error", "fraction", Instance, Router, "learned from first tokens", "until five prefills were seen",
        "How far the learned cost of prefills was off, relative root mean square over the last twenty or so of our own: 0.1 is 10%.";
    StepSeconds "step_seconds", "s", Instance, Router, "learned from our streams' tokens; for the batch at once", "until some hundred steps of our streams were seen",
        "Time of the next decode step with the batch as it is (`decode_bs`, `decode_tokens`), by the step-time model learned from our own streams.";
    StepRelativeError "step_relative_error", "fraction", Instance, Router, "learned from our streams' tokens", "until some hundred steps of our streams were seen",
        "How far the learned step-time model was off, relative root mean square over the last twenty or so stretches of steps: 0.1 is 10%.";
    WindowPrefillTokens "window_prefill_tokens", "tokens", Instance, Router, "at once; decays with a time constant of 180 s", "never",
        "Uncached prompt tokens placed on the instance of late.";
    WindowOutputTokens "window_output_tokens", "tokens", Instance, Router, "at each token; decays with a time constant of 180 s", "never",
        "Output tokens that the instance produced of late.";
    KvUsage "kv_usage", "fraction", Instance, Engine, "as old as the last report", "until the engine reports it",
        "Share of the KV cache in use, 0 to 1, as the engine reports it.";
    ReportedWaiting "reported_waiting", "requests", Instance, Engine, "as old as the last report", "until the engine reports it",
        "Waiting requests as the engine reports them, unmerged.";
    ReportedRunning "reported_running", "requests", Instance, Engine, "as old as the last report", "until the engine reports it",
        "Running requests as the engine reports them, unmerged.";
    ReportAgeSeconds "report_age_seconds", "s", Instance, Engine, "at once", "until the engine reports",
        "Age of the engine's last report.";
    HitTokens "hit_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never",
        "Leading prompt tokens that the instance's cache is believed to hold.";
    KvHit "kv_hit", "fraction", Pair, Router, "as fresh as the KV index", "never",
        "`hit_tokens / prompt_tokens`, 0 to 1.";
    NewTokens "new_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never",
        "Prompt tokens that miss the instance's cache.";
    PToken "p_token", "tokens", Pair, Router, "at once", "never",
        "LMETRIC's P-token: `queued_prefill_tokens + new_tokens`, at least 1 (LMETRIC section 5.1, Figure 18c).";
    PSeconds "p_seconds", "s", Pair, Router, "at once; its rate is learned from first tokens", "never: until an instance's prefill rate was learned, the pool's mean or an assumed 8,000 tokens/s serves",
        "`p_token` in seconds: over the instance's learned `prefill_tokens_per_second`.";
    PullTokens "pull_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never: 0 where the router pulls nothing, or it would not pay",
        "Of `new_tokens`, those that the instance would pull from the instance that holds most of the prompt and has time for it.";
    PullCostTokens "pull_cost_tokens", "tokens", Pair, Router, "as fresh as the KV index; its cost is learned from pulls", "never: 0 where `pull_tokens` is",
        "What that costs: the expected seconds of the pull, in prefill tokens that the instance would compute meanwhile (by its step-time model, given or learned, else at its learned rate).";
    PredictedTtftSeconds "predicted_ttft_seconds", "s", Pair, Router, "at once", "never: until a prefill rate was learned, the pool's mean or an assumed 8,000 tokens/s serves",
        "Time to first token if placed here: by the step-time model where a profile is set, or one was learned here and is off by less than a third; else `p_token` at the learned rate. Its source is in `Router.stats()` and `/metrics`.";
    PredictedTpotSeconds "predicted_tpot_seconds", "s", Pair, Router, "at once", "without a profile, until the instance's step time was learned",
        "Time per output token if placed here: a decode step of the batch with this request in it, by the step-time model (the profile's, else the learned one).";
    DecodeTokensPerSecond "decode_tokens_per_second", "tokens/s", Instance, Router, "learned from our streams' tokens; fades in 10 s; kept where a policy reads it or a hand-off indicator", "until tokens of a decode were seen",
        "Tokens that a request of ours which decodes there makes a second (SIBYL's v_k: one for all requests of a batch).";
    HandoffRunningTokens "handoff_running_tokens", "tokens", Pair, Router, "at each token; kept where a policy reads it", "never",
        "Context tokens that the instance's present decodes are expected to hold when this request starts to decode (SIBYL type 1, Eq. 6).";
    HandoffArrivedTokens "handoff_arrived_tokens", "tokens", Pair, Router, "at each token; kept where a policy reads it", "never",
        "The same of requests bound there that will decode by then (SIBYL type 2, Eq. 7).";
    HandoffArrivedTokensForCertain "handoff_arrived_tokens_for_certain", "tokens", Pair, Router, "at each token; kept where a policy reads it", "never",
        "`handoff_arrived_tokens` with every request taken to last (SIBYL Appendix J, prob @ 1).";
    HandoffComingTokens "handoff_coming_tokens", "tokens", Pair, Router, "at each token; kept where a policy reads it", "never",
        "What requests bound there that start to decode later count for: their prompts, less the further off they are (SIBYL type 3, Eq. 8).";
    DecodePressure "decode_pressure", "requests", Pair, Router, "at each token; its weights once a second; kept where a policy reads it", "unless a policy brings the weights (`sibyl_plus`); until 16 answers ended, each request counts 1",
        "What the requests that decode there and those bound there will weigh from this request's hand-over on, in requests that begin behind no prompt.";
    DecodePressureKnown "decode_pressure_known", "requests", Pair, Router, "at each token; its weights once a second; kept where a policy reads it", "unless a policy brings the weights (`sibyl_plus`); until 16 answers ended, each request counts 1",
        "`decode_pressure` where answers are as long as `expected_output_tokens` says: an oracle in simulations. A request that does not say is taken to run on.";
    LoraBs "lora_bs", "requests", Pair, Router, "at once", "never: 0 if the request names no LoRA adapter",
        "Requests of ours on the instance with this request's LoRA adapter.";
    TenantBs "tenant_bs", "requests", Pair, Router, "at once", "never: 0 if the request has no tenant",
        "Requests of ours on the instance of this request's tenant.";
    HandoffSeconds "handoff_seconds", "s", Request, Router, "at once", "where no second segment is placed",
        "Expected time from the decision to this request's first decode step: its predicted prefill and the hand-over, as it was learned.";
    PromptTokens "prompt_tokens", "tokens", Request, Request, "at once", "never",
        "Prompt length; estimated where the prompt is text and no tokenizer is known.";
    ExpectedOutputTokens "expected_output_tokens", "tokens", Request, Request, "at once", "where the request does not say",
        "Output length, where the request bounds it or an oracle knows it.";
    Instances "instances", "instances", Request, Router, "at once", "never",
        "Instances that may take this request.";
    LoraName "lora_name", "text", Request, Request, "at once", "if the request names none",
        "LoRA adapter of the request, to compare with a text: `lora_name == \"sql\"`.";
    Tenant "tenant", "text", Request, Request, "at once", "if the request has none",
        "Tenant of the request, to compare with a text: `tenant == \"acme\"`.";
    LengthClass "length_class", "text", Request, Request, "at once", "if the request names none",
        "Class of the request's answer length, to compare with a text.";
    Priority "priority", "", Request, Request, "at once", "if the request has none",
        "Priority that the request brings, as vLLM has it: lower numbers go first.";
}

/// Number of indicators.
pub const COUNT: usize = INDICATORS.len();

impl Indicator {
    /// Its declaration.
    pub fn decl(self) -> &'static IndicatorDecl {
        &INDICATORS[self as usize]
    }

    /// The indicator of that name, in any case.
    pub fn from_name(name: &str) -> Option<Indicator> {
        INDICATORS.iter().find(|d| d.name.eq_ignore_ascii_case(name)).map(|d| d.id)
    }
}

/// A set of indicators: what a policy reads, so that no others are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndicatorSet(u64);

const _: () = assert!(COUNT <= 64);

impl IndicatorSet {
    /// The empty set.
    pub const EMPTY: IndicatorSet = IndicatorSet(0);

    /// All indicators.
    pub const ALL: IndicatorSet = IndicatorSet(u64::MAX >> (64 - COUNT));

    /// Indicators that are derived for each decision, from the request and the time. The ledger keeps all others.
    pub const DERIVED: IndicatorSet = IndicatorSet::of(&[
        Indicator::QueuedPrefillTokens,
        Indicator::IndexBlocks,
        Indicator::CacheFreeTokens,
        Indicator::StepSeconds,
        Indicator::WindowPrefillTokens,
        Indicator::WindowOutputTokens,
        Indicator::ReportAgeSeconds,
        Indicator::HitTokens,
        Indicator::KvHit,
        Indicator::NewTokens,
        Indicator::PToken,
        Indicator::PSeconds,
        Indicator::PullTokens,
        Indicator::PullCostTokens,
        Indicator::PredictedTtftSeconds,
        Indicator::PredictedTpotSeconds,
        Indicator::DecodeTokensPerSecond,
        Indicator::HandoffRunningTokens,
        Indicator::HandoffArrivedTokens,
        Indicator::HandoffArrivedTokensForCertain,
        Indicator::HandoffComingTokens,
        Indicator::DecodePressure,
        Indicator::DecodePressureKnown,
        Indicator::HandoffSeconds,
        Indicator::PromptTokens,
        Indicator::ExpectedOutputTokens,
        Indicator::Instances,
        Indicator::LoraBs,
        Indicator::TenantBs,
        Indicator::LoraName,
        Indicator::Tenant,
        Indicator::LengthClass,
        Indicator::Priority,
    ]);

    /// Indicators that are texts: expressions compare them with texts, by [`crate::request::text_number`].
    pub const TEXTS: IndicatorSet =
        IndicatorSet::of(&[Indicator::LoraName, Indicator::Tenant, Indicator::LengthClass]);

    /// The indicators of this set that the other does not hold.
    pub const fn without(self, other: IndicatorSet) -> IndicatorSet {
        IndicatorSet(self.0 & !other.0)
    }

    /// Indicators that depend on how much of the prompt an instance holds.
    pub const PREFIX_HITS: IndicatorSet = IndicatorSet::of(&[
        Indicator::HitTokens,
        Indicator::KvHit,
        Indicator::NewTokens,
        Indicator::PToken,
        Indicator::PSeconds,
        Indicator::PullTokens,
        Indicator::PullCostTokens,
        Indicator::PredictedTtftSeconds,
    ]);

    /// The set of these.
    pub const fn of(ids: &[Indicator]) -> IndicatorSet {
        let (mut bits, mut i) = (0, 0);
        while i < ids.len() {
            bits |= 1 << ids[i] as u8;
            i += 1;
        }
        IndicatorSet(bits)
    }

    /// Adds one.
    pub fn insert(&mut self, id: Indicator) {
        self.0 |= 1 << id as u8;
    }

    /// Whether it holds `id`.
    #[inline]
    pub fn contains(self, id: Indicator) -> bool {
        self.0 & (1 << id as u8) != 0
    }

    /// Whether the two have one in common.
    #[inline]
    pub fn intersects(self, other: IndicatorSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Those in both.
    pub fn intersection(self, other: IndicatorSet) -> IndicatorSet {
        IndicatorSet(self.0 & other.0)
    }

    /// Both together.
    pub fn union(self, other: IndicatorSet) -> IndicatorSet {
        IndicatorSet(self.0 | other.0)
    }

    /// Its members, in table order.
    pub fn iter(self) -> impl Iterator<Item = Indicator> {
        let some = |bits: u64| (bits != 0).then_some(bits);
        std::iter::successors(some(self.0), move |bits| some(bits & (bits - 1)))
            .map(|bits| INDICATORS[bits.trailing_zeros() as usize].id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_order_is_enum_order_and_names_are_unique() {
        for (i, d) in INDICATORS.iter().enumerate() {
            assert_eq!(d.id as usize, i);
            assert_eq!(Indicator::from_name(d.name), Some(d.id));
        }
    }
}

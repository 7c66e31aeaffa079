//! Declarations of the built-in indicators: one row each, with unit, owner, freshness and the
//! meaning of an absent value.

/// Source of an indicator's value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// The router: known at once, from the requests it sent and the responses it received.
    Router,
    /// The engine: reported, with an age.
    Engine,
    /// Both: the router's own count plus external load that the engine reports.
    Merged,
    /// The request itself.
    Request,
}

/// Scope of an indicator's values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One value per instance.
    Instance,
    /// One value per pair of instance and request.
    Pair,
    /// One value per request, the same for all instances.
    Request,
}

/// Declaration of one indicator.
#[derive(Clone, Copy, Debug)]
pub struct IndicatorDecl {
    /// The indicator.
    pub id: Indicator,
    /// Name in expressions, YAML and decision records. Python's symbol is the name in capitals.
    pub name: &'static str,
    /// Unit.
    pub unit: &'static str,
    /// Scope of the values.
    pub scope: Scope,
    /// Source of the values.
    pub owner: Owner,
    /// Freshness: how old the values are.
    pub freshness: &'static str,
    /// Condition and meaning of an absent value.
    pub absent: &'static str,
    /// Description.
    pub about: &'static str,
}

macro_rules! indicators {
    ($($id:ident $name:literal, $unit:literal, $scope:ident, $owner:ident, $fresh:literal, $absent:literal, $about:literal;)*) => {
        /// Every indicator, in the order of [`INDICATORS`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum Indicator { $(#[doc = $about] $id),* }

        /// Table from which the docs page, the expressions and the Python symbols are generated.
        pub const INDICATORS: &[IndicatorDecl] = &[$(IndicatorDecl {
            id: Indicator::$id, name: $name, unit: $unit, scope: Scope::$scope, owner: Owner::$owner,
            freshness: $fresh, absent: $absent, about: $about,
        }),*];
    };
}

indicators! {
    Bs "bs", "requests", Instance, Merged, "at once; external part as old as the last report", "never",
        "Batch size: requests on the instance, queued and running (`q_bs + r_bs`).";
    QBs "q_bs", "requests", Instance, Merged, "at once; external part as old as the last report", "never",
        "Waiting requests: this router's requests without a first token, minus requests that left the engine's queue by its last report, plus external waiting requests as reported. The prompt may be prefilled elsewhere.";
    RBs "r_bs", "requests", Instance, Merged, "at once; external part as old as the last report", "never",
        "Running requests: this router's requests past their first token or gone from the engine's queue by its last report, plus external running requests as reported.";
    DecodeBs "decode_bs", "requests", Instance, Router, "at once", "never",
        "This router's requests past their first token.";
    BoundBs "bound_bs", "requests", Instance, Router, "at once", "never",
        "This router's requests bound to the instance without a first token yet, including requests whose prompt is prefilled elsewhere.";
    QueuedPrefillTokens "queued_prefill_tokens", "tokens", Instance, Router, "at once; drains by the learned cost of tokens and attention", "never",
        "Prompt tokens placed on the instance and not yet computed.";
    Tokens "tokens", "tokens", Instance, Router, "at each token", "never",
        "Context tokens (prompt and generated) of this router's requests on the instance, including queued requests.";
    DecodeTokens "decode_tokens", "tokens", Instance, Router, "at each token", "never",
        "Context tokens of this router's requests past their first token.";
    BoundTokens "bound_tokens", "tokens", Instance, Router, "at once", "never",
        "Prompt tokens of this router's requests without a first token yet.";
    RemainingTokens "remaining_tokens", "tokens", Instance, Router, "at each token", "never: a request of unknown output length counts 0",
        "Output tokens that the running requests on the instance have yet to generate, as far as known.";
    IndexBlocks "index_blocks", "blocks", Instance, Router, "at each event or placement", "never",
        "Blocks of the instance's GPU in the KV index (the size of its tree).";
    Fetches "fetches", "requests", Instance, Router, "at once", "never",
        "Prefixes that other instances fetch from this instance now.";
    CacheFreeTokens "cache_free_tokens", "tokens", Instance, Router, "as fresh as the KV index", "if the instance's cache size is unknown",
        "Free tokens in the instance's KV cache before it evicts, by the KV index: capacity minus cached tokens, at least 0.";
    PrefillTokensPerSecond "prefill_tokens_per_second", "tokens/s", Instance, Router, "learned from first tokens", "until the first prefill is measured",
        "Prefill rate learned from this router's traffic.";
    PrefillRelativeError "prefill_relative_error", "fraction", Instance, Router, "learned from first tokens", "until five prefills are measured",
        "Relative root mean square error of the learned prefill cost over about the last 20 of this router's prefills: 0.1 is 10%.";
    StepSeconds "step_seconds", "s", Instance, Router, "at once for the batch; the model is learned from this router's streams", "until about 100 decode steps are measured",
        "Time of the next decode step with the current batch (`decode_bs`, `decode_tokens`), by the step-time model learned from this router's streams.";
    StepRelativeError "step_relative_error", "fraction", Instance, Router, "learned from this router's streams", "until about 100 decode steps are measured",
        "Relative root mean square error of the learned step-time model over about the last 20 stretches of steps: 0.1 is 10%.";
    WindowPrefillTokens "window_prefill_tokens", "tokens", Instance, Router, "at once; decays with a time constant of 180 s", "never",
        "Uncached prompt tokens recently placed on the instance.";
    WindowOutputTokens "window_output_tokens", "tokens", Instance, Router, "at each token; decays with a time constant of 180 s", "never",
        "Output tokens recently produced by the instance.";
    KvUsage "kv_usage", "fraction", Instance, Engine, "as old as the last report", "until the engine reports it",
        "Fraction of the KV cache in use, 0 to 1, as the engine reports it.";
    ReportedWaiting "reported_waiting", "requests", Instance, Engine, "as old as the last report", "until the engine reports it",
        "Waiting requests as the engine reports them, not merged with the router's counts.";
    ReportedRunning "reported_running", "requests", Instance, Engine, "as old as the last report", "until the engine reports it",
        "Running requests as the engine reports them, not merged with the router's counts.";
    ReportAgeSeconds "report_age_seconds", "s", Instance, Engine, "at once", "until the engine reports",
        "Age of the engine's last report.";
    HitTokens "hit_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never",
        "Leading prompt tokens in the instance's cache, by the KV index. A token that the instance loads from a tier below the GPU counts `1 - load_ratio`, the learned cost of loading (before the first load, `tier_load_ratio`).";
    TierHitTokens "tier_hit_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never: 0 without KV events of lower tiers",
        "Part of the cached leading prompt tokens that the instance loads from a tier below the GPU (CPU, storage).";
    KvHit "kv_hit", "fraction", Pair, Router, "as fresh as the KV index", "never",
        "`hit_tokens / prompt_tokens`, 0 to 1.";
    NewTokens "new_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never",
        "Prompt tokens to compute, and what loading costs: `prompt_tokens - hit_tokens`.";
    PToken "p_token", "tokens", Pair, Router, "at once", "never",
        "LMETRIC's P-token: `queued_prefill_tokens + new_tokens`, at least 1 (LMETRIC section 5.1, Figure 18c).";
    PSeconds "p_seconds", "s", Pair, Router, "at once; the rate is learned from first tokens", "never: without a learned prefill rate, the router uses the pool's mean, or else 8,000 tokens/s",
        "`p_token` in seconds: `p_token` divided by the instance's learned `prefill_tokens_per_second`.";
    FetchTokens "fetch_tokens", "tokens", Pair, Router, "as fresh as the KV index", "never: 0 if the router fetches nothing or a fetch does not pay",
        "Part of `new_tokens` that the instance would fetch from the instance with the longest cached prefix among those free to serve it.";
    FetchCostTokens "fetch_cost_tokens", "tokens", Pair, Router, "as fresh as the KV index; the cost is learned from prefix fetches", "never: 0 if `fetch_tokens` is 0",
        "Cost of fetching `fetch_tokens`: the prefill tokens that the instance would compute in the fetch's expected time. Computed by its configured or learned step-time model, else at its learned rate.";
    PredictedTtftSeconds "predicted_ttft_seconds", "s", Pair, Router, "at once", "never: without a learned prefill rate, the router uses the pool's mean, or else 8,000 tokens/s",
        "Time to first token if placed here. Computed by the step-time model of the profile, or by a learned model with an error below one third, else from `p_token` at the learned rate. `Router.stats()` and `/metrics` show the source.";
    PredictedTpotSeconds "predicted_tpot_seconds", "s", Pair, Router, "at once", "without a profile, until the instance's step time is learned",
        "Time per output token if placed here: a decode step of the batch including this request, by the step-time model (the profile's, else the learned model).";
    DecodeTokensPerSecond "decode_tokens_per_second", "tokens/s", Instance, Router, "learned from this router's streams; fades in 10 s; kept if a policy reads this or a handoff indicator", "until decode tokens are measured",
        "Decode rate of each of this router's requests on the instance (SIBYL's v_k: the same for all requests of a batch).";
    HandoffRunningTokens "handoff_running_tokens", "tokens", Pair, Router, "at each token; kept if a policy reads it", "never",
        "Expected context tokens of the instance's running decodes when this request starts to decode (SIBYL type 1, Eq. 6).";
    HandoffArrivedTokens "handoff_arrived_tokens", "tokens", Pair, Router, "at each token; kept if a policy reads it", "never",
        "Expected context tokens of requests bound to the instance that decode by the time this request starts to decode (SIBYL type 2, Eq. 7).";
    HandoffComingTokens "handoff_coming_tokens", "tokens", Pair, Router, "at each token; kept if a policy reads it", "never",
        "Load of requests bound to the instance that start to decode after this request: their prompt tokens, discounted by how much later they start (SIBYL type 3, Eq. 8).";
    DecodePressure "decode_pressure", "requests", Pair, Router, "at each token; its weights once a second; kept if a policy reads it", "unless the policy has weights (`sibyl_plus`); each request counts 1 until 16 answers have ended",
        "Weight of the requests that decode on the instance or are bound to it, from this request's handoff on. A request that starts without a prompt weighs 1.";
    LoraBs "lora_bs", "requests", Pair, Router, "at once", "never: 0 if the request names no LoRA adapter",
        "This router's requests on the instance with this request's LoRA adapter.";
    LoraLoaded "lora_loaded", "0 or 1", Pair, Router, "at once", "never: 1 if the request names no LoRA adapter",
        "1 if the instance has this request's LoRA adapter loaded: it is among the last `max_loras` adapters of the requests that this router placed there. 256 if the engine does not report `max_loras`.";
    TenantBs "tenant_bs", "requests", Pair, Router, "at once", "never: 0 if the request has no tenant",
        "This router's requests on the instance from this request's tenant.";
    HandoffSeconds "handoff_seconds", "s", Request, Router, "at once", "unless a second segment is being placed",
        "Expected time from the decision to this request's first decode step: predicted prefill plus learned handoff time.";
    PromptTokens "prompt_tokens", "tokens", Request, Request, "at once", "never",
        "Prompt length; estimated if the prompt is text and the router has no tokenizer.";
    ExpectedOutputTokens "expected_output_tokens", "tokens", Request, Request, "at once", "if the request has no bound",
        "Output length: the request's bound, or the true length in simulations.";
    Instances "instances", "instances", Request, Router, "at once", "never",
        "Instances eligible for this request.";
    RecomputeRatio "recompute_ratio", "fraction", Request, Router, "at each placement; decays with a time constant of 60 s", "never: 0 if the router does not follow programs, or recomputed nothing",
        "Prefill work of the pool that computed programs' contexts again, per prefill work that was new; at most 20. The same for all requests.";
    LoraName "lora_name", "text", Request, Request, "at once", "if the request has none",
        "LoRA adapter of the request, for comparison with a text: `lora_name == \"sql\"`.";
    Tenant "tenant", "text", Request, Request, "at once", "if the request has none",
        "Tenant of the request, for comparison with a text: `tenant == \"acme\"`.";
    LengthClass "length_class", "text", Request, Request, "at once", "if the request has none",
        "Class of the request's answer length, for comparison with a text.";
    Priority "priority", "", Request, Request, "at once", "if the request has none",
        "The request's priority, as in vLLM: lower numbers go first.";
}

/// Number of indicators.
pub const COUNT: usize = INDICATORS.len();

impl Indicator {
    /// Returns the indicator's declaration.
    pub fn decl(self) -> &'static IndicatorDecl {
        &INDICATORS[self as usize]
    }

    /// Finds an indicator by name, ignoring case.
    pub fn from_name(name: &str) -> Option<Indicator> {
        INDICATORS.iter().find(|d| d.name.eq_ignore_ascii_case(name)).map(|d| d.id)
    }
}

/// A set of indicators. A policy's set limits which indicators are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndicatorSet(u64);

const _: () = assert!(COUNT <= 64);

impl IndicatorSet {
    /// The empty set.
    pub const EMPTY: IndicatorSet = IndicatorSet(0);

    /// All indicators.
    pub const ALL: IndicatorSet = IndicatorSet(u64::MAX >> (64 - COUNT));

    /// Indicators that are derived for each decision, from the request and the time. The ledger
    /// keeps all others.
    pub const DERIVED: IndicatorSet = IndicatorSet::of(&[
        Indicator::QueuedPrefillTokens,
        Indicator::IndexBlocks,
        Indicator::CacheFreeTokens,
        Indicator::StepSeconds,
        Indicator::WindowPrefillTokens,
        Indicator::WindowOutputTokens,
        Indicator::ReportAgeSeconds,
        Indicator::HitTokens,
        Indicator::TierHitTokens,
        Indicator::KvHit,
        Indicator::NewTokens,
        Indicator::PToken,
        Indicator::PSeconds,
        Indicator::FetchTokens,
        Indicator::FetchCostTokens,
        Indicator::PredictedTtftSeconds,
        Indicator::PredictedTpotSeconds,
        Indicator::DecodeTokensPerSecond,
        Indicator::HandoffRunningTokens,
        Indicator::HandoffArrivedTokens,
        Indicator::HandoffComingTokens,
        Indicator::DecodePressure,
        Indicator::HandoffSeconds,
        Indicator::PromptTokens,
        Indicator::ExpectedOutputTokens,
        Indicator::Instances,
        Indicator::RecomputeRatio,
        Indicator::LoraBs,
        Indicator::LoraLoaded,
        Indicator::TenantBs,
        Indicator::LoraName,
        Indicator::Tenant,
        Indicator::LengthClass,
        Indicator::Priority,
    ]);

    /// Derived indicators with one value for all slots, in slot 0 of their columns.
    pub const OF_REQUEST: IndicatorSet = IndicatorSet::of(&[
        Indicator::HandoffSeconds,
        Indicator::PromptTokens,
        Indicator::ExpectedOutputTokens,
        Indicator::Instances,
        Indicator::RecomputeRatio,
        Indicator::LoraName,
        Indicator::Tenant,
        Indicator::LengthClass,
        Indicator::Priority,
    ]);

    /// Derived indicators with a value per slot, which [`super::Kernels`] compute.
    pub const COMPUTED: IndicatorSet = IndicatorSet::DERIVED.without(IndicatorSet::OF_REQUEST);

    /// Text indicators: expressions compare them with texts, by [`crate::expr::text_number`].
    pub const TEXTS: IndicatorSet =
        IndicatorSet::of(&[Indicator::LoraName, Indicator::Tenant, Indicator::LengthClass]);

    /// Returns the indicators of this set that are not in `other`.
    pub const fn without(self, other: IndicatorSet) -> IndicatorSet {
        IndicatorSet(self.0 & !other.0)
    }

    /// Returns the indicators in both sets.
    pub const fn and(self, other: IndicatorSet) -> IndicatorSet {
        IndicatorSet(self.0 & other.0)
    }

    /// Builds a set from the bits of its indicators, by their place in the table.
    pub(super) const fn from_bits(bits: u64) -> IndicatorSet {
        IndicatorSet(bits)
    }

    /// Builds a set from `ids`.
    pub const fn of(ids: &[Indicator]) -> IndicatorSet {
        let (mut bits, mut i) = (0, 0);
        while i < ids.len() {
            bits |= 1 << ids[i] as u8;
            i += 1;
        }
        IndicatorSet(bits)
    }

    /// Adds an indicator.
    pub fn insert(&mut self, id: Indicator) {
        self.0 |= 1 << id as u8;
    }

    /// Checks if the set contains `id`.
    #[inline]
    pub fn contains(self, id: Indicator) -> bool {
        self.0 & (1 << id as u8) != 0
    }

    /// Checks if the two sets share an indicator.
    #[inline]
    pub fn intersects(self, other: IndicatorSet) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the indicators in either set.
    pub fn union(self, other: IndicatorSet) -> IndicatorSet {
        IndicatorSet(self.0 | other.0)
    }

    /// Iterates over the indicators, in table order.
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
            assert_eq!(IndicatorSet::OF_REQUEST.contains(d.id), d.scope == Scope::Request);
        }
    }
}

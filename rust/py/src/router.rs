//! `Router`: the core's router in Python.
use crate::buffers::Ints;
use crate::errors::Result;
use crate::guard::GuardSettings;
use crate::policies;
use crate::ticket::{Decision, Stats, Ticket};
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::{INDICATORS, Indicator, IndicatorDecl, Scope};
use lmetric_core::kv::hash::{self, Domain};
use lmetric_core::kv::keys::Keys;
use lmetric_core::plan::{Binding, Cuts};
use lmetric_core::request::{Request, Tenant};
use lmetric_core::router::feed::{KvFeed, Means, Stored};
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{IndexFeed, NamedMove, Router as CoreRouter, RouterConfig, Share, SharedRouter};
use lmetric_core::{CoreError, InstanceId};
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString};
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Router>()?;
    module.add("SHARE_NAMES", Share::NAMES.to_vec())?;
    module.add_class::<Decision>()?;
    module.add_class::<Ticket>()?;
    module.add_function(wrap_pyfunction!(policies::policy_table, module)?)
}

/// Longer prompts count as this long, so that token positions behind the prompt fit into 32 bits.
const MOST_PROMPT_TOKENS: u32 = i32::MAX as u32;
/// Instances whose names a router's repr shows.
const NAMES_SHOWN: usize = 4;
/// Seconds by which times that a program gives may be off.
const DAY: f64 = 86_400.0;
/// How long a policy function may wait for another router, whose holder may wait for the function's own.
const MOST_NESTED_WAIT: Duration = Duration::from_secs(1);

/// Seconds on Python's monotonic clock, without asking Python.
#[derive(Clone, Copy)]
pub struct Clock {
    base: f64,
    origin: Instant,
}

impl Clock {
    fn new(py: Python<'_>) -> PyResult<Clock> {
        let base = py.import("time")?.call_method0("monotonic")?.extract()?;
        Ok(Clock { base, origin: Instant::now() })
    }

    /// What it shows.
    pub fn read(&self) -> f64 {
        self.base + self.origin.elapsed().as_secs_f64()
    }

    /// `now` where given, else the clock's.
    ///
    /// # Errors
    /// `BadValue` if it is more than a day off both this clock and the latest time that the router was told of. (A program may have a clock of its own.)
    pub fn now(&self, now: Option<f64>, router: &CoreRouter) -> Result<f64> {
        let Some(now) = now else { return Ok(self.read()) };
        let near = |time: f64| (now - time).abs() <= DAY;
        if near(router.latest()) || near(self.read()) {
            return Ok(now);
        }
        Err(CoreError::BadValue {
            what: "now".into(),
            got: now.to_string(),
            expected: format!(
                "seconds on the monotonic clock, within a day of time.monotonic() ({:.0}); time.time() is another clock; \
                 without now= the router reads the clock itself",
                self.read()
            ),
        }
        .into())
    }
}

/// Routes the requests of one pool: the instances of one model.
///
/// `policy`: a registered name, the text of a score expression, an `lmetric.Policy` or an `lmetric.policy_function`; default
/// `"lmetric"`. `knobs`: its settings. `block_size`: tokens a block. `text_block_bytes`: bytes a block where prompts are text.
/// `domain`: whatever prompts must share to match (model, tokenizer). `index`: `"approximate"` (what was placed somewhere is
/// believed to be cached there) or `"exact"` (`blocks_stored`, `blocks_removed`, `blocks_cleared` tell). `index_bytes`,
/// `receipt_bytes`: hard bounds. `guard`: the hot-spot guard; None: as the policy declares (`guard_reason` says which). It takes
/// shares over `guard_window_seconds`, looks at them every `guard_period_seconds`, counts `guard_classes` prefixes, suspects those
/// with at least `guard_min_requests`, filters after `guard_phase2_factor` times as many requests as there are holders, and ends at
/// `guard_release_factor` of the alarm; see docs/guard.md. `step_time`: a profile's constants (`fixed_seconds`, ...,
/// `max_batch_tokens`), from which `predicted_ttft_seconds` is made instead of from the learned prefill rate. `drain`: whether queued
/// prefill tokens drain between events at the learned rate. `seed`: of every random choice.
///
/// Where instances have roles, a request whose prompt goes to one that prefills only goes on at one that decodes only, chosen by `decode_policy` (and
/// `decode_knobs`; default `"least_requests"`): at the decision (`binding="early"`) or when the prompt was computed (`"late"`). `colocate`: where
/// nobody of the other role is there, an instance takes whole requests whatever its role.
///
/// Raises `UnknownNameError`, `ExpressionError`, `BadValueError`. Threads may share a router.
#[pyclass(frozen, module = "lmetric")]
pub struct Router {
    shared: SharedRouter,
    clock: Clock,
    /// What all prompts share: the key scheme is made anew where the block size changes.
    parts: Vec<Option<String>>,
    /// Why the hot-spot guard was on or off at the start.
    guard_reason: String,
    /// Scratch of the prompt's chain.
    chain: Mutex<Vec<u64>>,
    /// The key scheme, and the engines' own names of their blocks.
    feed: Arc<KvFeed>,
}

/// A request's prompt and what else is known of it, as Python gives it.
struct Prompt<'py> {
    tokens: Option<Bound<'py, PyAny>>,
    text: Option<Bound<'py, PyAny>>,
    block_hashes: Option<Bound<'py, PyAny>>,
    prompt_tokens: Option<u32>,
    extra_tokens: u32,
    expected_output_tokens: Option<u32>,
    think_tokens: Option<u32>,
    length_class: Option<&'py str>,
    session: Option<&'py str>,
    adapter: Option<&'py str>,
    salt: Option<&'py str>,
    uncut: Option<&'py str>,
    unpulled: Option<&'py str>,
    tenant: Tenant,
}

impl Router {
    /// What feeds its index.
    pub fn feed(&self) -> &Arc<KvFeed> {
        &self.feed
    }

    /// Its clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Calls `with` without holding the interpreter lock: feeding waits for others that feed, and they for the router.
    fn feeding<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&KvFeed) -> std::result::Result<T, CoreError> + Send,
    ) -> Result<T> {
        refuse_in_policy("fed a router's index")?;
        self.shared.check()?;
        Ok(py.detach(|| with(&self.feed))?)
    }

    /// Calls `with` with the router taken; see [`with_router`].
    fn with_core<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
    ) -> Result<T> {
        with_router(&self.shared, py, with)
    }

    /// Calls `with` with the request that the prompt makes, and its chain apart from it.
    fn with_request<T>(
        &self,
        py: Python<'_>,
        prompt: &Prompt<'_>,
        with: impl FnOnce(Request<'_>, &mut Vec<u64>) -> Result<T>,
    ) -> Result<T> {
        // Another thread may be hashing: then a buffer of our own, rather than a wait under the interpreter lock.
        let mut own = Vec::new();
        let mut scratch = self.chain.try_lock();
        let chain = scratch.as_deref_mut().unwrap_or(&mut own);
        let (prompt_tokens, tokens_per_block) = self.hash(py, prompt, chain)?;
        let request = Request {
            chain: &[],
            prompt_tokens: prompt_tokens.saturating_add(prompt.extra_tokens).min(MOST_PROMPT_TOKENS),
            tokens_per_block,
            expected_output_tokens: prompt.expected_output_tokens,
            think_tokens: prompt.think_tokens,
            length_class: prompt.length_class.map(|class| xxh3_64(class.as_bytes())),
            session: prompt.session.map(|s| xxh3_64(s.as_bytes())),
            uncut: prompt.uncut,
            unpulled: prompt.unpulled,
            tenant: prompt.tenant,
        };
        with(request, chain)
    }

    /// Hashes the prompt into `chain`; returns its tokens and the tokens a block stands for.
    fn hash(&self, py: Python<'_>, prompt: &Prompt<'_>, chain: &mut Vec<u64>) -> Result<(u32, f64)> {
        chain.clear();
        let given = [prompt.tokens.is_some(), prompt.text.is_some(), prompt.block_hashes.is_some()];
        let count = given.iter().filter(|g| **g).count();
        if count > 1 || (count == 0 && prompt.prompt_tokens.is_none()) {
            return Err(CoreError::BadValue {
                what: "prompt".into(),
                got: format!("{count} of tokens=, text= and block_hashes="),
                expected: "exactly one of them, or prompt_tokens= alone where nothing can match".into(),
            }
            .into());
        }
        let keys = self.feed.keys();
        let of = |domain: Domain| domain.of_request(prompt.adapter, prompt.salt);
        let length = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
        if let Some(tokens) = &prompt.tokens {
            let ints = Ints::take(tokens, "tokens")?;
            let tokens = ints.tokens(py, "tokens")?;
            hash::hash_tokens(of(keys.tokens), keys.block_size, &tokens, chain);
            return Ok((prompt.prompt_tokens.unwrap_or(length(tokens.len())), keys.block_size as f64));
        }
        if let Some(text) = &prompt.text {
            let bytes: &[u8] = if let Ok(text) = text.cast::<PyString>() {
                text.to_str()?.as_bytes()
            } else {
                text.cast::<PyBytes>().map_err(PyErr::from)?.as_bytes()
            };
            hash::hash_text(of(keys.text), keys.text_block_bytes, bytes, chain);
            // Four bytes a token is English under today's tokenizers; callers that know better say so.
            let tokens = prompt.prompt_tokens.unwrap_or(length(bytes.len().div_ceil(4)));
            let per_byte = f64::from(tokens) / bytes.len().max(1) as f64;
            return Ok((tokens, per_byte * keys.text_block_bytes as f64));
        }
        if let Some(hashes) = &prompt.block_hashes {
            let ints = Ints::take(hashes, "block_hashes")?;
            let local = ints.hashes(py, "block_hashes")?;
            hash::chain(of(keys.hashes), &local, chain);
            let tokens = prompt.prompt_tokens.unwrap_or(length(local.len() * keys.block_size));
            return Ok((tokens, keys.block_size as f64));
        }
        Ok((prompt.prompt_tokens.unwrap_or(0), keys.block_size as f64))
    }
}

/// Calls `with` with a shared router taken. If the router is not free within microseconds, all of that runs without the interpreter lock, which the
/// router's holder may need: `with` has its turn when the router is free, whoever else wants either lock.
///
/// # Errors
/// `Policy` inside a policy function for its own router, which is taken while the function runs, and for one that stays busy. `Broken`.
pub fn with_router<T: Send>(
    shared: &SharedRouter,
    py: Python<'_>,
    with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
) -> Result<T> {
    if let Some(mut router) = shared.try_lock() {
        shared.check()?;
        return with(&mut router);
    }
    let problem = |problem: &str| CoreError::Policy { policy: "function".into(), problem: problem.into() };
    if shared.is_held_here() {
        let own = "it called its own router, which waits for it; take what it needs from its columns";
        return Err(problem(own).into());
    }
    if let Some(mut router) = shared.lock_soon() {
        shared.check()?;
        return with(&mut router);
    }
    let nested = SharedRouter::any_is_held_here();
    py.detach(|| {
        let router = if nested { shared.lock_within(MOST_NESTED_WAIT) } else { Some(shared.lock_next()) };
        let busy = "it waited for another router that stays busy: its holder may wait for the function's own";
        let mut router = router.ok_or_else(|| problem(busy))?;
        shared.check()?;
        with(&mut router)
    })
}

/// # Errors
/// `Policy` inside a policy function, whose router is taken while it runs.
fn refuse_in_policy(what: &str) -> Result<()> {
    if !SharedRouter::any_is_held_here() {
        return Ok(());
    }
    let problem = format!("it {what}, which may have to wait for its own router; do that outside of it");
    Err(CoreError::Policy { policy: "function".into(), problem }.into())
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (policy=None, *, knobs=None, block_size=16, text_block_bytes=256, domain=None,
        index="approximate", index_bytes=512 << 20, receipt_bytes=16 << 20, guard=None, guard_window_seconds=60.0,
        guard_period_seconds=1.0, guard_classes=64, guard_min_requests=16, guard_phase2_factor=2.0,
        guard_release_factor=0.8, step_time=None, drain=true, seed=0, decode_policy=None, decode_knobs=None,
        binding="early", colocate=true))]
    fn new(
        py: Python<'_>,
        policy: Option<&Bound<'_, PyAny>>,
        knobs: Option<&Bound<'_, PyDict>>,
        block_size: usize,
        text_block_bytes: usize,
        domain: Option<Vec<Option<String>>>,
        index: &str,
        index_bytes: usize,
        receipt_bytes: usize,
        guard: Option<bool>,
        guard_window_seconds: f64,
        guard_period_seconds: f64,
        guard_classes: i64,
        guard_min_requests: i64,
        guard_phase2_factor: f64,
        guard_release_factor: f64,
        step_time: Option<&Bound<'_, PyDict>>,
        drain: bool,
        seed: u64,
        decode_policy: Option<&Bound<'_, PyAny>>,
        decode_knobs: Option<&Bound<'_, PyDict>>,
        binding: &str,
        colocate: bool,
    ) -> Result<Router> {
        let index_feed = index_feed_of("index", index)?;
        let parts = domain.unwrap_or_default();
        let keys = Keys::new(&parts, block_size, text_block_bytes)?;
        let policy = policies::build(policy, knobs)?;
        let (guard, guard_reason) = GuardSettings {
            on: guard,
            window_seconds: guard_window_seconds,
            period_seconds: guard_period_seconds,
            classes: guard_classes,
            min_requests: guard_min_requests,
            phase2_factor: guard_phase2_factor,
            release_factor: guard_release_factor,
        }
        .under(&*policy)?;
        let config = RouterConfig {
            index_feed,
            index_bytes,
            receipt_bytes,
            seed,
            drain,
            guard,
            step_time: step_time.map(step_time_of).transpose()?,
            binding: binding_of(binding)?,
            colocate,
            ..RouterConfig::default()
        };
        let mut router = CoreRouter::new(policy, config)?;
        if decode_policy.is_some() || decode_knobs.is_some() {
            let default = PyString::new(py, &router.decode_policy().spec().name.clone());
            let decode_policy = decode_policy.unwrap_or(default.as_any());
            router.set_decode_policy(policies::build(Some(decode_policy), decode_knobs)?)?;
        }
        let shared = SharedRouter::new(router);
        Ok(Router {
            feed: Arc::new(KvFeed::new(shared.clone(), keys, index_bytes, index_feed == IndexFeed::Exact)),
            shared,
            clock: Clock::new(py)?,
            parts,
            guard_reason,
            chain: Mutex::default(),
        })
    }

    /// Adds an instance under a name of its own; returns its slot, an index into `Decision.scores()`.
    ///
    /// `cache_blocks`: blocks its KV cache holds, where known (bounds what the index remembers of it). `role`: `"both"`,
    /// `"prefill"` or `"decode"`. Raises `BadValueError` (name taken, empty; fleet full).
    #[pyo3(signature = (name, *, cache_blocks=None, role="both"))]
    fn add_instance(
        &self,
        py: Python<'_>,
        name: &str,
        cache_blocks: Option<u32>,
        role: &str,
    ) -> Result<usize> {
        let role = named(&format!("role of {name}"), role, &Role::NAMES)?;
        self.with_core(py, |router| Ok(router.add_instance(name, role, cache_blocks)?.index()))
    }

    /// Changes what an instance may be asked to do: `"both"`, `"prefill"` or `"decode"`. What runs there runs on; drain it first where that matters.
    /// Raises `UnknownNameError`, `BadValueError`.
    fn set_role(&self, py: Python<'_>, name: &str, role: &str) -> Result<()> {
        let role = named(&format!("role of {name}"), role, &Role::NAMES)?;
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            Ok(router.fleet_mut().set_role(id, role)?)
        })
    }

    /// Removes an instance. Tickets open on it stay valid and touch no books any more. Raises `UnknownNameError`.
    fn remove_instance(&self, py: Python<'_>, name: &str) -> Result<()> {
        self.feeding(py, |feed| feed.remove_instance(name))
    }

    /// Says who feeds the index of an instance: `"approximate"` (it learns from what is placed there) or `"exact"` (from the engine's
    /// events). A new instance has the router's `index`. Switched to exact, what was guessed is forgotten; switched to
    /// approximate, what events said stays as a guess. Raises `UnknownNameError`, `BadValueError`.
    fn set_index_feed(&self, py: Python<'_>, name: &str, index: &str) -> Result<()> {
        let index_feed = index_feed_of(&format!("index of {name}"), index)?;
        self.feeding(py, |feed| feed.set_index_feed(name, index_feed))
    }

    /// Says how many blocks an instance's KV cache holds, all ranks together; None: not known. The index keeps no more of it.
    /// Raises `UnknownNameError`.
    fn set_cache_blocks(&self, py: Python<'_>, name: &str, cache_blocks: Option<u32>) -> Result<()> {
        self.feeding(py, |feed| feed.set_cache_blocks(name, cache_blocks))
    }

    /// Changes the tokens a block. What was cached is forgotten, since blocks of another size never match; an `EventFeed` asks
    /// the engines to tell it again. Raises `BadValueError`.
    fn set_block_size(&self, py: Python<'_>, block_size: usize) -> Result<()> {
        let keys = Keys::new(&self.parts, block_size, self.feed.keys().text_block_bytes)?;
        self.feeding(py, |feed| {
            feed.set_keys(keys);
            Ok(())
        })
    }

    /// Tokens a block, of prompts and of the engines' events.
    #[getter]
    fn block_size(&self) -> usize {
        self.feed.keys().block_size
    }

    /// Says whether an instance answers; one that does not gets no requests. Raises `UnknownNameError`.
    fn set_health(&self, py: Python<'_>, name: &str, healthy: bool) -> Result<()> {
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            Ok(router.fleet_mut().set_healthy(id, healthy)?)
        })
    }

    /// Stops (or resumes) placing requests on an instance; what runs there runs on. Raises `UnknownNameError`.
    #[pyo3(signature = (name, draining=true))]
    fn drain(&self, py: Python<'_>, name: &str, draining: bool) -> Result<()> {
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            Ok(router.fleet_mut().set_draining(id, draining)?)
        })
    }

    /// Names of the instances, in slot order.
    fn instances(&self, py: Python<'_>) -> Result<Vec<String>> {
        self.with_core(py, |router| Ok(router.fleet().live_names().map(str::to_string).collect()))
    }

    /// Requests in flight: tickets that are open.
    fn in_flight(&self, py: Python<'_>) -> Result<usize> {
        self.with_core(py, |router| Ok(router.in_flight()))
    }

    /// Decides where a request goes, books it there at once, and opens its ticket.
    ///
    /// Exactly one of `tokens` (buffer of token ids), `text` (str or UTF-8 bytes) and `block_hashes` (buffer of 64-bit hashes, one a
    /// block of `block_size` tokens, chained here); or `prompt_tokens` alone, where nothing can match. `prompt_tokens`: prompt
    /// length in tokens, where the caller knows better (text is taken for 4 bytes a token). `expected_output_tokens`: output
    /// length, where known. `think_tokens`: of these, the first that nobody reads as they come (what a model thinks before it answers), where known: see `set_split`.
    /// `length_class`: whatever answers alike (tenant, endpoint, task), for lengths that are estimated. `extra_tokens`: of further prompts in the same request, which count as load and match nothing. `session`: key of session affinity. `adapter`: the LoRA adapter's name; `salt`: cache salt; prompts where they differ never
    /// match. `request_id`: for the receipt. `uncut`: why the request must stay in one piece, where it must (for the receipt). `unpulled`: why nothing must be
    /// pulled for it (`set_pull`), where that is so (for the receipt). Where requests are ordered (`set_priorities`): `tenant`, whose
    /// it is; `tenant_weight`, its share beside others; `handicap_seconds`, by which its requests go behind others'. `now`: seconds on the monotonic clock.
    ///
    /// Returns the decision and the ticket; a ticket that is dropped while open is an abort. Raises `NoInstanceError` (nothing is
    /// booked), `BadValueError` (a prompt of the wrong kind), `PolicyError` (a policy function failed).
    /// Source: LMETRIC, Figure 4 and section 5.
    #[pyo3(signature = (*, tokens=None, text=None, block_hashes=None, prompt_tokens=None, expected_output_tokens=None,
        think_tokens=None, length_class=None, extra_tokens=0, session=None, adapter=None, salt=None, request_id=None, uncut=None,
        unpulled=None, tenant=None, tenant_weight=1.0, handicap_seconds=0.0, now=None))]
    fn route<'py>(
        &self,
        py: Python<'py>,
        tokens: Option<Bound<'py, PyAny>>,
        text: Option<Bound<'py, PyAny>>,
        block_hashes: Option<Bound<'py, PyAny>>,
        prompt_tokens: Option<u64>,
        expected_output_tokens: Option<u32>,
        think_tokens: Option<u32>,
        length_class: Option<&'py str>,
        extra_tokens: u64,
        session: Option<&'py str>,
        adapter: Option<&'py str>,
        salt: Option<&'py str>,
        request_id: Option<&str>,
        uncut: Option<&'py str>,
        unpulled: Option<&'py str>,
        tenant: Option<&str>,
        tenant_weight: f64,
        handicap_seconds: f64,
        now: Option<f64>,
    ) -> Result<(Decision, Ticket)> {
        let prompt = Prompt {
            tokens,
            text,
            block_hashes,
            // Estimates may be beyond all measure: they count as the most there is.
            prompt_tokens: prompt_tokens.map(saturated),
            extra_tokens: saturated(extra_tokens),
            expected_output_tokens,
            think_tokens,
            length_class,
            session,
            adapter,
            salt,
            uncut,
            unpulled,
            tenant: Tenant {
                id: tenant.map_or(0, |name| xxh3_64(name.as_bytes())),
                weight: tenant_weight,
                handicap_seconds,
            },
        };
        self.with_request(py, &prompt, |request, chain| {
            let (decision, name, next, pull) = self.with_core(py, |router| {
                let now = self.clock.now(now, router)?;
                let decision = router.route_taking(&request, chain, request_id, now)?;
                let name = router.fleet().name(decision.segment.instance).clone();
                let next = decision.next.map(|next| router.fleet().name(next.instance).clone());
                let pull = decision.pull.map(|pull| crate::ticket::pull_told(router, pull));
                Ok((decision, name, next, pull))
            })?;
            let ticket = self.shared.ticket(&decision);
            Ok((
                Decision::new(
                    &decision,
                    request.prompt_tokens,
                    name.clone(),
                    next,
                    pull,
                    self.shared.clone(),
                ),
                Ticket::new(ticket, decision.segment, name, self.clock),
            ))
        })
    }

    /// How many leading prompt tokens each instance holds, by the KV index: uint32, in the order of `instances()`.
    ///
    /// The prompt as for `route`. The last token never counts: every engine computes it. Nothing is booked or touched.
    /// Raises `BadValueError`.
    #[pyo3(signature = (*, tokens=None, text=None, block_hashes=None, prompt_tokens=None, adapter=None, salt=None))]
    fn hit_tokens<'py>(
        &self,
        py: Python<'py>,
        tokens: Option<Bound<'py, PyAny>>,
        text: Option<Bound<'py, PyAny>>,
        block_hashes: Option<Bound<'py, PyAny>>,
        prompt_tokens: Option<u32>,
        adapter: Option<&'py str>,
        salt: Option<&'py str>,
    ) -> Result<Bound<'py, PyArray1<u32>>> {
        let prompt = Prompt {
            tokens,
            text,
            block_hashes,
            prompt_tokens,
            extra_tokens: 0,
            expected_output_tokens: None,
            think_tokens: None,
            length_class: None,
            session: None,
            adapter,
            salt,
            uncut: None,
            unpulled: None,
            tenant: Tenant::default(),
        };
        let hits = self.with_request(py, &prompt, |request, chain| {
            let request = Request { chain, ..request };
            self.with_core(py, |router| Ok(router.hit_tokens(&request)))
        })?;
        Ok(PyArray1::from_slice(py, &hits))
    }

    /// Scores of the live instances, in the order of `instances()`; nothing is booked.
    #[pyo3(signature = (*, tokens=None, text=None, block_hashes=None, prompt_tokens=None, expected_output_tokens=None,
        session=None, adapter=None, salt=None, now=None))]
    fn score<'py>(
        &self,
        py: Python<'py>,
        tokens: Option<Bound<'py, PyAny>>,
        text: Option<Bound<'py, PyAny>>,
        block_hashes: Option<Bound<'py, PyAny>>,
        prompt_tokens: Option<u32>,
        expected_output_tokens: Option<u32>,
        session: Option<&'py str>,
        adapter: Option<&'py str>,
        salt: Option<&'py str>,
        now: Option<f64>,
    ) -> Result<Bound<'py, PyArray1<f64>>> {
        let prompt = Prompt {
            tokens,
            text,
            block_hashes,
            prompt_tokens,
            extra_tokens: 0,
            expected_output_tokens,
            think_tokens: None,
            length_class: None,
            session,
            adapter,
            salt,
            uncut: None,
            unpulled: None,
            tenant: Tenant::default(),
        };
        let out = self.with_request(py, &prompt, |request, chain| {
            let request = Request { chain, ..request };
            self.with_core(py, |router| {
                let now = self.clock.now(now, router)?;
                let (members, mut out) = (members(router), Vec::new());
                scores_of(router, &request, now, &members, &mut out)?;
                Ok(out)
            })
        })?;
        Ok(PyArray1::from_vec(py, out))
    }

    /// Scores of many prompts at once: `tokens` holds them back to back, prompt `i` at `offsets[i]:offsets[i + 1]`. A row for each prompt, a column for each of
    /// the instances that were there at the call; NaN once an instance has gone. Other calls of the router run between two prompts.
    #[pyo3(signature = (tokens, offsets, *, now=None))]
    fn score_batch<'py>(
        &self,
        py: Python<'py>,
        tokens: Bound<'py, PyAny>,
        offsets: Bound<'py, PyAny>,
        now: Option<f64>,
    ) -> Result<Bound<'py, PyArray2<f64>>> {
        let (ints, bounds) = (Ints::take(&tokens, "tokens")?, Ints::take(&offsets, "offsets")?);
        let tokens: Vec<u32> = ints.tokens(py, "tokens")?.into_owned();
        let offsets: Vec<u64> = bounds.hashes(py, "offsets")?.into_owned();
        let in_order = offsets.windows(2).all(|w| w[0] <= w[1]);
        if offsets.is_empty() || !in_order || offsets[offsets.len() - 1] > tokens.len() as u64 {
            return Err(CoreError::BadValue {
                what: "offsets".into(),
                got: "an empty, descending or too large one".into(),
                expected: format!(
                    "ascending positions within the {} tokens, one more than prompts",
                    tokens.len()
                ),
            }
            .into());
        }
        refuse_in_policy("scored a batch")?;
        let (values, columns) = py.detach(|| {
            self.shared.check()?;
            let keys = self.feed.keys();
            let (now, members) = {
                let router = self.shared.lock();
                (self.clock.now(now, &router)?, members(&router))
            };
            let mut out = Vec::with_capacity(members.len() * (offsets.len() - 1));
            let mut chain = Vec::new();
            for bounds in offsets.windows(2) {
                let tokens = &tokens[bounds[0] as usize..bounds[1] as usize];
                chain.clear();
                hash::hash_tokens(keys.tokens, keys.block_size, tokens, &mut chain);
                let request = Request {
                    chain: &chain,
                    prompt_tokens: tokens.len() as u32,
                    tokens_per_block: keys.block_size as f64,
                    ..Request::default()
                };
                // Taken for one prompt at a time: decisions go between.
                let mut router = self.shared.lock_behind();
                self.shared.check()?;
                scores_of(&mut router, &request, now, &members, &mut out)?;
            }
            Ok::<_, crate::errors::Error>((out, members.len()))
        })?;
        Ok(PyArray1::from_vec(py, values).reshape([offsets.len() - 1, columns])?)
    }

    /// Takes in an engine's load report: requests `waiting` and `running`, `kv_usage` from 0 to 1; absent ones are kept.
    ///
    /// Others' load is what is reported beyond the router's own requests in flight. Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, *, waiting=None, running=None, kv_usage=None, now=None))]
    fn engine_report(
        &self,
        py: Python<'_>,
        name: &str,
        waiting: Option<f64>,
        running: Option<f64>,
        kv_usage: Option<f64>,
        now: Option<f64>,
    ) -> Result<()> {
        self.with_core(py, |router| {
            let report = Report { at: self.clock.now(now, router)?, waiting, running, kv_usage };
            Ok(router.engine_report(name, report)?)
        })
    }

    /// What this router has on each instance, for those beside it: names, and the numbers that `SHARE_NAMES` names.
    #[pyo3(signature = (*, now=None))]
    fn share(&self, py: Python<'_>, now: Option<f64>) -> Result<Vec<(String, Vec<f64>)>> {
        let told = self.with_core(py, |router| Ok(router.share(self.clock.now(now, router)?)))?;
        Ok(told.iter().map(|(name, share)| (name.to_string(), share.numbers().to_vec())).collect())
    }

    /// What the router `replica` has on each instance, as its `share` tells; it counts as if it had been placed here, until the next
    /// word from there. Instances that are not known are passed over. Raises `BadValueError`; nothing has changed then.
    #[pyo3(signature = (replica, shares, *, now=None))]
    fn hear(
        &self,
        py: Python<'_>,
        replica: &str,
        shares: Vec<(String, Vec<f64>)>,
        now: Option<f64>,
    ) -> Result<()> {
        let of = |(name, numbers): &(String, Vec<f64>)| match <[f64; Share::NAMES.len()]>::try_from(
            &numbers[..],
        ) {
            Ok(numbers) => Ok((name.clone(), Share::of(numbers))),
            Err(_) => Err(CoreError::BadValue {
                what: format!("what router {replica} tells of {name}"),
                got: format!("{} numbers", numbers.len()),
                expected: format!("{}: {}", Share::NAMES.len(), Share::NAMES.join(", ")),
            }),
        };
        let shares = shares.iter().map(of).collect::<std::result::Result<Vec<_>, CoreError>>()?;
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.hear(replica, shares.iter().map(|(name, share)| (&**name, *share)), now)?)
        })
    }

    /// Forgets what routers told that have told nothing for `seconds`; their names.
    #[pyo3(signature = (seconds, *, now=None))]
    fn forget_silent(&self, py: Python<'_>, seconds: f64, now: Option<f64>) -> Result<Vec<String>> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.forget_silent(seconds, now).into_iter().map(String::from).collect())
        })
    }

    /// The engine stored consecutive blocks: one physical copy more of each. `block_hashes`: its own 64-bit hashes (a buffer);
    /// `tokens`: a block's worth of ids to each; `parent`: its hash of the block before the first, None where they start the
    /// prompt (then `adapter` and `salt` count); `rank`: its data-parallel rank, a cache of its own. Returns how many blocks could not be placed (unknown
    /// parent, no room, or the instance does not learn by events). Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, block_hashes, tokens, *, parent=None, adapter=None, salt=None, rank=0))]
    fn blocks_stored(
        &self,
        py: Python<'_>,
        name: &str,
        block_hashes: Bound<'_, PyAny>,
        tokens: Bound<'_, PyAny>,
        parent: Option<u64>,
        adapter: Option<&str>,
        salt: Option<&str>,
        rank: u32,
    ) -> Result<usize> {
        let (hashes, ids) = (Ints::take(&block_hashes, "block_hashes")?, Ints::take(&tokens, "tokens")?);
        let (hashes, ids) = (hashes.hashes(py, "block_hashes")?, ids.tokens(py, "tokens")?);
        let keys = self.feed.keys();
        if hashes.len() * keys.block_size != ids.len() {
            return Err(CoreError::BadValue {
                what: "tokens".into(),
                got: format!("{} tokens for {} blocks", ids.len(), hashes.len()),
                expected: format!("{} a block", keys.block_size),
            }
            .into());
        }
        let domain = keys.tokens.of_request(adapter, salt);
        // Owned: the buffers may change while the interpreter lock is not held.
        let (hashes, ids) = (hashes.into_owned(), ids.into_owned());
        self.feeding(py, |feed| {
            let (engine_hashes, token_ids) = (&hashes[..], &ids[..]);
            let stored =
                Stored { parent, engine_hashes, token_ids, domain, narrowing: &[], means: Means::NewCopy };
            Ok(hashes.len() - feed.stored(feed.source(name, rank)?, &stored).done)
        })
    }

    /// The engine evicted one physical copy of each of these blocks (its own 64-bit hashes, a buffer).
    /// Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, block_hashes, *, rank=0))]
    fn blocks_removed(
        &self,
        py: Python<'_>,
        name: &str,
        block_hashes: Bound<'_, PyAny>,
        rank: u32,
    ) -> Result<()> {
        let hashes = Ints::take(&block_hashes, "block_hashes")?;
        let hashes = hashes.hashes(py, "block_hashes")?.into_owned();
        self.feeding(py, |feed| {
            feed.removed(feed.source(name, rank)?, &hashes);
            Ok(())
        })
    }

    /// The engine's whole cache was cleared, or the engine restarted; `rank`: that of one rank alone. Raises `UnknownNameError`.
    #[pyo3(signature = (name, *, rank=None))]
    fn blocks_cleared(&self, py: Python<'_>, name: &str, rank: Option<u32>) -> Result<()> {
        self.feeding(py, |feed| match rank {
            None => feed.forget(name),
            Some(rank) => {
                feed.cleared(feed.source(name, rank)?);
                Ok(())
            }
        })
    }

    /// Indicator columns of the live instances, in the order of `instances()`.
    #[pyo3(signature = (now=None))]
    fn indicators<'py>(&self, py: Python<'py>, now: Option<f64>) -> Result<Bound<'py, PyDict>> {
        let columns = self.with_core(py, |router| {
            router.derive_all(self.clock.now(now, router)?);
            let (members, of_instances) = (members(router), |d: &&IndicatorDecl| d.scope == Scope::Instance);
            let column = |decl: &IndicatorDecl| {
                let column = router.columns().get(decl.id);
                (decl.name, members.iter().map(|(id, _)| column[id.index()]).collect::<Vec<_>>())
            };
            Ok(INDICATORS.iter().filter(of_instances).map(column).collect::<Vec<_>>())
        })?;
        let dict = PyDict::new(py);
        for (name, column) in columns {
            dict.set_item(name, PyArray1::from_vec(py, column))?;
        }
        Ok(dict)
    }

    /// Tokens of prompts that an instance computes in a second, learned from first tokens; None until the first prefill was seen. Derives no other
    /// indicator. Raises `UnknownNameError`.
    fn prefill_rate(&self, py: Python<'_>, instance: &str) -> Result<Option<f64>> {
        self.with_core(py, |router| {
            let id = router.fleet().find(instance)?;
            let rate = router.columns().get(Indicator::PrefillTokensPerSecond)[id.index()];
            Ok(Some(rate).filter(|rate| !rate.is_nan()))
        })
    }

    /// Why a decision was made and what came of it, as a dictionary; None where the receipt is gone (the ring is bounded in bytes).
    ///
    /// Keys: `scores` of all instances, `best` (up to 8, with the `terms` the policy read), `margin_to_runner_up`,
    /// `load_report_age_seconds`, `predicted_cached_tokens` and later `cached_tokens`, `ttft_seconds`, `outcome`, and more.
    fn receipt<'py>(&self, py: Python<'py>, decision_id: u64) -> Result<Option<Bound<'py, PyDict>>> {
        let kept = self.with_core(py, |router| {
            let policy = router.policy().spec().name.clone();
            Ok(router.receipt(decision_id).map(|receipt| (receipt.clone(), policy)))
        })?;
        kept.map(|(receipt, policy)| crate::ticket::receipt_dict(py, &receipt, &policy)).transpose()
    }

    /// Everything periodic: call it about once a second. Returns what the hot-spot guard did since the last call (dictionaries:
    /// `event` is `"suspected"`, `"filtering"` or `"released"`) and when to call again. Source: LMETRIC, section 5.2.
    #[pyo3(signature = (now=None))]
    fn tick<'py>(&self, py: Python<'py>, now: Option<f64>) -> Result<(Vec<Bound<'py, PyDict>>, f64)> {
        let (events, next) = self.with_core(py, |router| Ok(router.tick(self.clock.now(now, router)?)))?;
        let events =
            events.iter().map(|e| crate::ticket::guard_event_dict(py, e)).collect::<PyResult<_>>()?;
        Ok((events, next))
    }

    /// When the instance of a second segment is chosen from now on: `"early"`, at the decision, or `"late"`, when the first has ended.
    fn set_binding(&self, py: Python<'_>, binding: &str) -> Result<()> {
        let binding = binding_of(binding)?;
        self.with_core(py, |router| {
            router.set_binding(binding);
            Ok(())
        })
    }

    /// What requests are ordered by in their engines' queues from now on: `"none"`; `"uniboost"`, boosted arrivals in milliseconds, with the settings `gamma` (1/s),
    /// `adaptive` (0: gamma stays, and has none of the following), `window`, `least`, `every`, `smoothing`, `least_gamma`, `most_gamma`, `bin_tokens`,
    /// `most_boost_seconds`, `clock_offset_seconds` (added to the router's clock); or `"vtc"`, start tags by tenant in thousandths of a virtual token. `Decision.priority` has it: lower goes first. Raises `BadValueError`.
    /// Source: UniBoost, section 3; Sheng et al., OSDI 2024.
    #[pyo3(signature = (kind, **settings))]
    fn set_priorities(&self, py: Python<'_>, kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<()> {
        let priorities = crate::priorities::priorities_of(kind, settings)?;
        self.with_core(py, |router| Ok(router.set_priorities(priorities)?))
    }

    /// Replaces `clock_offset_seconds` of the order `"uniboost"` and keeps what was learned. Other orders have no clock. Raises
    /// `BadValueError`.
    fn set_clock_offset(&self, py: Python<'_>, seconds: f64) -> Result<()> {
        self.with_core(py, |router| Ok(router.set_clock_offset(seconds)?))
    }

    /// UniBoost's gamma as it is now, 1/s, and how often it was estimated; None where nobody is boosted.
    fn gamma(&self, py: Python<'_>) -> Result<Option<(f64, u64)>> {
        self.with_core(py, |router| Ok(router.gamma()))
    }

    /// How requests are cut from now on that no roles cut: `"none"`; `"libra"`, where that balances two instances and pays, with the settings `parts` (3: one that says
    /// how many `think_tokens` its answer has is cut into prompt, thoughts and answer, whether that pays or not; where it cannot be, into two), `probes`,
    /// `epsilon`, `least_gain` (shares of a request's own seconds; a gain below 0: wherever there is a balance), `least_tokens`,
    /// `transfer_seconds_per_token`, `transfer_fixed_seconds`, `quantile` and `margin_tokens` of the expected answer, or `lengths_given` (1: requests say how
    /// long their answers get); `"apart"`, behind the prompt, where all requests together lose less time then, with the settings `recent_seconds` (how long a prefill counts
    /// as what its instance does), `least_gain_seconds`, `transfer_seconds_per_token`, `transfer_fixed_seconds` (of a hand-over; pulls teach the former),
    /// `most_stall_seconds` (the client gets the prefill's own token where the hand-over behind it takes no longer), and
    /// `prior_tokens` of an answer, until some have ended, or `lengths_given`; or `"force"` with the fraction of prompt and expected output at which each is cut
    /// (`at`, for tests). Raises `BadValueError`.
    #[pyo3(signature = (kind, **settings))]
    fn set_split(&self, py: Python<'_>, kind: &str, settings: Option<&Bound<'_, PyDict>>) -> Result<()> {
        let split = crate::split::split_of(kind, settings)?;
        self.with_core(py, |router| Ok(router.set_split(split)?))
    }

    /// Whether an instance, before a request begins there, fetches the part of the prompt's KV from now on that another instance holds and it does not, where that takes
    /// less time than computing it. Settings: `seconds_per_token` and `fixed_seconds` of a pull (until `Ticket.pulled` taught others), `least_tokens` worth a pull,
    /// `most_pulls` that one holder serves at once, and `most_kv_usage` (1): while an instance reports that this share of its KV cache is in use, it pulls nothing.
    /// `Decision.pull` says what to fetch; `pull_tokens` and `pull_cost_tokens` are what scores may read of it, as `lmetric_pull` does. Both engines must be able to hand
    /// over anywhere (`set_cuts`). Raises `BadValueError`.
    #[pyo3(signature = (on=true, **settings))]
    fn set_pull(&self, py: Python<'_>, on: bool, settings: Option<&Bound<'_, PyDict>>) -> Result<()> {
        let pull = crate::pull::pull_of(settings)?;
        self.with_core(py, |router| Ok(router.set_pull(on.then_some(pull))?))
    }

    /// Seconds that a pulled token takes, and that a pull takes besides, as learned, and from how many pulls; None where nothing is pulled.
    fn pull_cost(&self, py: Python<'_>) -> Result<Option<(f64, f64, u64)>> {
        self.with_core(py, |router| Ok(router.pull_cost()))
    }

    /// How running requests are moved from now on: `"none"`, `"star"`, `"star_current"`, `"star_oracle"` or `"llumnix"`, with the settings of `lmetric.simulate`'s
    /// `reschedule_settings`. With a forecast by the learned curve, set it before the first request. Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, **settings))]
    fn set_rescheduling(
        &self,
        py: Python<'_>,
        name: &str,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let config = crate::reschedule::reschedule_of(name, settings)?;
        let built = config.map(|config| config.build()).transpose()?;
        self.with_core(py, |router| Ok(router.set_rescheduling(built)?))
    }

    /// One round of rescheduling: the moves that are worth making, and why there are no more. Each is a dictionary of `ticket` (a `Ticket.id`), `source`, `target`,
    /// `source_load`, `target_load`, `mean_load`, `variance_before` and `variance_after` (STAR, Algorithm 1). Nothing is booked: see `Ticket.begin_move`.
    #[pyo3(signature = (now=None))]
    fn reschedule<'py>(
        &self,
        py: Python<'py>,
        now: Option<f64>,
    ) -> Result<(Vec<Bound<'py, PyDict>>, &'static str)> {
        let (moves, stop) = self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            let (moves, stop) = router.reschedule(now)?;
            let name = |id| router.fleet().name(id).clone();
            let named = |named: NamedMove| (named, [named.why.source, named.why.target].map(name));
            Ok((moves.into_iter().map(named).collect::<Vec<_>>(), stop))
        })?;
        let told = moves.iter().map(|(named, names)| crate::ticket::move_dict(py, named, names));
        Ok((told.collect::<PyResult<_>>()?, stop.reason()))
    }

    /// Where the instance's engine can hand requests over and take them: `"nowhere"`, `"prompt_end"`, `"output"` (there and behind any output
    /// token) or `"anywhere"` (inside the prompt, too; a new instance's). Raises `UnknownNameError`, `BadValueError`.
    fn set_cuts(&self, py: Python<'_>, name: &str, cuts: &str) -> Result<()> {
        let cuts = named(&format!("cuts of {name}"), cuts, &Cuts::NAMES)?;
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            Ok(router.set_cuts(id, cuts)?)
        })
    }

    /// What an instance's steps cost where its engine is not like the others (another GPU, more of them): a profile's constants, or None: as the router was
    /// told of all, if it was. A new instance has none. Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, step_time))]
    fn set_step_time(&self, py: Python<'_>, name: &str, step_time: Option<&Bound<'_, PyDict>>) -> Result<()> {
        let step_time = step_time.map(step_time_of).transpose()?;
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            Ok(router.set_step_time(id, step_time)?)
        })
    }

    /// Why the hot-spot guard was on or off when the router was made. `stats()["guard_on"]` says whether it is on now.
    #[getter]
    fn guard_reason(&self) -> &str {
        &self.guard_reason
    }

    /// Choices in which a policy scored no candidate, since the start. The instance with the fewest requests was chosen.
    #[getter]
    fn unscored(&self, py: Python<'_>) -> Result<u64> {
        self.with_core(py, |router| Ok(router.totals().unscored))
    }

    /// Returns one sentence for each policy that scores no instance of an idle fleet, with the reason. Raises `PolicyError` if a
    /// policy function fails.
    fn policy_warnings(&self, py: Python<'_>) -> Result<Vec<String>> {
        self.with_core(py, |router| Ok(router.policy_warnings()?))
    }

    /// Switches the hot-spot guard on or off. Off, it forgets what it saw.
    fn set_guard(&self, py: Python<'_>, on: bool) -> Result<()> {
        self.with_core(py, |router| {
            router.set_guard(on);
            Ok(())
        })
    }

    /// The learned curve of answer lengths (SIBYL, section 4.2): the chance that an answer is longer than 0, 64, 128, ... tokens
    /// (multiples of the `bucket_tokens` of `sibyl`); None where no policy asks for it. `product_limit`: by the Kaplan-Meier estimator, which counts answers that still run (`sibyl_plus`),
    /// else as SIBYL's Eq. 4 updates it.
    #[pyo3(signature = (*, product_limit=false))]
    fn survival<'py>(
        &self,
        py: Python<'py>,
        product_limit: bool,
    ) -> Result<Option<Bound<'py, PyArray1<f64>>>> {
        let curve = self.with_core(py, |router| {
            Ok(router.ahead().map(|ahead| match product_limit {
                true => ahead.survival().product_limit().boundaries().to_vec(),
                false => ahead.survival().boundaries().to_vec(),
            }))
        })?;
        Ok(curve.map(|curve| PyArray1::from_vec(py, curve)))
    }

    /// Counters since the start, gauges, and for each instance its state and indicators.
    fn stats<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let stats = self.with_core(py, |router| {
            router.derive_all(self.clock.read());
            Ok(Stats::of(router))
        })?;
        Ok(stats.dict(py)?)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let read = |router: &mut CoreRouter| {
            let names: Vec<String> = router.fleet().live_names().map(str::to_string).collect();
            Ok((router.policy().spec().name.to_string(), names, router.in_flight()))
        };
        // A policy function may print its own router, which is taken while the function runs.
        let Ok((policy, names, in_flight)) = self.with_core(py, read) else {
            return "Router(in use)".into();
        };
        let shown: Vec<String> = names.iter().take(NAMES_SHOWN).map(|name| format!("'{name}'")).collect();
        let more = match names.len().saturating_sub(NAMES_SHOWN) {
            0 => String::new(),
            more => format!(", ... {more} more"),
        };
        let shown = shown.join(", ");
        format!("Router(policy='{policy}', instances=[{shown}{more}], in_flight={in_flight})")
    }
}

/// A count of tokens as the core has them.
fn saturated(tokens: u64) -> u32 {
    u32::try_from(tokens).unwrap_or(u32::MAX)
}

/// Who feeds an index, by name.
fn index_feed_of(what: &str, name: &str) -> Result<IndexFeed> {
    named(what, name, &[("approximate", IndexFeed::Approximate), ("exact", IndexFeed::Exact)])
}

/// When the instance of a second segment is chosen, by name.
pub fn binding_of(name: &str) -> Result<Binding> {
    named("binding", name, &[("early", Binding::Early), ("late", Binding::Late)])
}

/// One of a few values, by name.
pub fn named<T: Copy>(what: &str, name: &str, values: &[(&str, T)]) -> Result<T> {
    values.iter().find(|(known, _)| *known == name).map(|(_, value)| *value).ok_or_else(|| {
        let known: Vec<String> = values.iter().map(|(known, _)| format!("{known:?}")).collect();
        let (last, others) = known.split_last().expect("some values");
        CoreError::BadValue {
            what: what.into(),
            got: format!("{name:?}"),
            expected: format!("{} or {last}", others.join(", ")),
        }
        .into()
    })
}

/// The step-time model of a profile's constants.
pub fn step_time_of(constants: &Bound<'_, PyDict>) -> Result<StepTime> {
    let constant = |name: &str| -> Result<f64> {
        let what = format!("step_time: {name}");
        let expected = "a number of at least 0".to_string();
        let given = constants.get_item(name)?;
        let number = given.as_ref().and_then(|value| value.extract::<f64>().ok());
        number.filter(|n| n.is_finite() && *n >= 0.0).ok_or_else(|| {
            let got = given.map_or_else(|| "nothing".into(), |value| value.to_string());
            CoreError::BadValue { what, got, expected }.into()
        })
    };
    Ok(StepTime {
        fixed_seconds: constant("fixed_seconds")?,
        decode_seconds_per_sequence: constant("decode_seconds_per_sequence")?,
        decode_seconds_per_context_token: constant("decode_seconds_per_context_token")?,
        prefill_seconds_per_token: constant("prefill_seconds_per_token")?,
        prefill_seconds_per_attention_pair: constant("prefill_seconds_per_attention_pair")?,
        max_batch_tokens: constant("max_batch_tokens")?,
    })
}

/// The live instances in slot order, and their generations.
fn members(router: &CoreRouter) -> Vec<(InstanceId, u32)> {
    let fleet = router.fleet();
    let ids = (0..fleet.slots()).map(|slot| InstanceId(slot as u32));
    ids.filter(|id| fleet.is_live(*id)).map(|id| (id, fleet.generation(id))).collect()
}

/// Appends the scores of these instances; NaN for those that have gone or may not take the request.
fn scores_of(
    router: &mut CoreRouter,
    request: &Request<'_>,
    now: f64,
    members: &[(InstanceId, u32)],
    out: &mut Vec<f64>,
) -> std::result::Result<(), CoreError> {
    router.match_prefix(request.chain);
    router.score(request, now)?;
    let (fleet, last) = (router.fleet(), router.last_scores());
    out.extend(members.iter().map(|&(id, generation)| {
        let able = fleet.is_current(id, generation) && fleet.eligible()[id.index()];
        if able && !last.unscored { last.score[id.index()] } else { f64::NAN }
    }));
    Ok(())
}

//! `Router`: the core's router in Python.
use crate::buffers::{self, Ints};
use crate::errors::Result;
use crate::forecast::PythonForecast;
use crate::guard::GuardSettings;
use crate::policies;
use crate::registry::offering;
use crate::request::{self, Request};
use crate::ticket::{Decision, Stats, Ticket};
use lmetric_core::Registry;
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::indicators::{INDICATORS, Indicator, IndicatorDecl, Scope, declared};
use lmetric_core::kv::keys::Keys;
use lmetric_core::plan::{Binding, Cuts};
use lmetric_core::request::Request as CoreRequest;
use lmetric_core::router::feed::{KvFeed, Means, Stored};
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{IndexFeed, NamedMove, Router as CoreRouter, RouterConfig, Share, SharedRouter};
use lmetric_core::{CoreError, InstanceId};
use lmetric_study::REGISTRY;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use parking_lot::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyString};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Router>()?;
    module.add_class::<Request>()?;
    module.add("SHARE_NAMES", Share::NAMES.to_vec())?;
    module.add_class::<Decision>()?;
    module.add_class::<Ticket>()?;
    module.add("PolicyTimeout", module.py().get_type::<policies::PolicyTimeout>())?;
    module.add_function(wrap_pyfunction!(parsed_option, module)?)?;
    module.add_function(wrap_pyfunction!(crate::registry::planners, module)?)?;
    module.add_function(wrap_pyfunction!(crate::registry::check_policy, module)?)?;
    module.add_function(wrap_pyfunction!(policies::policy_table, module)?)
}

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
/// `"lmetric"`. `knobs`: its parameters. `block_size`: tokens per block. `text_block_bytes`: bytes per block of prompts given as
/// text. `domain`: what prompts must share to match (model, tokenizer). `kv_source`: what the KV index learns from:
/// `"approximate"` (from where requests were placed) or `"exact"` (from engines' KV events: `EventFeed`, `blocks_stored`, ...).
/// `index_bytes`, `receipt_bytes`: hard bounds of the index and of the decision records. `guard`: the hot-spot guard, on or off
/// or with settings (`lmetric.Guard`); None: as the policy declares (`guard_reason` says why). `step_time`: a profile's constants
/// (`fixed_seconds`, ..., `max_batch_tokens`), from which `predicted_ttft_seconds` is computed instead of from the learned prefill
/// rate. `decay_queued_prefill`: whether queued prefill tokens decay between events at the learned rate. `seed`: of all
/// random choices. `split`, `prefix_fetch`, `priority`, `rebalance`: options of `lmetric.options`, as for `configure`.
/// `offers`: the least mature policies and planners that the router accepts (`"stable"`, `"experimental"`, `"study"`: all).
///
/// With roles, a request is prefilled on an instance of role `"prefill"` and decodes on one of role `"decode"`, which
/// `decode_policy` (with `decode_knobs`; default `"least_requests"`) chooses with the decision (`binding="early"`) or after the
/// prefill (`"late"`). `colocate`: whether instances take whole requests if the other role is missing.
///
/// Raises `UnknownNameError`, `ExpressionError`, `BadValueError`. Threads may share a router.
#[pyclass(frozen, module = "lmetric")]
pub struct Router {
    shared: SharedRouter,
    /// Its policies and planners.
    registry: Registry,
    clock: Clock,
    /// What all prompts share: the key scheme is made anew where the block size changes.
    parts: Vec<Option<String>>,
    /// Whether the caller said if the hot-spot guard is on, and why it is on or off.
    guard: Mutex<(Option<bool>, String)>,
    /// Scratch of the prompt's chain.
    chain: Mutex<Vec<u64>>,
    /// The predictor of remaining lengths, if it is one in Python.
    forecast: Mutex<Option<PythonForecast>>,
    /// The key scheme, and the engines' own names of their blocks.
    feed: Arc<KvFeed>,
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

    /// Sets one of the options of `lmetric.options`; None switches it off.
    fn set_option(&self, py: Python<'_>, what: &str, option: &Bound<'_, PyAny>) -> Result<()> {
        let (kind, settings) = core_settings(what, option)?;
        let settings = Some(&settings);
        match what {
            "split" => {
                let split = crate::split::split_of(self.registry, &kind, settings)?;
                self.with_core(py, |router| Ok(router.set_split(&split)?))
            }
            "prefix_fetch" => {
                let fetch = crate::settings::pull_of(settings)?;
                self.with_core(py, |router| Ok(router.set_pull((kind != "none").then_some(fetch))?))
            }
            "priority" => {
                let priorities = crate::priorities::priorities_of(&kind, settings)?;
                self.with_core(py, |router| Ok(router.set_priorities(priorities)?))
            }
            _ => {
                let made = crate::reschedule::reschedule_of(&kind, settings, false)?;
                let (config, forecast) = made.unzip();
                let built = config.map(|config| config.build()).transpose()?;
                self.with_core(py, |router| Ok(router.set_rescheduling(built)?))?;
                *self.forecast.lock() = forecast.flatten();
                Ok(())
            }
        }
    }

    /// Calls `with` with the core's request, and its chain apart from it.
    fn with_request<T>(
        &self,
        py: Python<'_>,
        request: &Request,
        with: impl FnOnce(CoreRequest<'_>, &mut Vec<u64>) -> Result<T>,
    ) -> Result<T> {
        // Another thread may be hashing: then a buffer of our own, rather than a wait under the interpreter lock.
        let mut own = Vec::new();
        let mut scratch = self.chain.try_lock();
        let chain = scratch.as_deref_mut().unwrap_or(&mut own);
        with(request.core(py, &self.feed.keys(), chain)?, chain)
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

/// A change of an instance that is made with the router taken.
enum InstanceChange {
    Role(Role),
    Healthy(bool),
    Draining(bool),
    Handoff(Cuts),
    StepTime(Option<StepTime>),
}

/// An option of `lmetric.options` as its kind and settings.
pub fn core_settings<'py>(what: &str, option: &Bound<'py, PyAny>) -> Result<(String, Bound<'py, PyDict>)> {
    let settings = option.py().import("lmetric.options")?.call_method1("core_settings", (what, option))?;
    Ok(settings.extract::<(String, Bound<'py, PyDict>)>()?)
}

/// What Python says of a keyword that a function does not have.
fn unexpected(method: &str, keyword: &str) -> crate::errors::Error {
    PyTypeError::new_err(format!("Router.{method}() got an unexpected keyword argument '{keyword}'")).into()
}

/// The core's view of an option: equal texts are equal settings. For tests of the defaults in `lmetric.options`.
#[pyfunction]
pub fn parsed_option(what: &str, kind: &str, settings: &Bound<'_, PyDict>) -> Result<String> {
    let settings = Some(settings);
    Ok(match what {
        "split" => format!("{:?}", crate::split::split_of(REGISTRY, kind, settings)?),
        "prefix_fetch" => format!("{:?}", crate::settings::pull_of(settings)?),
        "priority" => format!("{:?}", crate::priorities::priorities_of(kind, settings)?),
        "rebalance" => format!("{:?}", crate::reschedule::reschedule_of(kind, settings, false)?),
        other => return Err(unexpected("configure", other)),
    })
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (policy=None, *, knobs=None, block_size=16, text_block_bytes=256, domain=None,
        kv_source="approximate", index_bytes=512 << 20, receipt_bytes=16 << 20, guard=None, step_time=None,
        decay_queued_prefill=true, seed=0, decode_policy=None, decode_knobs=None, binding="early", colocate=true,
        split=None, prefix_fetch=None, priority=None, rebalance=None, offers="study", **old),
        text_signature = "(policy=None, *, knobs=None, block_size=16, text_block_bytes=256, domain=None, \
        kv_source='approximate', index_bytes=536870912, receipt_bytes=16777216, guard=None, step_time=None, \
        decay_queued_prefill=True, seed=0, decode_policy=None, decode_knobs=None, binding='early', colocate=True, \
        split=None, prefix_fetch=None, priority=None, rebalance=None, offers='study')")]
    fn new(
        py: Python<'_>,
        policy: Option<&Bound<'_, PyAny>>,
        knobs: Option<&Bound<'_, PyDict>>,
        block_size: usize,
        text_block_bytes: usize,
        domain: Option<Vec<Option<String>>>,
        kv_source: &str,
        index_bytes: usize,
        receipt_bytes: usize,
        guard: Option<Bound<'_, PyAny>>,
        step_time: Option<&Bound<'_, PyDict>>,
        decay_queued_prefill: bool,
        seed: u64,
        decode_policy: Option<&Bound<'_, PyAny>>,
        decode_knobs: Option<&Bound<'_, PyDict>>,
        binding: &str,
        colocate: bool,
        split: Option<Bound<'_, PyAny>>,
        prefix_fetch: Option<Bound<'_, PyAny>>,
        priority: Option<Bound<'_, PyAny>>,
        rebalance: Option<Bound<'_, PyAny>>,
        offers: &str,
        old: Option<&Bound<'_, PyDict>>,
    ) -> Result<Router> {
        let (mut kv_source, mut decay_queued_prefill, mut guard) =
            (kv_source.to_string(), decay_queued_prefill, guard);
        if let Some(old) = old {
            let renamed = py.import("lmetric._deprecated")?.call_method1("router_keywords", (old, &guard))?;
            let renamed = renamed.cast_into::<PyDict>().map_err(PyErr::from)?;
            if let Some(value) = renamed.get_item("kv_source")? {
                kv_source = value.extract()?;
            }
            if let Some(value) = renamed.get_item("decay_queued_prefill")? {
                decay_queued_prefill = value.extract()?;
            }
            guard = renamed.get_item("guard")?.or(guard);
        }
        let registry = offering(offers)?;
        let index_feed = index_feed_of("kv_source", &kv_source)?;
        let parts = domain.unwrap_or_default();
        let keys = Keys::new(&parts, block_size, text_block_bytes)?;
        let policy = policies::build(registry, policy, knobs)?;
        let guard = GuardSettings::of(guard.as_ref())?;
        let guard_chosen = guard.on;
        let (guard, guard_reason) = guard.under(&*policy);
        let config = RouterConfig {
            index_feed,
            index_bytes,
            receipt_bytes,
            seed,
            drain: decay_queued_prefill,
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
            router.set_decode_policy(policies::build(registry, Some(decode_policy), decode_knobs)?)?;
        }
        let shared = SharedRouter::new(router);
        let made = Router {
            feed: Arc::new(KvFeed::new(shared.clone(), keys, index_bytes, index_feed == IndexFeed::Exact)),
            shared,
            registry,
            clock: Clock::new(py)?,
            parts,
            guard: Mutex::new((guard_chosen, guard_reason)),
            chain: Mutex::default(),
            forecast: Mutex::default(),
        };
        let options = [
            ("split", split),
            ("prefix_fetch", prefix_fetch),
            ("priority", priority),
            ("rebalance", rebalance),
        ];
        for (what, option) in options {
            if let Some(option) = option {
                made.set_option(py, what, &option)?;
            }
        }
        Ok(made)
    }

    /// Adds an instance under a name of its own; returns its slot, an index into `Decision.scores()`.
    ///
    /// `cache_blocks`: blocks its KV cache holds, where known (bounds what the index remembers of it). `role`: `"both"`,
    /// `"prefill"` or `"decode"`. `group`: instances that share this name are one group in expressions (`group_max(tokens)`), such
    /// as data-parallel ranks that step together; None: a group of its own. Raises `BadValueError` (name taken, empty; fleet full).
    #[pyo3(signature = (name, *, cache_blocks=None, role="both", group=None))]
    fn add_instance(
        &self,
        py: Python<'_>,
        name: &str,
        cache_blocks: Option<u32>,
        role: &str,
        group: Option<&str>,
    ) -> Result<usize> {
        let role = named(&format!("role of {name}"), role, &Role::NAMES)?;
        if group == Some("") {
            let expected = "a name that is not empty, or None".into();
            return Err(
                CoreError::BadValue { what: format!("group of {name}"), got: "''".into(), expected }.into()
            );
        }
        self.with_core(py, |router| {
            let id = router.add_instance(name, role, cache_blocks)?;
            router.fleet_mut().set_group(id, group)?;
            Ok(id.index())
        })
    }

    /// Changes an instance. What is not given stays.
    ///
    /// `role`: `"both"`, `"prefill"` or `"decode"`. `healthy`: an unhealthy instance gets no requests. `draining`: nor does one
    /// that drains. `cache_blocks`: blocks that its KV cache holds, all ranks together; None: unknown. `handoff`: where its engine
    /// can hand a request over and take one: `"nowhere"`, `"prompt_end"`, `"output"` (there and behind any output token) or
    /// `"anywhere"` (also inside the prompt; a new instance's). `step_time`: a profile's constants if its engine is not like the
    /// others; None: those of the router. `kv_source`: `"approximate"` or `"exact"`, as for `Router`; a change to exact forgets
    /// what was guessed. Running requests are not affected.
    ///
    /// Raises `UnknownNameError`, `BadValueError`; a value that is not valid changes nothing.
    #[pyo3(signature = (name, **changes), text_signature = "($self, name, *, role=..., healthy=..., draining=..., \
        cache_blocks=..., handoff=..., step_time=..., kv_source=...)")]
    fn update_instance(&self, py: Python<'_>, name: &str, changes: Option<&Bound<'_, PyDict>>) -> Result<()> {
        let Some(changes) = changes else {
            return self.with_core(py, |router| Ok(router.fleet().find(name).map(drop)?));
        };
        let mut under_router: Vec<InstanceChange> = Vec::new();
        let (mut cache_blocks, mut kv_source) = (None, None);
        for (key, value) in changes.iter() {
            let key = key.extract::<String>()?;
            let of = |what: &str| format!("{what} of {name}");
            match key.as_str() {
                "role" => {
                    under_router.push(InstanceChange::Role(named(
                        &of(&key),
                        value.extract()?,
                        &Role::NAMES,
                    )?));
                }
                "healthy" => under_router.push(InstanceChange::Healthy(value.extract()?)),
                "draining" => under_router.push(InstanceChange::Draining(value.extract()?)),
                "handoff" => {
                    under_router.push(InstanceChange::Handoff(named(
                        &of(&key),
                        value.extract()?,
                        &Cuts::NAMES,
                    )?));
                }
                "step_time" => {
                    let constants = if value.is_none() {
                        None
                    } else {
                        Some(value.cast::<PyDict>().map_err(PyErr::from)?)
                    };
                    let constants = constants.map(step_time_of).transpose()?;
                    under_router.push(InstanceChange::StepTime(constants));
                }
                "cache_blocks" => cache_blocks = Some(value.extract::<Option<u32>>()?),
                "kv_source" => kv_source = Some(index_feed_of(&of(&key), value.extract()?)?),
                _ => return Err(unexpected("update_instance", &key)),
            }
        }
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            for change in under_router {
                match change {
                    InstanceChange::Role(role) => router.fleet_mut().set_role(id, role)?,
                    InstanceChange::Healthy(healthy) => router.fleet_mut().set_healthy(id, healthy)?,
                    InstanceChange::Draining(draining) => router.fleet_mut().set_draining(id, draining)?,
                    InstanceChange::Handoff(cuts) => router.set_cuts(id, cuts)?,
                    InstanceChange::StepTime(constants) => router.set_step_time(id, constants)?,
                }
            }
            Ok(())
        })?;
        if let Some(blocks) = cache_blocks {
            self.feeding(py, |feed| feed.set_cache_blocks(name, blocks))?;
        }
        if let Some(source) = kv_source {
            self.feeding(py, |feed| feed.set_index_feed(name, source))?;
        }
        Ok(())
    }

    /// Changes settings of the router from now on. What is not given stays; None switches an option off.
    ///
    /// `split`: how requests are split that roles do not split (`lmetric.LibraSplit`, `DecodePlacement`, `SplitAt`).
    /// `prefix_fetch`: whether instances fetch prefixes from each other (`PrefixFetch`). `priority`: what the engines' queues are
    /// ordered by (`UniBoost`, `FairShares`); `Decision.priority` has the number, lower goes first. `rebalance`: how running
    /// requests move (`Star`, `Llumnix`; set it before the first request). `guard`: whether the hot-spot guard is on; off, it
    /// forgets what it counted. `binding`: when the decode instance is chosen, `"early"` or `"late"`. `block_size`: tokens per
    /// block; the KV index is emptied, and an `EventFeed` asks the engines for their blocks again.
    ///
    /// Raises `BadValueError`.
    #[pyo3(signature = (**changes), text_signature = "($self, *, split=..., prefix_fetch=..., priority=..., \
        rebalance=..., guard=..., binding=..., block_size=...)")]
    fn configure(&self, py: Python<'_>, changes: Option<&Bound<'_, PyDict>>) -> Result<()> {
        for (key, value) in changes.into_iter().flat_map(|changes| changes.iter()) {
            let key = key.extract::<String>()?;
            match key.as_str() {
                "guard" => {
                    let on: bool = value.extract().map_err(|_| {
                        buffers::bad(
                            &value,
                            "guard",
                            "True or False; its settings are those of lmetric.Router",
                        )
                    })?;
                    self.with_core(py, |router| {
                        router.set_guard(on);
                        Ok(())
                    })?;
                    *self.guard.lock() = (Some(on), lmetric_core::guard::set_reason(on));
                }
                "binding" => {
                    let binding = binding_of(value.extract()?)?;
                    self.with_core(py, |router| {
                        router.set_binding(binding);
                        Ok(())
                    })?;
                }
                "block_size" => {
                    let keys = Keys::new(&self.parts, value.extract()?, self.feed.keys().text_block_bytes)?;
                    self.feeding(py, |feed| {
                        feed.set_keys(keys);
                        Ok(())
                    })?;
                }
                "split" | "prefix_fetch" | "priority" | "rebalance" => self.set_option(py, &key, &value)?,
                _ => return Err(unexpected("configure", &key)),
            }
        }
        Ok(())
    }

    /// Removes an instance. Tickets open on it stay valid and touch no books any more. Raises `UnknownNameError`.
    fn remove_instance(&self, py: Python<'_>, name: &str) -> Result<()> {
        self.feeding(py, |feed| feed.remove_instance(name))
    }

    /// Tokens a block, of prompts and of the engines' events.
    #[getter]
    fn block_size(&self) -> usize {
        self.feed.keys().block_size
    }

    /// Names of the instances, in slot order.
    fn instances(&self, py: Python<'_>) -> Result<Vec<String>> {
        self.with_core(py, |router| Ok(router.fleet().live_names().map(str::to_string).collect()))
    }

    /// Requests in flight: tickets that are open.
    fn in_flight(&self, py: Python<'_>) -> Result<usize> {
        self.with_core(py, |router| Ok(router.in_flight()))
    }

    /// Decides where a request runs, counts it there at once, and opens its ticket.
    ///
    /// `now`: seconds on the monotonic clock. Returns the decision and the ticket; a ticket that is dropped while open is an
    /// abort. Raises `NoInstanceError` (nothing is counted), `PolicyError` (a policy function failed).
    /// Source: LMETRIC, Figure 4 and section 5.
    // The old keywords one by one, and not as `**old`: that would give up the faster way of calling.
    #[pyo3(signature = (request=None, *, now=None, tokens=None, text=None, block_hashes=None, prompt_tokens=None, expected_output_tokens=None, think_tokens=None, length_class=None, extra_tokens=None, session=None, adapter=None, salt=None, request_id=None, uncut=None, unpulled=None, tenant=None, tenant_weight=None, handicap_seconds=None), text_signature = "($self, request, *, now=None)")]
    fn route<'py>(
        &self,
        py: Python<'py>,
        request: Option<Bound<'py, PyAny>>,
        now: Option<f64>,
        tokens: Option<Bound<'py, PyAny>>,
        text: Option<Bound<'py, PyAny>>,
        block_hashes: Option<Bound<'py, PyAny>>,
        prompt_tokens: Option<Bound<'py, PyAny>>,
        expected_output_tokens: Option<Bound<'py, PyAny>>,
        think_tokens: Option<Bound<'py, PyAny>>,
        length_class: Option<Bound<'py, PyAny>>,
        extra_tokens: Option<Bound<'py, PyAny>>,
        session: Option<Bound<'py, PyAny>>,
        adapter: Option<Bound<'py, PyAny>>,
        salt: Option<Bound<'py, PyAny>>,
        request_id: Option<Bound<'py, PyAny>>,
        uncut: Option<Bound<'py, PyAny>>,
        unpulled: Option<Bound<'py, PyAny>>,
        tenant: Option<Bound<'py, PyAny>>,
        tenant_weight: Option<Bound<'py, PyAny>>,
        handicap_seconds: Option<Bound<'py, PyAny>>,
    ) -> Result<(Decision, Ticket)> {
        let old = if tokens.is_some()
            || text.is_some()
            || block_hashes.is_some()
            || prompt_tokens.is_some()
            || expected_output_tokens.is_some()
            || think_tokens.is_some()
            || length_class.is_some()
            || extra_tokens.is_some()
            || session.is_some()
            || adapter.is_some()
            || salt.is_some()
            || request_id.is_some()
            || uncut.is_some()
            || unpulled.is_some()
            || tenant.is_some()
            || tenant_weight.is_some()
            || handicap_seconds.is_some()
        {
            let old = [
                ("tokens", &tokens),
                ("text", &text),
                ("block_hashes", &block_hashes),
                ("prompt_tokens", &prompt_tokens),
                ("expected_output_tokens", &expected_output_tokens),
                ("think_tokens", &think_tokens),
                ("length_class", &length_class),
                ("extra_tokens", &extra_tokens),
                ("session", &session),
                ("adapter", &adapter),
                ("salt", &salt),
                ("request_id", &request_id),
                ("uncut", &uncut),
                ("unpulled", &unpulled),
                ("tenant", &tenant),
                ("tenant_weight", &tenant_weight),
                ("handicap_seconds", &handicap_seconds),
            ];
            Some(request::under_old_names(py, &old)?)
        } else {
            None
        };
        let given = request::given(py, "Router.route", request, old.as_ref())?;
        let id = given.get().id(py)?;
        self.with_request(py, given.get(), |request, chain| {
            let (decision, name, next, pull) = self.with_core(py, |router| {
                let now = self.clock.now(now, router)?;
                let decision = router.route_taking(&request, chain, id, now)?;
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

    /// Leading prompt tokens that each instance holds, by the KV index: uint32, in the order of `instances()`.
    ///
    /// The last token never counts: every engine computes it. Nothing is counted or touched.
    #[pyo3(signature = (request=None, **old), text_signature = "($self, request)")]
    fn cached_tokens<'py>(
        &self,
        py: Python<'py>,
        request: Option<Bound<'py, PyAny>>,
        old: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyArray1<u32>>> {
        let given = request::given(py, "Router.cached_tokens", request, old)?;
        let hits = self.with_request(py, given.get(), |request, chain| {
            let request = CoreRequest { chain, ..request };
            self.with_core(py, |router| Ok(router.hit_tokens(&request)))
        })?;
        Ok(PyArray1::from_slice(py, &hits))
    }

    /// Scores of the live instances, float64, in the order of `instances()`; NaN for an instance that may not take the request.
    /// Nothing is counted.
    #[pyo3(signature = (request=None, *, now=None, **old), text_signature = "($self, request, *, now=None)")]
    fn score<'py>(
        &self,
        py: Python<'py>,
        request: Option<Bound<'py, PyAny>>,
        now: Option<f64>,
        old: Option<&Bound<'py, PyDict>>,
    ) -> Result<Bound<'py, PyArray1<f64>>> {
        let given = request::given(py, "Router.score", request, old)?;
        let out = self.with_request(py, given.get(), |request, chain| {
            let request = CoreRequest { chain, ..request };
            self.with_core(py, |router| {
                let now = self.clock.now(now, router)?;
                let (members, mut out) = (members(router), Vec::new());
                scores_of(router, &request, now, &members, &mut out)?;
                Ok(out)
            })
        })?;
        Ok(PyArray1::from_vec(py, out))
    }

    /// Scores of many requests at once, float64: a row per request, a column for each instance that was there at the call;
    /// NaN as for `score`, and once an instance has gone. Other calls of the router run between two requests.
    #[pyo3(signature = (requests, offsets=None, *, now=None), text_signature = "($self, requests, *, now=None)")]
    fn score_batch<'py>(
        &self,
        py: Python<'py>,
        requests: Bound<'py, PyAny>,
        offsets: Option<Bound<'py, PyAny>>,
        now: Option<f64>,
    ) -> Result<Bound<'py, PyArray2<f64>>> {
        let requests = match offsets {
            None => requests,
            Some(offsets) => {
                py.import("lmetric._deprecated")?.call_method1("requests", (requests, offsets))?
            }
        };
        let requests: Vec<Bound<'_, Request>> = requests
            .try_iter()?
            .map(|each| request::given(py, "an element of requests", Some(each?), None))
            .collect::<Result<_>>()?;
        refuse_in_policy("scored a batch")?;
        // Hashed here, since that reads memory of Python; the chains stand back to back.
        let keys = self.feed.keys();
        let (mut chains, mut chain) = (Vec::new(), Vec::new());
        let mut cores = Vec::with_capacity(requests.len());
        for request in &requests {
            let core = request.get().core(py, &keys, &mut chain)?;
            cores.push((core, chains.len()..chains.len() + chain.len()));
            chains.extend_from_slice(&chain);
        }
        let (values, columns) = py.detach(|| {
            self.shared.check()?;
            let (now, members) = {
                let router = self.shared.lock();
                (self.clock.now(now, &router)?, members(&router))
            };
            let mut out = Vec::with_capacity(members.len() * cores.len());
            for (core, range) in &cores {
                let request = CoreRequest { chain: &chains[range.clone()], ..core.clone() };
                // Taken for one request at a time: decisions go between.
                let mut router = self.shared.lock_behind();
                self.shared.check()?;
                scores_of(&mut router, &request, now, &members, &mut out)?;
            }
            Ok::<_, crate::errors::Error>((out, members.len()))
        })?;
        Ok(PyArray1::from_vec(py, values).reshape([cores.len(), columns])?)
    }

    /// Takes in an engine's load report: requests `waiting` and `running`, `kv_usage` from 0 to 1; absent ones are kept. `extra`:
    /// values of declared indicators (`lmetric.indicator`) by name, as of now; None: the value is no longer known. A call with `extra`
    /// alone is no report of the engine: `report_age_seconds` stays.
    ///
    /// Others' load is what is reported beyond the router's own requests in flight. Raises `UnknownNameError`, `BadValueError`;
    /// nothing has changed then.
    #[pyo3(signature = (name, *, waiting=None, running=None, kv_usage=None, extra=None, now=None))]
    fn report_load(
        &self,
        py: Python<'_>,
        name: &str,
        waiting: Option<f64>,
        running: Option<f64>,
        kv_usage: Option<f64>,
        extra: Option<&Bound<'_, PyDict>>,
        now: Option<f64>,
    ) -> Result<()> {
        let extra = extra.map(|extra| extra_values(name, extra)).transpose()?;
        self.with_core(py, |router| {
            let report = Report { at: self.clock.now(now, router)?, waiting, running, kv_usage };
            let Some(extra) = extra else { return Ok(router.engine_report(name, report)?) };
            let extra = extra.iter().map(|(indicator, value)| (&**indicator, *value));
            if [waiting, running, kv_usage].iter().any(Option::is_some) {
                return Ok(router.engine_report_with(name, report, extra)?);
            }
            Ok(router.report_declared(name, extra, report.at)?)
        })
    }

    /// The load that this router placed on each instance, for routers beside it: names, and the numbers that `SHARE_NAMES` names.
    #[pyo3(signature = (*, now=None))]
    fn export_load(&self, py: Python<'_>, now: Option<f64>) -> Result<Vec<(String, Vec<f64>)>> {
        let told = self.with_core(py, |router| Ok(router.share(self.clock.now(now, router)?)))?;
        Ok(told.iter().map(|(name, share)| (name.to_string(), share.numbers().to_vec())).collect())
    }

    /// What the router `replica` has on each instance, as its `export_load` returned it; it counts as if it had been placed here, until the next
    /// word from there. Instances that are not known are passed over. Raises `BadValueError`; nothing has changed then.
    #[pyo3(signature = (replica, shares, *, now=None))]
    fn import_load(
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

    /// Forgets the load of routers whose last message is older than `seconds`; returns their names.
    #[pyo3(signature = (seconds, *, now=None))]
    fn expire_peers(&self, py: Python<'_>, seconds: f64, now: Option<f64>) -> Result<Vec<String>> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.forget_silent(seconds, now).into_iter().map(String::from).collect())
        })
    }

    /// The engine stored consecutive blocks: one physical copy more of each. `block_hashes`: its own 64-bit hashes (a buffer);
    /// `token_ids`: a block's worth of them for each; `parent`: its hash of the block before the first, None where they start the
    /// prompt (then `lora_name` and `cache_salt` count); `rank`: its data-parallel rank, a cache of its own. Returns how many blocks could not be placed (unknown
    /// parent, no room, or the instance does not learn by events). Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, block_hashes, token_ids=None, *, parent=None, lora_name=None, cache_salt=None, rank=0,
        tokens=None, adapter=None, salt=None), text_signature = "($self, name, block_hashes, token_ids, *, parent=None, \
        lora_name=None, cache_salt=None, rank=0)")]
    fn blocks_stored(
        &self,
        py: Python<'_>,
        name: &str,
        block_hashes: Bound<'_, PyAny>,
        token_ids: Option<Bound<'_, PyAny>>,
        parent: Option<u64>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
        rank: u32,
        tokens: Option<Bound<'_, PyAny>>,
        adapter: Option<&str>,
        salt: Option<&str>,
    ) -> Result<usize> {
        let olds = [("tokens", tokens.is_some()), ("adapter", adapter.is_some()), ("salt", salt.is_some())];
        for (old, _) in olds.iter().filter(|(_, given)| *given) {
            py.import("lmetric._deprecated")?.call_method1("keyword", ("Router.blocks_stored", *old))?;
        }
        let (lora_name, cache_salt) = (lora_name.or(adapter), cache_salt.or(salt));
        let token_ids = token_ids
            .or(tokens)
            .ok_or_else(|| PyTypeError::new_err("Router.blocks_stored() missing the argument 'token_ids'"))?;
        let (hashes, ids) =
            (Ints::take(&block_hashes, "block_hashes")?, Ints::take(&token_ids, "token_ids")?);
        let (hashes, ids) = (hashes.hashes(py, "block_hashes")?, ids.tokens(py, "token_ids")?);
        let keys = self.feed.keys();
        if hashes.len() * keys.block_size != ids.len() {
            return Err(CoreError::BadValue {
                what: "token_ids".into(),
                got: format!("{} tokens for {} blocks", ids.len(), hashes.len()),
                expected: format!("{} a block", keys.block_size),
            }
            .into());
        }
        let domain = keys.tokens.of_request(lora_name, cache_salt);
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

    /// Indicator columns of the live instances, in the order of `instances()`; declared indicators come last.
    #[pyo3(signature = (now=None))]
    fn indicators<'py>(&self, py: Python<'py>, now: Option<f64>) -> Result<Bound<'py, PyDict>> {
        let columns = self.with_core(py, |router| {
            router.derive_all(self.clock.now(now, router)?);
            let (members, of_instances) = (members(router), |d: &&IndicatorDecl| d.scope == Scope::Instance);
            let column = |decl: &IndicatorDecl| {
                let column = router.columns().get(decl.id);
                (decl.name, members.iter().map(|(id, _)| column[id.index()]).collect::<Vec<_>>())
            };
            let built_in = INDICATORS.iter().filter(of_instances).map(column);
            let declared = declared::declared();
            let declared = declared.iter().map(|decl| {
                let column = router.columns().declared(decl.id);
                (decl.name, members.iter().map(|(id, _)| column[id.index()]).collect::<Vec<_>>())
            });
            Ok(built_in.chain(declared).collect::<Vec<_>>())
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
    fn explain<'py>(&self, py: Python<'py>, decision_id: u64) -> Result<Option<Bound<'py, PyDict>>> {
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

    /// Replaces `clock_offset_seconds` of the order `"uniboost"` and keeps what was learned. Other orders have no clock. Raises
    /// `BadValueError`.
    fn set_clock_offset(&self, py: Python<'_>, seconds: f64) -> Result<()> {
        self.with_core(py, |router| Ok(router.set_clock_offset(seconds)?))
    }

    /// What the router has learned, as a dictionary; None for what no option or policy learns.
    ///
    /// `gamma` (of UniBoost, 1/s) and `gamma_estimates` (how often it was estimated). `fetch_seconds_per_token`,
    /// `fetch_fixed_seconds` and `fetches` (from how many prefix fetches). `length_survival`: the chance that an answer is longer than
    /// 0, 64, 128, ... tokens (multiples of the `bucket_tokens` of `sibyl`; SIBYL, Eq. 4), and `length_survival_product_limit`, the
    /// same by the Kaplan-Meier estimator, which counts running answers. `prefill_tokens_per_second` by instance.
    fn learned<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let (gamma, fetch, curves, rates) = self.with_core(py, |router| {
            let curves = router.ahead().map(|ahead| {
                let survival = ahead.survival();
                [survival.boundaries().to_vec(), survival.product_limit().boundaries().to_vec()]
            });
            let rate = router.columns().get(Indicator::PrefillTokensPerSecond);
            let rate = |id: InstanceId| Some(rate[id.index()]).filter(|rate| !rate.is_nan());
            let rates: Vec<(Arc<str>, Option<f64>)> = members(router)
                .into_iter()
                .map(|(id, _)| (router.fleet().name(id).clone(), rate(id)))
                .collect();
            Ok((router.gamma(), router.pull_cost(), curves, rates))
        })?;
        let dict = PyDict::new(py);
        dict.set_item("gamma", gamma.map(|(gamma, _)| gamma))?;
        dict.set_item("gamma_estimates", gamma.map(|(_, count)| count))?;
        dict.set_item("fetch_seconds_per_token", fetch.map(|(per_token, _, _)| per_token))?;
        dict.set_item("fetch_fixed_seconds", fetch.map(|(_, fixed, _)| fixed))?;
        dict.set_item("fetches", fetch.map(|(_, _, count)| count))?;
        let [plain, limit] = curves.map_or([None, None], |curves| curves.map(Some));
        dict.set_item("length_survival", plain.map(|curve| PyArray1::from_vec(py, curve)))?;
        dict.set_item("length_survival_product_limit", limit.map(|curve| PyArray1::from_vec(py, curve)))?;
        let by_instance = PyDict::new(py);
        for (name, rate) in rates {
            by_instance.set_item(&*name, rate)?;
        }
        dict.set_item("prefill_tokens_per_second", by_instance)?;
        Ok(dict)
    }

    /// One round of rescheduling: the moves that are worth making, and why there are no more. Each is a dictionary of `ticket` (a `Ticket.id`), `source`, `target`,
    /// `source_load`, `target_load`, `mean_load`, `variance_before` and `variance_after` (STAR, Algorithm 1). Nothing is counted: see `Ticket.begin_migration`.
    #[pyo3(signature = (now=None))]
    fn rebalance<'py>(
        &self,
        py: Python<'py>,
        now: Option<f64>,
    ) -> Result<(Vec<Bound<'py, PyDict>>, &'static str)> {
        // A predictor in Python takes milliseconds: it is asked while the router goes on.
        let forecast = self.forecast.lock().clone();
        if let Some(forecast) = forecast {
            let running = self.with_core(py, |router| Ok(router.running()))?;
            forecast.refresh(py, &running)?;
        }
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

    /// Why the policy has the hot-spot guard on or off. `stats()["guard_on"]` says whether it is on now.
    #[getter]
    fn guard_reason(&self) -> String {
        self.guard.lock().1.clone()
    }

    /// Replaces the policy while requests are in flight. They stay where they are; index, in-flight ledger and learned rates stay. The
    /// hot-spot guard is on or off as the new policy declares, unless `guard=` was given to the constructor or `configure`. Raises as
    /// the constructor; nothing changes then.
    #[pyo3(signature = (policy, *, knobs=None))]
    fn set_policy(
        &self,
        py: Python<'_>,
        policy: &Bound<'_, PyAny>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let policy = policies::build(self.registry, Some(policy), knobs)?;
        let chosen = self.guard.lock().0;
        let (on, reason) = lmetric_core::guard::applies(&*policy, chosen);
        self.with_core(py, |router| {
            router.set_policy(policy)?;
            if router.guard().config().on != on {
                router.set_guard(on);
            }
            Ok(())
        })?;
        self.guard.lock().1 = reason;
        Ok(())
    }

    /// Replaces the policy that chooses where requests decode whose prompt another instance computed, as `set_policy` does.
    #[pyo3(signature = (policy, *, knobs=None))]
    fn set_decode_policy(
        &self,
        py: Python<'_>,
        policy: &Bound<'_, PyAny>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let policy = policies::build(self.registry, Some(policy), knobs)?;
        self.with_core(py, |router| Ok(router.set_decode_policy(policy)?))
    }

    /// Decisions that fallbacks made for Python policies since the start, by cause: `errors`, `overruns` (of their time limits) and
    /// `paused`; `problem`: what went wrong last, or None.
    fn policy_fallbacks<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let fallbacks = self.with_core(py, |router| Ok(router.fallbacks()))?;
        let dict = PyDict::new(py);
        dict.set_item("errors", fallbacks.errors)?;
        dict.set_item("overruns", fallbacks.overruns)?;
        dict.set_item("paused", fallbacks.paused)?;
        dict.set_item("problem", fallbacks.problem)?;
        Ok(dict)
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

/// The values of declared indicators in a load report of `name`.
fn extra_values(name: &str, extra: &Bound<'_, PyDict>) -> Result<Vec<(String, Option<f64>)>> {
    let value = |(indicator, value): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let indicator: String = indicator.extract().map_err(|_| {
            buffers::bad(&indicator, &format!("extra of {name}"), "the names of declared indicators")
        })?;
        if value.is_none() {
            return Ok((indicator, None));
        }
        let number = if value.is_instance_of::<PyBool>() { None } else { value.extract::<f64>().ok() };
        let what = format!("{indicator} in the load report of {name}");
        let number = number.ok_or_else(|| buffers::bad(&value, &what, "a finite number or None"))?;
        Ok((indicator, Some(number)))
    };
    extra.iter().map(value).collect()
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
    let max_sequences =
        if constants.contains("max_sequences")? { constant("max_sequences")? } else { f64::INFINITY };
    Ok(StepTime {
        fixed_seconds: constant("fixed_seconds")?,
        decode_seconds_per_sequence: constant("decode_seconds_per_sequence")?,
        decode_seconds_per_context_token: constant("decode_seconds_per_context_token")?,
        prefill_seconds_per_token: constant("prefill_seconds_per_token")?,
        prefill_seconds_per_attention_pair: constant("prefill_seconds_per_attention_pair")?,
        max_batch_tokens: constant("max_batch_tokens")?,
        max_sequences,
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
    request: &CoreRequest<'_>,
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

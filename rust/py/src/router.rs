//! `Router`: the Python class of the core's router.
mod decide;

use crate::admission::{Arrival, Hashed, Released};
use crate::board::Board;
use crate::buffers::{self, Ints, hash_of};
use crate::errors::{Result, to_python};
use crate::expr::unknown_indicator;
use crate::forecast::PythonForecast;
use crate::guard::GuardSettings;
use crate::held::{Clock, refuse_in_policy, with_router, with_router_detached};
use crate::peers::LoadMessage;
use crate::policies;
use crate::programs::Snapshot;
use crate::registry::offering;
use crate::request::{self, Request};
use crate::ticket::{Decision, InstanceStats, Stats, Ticket};
use crate::warm::Warming;
use decide::Asked;
use lmetric_core::estimate::StepTime;
use lmetric_core::feed::{KvFeed, Means, Stored};
use lmetric_core::fleet::{InstanceId, Role};
use lmetric_core::indicators::{DeclaredId, INDICATORS, Indicator, IndicatorSet, Scope, declared};
use lmetric_core::kv::keys::Keys;
use lmetric_core::kv::tier::Tier;
use lmetric_core::kv::tiers::TierUse;
use lmetric_core::plan::{Binding, Cuts};
use lmetric_core::policy::Policy;
use lmetric_core::program::PeerPrograms;
use lmetric_core::request::Request as CoreRequest;
use lmetric_core::router::ledger::Report;
use lmetric_core::router::{
    IndexFeed, Load, LoadMessage as CoreMessage, Message, NamedMove, Published, Router as CoreRouter,
    RouterConfig, SharedRouter, TierConfig, check_cache_blocks,
};
use lmetric_core::{CoreError, Maturity, Registry, Slot};
use lmetric_study::REGISTRY;
use numpy::{PyArray1, PyArray2, PyArrayMethods};
use parking_lot::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBool, PyDict, PyList, PyString};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Adds the classes to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Router>()?;
    module.add_class::<Request>()?;
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
/// Values of indicators, and instances, that are copied while the router is held: some 20 us.
const VALUES_PER_PIECE: usize = 16_384;
const ROWS_PER_PIECE: usize = 256;
/// Routes the requests of one pool: the instances of one model.
///
/// - `policy`: a registered name, the text of a score expression, an `lmetric.Policy` or an
///   `lmetric.policy_function`; default `"total_delay"`. `knobs`: its parameters.
/// - `block_size`: tokens per block. `text_block_bytes`: bytes per block of prompts given as text.
/// - `domain`: values that prompts must share to match (model, tokenizer).
/// - `kv_source`: source of the KV index, `"approximate"` (where requests were placed) or `"exact"`
///   (engines' KV events: `EventFeed`, `blocks_stored`, ...).
/// - `index_bytes`, `record_bytes`: hard bounds of the index and of the decision records.
/// - `tiers`: the tiers below the GPU whose blocks count in scores. `"auto"`: the CPU tier, and
///   other tiers from their first removal on; `"all"`; `"off"`. Their blocks come from KV events.
/// - `tier_load_ratio`: seconds to load one token from such a tier, divided by the seconds to
///   prefill it (0 to 1).
/// - `guard`: the hot-spot guard, on or off or with settings (`lmetric.Guard`); None: off,
///   unless the policy turns it on (`guard_reason` gives the reason).
/// - `step_time`: a profile's constants (`fixed_seconds`, ..., `max_batch_tokens`). With them,
///   `predicted_ttft_seconds` comes from the step-time model, not from the learned prefill rate.
/// - `decay_queued_prefill`: whether queued prefill tokens decay between events at the learned
///   rate.
/// - `seed`: seed of all random choices.
/// - `split`, `prefix_fetch`, `priority`, `rebalance`, `programs`, `fleet_changes`: options of
///   `lmetric.options`, as for `configure`.
/// - `offers`: the least mature policies and planners that the router accepts (`"stable"`,
///   `"experimental"`, `"study"`: all).
///
/// With roles, an instance of role `"prefill"` computes a request's prompt and an instance of role
/// `"decode"` decodes it. `decode_policy` (with `decode_knobs`; default `"least_requests"`) chooses
/// the decode instance with the decision (`binding="early"`) or after the prefill (`"late"`).
/// `colocate`: whether instances take whole requests if the other role is missing.
///
/// Raises `UnknownNameError`, `ExpressionError`, `BadValueError`. Threads may share a router.
#[pyclass(frozen, module = "lmetric")]
pub struct Router {
    shared: SharedRouter,
    /// The policies and planners that the router offers.
    registry: Registry,
    clock: Clock,
    /// The `domain` of all prompts: a new block size needs a new key scheme.
    parts: Vec<Option<String>>,
    /// The caller's choice for the hot-spot guard (None: no choice), and why the guard is on or
    /// off.
    guard: Mutex<(Option<bool>, String)>,
    /// Buffers for the prompts' chains of block hashes.
    chains: Mutex<Vec<Vec<u64>>>,
    /// Number of slots of the fleet, to estimate how long a decision takes.
    slots: AtomicUsize,
    /// Whether a policy was set that calls a Python function.
    calls_python: AtomicBool,
    /// The predictor of remaining lengths, if it is a Python predictor.
    forecast: Mutex<Option<PythonForecast>>,
    /// The key scheme, and the engines' own names of their blocks.
    feed: Arc<KvFeed>,
}

impl Router {
    /// The feed of the router's KV index.
    pub fn feed(&self) -> &Arc<KvFeed> {
        &self.feed
    }

    /// The router's clock.
    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Returns the load on instances that changed since the version `base`, and the number of
    /// changed programs.
    pub fn load_since(&self, py: Python<'_>, base: Option<u64>, now: Option<f64>) -> Result<(Load, usize)> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok((router.instances_since(base, now), router.count_programs_since(base)))
        })
    }

    /// Returns the programs that changed since the version `base`, in at most `bytes`.
    pub fn programs_since(
        &self,
        py: Python<'_>,
        base: Option<u64>,
        bytes: usize,
        now: Option<f64>,
    ) -> Result<PeerPrograms> {
        self.with_core(py, |router| Ok(router.programs_since(base, bytes, self.clock.now(now, router)?)))
    }

    /// Calls `with` without the interpreter lock: feeding waits for other feeding threads, which
    /// wait for the router.
    fn feeding<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&KvFeed) -> std::result::Result<T, CoreError> + Send,
    ) -> Result<T> {
        refuse_in_policy("fed a router's index")?;
        self.shared.check()?;
        Ok(py.detach(|| with(&self.feed))?)
    }

    /// Calls `with` while holding the router; see [`with_router`].
    fn with_core<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
    ) -> Result<T> {
        with_router(&self.shared, py, with)
    }

    /// Calls `with` while holding the router, without the interpreter lock: `with` uses the caches,
    /// for which it may wait.
    fn with_caches<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
    ) -> Result<T> {
        with_router_detached(&self.shared, py, with)
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
                let fetch = crate::settings::fetch_of(settings)?;
                self.with_core(py, |router| Ok(router.set_fetch((kind != "none").then_some(fetch))?))
            }
            "priority" => {
                let priorities = crate::priorities::priorities_of(&kind, settings)?;
                self.with_core(py, |router| Ok(router.set_priorities(priorities)?))
            }
            "programs" => {
                let programs = crate::programs::programs_of(self.registry.offers(), &kind, settings)?;
                self.with_core(py, |router| Ok(router.set_programs(programs)?))
            }
            "fleet_changes" => {
                let warm = crate::settings::warm_of(&kind, settings)?;
                self.with_core(py, |router| Ok(router.set_warm(warm)?))
            }
            _ => {
                let made = crate::rebalance::rebalance_of(self.registry.offers(), &kind, settings, false)?;
                let (config, forecast) = made.unzip();
                let built = config.map(|config| config.build()).transpose()?;
                self.with_core(py, |router| Ok(router.set_rebalancing(built)?))?;
                // Dropped after the lock: a predictor's finaliser may call the router.
                let _old = std::mem::replace(&mut *self.forecast.lock(), forecast.flatten());
                Ok(())
            }
        }
    }

    /// Copies indicator columns of instances, NaN for instances that were removed since. The router
    /// is free for decisions between pieces of [`VALUES_PER_PIECE`].
    fn copy_columns(
        &self,
        py: Python<'_>,
        members: &[InstanceId],
        ids: &[ColumnId],
        now: Option<f64>,
    ) -> Result<Vec<Vec<f64>>> {
        let mut columns = Vec::with_capacity(ids.len());
        for piece in ids.chunks((VALUES_PER_PIECE / members.len().max(1)).max(1)) {
            columns.extend(self.with_core(py, |router| {
                let now = self.clock.now(now, router)?;
                let built_in: Vec<Indicator> = piece.iter().filter_map(|id| id.built_in()).collect();
                router.derive_some(IndicatorSet::of(&built_in), now);
                let declared: Vec<_> = piece.iter().filter_map(|id| id.declared()).collect();
                router.derive_declared(&declared, now);
                let (fleet, values) = (router.fleet(), router.columns());
                let column = |id: &ColumnId| {
                    let column = match *id {
                        ColumnId::BuiltIn(id) => values.get(id),
                        ColumnId::Declared(id) => values.declared(id),
                    };
                    let value = |id: Slot| column[id.index()];
                    let value = |member: &InstanceId| fleet.current(*member).map_or(f64::NAN, value);
                    members.iter().map(value).collect::<Vec<_>>()
                };
                Ok(piece.iter().map(column).collect::<Vec<_>>())
            })?);
        }
        Ok(columns)
    }

    /// Builds a policy that the router may call from now on.
    fn build(&self, policy: &Bound<'_, PyAny>, knobs: Option<&Bound<'_, PyDict>>) -> Result<Box<dyn Policy>> {
        let policy = policies::build(self.registry, Some(policy), knobs)?;
        self.calls_python.fetch_or(policies::calls_python(&*policy), Ordering::Relaxed);
        Ok(policy)
    }

    /// Builds a policy on trial, and whether the hot-spot guard filters its candidates.
    fn on_trial(
        &self,
        policy: Option<&Bound<'_, PyAny>>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<Option<(Box<dyn Policy>, bool)>> {
        let Some(policy) = policy else { return Ok(None) };
        let policy = self.build(policy, knobs)?;
        let (guarded, _) = lmetric_core::guard::applies(&*policy, self.guard.lock().0);
        Ok(Some((policy, guarded)))
    }
}

/// A change to an instance that needs the router.
enum InstanceChange {
    Role(Role),
    MaxLoras(Option<u32>),
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

/// The tier of a medium.
fn tier_of(medium: &str) -> Result<Tier> {
    let known = || Tier::MEDIA.map(|(name, _)| name).join(", ");
    let bad = || CoreError::BadValue { what: "medium".into(), got: format!("{medium:?}"), expected: known() };
    Ok(Tier::of_medium(Some(medium)).ok_or_else(bad)?)
}

/// Python's error for an unknown keyword argument.
fn unexpected(method: &str, keyword: &str) -> crate::errors::Error {
    PyTypeError::new_err(format!("Router.{method}() got an unexpected keyword argument '{keyword}'")).into()
}

/// Returns the core's form of an option; equal texts mean equal settings. Tests compare it with the
/// defaults in `lmetric.options`.
#[pyfunction]
pub fn parsed_option(what: &str, kind: &str, settings: &Bound<'_, PyDict>) -> Result<String> {
    let settings = Some(settings);
    Ok(match what {
        "split" => format!("{:?}", crate::split::split_of(REGISTRY, kind, settings)?),
        "prefix_fetch" => format!("{:?}", crate::settings::fetch_of(settings)?),
        "priority" => format!("{:?}", crate::priorities::priorities_of(kind, settings)?),
        "rebalance" => {
            format!("{:?}", crate::rebalance::rebalance_of(Maturity::Study, kind, settings, false)?)
        }
        "programs" => format!("{:?}", crate::programs::programs_of(Maturity::Study, kind, settings)?),
        "fleet_changes" => format!("{:?}", crate::settings::warm_of(kind, settings)?),
        other => return Err(unexpected("configure", other)),
    })
}

#[pymethods]
impl Router {
    #[new]
    #[pyo3(signature = (policy=None, *, knobs=None, block_size=16, text_block_bytes=256, domain=None,
        kv_source="approximate", index_bytes=536870912, record_bytes=16777216, guard=None, step_time=None,
        decay_queued_prefill=true, seed=0, decode_policy=None, decode_knobs=None, binding="early", colocate=true,
        split=None, prefix_fetch=None, priority=None, rebalance=None, programs=None, fleet_changes=None,
        offers="study", tiers="auto", tier_load_ratio=0.02))]
    fn new(
        py: Python<'_>,
        policy: Option<&Bound<'_, PyAny>>,
        knobs: Option<&Bound<'_, PyDict>>,
        block_size: usize,
        text_block_bytes: usize,
        domain: Option<Vec<Option<String>>>,
        kv_source: &str,
        index_bytes: usize,
        record_bytes: usize,
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
        programs: Option<Bound<'_, PyAny>>,
        fleet_changes: Option<Bound<'_, PyAny>>,
        offers: &str,
        tiers: &str,
        tier_load_ratio: f64,
    ) -> Result<Router> {
        let registry = offering(offers)?;
        let index_feed = index_feed_of("kv_source", kv_source)?;
        let parts = domain.unwrap_or_default();
        let keys = Keys::new(&parts, block_size, text_block_bytes).map_err(CoreError::from)?;
        let policy = policies::build(registry, policy, knobs)?;
        let calls_python = AtomicBool::new(policies::calls_python(&*policy));
        let guard = GuardSettings::of(guard.as_ref())?;
        let guard_chosen = guard.on;
        let (guard, guard_reason) = guard.under(&*policy);
        let config = RouterConfig {
            index_feed,
            index_bytes,
            record_bytes,
            seed,
            drain: decay_queued_prefill,
            guard,
            step_time: step_time.map(step_time_of).transpose()?,
            binding: binding_of(binding)?,
            colocate,
            tiers: TierConfig {
                counted: named("tiers", tiers, &TierUse::NAMES)?,
                load_ratio: tier_load_ratio,
            },
            ..RouterConfig::default()
        };
        let mut router = CoreRouter::new(policy, config)?;
        if decode_policy.is_some() || decode_knobs.is_some() {
            let default = PyString::new(py, &router.decode_policy().spec().name.clone());
            let decode_policy = decode_policy.unwrap_or(default.as_any());
            let decode_policy = policies::build(registry, Some(decode_policy), decode_knobs)?;
            calls_python.fetch_or(policies::calls_python(&*decode_policy), Ordering::Relaxed);
            router.set_decode_policy(decode_policy)?;
        }
        let shared = SharedRouter::new(router);
        let made = Router {
            feed: Arc::new(KvFeed::new(shared.clone(), keys, index_bytes, index_feed == IndexFeed::Exact)),
            shared,
            registry,
            clock: Clock::new(py)?,
            parts,
            guard: Mutex::new((guard_chosen, guard_reason)),
            chains: Mutex::default(),
            slots: AtomicUsize::new(0),
            calls_python,
            forecast: Mutex::default(),
        };
        let options = [
            ("split", split),
            ("prefix_fetch", prefix_fetch),
            ("priority", priority),
            ("rebalance", rebalance),
            ("programs", programs),
            ("fleet_changes", fleet_changes),
        ];
        for (what, option) in options {
            if let Some(option) = option {
                made.set_option(py, what, &option)?;
            }
        }
        Ok(made)
    }

    /// Adds an instance with a unique name. Returns its slot, an index into `Decision.scores()`.
    ///
    /// `cache_blocks`: blocks that its KV cache holds, if known; they bound the index's memory of
    /// the instance. `role`: `"both"`, `"prefill"` or `"decode"`. `group`: instances with the same
    /// name here are one group in expressions (`group_max(tokens)`), such as data-parallel ranks
    /// that step together; None: a group of its own. Raises `BadValueError` if the name is taken or
    /// empty, if `cache_blocks` is 0, or if the fleet is full.
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
        let (slot, crowded) = self.with_caches(py, |router| {
            let id = router.add_instance(name, role, cache_blocks)?;
            router.fleet_mut().set_group(id, group)?;
            self.slots.store(router.fleet().slots(), Ordering::Relaxed);
            Ok((id.index(), router.caches().read().gpu().is_crowded()))
        })?;
        if crowded {
            py.detach(|| self.feed.even_out());
        }
        Ok(slot)
    }

    /// Changes an instance. Settings that are not given stay.
    ///
    /// - `role`: `"both"`, `"prefill"` or `"decode"`.
    /// - `healthy`, `draining`: an unhealthy or draining instance gets no new requests.
    /// - `cache_blocks`: blocks that its KV cache holds, all ranks together; None: unknown.
    /// - `handoff`: positions at which its engine can transfer a request, in either direction:
    ///   `"nowhere"`, `"prompt_end"`, `"output"` (there and behind any output token) or
    ///   `"anywhere"` (also inside the prompt; the default of a new instance).
    /// - `step_time`: a profile's constants, if its engine differs from the other engines; None:
    ///   the router's constants.
    /// - `kv_source`: `"approximate"` or `"exact"`, as for `Router`. A change to exact drops the
    ///   guessed blocks.
    /// - `max_loras`: LoRA adapters that the engine keeps loaded; None: unknown. It bounds the
    ///   adapters that count as loaded (indicator `lora_loaded`).
    ///
    /// Running requests are not affected. Raises `UnknownNameError`, `BadValueError`; an invalid
    /// value changes nothing.
    #[pyo3(signature = (name, **changes), text_signature = "($self, name, *, role=..., healthy=..., draining=..., \
        cache_blocks=..., handoff=..., step_time=..., kv_source=..., max_loras=...)")]
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
                "max_loras" => under_router.push(InstanceChange::MaxLoras(value.extract()?)),
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
                "cache_blocks" => {
                    let blocks = value.extract::<Option<u32>>()?;
                    check_cache_blocks(name, blocks)?;
                    cache_blocks = Some(blocks);
                }
                "kv_source" => kv_source = Some(index_feed_of(&of(&key), value.extract()?)?),
                _ => return Err(unexpected("update_instance", &key)),
            }
        }
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            for change in under_router {
                match change {
                    InstanceChange::Role(role) => router.fleet_mut().set_role(id, role)?,
                    InstanceChange::MaxLoras(most) => router.set_max_loras(id, most)?,
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

    /// Changes settings of the router from now on. Settings that are not given stay; None switches
    /// an option off.
    ///
    /// - `split`: how to split requests that roles do not split (`lmetric.LibraSplit`,
    ///   `DecodePlacement`, `SplitAt`).
    /// - `prefix_fetch`: whether instances fetch prefixes from each other (`PrefixFetch`).
    /// - `priority`: the order of the engines' queues (`UniBoost`, `FairShares`).
    ///   `Decision.priority` is the number; lower goes first.
    /// - `rebalance`: how running requests move (`Star`, `Llumnix`). Set it before the first
    ///   request.
    /// - `programs`: how agent programs are followed (`ProgramObservation`, `ProgramAdmission`).
    /// - `fleet_changes`: how instances join and leave (`WarmChanges`).
    /// - `guard`: whether the hot-spot guard is on. When switched off, it drops its counts.
    /// - `binding`: when the decode instance is chosen, `"early"` or `"late"`.
    /// - `block_size`: tokens per block. A change empties the KV index, and an `EventFeed` requests
    ///   the engines' blocks again.
    ///
    /// Raises `BadValueError`.
    #[pyo3(signature = (**changes), text_signature = "($self, *, split=..., prefix_fetch=..., priority=..., \
        rebalance=..., programs=..., fleet_changes=..., guard=..., binding=..., block_size=...)")]
    fn configure(&self, py: Python<'_>, changes: Option<&Bound<'_, PyDict>>) -> Result<()> {
        for (key, value) in changes.into_iter().flat_map(|changes| changes.iter()) {
            let key = key.extract::<String>()?;
            match key.as_str() {
                "guard" => {
                    let on: bool = value.extract().map_err(|_| {
                        buffers::bad(
                            &value,
                            "guard",
                            "True or False; give the guard's other settings to lmetric.Router(guard=)",
                        )
                    })?;
                    self.with_core(py, |router| {
                        router.set_guard_of_all(on);
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
                    let bytes = self.feed.keys().text_block_bytes;
                    let keys = Keys::new(&self.parts, value.extract()?, bytes).map_err(CoreError::from)?;
                    self.feeding(py, |feed| {
                        feed.set_keys(keys);
                        Ok(())
                    })?;
                }
                "split" | "prefix_fetch" | "priority" | "rebalance" | "programs" | "fleet_changes" => {
                    self.set_option(py, &key, &value)?
                }
                _ => return Err(unexpected("configure", &key)),
            }
        }
        Ok(())
    }

    /// Removes an instance. Open tickets on it stay valid, but no longer change the in-flight
    /// ledger. Raises `UnknownNameError`.
    fn remove_instance(&self, py: Python<'_>, name: &str) -> Result<()> {
        self.feeding(py, |feed| feed.remove_instance(name))
    }

    /// Tokens per block, in prompts and in the engines' events.
    #[getter]
    fn block_size(&self) -> usize {
        self.feed.keys().block_size
    }

    /// Names of the instances, in slot order.
    fn instances(&self, py: Python<'_>) -> Result<Vec<String>> {
        self.with_core(py, |router| Ok(router.fleet().live_names().map(str::to_string).collect()))
    }

    /// Number of requests in flight: open tickets.
    fn in_flight(&self, py: Python<'_>) -> Result<usize> {
        self.with_core(py, |router| Ok(router.in_flight()))
    }

    /// Chooses an instance for a request, counts the request there at once, and opens its ticket.
    ///
    /// `now`: seconds on the monotonic clock. `canary`: the policy of `set_canary` decides, if one
    /// is set. `shadow`: the policy of `set_shadow` scores the request, too (`Decision.shadow`).
    ///
    /// Returns the decision and the ticket. A ticket that is dropped while open counts as an abort.
    /// Raises `NoInstanceError` (nothing is counted) and `PolicyError` (a policy function failed).
    /// Source: LMETRIC, Figure 4 and section 5.
    #[pyo3(signature = (request, *, now=None, arrival=None, canary=false, shadow=false))]
    fn route<'py>(
        &self,
        py: Python<'py>,
        request: Bound<'py, PyAny>,
        now: Option<f64>,
        arrival: Option<Bound<'py, Arrival>>,
        canary: bool,
        shadow: bool,
    ) -> Result<(Decision, Ticket)> {
        let given = request::given(request, "Router.route")?;
        let arrival = arrival.as_ref().map(|arrival| arrival.get());
        let asked = Asked::new(py, &self.feed.keys(), given.get(), arrival, canary, shadow)?;
        Ok(self.to_python(self.route_one(py, &asked, now)?))
    }

    /// Chooses instances for many requests, in order: the same results as of one `route` each.
    ///
    /// `requests`: any iterable of `Request`. `arrivals`: their arrivals, in the same order; None
    /// for a request without one. `now`: the time of all decisions, in seconds; default: the clock
    /// at each decision. `canary`, `shadow`: as for `route`, for all requests.
    ///
    /// Returns a list with an element per request: `(decision, ticket)`, or the error that `route`
    /// would raise (`NoInstanceError`, `PolicyError`, or `BadValueError` for an arrival). An error
    /// stops no other request. Raises `BadValueError` for an invalid request, with its position;
    /// then no request is placed.
    ///
    /// Hashes and decides without the interpreter lock, so other Python threads go on; a single
    /// `route` does so only if it is long. The router serves other calls in between. A batch takes
    /// as much processor time as its single calls. Not for policy functions.
    #[pyo3(signature = (requests, *, now=None, arrivals=None, canary=false, shadow=false))]
    fn route_many<'py>(
        &self,
        py: Python<'py>,
        requests: &Bound<'py, PyAny>,
        now: Option<f64>,
        arrivals: Option<Vec<Option<Bound<'py, Arrival>>>>,
        canary: bool,
        shadow: bool,
    ) -> Result<Bound<'py, PyList>> {
        refuse_in_policy("routed a batch")?;
        let given = decide::given(requests)?;
        let arrivals = decide::arrivals_of(given.len(), arrivals.as_deref())?;
        let (keys, mut batch) = (self.feed.keys(), Vec::with_capacity(given.len()));
        for (position, (request, arrival)) in given.iter().zip(arrivals).enumerate() {
            let asked = Asked::new(py, &keys, request.get(), arrival, canary, shadow)?;
            asked.request.check().map_err(|error| decide::at(position, error))?;
            batch.push(asked);
        }
        let pins = batch.iter_mut().map(|asked| asked.prompt.pin(py)).collect::<PyResult<Vec<_>>>()?;
        let placed = py.detach(|| self.decide_each(&batch, now))?;
        drop(pins);
        let results = PyList::empty(py);
        for placed in placed {
            match placed {
                Ok(placed) => results.append(self.to_python(placed))?,
                Err(error) => results.append(to_python(error).into_value(py))?,
            }
        }
        Ok(results)
    }

    /// Records the arrival of a request and decides whether it runs now, waits or is refused. None
    /// if the router neither follows programs nor admits by load.
    ///
    /// A router that admits requests (`ProgramAdmission`, `set_admission`) routes only requests
    /// with an arrival. `level`: its priority level, -10 to 10. `sheddable`: it is refused if it
    /// would have to wait, at no cost to requests that wait. Raises `BadValueError`.
    #[pyo3(signature = (request, *, now=None, level=0, sheddable=false))]
    fn arrive(
        &self,
        py: Python<'_>,
        request: Bound<'_, PyAny>,
        now: Option<f64>,
        level: i8,
        sheddable: bool,
    ) -> Result<Option<Arrival>> {
        let given = request::given(request, "Router.arrive")?;
        let keys = self.feed.keys();
        let (request, prompt) = given.get().core(py, &keys)?;
        self.with_chain(|chain| {
            prompt.hash(py, chain);
            let arrived = self.decide(py, chain.len(), |router| {
                let now = self.clock.now(now, router)?;
                let arrived = router.arrive(&CoreRequest { chain, level, sheddable, ..request }, now)?;
                Ok(arrived.map(|arrived| (arrived, router.matches_arrivals())))
            })?;
            Ok(arrived.map(|((id, verdict), is_matched)| {
                let waiting = id.map(|id| self.shared.arrival(id));
                // The decision takes the chain. A refused request gets no decision.
                let hashed = waiting.is_some().then(|| Hashed {
                    request: given.clone().unbind(),
                    keys,
                    chain: std::mem::take(chain),
                });
                Arrival::new(waiting, verdict, is_matched, hashed)
            }))
        })
    }

    /// Ends the agent programs of a session (`Request.session`), whose client sends no more
    /// requests: they free their place in a cache, as after a request with `session_final`.
    /// Returns how many had not ended; None: the router follows no programs.
    #[pyo3(signature = (session, *, now=None))]
    fn finish_session(&self, py: Python<'_>, session: &str, now: Option<f64>) -> Result<Option<usize>> {
        let session = xxhash_rust::xxh3::xxh3_64(session.as_bytes());
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.finish_session(session, now))
        })
    }

    /// Runs the periodic work on arrivals: call it about twice a second, after the end of each
    /// request, and, while requests wait (`waiting`), after each first token and every 50 ms.
    ///
    /// Returns the held requests whose wait has ended. First, those that may be routed now: id, and
    /// seconds for which the request was held. Second, those that are refused: id, reason, and
    /// seconds after which the client may try again.
    #[pyo3(signature = (*, now=None))]
    fn release_held(&self, py: Python<'_>, now: Option<f64>) -> Result<Released> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            let released = router.release_held(now);
            let ready = released.ready.iter().map(|(id, seconds)| (id.number(), *seconds));
            let refused = released.refused.iter();
            let refused = refused.map(|(id, by, seconds)| (id.number(), by.name(), *seconds));
            Ok((ready.collect(), refused.collect()))
        })
    }

    /// Number of requests that wait, or whose wait has ended since the last `release_held`.
    #[getter]
    fn waiting(&self, py: Python<'_>) -> Result<usize> {
        self.with_core(py, |router| Ok(router.waiting()))
    }

    /// Sets admission by load; None switches it off. Requests that wait stay, or may then run.
    ///
    /// An instance has room while a further request would wait at most `room_seconds` there. Other
    /// requests wait in the router; tenants take turns by the service that they got. Settings:
    ///
    /// - `ttft_seconds`: deadline of the first token for requests without `ttft_slo_seconds`. A
    ///   request that would miss it is refused.
    /// - `tpot_seconds`: longest time between two output tokens that a batch may reach by a further
    ///   request.
    /// - `room_seconds`: default a twentieth of the deadline, or 0.1. Infinite: instances always
    ///   have room.
    /// - `max_waiting`, `max_waiting_per_tenant`: bounds of the queue.
    /// - `aging_seconds`: wait after which a request's level rises by one. None: the levels of
    ///   `arrive` count only for held programs, which then age by 30 s.
    /// - `tenants`: limits by tenant: `max_concurrent`, `max_waiting`.
    ///
    /// Raises `BadValueError`. Documentation: docs/how-to/overload.md.
    fn set_admission(&self, py: Python<'_>, settings: Option<Bound<'_, PyDict>>) -> Result<()> {
        let config = crate::admission::load_of(settings.as_ref())?;
        self.with_core(py, |router| Ok(router.set_admission(config)?))
    }

    /// Gives waiting requests their present levels, by the `id` of their arrival; others get 0.
    /// Call it after a change of settings.
    fn set_levels(&self, py: Python<'_>, levels: std::collections::HashMap<u64, i8>) -> Result<()> {
        self.with_core(py, |router| {
            router.set_levels(|id| levels.get(&id.number()).copied().unwrap_or(0));
            Ok(())
        })
    }

    /// Numbers of admission by load: waiting requests, predicted wait, and counters. None if it is
    /// off.
    #[pyo3(signature = (*, now=None))]
    fn admission<'py>(&self, py: Python<'py>, now: Option<f64>) -> Result<Option<Bound<'py, PyDict>>> {
        let snapshot = self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.admission(now))
        })?;
        Ok(snapshot.map(|snapshot| crate::admission::dict(py, &snapshot)).transpose()?)
    }

    /// The agent programs: number by state, counters, and per instance the expected tokens in its
    /// cache. None if the router does not follow programs.
    fn programs<'py>(&self, py: Python<'py>) -> Result<Option<Bound<'py, PyDict>>> {
        let snapshot = self.with_core(py, |router| Ok(Snapshot::of(router)))?;
        Ok(snapshot.map(|snapshot| snapshot.dict(py)).transpose()?)
    }

    /// Leading prompt tokens that each instance holds by the KV index: uint32, in the order of
    /// `instances()`. Tiers below the GPU do not count.
    ///
    /// The last token never counts, because every engine computes it. Counts nothing and changes
    /// nothing.
    fn cached_tokens<'py>(
        &self,
        py: Python<'py>,
        request: Bound<'py, PyAny>,
    ) -> Result<Bound<'py, PyArray1<u32>>> {
        let given = request::given(request, "Router.cached_tokens")?;
        let hits = self.with_request(py, given.get(), |request| {
            self.decide(py, request.chain.len(), |router| Ok(router.hit_tokens(&request)))
        })?;
        Ok(PyArray1::from_slice(py, &hits))
    }

    /// Scores of the live instances: float64, in the order of `instances()`; NaN for an instance
    /// that may not take the request. Counts nothing.
    #[pyo3(signature = (request, *, now=None))]
    fn score<'py>(
        &self,
        py: Python<'py>,
        request: Bound<'py, PyAny>,
        now: Option<f64>,
    ) -> Result<Bound<'py, PyArray1<f64>>> {
        let given = request::given(request, "Router.score")?;
        let out = self.with_request(py, given.get(), |request| {
            self.decide(py, request.chain.len(), |router| {
                let now = self.clock.now(now, router)?;
                let (members, mut out) = (members(router), Vec::new());
                scores_of(router, &request, now, &members, &mut out)?;
                Ok(out)
            })
        })?;
        Ok(PyArray1::from_vec(py, out))
    }

    /// Scores of many requests: float64, a row per request and a column per instance that was live
    /// at the call. NaN for an instance that may not take the request or was removed since. Other
    /// calls of the router run between two requests.
    #[pyo3(signature = (requests, *, now=None))]
    fn score_batch<'py>(
        &self,
        py: Python<'py>,
        requests: Bound<'py, PyAny>,
        now: Option<f64>,
    ) -> Result<Bound<'py, PyArray2<f64>>> {
        let requests = decide::given(&requests)?;
        refuse_in_policy("scored a batch")?;
        // Hashed here, because hashing reads Python's memory. The chains stand back to back.
        let keys = self.feed.keys();
        let (mut chains, mut chain) = (Vec::new(), Vec::new());
        let mut cores = Vec::with_capacity(requests.len());
        for request in &requests {
            let (core, prompt) = request.get().core(py, &keys)?;
            prompt.hash(py, &mut chain);
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
                // Held for one request at a time, so that decisions can run in between.
                let mut router = self.shared.lock_behind();
                self.shared.check()?;
                scores_of(&mut router, &request, now, &members, &mut out)?;
            }
            Ok::<_, crate::errors::Error>((out, members.len()))
        })?;
        Ok(PyArray1::from_vec(py, values).reshape([cores.len(), columns])?)
    }

    /// Records an engine's load report.
    ///
    /// `waiting`, `running`: requests; `kv_usage`: from 0 to 1. Absent values keep their last
    /// value. `extra`: values of declared indicators (`lmetric.indicator`) by name, as of now;
    /// None: the value is no longer known. A call with `extra` alone is no report of the engine, so
    /// `report_age_seconds` stays.
    ///
    /// External load is the reported load beyond the router's own requests in flight. Raises
    /// `UnknownNameError`, `BadValueError`; an error changes nothing.
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
            let report =
                Report { at: self.clock.now(now, router)?, waiting, running, kv_usage, ..Report::default() };
            let Some(extra) = extra else { return Ok(router.engine_report(name, report)?) };
            let extra = extra.iter().map(|(indicator, value)| (&**indicator, *value));
            if [waiting, running, kv_usage].iter().any(Option::is_some) {
                return Ok(router.engine_report_with(name, report, extra)?);
            }
            Ok(router.report_declared(name, extra, report.at)?)
        })
    }

    /// Enters this router's load as version `version` for peer routers; versions grow from 1 on.
    /// `encode_load` then makes the messages. `oldest`: the oldest version that a message may still
    /// change. Raises `BadValueError` for a version that is not above the last one.
    #[pyo3(signature = (version, oldest, *, now=None))]
    fn enter_load(&self, py: Python<'_>, version: u64, oldest: u64, now: Option<f64>) -> Result<()> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.enter_load(version, oldest, now)?)
        })
    }

    /// Applies a message of a peer router: its load on the instances of `model` counts as this
    /// router's own until its next message. Load on instances that this router does not have counts
    /// once it has them. Returns False if the message has changes of another version than that of
    /// the last message; the next one must have the whole load. Raises `BadValueError` for too many
    /// peers or instances; an error changes nothing.
    #[pyo3(signature = (message, model, *, now=None))]
    fn import_load(
        &self,
        py: Python<'_>,
        message: &LoadMessage,
        model: &str,
        now: Option<f64>,
    ) -> Result<bool> {
        let CoreMessage { sender, version, base, models, .. } = message.inner();
        let (from, version, base) = (&**sender, *version, *base);
        let of_model = models.iter().find(|(name, _)| &**name == model).map(|(_, load)| load);
        let nothing = Load::default();
        let Load { instances, programs } = of_model.unwrap_or(&nothing);
        let loads: Vec<(&str, Published)> = instances.iter().map(|(name, load)| (&**name, *load)).collect();
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.hear_message(Message { from, version, base, loads, programs }, now)?)
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

    /// Exchanges load with the routers of the same `model` in other worker processes, and follows
    /// agent programs together with them. From now on, decisions and the limits of tenants count
    /// the requests of all of them. Call it before the first decision: the numbers of decisions
    /// begin anew. Raises `BadValueError` if the board has no room for a further model.
    fn join(&self, py: Python<'_>, board: &Board, model: &str) -> Result<()> {
        let (board, model) = (board.inner().clone(), xxhash_rust::xxh3::xxh3_64(model.as_bytes()));
        self.with_core(py, |router| Ok(router.join(board, model)?))
    }

    /// Ends the exchange with the other workers (`join`). Call it when the process goes on without
    /// this router, so that others do not wait for its agent programs.
    fn leave(&self, py: Python<'_>) -> Result<()> {
        self.with_core(py, |router| {
            router.leave();
            Ok(())
        })
    }

    /// Writes this router's load to the board as of now. Call it some times a second, because load
    /// also changes without a request: queued prefills shrink. Returns False if the board has no
    /// room for some instances.
    #[pyo3(signature = (*, now=None))]
    fn publish_load(&self, py: Python<'_>, now: Option<f64>) -> Result<bool> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.publish_all(now))
        })
    }

    /// Whether this router has the agent programs of the other workers (`join`). Until then, its
    /// requests belong to no program.
    #[getter]
    fn has_programs_of_workers(&self, py: Python<'_>) -> Result<bool> {
        self.with_core(py, |router| Ok(router.has_programs_of_workers()))
    }

    /// Records consecutive blocks that an engine stored: one more physical copy of each block.
    ///
    /// `block_hashes`: the engine's own 64-bit hashes, one per block. `token_ids`: `block_size`
    /// tokens per block. `parent`: the engine's hash of the block before the first block; None if
    /// the blocks start the prompt (then `lora_name` and `cache_salt` count). `rank`: the engine's
    /// data-parallel rank, which has a cache of its own. `medium`: the tier, in any case: `"GPU"`,
    /// `"CPU"` or `"STORAGE"`. In a tier below the GPU, `token_ids` may be empty: the blocks then
    /// need names that the engine has stored in another tier. Returns the number of blocks that
    /// were not placed: the parent or the name is unknown, there is no room, or the instance does
    /// not learn from events. Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, block_hashes, token_ids, *, parent=None, lora_name=None, cache_salt=None, rank=0,
        medium="GPU"))]
    fn blocks_stored(
        &self,
        py: Python<'_>,
        name: &str,
        block_hashes: Bound<'_, PyAny>,
        token_ids: Bound<'_, PyAny>,
        parent: Option<Bound<'_, PyAny>>,
        lora_name: Option<&str>,
        cache_salt: Option<&str>,
        rank: u32,
        medium: &str,
    ) -> Result<usize> {
        let (hashes, ids) =
            (Ints::take(&block_hashes, "block_hashes")?, Ints::take(&token_ids, "token_ids")?);
        let (hashes, ids) = (hashes.hashes(py, "block_hashes")?, ids.tokens(py, "token_ids")?);
        let parent = parent.map(|parent| hash_of(&parent, "parent")).transpose()?;
        let (keys, tier) = (self.feed.keys(), tier_of(medium)?);
        let by_name = tier != Tier::Gpu && ids.is_empty();
        if hashes.len() * keys.block_size != ids.len() && !by_name {
            return Err(CoreError::BadValue {
                what: "token_ids".into(),
                got: format!("{} tokens for {} blocks", ids.len(), hashes.len()),
                expected: format!("{} a block", keys.block_size),
            }
            .into());
        }
        let domain = keys.tokens.of_request(lora_name, cache_salt);
        // Owned: the buffers may change while the interpreter lock is released.
        let (hashes, ids) = (hashes.into_owned(), ids.into_owned());
        self.feeding(py, |feed| {
            let (engine_hashes, token_ids) = (&hashes[..], &ids[..]);
            // Lower tiers keep one copy of each block.
            let means = if tier == Tier::Gpu { Means::NewCopy } else { Means::Report };
            let stored = Stored { parent, engine_hashes, token_ids, domain, narrowing: &[], means };
            Ok(hashes.len() - feed.stored_in(feed.source(name, rank)?, tier, &stored).done)
        })
    }

    /// Records that an engine evicted one physical copy of each of these blocks from a tier.
    /// `block_hashes`: the engine's own 64-bit hashes. `medium`: the tier, as for `blocks_stored`.
    /// Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (name, block_hashes, *, rank=0, medium="GPU"))]
    fn blocks_removed(
        &self,
        py: Python<'_>,
        name: &str,
        block_hashes: Bound<'_, PyAny>,
        rank: u32,
        medium: &str,
    ) -> Result<()> {
        let tier = tier_of(medium)?;
        let hashes = Ints::take(&block_hashes, "block_hashes")?;
        let hashes = hashes.hashes(py, "block_hashes")?.into_owned();
        self.feeding(py, |feed| {
            feed.removed_from(feed.source(name, rank)?, tier, &hashes);
            Ok(())
        })
    }

    /// Drops everything known of an instance's cache, in all tiers, after a cache reset or a
    /// restart. `rank`: drops the blocks of one data-parallel rank only; None: all ranks, and the
    /// guessed blocks. Raises `UnknownNameError`.
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

    /// The tiers below the GPU with blocks or loads of an instance, by medium.
    ///
    /// - `blocks`: blocks in the KV index. `hint`: the tier has reported no removal, so its blocks
    ///   may be gone.
    /// - `load_ratio`: seconds to load a token divided by the seconds to compute it, learned from
    ///   `loads` requests; before the first, `tier_load_ratio`.
    /// - `hit_tokens`: prompt tokens loaded, as predicted and not contradicted by the engine.
    ///
    /// Raises `UnknownNameError`.
    fn tiers<'py>(&self, py: Python<'py>, name: &str) -> Result<Bound<'py, PyDict>> {
        let tiers = self.with_caches(py, |router| {
            let id = router.fleet().find(name)?;
            let known: Vec<_> = router.caches().read().tiers_of(id).collect();
            Ok(Tier::LOWER.map(|tier| {
                let blocks = known.iter().find(|(each, ..)| *each == tier).map(|(_, n, hint)| (*n, *hint));
                (tier.medium(), blocks, router.tier_loads_of(id, tier))
            }))
        })?;
        let dict = PyDict::new(py);
        for (medium, blocks, (ratio, loads, hit_tokens)) in tiers {
            if blocks.is_none() && loads == 0 && hit_tokens == 0 {
                continue;
            }
            let (blocks, hint) = blocks.unwrap_or((0, false));
            let row = PyDict::new(py);
            row.set_item("blocks", blocks)?;
            row.set_item("hint", hint)?;
            row.set_item("load_ratio", ratio)?;
            row.set_item("loads", loads)?;
            row.set_item("hit_tokens", hit_tokens)?;
            dict.set_item(medium, row)?;
        }
        Ok(dict)
    }

    /// Indicator columns of the live instances, in the order of `instances()`; declared indicators
    /// come last. `names`: only these indicators, in this order. Raises `UnknownNameError`.
    ///
    /// In a large fleet, decisions run between the columns.
    #[pyo3(signature = (now=None, *, names=None))]
    fn indicators<'py>(
        &self,
        py: Python<'py>,
        now: Option<f64>,
        names: Option<Vec<PyBackedStr>>,
    ) -> Result<Bound<'py, PyDict>> {
        let ids = match &names {
            Some(names) => columns_of(names)?,
            None => {
                let declared = declared::declared();
                built_in().chain(declared.iter().map(|decl| ColumnId::Declared(decl.id))).collect()
            }
        };
        let members = self.with_core(py, |router| Ok(members(router)))?;
        let columns = self.copy_columns(py, &members, &ids, now)?;
        let dict = PyDict::new(py);
        for (id, column) in ids.iter().zip(columns) {
            dict.set_item(id.name(), PyArray1::from_vec(py, column))?;
        }
        Ok(dict)
    }

    /// Built-in indicators of one instance by name. Only these are computed, so it takes less time
    /// than `indicators()`. Raises `UnknownNameError` for an unknown instance or name, and
    /// `BadValueError` for a declared indicator or one of the request.
    #[pyo3(signature = (instance, names, now=None))]
    fn indicators_of<'py>(
        &self,
        py: Python<'py>,
        instance: &str,
        names: Vec<PyBackedStr>,
        now: Option<f64>,
    ) -> Result<Bound<'py, PyDict>> {
        let ids = names
            .iter()
            .map(|name| {
                if declared::find(name).is_some() {
                    return Err(CoreError::BadValue {
                        what: "indicator".into(),
                        got: name.to_string(),
                        expected: "a built-in indicator; indicators() also has declared ones".into(),
                    }
                    .into());
                }
                let id = Indicator::from_name(name).ok_or_else(|| unknown_indicator(name))?;
                if id.decl().scope != Scope::Instance {
                    return Err(CoreError::BadValue {
                        what: "indicator".into(),
                        got: id.decl().name.into(),
                        expected: "an indicator of an instance; this one belongs to the request".into(),
                    }
                    .into());
                }
                Ok(id)
            })
            .collect::<Result<Vec<_>>>()?;
        let values = self.with_core(py, |router| {
            let slot = router.fleet().find(instance)?.index();
            router.derive_some(IndicatorSet::of(&ids), self.clock.now(now, router)?);
            Ok(ids.iter().map(|id| router.columns().get(*id)[slot]).collect::<Vec<_>>())
        })?;
        let dict = PyDict::new(py);
        for (name, value) in names.iter().zip(values) {
            dict.set_item(&**name, value)?;
        }
        Ok(dict)
    }

    /// Prompt tokens per second that an instance computes, learned from first tokens; None before
    /// its first prefill. Does not update other indicators. Raises `UnknownNameError`.
    fn prefill_rate(&self, py: Python<'_>, instance: &str) -> Result<Option<f64>> {
        self.with_core(py, |router| {
            let id = router.fleet().find(instance)?;
            let rate = router.columns().get(Indicator::PrefillTokensPerSecond)[id.index()];
            Ok(Some(rate).filter(|rate| !rate.is_nan()))
        })
    }

    /// Returns the record of a decision as a dictionary: its reasons and its outcome. None if the
    /// record is gone (records share a ring of bounded bytes). `decision`: a `Decision` or its id.
    ///
    /// Keys: `best` (the 8 best instances, with `score` and the `terms` that the policy read),
    /// `margin_to_runner_up`, `load_report_age_seconds`, `predicted_cached_tokens`, after the end
    /// `cached_tokens`, `ttft_seconds`, `outcome`, and more.
    fn explain<'py>(
        &self,
        py: Python<'py>,
        decision: Bound<'py, PyAny>,
    ) -> Result<Option<Bound<'py, PyDict>>> {
        let decision_id: u64 = match decision.cast::<crate::ticket::Decision>() {
            Ok(decision) => decision.get().id,
            Err(_) => decision.extract()?,
        };
        let kept = self.with_core(py, |router| Ok(router.record(decision_id).cloned()))?;
        kept.map(|record| crate::ticket::record_dict(py, &record)).transpose()
    }

    /// Runs the periodic work; call it about once a second. Returns the actions of the hot-spot
    /// guard since the last call (dictionaries: `event` is `"suspected"`, `"filtering"` or
    /// `"released"`) and the time of the next call. Source: LMETRIC, section 5.2.
    #[pyo3(signature = (now=None))]
    fn tick<'py>(&self, py: Python<'py>, now: Option<f64>) -> Result<(Vec<Bound<'py, PyDict>>, f64)> {
        let (events, next) = self.with_caches(py, |router| Ok(router.tick(self.clock.now(now, router)?)))?;
        let events =
            events.iter().map(|e| crate::ticket::guard_event_dict(py, e)).collect::<PyResult<_>>()?;
        Ok((events, next))
    }

    /// Replaces `clock_offset_seconds` (wall clock minus the router's clock) of the order
    /// `"uniboost"` and keeps learned values. Other orders have no clock. Raises `BadValueError`.
    fn set_clock_offset(&self, py: Python<'_>, seconds: f64) -> Result<()> {
        self.with_core(py, |router| Ok(router.set_clock_offset(seconds)?))
    }

    /// Returns the values that the router has learned, as a dictionary; None for values that no
    /// option or policy learns.
    ///
    /// - `gamma` (of UniBoost, 1/s) and `gamma_estimates` (number of estimates).
    /// - `fetch_seconds_per_token`, `fetch_fixed_seconds` and `fetches` (number of prefix fetches
    ///   behind them), as they count at `now`.
    /// - `length_survival`: the chance that an answer is longer than 0, 64, 128, ... tokens
    ///   (multiples of the `bucket_tokens` of `sibyl`; SIBYL, Eq. 4).
    /// - `length_survival_product_limit`: that chance by the Kaplan-Meier estimator, which counts
    ///   running answers.
    /// - `prefill_tokens_per_second`: learned prefill rate of each instance.
    #[pyo3(signature = (now=None))]
    fn learned<'py>(&self, py: Python<'py>, now: Option<f64>) -> Result<Bound<'py, PyDict>> {
        let (gamma, fetch, curves, rates) = self.with_core(py, |router| {
            let curves = router
                .answers()
                .curve()
                .map(|curve| [curve.boundaries().to_vec(), curve.product_limit().boundaries().to_vec()]);
            let rate = router.columns().get(Indicator::PrefillTokensPerSecond);
            let rate = |id: Slot| Some(rate[id.index()]).filter(|rate| !rate.is_nan());
            let rates: Vec<(Arc<str>, Option<f64>)> = members(router)
                .into_iter()
                .map(|member| (router.fleet().name(member.slot()).clone(), rate(member.slot())))
                .collect();
            Ok((router.gamma(), router.fetch_cost(self.clock.now(now, router)?), curves, rates))
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

    /// Runs one round of rebalancing. Returns the moves that are worth making, and why there are
    /// no more.
    ///
    /// Each move is a dictionary of `ticket` (a `Ticket.id`), `source`, `target`, `source_load`,
    /// `target_load`, `mean_load`, `variance_before` and `variance_after` (STAR, Algorithm 1).
    /// Counts nothing: call `Ticket.begin_migration` to make a move.
    #[pyo3(signature = (now=None))]
    fn rebalance<'py>(
        &self,
        py: Python<'py>,
        now: Option<f64>,
    ) -> Result<(Vec<Bound<'py, PyDict>>, &'static str)> {
        // A Python predictor takes milliseconds, so it runs without holding the router.
        let forecast = self.forecast.lock().clone();
        if let Some(forecast) = forecast {
            let running = self.with_core(py, |router| Ok(router.running()))?;
            forecast.refresh(py, &running)?;
        }
        let (moves, stop) = self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            let (moves, stop) = router.rebalance(now)?;
            let name = |id| router.fleet().name(id).clone();
            let named = |named: NamedMove| (named, [named.why.source, named.why.target].map(name));
            Ok((moves.into_iter().map(named).collect::<Vec<_>>(), stop))
        })?;
        let told = moves.iter().map(|(named, names)| crate::ticket::move_dict(py, named, names));
        Ok((told.collect::<PyResult<_>>()?, stop.reason()))
    }

    /// Begins to warm an instance that has joined: it gets no requests until `end_warming`. Returns
    /// the fetches to make before.
    ///
    /// Raises `UnknownNameError`, and `BadValueError` if fleet changes are cold
    /// (`fleet_changes=None`).
    #[pyo3(signature = (name, *, now=None))]
    fn begin_join(&self, py: Python<'_>, name: &str, now: Option<f64>) -> Result<Warming> {
        self.with_caches(py, |router| {
            let (id, now) = (router.fleet().find(name)?, self.clock.now(now, router)?);
            let warming = router.begin_join(id, now)?;
            Ok(Warming::new(warming, self.shared.clone()))
        })
    }

    /// Lets an instance drain. Returns the fetches to make before it leaves.
    ///
    /// Raises `UnknownNameError`, and `BadValueError` if fleet changes are cold
    /// (`fleet_changes=None`).
    #[pyo3(signature = (name, *, now=None))]
    fn begin_leave(&self, py: Python<'_>, name: &str, now: Option<f64>) -> Result<Warming> {
        self.with_caches(py, |router| {
            let (id, now) = (router.fleet().find(name)?, self.clock.now(now, router)?);
            let warming = router.begin_leave(id, now)?;
            Ok(Warming::new(warming, self.shared.clone()))
        })
    }

    /// Lets a warming instance get requests. Raises `UnknownNameError`.
    fn end_warming(&self, py: Python<'_>, name: &str) -> Result<()> {
        self.with_core(py, |router| {
            let id = router.fleet().find(name)?;
            Ok(router.end_warming(id)?)
        })
    }

    /// The running requests of an instance that can move, each with its target: pairs of a
    /// `Ticket.id` and the name of an instance. Raises `UnknownNameError`.
    fn moves_from(&self, py: Python<'_>, name: &str) -> Result<Vec<(u64, String)>> {
        self.with_caches(py, |router| {
            let moves = router.moves_from(router.fleet().find(name)?);
            let name = |id| router.fleet().name(id).to_string();
            Ok(moves.into_iter().map(|(ticket, to)| (ticket.0, name(to))).collect())
        })
    }

    /// Why the hot-spot guard is on or off under the policy. `stats()["guard_on"]` is its current
    /// state.
    #[getter]
    fn guard_reason(&self) -> String {
        self.guard.lock().1.clone()
    }

    /// Replaces the policy while requests are in flight. Running requests do not move; index,
    /// in-flight ledger and learned rates stay.
    ///
    /// The hot-spot guard is on if the new policy turns it on, unless `guard=` was given to the
    /// constructor or `configure`. Raises the constructor's errors; an error changes nothing.
    #[pyo3(signature = (policy, *, knobs=None))]
    fn set_policy(
        &self,
        py: Python<'_>,
        policy: &Bound<'_, PyAny>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let policy = self.build(policy, knobs)?;
        let chosen = self.guard.lock().0;
        let (on, reason) = lmetric_core::guard::applies(&*policy, chosen);
        self.with_core(py, |router| {
            router.set_policy(policy)?;
            router.set_guard(on);
            Ok(())
        })?;
        self.guard.lock().1 = reason;
        Ok(())
    }

    /// Sets the policy of requests that are routed with `canary=True`; None: the router's policy
    /// decides them, too. Requests in flight stay on their instances.
    ///
    /// The hot-spot guard filters its candidates as for `set_policy`. Raises the constructor's
    /// errors; an error changes nothing.
    #[pyo3(signature = (policy, *, knobs=None))]
    fn set_canary(
        &self,
        py: Python<'_>,
        policy: Option<&Bound<'_, PyAny>>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let policy = self.on_trial(policy, knobs)?;
        self.with_core(py, |router| Ok(router.set_canary(policy)?))
    }

    /// Sets the policy that scores requests that are routed with `shadow=True`; None: no policy
    /// does. It places nothing, and its random choices do not change those of the router. If its
    /// function fails, `Decision.shadow` says so.
    ///
    /// Raises the constructor's errors; an error changes nothing.
    #[pyo3(signature = (policy, *, knobs=None))]
    fn set_shadow(
        &self,
        py: Python<'_>,
        policy: Option<&Bound<'_, PyAny>>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let policy = self.on_trial(policy, knobs)?;
        self.with_core(py, |router| Ok(router.set_shadow(policy)?))
    }

    /// Replaces the policy that chooses decode instances, as `set_policy` does. The policy applies
    /// to requests whose prompt another instance computed.
    #[pyo3(signature = (policy, *, knobs=None))]
    fn set_decode_policy(
        &self,
        py: Python<'_>,
        policy: &Bound<'_, PyAny>,
        knobs: Option<&Bound<'_, PyDict>>,
    ) -> Result<()> {
        let policy = self.build(policy, knobs)?;
        self.with_core(py, |router| Ok(router.set_decode_policy(policy)?))
    }

    /// Decisions that fallbacks made for Python policies since the start, by cause: `errors`,
    /// `overruns` (of time limits) and `paused`. `problem`: the last error, or None.
    fn policy_fallbacks<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyDict>> {
        let fallbacks = self.with_core(py, |router| Ok(router.fallbacks()))?;
        let dict = PyDict::new(py);
        dict.set_item("errors", fallbacks.errors)?;
        dict.set_item("overruns", fallbacks.overruns)?;
        dict.set_item("paused", fallbacks.paused)?;
        dict.set_item("problem", fallbacks.problem)?;
        Ok(dict)
    }

    /// Choices since the start in which a policy scored no candidate. The router then chose the
    /// instance with the fewest requests.
    #[getter]
    fn unscored(&self, py: Python<'_>) -> Result<u64> {
        self.with_core(py, |router| Ok(router.totals().unscored))
    }

    /// Returns one sentence for each policy that scores no instance of an idle fleet, with the
    /// reason. Raises `PolicyError` if a policy function fails.
    fn policy_warnings(&self, py: Python<'_>) -> Result<Vec<String>> {
        self.with_core(py, |router| Ok(router.policy_warnings()?))
    }

    /// Counters since the start, gauges, and for each instance its state and indicators.
    /// `instances=False`: without `instances`. `indicators`: only these indicators of the
    /// instances, which takes less time; None: all built-in ones. Raises `UnknownNameError`.
    ///
    /// In a large fleet, decisions run between the parts.
    #[pyo3(signature = (*, instances=true, indicators=None))]
    fn stats<'py>(
        &self,
        py: Python<'py>,
        instances: bool,
        indicators: Option<Vec<PyBackedStr>>,
    ) -> Result<Bound<'py, PyDict>> {
        let ids = match &indicators {
            Some(names) => columns_of(names)?,
            None => built_in().collect(),
        };
        let (stats, members) = self.with_caches(py, |router| {
            let members = if instances { members(router) } else { Vec::new() };
            Ok((Stats::of(router), members))
        })?;
        let dict = stats.dict(py)?;
        if !instances {
            return Ok(dict);
        }
        let mut rows = Vec::with_capacity(members.len());
        for piece in members.chunks(ROWS_PER_PIECE) {
            rows.extend(self.with_core(py, |router| Ok(InstanceStats::of(router, piece)))?);
        }
        let columns = self.copy_columns(py, &members, &ids, None)?;
        let columns: Vec<_> = ids.iter().map(|id| id.name()).zip(columns).collect();
        dict.set_item("instances", crate::ticket::instance_dicts(py, &rows, &columns)?)?;
        Ok(dict)
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let read = |router: &mut CoreRouter| {
            let names: Vec<String> = router.fleet().live_names().map(str::to_string).collect();
            Ok((router.policy().spec().name.to_string(), names, router.in_flight()))
        };
        // A policy function may print its own router, which is held while the function runs.
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

/// Extracts the values of declared indicators in a load report of `name`.
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

/// An indicator, built in or declared.
#[derive(Clone, Copy)]
enum ColumnId {
    BuiltIn(Indicator),
    Declared(DeclaredId),
}

impl ColumnId {
    fn built_in(self) -> Option<Indicator> {
        if let ColumnId::BuiltIn(id) = self { Some(id) } else { None }
    }

    fn declared(self) -> Option<DeclaredId> {
        if let ColumnId::Declared(id) = self { Some(id) } else { None }
    }

    fn name(self) -> &'static str {
        match self {
            ColumnId::BuiltIn(id) => id.decl().name,
            ColumnId::Declared(id) => id.decl().name,
        }
    }
}

/// Yields the built-in indicators of instances.
fn built_in() -> impl Iterator<Item = ColumnId> {
    INDICATORS.iter().filter(|decl| decl.scope == Scope::Instance).map(|decl| ColumnId::BuiltIn(decl.id))
}

/// Returns the indicators of instances with these names.
fn columns_of(names: &[PyBackedStr]) -> Result<Vec<ColumnId>> {
    names.iter().map(|name| column_of(name)).collect()
}

/// Returns the indicator of instances with this name.
fn column_of(name: &str) -> Result<ColumnId> {
    if let Some(decl) = declared::find(name) {
        return Ok(ColumnId::Declared(decl.id));
    }
    let id = Indicator::from_name(name).filter(|id| id.decl().scope == Scope::Instance);
    Ok(ColumnId::BuiltIn(id.ok_or_else(|| unknown_indicator(name))?))
}

/// The source of an index, by name.
fn index_feed_of(what: &str, name: &str) -> Result<IndexFeed> {
    named(what, name, &[("approximate", IndexFeed::Approximate), ("exact", IndexFeed::Exact)])
}

/// The time at which the instance of a second segment is chosen, by name.
pub fn binding_of(name: &str) -> Result<Binding> {
    named("binding", name, &[("early", Binding::Early), ("late", Binding::Late)])
}

/// The value with this name.
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

/// The live instances in slot order.
fn members(router: &CoreRouter) -> Vec<InstanceId> {
    let fleet = router.fleet();
    let all = (0..fleet.slots()).map(|slot| fleet.id_of(Slot(slot as u32)));
    all.filter(|instance| fleet.is_current(*instance)).collect()
}

/// Appends the scores of these instances; NaN for instances that were removed or may not take the
/// request.
fn scores_of(
    router: &mut CoreRouter,
    request: &CoreRequest<'_>,
    now: f64,
    members: &[InstanceId],
    out: &mut Vec<f64>,
) -> std::result::Result<(), CoreError> {
    router.match_prefix(request);
    router.score(request, now)?;
    let (fleet, last) = (router.fleet(), router.last_scores());
    out.extend(members.iter().map(|member| {
        let able = fleet.current(*member).filter(|id| fleet.eligible()[id.index()] && !last.unscored);
        able.map_or(f64::NAN, |id| last.score[id.index()])
    }));
    Ok(())
}

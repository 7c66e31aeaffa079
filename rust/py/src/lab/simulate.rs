//! Python functions of the simulator: columns in, columns out, without the interpreter lock in
//! between.
use super::engine::{self, preempt, profile, unknown};
use crate::errors::Result;
use crate::guard::GuardSettings;
use crate::{policies, router};
use lmetric_core::estimate::StepTime;
use lmetric_core::fleet::Role;
use lmetric_core::kv::tiers::TierUse;
use lmetric_core::router::{IndexFeed, RouterConfig, TierConfig};
use lmetric_core::{CoreError, Maturity};
use lmetric_sim::{
    Admission, ClusterConfig, FleetChange, GapHistogram, HashIds, MoveBy, Order, Outcome, Overlap, Policies,
    Profile, Quantity, Recompute, Signals, SimulatedFetch, TokenSlo, Trace, Transfer,
};
use lmetric_study::REGISTRY;
use numpy::{IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

/// Larger than any realistic number of routers side by side.
const MAX_ROUTERS: u32 = 1024;
/// Decision records are not read after a run, so only the latest few are kept.
const RECORD_BYTES: usize = 64 << 10;

type Column<'py, T> = Bound<'py, PyArray1<T>>;

/// A trace prepared for engines with blocks of `block_tokens` tokens. Block hashes of prompts are
/// chained once and shared by all runs over the trace, in any thread and at any arrival speed.
/// Raises `BadValueError`, which names column and request.
#[pyclass(frozen, module = "lmetric._core")]
pub struct Workload {
    inner: lmetric_sim::Workload,
}

#[pymethods]
impl Workload {
    #[new]
    #[pyo3(signature = (arrival_seconds, input_tokens, output_tokens, hash_offsets, hash_ids, *, trace_block_tokens,
        block_tokens, think_tokens=None, previous=None, think_seconds=None, sessions=None, joins=None, finish=None))]
    fn new(
        py: Python<'_>,
        arrival_seconds: PyReadonlyArray1<'_, f64>,
        input_tokens: PyReadonlyArray1<'_, i64>,
        output_tokens: PyReadonlyArray1<'_, i64>,
        hash_offsets: PyReadonlyArray1<'_, i64>,
        hash_ids: PyReadonlyArray1<'_, u64>,
        trace_block_tokens: u32,
        block_tokens: u32,
        think_tokens: Option<PyReadonlyArray1<'_, i64>>,
        previous: Option<PyReadonlyArray1<'_, i64>>,
        think_seconds: Option<PyReadonlyArray1<'_, f64>>,
        sessions: Option<PyReadonlyArray1<'_, i64>>,
        joins: Option<PyReadonlyArray1<'_, i64>>,
        finish: Option<PyReadonlyArray1<'_, i64>>,
    ) -> Result<Workload> {
        let trace = Trace {
            arrival_seconds: column(&arrival_seconds)?,
            input_tokens: column(&input_tokens)?,
            output_tokens: column(&output_tokens)?,
            hash_offsets: column(&hash_offsets)?,
            hash_ids: column(&hash_ids)?,
            block_tokens: trace_block_tokens,
            think_tokens: optional(think_tokens.as_ref())?,
            previous: optional(previous.as_ref())?,
            think_seconds: optional(think_seconds.as_ref())?,
            sessions: optional(sessions.as_ref())?,
            joins: optional(joins.as_ref())?,
            finish: optional(finish.as_ref())?,
        };
        Ok(Workload { inner: py.detach(|| lmetric_sim::Workload::new(&trace, block_tokens))? })
    }

    /// Returns the same requests with arrivals and users' think times `speed` times as fast. Raises
    /// `BadValueError`.
    fn faster(&self, speed: f64) -> Result<Workload> {
        Ok(Workload { inner: self.inner.faster(speed)? })
    }

    /// Returns two columns for engines with these profiles and a cache without an end. First: the
    /// prompt tokens that must be computed even then. Second: the earliest end of each request, in
    /// seconds. Raises `BadValueError`.
    #[pyo3(signature = (profiles, *, admission="reserve", cached_answers=false))]
    fn ideal<'py>(
        &self,
        py: Python<'py>,
        profiles: Vec<Bound<'py, PyAny>>,
        admission: &str,
        cached_answers: bool,
    ) -> Result<(Column<'py, i64>, Column<'py, f64>)> {
        let profiles = profiles.iter().map(profile).collect::<PyResult<Vec<Profile>>>()?;
        let admission = admission_of(admission)?;
        let (computed, ends) = py.detach(|| {
            let computed = self.inner.min_computed_tokens(admission, cached_answers);
            let ends = self.inner.ideal_finished_seconds(&profiles, &computed);
            (computed, ends)
        });
        Ok((computed.into_pyarray(py), ends.into_pyarray(py)))
    }

    #[getter]
    fn block_tokens(&self) -> u32 {
        self.inner.block_tokens()
    }

    fn __len__(&self) -> usize {
        self.inner.len()
    }
}

/// Reads the lists of hash IDs of a JSON value. Returns the value with the number of the list (from
/// 0) in place of each list, all IDs, and the end of each list in them. Returns None if the value
/// needs a JSON parser: some `hash_ids` are no list of whole numbers, or it has a backslash.
#[pyfunction]
fn read_hash_ids<'py>(
    py: Python<'py>,
    json: &[u8],
) -> Option<(Bound<'py, PyBytes>, Column<'py, u64>, Vec<usize>)> {
    let HashIds { rest, ids, ends } = py.detach(|| HashIds::read(json))?;
    Some((PyBytes::new(py, &rest), ids.into_pyarray(py), ends))
}

fn column<'a, T: numpy::Element>(array: &'a PyReadonlyArray1<'_, T>) -> Result<&'a [T]> {
    array.as_slice().map_err(|_| {
        let got = "a strided array".to_string();
        CoreError::BadValue { what: "column of a trace".into(), got, expected: "a contiguous one".into() }
            .into()
    })
}

fn optional<'a, T: numpy::Element>(array: Option<&'a PyReadonlyArray1<'_, T>>) -> Result<&'a [T]> {
    array.map_or(Ok(&[]), column)
}

/// Plays a workload over a cluster (see `lmetric.simulate`). Returns the columns by name.
#[pyfunction]
#[pyo3(signature = (workload, *, policy=None, knobs=None, profiles, seed=0, signals, admission,
    index, index_bytes, guard=None, event_delay_seconds, report_period_seconds, token_stride,
    step_times=None, output_known, timeline_seconds,
    roles=None, decode_policy=None, decode_knobs=None, binding="early", unlimited_prefill=false,
    transfer_seconds_per_token=0.0, transfer_fixed_seconds=0.0, transfer_overlap="end", transfer_chunk_tokens=256,
    transfer_unshared=false, fetch=None, fetch_holder_seconds=0.0, fetch_waits=true, fetch_pinned=true,
    local_order, order_slo_seconds, order_think_slo_seconds, swap=None, priority="none", priority_settings=None,
    split="none", split_settings=None, rebalance="none", rebalance_settings=None,
    migration_by, migration_max_concurrent, migration_max_gap_seconds, silent_segments, token_slo_seconds,
    think_slo_seconds, routers, sharing_seconds, cached_answers, session_final, reported_cache_ratio, host_tier=None, tiers,
    tier_load_ratio, programs="none", program_settings=None, load_admission, fleet_changes="none", fleet_change_settings=None,
    changes=None))]
fn simulate<'py>(
    py: Python<'py>,
    workload: &Bound<'py, Workload>,
    policy: Option<&Bound<'py, PyAny>>,
    knobs: Option<&Bound<'py, PyDict>>,
    profiles: Vec<Bound<'py, PyAny>>,
    seed: u64,
    signals: &str,
    admission: &str,
    index: &str,
    index_bytes: usize,
    guard: Option<&Bound<'py, PyAny>>,
    event_delay_seconds: f64,
    report_period_seconds: f64,
    token_stride: u32,
    step_times: Option<Vec<Bound<'py, PyDict>>>,
    output_known: bool,
    timeline_seconds: f64,
    roles: Option<Vec<String>>,
    decode_policy: Option<&Bound<'py, PyAny>>,
    decode_knobs: Option<&Bound<'py, PyDict>>,
    binding: &str,
    unlimited_prefill: bool,
    transfer_seconds_per_token: f64,
    transfer_fixed_seconds: f64,
    transfer_overlap: &str,
    transfer_chunk_tokens: u32,
    transfer_unshared: bool,
    fetch: Option<&Bound<'py, PyDict>>,
    fetch_holder_seconds: f64,
    fetch_waits: bool,
    fetch_pinned: bool,
    local_order: &str,
    order_slo_seconds: f64,
    order_think_slo_seconds: Option<f64>,
    swap: Option<(f64, u64)>,
    priority: &str,
    priority_settings: Option<&Bound<'py, PyDict>>,
    split: &str,
    split_settings: Option<&Bound<'py, PyDict>>,
    rebalance: &str,
    rebalance_settings: Option<&Bound<'py, PyDict>>,
    migration_by: &str,
    migration_max_concurrent: u32,
    migration_max_gap_seconds: f64,
    silent_segments: bool,
    token_slo_seconds: f64,
    think_slo_seconds: Option<f64>,
    routers: u32,
    sharing_seconds: Option<f64>,
    cached_answers: bool,
    session_final: bool,
    reported_cache_ratio: f64,
    host_tier: Option<(f64, f64, f64)>,
    tiers: &str,
    tier_load_ratio: f64,
    programs: &str,
    program_settings: Option<&Bound<'py, PyDict>>,
    load_admission: Option<&Bound<'py, PyDict>>,
    fleet_changes: &str,
    fleet_change_settings: Option<&Bound<'py, PyDict>>,
    changes: Option<Vec<(f64, u32, bool)>>,
) -> Result<Bound<'py, PyDict>> {
    if !(1..=MAX_ROUTERS).contains(&routers) {
        return Err(unknown("routers", &routers.to_string(), "1 to 1024").into());
    }
    let each = (0..routers)
        .map(|_| {
            let decode = decode_policy
                .map(|policy| policies::build_timed(REGISTRY, Some(policy), decode_knobs, false))
                .transpose()?;
            Ok(Policies { place: policies::build_timed(REGISTRY, policy, knobs, false)?, decode })
        })
        .collect::<PyResult<Vec<Policies>>>()?;
    let seen = match signals {
        "exact" => Signals::EXACT,
        "step_end" => Signals::STEP_END,
        "delayed" => Signals::delayed(event_delay_seconds, report_period_seconds),
        "published" => {
            Signals { report_tokens: true, ..Signals::delayed(event_delay_seconds, report_period_seconds) }
        }
        other => return Err(unknown("signals", other, "exact, step_end, delayed or published").into()),
    };
    let guard = GuardSettings::of(guard)?;
    let config = ClusterConfig {
        profiles: profiles.iter().map(profile).collect::<PyResult<Vec<Profile>>>()?,
        step_times: step_times
            .iter()
            .flatten()
            .map(router::step_time_of)
            .collect::<Result<Vec<StepTime>>>()?,
        roles: roles
            .unwrap_or_default()
            .iter()
            .map(|role| router::named("role", role, &Role::NAMES))
            .collect::<Result<Vec<Role>>>()?,
        transfer: Transfer {
            seconds_per_token: transfer_seconds_per_token,
            fixed_seconds: transfer_fixed_seconds,
            overlap: router::named(
                "transfer_overlap",
                transfer_overlap,
                &[
                    ("end", Overlap::End),
                    ("layers", Overlap::Layers),
                    ("chunks", Overlap::Chunks { tokens: transfer_chunk_tokens }),
                ],
            )?,
            unshared: transfer_unshared,
        },
        fetching: SimulatedFetch {
            holder_seconds: fetch_holder_seconds,
            waits: fetch_waits,
            pinned: fetch_pinned,
        },
        admission: admission_of(admission)?,
        cached_answers,
        session_final,
        reported_cache_ratio,
        order: Order::named(local_order, seed, slo(order_slo_seconds, order_think_slo_seconds))?,
        preempt: preempt(swap),
        host: engine::host_tier(host_tier),
        priorities: crate::priorities::priorities_of(priority, priority_settings)?,
        sharing_seconds,
        signals: Signals { token_stride, ..seen },
        router: RouterConfig {
            index_feed: match index {
                "exact" => IndexFeed::Exact,
                "approximate" => IndexFeed::Approximate,
                other => return Err(unknown("index", other, "exact or approximate").into()),
            },
            index_bytes,
            record_bytes: RECORD_BYTES,
            seed,
            guard: guard.under(&*each[0].place).0, // all routers have one policy
            binding: router::binding_of(binding)?,
            // Instances are never removed, so a request without a decode instance is a defect:
            // raise an error.
            colocate: false,
            unlimited_prefill,
            tiers: TierConfig {
                counted: router::named("tiers", tiers, &TierUse::NAMES)?,
                load_ratio: tier_load_ratio,
            },
            programs: crate::programs::programs_of(Maturity::Study, programs, program_settings)?,
            warm: crate::settings::warm_of(fleet_changes, fleet_change_settings)?,
            fetch: fetch.map(|settings| crate::settings::fetch_of(Some(settings))).transpose()?,
            ..RouterConfig::default()
        },
        load: crate::admission::load_of(load_admission)?,
        split: crate::split::split_of(REGISTRY, split, split_settings)?,
        silent_segments,
        output_known,
        rebalance: crate::rebalance::rebalance_of(Maturity::Study, rebalance, rebalance_settings, true)?
            .map(|made| made.0),
        move_by: match migration_by {
            "fetch" => MoveBy::Kv,
            "recompute" => MoveBy::Recompute(Recompute {
                at_once: migration_max_concurrent,
                max_gap_seconds: migration_max_gap_seconds,
            }),
            other => return Err(unknown("migration_by", other, "fetch or recompute").into()),
        },
        changes: changes
            .unwrap_or_default()
            .into_iter()
            .map(|(at_seconds, instance, joins)| FleetChange { at_seconds, instance, joins })
            .collect(),
        timeline_seconds,
        token_slo: slo(token_slo_seconds, think_slo_seconds),
    };
    if config.order.reads_priority() && config.priorities.is_none() {
        let expected = "another one, or priority uniboost or vtc: a trace has no priorities of its own";
        return Err(unknown("local_order", local_order, expected).into());
    }
    let workload = &workload.get().inner;
    let outcome = py.detach(|| {
        lmetric_sim::simulate(workload, each, &config, || {
            Python::attach(|py| py.check_signals()).map_err(crate::errors::Error::from)
        })
    })?;
    Ok(columns(py, outcome, config.profiles.len())?)
}

fn admission_of(name: &str) -> Result<Admission> {
    match name {
        "reserve" => Ok(Admission::Reserve),
        "vllm" => Ok(Admission::Vllm),
        other => Err(unknown("admission", other, "reserve or vllm").into()),
    }
}

/// Token SLO for answer tokens and, if it differs, for reasoning tokens.
fn slo(answer_seconds: f64, think_seconds: Option<f64>) -> TokenSlo {
    TokenSlo { answer_seconds, think_seconds: think_seconds.unwrap_or(answer_seconds) }
}

/// Returns the outcome as a dictionary of numpy columns, without copies.
fn columns(py: Python<'_>, outcome: Outcome, instances: usize) -> PyResult<Bound<'_, PyDict>> {
    let (records, timeline) = (outcome.records, outcome.timeline);
    let dict = PyDict::new(py);
    for (name, times) in [
        ("arrival_seconds", records.arrival_seconds),
        ("refused_seconds", records.refused_seconds),
        ("hold_seconds", records.hold_seconds),
        ("scheduled_seconds", records.scheduled_seconds),
        ("first_token_seconds", records.first_token_seconds),
        ("finished_seconds", records.finished_seconds),
        ("handoff_seconds", records.handoff_seconds),
        ("decode_start_seconds", records.decode_start_seconds),
        ("worst_gap_seconds", records.worst_gap_seconds),
        ("fetch_seconds", records.fetch_seconds),
    ] {
        dict.set_item(name, times.into_pyarray(py))?;
    }
    for (name, counts) in [
        ("instance", records.instance),
        ("computed_tokens", records.computed_tokens),
        ("loaded_tokens", records.loaded_tokens),
        ("predicted_hit_tokens", records.predicted_hit_tokens),
        ("hit_tokens", records.hit_tokens),
        ("preemptions", records.preemptions),
        ("decode_instance", records.decode_instance),
        ("handoff_least_loaded", records.handoff_least_loaded),
        ("cut_tokens", records.cut_tokens),
        ("answer_cut_tokens", records.answer_cut_tokens),
        ("slow_tokens", records.slow_tokens),
        ("moves", records.moves),
        ("fetch_instance", records.fetch_instance),
        ("fetched_tokens", records.fetched_tokens),
    ] {
        dict.set_item(name, counts.into_pyarray(py))?;
    }
    let shape = [instances, timeline.buckets()];
    for (name, quantity) in [
        ("timeline_running", Quantity::Running),
        ("timeline_queued", Quantity::Waiting),
        ("timeline_prefill_tokens", Quantity::PrefillTokens),
    ] {
        let table: Bound<'_, PyArray2<f64>> = timeline.column(quantity).into_pyarray(py).reshape(shape)?;
        dict.set_item(name, table)?;
    }
    let edges: Vec<f64> = (0..outcome.gaps.counts().len()).map(GapHistogram::edge).collect();
    dict.set_item("gap_edges_seconds", edges.into_pyarray(py))?;
    dict.set_item("gap_counts", outcome.gaps.counts().to_vec().into_pyarray(py))?;
    dict.set_item("guard_alarms", outcome.guard_alarms)?;
    dict.set_item("guard_filters", outcome.guard_filters)?;
    dict.set_item("unscored", outcome.unscored)?;
    dict.set_item("steps", outcome.steps)?;
    dict.set_item("step_variance", outcome.step_variance)?;
    dict.set_item("oom", outcome.out_of_memory)?;
    dict.set_item("gamma", outcome.routers[0].gamma().map(|(gamma, _)| gamma))?;
    dict.set_item("stalled", outcome.stalled)?;
    let changes = outcome.changes.iter();
    let changes: Vec<_> =
        changes.map(|each| (each.done_seconds, each.fetches, each.fetched_tokens, each.moves)).collect();
    dict.set_item("changes", changes)?;
    Ok(dict)
}

/// Adds its class and function to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Workload>()?;
    module.add_function(wrap_pyfunction!(read_hash_ids, module)?)?;
    module.add_function(wrap_pyfunction!(simulate, module)?)
}

//! `Decision` and `Ticket`, and the core's records as dictionaries.
use crate::errors::Result;
use crate::held::{Clock, with_router, with_router_detached};
use lmetric_core::CoreError;
use lmetric_core::fleet::{InstanceId, Role};
use lmetric_core::guard::{Guard, GuardEvent, Phase};
use lmetric_core::indicators::IndicatorSet;
use lmetric_core::kv::index::KvIndex;
use lmetric_core::kv::tier::Tier;
use lmetric_core::plan::{Event, Failure, PrefixFetch, Segment, Usage};
use lmetric_core::policy::Prefer;
use lmetric_core::program::Finish;
use lmetric_core::record::{Balance, DecisionRecord, Shadow};
use lmetric_core::router::{
    Carry, Decision as CoreDecision, NamedMove, Router, SharedRouter, Ticket as CoreTicket, Totals,
};
use numpy::PyArray1;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use std::sync::Arc;

/// The instance chosen for a request, and the reasons. The record stays in Rust until it is read.
#[pyclass(frozen, module = "lmetric")]
pub struct Decision {
    /// Number of the decision and of its record.
    #[pyo3(get)]
    pub id: u64,
    /// Slot of the chosen instance.
    #[pyo3(get)]
    slot: u32,
    /// Leading prompt tokens that the instance holds, by the KV index, tiers below the GPU
    /// included.
    #[pyo3(get)]
    predicted_cached_tokens: u32,
    /// Part of `predicted_cached_tokens` that the instance loads from a tier below the GPU.
    #[pyo3(get)]
    predicted_tier_tokens: u32,
    /// Prompt length in tokens, as given or estimated.
    #[pyo3(get)]
    prompt_tokens: u32,
    /// Priority in the engine's queue, lower first; None if requests are not ordered.
    #[pyo3(get)]
    priority: Option<i64>,
    name: Arc<str>,
    /// Name of the decode instance, if it is chosen.
    next: Option<Arc<str>>,
    /// The prefix fetch before the request begins.
    fetch: Option<FetchRange>,
    shadow: Option<Box<Shadow>>,
    shared: SharedRouter,
}

/// The holder of a prefix to fetch, its first token, and one past its last token.
pub type FetchRange = (Arc<str>, u32, u32);

/// A prefix fetch with its holder's name.
pub fn fetch_range(router: &Router, fetch: PrefixFetch) -> FetchRange {
    (router.fleet().name(fetch.holder).clone(), fetch.from_token, fetch.to_token)
}

impl Decision {
    /// Wraps a core decision.
    pub fn new(
        decision: &CoreDecision,
        prompt_tokens: u32,
        name: Arc<str>,
        next: Option<Arc<str>>,
        fetch: Option<FetchRange>,
        shadow: Option<Box<Shadow>>,
        shared: SharedRouter,
    ) -> Decision {
        Decision {
            id: decision.id,
            slot: decision.segment.instance.0,
            predicted_cached_tokens: decision.predicted_hit_tokens,
            predicted_tier_tokens: decision.predicted_tier_tokens,
            prompt_tokens,
            priority: decision.priority.map(|priority| priority.value),
            name,
            next,
            fetch,
            shadow,
            shared,
        }
    }

    fn record<T: Send>(&self, py: Python<'_>, read: impl FnOnce(&DecisionRecord) -> T + Send) -> Result<T> {
        let id = self.id;
        with_router(&self.shared, py, |router| match router.record(id) {
            Some(record) => Ok(read(record)),
            None => {
                let problem =
                    "its decision record is gone; a larger record_bytes= keeps records longer".into();
                Err(CoreError::Ticket { ticket: id, problem }.into())
            }
        })
    }
}

#[pymethods]
impl Decision {
    /// Name of the chosen instance.
    #[getter]
    fn instance(&self) -> &str {
        &self.name
    }

    /// Name of the instance that decodes the request after `instance` computed its prompt. None if
    /// the request stays on `instance`, or if the decode instance is chosen later
    /// (`Ticket.has_next` is true then).
    #[getter]
    fn decode_instance(&self) -> Option<&str> {
        self.next.as_deref()
    }

    /// The prefix that the instance fetches before the request begins there: name of the holder,
    /// first token, one past the last token. None: no prefix fetch. Report the outcome with
    /// `Ticket.fetched`.
    #[getter]
    fn fetch(&self) -> Option<(&str, u32, u32)> {
        self.fetch.as_ref().map(|(holder, from, to)| (&**holder, *from, *to))
    }

    /// The choice of the shadow policy: name of the instance, predicted prompt tokens in its cache,
    /// predicted seconds to the first token there, and the same on `instance`. A prediction is NaN
    /// if the router cannot make it. The name is None if the policy failed or scored no instance.
    /// None: no shadow scored the request.
    #[getter]
    fn shadow(&self) -> Option<(Option<&str>, u32, f64, f64)> {
        let shadow = self.shadow.as_deref()?;
        let own = shadow.chosen_ttft_seconds;
        Some(match &shadow.choice {
            Some((name, hit_tokens, ttft)) => (Some(&**name), *hit_tokens, *ttft, own),
            None => (None, 0, f64::NAN, own),
        })
    }

    /// Scores, float32, one per slot. A record keeps those of the 8 best instances; the other
    /// scores are NaN. Raises `TicketError` if the decision record is gone.
    fn scores<'py>(&self, py: Python<'py>) -> Result<Bound<'py, PyArray1<f32>>> {
        Ok(PyArray1::from_vec(py, self.record(py, DecisionRecord::known_scores)?))
    }

    /// Names of the 8 best instances, best first; the chosen instance comes before instances with
    /// equal scores. Raises `TicketError` if the decision record is gone.
    fn ranking(&self, py: Python<'_>) -> Result<Vec<String>> {
        self.record(py, |record| record.ranking().into_iter().map(Into::into).collect())
    }

    fn __repr__(&self) -> String {
        let next = self.next.as_ref().map_or_else(String::new, |name| format!(", decode_instance='{name}'"));
        format!(
            "Decision(id={}, instance='{}'{next}, predicted_cached_tokens={} of {})",
            self.id, self.name, self.predicted_cached_tokens, self.prompt_tokens
        )
    }
}

/// A request in flight. Report its progress with the methods. Dropping an open ticket counts as an
/// abort and removes its counts.
#[pyclass(frozen, module = "lmetric")]
pub struct Ticket {
    /// The open segment and the name of its instance, which change when the request moves.
    place: Mutex<(Segment, Arc<str>)>,
    ticket: CoreTicket,
    clock: Clock,
    /// Whether decisions about the request are long enough to release the interpreter lock.
    long: bool,
}

impl Ticket {
    /// Wraps a core ticket.
    pub fn new(ticket: CoreTicket, segment: Segment, name: Arc<str>, clock: Clock, long: bool) -> Ticket {
        Ticket { place: Mutex::new((segment, name)), ticket, clock, long }
    }

    /// The time on the router's clock, seconds.
    pub fn now(&self) -> f64 {
        self.clock.read()
    }

    /// Reports an event to the router. Returns the name of the request's new instance, if it
    /// changed.
    pub fn advance(&self, py: Python<'_>, event: Event, now: Option<f64>) -> Result<Option<Arc<str>>> {
        let chooses = match event {
            Event::Failed(_) => true,
            Event::FirstToken | Event::Finished(_) => self.place.lock().0.to_token.is_some(),
            _ => false,
        };
        self.decide(py, chooses, |router| {
            let now = self.clock.now(now, router)?;
            let Some(segment) = router.advance(self.ticket.id(), event, now)? else { return Ok(None) };
            let name = router.fleet().name(segment.instance).clone();
            *self.place.lock() = (segment, name.clone());
            Ok(Some(name))
        })
    }

    fn with_core<T: Send>(
        &self,
        py: Python<'_>,
        with: impl FnOnce(&mut Router) -> Result<T> + Send,
    ) -> Result<T> {
        with_router(self.ticket.router(), py, with)
    }

    /// Calls `with` while holding the router. `chooses`: whether it may choose an instance.
    fn decide<T: Send>(
        &self,
        py: Python<'_>,
        chooses: bool,
        with: impl FnOnce(&mut Router) -> Result<T> + Send,
    ) -> Result<T> {
        if chooses && self.long {
            with_router_detached(self.ticket.router(), py, with)
        } else {
            self.with_core(py, with)
        }
    }
}

#[pymethods]
impl Ticket {
    /// Name of the instance that the request is on. It changes when the request moves or fails
    /// over.
    #[getter]
    fn instance<'py>(&self, py: Python<'py>) -> Bound<'py, PyString> {
        PyString::new(py, &self.place.lock().1)
    }

    /// First token of the open segment, counted over prompt and output: 0, or the segment boundary.
    /// Other instances computed the tokens before it.
    #[getter(from_token)]
    fn segment_start(&self) -> u32 {
        self.place.lock().0.from_token
    }

    /// One past the last token of the open segment; None: the segment runs to the end of the
    /// request. When the segment ends, its KV covers exactly these tokens.
    #[getter(to_token)]
    fn segment_end(&self) -> Option<u32> {
        self.place.lock().0.to_token
    }

    /// Whether another segment follows the open one.
    #[getter]
    fn has_next(&self) -> bool {
        self.place.lock().0.to_token.is_some()
    }

    /// Name of the instance that is bound for the next segment; None if no instance is bound yet.
    #[getter]
    fn next_instance(&self, py: Python<'_>) -> Result<Option<String>> {
        self.with_core(py, |router| {
            let next = router.bound(self.ticket.id()).next();
            Ok(next.map(|segment| router.fleet().name(segment.instance).to_string()))
        })
    }

    /// Name of its prompt in the fetches of fleet changes (`Warming.begin`); None: the prompt has
    /// no whole block. Raises `TicketError` if the ticket is closed.
    #[getter]
    fn prompt_key(&self, py: Python<'_>) -> Result<Option<u64>> {
        self.with_core(py, |router| Ok(router.prompt_key(self.ticket.id())?))
    }

    /// The prefix that the instance still has to fetch before the request begins, as
    /// `Decision.fetch`. A retry may change it. None: no prefix fetch, or it has ended.
    #[getter]
    fn fetch(&self, py: Python<'_>) -> Result<Option<(String, u32, u32)>> {
        self.with_core(py, |router| {
            let fetch = router.fetch_of(self.ticket.id()).map(|fetch| fetch_range(router, fetch));
            Ok(fetch.map(|(holder, from, to)| (holder.to_string(), from, to)))
        })
    }

    /// Reports the end of the prefix fetch. `tokens`: leading tokens that arrived (0: none).
    /// `seconds`: time since the fetch was requested. The instance computes the other tokens, and
    /// begins now. `late`: the fetch was given up because it took too long. Raises `TicketError` if
    /// there was no prefix to fetch, `BadValueError` for more tokens than the prefix has.
    #[pyo3(signature = (tokens, seconds, now=None, *, late=false))]
    fn fetched(&self, py: Python<'_>, tokens: u32, seconds: f64, now: Option<f64>, late: bool) -> Result<()> {
        self.advance(py, Event::Fetched { tokens, seconds, late }, now).map(drop)
    }

    /// Number of the ticket, unique among open tickets. `Router.rebalance` names moves by it.
    #[getter]
    fn id(&self) -> u64 {
        self.ticket.id().0
    }

    /// Begins to move the running request to the instance `target`, and counts the request there
    /// from now on. `recompute`: `target` computes all earlier tokens again; else their KV is
    /// transferred. Raises `UnknownNameError`. Raises `TicketError` if the request cannot move: it
    /// is closed, it has no token yet, another segment is bound, or `target` cannot take it.
    #[pyo3(signature = (target, *, recompute=true, now=None))]
    fn begin_migration(&self, py: Python<'_>, target: &str, recompute: bool, now: Option<f64>) -> Result<()> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            let target = router.fleet().find(target)?;
            let carry = if recompute { Carry::Recompute } else { Carry::Kv };
            router.begin_move(self.ticket.id(), target, carry, now)?;
            Ok(())
        })
    }

    /// Returns the name of the best instance to fail over to, after the instance of the running
    /// request failed. The failed instance is no longer a candidate for this request. Counts
    /// nothing. Raises `NoInstanceError`, and `TicketError` if the ticket is closed or has no token
    /// yet.
    #[pyo3(signature = (now=None))]
    fn choose_failover(&self, py: Python<'_>, now: Option<f64>) -> Result<String> {
        self.decide(py, true, |router| {
            let now = self.clock.now(now, router)?;
            let next = router.elsewhere(self.ticket.id(), now)?;
            Ok(router.fleet().name(next).to_string())
        })
    }

    /// Cancels a move that has begun; does nothing if no move has begun. Raises `TicketError` on a
    /// closed ticket.
    #[pyo3(signature = (now=None))]
    fn cancel_migration(&self, py: Python<'_>, now: Option<f64>) -> Result<()> {
        self.with_core(py, |router| {
            let now = self.clock.now(now, router)?;
            Ok(router.cancel_move(self.ticket.id(), now)?)
        })
    }

    /// Reports that the request has moved: closes the open segment with the output tokens reported
    /// so far, and opens the segment on the target. Returns the name of its instance, which is
    /// another instance if the target was removed meanwhile. Then call `sent`. Raises `TicketError`
    /// if no move has begun. Raises `NoInstanceError` if no instance can take the request, which
    /// has failed then.
    #[pyo3(signature = (now=None))]
    fn migrated(&self, py: Python<'_>, now: Option<f64>) -> Result<String> {
        Ok(self.advance(py, Event::Moved, now)?.map(|name| name.to_string()).unwrap_or_default())
    }

    /// Whether the ticket is open.
    #[getter]
    fn open(&self, py: Python<'_>) -> Result<bool> {
        self.with_core(py, |router| Ok(router.is_open(self.ticket.id())))
    }

    /// Reports that the request was written to its instance. An approximate index learns the prompt
    /// now (or at the next event). Raises `TicketError` on a closed ticket, as all events do.
    #[pyo3(signature = (now=None))]
    fn sent(&self, py: Python<'_>, now: Option<f64>) -> Result<()> {
        self.advance(py, Event::Sent, now).map(drop)
    }

    /// Reports that the engine took the request off its queue (optional, for engines that report
    /// it).
    #[pyo3(signature = (now=None))]
    fn scheduled(&self, py: Python<'_>, now: Option<f64>) -> Result<()> {
        self.advance(py, Event::Scheduled(None), now).map(drop)
    }

    /// Reports that the engine computed `tokens` more prefill tokens (optional, for engines that
    /// report it).
    #[pyo3(signature = (tokens, now=None))]
    fn prefilled(&self, py: Python<'_>, tokens: u32, now: Option<f64>) -> Result<()> {
        self.advance(py, Event::Prefilled(tokens), now).map(drop)
    }

    /// Reports the first output token.
    #[pyo3(signature = (now=None))]
    fn first_token(&self, py: Python<'_>, now: Option<f64>) -> Result<()> {
        self.advance(py, Event::FirstToken, now).map(drop)
    }

    /// Reports `n` further output tokens.
    #[pyo3(signature = (n, now=None))]
    fn tokens(&self, py: Python<'_>, n: u32, now: Option<f64>) -> Result<()> {
        self.advance(py, Event::Tokens(n), now).map(drop)
    }

    /// Reports that the open segment ended successfully, with the engine's usage in tokens.
    ///
    /// If another segment follows (`has_next`), returns the name of its instance; then call `sent`
    /// again. If `from_token` is 0 then, send the whole request again: no instance could continue
    /// it. Otherwise the request has ended: returns None, and the ticket is closed. Raises
    /// `NoInstanceError` if no instance can take the next segment; the request has failed.
    #[pyo3(signature = (
        *, prompt_tokens=None, cached_tokens=None, output_tokens=None, finish_reason=None, now=None
    ))]
    fn segment_done(
        &self,
        py: Python<'_>,
        prompt_tokens: Option<u32>,
        cached_tokens: Option<u32>,
        output_tokens: Option<u32>,
        finish_reason: Option<&str>,
        now: Option<f64>,
    ) -> Result<Option<String>> {
        let finish = finish_reason.map(Finish::of).unwrap_or_default();
        let usage = Usage { prompt_tokens, cached_tokens, output_tokens, finish };
        Ok(self.advance(py, Event::Finished(usage), now)?.map(|name| name.to_string()))
    }

    /// Reports that the request ended successfully, even if another segment was to follow, with the
    /// engine's usage in tokens. Closes the ticket. `finish_reason`: as in OpenAI's API; programs
    /// return more often after `"tool_calls"` than after `"stop"`. Without `"length"`, an answer
    /// counts as ended by itself when lengths are learned.
    #[pyo3(signature = (
        *, prompt_tokens=None, cached_tokens=None, output_tokens=None, finish_reason=None, now=None
    ))]
    fn done(
        &self,
        py: Python<'_>,
        prompt_tokens: Option<u32>,
        cached_tokens: Option<u32>,
        output_tokens: Option<u32>,
        finish_reason: Option<&str>,
        now: Option<f64>,
    ) -> Result<()> {
        let finish = finish_reason.map(Finish::of).unwrap_or_default();
        let usage = Usage { prompt_tokens, cached_tokens, output_tokens, finish };
        self.advance(py, Event::Ended(usage), now).map(drop)
    }

    /// Reports that the request failed.
    ///
    /// `kind`, for a failure of its instance: `"refused"`, `"dns"`, `"tls"`, `"unreachable"` (no
    /// connection), `"reset"`, `"timeout"`, `"status"`. For a final failure: `"cancelled"`,
    /// `"engine_error"`, `"resources"` (the router has no resources for a connection).
    ///
    /// If its instance fails before the first token, the request moves to the next instance of its
    /// ranking. Returns the name of that instance; then call `sent` again. Returns None and closes
    /// the ticket if the ranking is used up, a token was seen, the failure is final, or `retry` is
    /// false. Raises `UnknownNameError`, `TicketError`.
    #[pyo3(signature = (kind, now=None, *, retry=true))]
    fn failed(&self, py: Python<'_>, kind: &str, now: Option<f64>, retry: bool) -> Result<Option<String>> {
        let failure = Failure::NAMES.iter().find(|(name, _)| *name == kind).map(|(_, f)| *f);
        let failure = failure.ok_or_else(|| CoreError::UnknownName {
            kind: "failure".into(),
            name: kind.into(),
            nearest: lmetric_core::expr::nearest(kind, Failure::NAMES.iter().map(|(n, _)| *n)),
        })?;
        let event = if retry { Event::Failed(failure) } else { Event::GaveUp(failure) };
        Ok(self.advance(py, event, now)?.map(|name| name.to_string()))
    }

    /// Closes the ticket at the end of the block; an open ticket counts as an abort.
    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, pyo3::types::PyTuple>) -> Result<()> {
        self.with_core(py, |router| {
            router.drop_ticket(self.ticket.id());
            Ok(())
        })
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let name = self.place.lock().1.clone();
        let state = match self.open(py) {
            Ok(true) => "open",
            Ok(false) => "closed",
            Err(_) => "in use",
        };
        format!("Ticket(id={}, instance='{name}', {state})", self.ticket.id().0)
    }
}

/// A decision record as a dictionary that `json` can write; absent numbers are None.
pub fn record_dict<'py>(py: Python<'py>, record: &DecisionRecord) -> Result<Bound<'py, PyDict>> {
    let number = |v: f64| v.is_finite().then_some(v);
    let name = |slot: u32| &*record.names[slot as usize];
    let dict = PyDict::new(py);
    dict.set_item("id", record.id)?;
    dict.set_item("at_seconds", record.at)?;
    dict.set_item("policy", record.policy.as_deref())?;
    dict.set_item("arm", record.arm.name())?;
    dict.set_item("request_id", record.request_id.as_deref())?;
    dict.set_item("prompt_tokens", record.prompt_tokens)?;
    let tried: Vec<&str> = record.tried().map(|name| &**name).collect();
    dict.set_item("instance", tried.last())?;
    dict.set_item("tried", tried)?;
    dict.set_item("prefer", if record.prefer == Prefer::Max { "max" } else { "min" })?;
    dict.set_item("scored", record.scored)?;
    dict.set_item("tied", record.tied)?;
    dict.set_item("drawn_from", record.drawn_from)?;
    let best = PyList::empty(py);
    for (candidate, values) in record.explained() {
        let row = PyDict::new(py);
        row.set_item("instance", name(candidate.slot))?;
        row.set_item("score", number(candidate.score))?;
        let terms = PyDict::new(py);
        for (indicator, value) in record.reads.iter().zip(values) {
            // The value of a text is a hash without a key: anyone can compute it for a guess.
            if IndicatorSet::TEXTS.contains(indicator) {
                continue;
            }
            terms.set_item(indicator.decl().name, number(*value))?;
        }
        for (declared, value) in record.declared.iter().zip(&values[record.reads.iter().count()..]) {
            terms.set_item(declared.decl().name, number(*value))?;
        }
        row.set_item("terms", terms)?;
        best.append(row)?;
    }
    dict.set_item("best", best)?;
    let holder = record.holder.map(|holder| {
        let found = PyDict::new(py);
        found.set_item("instance", name(holder.slot))?;
        found.set_item("cached_tokens", holder.hit_tokens)?;
        found.set_item("saved_tokens", holder.saved_tokens)?;
        found.set_item("bs", holder.requests)?;
        Ok::<_, PyErr>(found)
    });
    dict.set_item("holder", holder.transpose()?)?;
    dict.set_item("margin_to_runner_up", record.margin.and_then(number))?;
    dict.set_item("load_report_age_seconds", record.report_age_seconds)?;
    dict.set_item("left_out", record.left_out)?;
    dict.set_item("filtered", record.filtered)?;
    dict.set_item("filter_waived", record.filter_waived)?;
    dict.set_item("unscored", record.unscored)?;
    dict.set_item("guard_excluded", record.guard_excluded)?;
    dict.set_item("guard_balance_only", record.balance_only)?;
    let next = record.next.first();
    dict.set_item("decode_instance", next.map(|n| &*n.name))?;
    dict.set_item("answer_instance", record.next.get(1).map(|n| &*n.name))?;
    dict.set_item("decode_score", next.and_then(|n| number(n.score)))?;
    dict.set_item("expected_handoff_seconds", next.map(|n| n.handoff_seconds))?;
    dict.set_item("cuts", record.cuts.to_vec())?;
    dict.set_item("split_reason", record.split_reason.as_deref())?;
    dict.set_item("priority", record.priority.map(|p| p.value))?;
    dict.set_item("boost_seconds", record.priority.map(|p| p.boost_seconds))?;
    let fetch = record.fetch.as_ref();
    dict.set_item("fetch_reason", record.fetch_reason.as_deref())?;
    dict.set_item("fetch_instance", fetch.map(|p| &*p.name))?;
    dict.set_item("fetch_from_token", fetch.map(|p| p.from_token))?;
    dict.set_item("fetch_to_token", fetch.map(|p| p.to_token))?;
    dict.set_item("expected_fetch_seconds", fetch.map(|p| p.expected_seconds))?;
    dict.set_item("fetched_tokens", fetch.and_then(|p| p.tokens))?;
    dict.set_item("fetch_seconds", fetch.and_then(|p| p.seconds))?;
    let balance = |of: fn(&Balance) -> f64| record.balance.as_ref().and_then(|balance| number(of(balance)));
    dict.set_item("balance_first_seconds", balance(|b| b.first_seconds))?;
    dict.set_item("balance_second_seconds", balance(|b| b.second_seconds))?;
    dict.set_item("balance_third_seconds", balance(|b| b.third_seconds))?;
    dict.set_item("balance_cut_seconds", balance(|b| b.cut_seconds))?;
    dict.set_item("balance_whole_seconds", balance(|b| b.whole_seconds))?;
    dict.set_item("stay_seconds", balance(|b| b.stay_seconds))?;
    dict.set_item("decode_placement_seconds", balance(|b| b.apart_seconds))?;
    let moves = record.moves.iter().map(|(token, _, name)| (*token, &**name));
    dict.set_item("migrations", PyList::new(py, moves)?)?;
    dict.set_item("program", record.program.map(|note| note.program))?;
    dict.set_item("program_tokens", record.program.map(|note| note.context_tokens))?;
    let level = record.level.as_deref();
    let held_of_program = record.program.map(|note| note.held_seconds);
    dict.set_item("held_seconds", level.map(|note| note.held_seconds).or(held_of_program))?;
    dict.set_item("level", level.map(|note| note.level))?;
    dict.set_item("aged_levels", level.map(|note| note.aged_levels))?;
    dict.set_item("predicted_cached_tokens", record.predicted_hit_tokens)?;
    dict.set_item("predicted_tier_tokens", record.predicted_tier_tokens)?;
    let shadow = record.shadow.as_deref().map(|shadow| {
        let told = PyDict::new(py);
        let choice = shadow.choice.as_ref();
        told.set_item("policy", &*shadow.policy)?;
        told.set_item("instance", choice.map(|(name, ..)| &**name))?;
        told.set_item("predicted_cached_tokens", choice.map(|(_, hit, _)| *hit))?;
        told.set_item("predicted_ttft_seconds", choice.and_then(|(.., ttft)| number(*ttft)))?;
        told.set_item("chosen_predicted_ttft_seconds", number(shadow.chosen_ttft_seconds))?;
        Ok::<_, PyErr>(told)
    });
    dict.set_item("shadow", shadow.transpose()?)?;
    let outcome = &record.outcome;
    dict.set_item("cached_tokens", outcome.usage.cached_tokens)?;
    dict.set_item("output_tokens", outcome.usage.output_tokens)?;
    dict.set_item("handoff_seconds", outcome.handed_over_seconds)?;
    dict.set_item("ttft_seconds", outcome.ttft_seconds)?;
    dict.set_item("e2e_seconds", outcome.e2e_seconds)?;
    let state = match outcome.ended {
        _ if outcome.dropped => "dropped",
        None => "running",
        Some(None) => "finished",
        Some(Some(failure)) => failure.name(),
    };
    dict.set_item("outcome", state)?;
    Ok(dict)
}

/// A move chosen by a round, with the names of its source and target, as a dictionary.
pub fn move_dict<'py>(
    py: Python<'py>,
    named: &NamedMove,
    [source, target]: &[Arc<str>; 2],
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("ticket", named.ticket.0)?;
    dict.set_item("source", &**source)?;
    dict.set_item("target", &**target)?;
    for (name, value) in [
        ("source_load", named.why.source_load),
        ("target_load", named.why.target_load),
        ("mean_load", named.why.mean_load),
        ("variance_before", named.why.variance_before),
        ("variance_after", named.why.variance_after),
    ] {
        dict.set_item(name, value.is_finite().then_some(value))?;
    }
    Ok(dict)
}

/// An action of the guard as a dictionary.
pub fn guard_event_dict<'py>(py: Python<'py>, event: &GuardEvent) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item(
        "event",
        match (event.released, event.phase) {
            (true, _) => "released",
            (false, Phase::Suspected) => "suspected",
            (false, Phase::Filtering) => "filtering",
        },
    )?;
    dict.set_item("class", format!("{:016x}", event.class))?;
    dict.set_item("depth_blocks", event.depth)?;
    dict.set_item("share", event.share)?;
    dict.set_item("holders", event.holders)?;
    dict.set_item("instances", event.instances)?;
    Ok(dict)
}

/// Counters and gauges of a router. They are copied while the router is held, and become Python
/// dictionaries after its release.
pub struct Stats {
    policy: String,
    decode_policy: String,
    totals: Totals,
    last_decision: u64,
    index_bytes: usize,
    index_evicted_blocks: u64,
    in_flight: usize,
    guard_on: bool,
    guard_suspected: usize,
    guard_filtering: usize,
}

/// State of an instance.
pub struct InstanceStats {
    /// `None`: it was removed.
    name: Option<Arc<str>>,
    healthy: bool,
    draining: bool,
    role: Role,
    in_flight: usize,
    decisions: u64,
    predicted_ttft_source: &'static str,
}

impl Stats {
    /// Copies the values.
    pub fn of(router: &Router) -> Stats {
        let caches = router.caches().read();
        let indexes = || Tier::MEDIA.iter().filter_map(|(_, tier)| caches.index(*tier));
        let alarms = router.guard().map_or(&[][..], Guard::alarms);
        let alarms = |phase| alarms.iter().filter(|alarm| alarm.phase == phase).count();
        Stats {
            policy: router.policy().spec().name.to_string(),
            decode_policy: router.decode_policy().spec().name.to_string(),
            totals: router.totals().clone(),
            last_decision: router.last_decision(),
            index_bytes: indexes().map(KvIndex::bytes).sum(),
            index_evicted_blocks: indexes().map(KvIndex::evicted_blocks).sum(),
            in_flight: router.in_flight(),
            guard_on: router.guard().is_some(),
            guard_suspected: alarms(Phase::Suspected),
            guard_filtering: alarms(Phase::Filtering),
        }
    }

    /// Returns the values as a dictionary.
    pub fn dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let totals = &self.totals;
        let dict = PyDict::new(py);
        dict.set_item("policy", &self.policy)?;
        dict.set_item("decode_policy", &self.decode_policy)?;
        for (name, value) in [
            ("decisions", totals.decisions),
            ("last_decision", self.last_decision),
            ("no_instance", totals.no_instance),
            ("retries", totals.retries),
            ("left_out", totals.left_out),
            ("unscored", totals.unscored),
            ("filter_waived", totals.filter_waived),
            ("split", totals.split),
            ("migrated", totals.moved),
            ("fetches", totals.fetches),
            ("fetched_tokens", totals.fetched_tokens),
            ("finished", totals.finished),
            ("dropped", totals.dropped),
            ("prompt_tokens", totals.prompt_tokens),
            ("reported_prompt_tokens", totals.reported_prompt_tokens),
            ("predicted_cached_tokens", totals.predicted_cached_tokens),
            ("cached_tokens", totals.cached_tokens),
            ("output_tokens", totals.output_tokens),
            ("index_bytes", self.index_bytes as u64),
            ("index_evicted_blocks", self.index_evicted_blocks),
            ("in_flight", self.in_flight as u64),
        ] {
            dict.set_item(name, value)?;
        }
        let failed = PyDict::new(py);
        for ((name, _), count) in Failure::NAMES.iter().zip(totals.failed) {
            failed.set_item(*name, count)?;
        }
        dict.set_item("failed", failed)?;
        dict.set_item("guard_on", self.guard_on)?;
        dict.set_item("guard_suspected", self.guard_suspected)?;
        dict.set_item("guard_filtering", self.guard_filtering)?;
        Ok(dict)
    }
}

impl InstanceStats {
    /// Copies the state of those instances that the router still has.
    pub fn of(router: &Router, members: &[InstanceId]) -> Vec<InstanceStats> {
        let fleet = router.fleet();
        let pool_rate = router.knows_a_rate();
        let of = |member: &InstanceId| {
            let id = member.slot();
            let (healthy, draining, role) = fleet.state(id);
            InstanceStats {
                name: fleet.current(*member).map(|id| fleet.name(id).clone()),
                healthy,
                draining,
                role,
                in_flight: router.in_flight_on(id),
                decisions: router.decisions_on(id),
                predicted_ttft_source: router.ttft_source(id, pool_rate).name(),
            }
        };
        members.iter().map(of).collect()
    }
}

/// Returns the state and the indicators of instances by name. `columns`: names of indicators, and
/// their values by instance.
pub fn instance_dicts<'py>(
    py: Python<'py>,
    rows: &[InstanceStats],
    columns: &[(&str, Vec<f64>)],
) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for (i, instance) in rows.iter().enumerate() {
        let Some(name) = &instance.name else { continue };
        let row = PyDict::new(py);
        row.set_item("healthy", instance.healthy)?;
        row.set_item("draining", instance.draining)?;
        row.set_item("role", instance.role.name())?;
        row.set_item("in_flight", instance.in_flight)?;
        row.set_item("decisions", instance.decisions)?;
        for (indicator, column) in columns {
            let value = column[i];
            row.set_item(*indicator, (!value.is_nan()).then_some(value))?;
        }
        row.set_item("predicted_ttft_source", instance.predicted_ttft_source)?;
        dict.set_item(&**name, row)?;
    }
    Ok(dict)
}

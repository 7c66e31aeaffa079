//! Decisions for Python: of one request, and of a batch.
use super::Router;
use crate::admission::Arrival;
use crate::errors::Result;
use crate::held::{with_router, with_router_detached};
use crate::request::{self, Request, Unhashed};
use crate::ticket::{Decision, FetchRange, Ticket, fetch_range};
use lmetric_core::CoreError;
use lmetric_core::kv::keys::Keys;
use lmetric_core::plan::Segment;
use lmetric_core::record::Shadow;
use lmetric_core::request::{Arm, Request as CoreRequest};
use lmetric_core::router::{
    Decision as CoreDecision, PrefixMatch, Reading, Router as CoreRouter, Ticket as CoreTicket,
};
use pyo3::prelude::*;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Estimated nanoseconds of a decision: a fixed part, and a part for each instance and each block
/// of the prompt. LMETRIC takes 2,000, 2 and 0.7 (`decision_latency` at 256 to 4,096 instances and
/// 1,000 to 100,000 tokens). The default policy takes 4 per instance, and expressions with
/// reductions up to 17.
const DECISION_NS: usize = 2_000;
const NS_PER_INSTANCE: usize = 8;
const NS_PER_BLOCK: usize = 1;
/// Longest decision by that estimate that keeps the interpreter lock. So no policy above keeps it
/// for more than 20 us. Releasing it takes about 0.1 us.
const LONG_NS: usize = 10_000;
/// Longest time for which a batch holds the router if only other batches and events wait for it. A
/// shorter time hands the router from thread to thread more often. Each time, the waiting thread
/// spins and yields before it sleeps, and that is lost processor time.
const HOLD: Duration = Duration::from_micros(100);
/// Requests of a batch that are hashed and matched before the first of them is placed.
const PIECE: usize = 32;
/// Buffers that are kept for later requests.
const CHAINS_KEPT: usize = 16;

thread_local! {
    /// Buffer for the prefixes of a single request.
    static FOUND: Cell<PrefixMatch> = Cell::default();
}

/// A request to place.
pub struct Asked<'a> {
    pub request: CoreRequest<'a>,
    pub prompt: Unhashed<'a>,
    given: &'a Request,
    keys: Keys,
    arrival: Option<&'a Arrival>,
    /// The name in the decision record.
    id: Option<&'a str>,
}

impl<'a> Asked<'a> {
    pub fn new(
        py: Python<'a>,
        keys: &Keys,
        request: &'a Request,
        arrival: Option<&'a Arrival>,
        canary: bool,
        shadow: bool,
    ) -> Result<Asked<'a>> {
        let arm = if canary { Arm::Canary } else { Arm::Stable };
        let (core, prompt) = request.core(py, keys)?;
        let (request, given, keys) = (CoreRequest { arm, shadow, ..core }, request, *keys);
        Ok(Asked { request, prompt, given, keys, arrival, id: given.id(py)? })
    }

    /// Returns the chain of the prompt if it was hashed when the request arrived.
    fn take_chain(&self) -> Option<Vec<u64>> {
        self.arrival.and_then(|arrival| arrival.take_chain(self.given, &self.keys))
    }

    /// Returns whether the prefixes of the prompt were found when the request arrived.
    fn is_matched(&self) -> bool {
        self.arrival.is_some_and(Arrival::is_matched)
    }

    /// Finds the prefixes of the prompt before its decision. `chain`: the chain of the prompt.
    fn find_prefixes(&self, chain: &[u64], caches: &Reading<'_>, found: &mut PrefixMatch) {
        caches.match_ahead(&CoreRequest { chain, ..self.request }, found);
    }
}

/// A placed request. Dropping it aborts the request.
pub struct Placed {
    decision: CoreDecision,
    ticket: CoreTicket,
    prompt_tokens: u32,
    name: Arc<str>,
    next: Option<Arc<str>>,
    fetch: Option<FetchRange>,
    seen: Option<Box<Shadow>>,
    /// Whether further decisions about the request are long.
    long: bool,
}

/// Result of a request of a batch.
type Outcome = std::result::Result<Placed, CoreError>;

/// Returns the requests of a batch.
///
/// # Errors
/// `BadValue` for an element that is not a request, with its position.
pub fn given<'py>(requests: &Bound<'py, PyAny>) -> Result<Vec<Bound<'py, Request>>> {
    let named =
        |(position, each): (usize, PyResult<_>)| request::given(each?, &format!("requests[{position}]"));
    requests.try_iter()?.enumerate().map(named).collect()
}

/// Returns the arrivals of `count` requests.
///
/// # Errors
/// `BadValue` if their number differs.
pub fn arrivals_of<'a>(
    count: usize,
    arrivals: Option<&'a [Option<Bound<'_, Arrival>>]>,
) -> Result<Vec<Option<&'a Arrival>>> {
    let Some(arrivals) = arrivals else { return Ok(vec![None; count]) };
    if arrivals.len() != count {
        return Err(CoreError::BadValue {
            what: "arrivals".into(),
            got: format!("{} of {count} requests", arrivals.len()),
            expected: "an arrival or None for each request".into(),
        }
        .into());
    }
    Ok(arrivals.iter().map(|arrival| arrival.as_ref().map(|arrival| arrival.get())).collect())
}

/// Adds the position of a request to its error.
pub fn at(position: usize, error: CoreError) -> CoreError {
    match error {
        CoreError::BadValue { what, got, expected } => {
            CoreError::BadValue { what: format!("requests[{position}]: {what}"), got, expected }
        }
        other => other,
    }
}

impl Router {
    /// Returns about how many nanoseconds a decision takes.
    fn decision_ns(&self, blocks: usize) -> usize {
        DECISION_NS + NS_PER_INSTANCE * self.slots.load(Ordering::Relaxed) + NS_PER_BLOCK * blocks
    }

    /// Returns whether a decision releases the interpreter lock: it is long, and no policy needs
    /// that lock.
    fn is_long(&self, blocks: usize) -> bool {
        self.decision_ns(blocks) > LONG_NS && !self.calls_python.load(Ordering::Relaxed)
    }

    /// Calls `with` while holding the router, for a decision about a prompt of `blocks` blocks. A
    /// long decision runs without the interpreter lock.
    pub fn decide<T: Send>(
        &self,
        py: Python<'_>,
        blocks: usize,
        with: impl FnOnce(&mut CoreRouter) -> Result<T> + Send,
    ) -> Result<T> {
        if self.is_long(blocks) {
            with_router_detached(&self.shared, py, with)
        } else {
            with_router(&self.shared, py, with)
        }
    }

    /// Calls `with` with the core's request.
    pub fn with_request<T>(
        &self,
        py: Python<'_>,
        request: &Request,
        with: impl FnOnce(CoreRequest<'_>) -> Result<T>,
    ) -> Result<T> {
        let (request, prompt) = request.core(py, &self.feed.keys())?;
        self.with_chain(|chain| {
            prompt.hash(py, chain);
            with(CoreRequest { chain, ..request })
        })
    }

    /// Calls `with` with a buffer for a chain.
    pub fn with_chain<T>(&self, with: impl FnOnce(&mut Vec<u64>) -> T) -> T {
        let mut chain = self.spare_chain();
        let result = with(&mut chain);
        self.keep_chains([chain]);
        result
    }

    fn spare_chain(&self) -> Vec<u64> {
        self.chains.lock().pop().unwrap_or_default()
    }

    fn keep_chains(&self, chains: impl IntoIterator<Item = Vec<u64>>) {
        let mut kept = self.chains.lock();
        let room = CHAINS_KEPT.saturating_sub(kept.len());
        // An arrival has taken the buffer of a chain without capacity.
        kept.extend(chains.into_iter().filter(|chain| chain.capacity() > 0).take(room));
    }

    /// Places a request. Hashes its prompt, unless its arrival did so, and matches it, before it
    /// takes the router.
    pub fn route_one(&self, py: Python<'_>, asked: &Asked<'_>, now: Option<f64>) -> Result<Placed> {
        let mut chain = asked.take_chain().unwrap_or_else(|| {
            let mut chain = self.spare_chain();
            asked.prompt.hash(py, &mut chain);
            chain
        });
        // A policy function that routes within this call gets a new buffer.
        let mut found = FOUND.take();
        if !asked.is_matched() {
            let caches = self.shared.caches();
            let free = if self.is_long(chain.len()) { None } else { caches.try_read() };
            match free {
                Some(caches) => asked.find_prefixes(&chain, &caches, &mut found),
                None => py.detach(|| asked.find_prefixes(&chain, &caches.read(), &mut found)),
            }
        }
        let placed = self.decide(py, chain.len(), |router| {
            let now = self.clock.now(now, router)?;
            Ok(self.place(router, asked, &mut chain, &mut found, now)?)
        });
        FOUND.set(found);
        self.keep_chains([chain]);
        placed
    }

    /// Places a request whose prompt has the chain `chain`. `chain` gets another buffer. `found`:
    /// the match of its prompt, if there is one.
    fn place(
        &self,
        router: &mut CoreRouter,
        asked: &Asked<'_>,
        chain: &mut Vec<u64>,
        found: &mut PrefixMatch,
        now: f64,
    ) -> Outcome {
        // Last: an error before keeps the arrival for its handle, one after ends it.
        let arrival = asked.arrival.map(Arrival::take).transpose()?;
        let request = CoreRequest { arrival, ..asked.request };
        let long = self.is_long(chain.len());
        let decision = router.route_matched(&request, chain, found, asked.id, now)?;
        let named = |segment: Segment| router.fleet().name(segment.instance).clone();
        let seen =
            if request.shadow { router.record(decision.id).and_then(|r| r.shadow.clone()) } else { None };
        Ok(Placed {
            ticket: self.shared.ticket(&decision),
            prompt_tokens: request.prompt_tokens,
            name: named(decision.segment),
            next: decision.next.map(named),
            fetch: decision.fetch.map(|fetch| fetch_range(router, fetch)),
            seen,
            decision,
            long,
        })
    }

    /// Wraps a placed request for Python.
    pub fn to_python(&self, placed: Placed) -> (Decision, Ticket) {
        let Placed { decision, ticket, prompt_tokens, name, next, fetch, seen, long } = placed;
        let segment = decision.segment;
        (
            Decision::new(&decision, prompt_tokens, name.clone(), next, fetch, seen, self.shared.clone()),
            Ticket::new(ticket, segment, name, self.clock, long),
        )
    }

    /// Places the requests of a batch, in order. Hashes their prompts before it takes the router;
    /// arrays are pinned. Single decisions go first.
    pub fn decide_each(&self, batch: &[Asked<'_>], now: Option<f64>) -> Result<Vec<Outcome>> {
        let mut chains = vec![Vec::new(); batch.len()];
        let mut placed = Vec::with_capacity(batch.len());
        let mut spare = std::mem::take(&mut *self.chains.lock());
        let mut found: Vec<PrefixMatch> = (0..PIECE).map(|_| PrefixMatch::default()).collect();
        let (mut hashed, mut matched) = (0, 0);
        while placed.len() < batch.len() {
            let from = placed.len();
            if from == hashed {
                hashed = batch.len().min(from + PIECE);
                for (asked, chain) in batch[from..hashed].iter().zip(&mut chains[from..hashed]) {
                    *chain = spare.pop().unwrap_or_default();
                    chain.clear();
                    asked.prompt.hash_detached(chain);
                }
                for ((asked, chain), found) in
                    batch[from..hashed].iter().zip(&chains[from..hashed]).zip(&mut found)
                {
                    if !asked.is_matched() {
                        asked.find_prefixes(chain, &self.shared.caches().read(), found);
                    }
                }
                matched = from;
            }
            {
                let mut router = self.shared.lock_behind();
                self.shared.check()?;
                let begun = Instant::now();
                let pieces = batch[from..hashed].iter().zip(&mut chains[from..hashed]);
                for ((asked, chain), found) in pieces.zip(&mut found[from - matched..]) {
                    let now = match now {
                        // Checked by the first decision.
                        Some(now) if !placed.is_empty() => now,
                        _ => self.clock.now(now, &router)?,
                    };
                    placed.push(self.place(&mut router, asked, chain, found, now));
                    if self.shared.decision_waits() || begun.elapsed() > HOLD {
                        break;
                    }
                }
            }
            spare.extend(chains[from..placed.len()].iter_mut().map(std::mem::take));
        }
        self.keep_chains(spare);
        Ok(placed)
    }
}

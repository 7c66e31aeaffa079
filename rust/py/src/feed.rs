//! `EventFeed`: the engines' own events in Python.
use crate::errors::Result;
use crate::router::Router;
use lmetric_feed::status::Status;
use lmetric_feed::{EventFeed as CoreFeed, Subscription};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Adds the class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EventFeed>()
}

/// Listens to engines' KV cache events over ZMQ (vLLM, SGLang and whoever publishes as they do) and applies them to a router's
/// index, on a thread of its own that never needs the interpreter.
///
/// Batches are kept in order by their numbers; what was missed is asked for again where the engine replays, and where it cannot be
/// had, what was known is forgotten and the state is `"incomplete"`. Silence is no sign of anything: engines publish
/// only when they run a step. Only instances whose index feed is `"exact"` learn (`Router.set_index_feed`). Threads may share it.
#[pyclass(frozen, module = "lmetric")]
pub struct EventFeed {
    feed: CoreFeed,
    router: Py<Router>,
}

#[pymethods]
impl EventFeed {
    #[new]
    fn new(router: Bound<'_, Router>) -> Result<EventFeed> {
        let clock = router.get().clock();
        let feed = CoreFeed::start(router.get().feed().clone(), move || clock.read())?;
        Ok(EventFeed { feed, router: router.unbind() })
    }

    /// The router that it feeds.
    #[getter]
    fn router(&self, py: Python<'_>) -> Py<Router> {
        self.router.clone_ref(py)
    }

    /// Listens to the events of one data-parallel `rank` of an instance.
    ///
    /// `endpoint`: where that rank publishes (`rank_endpoint` makes it of the engine's); with `bind`, the address where the router waits for
    /// engines to connect (vLLM connects where its endpoint has no wildcard), several of them told apart by `topic`. `topic`: what its
    /// messages carry, empty for any; others are counted and shown. `replay_endpoint`: where past batches can be asked for.
    /// `block_size`: the engine's, where known, which must be the router's.
    ///
    /// Raises `UnknownNameError` (instance), `BadValueError` (address, block size, a second subscription of the rank, a topic that is taken).
    #[pyo3(signature = (instance, endpoint, *, replay_endpoint=None, topic="", bind=false, rank=0, block_size=None))]
    fn subscribe(
        &self,
        py: Python<'_>,
        instance: &str,
        endpoint: &str,
        replay_endpoint: Option<String>,
        topic: &str,
        bind: bool,
        rank: u32,
        block_size: Option<usize>,
    ) -> Result<()> {
        let own = self.router.get().feed().keys().block_size;
        if let Some(size) = block_size.filter(|size| *size != own) {
            return Err(lmetric_core::CoreError::BadValue {
                what: format!("block_size of {instance}"),
                got: size.to_string(),
                expected: format!("{own}, the router's: blocks of another size never match"),
            }
            .into());
        }
        let (endpoint, topic) = (endpoint.to_string(), topic.to_string());
        let subscription = Subscription { endpoint, replay_endpoint, topic, bind, rank, load: false };
        Ok(py.detach(|| self.feed.subscribe(instance, subscription))?)
    }

    /// Listens to the load reports that SGLang pushes (`LoadStat`), which reach the router as `engine_report` does.
    /// Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (instance, endpoint, *, topic=""))]
    fn subscribe_load(&self, py: Python<'_>, instance: &str, endpoint: &str, topic: &str) -> Result<()> {
        let (endpoint, topic) = (endpoint.to_string(), topic.to_string());
        let subscription = Subscription { endpoint, topic, load: true, ..Subscription::default() };
        Ok(py.detach(|| self.feed.subscribe(instance, subscription))?)
    }

    /// Stops listening to an instance, all ranks and its load; what its events told is forgotten. False: there was no subscription.
    fn unsubscribe(&self, py: Python<'_>, instance: &str) -> Result<bool> {
        Ok(py.detach(|| self.feed.unsubscribe(instance))?)
    }

    /// Names of the instances with a subscription.
    fn instances(&self) -> Vec<String> {
        self.feed.instances()
    }

    /// What the ranks of an instance have come to, by rank; empty where there is no subscription.
    ///
    /// `state`: `"connecting"` (no connection, or the first replay is on its way), `"live"` (all that is cached is known) or `"incomplete"` (what was
    /// cached before some moment is not known). Counts since the subscription: `batches`, of which `replayed`; `events`; blocks
    /// `stored` and `removed`; `cleared`; `gaps`, `resyncs` (all forgotten, since batches were lost), `restarts`, `unanswered` (replays);
    /// `unknown_parent`, `unknown_removed` (blocks); `skipped` (by reason), `tiers` (blocks held beside the GPU, by medium).
    /// `least_delay_seconds`: of batches as they were published, from the engine's time in them to their coming by this machine's clock.
    fn status<'py>(&self, py: Python<'py>, instance: &str) -> Result<Bound<'py, PyDict>> {
        let ranks = PyDict::new(py);
        for status in self.feed.status(instance).iter().filter(|s| !s.load) {
            ranks.set_item(status.rank, self.dict(py, status)?)?;
        }
        Ok(ranks)
    }

    /// What the load reports of an instance have come to; None where they are not subscribed to. Keys as in `status`.
    fn load_status<'py>(&self, py: Python<'py>, instance: &str) -> Result<Option<Bound<'py, PyDict>>> {
        let all = self.feed.status(instance);
        all.iter().find(|s| s.load).map(|status| self.dict(py, status)).transpose()
    }

    /// Ends the thread and closes all sockets. What the index holds stays.
    fn close(&self, py: Python<'_>) {
        py.detach(|| self.feed.close());
    }

    fn __enter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, pyo3::types::PyTuple>) {
        self.close(py);
    }

    /// The address of a data-parallel rank, given the engine's: vLLM and SGLang add the rank to the port. Raises `BadValueError`.
    #[staticmethod]
    fn rank_endpoint(endpoint: &str, rank: u32) -> Result<String> {
        Ok(lmetric_feed::rank_endpoint(endpoint, rank)?)
    }
}

impl EventFeed {
    fn dict<'py>(&self, py: Python<'py>, status: &Status) -> Result<Bound<'py, PyDict>> {
        let (counts, tally) = (&status.counts, &status.tally);
        let dict = PyDict::new(py);
        dict.set_item("state", status.standing.name())?;
        for (name, value) in [
            ("endpoint", Some(&status.endpoint)),
            ("replay_endpoint", status.replay_endpoint.as_ref()),
            ("topic", Some(&status.topic)),
            ("other_topic", status.other_topic.as_ref()),
            ("last_error", tally.last_error.as_ref()),
        ] {
            dict.set_item(name, value)?;
        }
        dict.set_item("bind", status.bound)?;
        dict.set_item("connected", status.connected)?;
        for (name, value) in [
            ("connections", status.connections),
            ("messages", status.messages),
            ("batches", counts.batches),
            ("replayed", counts.replayed),
            ("gaps", counts.gaps),
            ("resyncs", counts.resyncs),
            ("restarts", counts.restarts),
            ("unanswered", counts.unanswered),
            ("events", tally.events),
            ("blocks_stored", tally.blocks_stored),
            ("blocks_removed", tally.blocks_removed),
            ("cleared", tally.cleared),
            ("unknown_parent", tally.unknown_parent),
            ("unknown_removed", tally.unknown_removed),
        ] {
            dict.set_item(name, value)?;
        }
        let (skipped, tiers) = (PyDict::new(py), PyDict::new(py));
        tally.skipped.iter().try_for_each(|(reason, count)| skipped.set_item(reason, count))?;
        tally.tiers.iter().try_for_each(|(tier, blocks)| tiers.set_item(tier, blocks))?;
        dict.set_item("skipped", skipped)?;
        dict.set_item("tiers", tiers)?;
        dict.set_item("last_sequence", status.last_sequence)?;
        let now = self.router.get().clock().read();
        let age = status.last_message_at.map(|at| (now - at).max(0.0));
        dict.set_item("last_batch_age_seconds", age)?;
        dict.set_item("least_delay_seconds", status.least_delay_seconds)?;
        dict.set_item("block_size", tally.block_size)?;
        dict.set_item("reported_rank", tally.reported_rank)?;
        Ok(dict)
    }
}

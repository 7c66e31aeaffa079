//! `EventFeed`: the engines' KV cache events in Python.
use crate::errors::Result;
use crate::router::Router;
use lmetric_feed::status::Status;
use lmetric_feed::{EventFeed as CoreFeed, Subscription, fork};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

/// Adds the class to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<EventFeed>()
}

/// Makes forks of this process wait while feeds work, from the first feed on.
fn follow_forks(py: Python<'_>) -> PyResult<()> {
    static FOLLOWED: PyOnceLock<()> = PyOnceLock::new();
    FOLLOWED
        .get_or_try_init(py, || {
            let steps = PyDict::new(py);
            // Detached: a feed may wait for a router whose policy needs the interpreter.
            let function = |work: fn()| {
                PyCFunction::new_closure(
                    py,
                    None,
                    None,
                    move |args: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| args.py().detach(work),
                )
            };
            steps.set_item("before", function(fork::begin)?)?;
            steps.set_item("after_in_parent", function(fork::end)?)?;
            steps.set_item("after_in_child", function(fork::end)?)?;
            py.import("os")?.call_method("register_at_fork", (), Some(&steps)).map(drop)
        })
        .map(drop)
}

/// Subscribes to engines' KV cache events over ZMQ (vLLM, SGLang and compatible publishers) and
/// applies them to a router's index. The feed runs on a thread of its own that never needs the
/// interpreter.
///
/// Batches are applied in the order of their sequence numbers. The feed requests a replay of missed
/// batches. If the engine cannot replay them, the feed drops its blocks of that engine and its
/// state becomes `"incomplete"`. Silence has no meaning: engines publish only when they run a step.
/// Only instances with `kv_source="exact"` learn (`Router.update_instance`). Threads may share a
/// feed. A child process has no thread of its parent: there, a feed from before the fork refuses
/// calls, and `problem` says so. Start a feed after the fork.
#[pyclass(frozen, module = "lmetric")]
pub struct EventFeed {
    feed: CoreFeed,
    router: Py<Router>,
}

#[pymethods]
impl EventFeed {
    /// Maximum bytes of received events that wait for one subscription.
    #[classattr]
    const MAX_SOURCE_BYTES: usize = lmetric_feed::source::MAX_SOURCE_BYTES;

    /// Maximum size of a message in bytes. A larger message ends its connection.
    #[classattr]
    const MAX_MESSAGE_BYTES: usize = lmetric_feed::zmtp::MAX_MESSAGE_BYTES;

    #[new]
    fn new(router: Bound<'_, Router>) -> Result<EventFeed> {
        follow_forks(router.py())?;
        let clock = router.get().clock();
        let feed = CoreFeed::start(router.get().feed().clone(), move || clock.read())?;
        Ok(EventFeed { feed, router: router.unbind() })
    }

    /// The router that receives the events.
    #[getter]
    fn router(&self, py: Python<'_>) -> Py<Router> {
        self.router.clone_ref(py)
    }

    /// Subscribes to the events of one data-parallel `rank` of an instance.
    ///
    /// - `endpoint`: the address at which that rank publishes (`rank_endpoint` makes it of the
    ///   engine's). With `bind`: the router's address, to which engines connect (vLLM connects if
    ///   its endpoint has no wildcard). Several engines may share it if their topics differ.
    /// - `topic`: the topic of its messages; empty: any topic. Messages with other topics are
    ///   counted and reported in `status`.
    /// - `replay_endpoint`: the address that replays past batches.
    /// - `block_size`: the engine's block size, if known; it must equal the router's.
    ///
    /// Raises `UnknownNameError` (instance). Raises `BadValueError` for the address, the block
    /// size, a second subscription of the rank, or a topic that is taken.
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

    /// Subscribes to the load reports that SGLang pushes (`LoadStat`). They reach the router as
    /// `Router.report_load` does. Raises `UnknownNameError`, `BadValueError`.
    #[pyo3(signature = (instance, endpoint, *, topic=""))]
    fn subscribe_load(&self, py: Python<'_>, instance: &str, endpoint: &str, topic: &str) -> Result<()> {
        let (endpoint, topic) = (endpoint.to_string(), topic.to_string());
        let subscription = Subscription { endpoint, topic, load: true, ..Subscription::default() };
        Ok(py.detach(|| self.feed.subscribe(instance, subscription))?)
    }

    /// Ends the subscriptions of an instance, all ranks and its load, and drops the blocks learned
    /// from its events. Returns False if there was no subscription.
    fn unsubscribe(&self, py: Python<'_>, instance: &str) -> Result<bool> {
        Ok(py.detach(|| self.feed.unsubscribe(instance))?)
    }

    /// Drops the blocks of these instances, whose engines have new weights. Later events that were
    /// made before this call do not count. Engine clocks may differ from this machine's: the feed
    /// knows the shortest delay of each engine's batches. `status` counts the blocks of such events
    /// under `skipped`, `old_weights`.
    fn begin_new_weights(&self, py: Python<'_>, instances: Vec<String>) -> Result<()> {
        Ok(py.detach(|| self.feed.begin_new_weights(instances))?)
    }

    /// The problem of the feed's thread, if it has failed, hangs, or is in the process that has
    /// forked this one: then no events are applied.
    #[getter]
    fn problem(&self) -> Option<String> {
        self.feed.problem()
    }

    /// Names of the instances with a subscription.
    fn instances(&self) -> Vec<String> {
        self.feed.instances()
    }

    /// Returns the state of an instance's subscriptions by rank; empty if there is no subscription.
    ///
    /// - `state`: `"connecting"` (no connection, or the first replay is on its way), `"live"` (all
    ///   cached blocks are known) or `"incomplete"` (blocks cached before some moment are unknown).
    /// - Counts since the subscription: `batches`, `replayed` (batches), `events`, `loads`
    ///   (load events, each in a batch of its own), `blocks_stored`,
    ///   `blocks_removed`, `cleared`, `gaps`, `resyncs` (all blocks dropped, since batches were
    ///   lost), `restarts`, `unanswered` (replays), `unknown_parent` and `unknown_removed`
    ///   (blocks).
    /// - `skipped`: counts by reason. `tiers`: blocks held outside the GPU, by medium. `hints`:
    ///   media with stored blocks and without any removal, whose blocks may be gone. `groups`: KV
    ///   cache groups apart from full attention (windows, states); `group_blocks`: their blocks,
    ///   stored or removed. `session_blocks`: blocks stored with the session of their request.
    /// - `over_limit`: the limit that the source has exceeded (size of a message, work of a batch),
    ///   while the feed ignores it: for a minute, doubled each time, at most an hour. Else None.
    /// - `min_delay_seconds`: least time from a batch's timestamp (engine's clock) to its arrival
    ///   (this machine's clock), without replayed batches.
    fn status<'py>(&self, py: Python<'py>, instance: &str) -> Result<Bound<'py, PyDict>> {
        let ranks = PyDict::new(py);
        for status in self.feed.status(instance).iter().filter(|s| !s.load) {
            ranks.set_item(status.rank, self.dict(py, status)?)?;
        }
        Ok(ranks)
    }

    /// Returns the state of an instance's load subscription, with the keys of `status`; None if
    /// there is no subscription.
    fn load_status<'py>(&self, py: Python<'py>, instance: &str) -> Result<Option<Bound<'py, PyDict>>> {
        let all = self.feed.status(instance);
        all.iter().find(|s| s.load).map(|status| self.dict(py, status)).transpose()
    }

    /// Ends the thread and closes all sockets. The index keeps its blocks.
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

    /// Returns the address of a data-parallel rank, given the engine's: vLLM and SGLang add the
    /// rank to the port. Raises `BadValueError`.
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
            ("over_limit", status.over_limit.as_ref()),
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
            ("loads", tally.loads),
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
        dict.set_item("groups", tally.groups)?;
        dict.set_item("session_blocks", tally.session_blocks)?;
        dict.set_item("group_blocks", tally.group_blocks)?;
        dict.set_item("hints", tally.hints.iter().collect::<Vec<_>>())?;
        dict.set_item("last_sequence", status.last_sequence)?;
        let now = self.router.get().clock().read();
        let age = status.last_message_at.map(|at| (now - at).max(0.0));
        dict.set_item("last_batch_age_seconds", age)?;
        dict.set_item("min_delay_seconds", status.min_delay_seconds)?;
        dict.set_item("block_size", tally.block_size)?;
        dict.set_item("reported_rank", tally.reported_rank)?;
        Ok(dict)
    }
}

"""Forked processes: the core's threads do not exist in a child, and no call may wait for them."""

from __future__ import annotations

import subprocess
import sys

from waiting import PATIENCE_SECONDS

# `child` runs a function in a child process, and prints what it returns or raises.
_CHILD = """
import os, sys
import lmetric as lm
from lmetric._core import EventFeed

def child(work):
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            print(work())
        except lm.LmetricError as error:
            print(type(error).__name__, error)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def _run(script: str) -> list[str]:
    """Runs a script in another process, which must end. Returns its lines."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _CHILD + script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_feed_refuses_calls_in_a_child() -> None:
    lines = _run("""
router = lm.Router(kv_source="exact", block_size=16)
router.add_instance("e0")
feed = EventFeed(router)
feed.subscribe("e0", "tcp://127.0.0.1:9")
child(lambda: feed.problem)
child(lambda: feed.subscribe("e0", "tcp://127.0.0.1:9", rank=1))
child(lambda: feed.subscribe_load("e0", "tcp://127.0.0.1:9"))
child(lambda: feed.unsubscribe("e0"))
child(lambda: feed.begin_new_weights(["e0"]))
child(lambda: (feed.status("e0")[0]["state"], feed.status("e0")[0]["last_error"]))
child(lambda: (feed.close(), feed.instances())[1])

def another():
    own = EventFeed(router)
    own.subscribe("e0", "tcp://127.0.0.1:9")
    return own.problem, own.unsubscribe("e0")

child(another)
print(feed.problem, feed.unsubscribe("e0"))  # the parent's feed goes on
print(os.getpid())
""")
    problem = (
        f"the feed's thread is in process {lines[-1]}, which has forked this one: start a feed after the fork"
    )
    refused = f"BadValueError event feed: {problem} is not valid; expected one whose thread runs"
    assert lines[:-1] == [
        problem,
        *[refused] * 4,
        f"('incomplete', {problem!r})",
        "['e0']",
        "(None, True)",
        "None True",
    ]


def test_a_fork_leaves_no_cache_locked() -> None:
    """A child routes, although the feed's thread applied events when the process was forked."""
    lines = _run("""
import threading, time
import msgpack, zmq

router = lm.Router(kv_source="exact", block_size=16)
router.add_instance("e0")
publisher = zmq.Context().socket(zmq.XPUB)
port = publisher.bind_to_random_port("tcp://127.0.0.1")
feed = EventFeed(router)
feed.subscribe("e0", f"tcp://127.0.0.1:{port}")
publisher.recv()
BLOCKS = 4000  # a batch takes milliseconds
tokens = list(range(16 * BLOCKS))
event = {"type": "BlockStored", "block_hashes": list(range(1, BLOCKS + 1)), "parent_block_hash": None,
         "token_ids": tokens, "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None}
clear = {"type": "AllBlocksCleared"}
ended = threading.Event()

def publish():
    number = 0
    while not ended.is_set():
        payload = msgpack.packb([time.time(), [clear, event], 0])
        publisher.send_multipart((b"", number.to_bytes(8, "big"), payload))
        number += 1
        ended.wait(0.002)

thread = threading.Thread(target=publish)
thread.start()
request = lm.Request(token_ids=tokens[:160])

def route():
    router.route(request)[1].done()
    router.blocks_cleared("e0")

while feed.status("e0")[0]["batches"] < 3:
    time.sleep(0.01)
try:
    for _ in range(40):
        if (pid := os.fork()) == 0:
            route()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
finally:
    ended.set()
thread.join()
print(feed.status("e0")[0]["blocks_stored"] > 0, feed.problem)
os._exit(0 if not sys.stdout.flush() else 1)
""")
    assert lines == ["True None"]


def test_a_policy_is_stopped_in_a_child() -> None:
    """The thread that stops policies runs in the parent; a child starts its own."""
    lines = _run("""
def forever(bs):
    while True:
        pass

def fallbacks():
    router.route(lm.Request(token_ids=[1]))[1].done()
    return router.policy_fallbacks()["overruns"]

router = lm.Router(lm.policy_function(forever, fallback="bs", time_limit_seconds=0.002))
router.add_instance("e0")
print(fallbacks())
child(fallbacks)
""")
    assert lines == ["1", "2"]


def test_forks_wait_for_a_feed_that_waits_for_a_policy() -> None:
    """The policy gives up the interpreter while its call holds the router."""
    lines = _run("""
import threading, time

def slow(bs):
    time.sleep(0.002)
    return bs

router = lm.Router(lm.policy_function(slow), kv_source="exact", block_size=16)
router.add_instance("e0")
feed = EventFeed(router)
ended = threading.Event()

def subscribe():
    while not ended.is_set():
        feed.subscribe("e0", "tcp://127.0.0.1:9")
        feed.unsubscribe("e0")

def route():
    request = lm.Request(token_ids=list(range(160)))
    while not ended.is_set():
        router.route(request)[1].done()

threads = [threading.Thread(target=work) for work in (subscribe, route)]
for thread in threads:
    thread.start()
try:
    for _ in range(20):
        child(lambda: "child")
        time.sleep(0.001)
finally:
    ended.set()
for thread in threads:
    thread.join()
""")
    assert lines == ["child"] * 20


def test_two_threads_fork_beside_a_feed() -> None:
    """Another step before forks gives up the interpreter."""
    lines = _run("""
import threading, time
os.register_at_fork(before=lambda: time.sleep(0.001))
router = lm.Router(kv_source="exact", block_size=16)
feed = EventFeed(router)

def forks():
    for _ in range(20):
        if (pid := os.fork()) == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0

threads = [threading.Thread(target=forks) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ended")
""")
    assert lines == ["ended"]

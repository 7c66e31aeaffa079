"""Defects that a review of the core found, each where a program that embeds the router meets it."""

import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lmetric as lm
from lmetric import _core
from load_messages import message
from server_world import world

ROOT = Path(__file__).resolve().parent.parent
TOKENS = np.arange(4096, dtype=np.uint32)
DAY = 86400.0


def fleet(policy: object = "lmetric", n: int = 3, role: str = "both", **settings: Any) -> _core.Router:
    router = _core.Router(policy, **settings)  # type: ignore[arg-type]
    for i in range(n):
        router.add_instance(f"e{i}", role=role)
    return router


def policy(function: Callable[[dict[str, Any]], Any]) -> Any:
    """A policy of that function over `bs`."""
    return lm.policy_function(function, reads=["bs"])


def told(router: _core.Router, decision: _core.Decision) -> dict[str, Any]:
    record = router.explain(decision.id)
    assert record is not None
    return record


def test_terms_belong_to_the_choice_that_they_explain() -> None:
    """Rust B1: choosing the decode instance does not overwrite the terms of the first choice."""
    router = _core.Router("bs + instances", decode_policy="bs + instances")
    router.add_instance("p", role="prefill")
    for name in ("d0", "d1", "d2"):
        router.add_instance(name, role="decode")
    decision, _ticket = router.route(lm.Request(prompt_tokens=1000))
    record = told(router, decision)
    assert record["decode_instance"] in ("d0", "d1", "d2")
    assert record["best"] == [{"instance": "p", "score": 1.0, "terms": {"bs": 0.0, "instances": 1.0}}]
    assert record["decode_score"] == 3.0


def test_a_second_segment_counts_the_instances_that_may_take_it() -> None:
    """Rust B2: in a fleet of `both`, a decode score dividing by `instances` scores the others."""
    router = fleet(decode_policy="bs / instances")
    router.configure(split=lm.SplitAt(fraction=0.5))
    decision, _ticket = router.route(lm.Request(prompt_tokens=1000, max_tokens=100))
    record = told(router, decision)
    assert record["split_reason"] is None
    assert record["cuts"] == [550]
    assert record["decode_instance"] not in (None, decision.instance)


def test_decode_instances_that_take_whole_requests_are_counted() -> None:
    """Rust B2: `instances` is not 0 where decode instances take whole requests."""
    router = fleet("bs / instances", role="decode")
    decision, _ticket = router.route(lm.Request(prompt_tokens=1000))
    assert told(router, decision)["best"][0]["terms"]["instances"] == 3


def test_an_engine_that_returns_under_its_name_has_its_score() -> None:
    """Rust B3: a free slot that had the name of a live instance does not hide its score."""
    router = fleet()
    router.remove_instance("e1")
    router.remove_instance("e0")
    assert router.add_instance("e1") == 0  # another slot than before
    decision, _ticket = router.route(lm.Request(prompt_tokens=1000))
    best = told(router, decision)["best"]
    assert {each["instance"] for each in best} == {"e1", "e2"}
    assert all(each["score"] is not None for each in best)


CALLS: dict[str, Callable[[_core.Router, _core.Ticket, float], object]] = {
    "route": lambda router, _, now: router.route(lm.Request(token_ids=TOKENS), now=now),
    "route_many": lambda router, _, now: router.route_many([lm.Request(token_ids=TOKENS)], now=now),
    "score": lambda router, _, now: router.score(lm.Request(token_ids=TOKENS), now=now),
    "score_batch": lambda router, _, now: router.score_batch([lm.Request(TOKENS)], now=now),
    "report_load": lambda router, _, now: router.report_load("e0", waiting=1, now=now),
    "enter_load": lambda router, _, now: router.enter_load(1 << 40, 0, now=now),
    "encode_load": lambda router, _, now: lm.encode_load("ab", 1, None, [("m", router)], now=now),
    "import_load": lambda router, _, now: router.import_load(lm.LoadMessage(message()), "m", now=now),
    "expire_peers": lambda router, _, now: router.expire_peers(5.0, now=now),
    "indicators": lambda router, _, now: router.indicators(now=now),
    "tick": lambda router, _, now: router.tick(now=now),
    "first_token": lambda _, ticket, now: ticket.first_token(now=now),
    "begin_migration": lambda _, ticket, now: ticket.begin_migration("e1", now=now),
    "choose_failover": lambda _, ticket, now: ticket.choose_failover(now=now),
    "cancel_migration": lambda _, ticket, now: ticket.cancel_migration(now=now),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_time_of_another_clock_is_refused(call: str) -> None:
    """Rust B5: `now=time.time()` raises, and leaves the router's time as it was before the call."""
    router = fleet()
    started = time.monotonic()
    first, ticket = router.route(lm.Request(token_ids=TOKENS))
    with pytest.raises(lm.BadValueError, match=r"^now: .*within a day of time\.monotonic\(\)"):
        CALLS[call](router, ticket, time.time())
    decision, _held = router.route(lm.Request(token_ids=TOKENS))
    # Both times are of the core's clock, which differs from Python's by some microseconds.
    passed = told(router, decision)["at_seconds"] - told(router, first)["at_seconds"]
    assert 0 <= passed <= time.monotonic() - started


def test_a_clock_of_the_programs_own_is_taken_until_it_jumps() -> None:
    """Rust B5: a program may count from 0, but not jump by more than a day."""
    router = fleet()
    for now in (0.0, 5.0, 5.0 + 0.9 * DAY):
        decision, _ticket = router.route(lm.Request(token_ids=TOKENS), now=now)
        assert told(router, decision)["at_seconds"] == now
    with pytest.raises(lm.BadValueError, match="within a day"):
        router.route(lm.Request(token_ids=TOKENS), now=time.monotonic() + 10 * DAY)
    with pytest.raises(lm.BadValueError, match="within a day"):
        router.route(lm.Request(token_ids=TOKENS), now=min(0.0, time.monotonic() - 10 * DAY))


def test_the_module_asks_for_the_interpreter_lock() -> None:
    """Rust B6: a build for a free-threaded interpreter declares that it needs the lock."""
    assert "#[pymodule(gil_used = true)]" in (ROOT / "rust/py/src/lib.rs").read_text()


def test_a_decision_goes_between_the_prompts_of_a_batch() -> None:
    """Rust B7: `score_batch` lets the router go between two prompts."""
    calls: list[int] = []
    begun = threading.Event()

    @policy
    def scores(columns: dict[str, Any]) -> Any:
        calls.append(threading.get_ident())
        begun.set()
        time.sleep(0.001)  # the interpreter lock is free meanwhile, the router is not
        return columns["bs"]

    router = fleet(scores)
    prompts = 300
    requests = [lm.Request(prompt_tokens=10)] * prompts
    batch = threading.Thread(target=lambda: router.score_batch(requests))
    batch.start()
    begun.wait()
    router.route(lm.Request(prompt_tokens=10))
    batch.join()
    assert len(calls) == prompts + 1
    assert calls.index(threading.get_ident()) < prompts / 2


def test_a_batch_has_a_column_for_each_instance_of_its_start() -> None:
    """Rust B7: instances added or removed between the prompts of a batch leave its shape alone."""
    begun, changed = threading.Event(), threading.Event()

    @policy
    def scores(columns: dict[str, Any]) -> Any:
        begun.set()
        time.sleep(0.001)
        return columns["bs"] + 1

    router = fleet(scores)

    def change() -> None:
        begun.wait()
        router.remove_instance("e1")
        router.add_instance("new")
        changed.set()

    changing = threading.Thread(target=change)
    changing.start()
    prompts = 400
    rows = router.score_batch([lm.Request(prompt_tokens=10)] * prompts)
    changing.join()
    assert changed.is_set()
    assert rows.shape == (prompts, 3)
    assert np.all(rows[:, [0, 2]] == 1)
    assert rows[0, 1] == 1
    assert np.isnan(rows[-1, 1])  # e1 is gone, and another instance in its slot is not e1


def run(program: str) -> str:
    """Runs a program in a process of its own and returns its output; ends it after 60 s."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", ["stats()", "indicators()", "explain(1)"])
def test_results_are_built_while_the_router_is_free(call: str) -> None:
    """Rust B8: the dictionaries of `stats` are built after the lock, so other code may run."""
    printed = run(f"""
        import gc
        import lmetric as lm
        router = lm.Router()
        for i in range(50):
            router.add_instance(f"e{{i}}")
        decision, ticket = router.route(lm.Request(prompt_tokens=100))
        seen = []
        def collected(phase, info):
            seen.append(router.in_flight())  # as a finaliser may
        gc.callbacks.append(collected)
        gc.set_threshold(1)
        router.{call}
        gc.collect()
        gc.callbacks.clear()
        print(set(seen))
    """)
    assert printed.strip() == "{1}"


def test_a_policy_function_may_wait_for_another_router() -> None:
    """Rust B10: only the function's own router is refused, not any that happens to be busy."""
    begun, release = threading.Event(), threading.Event()

    @policy
    def holds(columns: dict[str, Any]) -> Any:
        begun.set()
        assert release.wait(60)
        return columns["bs"]

    other = fleet(holds)
    seen: list[int] = []

    @policy
    def asks(columns: dict[str, Any]) -> Any:
        release.set()  # whoever holds the other router needs the interpreter lock to let it go
        seen.append(len(other.instances()))
        return columns["bs"]

    router = fleet(asks)
    holder = threading.Thread(target=lambda: other.score(lm.Request(prompt_tokens=10)))
    holder.start()
    begun.wait()
    router.score(lm.Request(prompt_tokens=10))
    holder.join()
    assert seen == [3]


def test_policy_functions_that_wait_for_each_other_are_refused() -> None:
    """Rust B10: two routers whose functions wait for each other do not stop for good."""
    routers: list[_core.Router] = []
    both = threading.Barrier(2)
    errors: list[lm.LmetricError] = []

    def asking(other: int) -> Any:
        @policy
        def asks(columns: dict[str, Any]) -> Any:
            both.wait(60)
            routers[other].instances()
            return columns["bs"]

        return asks

    routers += [fleet(asking(1)), fleet(asking(0))]

    def score(router: _core.Router) -> None:
        try:
            router.score(lm.Request(prompt_tokens=10))
        except lm.PolicyError as error:
            errors.append(error)

    threads = [threading.Thread(target=score, args=(router,)) for router in routers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors
    assert "stays busy" in str(errors[0])
    assert [len(router.instances()) for router in routers] == [3, 3]


def test_a_policy_function_may_not_feed_or_route_batches() -> None:
    """Rust B10: calls that may wait for the function's own router forever are refused by name."""
    said: list[str] = []

    @policy
    def asks(columns: dict[str, Any]) -> Any:
        for call in (
            lambda: router.blocks_cleared("e0"),
            lambda: router.score_batch([lm.Request(TOKENS)]),
            lambda: router.route_many([lm.Request(TOKENS)]),
            router.instances,
        ):
            with pytest.raises(lm.PolicyError) as refused:
                call()
            said.append(str(refused.value))
        return columns["bs"]

    router = fleet(asks)
    router.score(lm.Request(prompt_tokens=10))
    reasons = ["fed a router's index", "scored a batch", "routed a batch", "its own router"]
    assert [reason in each for reason, each in zip(reasons, said, strict=True)] == [True] * 4


def test_a_retry_says_why_the_request_is_not_cut_now() -> None:
    """Rust B11: the reason of a plan belongs to that plan: after a retry, to the new one."""
    router = fleet(n=2)
    router.configure(split=lm.SplitAt(fraction=0.5))
    decision, ticket = router.route(lm.Request(prompt_tokens=1000, max_tokens=100))
    assert told(router, decision)["split_reason"] is None
    assert ticket.failed("refused") is not None
    record = told(router, decision)
    assert record["cuts"] == []
    assert record["split_reason"] == "no second instance is available"
    # A request that its caller keeps whole keeps the caller's reason.
    decision, ticket = router.route(
        lm.Request(prompt_tokens=1000, allow_split=False, split_reason="it has a seed")
    )
    assert ticket.failed("refused") is not None
    assert told(router, decision)["split_reason"] == "it has a seed"


def test_the_longest_prompt_leaves_room_for_its_answer() -> None:
    """Rust section 6: token positions do not wrap around behind a prompt of 2^32 - 1 tokens."""
    router = fleet(n=2)
    decision, ticket = router.route(lm.Request(prompt_tokens=2**32 - 1, extra_tokens=2**32 - 1))
    assert decision.prompt_tokens == 2**31 - 1
    ticket.sent()
    ticket.first_token()
    ticket.tokens(5)
    ticket.begin_migration("e1" if decision.instance == "e0" else "e0")
    assert ticket.migrated() != decision.instance
    assert ticket.from_token == decision.prompt_tokens + 6


BREAK = """
import lmetric as lm

panic = []

def scores(columns):
    if panic:
        raise panic[0]("as an extension's panic arrives in Python")
    return columns["bs"]

def broken():
    router = lm.Router(lm.policy_function(scores, reads=["bs"]))
    router.add_instance("e")
    decision, ticket = router.route(lm.Request(prompt_tokens=10))
    try:
        lm.Router("bs +")  # the class is made with the first error that passes from Python to Rust
    except lm.LmetricError:
        pass
    for kind in [kind for kind in BaseException.__subclasses__() if kind.__name__ == "PanicException"]:
        panic[:] = [kind]  # each extension has a class of its own
        try:
            router.route(lm.Request(prompt_tokens=10))
        except BaseException:
            pass
    return router, ticket
"""


def test_a_router_whose_state_is_half_changed_says_so() -> None:
    """Rust section 6: after a panic inside a decision, calls raise and do not use wrong counts."""
    printed = run(
        BREAK
        + """
other = lm.Router()
router, ticket = broken()
for call in (router.in_flight, router.stats, ticket.first_token, lambda: router.blocks_cleared("e")):
    try:
        call()
    except lm.LmetricError as error:
        print(error)
del ticket
print(other.in_flight())
"""
    ).splitlines()
    assert len(printed) == 5
    assert all(line.startswith("the router is broken: ") for line in printed[:4])
    assert printed[4] == "0"


async def test_a_server_with_a_broken_router_is_not_alive() -> None:
    """Rust section 6: `/health` fails once a model's router is broken, so that it is restarted."""
    async with world(1) as w:
        assert (await w.get("/health"))[0] == 200
        made: dict[str, Any] = {}
        exec(BREAK, made)
        model = w.server.fleet.models[0]
        sound, (model.router, _) = model.router, made["broken"]()
        status, body = await w.get("/health")
        assert status == 500
        assert b"the router is broken" in body
        model.router = sound

"""`Router.route_many`, and the interpreter lock during decisions."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lmetric as lm


def in_python(p_token: Any, bs: Any) -> Any:
    return p_token * (bs + 1)


def fails(bs: Any) -> Any:
    raise ValueError("no score")


POLICIES: list[Any] = [
    *("lmetric", "total_delay", "power_of_two", "round_robin", "session_affinity"),
    "p_seconds + norm(p_token) - std(kv_hit)",
    in_python,
]


def fleet(policy: Any, rng: random.Random) -> lm.Router:
    """A router with a random fleet and requests in flight; equal for equal states of `rng`."""
    router = lm.Router(policy, seed=rng.randrange(1000), block_size=16)
    for number in range(rng.randrange(1, 90)):
        role = rng.choice(("both", "both", "both", "prefill", "decode"))
        router.add_instance(f"e{number}", role=role, cache_blocks=rng.choice((None, 500)))
        if rng.random() < 0.2:
            router.update_instance(f"e{number}", healthy=False)
    router.add_instance("both")
    for step in range(rng.randrange(60)):
        _, ticket = router.route(request(rng), now=step * 0.01)
        ticket.sent(now=step * 0.01)
        if rng.random() < 0.5:
            ticket.first_token(now=step * 0.01 + 0.005)
        HELD.append(ticket)
    return router


HELD: list[lm.Ticket] = []


@pytest.fixture(autouse=True)
def no_tickets_left() -> Iterator[None]:
    yield
    HELD.clear()


def request(rng: random.Random) -> lm.Request:
    """A request with a prompt of any kind."""
    start, length = rng.randrange(4) * 10_000, rng.randrange(1, 700)
    ids = range(start, start + length)
    prompts: list[dict[str, Any]] = [
        {"token_ids": np.array(ids, np.uint32)},
        {"token_ids": list(ids)},
        {"text": f"{start} " * length},
        {"text": f"{start} ".encode() * length},
        {"block_hashes": [start + n for n in range(length // 16)]},
        {"prompt_tokens": length},
    ]
    return lm.Request(
        **rng.choice(prompts),
        max_tokens=rng.choice((None, 20)),
        session=rng.choice((None, "a", "b")),
        lora_name=rng.choice((None, "sql")),
        tenant=rng.choice((None, "acme")),
        request_id=f"r-{rng.randrange(1000)}",
    )


def outcome(router: lm.Router, result: tuple[lm.Decision, lm.Ticket] | lm.LmetricError) -> Any:
    """The fields of a decision and its record, or of an error."""
    if isinstance(result, lm.LmetricError):
        return type(result), str(result)
    decision, ticket = result
    HELD.append(ticket)
    record = router.explain(decision)
    return decision.instance, decision.decode_instance, decision.predicted_cached_tokens, str(record)


def one_by_one(router: lm.Router, requests: list[lm.Request], now: float, **options: Any) -> list[Any]:
    """Outcomes of single calls."""
    outcomes = []
    for each in requests:
        try:
            outcomes.append(outcome(router, router.route(each, now=now, **options)))
        except lm.LmetricError as error:
            outcomes.append(outcome(router, error))
    return outcomes


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: getattr(policy, "__name__", policy))
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_has_the_results_of_single_calls(policy: Any, seed: int) -> None:
    def world() -> tuple[random.Random, lm.Router, list[lm.Request]]:
        rng = random.Random(seed)
        router = fleet(policy, rng)
        router.set_canary("least_requests")
        router.set_shadow("least_tokens")
        requests = [request(rng) for _ in range(rng.randrange(1, 80))]
        # No instance can take one of them; the others are placed.
        requests.insert(rng.randrange(len(requests)), lm.Request(list(range(99)), instances=["gone"]))
        return rng, router, requests

    for canary, shadow in ((False, False), (True, True)):
        rng, router, requests = world()
        options = {"canary": canary, "shadow": shadow}
        expected = one_by_one(router, requests, 1.0, **options)
        rng, router, requests = world()
        found = [outcome(router, each) for each in router.route_many(iter(requests), now=1.0, **options)]
        assert found == expected
        assert [each[0] for each in found].count(lm.NoInstanceError) == 1
        # The next decision is the same, too: equal draws, equal counts.
        assert one_by_one(router, [request(rng)], 2.0)


def test_an_empty_batch_has_no_results() -> None:
    router = lm.Router("lmetric")
    assert router.route_many([]) == []
    assert router.in_flight() == 0


def test_tickets_of_a_batch_are_those_of_single_calls() -> None:
    router = lm.Router("lmetric")
    router.add_instance("e0")
    results = router.route_many([lm.Request(list(range(64)), request_id=f"r-{n}") for n in range(3)])
    assert router.in_flight() == 3
    for number, result in enumerate(results):
        assert not isinstance(result, lm.LmetricError)
        decision, ticket = result
        record = router.explain(decision)
        assert record is not None
        assert record["request_id"] == f"r-{number}"
        with ticket:
            ticket.sent()
            ticket.first_token()
            ticket.done(output_tokens=1)
    assert router.in_flight() == 0
    _ = router.route_many([lm.Request([1])] * 5)  # dropped at once
    del _
    assert router.in_flight() == 0


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ([lm.Request([1]), "prompt"], r"^requests\[1\]: str is not valid; expected an lmetric.Request"),
        ([lm.Request([1]), lm.Request([1], tenant_weight=0.0)], r"^requests\[1\]: .*weight"),
        ([lm.Request([1], ttft_slo_seconds=-1.0)], r"^requests\[0\]: ttft_slo_seconds"),
    ],
)
def test_an_invalid_request_raises_before_any_is_placed(batch: list[Any], said: str) -> None:
    router = lm.Router("lmetric")
    router.add_instance("e0")
    with pytest.raises(lm.BadValueError, match=said):
        router.route_many(batch)
    assert router.in_flight() == 0
    with pytest.raises(TypeError):
        router.route_many(1)  # type: ignore[arg-type]


def test_an_error_of_a_policy_function_is_the_result_of_its_request() -> None:
    router = lm.Router("lmetric")
    router.add_instance("e0")
    router.set_canary(fails)
    results = router.route_many([lm.Request([1])] * 2, canary=True)
    assert [type(each) for each in results] == [lm.PolicyError] * 2
    assert "no score" in str(results[0])
    assert router.in_flight() == 0


def test_a_batch_takes_arrivals() -> None:
    router = lm.Router("lmetric")
    router.add_instance("e0")
    router.set_admission({"ttft_seconds": 60.0})
    requests = [lm.Request(list(range(64)), tenant="acme") for _ in range(3)]
    arrivals = [router.arrive(each) for each in requests]
    with pytest.raises(lm.BadValueError, match="arrivals: 1 of 3 requests"):
        router.route_many(requests, arrivals=arrivals[:1])
    assert router.in_flight() == 0
    results = router.route_many(requests, arrivals=[arrivals[0], None, arrivals[0]])
    kinds = [type(each) for each in results]
    assert kinds == [tuple, lm.BadValueError, lm.BadValueError]
    assert "routed, dropped or refused" in str(results[2])
    assert router.in_flight() == 1
    assert not isinstance(router.route_many(requests[1:2], arrivals=arrivals[1:2])[0], lm.LmetricError)


def test_an_array_of_a_batch_stays_in_its_place() -> None:
    """Its elements are read without the interpreter lock, so numpy must not move them."""
    array = np.arange(64, dtype=np.uint32)

    def resizes(bs: Any) -> Any:
        array.resize(1 << 20, refcheck=False)
        return bs

    router = lm.Router(resizes)
    router.add_instance("e0")
    (result,) = router.route_many([lm.Request(array)])
    assert "cannot resize" in str(result)
    assert len(array) == 64
    resizes(None)  # free again


def test_threads_route_batches_on_one_router() -> None:
    router = lm.Router("lmetric")
    for number in range(8):
        router.add_instance(f"e{number}")
    errors: list[Any] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            prompts = [rng.integers(0, 1000, 256, dtype=np.uint32) for _ in range(20)]
            requests = [lm.Request(each if n % 2 else each.tolist()) for n, each in enumerate(prompts)]
            for result in router.route_many(requests):
                if isinstance(result, lm.LmetricError):
                    errors.append(result)
                    continue
                result[1].first_token()
                result[1].segment_done()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    assert router.in_flight() == 0
    assert router.stats()["decisions"] == 4 * 20 * 20


@pytest.fixture
def no_switches() -> Iterator[None]:
    """Another thread runs only if this one releases the interpreter lock by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    yield
    sys.setswitchinterval(before)


def goes_on(call: Callable[[], object]) -> bool:
    """Whether another thread gets the interpreter lock during calls of ``call``."""
    begin, went_on = threading.Lock(), False

    def other() -> None:
        nonlocal went_on
        with begin:
            went_on = True

    begin.acquire()
    thread = threading.Thread(target=other)
    thread.start()
    begin.release()  # takes no new interpreter lock: this thread goes on
    until = time.monotonic() + 20.0
    while not went_on and time.monotonic() < until:
        call()
    answer = went_on
    thread.join()
    return answer


LONG: dict[str, Callable[[lm.Router], Callable[[], object]]] = {
    "a batch": lambda router: lambda: router.route_many([lm.Request([1])]),
    "route, a long prompt": lambda router: lambda: router.route(lm.Request(prompt_tokens=9, text=TEXT)),
    "route, a long array": lambda router: lambda: router.route(lm.Request(ARRAY)),
}
TEXT = "a" * 1_000_000
ARRAY = np.zeros(1_000_000, np.uint32)


@pytest.mark.usefixtures("no_switches")
@pytest.mark.parametrize("which", LONG)
def test_other_threads_go_on_during_long_decisions(which: str) -> None:
    router = lm.Router("lmetric")
    router.add_instance("e0")
    assert goes_on(LONG[which](router))


@pytest.mark.usefixtures("no_switches")
def test_other_threads_go_on_while_a_ticket_chooses_again_among_many_instances() -> None:
    router = lm.Router("lmetric")
    for number in range(3000):
        router.add_instance(f"e{number}")
    _, ticket = router.route(lm.Request(prompt_tokens=10))
    ticket.first_token()
    assert goes_on(ticket.choose_failover)


@pytest.mark.usefixtures("no_switches")
@pytest.mark.parametrize("method", ["route", "score", "cached_tokens"])
def test_other_threads_go_on_during_decisions_over_many_instances(method: str) -> None:
    router = lm.Router("lmetric")
    for number in range(3000):
        router.add_instance(f"e{number}")
    asked = lm.Request(prompt_tokens=10)
    assert goes_on(lambda: getattr(router, method)(asked))


def test_a_call_waits_for_a_busy_router_without_the_interpreter_lock() -> None:
    """The router's holder, a policy function, needs the lock to go on."""
    begun, release = threading.Event(), threading.Event()

    def holds(bs: Any) -> Any:
        begun.set()
        assert release.wait(60)
        return bs

    router = lm.Router(holds)
    router.add_instance("e0")
    calls: list[Callable[[], object]] = [
        lambda: router.route(lm.Request([1])),
        lambda: router.route_many([lm.Request([1])]),
        router.in_flight,
    ]
    for call in calls:
        begun.clear()
        release.clear()
        holder = threading.Thread(target=lambda: router.score(lm.Request([1])))
        holder.start()
        assert begun.wait(60)
        timer = threading.Timer(0.01, release.set)
        timer.start()
        call()
        holder.join()
        timer.join()


def queued(p_token: Any, bs: Any) -> Any:
    return p_token * (bs + 1)


def spread(p_seconds: Any, kv_hit: Any) -> Any:
    return p_seconds - kv_hit


def undefined(hit_tokens: Any, bs: Any) -> Any:
    with np.errstate(all="ignore"):
        return hit_tokens / bs  # NaN without a hit on an idle instance


@pytest.mark.parametrize(
    ("text", "function"),
    [("p_token * (bs + 1)", queued), ("p_seconds - kv_hit", spread), ("hit_tokens / bs", undefined)],
)
def test_a_function_chooses_as_the_same_text(text: str, function: Callable[..., Any]) -> None:
    def choices(policy: Any, seed: int) -> Iterator[Any]:
        rng = random.Random(seed)
        router = fleet(policy, rng)
        for step in range(12):
            decision, ticket = router.route(request(rng), now=1 + step * 0.01)
            HELD.append(ticket)
            scores = [(each["instance"], each["score"]) for each in router.explain(decision)["best"]]
            yield decision.instance, decision.decode_instance, scores

    for seed in range(10):
        assert list(choices(text, seed)) == list(choices(function, seed)), seed

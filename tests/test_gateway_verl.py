"""verl's load balancer: turns follow their prefixes, and every count returns to zero."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lmetric import LmetricError
from lmetric.gateways.verl import LmetricLoadBalancer

YAML = {"router_class": "lmetric.gateways.verl.LmetricLoadBalancer", "policy": "lmetric"}


def balancer(count: int = 3, **more: Any) -> LmetricLoadBalancer:
    return LmetricLoadBalancer({f"s{number}": object() for number in range(count)}, {**YAML, **more})


def prompt(trajectory: int, turn: int) -> list[int]:
    return [trajectory * 100_000 + token for token in range(400 * (turn + 1))]


def test_turns_of_a_trajectory_go_to_the_server_with_their_prefix() -> None:
    it = balancer()
    homes: dict[int, set[str]] = {}
    for turn in range(4):
        held = []
        for trajectory in range(3):
            server, _ = it.acquire_server(str(trajectory), prompt_ids=prompt(trajectory, turn))
            homes.setdefault(trajectory, set()).add(server)
            held.append((server, str(trajectory)))
        for server, request_id in held:
            it.release_server(server, request_id=request_id)
    assert all(len(servers) == 1 for servers in homes.values())
    assert {server for (server,) in homes.values()} == {"s0", "s1", "s2"}  # and they are balanced
    assert it.get_total_inflight() == it._router.in_flight() == 0


def test_handles_are_those_of_the_servers() -> None:
    handles = {"a": object(), "b": object()}
    it = LmetricLoadBalancer(handles, YAML)
    server, handle = it.acquire_server("r", prompt_ids=[1, 2, 3], sampling_params={"max_tokens": 5})
    assert handle is handles[server]
    again = object()
    it.add_servers({server: again})  # a new process under the name: its turns ended with the old one
    assert (it.get_inflight_count(server), it._router.in_flight()) == (0, 0)
    it.release_server(server, request_id="r")
    assert it.get_total_inflight() == 0


@pytest.mark.parametrize("named", [True, False])
def test_every_count_returns_to_zero_in_any_order(named: bool) -> None:
    draw, it, held = random.Random(5), balancer(4), []
    for _ in range(3_000):
        step = draw.random()
        if step < 0.5:
            request_id = str(draw.randrange(30))
            server, _ = it.acquire_server(request_id, prompt_ids=prompt(int(request_id), draw.randrange(3)))
            held.append((server, request_id))
        elif step < 0.95 and held:
            server, request_id = held.pop(draw.randrange(len(held)))
            it.release_server(server, request_id=request_id if named else None)
        elif step < 0.97:
            gone = draw.choice(it.get_all_servers())
            it.remove_servers([gone])
            it.add_servers({gone: object()})
            held = [each for each in held if each[0] != gone]
        else:
            it.clear_sticky_cache()
        assert it.get_total_inflight() == it._router.in_flight() == len(held)
    for server, request_id in held:
        it.release_server(server, request_id=request_id if named else None)
    status = it.get_status()
    assert (status["total_inflight"], status["active_servers"]) == (0, 4)
    assert set(status["servers"].values()) == {0}
    assert it._router.in_flight() == 0


def test_after_new_weights_nothing_counts_as_cached() -> None:
    it = balancer(1)
    for _ in range(2):
        server, _ = it.acquire_server("r", prompt_ids=prompt(1, 0))
        it.release_server(server, request_id="r")
    record: Any = it._router.explain(2)
    assert record["predicted_cached_tokens"] > 300
    assert it.clear_sticky_cache() == {"cleared_entries": 1, "server_loads": {"s0": 0}}
    it.acquire_server("r", prompt_ids=prompt(1, 0))
    record = it._router.explain(3)
    assert record["predicted_cached_tokens"] == 0


def test_without_servers_verl_gets_the_error_that_it_retries() -> None:
    it = balancer(0)
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        it.acquire_server("r", prompt_ids=[1])
    it.add_servers({"a": object()})
    server, _ = it.acquire_server("r")
    it.remove_servers(["a", "unknown"])
    it.release_server(server, request_id="r")
    with pytest.raises(RuntimeError, match="No available servers"):
        it.acquire_server("r", prompt_ids=[1])
    assert it._router.in_flight() == 0


@pytest.mark.parametrize(
    ("more", "error", "text"),
    [
        ({"polcy": "lmetric"}, ValueError, "unknown keys in verl's router file: polcy; known: router_class"),
        ({"policy": "nonsense policy"}, LmetricError, "nonsense"),
    ],
)
def test_mistakes_in_the_file_are_refused(more: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        balancer(1, **more)

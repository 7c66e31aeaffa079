"""KV connectors: their changes to client requests, their refusals, and the reports of engines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmetric.engines.adapter import Capabilities, Handover
from lmetric.engines.connectors import CONNECTORS
from lmetric.engines.handover import CHAT, COMPLETIONS, FirstSegment, HandoverError, with_fields
from lmetric.engines.identify import identify
from lmetric.server.api.eligibility import fetch_ineligibility

NIXL, BOOTSTRAP = CONNECTORS["nixl"], CONNECTORS["bootstrap"]
TOLD = Handover("nixl", 30.0)

# The answer of vLLM 0.32.0 to a first segment.
PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_engine_id": "decd41b3",
    "remote_request_id": "cmpl-ab19-0-84d3f2e2",
    "remote_host": "127.0.0.1",
    "remote_port": 10103,
    "tp_size": 1,
    "dcp_size": 1,
    "pp_size": 1,
    "remote_num_tokens": 200,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}


def first(path: str, **request: Any) -> dict[str, Any]:
    body = json.dumps(request).encode()
    return dict(json.loads(NIXL.first(FirstSegment(path, body), "host", TOLD)))


def test_a_first_leg_makes_one_token_for_nobody() -> None:
    leg = first(
        COMPLETIONS,
        model="m",
        prompt=[1, 2],
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=400,
        min_tokens=300,
        logprobs=3,
        logprob_token_ids=[1, 2],
        return_token_ids=True,
        cache_salt="s",
        temperature=0.5,
    )
    params = leg.pop("kv_transfer_params")
    assert leg == {
        "model": "m",
        "prompt": [1, 2],
        "stream": False,
        "max_tokens": 1,
        "cache_salt": "s",
        "temperature": 0.5,
    }
    assert (params.pop("do_remote_decode"), params.pop("do_remote_prefill")) == (True, False)
    assert set(params.values()) == {None}
    assert params.keys() == {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"}
    chat = first(CHAT, messages=[], max_completion_tokens=9, tools=[{"type": "function"}], n=1)
    assert (chat["max_tokens"], chat["max_completion_tokens"], chat["n"]) == (1, 1, 1)
    assert chat["tools"]  # they are part of the prompt


@pytest.mark.parametrize(
    ("path", "request_", "why"),
    [
        (COMPLETIONS, {"prompt": "a", "n": 2}, "n is 2"),
        (COMPLETIONS, {"prompt": "a", "best_of": 3}, "best_of is 3"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "several prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]]}, "several prompts"),
        (CHAT, {"messages": [], "use_beam_search": True}, "use_beam_search"),
        ("/v1/embeddings", {"input": "a"}, "/v1/embeddings"),
    ],
)
def test_what_cannot_be_cut(path: str, request_: dict[str, Any], why: str) -> None:
    body = json.dumps(request_).encode()
    for connector in CONNECTORS.values():
        told = Handover(connector.name, bootstrap_port=1)
        if connector.name == "sidecar":  # llm-d's sidecar makes the prefill's request, or none
            assert connector.first(FirstSegment(path, body), "host", told) == body
            continue
        with pytest.raises(HandoverError, match=why):
            connector.first(FirstSegment(path, body), "host", told)


@pytest.mark.parametrize(
    ("path", "request_", "why"),
    [
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}, "prompt_logprobs is set"),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs is set"),
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 0}, "echo is set"),
        (CHAT, {"messages": [], "echo": True}, "echo is set"),
    ],
)
def test_log_probabilities_of_the_prompt(path: str, request_: dict[str, Any], why: str) -> None:
    """vLLM computes the whole prompt for them. SGLang's engines cannot serve a request whole."""
    body = json.dumps(request_).encode()
    with pytest.raises(HandoverError, match=why):
        NIXL.first(FirstSegment(path, body), "host", TOLD)
    assert why in str(fetch_ineligibility(path, request_, tokens=True))
    leg = json.loads(
        BOOTSTRAP.first(FirstSegment(path, body), "host", Handover("bootstrap", bootstrap_port=1))
    )
    assert leg.items() >= request_.items()


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        (COMPLETIONS, b'"prompt": ["' + b"x" * 5000 + b'", ""]', "several prompts"),
        (COMPLETIONS, b'"prompt": [["1"], [' + b"1," * 5000 + b"1]]", "several prompts"),
        (COMPLETIONS, b'"prompt_embeds": "' + b"x" * 5000 + b'"', "prompt_embeds is set"),
        (COMPLETIONS, b'"prompt": ["' + b"x" * 5000 + b'"]', None),
        (COMPLETIONS, b'"prompt": [' + b"1," * 5000 + b"1]", None),
        (CHAT, b'"prompt": {"x": "' + b"x" * 5000 + b'"}', None),
    ],
)
def test_long_values_keep_their_kind(path: str, more: bytes, why: str | None) -> None:
    """They are not parsed: security F1, its kind."""
    given = FirstSegment(path, b'{"n": 1, "stream": true, ' + more + b"}")
    if why is None:
        assert given.why_whole is None
        assert given.for_one_token().endswith(b'"n": 1, ' + more + b"}")
    else:
        assert why in str(given.why_whole)


def test_the_second_leg_is_the_original_and_the_object_untouched() -> None:
    answer = json.dumps({"choices": [{"text": "x"}], "kv_transfer_params": PARAMS}).encode()
    body = b' {"prompt" : [1, 2], "odd": 1.500, "stream":true}'
    second = with_fields(body, NIXL.fields(answer))
    assert second.endswith(b'"prompt" : [1, 2], "odd": 1.500, "stream":true}')
    assert json.loads(second)["kv_transfer_params"] == PARAMS
    assert NIXL.deadline_seconds(TOLD) == 20
    assert NIXL.deadline_seconds(Handover("nixl", 9.0)) == 6
    assert NIXL.deadline_seconds(Handover("nixl")) == 20


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"{}", "no kv_transfer_params"),
        (b"[]", "no kv_transfer_params"),
        (b"<html>", "no kv_transfer_params"),
        (b'{"kv_transfer_params": null}', "no kv_transfer_params"),
        (json.dumps({"kv_transfer_params": PARAMS | {"remote_block_ids": []}}).encode(), "remote_block_ids"),
        (json.dumps({"kv_transfer_params": PARAMS | {"do_remote_prefill": False}}).encode(), "do_remote_pre"),
        (json.dumps({"kv_transfer_params": PARAMS | {"remote_num_tokens": 0}}).encode(), "remote_num_tokens"),
        (json.dumps({"kv_transfer_params": PARAMS | {"transfer_mode": "push"}}).encode(), "'push'"),
    ],
)
def test_params_that_would_hurt_the_decode_engine(answer: bytes, why: str) -> None:
    with pytest.raises(HandoverError, match=why):
        NIXL.fields(answer)


def test_both_bootstrap_legs_meet_in_a_new_room() -> None:
    request = FirstSegment(COMPLETIONS, b'{"prompt": "a", "stream": true}')
    told = Handover("bootstrap", bootstrap_port=8998)
    legs = [json.loads(BOOTSTRAP.first(request, "10.0.0.7", told)) for _ in range(50)]
    assert {(leg["bootstrap_host"], leg["bootstrap_port"], leg["prompt"]) for leg in legs} == {
        ("10.0.0.7", 8998, "a")
    }
    rooms = {leg["bootstrap_room"] for leg in legs}
    assert len(rooms) == 50
    assert all(0 <= room < 2**63 for room in rooms)
    with pytest.raises(HandoverError, match="bootstrap port"):
        BOOTSTRAP.first(request, "10.0.0.7", Handover("bootstrap"))


async def of(pages: dict[str, str]) -> Capabilities:
    async def ask(path: str) -> tuple[int, bytes]:
        return (200, pages[path].encode()) if path in pages else (404, b"{}")

    return (await identify(ask))[1]


async def test_what_engines_tell_of_it() -> None:
    models = {"/v1/models": '{"data": [{"id": "tiny", "parent": null, "owned_by": "vllm"}]}'}
    nixl = {"/metrics": 'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'}
    told = await of(models)
    assert (told.handover, told.role) == (None, None)
    assert "--kv-transfer-config" in str(told.no_handover)
    told = await of(models | nixl)
    assert (told.handover, told.no_handover, told.role) == (Handover("nixl"), None, None)
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": 12},
    }
    info = {"/server_info?config_format=json": json.dumps({"vllm_config": {"kv_transfer_config": transfer}})}
    told = await of(models | nixl | info)
    assert (told.handover, told.role) == (Handover("nixl", 12.0, "fail", bidirectional=False), "decode")
    transfer["kv_connector_extra_config"] = {"bidirectional_kv_xfer": True}
    info = {"/server_info?config_format=json": json.dumps({"vllm_config": {"kv_transfer_config": transfer}})}
    told = await of(models | nixl | info)
    assert told.handover == Handover("nixl", 30.0, "fail", bidirectional=True)
    sglang = {"/v1/models": '{"data": [{"id": "tiny", "parent": null, "owned_by": "sglang"}]}'}
    modes = {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001}
    told = await of(sglang | {"/server_info": json.dumps(modes)})
    assert (told.handover, told.role) == (Handover("bootstrap", bootstrap_port=9001), "prefill")
    told = await of(sglang | {"/server_info": '{"disaggregation_mode": "null"}'})
    assert (told.handover, told.role) == (None, "both")
    assert "--disaggregation-mode" in str(told.no_handover)

"""Check of KV transfers between two engines: handover.

Two engines of one model serve a new prompt: the first computes it, the second decodes. The answer
must equal the answer of a single engine. According to the second engine's counter, it must have
received the prompt's KV instead of computing it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

import orjson

from lmetric.doctor.subject import Subject
from lmetric.engines.adapter import Handover, samples
from lmetric.engines.connectors import CONNECTORS
from lmetric.engines.handover import COMPLETIONS, FirstSegment, HandoverError, with_fields
from lmetric.engines.http import Answer, Unanswered

SAFE_FLAG = """"kv_load_failure_policy": "fail" in --kv-transfer-config"""
PROMPT_WORDS = 100
ANSWER_TOKENS = 8
_FETCHED = "prompt_tokens_by_source_total"


async def check_handovers(subjects: Sequence[Subject]) -> None:
    """Tests every engine that reports a connector, with a matching second engine."""
    for subject in subjects:
        told = subject.capabilities.handover
        if subject.role == "encode":
            continue
        if told is None:
            _without(subject)
        elif (fault := told.fault) is not None:
            subject.failed("handover", fault, SAFE_FLAG)
        elif subject.has("model") and "handover" not in subject.verdicts:
            other = _other_half(subject, subjects)
            if other is None:
                subject.not_offered("handover", f"{told.connector}: no second engine is given for the test")
            elif subject.role == "decode":
                await _try(other, subject)
            else:
                await _try(subject, other)


def _without(subject: Subject) -> None:
    why = subject.capabilities.no_handover or "it reports no KV connector"
    role = subject.role
    if role == "both":
        subject.not_offered("handover", why)
    else:
        subject.failed("handover", f"role {role}, but {why}", subject.flag("handover"))


def _other_half(subject: Subject, subjects: Sequence[Subject]) -> Subject | None:
    """An engine with the same model and connector, preferably of the other role."""
    told, role = subject.capabilities.handover, subject.role
    fitting = [
        other
        for other in subjects
        if other is not subject
        and other.has("model")
        and other.model == subject.model
        and other.capabilities.handover is not None
        and told is not None
        and other.capabilities.handover.connector == told.connector
        and (other.role == "both" or other.role != role)
    ]
    return min(fitting, key=lambda other: other.role == "both", default=None)


async def _try(prefill: Subject, decode: Subject) -> None:
    """Tests one request in two segments. Both engines get the verdict."""
    told = prefill.capabilities.handover
    assert told is not None
    try:
        seen = await _hand_over(prefill, decode, told)
    except (Unanswered, HandoverError) as error:
        for subject in (prefill, decode):
            subject.failed("handover", f"{prefill.name} to {decode.name}: {error}", subject.flag("handover"))
    except Exception as error:  # as in `Subject.attempt`
        for subject in (prefill, decode):
            subject.broke("handover", error)
    else:
        for subject in (prefill, decode):
            subject.passed("handover", f"{prefill.name} to {decode.name}, {seen}")


async def _hand_over(prefill: Subject, decode: Subject, told: Handover) -> str:
    """Runs the test and returns the findings. Raises Unanswered and HandoverError."""
    connector = CONNECTORS[told.connector]
    words = " ".join(secrets.token_hex(2) for _ in range(PROMPT_WORDS))
    body = {"model": prefill.model, "prompt": words, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    host = urlsplit(prefill.client.url).hostname or "127.0.0.1"  # a unix socket
    first = orjson.loads(connector.first(FirstSegment(COMPLETIONS, orjson.dumps(body)), host, told))
    name = {"x-request-id": f"doctor-{secrets.token_hex(6)}"}
    before, started = await _fetched(decode), time.monotonic()
    if connector.at_once:
        _, answer = await asyncio.gather(_ask(prefill, first, name), _ask(decode, first, name))
    else:
        handed = connector.fields((await _ask(prefill, first, name)).body)
        started = time.monotonic()
        answer = await _ask(decode, orjson.loads(with_fields(orjson.dumps(body), handed)), name)
    seconds = time.monotonic() - started
    after, prompt = await _fetched(decode), answer.usage("prompt_tokens")
    said = f"{prompt} tokens in {seconds:.2f} s"
    if before is not None and after is not None and prompt:
        if after - before < prompt / 2:
            raise HandoverError(
                f"the prompt was computed again: {after - before:.0f} of {prompt} tokens were transferred"
            )
        said = f"{after - before:.0f} of {prompt} tokens fetched in {seconds:.2f} s"
    if connector.at_once:
        return said  # neither engine serves whole requests
    # The prefill engine computed the prompt itself, so its answer is the reference.
    alone = _text(prefill, await _ask(prefill, body, {}))
    if _text(decode, answer) != alone:
        raise HandoverError(
            "the answer differs from the answer of one engine: the transferred KV cache is wrong"
        )
    return said + "; the answer equals the answer of one engine"


async def _ask(subject: Subject, body: object, headers: dict[str, str]) -> Answer:
    answer = await subject.client.post(COMPLETIONS, body, headers)
    if answer.status != 200:
        raise Unanswered(f"{subject.name}: {answer.error()}")
    return answer


def _text(subject: Subject, answer: Answer) -> str:
    try:
        return str(answer.json["choices"][0]["text"])
    except (KeyError, IndexError, TypeError):
        raise Unanswered(f"{subject.name}: a completion without a text: {answer.body[:80]!r}") from None


async def _fetched(subject: Subject) -> float | None:
    """Prompt tokens received from other engines so far, from the engine's counter."""
    adapter = subject.adapter
    if adapter is None or adapter.name != "vllm":
        return None
    page = adapter.own((await subject.client.get("/metrics")).body)
    found = [
        number
        for _, labels, number in samples(page, adapter.prefix, [_FETCHED])
        if b'source="external_kv_transfer"' in labels
    ]
    return sum(found) if found else None

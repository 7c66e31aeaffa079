"""Checks of the prefix cache: prefix_cache, cached_tokens, kv_events, block_hashes.

Two new prompts of token IDs share a prefix. KV events of the first prompt fill the index, as in the
server. The check compares the index's prediction for the second prompt with the engine's own count.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from lmetric.doctor.clock import Ahead, ahead_by_events, judge_events
from lmetric.doctor.ears import BLOCK_SIZE, Ear, Ears
from lmetric.doctor.subject import Subject
from lmetric.doctor.verdict import Outcome, Verdict
from lmetric.engines.adapter import samples
from lmetric.engines.http import Answer, Unanswered

EVENT_SECONDS = (1.0, 3.0)
"""Time limits for an event of a new prompt, seconds: first try and second try.

The subscription can start after the first prompt. vLLM takes about 15 ms.
"""
PREFIX_TOKENS = 64  # at least; whole blocks
PREFIX_BLOCKS = 3
"""Blocks of the common prefix, at least, if a request can be as long. With a drafter (EAGLE, MTP),
vLLM 0.32 computes the last block of a prefix again, so one block would look like no cache."""
MAX_TOKEN_ID = 2**32 - 1
_DRAFTER = "one block less, as with a drafter (EAGLE, MTP), which computes the last block again"
_CHECKS = ("prefix_cache", "cached_tokens", "kv_events", "block_hashes")


@dataclass(frozen=True, slots=True)
class Probes:
    """Prompts of token IDs with a common prefix."""

    first: list[int]
    second: list[int]
    common: int
    """Length of the common prefix, tokens; whole blocks."""
    block: int
    """Tokens of a block."""


async def check_cache(subject: Subject, ears: Ears) -> None:
    """Runs the four checks for each data-parallel rank (each has its own cache), and the clock
    check."""
    ear = ears.listen(subject)
    clocks: list[Ahead] = []
    can = subject.capabilities
    ranks = [source.rank for source in can.event_sources] or [can.data_parallel_rank or 0]
    several = len(ranks) > 1
    # Without the header, the second prompt can reach another rank. vLLM and SGLang read it.
    names_rank = can.data_parallel_rank is None and len(can.ranks) > 1
    wanting: dict[str, Verdict] = {}
    for rank in ranks if ear else ranks[:1]:
        number = can.rank_header(rank) if can.event_sources else "0"
        to = {"x-data-parallel-rank": number} if names_rank else None
        await _check_rank(subject, ear, rank, to, clocks)
        for name in _CHECKS:
            verdict = subject.verdicts.get(name)
            if verdict and verdict.outcome is not Outcome.PASS:
                seen = f"rank {rank}: {verdict.seen}" if several else verdict.seen
                wanting.setdefault(name, replace(verdict, seen=seen))
        if any(verdict.outcome is Outcome.FAIL for verdict in wanting.values()):
            break
    subject.verdicts.update(wanting)
    if ear and several and not wanting:
        seen = subject.verdicts["block_hashes"].seen
        subject.passed("block_hashes", f"{seen}, on each of {len(ranks)} ranks; the engine picks the rank")
    if clocks:
        judge_events(subject, clocks)


async def _check_rank(
    subject: Subject, ear: Ear | None, rank: int, to: Mapping[str, str] | None, clocks: list[Ahead]
) -> None:
    heard = False
    try:
        tries = await _probes(subject)
        if not tries:
            return
        for probes, seconds in zip(tries, EVENT_SECONDS, strict=True):
            began = time.monotonic()
            await _send(subject, probes.first, to)
            if ear is None:
                break
            heard = await _heard(ear, subject.name, rank, probes, seconds)
            if heard or not ear.connected(subject.name, rank):
                break
        if ear and heard and (delay := ear.min_delay(subject.name, rank)) is not None:
            clocks.append(ahead_by_events(delay, time.monotonic() - began))
        predicted = ear.predict(subject.name, probes.second) if ear else None
        before = await _counted(subject)
        answer = await _send(subject, probes.second, to)
        after = await _counted(subject)
    except Unanswered as error:
        subject.failed("prefix_cache", str(error))
        return
    told = answer.usage("prompt_tokens_details", "cached_tokens")
    _judge_caching(subject, probes, told, None if before is None or after is None else after - before)
    if ear is not None:
        await _judge_events(subject, ear, rank, probes, heard, predicted, told)


async def _send(subject: Subject, prompt: list[int], to: Mapping[str, str] | None) -> Answer:
    body = {"model": subject.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    answer = await subject.client.post("/v1/completions", body, to)
    if answer.status != 200:
        raise Unanswered(f"a prompt of {len(prompt)} token ids: {answer.error()}")
    return answer


async def _probes(subject: Subject) -> list[Probes]:
    """New prompts in the engine's token IDs for each try; empty, with a verdict, if there are
    none."""
    block = subject.capabilities.block_size or subject.target.settings.block_size or BLOCK_SIZE
    tail = block // 2 + 1
    blocks = min(max(PREFIX_BLOCKS, -(-PREFIX_TOKENS // block)), (subject.max_tokens - tail - 1) // block)
    common = blocks * block
    if blocks < 1:
        cause = f"requests of {subject.max_tokens} tokens are too short for a block of {block} and an answer"
        subject.not_offered("prefix_cache", cause)
        return []
    each = common + 2 * tail
    wanted = len(EVENT_SECONDS) * each
    words = " ".join(secrets.token_hex(2) for _ in range(wanted))
    answer = await subject.client.post("/tokenize", {"model": subject.model, "prompt": words})
    told = answer.json
    ids = told.get("tokens") if isinstance(told, dict) else None
    if answer.status != 200 and subject.tokenizer is not None:
        ids = subject.tokenizer.completion(words).tolist()
    if not isinstance(ids, list) or len(ids) < wanted or not all(map(_is_token_id, ids)):
        cause = f"POST /tokenize returns no token IDs for test prompts ({answer.error()[:80]})"
        subject.not_offered("prefix_cache", cause)
        return []
    prompts = []
    for at in range(0, wanted, each):
        prefix, one, two = ids[at : at + common], ids[at + common :][:tail], ids[at + common + tail :][:tail]
        prompts.append(Probes(prefix + one, prefix + two, common, block))
    return prompts


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKEN_ID


async def _heard(ear: Ear, name: str, rank: int, probes: Probes, seconds: float) -> bool:
    """Whether events of the prompt arrive. Other clients' requests cause events, too."""
    deadline = time.monotonic() + seconds
    while not ear.messages(name, rank) or ear.predict(name, probes.first) < probes.common:
        if time.monotonic() > deadline:
            return ear.messages(name, rank) > 0
        await asyncio.sleep(0.02)
    return True


async def _counted(subject: Subject) -> float | None:
    """Prompt tokens found in the cache so far, from the engine's counter."""
    adapter = subject.adapter
    if adapter is None or adapter.cached_counter is None:
        return None
    page = adapter.own((await subject.client.get("/metrics")).body)
    found = [number for _, _, number in samples(page, adapter.prefix, [adapter.cached_counter])]
    return sum(found) if found else None


def _judge_caching(subject: Subject, probes: Probes, told: int | None, counted: float | None) -> None:
    found, by = (told, "usage") if told else (counted, "its counter of cached tokens")
    if found:
        subject.passed("prefix_cache", f"{found:.0f} of {probes.common} common tokens were cached, by {by}")
    elif told == 0 or counted == 0:
        cause = f"a prefix of {probes.common} tokens sent twice was computed twice"
        subject.failed("prefix_cache", cause, subject.flag("prefix_cache"))
    else:
        cause = "neither usage nor a counter shows whether a prefix was cached"
        subject.not_offered("prefix_cache", cause, subject.flag("cached_tokens"))
    if told is None:
        cause = "its usage has no prompt_tokens_details.cached_tokens"
        subject.not_offered("cached_tokens", cause, subject.flag("cached_tokens"))
    elif told == probes.common or not found:
        subject.passed("cached_tokens", f"{told} of {len(probes.second)} reported, as expected")
    elif told == probes.common - probes.block:
        subject.passed("cached_tokens", f"{told} of {probes.common} common tokens reported: {_DRAFTER}")
    else:
        subject.failed(
            "cached_tokens", f"{told} reported, but both prompts begin with {probes.common} common tokens"
        )


async def _judge_events(
    subject: Subject,
    ear: Ear,
    rank: int,
    probes: Probes,
    heard: bool,
    predicted: int | None,
    told: int | None,
) -> None:
    if not heard:
        cause, remedy = await ear.why_silent(subject, rank)
        subject.failed("kv_events", cause, remedy)
        return
    subject.passed("kv_events", ear.describe(subject.name))
    truth = probes.common if told is None else told
    if wrong := ear.mismatch(subject.name):
        subject.failed("block_hashes", wrong.reason, wrong.fix)
    elif predicted is not None and predicted - truth == probes.block:
        subject.passed("block_hashes", f"predicted {predicted} tokens, found {truth}: {_DRAFTER}")
    elif predicted != truth:
        cause = f"the index predicts {predicted} cached tokens of the second prompt, the engine found {truth}"
        subject.failed("block_hashes", cause, "report this with `--json`: the index should follow the events")
    else:
        subject.passed("block_hashes", f"predicted {predicted} of {len(probes.second)} tokens, found {truth}")

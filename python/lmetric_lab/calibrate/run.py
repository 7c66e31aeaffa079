"""Runs the probes: one at a time, on an engine with nothing else to do, within the budget."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import orjson

from lmetric.engines.adapter import Load
from lmetric.profiles import Profile
from lmetric_lab.calibrate.ask import Asker, EngineFacts, busy
from lmetric_lab.calibrate.fit import Fit, Observation, disagreement, fit_profile, pieces, settled
from lmetric_lab.calibrate.plan import (
    ROUNDS,
    WARM_UP_TOKENS,
    WINDOW_STEPS,
    CalibrationError,
    Limits,
    Plan,
    Probe,
    make_plan,
)
from lmetric_lab.replay.client import Client, Record

# Token ids that every vocabulary has, special tokens mostly not among them.
_LOWEST_ID, _HIGHEST_ID = 100, 999
_WINDOW = 8  # steps between two tokens that are timed, at least
_AGREED = 0.03  # measurements of a probe this close, relatively, are not repeated
_MOST_TRIES = 6
_SEEN_OFTEN = 5  # samples of the load, 20 ms apart
_ASSUMED_BLOCK_TOKENS = 16  # vLLM's default
_ASSUMED_SEQUENCES = 256  # vLLM's smaller default
_SEQUENCES_DEFAULTS = {"vllm": " (vLLM's default, 256 or 1,024, depends on the GPU)"}
_SEQUENCES_FLAGS = {"vllm": "its --max-num-seqs", "sglang": "its --max-running-requests"}
_ASSUMED_CACHE_TOKENS = 400_000
_ASSUMED_LEN = 4096


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result of a calibration."""

    profile: Profile
    fit: Fit
    facts: EngineFacts
    assumed: tuple[str, ...]  # sizes that the engine did not report, with the assumed values
    dropped: tuple[str, ...]  # probes without a figure at the end, and why
    tokens_used: int


@dataclass
class Calibrator:
    """Calibrates one engine. Use it as an async context: ``facts`` and ``plan`` exist before the
    first probe.

    Args:
        budget_tokens: maximum number of prompt and output tokens.
        max_batch: maximum number of concurrent requests.
        force: continue even if the engine has other traffic, which then distorts the result.
        clock_speed: speed of the engine's clock relative to real time (emulated engines).
        overrides: fields of the profile that replace the engine's values.
    """

    url: str
    budget_tokens: int = 200_000
    max_batch: int = 32
    max_prompt_tokens: int | None = None
    model: str | None = None
    api_key: str | None = None
    force: bool = False
    clock_speed: float = 1.0
    timeout_seconds: float = 120.0
    overrides: dict[str, int] = field(default_factory=dict)
    seed: int | None = None

    async def __aenter__(self) -> Calibrator:
        # A model of "-" keeps the client from asking: what is served is asked below.
        self._client = Client(
            self.url, model=self.model or "-", api_key=self.api_key, timeout_seconds=self.timeout_seconds
        )
        await self._client.__aenter__()
        try:
            self._ask = Asker(self._client.session, self._client.base_url)
            self.facts = await self._ask.facts(self.model)
            self._client.model = self.facts.model
            self.plan = self._make_plan()
            self._refuse_busy(await self._ask.load())
        except BaseException:
            await self._client.__aexit__(None, None, None)
            raise
        # Prompts of their own each time: what an earlier run sent may still be cached.
        self._random = random.Random(os.urandom(16) if self.seed is None else self.seed)
        self._loop = asyncio.get_running_loop()
        self._measured: dict[Probe, list[Observation]] = {}
        self._tried: Counter[Probe] = Counter()
        self._dropped: dict[Probe, str] = {}
        self._held: list[int] = []  # the longest prompt of this round, which the cache may hold
        self._most: int | None = None  # that the engine runs at once, where it showed
        self.tokens_used = 0
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__(None, None, None)

    def _make_plan(self) -> Plan:
        facts, sizes = self.facts, self.overrides
        blocks, block = (
            sizes.get("cache_blocks", facts.cache_blocks),
            sizes.get("block_tokens", facts.block_tokens),
        )
        batch = min(self.max_batch, sizes.get("max_sequences", facts.max_sequences) or self.max_batch)
        longest = (facts.max_model_len or _ASSUMED_LEN) - 1
        return make_plan(
            Limits(
                self.budget_tokens,
                batch,
                min(longest, self.max_prompt_tokens or longest),
                blocks * block if blocks and block else None,
                sizes.get("max_batch_tokens", facts.max_batch_tokens),
            )
        )

    def _refuse_busy(self, load: Load) -> None:
        if busy(load) and not self.force:
            raise CalibrationError(
                f"{self.url} is busy: {load.running or 0:g} requests run, {load.waiting or 0:g} wait there. "
                "They would be slowed down and the figures wrong: take it out of service, or use --force"
            )

    def check_sequences(self) -> None:
        """Checks that the engine's sequence slots are reported or given, and not assumed.

        Raises:
            CalibrationError: they are not, and which flag of the engine has them.
        """
        if "max_sequences" not in self.overrides and self.facts.max_sequences is None:
            raise CalibrationError(
                f"{self.url} does not report its sequence slots, which --token-slo-ms needs"
                f"{_SEQUENCES_DEFAULTS.get(self.facts.kind, '')}: pass "
                f"{_SEQUENCES_FLAGS.get(self.facts.kind, 'them')} as --max-sequences"
            )

    async def run(self, progress: Callable[[Probe], None] = lambda _: None) -> Calibration:
        """Runs all probes, repeats those whose measurements disagree while the budget lasts, and
        fits the profile. `progress` is called after each.

        Raises:
            CalibrationError: the engine fails or becomes busy, or what was measured does not
                suffice.
        """
        await self._lone(self._prompt(WARM_UP_TOKENS // 2), WARM_UP_TOKENS // 2)
        for _ in range(ROUNDS):
            for probe in self.plan.probes:
                await self._measure(probe)
                progress(probe)
        while (doubtful := self._most_doubtful()) is not None:
            await self._measure(doubtful)
            progress(doubtful)
        return self._calibration()

    def _most_doubtful(self) -> Probe | None:
        """The probe to repeat: the one with the greatest disagreement that the budget still
        allows."""
        doubtful = [
            (disagreement(measured), probe.most_tokens, probe)
            for probe, measured in self._measured.items()
            if self._tried[probe] < _MOST_TRIES and self.tokens_used + probe.most_tokens <= self.budget_tokens
        ]
        worst = max(doubtful, key=lambda each: each[:2], default=None)
        return worst[2] if worst is not None and worst[0] > _AGREED else None

    async def _measure(self, probe: Probe) -> None:
        self._refuse_busy(await self._ask.settle())
        self._tried[probe] += 1
        if self.facts.max_sequences is None and self._most is not None and probe.batch > self._most:
            self._dropped[probe] = f"the engine runs {self._most} at once"
        elif probe.kind in ("prefill", "cached"):
            await self._prefill(probe)
        elif probe.kind == "decode":
            await self._decode(probe)
        else:
            await self._mixed(probe)

    # -- probes

    async def _prefill(self, probe: Probe) -> None:
        prompt = self._prompt(probe.prompt_tokens)
        if probe.cached_tokens:
            prompt = self._held[: probe.cached_tokens] + prompt
        elif probe.prompt_tokens == self.plan.probes[0].prompt_tokens:
            self._held = prompt
        record = await self._lone(prompt, 1)
        assert record.first_token is not None
        assert record.sent is not None
        cached = record.cached_tokens
        if cached is None and probe.cached_tokens:
            self._dropped[probe] = "the engine does not say what its cache held"
            return
        cached = cached or 0
        if cached < probe.cached_tokens // 2:
            self._dropped[probe] = f"the engine's cache held {cached:,} of them"
            return
        self._add(probe, record.first_token - record.sent, cached=cached, prompt=len(prompt), requests=1)

    async def _decode(self, probe: Probe) -> None:
        async with self._decoding(probe) as records:
            seen: Counter[int] = Counter()
            watch = asyncio.create_task(self._watch_running(seen))
            await self._until(lambda: _since_all_began(records) > WINDOW_STEPS, records)
            watch.cancel()
        begun = max(record.first_token or 0.0 for record in records)
        ended = min(record.last_token or 0.0 for record in records)
        windows, contexts = [], []
        for record in records:
            times = np.array(record.token_times)
            inside = np.flatnonzero((times >= begun) & (times <= ended))
            # Between tokens half of them apart: a wake-up that comes late moves one end a little.
            window = max(_WINDOW, len(inside) // 2)
            if len(inside) > window:
                windows.append((times[inside[window:]] - times[inside[:-window]]) / window)
                contexts.append(probe.context_tokens + inside.mean())
        if not windows:
            self._dropped[probe] = "the first were done before the last began"
            self._most = max(
                (running for running, times in seen.items() if times >= _SEEN_OFTEN), default=None
            )
            return
        seconds = float(np.median(np.concatenate(windows)))
        batch = float(probe.batch)
        self._add(probe, seconds, steps=1.0, sequences=batch, context=batch * float(np.mean(contexts)))

    async def _mixed(self, probe: Probe) -> None:
        async with self._decoding(probe) as records:
            await self._until(lambda: _since_all_began(records) > 12, records)
            lone = await self._lone(self._prompt(probe.prompt_tokens), 1)
            at = [len(record.token_times or ()) for record in records]
            await self._until(lambda: len(records[0].token_times or ()) > at[0] + 2, records)
        assert lone.sent is not None
        assert lone.first_token is not None
        times = np.array(records[0].token_times)
        first = int(np.searchsorted(times, lone.sent, side="right")) - 1
        last = int(np.searchsorted(times, lone.first_token)) + 1
        if first < _WINDOW or last >= len(times):
            self._dropped[probe] = "the others were done before the prompt"
            return
        steps, batch = float(last - first), float(probe.batch)
        context = probe.context_tokens + (first + last) / 2
        usual = float(np.median(np.diff(times[: first + 1])))
        self._add(
            probe,
            float(times[last] - times[first]),
            steps=steps,
            sequences=steps * batch,
            context=steps * batch * context,
            prompt=probe.prompt_tokens,
            cached=lone.cached_tokens or 0,
            chunk=pieces(np.diff(times[first : last + 1]), usual, probe.prompt_tokens, probe.batch),
        )

    # -- requests

    async def _lone(self, prompt: list[int], output_tokens: int) -> Record:
        record = await self._send(prompt, output_tokens)
        if record.error is not None:
            raise CalibrationError(
                f"{self.url} failed a prompt of {len(prompt)} tokens: {record.error}: {record.detail}"
            )
        return record

    async def _send(self, prompt: list[int], output_tokens: int, record: Record | None = None) -> Record:
        record = record or Record(0, 0.0, token_times=[])
        body = self._client.body(orjson.Fragment(orjson.dumps(prompt)), output_tokens, return_token_ids=True)
        self.tokens_used += len(prompt)
        try:
            await self._client.send(body, record, 0.0)
        finally:
            self.tokens_used += len(record.token_times or ())
        return record

    @contextlib.asynccontextmanager
    async def _decoding(self, probe: Probe) -> AsyncIterator[list[Record]]:
        """The probe's decoding batch. Leaving the block cancels the remaining requests."""
        records = [Record(index, 0.0, token_times=[]) for index in range(probe.batch)]
        tasks = [
            asyncio.create_task(self._send(self._prompt(probe.context_tokens), probe.output_tokens, record))
            for record in records
        ]
        try:
            yield records
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until(self, done: Callable[[], bool], records: list[Record]) -> None:
        """Waits until `done`, or until a request has ended."""
        deadline = self._loop.time() + self.timeout_seconds
        while not done():
            failed = next((record for record in records if record.error is not None), None)
            if failed is not None:
                raise CalibrationError(f"{self.url} failed a request: {failed.error}: {failed.detail}")
            if all(record.ended for record in records):
                return
            if self._loop.time() > deadline:
                raise CalibrationError(
                    f"{self.url}: a batch of {len(records)} was not through in {self.timeout_seconds:g} s"
                )
            await asyncio.sleep(0.005)

    async def _watch_running(self, seen: Counter[int]) -> None:
        """Counts how many run while others wait."""
        while True:
            await asyncio.sleep(0.02)
            load = await self._ask.load()
            if load.running and load.waiting:
                seen[int(load.running)] += 1

    def _prompt(self, tokens: int) -> list[int]:
        """Token ids that no prompt before began with."""
        return self._random.choices(range(_LOWEST_ID, _HIGHEST_ID + 1), k=tokens)

    def _add(
        self,
        probe: Probe,
        seconds: float,
        *,
        steps: float = 0.0,
        sequences: float = 0.0,
        context: float = 0.0,
        prompt: int = 0,
        cached: int = 0,
        requests: int = 0,
        chunk: tuple[float, float] | None = None,
    ) -> None:
        new = prompt - cached
        if seconds <= 0.0:  # this machine was away meanwhile
            self._dropped[probe] = "its tokens all came at once"
            return
        self._dropped.pop(probe, None)
        self._measured.setdefault(probe, []).append(
            Observation(
                probe.kind,
                probe.label,
                seconds * self.clock_speed,
                steps=steps or None,
                sequences=sequences,
                context_tokens=context,
                prefill_tokens=float(new),
                attention_pairs=new * (cached + new / 2),
                requests=float(requests),
                chunk_tokens=chunk,
            )
        )

    # -- the outcome

    def _calibration(self) -> Calibration:
        facts, known = self.facts, self.overrides
        assumed: list[str] = []

        def size(name: str, told: int | None, otherwise: int, why: str) -> int:
            value = known.get(name, told)
            if value is None:
                assumed.append(f"{name}: the engine does not say; {otherwise:,} is {why}")
                value = otherwise
            return value

        observations = [settled(measured) for measured in self._measured.values()]
        fit = fit_profile(observations, known.get("max_batch_tokens", facts.max_batch_tokens))
        block = size("block_tokens", facts.block_tokens, _ASSUMED_BLOCK_TOKENS, "vLLM's default")
        blocks = size("cache_blocks", facts.cache_blocks, _ASSUMED_CACHE_TOKENS // block, "assumed")
        sequences = size(
            "max_sequences",
            facts.max_sequences or self._most,
            _ASSUMED_SEQUENCES,
            f"assumed{_SEQUENCES_DEFAULTS.get(facts.kind, '')}",
        )
        batch_tokens = size(
            "max_batch_tokens", facts.max_batch_tokens, fit.max_batch_tokens, fit.batch_tokens_from
        )
        now = datetime.now(UTC).date().isoformat()
        worst = max(fit.residuals, key=lambda residual: abs(residual.relative_error))
        profile = Profile(
            **fit.constants,
            max_batch_tokens=max(batch_tokens, sequences),
            max_sequences=sequences,
            block_tokens=block,
            cache_blocks=blocks,
            source=(
                f"Calibrated on {now} with {self.tokens_used:,} tokens of probes from {facts.engine}, "
                f"model {facts.model}: lmetric-router calibrate --tokens-budget {self.budget_tokens}."
            ),
            note=" ".join(
                [
                    f"Predictions are off by {fit.median_error:.1%} (median of {len(fit.residuals)} "
                    f"probes), at most {worst.relative_error:+.0%} ({worst.label}).",
                    *(f"{text}." for text in (*fit.unidentified, *assumed)),
                ]
            ),
        )
        dropped = tuple(f"{probe.label}: {why}" for probe, why in self._dropped.items())
        return Calibration(profile, fit, facts, tuple(assumed), dropped, self.tokens_used)


def _since_all_began(records: list[Record]) -> int:
    """Tokens that the slowest has got since the last of them got its first; -1 before."""
    begun = max(record.first_token or float("inf") for record in records)
    if begun == float("inf"):
        return -1
    return min(len(times) - bisect_right(times, begun) for times in (r.token_times or [] for r in records))

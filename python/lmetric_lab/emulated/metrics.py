"""vLLM's metrics. Counts per token are plain integers here; Prometheus sees them when it asks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from lmetric_lab.emulated.generation import Generation
from lmetric_lab.emulated.handover import Nixl


def _bounds(text: str) -> list[float]:
    return [float(bound) for bound in text.split()]


# vLLM's buckets.
_TTFT = _bounds("0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560")
_TOKEN = _bounds("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_REQUEST = _bounds("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_LENGTH = [m * 10.0**e for e in range(6) for m in (1, 2, 5)]
_ITERATION = _bounds("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")

_HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "time_to_first_token_seconds": ("Arrival to first token.", _TTFT),
    "inter_token_latency_seconds": ("Between tokens of one request.", _TOKEN),
    "request_time_per_output_token_seconds": ("First to last token, by token.", _TOKEN),
    "e2e_request_latency_seconds": ("Arrival to last token.", _REQUEST),
    "request_queue_time_seconds": ("Arrival to the first step that runs it.", _REQUEST),
    "request_prefill_time_seconds": ("From there to the first token.", _REQUEST),
    "request_decode_time_seconds": ("First to last token.", _REQUEST),
    "request_inference_time_seconds": ("First step that runs it to the last token.", _REQUEST),
    "request_prompt_tokens": ("Prompt tokens of a finished request.", _LENGTH),
    "request_generation_tokens": ("Output tokens of a finished request.", _LENGTH),
    "iteration_tokens_total": ("Tokens computed in a step.", _ITERATION),
}


# Metrics of NIXL transfers. If NIXL is on, they exist from the start, so that routers can detect
# it.
_NIXL: dict[str, tuple[str, Sequence[float]]] = {
    "nixl_xfer_time_seconds": (
        "A transfer.",
        _bounds("0.005 0.01 0.025 0.05 0.075 0.1 0.2 0.3 0.5 0.75 1 5"),
    ),
    "nixl_bytes_transferred": ("Its bytes.", [2.0 ** (10 + i) for i in range(1, 25, 2)]),
}


class Histogram:
    """A histogram that costs a bisection to observe, however many equal values come at once."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative counts by upper bound, and the sum."""
        bounds = [str(bound) for bound in self._bounds] + ["+Inf"]
        return list(zip(bounds, accumulate(self._counts), strict=True)), self._sum


class EngineMetrics:
    """The metrics of one rank, with vLLM's names. Times are seconds of the engine's clock."""

    prefix = "vllm:"
    rank_label = "engine"

    def __init__(
        self,
        model: str,
        cache_config: Mapping[str, str],
        load: Callable[[], Mapping[str, Any]],
        rank: int = 0,
    ) -> None:
        self._labels = {self.rank_label: str(rank), "model_name": model}
        self.cache_config = dict(cache_config)
        self._load = load
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in (_HISTOGRAMS | _NIXL).items()}
        self._inter_token = self._histograms["inter_token_latency_seconds"]
        self._iteration = self._histograms["iteration_tokens_total"]
        self._ended: Counter[str | None] = Counter()  # by finish_reason
        self.rejected = 0
        self.nixl: Nixl | None = None
        self.transfers = 0  # that requests wait for
        self.failed_transfers = 0
        self.late_seconds = 0.0
        self._late_sum = 0.0
        self._wakes = 0

    def woke(self, late_seconds: float) -> None:
        """The engine acts this many real seconds after its clock said so."""
        self._late_sum += late_seconds
        self._wakes += 1

    def step(self, seconds: float, decoded: int, prefill_tokens: int) -> None:
        """A step ended: each sequence in it that decoded got its token one step after the one
        before."""
        if decoded:
            self._inter_token.observe(seconds, decoded)
        self._iteration.observe(decoded + prefill_tokens)

    def prefilled(self, generation: Generation, now: float) -> None:
        """A prefill made a token: the first, or the first after a preemption."""
        if len(generation.tokens) == 1:
            generation.first_token = now
            self._histograms["time_to_first_token_seconds"].observe(now - generation.arrived)
        else:
            self._inter_token.observe(now - generation.interrupted)
        generation.interrupted = 0.0

    def finished(self, generation: Generation, now: float) -> None:
        """A request has its last token."""
        self._ended[generation.finish_reason] += 1
        tokens, first, scheduled = len(generation.tokens), generation.first_token, generation.scheduled
        observed = {
            "e2e_request_latency_seconds": now - generation.arrived,
            "request_queue_time_seconds": scheduled - generation.arrived,
            "request_prefill_time_seconds": first - scheduled,
            "request_decode_time_seconds": now - first,
            "request_inference_time_seconds": now - scheduled,
            "request_prompt_tokens": len(generation.shape.prompt),
            "request_generation_tokens": tokens,
        }
        if tokens > 1:
            observed["request_time_per_output_token_seconds"] = (now - first) / (tokens - 1)
        for name, value in observed.items():
            self._histograms[name].observe(value)

    def transferred(self, seconds: float, size: int) -> None:
        """Records a received KV cache with its size in bytes."""
        self._histograms["nixl_xfer_time_seconds"].observe(seconds)
        self._histograms["nixl_bytes_transferred"].observe(size)

    def collect(self) -> Iterator[Metric]:
        """All metrics."""
        load = self._load()
        cached, fetched = load["cached_prompt_tokens"], load["fetched_prompt_tokens"]
        by_source = {
            "local_compute": load["prompt_tokens"] - cached - fetched,
            "local_cache_hit": cached,
            "external_kv_transfer": fetched,
        }
        reasons = {"capacity": load["waiting"], "deferred": self.transfers}
        endings = {
            "length": self._ended["length"],
            "stop": self._ended["stop"],
            "abort": 0,
            "error": 0,
            "repetition": 0,
        }
        yield self._gauge("num_requests_running", "Requests in the batch.", load["running"])
        yield self._gauge("num_requests_waiting", "Requests in the queue.", load["waiting"] + self.transfers)
        yield self._by(
            GaugeMetricFamily, "num_requests_waiting_by_reason", "Why they wait.", "reason", reasons
        )
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", load["kv_usage"])
        for name, text, field in [
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", "prefix_cache_queries"),
            ("prefix_cache_hits", "Prompt tokens found there.", "prefix_cache_hits"),
            ("external_prefix_cache_hits", "Prompt tokens loaded from host memory.", "loaded_tokens"),
            ("prompt_tokens", "Prompt tokens of prefilled requests.", "prompt_tokens"),
            ("prompt_tokens_cached", "Those out of the cache.", "cached_prompt_tokens"),
            ("generation_tokens", "Output tokens made.", "generation_tokens"),
            ("num_preemptions", "Requests put back for want of blocks.", "preemptions"),
        ]:
            yield self._counter(name, text, load[field])
        yield self._by(CounterMetricFamily, "prompt_tokens_by_source", "Prompt tokens.", "source", by_source)
        yield self._by(CounterMetricFamily, "request_success", "Requests ended.", "finished_reason", endings)
        rejections = {"max_num_queued_reqs": self.rejected, "max_num_queued_tokens": 0}
        yield self._by(CounterMetricFamily, "admission_rejections", "Requests refused.", "reason", rejections)
        config = GaugeMetricFamily(
            "vllm:cache_config_info", "The cache's shape.", labels=[*self.cache_config, "engine"]
        )
        config.add_metric([*self.cache_config.values(), self._labels["engine"]], 1)
        yield config
        late = GaugeMetricFamily(
            "lmetric_engine_late_seconds", "Real seconds behind the clock.", labels=["engine"]
        )
        late.add_metric([self._labels["engine"]], self.late_seconds)
        yield late
        mean = GaugeMetricFamily(
            "lmetric_engine_mean_late_seconds",
            "Mean real seconds behind the clock, over all wake-ups.",
            labels=["engine"],
        )
        mean.add_metric([self._labels["engine"]], self._late_sum / max(self._wakes, 1))
        yield mean
        for name, (text, _) in (_HISTOGRAMS | (_NIXL if self.nixl else {})).items():
            yield self._histogram(name, text)
        if self.nixl is not None:
            text = "Transfers that failed."
            yield self._counter("nixl_num_failed_transfers", text, self.failed_transfers)
            text = "Prompts that nobody fetched in time."
            yield self._counter("nixl_num_kv_expired_reqs", text, self.nixl.expired)

    def _histogram(self, name: str, text: str, measured: str | None = None) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, text, labels=list(self._labels))
        buckets, total = self._histograms[measured or name].buckets()
        family.add_metric(list(self._labels.values()), buckets, total)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(self.prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(self.prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _by(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        label: str,
        values: Mapping[str, float],
    ) -> Metric:
        family = kind(self.prefix + name, text, labels=[*self._labels, label])
        for which, value in values.items():
            family.add_metric([*self._labels.values(), which], value)
        return family

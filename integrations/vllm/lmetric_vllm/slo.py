"""`SloScheduler`: steps within a time between tokens (Libra, section 4.2, Algorithm 2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from lmetric import StepTable
from lmetric.engines.xargs import TOKEN_SLO, number_in, own_token_slo
from lmetric.profiles import load_profile
from lmetric_vllm.checks import check_cuts
from lmetric_vllm.measured import MeasuredScheduler
from lmetric_vllm.settings import SloSettings, read_settings
from lmetric_vllm.steps import Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.lmetric")

# Prompt tokens of each step, if a prompt has as many left: else prompts would wait for ever where
# the decodes alone take longer than their time. A block, one to three milliseconds of a usual
# engine.
MIN_PREFILL_TOKENS = 16


class SloScheduler(MeasuredScheduler):
    """vLLM's scheduler with a budget of prompt tokens that keeps each step within a time.

    Beside decodes, a step takes as many prompt tokens as the table of recorded step times allows.
    Without decodes, it takes vLLM's own budget. The time of encoders, as of images, is neither
    recorded nor bounded. The shortest time of the requests that decode
    counts: that of `vllm_xargs: {"token_slo_ms": 20}`, but at least a quarter of the engine's, else
    the engine's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_cuts(type(self).__name__, self)
        self.settings = read_settings(SloSettings, self.vllm_config.additional_config)
        profile = self.settings.profile
        self.table = StepTable(load_profile(profile).constants() if profile is not None else None)
        self._budget = self.max_num_scheduled_tokens
        self._own_slo: dict[str, float] = {}  # seconds, by request
        logger.info("SloScheduler: at most %g ms between tokens", self.settings.token_slo_ms)

    def add_request(self, request: Request) -> None:
        own = own_slo(request, self.settings.token_slo_ms / 1e3)
        if own is not None:
            self._own_slo[request.request_id] = own
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        self.max_num_scheduled_tokens = self._allowed()
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = self._budget

    def measured(self, step: Step, seconds: float) -> None:
        if step.encodes:
            return  # the time of an image is not that of its tokens
        self.table.record(
            seconds,
            decodes=step.decodes,
            context_tokens=step.context_tokens,
            prefill_tokens=step.prefill_tokens,
            prefill_pairs=step.prefill_pairs,
        )

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._own_slo.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def _allowed(self) -> int:
        """Most tokens of the next step."""
        running = self.running
        prompts = [request for request in running if request.is_prefill_chunk]
        decodes = len(running) - len(prompts)
        if decodes == 0:
            return self._budget
        before = prompts[0].num_computed_tokens if prompts else 0  # of the first that goes on
        context = sum([request.num_computed_tokens for request in running])
        context -= sum([request.num_computed_tokens for request in prompts])
        if prompts and running[decodes:] != prompts:
            # Decodes first: the budget is theirs before it is the prompts'.
            running.sort(key=_prefills)
        allowed = self.table.prefill_within(
            self._seconds(),
            decodes=decodes,
            context_tokens=context,
            before=before,
            most=max(0, self._budget - decodes),
        )
        if allowed is None:  # nothing is known yet: vLLM's own budget
            return self._budget
        return min(self._budget, decodes + max(allowed, MIN_PREFILL_TOKENS))

    def _seconds(self) -> float:
        seconds = self.settings.token_slo_ms / 1e3
        if self._own_slo:
            own = self._own_slo
            decoding = (own.get(each.request_id) for each in self.running if not each.is_prefill_chunk)
            seconds = min((slo if slo is not None else seconds for slo in decoding), default=seconds)
        return seconds


def _prefills(request: Request) -> bool:
    return bool(request.is_prefill_chunk)


def own_slo(request: Request, engine_seconds: float) -> float | None:
    """The request's own time between tokens, in seconds; None if it has none, or an impossible one.

    An impossible one is named in the log, and once that shorter ones are raised.
    """
    extra = request.sampling_params.extra_args if request.sampling_params is not None else None
    try:
        own = own_token_slo(extra, engine_seconds)
    except ValueError as error:
        logger.warning("request %s: %s; the engine's time counts", request.request_id, error)
        return None
    asked = number_in(extra, TOKEN_SLO)
    if own is not None and asked is not None and asked / 1e3 < own:
        logger.warning_once(
            "SloScheduler: requests ask for less than %g ms between tokens; %g ms counts for them",
            1e3 * own,
            1e3 * own,
        )
    return own

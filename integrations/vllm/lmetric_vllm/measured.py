"""A scheduler of vLLM that measures its steps and publishes its load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from lmetric_vllm.checks import check_engine
from lmetric_vllm.load import LoadPublisher
from lmetric_vllm.steps import Step, StepClock, step_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class MeasuredScheduler(AsyncScheduler):
    """vLLM's scheduler; `measured` gets each step that computed something, with its seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_engine(type(self).__name__, self.vllm_config)
        self._clock = StepClock()
        self._load = LoadPublisher(self)

    def measured(self, step: Step, seconds: float) -> None:
        """Called with each step, before its output counts."""
        raise NotImplementedError

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._load.waits(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens > 0:
            self._clock.scheduled(output, step_of(output, self.requests))
        self._load.publish()
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        ended = self._clock.ended(scheduler_output)
        if ended is not None:
            self.measured(*ended)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        if not self.requests:  # no step follows
            self._load.publish()
        return outputs

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)
        self._load.waits(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._load.leaves(request)
        return super()._free_request(request, *args, **kwargs)

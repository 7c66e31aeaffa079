"""Policies on trial, shadows and canaries: the results of their requests."""

from lmetric.reasons import BY_CLIENT
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.observers import Observer


class TrialResults(Observer):
    """Adds the results of requests to the canary of their model.

    Requests whose client left, and invalid ones, have no result.
    """

    def ended(self, request: ClientRequest, relay: InFlightRequest | None) -> None:
        """Adds the result of a request."""
        placed, model, status = request.trial, request.model, request.status
        if placed is None or relay is None or model is None or model.trials is None:
            return
        failed = status >= 500 or (status == 200 and bool(relay.reason))
        if relay.reason.startswith(BY_CLIENT) or not (failed or status == 200):
            return
        from lmetric.canary import Outcome  # the request's canary has loaded it

        began, usage = request.started, relay.usage
        outcome = Outcome(failed)
        if not failed and usage is not None:
            outcome.e2e_seconds = request.ended_at - began
            if first := usage.first_token_at:
                outcome.ttft_seconds = first - began
                outcome.further_tokens = max(0, usage.output_tokens - 1)
            if usage.cached_tokens is not None:
                outcome.cached_tokens, outcome.prompt_tokens = usage.cached_tokens, usage.prompt_tokens or 0
        model.trials.canary.ended(placed, began, outcome)

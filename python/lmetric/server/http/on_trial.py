"""Requests under a policy on trial: their routing and their results."""

from __future__ import annotations

from lmetric._core import Arrival, Decision, Request, Ticket
from lmetric.canary import Outcome
from lmetric.server.execution.exchange import ClientRequest, InFlightRequest
from lmetric.server.execution.plan import Hedge
from lmetric.server.fleet.pool import Pool

BY_CLIENT = "the client "  # reasons that no policy causes


def route(
    client_request: ClientRequest,
    pool: Pool,
    asked: Request,
    hedge: Hedge | None,
    now: float,
    arrival: Arrival | None,
) -> tuple[Decision, Ticket]:
    """Routes a request of a model with a shadow or a canary. Raises NoInstanceError."""
    decision, ticket, placed = pool.trials.route(asked, now, arrival)
    client_request.trial = placed
    if hedge is not None:
        hedge.canary = placed is not None and placed.canary
    return decision, ticket


def ended(client_request: ClientRequest, status: int, now: float, relay: InFlightRequest | None) -> None:
    """Adds the result of a request to its canary. ``now``: monotonic seconds.

    Requests whose client left, and invalid ones, have no result.
    """
    request, pool = client_request.trial, client_request.pool
    if request is None or pool is None or relay is None:
        return
    failed = status >= 500 or (status == 200 and bool(relay.reason))
    if relay.reason.startswith(BY_CLIENT) or not (failed or status == 200):
        return
    began, usage = client_request.started, relay.usage
    outcome = Outcome(failed)
    if not failed and usage is not None:
        outcome.e2e_seconds = now - began
        if first := usage.first_token_at:
            outcome.ttft_seconds = first - began
            outcome.further_tokens = max(0, usage.output_tokens - 1)
        if usage.cached_tokens is not None:
            outcome.cached_tokens, outcome.prompt_tokens = usage.cached_tokens, usage.prompt_tokens or 0
    pool.trials.canary.ended(request, began, outcome)

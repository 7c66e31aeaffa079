"""Routing inside your own gateway: no server, no network. Run: python examples/embed_router.py"""

import numpy as np

import lmetric as lm

router = lm.Router("lmetric", block_size=16)
for name in ("gpu-0", "gpu-1", "gpu-2"):
    router.add_instance(name, cache_blocks=4_000)

# A load report, as scraped from an engine: gpu-2 also has requests of other clients.
router.report_load("gpu-2", waiting=3, running=12)

system_prompt = np.arange(2_000, dtype=np.uint32)
for turn in range(4):
    question = np.arange(10_000 * (turn + 1), 10_000 * (turn + 1) + 300, dtype=np.uint32)
    prompt = np.concatenate([system_prompt, question])
    decision, ticket = router.route(lm.Request(token_ids=prompt, max_tokens=200, request_id=f"turn-{turn}"))
    hit = f"{decision.predicted_cached_tokens} of {decision.prompt_tokens} tokens cached"
    print(f"turn {turn}: {decision.instance}, {hit}, scores {decision.scores().round().tolist()}")
    # The ticket counts the request in flight; leaving the block closes it, also after an exception.
    with ticket:
        ticket.sent()
        ticket.first_token()
        ticket.tokens(199)
        ticket.done(prompt_tokens=len(prompt), output_tokens=200)

assert router.in_flight() == 0

# An engine that refuses: the ticket moves down its ranking until the ranking is used up.
decision, ticket = router.route(lm.Request(token_ids=system_prompt))
with ticket:
    ticket.sent()
    print(f"{decision.instance} refuses; next: {ticket.failed('refused')}; ranking {decision.ranking()}")

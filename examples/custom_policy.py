"""Custom scores: expressions that run in Rust, or a Python function.

Run: python examples/custom_policy.py
"""

import numpy as np

import lmetric as lm

# Fewest new tokens, among instances whose batch is at most 4 larger than the smallest batch.
close = lm.Policy(lm.NEW_TOKENS, filter=lm.BS - lm.min(lm.BS) <= 4, then=[lm.BS], name="close")

# A weighted score as text, as in YAML or after --policy, with a parameter.
weighed = lm.Policy("lam * (1 - kv_hit) + (1 - lam) * norm(bs)", knobs={"lam": 0.7}, name="weighed")


# A score that needs Python: prefer the instance with a batch nearest to a multiple of eight.
def round_batches(columns: lm.policies.Columns) -> np.ndarray:
    batch = np.asarray(columns["bs"]) + 1
    return np.asarray(columns["p_token"]) * (1 + np.ceil(batch / 8) * 8 - batch)


rounded = lm.policy_function(round_batches, reads=[lm.P_TOKEN, lm.BS])

prompt = np.arange(4_000, dtype=np.uint32)
for policy in ("lmetric", close, weighed, rounded):
    router = lm.Router(policy, seed=1)
    for number in range(4):
        router.add_instance(f"gpu-{number}")
        router.report_load(f"gpu-{number}", waiting=number, running=5)
    chosen = []
    tickets = []  # kept open: each decision sees the earlier requests
    for _ in range(8):
        decision, ticket = router.route(lm.Request(token_ids=prompt))
        chosen.append(decision.instance)
        tickets.append(ticket)
    print(f"{policy!r}: {' '.join(chosen)}")

# Invalid policies raise an error with the position.
try:
    lm.Policy("p_tokne * (bs + 1)")
except lm.ExpressionError as error:
    print(error)

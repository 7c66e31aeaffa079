"""The callback of `test_real_litellm.py`: our strategy, which writes its counts to a file."""

import json
import os
import threading
import time
from pathlib import Path

from lmetric.gateways.litellm import LmetricStrategy

strategy = LmetricStrategy(
    "lmetric", tokenizer=os.environ.get("LMETRIC_TOKENIZER"), records_file=os.environ["LMETRIC_RECORDS"]
)


def report() -> None:
    path = Path(os.environ["LMETRIC_PROBE"])
    while True:
        modes = strategy.modes("emulated") if strategy.decisions else {}
        state = {"in_flight": strategy.in_flight(), "decisions": strategy.decisions, "modes": modes}
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").replace(path)
        time.sleep(0.05)


threading.Thread(target=report, daemon=True).start()

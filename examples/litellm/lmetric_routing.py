"""The routing strategy that config.yaml names among its callbacks."""

import os

from lmetric.defaults import DEFAULT_POLICY
from lmetric.gateways.litellm import LmetricStrategy

strategy = LmetricStrategy(
    os.environ.get("LMETRIC_POLICY", DEFAULT_POLICY),
    tokenizer=os.environ.get("LMETRIC_TOKENIZER") or None,
    records_file=os.environ.get("LMETRIC_RECORDS") or None,
)

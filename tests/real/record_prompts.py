"""Records what vLLM's own code makes of requests, for tests that run without vLLM.

    python tests/real/record_prompts.py    (TEST_VLLM_VENV names an environment with vLLM)

Writes two files into tests/data. `vllm_prompts.json`: requests and their token IDs, by template.
`vllm_fields.json`: the fields of all classes of vLLM's requests.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from test_real_tokens import CHAT, MESSAGES, RESPONSES, Requests  # noqa: E402
from token_folders import CHATML, INST, shipped_folder  # noqa: E402
from vllm_process import environment  # noqa: E402

DATA = HERE.parent / "data"
TEMPLATES = {"chatml": CHATML, "inst": INST}
REQUESTS = 5  # of each path


def by_vllm(script: str, *arguments: Any, given: Any = None) -> Any:
    """Returns the answer of a script that runs with vLLM's interpreter."""
    command = [environment() / "bin" / "python", HERE / script, *arguments]
    told = subprocess.run(command, input=json.dumps(given), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(told.stdout.splitlines()[-1])


def main() -> None:
    """Writes the files."""
    made = Requests(44)
    requests = [(CHAT, made.chat()) for _ in range(REQUESTS)]
    requests += [(MESSAGES, made.messages()) for _ in range(REQUESTS)]
    requests += [(RESPONSES, made.responses()) for _ in range(REQUESTS)]
    fields = by_vllm("vllm_fields.py")
    prompts = {"vllm": fields["vllm"], "requests": requests, "tokens": {}}
    with tempfile.TemporaryDirectory() as scratch:
        for name, template in TEMPLATES.items():
            folder = shipped_folder(Path(scratch) / name, template)
            answers = by_vllm("vllm_tokens.py", folder, given=requests)
            prompts["tokens"][name] = [None if isinstance(each, str) else each for each in answers]
    (DATA / "vllm_prompts.json").write_text(json.dumps(prompts, separators=(",", ":")) + "\n")
    (DATA / "vllm_fields.json").write_text(json.dumps(fields, indent=1) + "\n")


if __name__ == "__main__":
    main()

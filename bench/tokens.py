"""Times chat requests to a decision: parsed, rendered, tokenized, hashed and placed, first and
later turns.

    python bench/tokens.py [--peer VENV] [--sizes 1000 10000 32000 100000] [--turns 20] [--json]
    [--out FILE]

A conversation has user and assistant turns of about 500 tokens each. The text is Python's standard
library, docstrings and code; the tokenizer is a byte-level BPE of 32k words trained on it, with a
ChatML template that takes tools. `first`: the whole prompt is new. `later`: all but the last
question (1,000 tokens) was seen the turn before.

Ours runs from the body of the HTTP request to a decision over 16 instances, in one thread. `--peer`
is an environment with transformers. Its `apply_chat_template` (rendering and tokenizing) is timed
on the same conversations, without decision. An extension built with the cargo feature
fast-tokenizer has a raw file of its own, DATE-tokens-fast.json.

Times are milliseconds of that thread's processor time (other work on the machine does not count):
median, least and greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

from common import ROOT, about, median_range, write_result
from lmetric._core import FAST_TOKENIZER, Request, Router
from lmetric.engines.handover import CHAT
from lmetric.server.api.paths import RELAYED
from lmetric.server.api.request import parse
from lmetric.tokens.prompt import PromptTokenizer

VOCABULARY = 32_000
INSTANCES = 16
TURN_TOKENS = 500
NEW_TOKENS = 1_000
CORPUS_BYTES = 12 << 20
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or message.role == 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' }}{{- call.function | tojson }}{{- '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
PEER = """
import json, sys, time
from transformers import AutoTokenizer, __version__
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
result = {"version": __version__}
for name, conversations in json.load(sys.stdin).items():
    spent = []
    for messages in conversations:
        start = time.process_time()
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        spent.append((time.process_time() - start) * 1e3)
        assert len(ids) > 500
    result[name] = spent
print(json.dumps(result))
"""


def sources() -> Iterator[str]:
    """Returns the texts of the standard library, in a fixed order."""
    size = 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts or size > CORPUS_BYTES:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        size += len(text)
        yield text


def model_folder() -> Path:
    """Returns the folder of the tokenizer and its template, made on first use."""
    folder = ROOT / ".cache" / "bench-tokenizer"
    if not (folder / "tokenizer_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        special = [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            show_progress=False,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(sources(), trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


class Talk:
    """Texts of a given length in tokens, never the same twice."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        whole = "".join(sources())
        sample = whole[: 1 << 20]
        self._text = whole
        self._bytes_per_token = len(sample) / len(tokenizer.completion(sample))
        self._random = random.Random(1)

    def text(self, tokens: int) -> str:
        """Returns text of about `tokens` tokens."""
        length = int(tokens * self._bytes_per_token)
        start = self._random.randrange(len(self._text) - length)
        return f"{self._random.randrange(10**9)} {self._text[start : start + length]}"

    def turns(self, tokens: int) -> list[dict[str, str]]:
        """Returns a conversation of about `tokens` tokens that ends with an answer."""
        count = max(2, tokens // TURN_TOKENS // 2 * 2)
        roles = ("user", "assistant")
        return [{"role": roles[i % 2], "content": self.text(tokens // count)} for i in range(count)]


def measure(folder: Path, sizes: list[int], turns: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measures our figures. Returns the conversations for the peer."""
    tokenizer = PromptTokenizer.load(folder)
    talk = Talk(tokenizer)
    router = Router(block_size=16)
    for number in range(INSTANCES):
        router.add_instance(f"engine-{number}")
    parts: dict[str, float] = {}

    def decide(body: bytes) -> int:
        at = [time.thread_time_ns()]
        request = parse(RELAYED[CHAT], body).request
        at.append(time.thread_time_ns())
        text = tokenizer.chat_text(request)
        at.append(time.thread_time_ns())
        tokens = tokenizer.encode(text, at_most=1 << 30)
        at.append(time.thread_time_ns())
        _, ticket = router.route(Request(token_ids=tokens))
        at.append(time.thread_time_ns())
        ticket.sent()
        for name, start, end in zip(("parse", "render", "tokenise", "decide"), at, at[1:], strict=False):
            parts[name] = (end - start) / 1e6
        assert tokens is not None
        return len(tokens)

    ours: dict[str, Any] = {}
    for_peer: dict[str, Any] = {}
    for size in sizes:
        for turn in ("first", "later"):
            samples: list[float] = []
            by_part: dict[str, list[float]] = {}
            lengths, conversations = [], []
            history = talk.turns(size - NEW_TOKENS) if size > NEW_TOKENS else []
            for number in range(turns + 2):
                if turn == "first":
                    history = talk.turns(size - NEW_TOKENS) if size > NEW_TOKENS else []
                elif number == 0:
                    decide(orjson.dumps({"messages": history or talk.turns(0)}))
                messages = [*history, {"role": "user", "content": talk.text(NEW_TOKENS)}]
                body = orjson.dumps({"model": "m", "messages": messages, "stream": True})
                if number >= 2:  # The first two warm the code up.
                    conversations.append(messages)
                    start = time.thread_time_ns()
                    lengths.append(decide(body))
                    samples.append((time.thread_time_ns() - start) / 1e6)
                    for name, value in parts.items():
                        by_part.setdefault(name, []).append(value)
                else:
                    decide(body)
            name = f"{size} {turn}"
            ours[name] = {
                "tokens": lengths[0],
                "messages": len(conversations[0]),
                "ms": median_range(samples),
                "parts_ms": {part: median_range(values)[0] for part, values in by_part.items()},
            }
            for_peer[name] = conversations[: max(3, turns // 4)]
    return ours, for_peer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", type=Path, help="environment with transformers")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000, 10_000, 32_000, 100_000])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    folder, load = model_folder(), os.getloadavg()
    ours, conversations = measure(folder, arguments.sizes, arguments.turns)
    result = {**about(None, ["rustc"]), "fast_tokenizer": FAST_TOKENIZER, "ours": ours}
    if arguments.peer is not None:
        told = subprocess.run(
            [str(arguments.peer / "bin" / "python"), "-c", PEER, str(folder)],
            input=json.dumps(conversations),
            capture_output=True,
            text=True,
            check=True,
            env={"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PATH": ""},
        )
        peer = json.loads(told.stdout)
        result["versions"]["transformers"] = peer.pop("version")
        result["transformers"] = {name: median_range(values) for name, values in peer.items()}
    result["load_average"] = [load, os.getloadavg()]
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        for name, row in ours.items():
            line = f"{name:>14}: {row['tokens']:>7} tokens, {row['messages']:>4} messages"
            line += f", {row['ms'][0]:8.2f} ms"
            line += " (" + ", ".join(f"{part} {ms:.2f}" for part, ms in row["parts_ms"].items()) + ")"
            if "transformers" in result:
                line += f"; transformers {result['transformers'][name][0]:.1f} ms"
            print(line)
    what = "tokens-fast" if FAST_TOKENIZER else "tokens"
    print("raw file:", write_result(result, what, arguments.out), file=sys.stderr)


if __name__ == "__main__":
    main()

"""Prompts rebuilt from block ids: the right number of tokens; only equal ids give equal text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lmetric_lab.sim import prompts
from lmetric_lab.sim.prompts import PromptWriter, shipped_words
from lmetric_lab.sim.traces import Trace, load_trace


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(prompts._TOKENIZER))


def trace_of(tmp_path: Path, *requests: tuple[int, list[int]]) -> Trace:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": i * 100 + 1, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for i, (tokens, ids) in enumerate(requests)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_trace(path)


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1500])
def test_a_prompt_has_its_length_in_tokens(tmp_path: Path, tokenizer: Tokenizer, tokens: int) -> None:
    ids = list(range(7, 7 + -(-tokens // 512)))
    trace = trace_of(tmp_path, (tokens, ids), (tokens, []))
    writer = PromptWriter()
    assert len(tokenizer.encode(writer.prompt(trace, 0)).ids) == tokens
    assert len(tokenizer.encode(writer.prompt(trace, 1)).ids) == tokens  # no ids: text of its own


def test_only_shared_text_is_kept(tmp_path: Path) -> None:
    """Private text is as long as the prompt if a trace has no block IDs: thousands were kept."""
    trace = trace_of(tmp_path, (600, [7]), (60_000, []))
    writer = PromptWriter([" a", " b"])
    first = writer.prompt(trace, 0)
    writer.prompt(trace, 1)
    assert [len(text) for text in writer._cache.values()] == [2 * 512]
    assert writer.prompt(trace, 0) == first


def test_equal_ids_are_equal_tokens_up_to_there_and_no_further(tmp_path: Path, tokenizer: Tokenizer) -> None:
    trace = trace_of(
        tmp_path, (1300, [0, 1, 2]), (1536, [0, 1, 3]), (1300, [0, 1, 2]), (600, [0]), (600, [0])
    )
    writer = PromptWriter()
    tokens = [tokenizer.encode(writer.prompt(trace, i)).ids for i in range(5)]
    assert tokens[0][:1024] == tokens[1][:1024]
    assert tokens[0][1024:1032] != tokens[1][1024:1032]
    assert tokens[0] == tokens[2]
    assert tokens[3][:512] == tokens[0][:512] == tokens[4][:512]
    assert tokens[3][512:520] != tokens[4][512:520]  # past their ids, requests share nothing


def test_text_does_not_depend_on_the_process_but_on_the_seed(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, (8, [41]))
    assert PromptWriter().prompt(trace, 0) == PromptWriter().prompt(trace, 0)
    assert PromptWriter(seed=1).prompt(trace, 0) != PromptWriter().prompt(trace, 0)
    # Pinned: figures of different days are comparable only while the text stays the same.
    assert PromptWriter([" a", " b", " c", " d", " e"]).prompt(trace, 0) == " d d c a a c d d"


def test_a_part_of_a_block_is_its_beginning(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, (512, [5]), (100, [5]))
    writer = PromptWriter()
    assert writer.prompt(trace, 0).startswith(writer.prompt(trace, 1))


def test_the_cache_is_bounded_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_CACHED_BLOCKS", 2)
    trace = trace_of(tmp_path, (2048, [1, 2, 3, 4]))
    writer = PromptWriter()
    assert writer.prompt(trace, 0) == writer.prompt(trace, 0) == PromptWriter().prompt(trace, 0)
    assert len(writer._cache) == 2


def test_many_words_and_their_blocks_differ_from_the_first_tokens(tmp_path: Path) -> None:
    assert len(shipped_words()) > 500
    trace = trace_of(tmp_path, *[(16, [block]) for block in range(3000)])
    writer = PromptWriter()
    assert len({writer.prompt(trace, i) for i in range(3000)}) == 3000

"""The emulated engines' tokenizer and text."""

from __future__ import annotations

import importlib.util
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmetric import _core
from lmetric_lab.emulated.text import TOKENIZER_PATH, shared_text

TEXT = shared_text()
ANY_TEXT = st.text(max_size=60) | st.lists(
    st.sampled_from([" ", "\n", "\t", "a", "'", "<|im_end|>", "é", "1"])
).map("".join)


def generate(prompt: list[int], n: int) -> list[int]:
    return _core.generate(TEXT.words, TEXT.vocabulary, array("I", prompt), n)


def test_the_shipped_tokenizer_is_what_the_script_makes() -> None:
    path = Path(__file__).parent.parent / "scripts/make_tokenizer.py"
    spec = importlib.util.spec_from_file_location("make_tokenizer", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.build().to_str(pretty=False) + "\n" == TOKENIZER_PATH.read_text(encoding="utf-8")


def test_there_are_many_words_and_each_is_one_token() -> None:
    assert len(TEXT.words) > 500
    for word in TEXT.words:
        assert TEXT.encode(TEXT.decode([word])).tolist() == [word]


@given(ANY_TEXT, st.integers(1, 30))
def test_prompt_and_answer_tokenise_back_to_their_ids(prompt: str, n: int) -> None:
    ids = TEXT.encode(prompt).tolist()
    answer = generate(ids, n)
    pieces = b"".join(TEXT.pieces[token] for token in answer).decode()
    assert pieces == TEXT.decode(answer)
    assert TEXT.encode(prompt + pieces).tolist() == ids + answer


@given(st.text())
def test_any_text_survives(text: str) -> None:
    assert TEXT.decode(TEXT.encode(text).tolist()) == text


@given(st.lists(st.integers(0, TEXT.vocabulary - 1), max_size=40), st.integers(1, 30), st.data())
def test_any_engine_continues_any_other(prompt: list[int], n: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, n))
    whole = generate(prompt, n)
    assert generate(prompt + whole[:cut], n - cut) == whole[cut:]


def test_chat_template() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi {{ 1 + 1 }}"}]
    opened = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi {{ 1 + 1 }}"
    assert TEXT.render_chat(messages) == opened + "<|im_end|>\n<|im_start|>assistant\n"
    assert TEXT.render_chat(messages, add_generation_prompt=False, continue_final_message=True) == opened


def test_the_generator_refuses_what_it_does_not_know() -> None:
    with pytest.raises(_core.BadValueError, match="below 10"):
        _core.generate(array("I", [10]), 10, array("I"), 1)

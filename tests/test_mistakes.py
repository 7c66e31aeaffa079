"""Typical mistakes of users: the line that each one gets, with the value and what to do."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmetric.cli import main

MISTAKES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parent / "data" / "mistakes.yaml").read_text()
)
# Words of libraries, which say nothing about the field: pydantic, click, YAML, aiohttp, Python.
RAW = re.compile(
    r"Input should|Usage:|Invalid value|Traceback|ssl:default|Connect call|\[Errno|type=|for further|"
    r"mapping values|token was|block end|Field required|validation error|Error:|NoneType"
)


def named(mistake: dict[str, Any]) -> str:
    return f"{mistake['run']} {mistake.get('file', '')}".replace("\n", " ").strip()


def test_there_are_sixty_different_mistakes() -> None:
    assert len({named(each) for each in MISTAKES}) == len(MISTAKES) >= 60


@pytest.mark.parametrize("mistake", MISTAKES, ids=named)
def test_a_mistake_gets_one_line_in_the_words_of_its_field(
    mistake: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(mistake["run"])
    if "file" in mistake:
        (name,) = (word for word in words if "." in word and not word.startswith("-"))
        (tmp_path / name).write_text(mistake["file"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lmetric-router", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == mistake["code"]
    shown = capsys.readouterr()
    said = shown.err.rstrip()
    if said.startswith("lmetric-router: score: "):  # two lines show the place in the expression
        said, source, caret = said.split("\n")
        assert source.strip() in mistake["run"] + mistake.get("file", "")
        assert set(caret) <= {" ", "^"}
    assert said == mistake["says"]
    assert not RAW.search(said)
    assert shown.out == ""

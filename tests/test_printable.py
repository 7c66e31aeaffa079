"""Text of engines on terminals, in log lines and in labels of metrics: security L, attack 77.

A model's name, an error or a version with escape sequences, line ends or a changed direction is
shown with escapes.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.table import Table
from rich.text import Text
from structlog.testing import capture_logs

from lmetric.cli import show
from lmetric.config import Log
from lmetric.printable import printable
from lmetric.server.observe.logs import processors
from lmetric.server.observe.startup import startup_block
from server_world import FakeEngine, world

HOSTILE = "a\x1b[2J\x1b]0;t\x07\r\nevil\x9b31m\u202e\u2028\x00z"


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


def test_unprintable_characters_become_escapes() -> None:
    assert printable("Qwen/Qwen3-8B é 模型") == "Qwen/Qwen3-8B é 模型"
    assert printable("a\x1b[1m\r\n") == r"a\x1b[1m\r\n"
    assert printable("a\n\tb\x9b", "\n\t") == "a\n\tb\\x9b"
    assert harmless(printable(HOSTILE))


async def test_the_start_block_ready_and_metrics_show_names_with_escapes() -> None:
    fake = FakeEngine(
        cards=[{"id": HOSTILE}], extra_pages={"/version": (200, orjson.dumps({"version": HOSTILE}))}
    )
    with capture_logs() as log:
        it = world([fake])
        w = await it.__aenter__()
    try:
        block = startup_block(next(event for event in log if event["event"] == "listening"))
        assert harmless(block)
        assert len(block.split("\n")) < 12
        assert "evil" in block
        assert (await w.post({"model": HOSTILE, "prompt": "x"}))[0] == 200
        text = (await w.get("/metrics"))[1].decode()
        assert harmless(text)
        assert r'model="a\\x1b[2J' in text
        for path in ("/ready", "/v1/models", "/debug/engines", "/"):
            assert b"\x1b" not in (await w.get(path))[1]
        for event in log:
            assert harmless(rendered(event)), event
    finally:
        await it.__aexit__(None, None, None)


def rendered(event: Any) -> str:
    line: Any = dict(event)
    for processor in processors(Log()):
        line = processor(None, "info", line)
    return str(line)


@pytest.mark.parametrize("more", ["", " ", "="])
def test_log_lines_have_escapes(more: str) -> None:
    """The renderer itself leaves C1 controls and invisible characters as they are."""
    text = HOSTILE.replace("\r\n", "") + more
    assert harmless(rendered({"event": "x", "reason": text, "names": [text]}))
    assert rendered({"event": "x", "exception": "Traceback\n  line"}).count("\n") == 2


def test_log_lines_show_paths_as_texts() -> None:
    assert "file=/etc/router.yaml" in rendered({"event": "x", "file": Path("/etc/router.yaml")})


def test_tables_and_notes_of_commands_have_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Table("engine")
    shown.add_row(HOSTILE)
    shown.add_row(Text(HOSTILE, "bold red"))
    console = show.stdout()
    console.print(shown)
    console.print(HOSTILE + " [bold]x[/bold] :smile:")
    show.print_text(HOSTILE)
    show.print_table(["name"], [[HOSTILE]])
    show.note(HOSTILE + "\nsecond line")
    out = capsys.readouterr()
    assert harmless(out.out)
    assert harmless(out.err)
    assert "[bold]x[/bold] :smile:" in out.out
    assert out.err.count("\n") == 3


def test_colors_of_a_terminal_stay() -> None:
    file = io.StringIO()
    console = show._Console(file=file, force_terminal=True, color_system="standard")
    console.print(Text("down", "bold red"))
    assert file.getvalue() == "\x1b[1;31mdown\x1b[0m\n"

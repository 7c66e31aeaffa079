"""``lmetric-router top``: a running router in the terminal, and why requests went where."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    import asyncio

Column = Literal["batch", "queue", "queued_tokens", "cache", "hit_rate", "age_seconds"]


def command(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="Address of the router.")] = (
        "http://127.0.0.1:8080"
    ),
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LMETRIC__ADMIN__TOKEN",
            help="Admin token, or an API key for your own requests only.",
            show_default="none",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the present state once and exit.")] = False,
    sort: Annotated[Column, typer.Option(help="Column that orders the engines, highest first.")] = "batch",
    why: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Print why a request went to its engine, or was refused, and exit. ID: its header "
            "x-lmetric-decision, or x-request-id of a refused one.",
            show_default="none",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the present state, or the decision, as JSON and exit.")
    ] = False,
) -> None:
    """Show the engines, rates and requests of a running router.

    The tables change once a second. Problems come first. The key q ends it, and Ctrl-C. The page
    /ui of the router shows the same in a browser.
    """
    import asyncio

    from lmetric.cli.show import print_json, stdout
    from lmetric.top import read_decision, read_once, watch
    from lmetric.top_screen import screen
    from lmetric.top_screen import why as explained

    if not url.startswith(("http://", "https://")):
        hint = f"; did you mean http://{url}?" if "://" not in url else ""
        raise typer.BadParameter(f"{url!r} is not an http:// or https:// URL{hint}", param_hint="URL")
    if why is not None:
        record = asyncio.run(read_decision(url, why, token))
        if as_json:
            print_json(record)
        else:
            stdout().print(explained(record))
        return
    if once or as_json:
        state = asyncio.run(read_once(url, token))
        if as_json:
            print_json(state)
        else:
            console = stdout()
            console.print(screen(state, by=sort, width=console.width))
        return
    console = stdout()

    async def follow() -> None:
        from rich.live import Live

        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            async for state in watch(url, token):
                shown = screen(state, by=sort, height=console.height, width=console.width)
                live.update(shown, refresh=True)

    async def until_quit() -> None:
        with quit_key() as pressed:
            tasks = [asyncio.ensure_future(follow()), asyncio.ensure_future(pressed.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            for task in done:
                task.result()

    asyncio.run(until_quit())


@contextlib.contextmanager
def quit_key() -> Iterator[asyncio.Event]:
    """Yields an event that the key q sets. Without a terminal, nothing sets it.

    The terminal sends keys at once, without showing them, until the end of the block.
    """
    import asyncio
    import os
    import sys
    import termios

    pressed, file = asyncio.Event(), sys.stdin.fileno() if sys.stdin.isatty() else None
    if file is None:
        yield pressed
        return
    before = termios.tcgetattr(file)
    own = termios.tcgetattr(file)
    own[3] &= ~(termios.ICANON | termios.ECHO)
    loop = asyncio.get_running_loop()

    def read() -> None:
        keys = os.read(file, 64)
        if not keys or b"q" in keys.lower():
            pressed.set()

    termios.tcsetattr(file, termios.TCSADRAIN, own)
    loop.add_reader(file, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(file)
        termios.tcsetattr(file, termios.TCSADRAIN, before)

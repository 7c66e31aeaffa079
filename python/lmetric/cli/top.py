"""``lmetric-router top``: the engines and rates of a running router in the terminal."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Column = Literal["batch", "queue", "queued_tokens", "cache", "hit_rate", "age_seconds"]
_OTHER_LINES = 16  # lines of the screen beside the engines


def command(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="Address of the router.")] = (
        "http://127.0.0.1:8000"
    ),
    token: Annotated[
        str | None,
        typer.Option(
            envvar="LMETRIC_ADMIN__TOKEN",
            help="Admin token, or an API key for your own requests only.",
            show_default="none",
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the present state once and exit.")] = False,
    sort: Annotated[Column, typer.Option(help="Column that orders the engines, highest first.")] = "batch",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the present state as JSON and exit.")
    ] = False,
) -> None:
    """Show the engines and rates of a running router.

    The tables change once a second. Engines that are not usable come first. Ctrl-C ends it. The
    page /ui of the router shows the same in a browser, and why each request went to its engine.
    """
    import asyncio

    from lmetric.cli.show import print_json, stdout
    from lmetric.top import read_once, screen, watch

    if not url.startswith(("http://", "https://")):
        hint = f"; did you mean http://{url}?" if "://" not in url else ""
        raise typer.BadParameter(f"{url!r} is not an http:// or https:// URL{hint}", param_hint="URL")
    if once or as_json:
        state = asyncio.run(read_once(url, token))
        if as_json:
            print_json(state)
        else:
            stdout().print(screen(state, by=sort))
        return
    console = stdout()

    async def follow() -> None:
        from rich.live import Live

        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            async for state in watch(url, token):
                rows = max(console.height - _OTHER_LINES, 3)
                live.update(screen(state, by=sort, rows=rows), refresh=True)

    asyncio.run(follow())

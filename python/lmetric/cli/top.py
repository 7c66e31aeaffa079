"""``lmetric-router top``: a running router in the terminal, and why requests went where."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Column = Literal["batch", "queue", "queued_tokens", "cache", "hit_rate", "age_seconds"]


def command(
    url: Annotated[str, typer.Argument(metavar="[URL]", help="Address of the router.")] = (
        "http://127.0.0.1:8000"
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
            help="Print why the request of this decision went to its engine, and exit.",
            show_default="none",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the present state, or the decision, as JSON and exit.")
    ] = False,
) -> None:
    """Show the engines, rates and requests of a running router.

    The tables change once a second. Engines that are not usable come first. Ctrl-C ends it. The
    page /ui of the router shows the same in a browser.
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
            stdout().print(screen(state, by=sort))
        return
    console = stdout()

    async def follow() -> None:
        from rich.live import Live

        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            async for state in watch(url, token):
                live.update(screen(state, by=sort, height=console.height), refresh=True)

    asyncio.run(follow())

"""``lmetric-router canary``: a share of the traffic of a running router under another policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from lmetric.cli.help import Command

group = typer.Typer(
    help="Try another policy on a share of the live traffic.",
    no_args_is_help=True,
)

Url = Annotated[str, typer.Argument(metavar="[URL]", help="Address of the router.")]
Token = Annotated[
    str | None, typer.Option(envvar="LMETRIC__ADMIN__TOKEN", help="Admin token.", show_default="none")
]
Model = Annotated[str | None, typer.Option(help="Model.", show_default="the only one")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the state as JSON.")]
_URL = "http://127.0.0.1:8080"


@group.command("status", cls=Command)
def status(url: Url = _URL, token: Token = None, as_json: AsJson = False) -> None:
    """Show canaries and shadows, and their differences.

    An interval that excludes zero is a clear difference.
    """
    _run(url, token, "status", None, as_json)


@group.command("start", cls=Command)
def start(
    policy: Annotated[
        str, typer.Option(metavar="NAME_OR_EXPRESSION", help="Policy of the canary, or a score to minimize.")
    ],
    url: Url = _URL,
    share: Annotated[float, typer.Option(help="Share of the sessions, above 0 and below 1.")] = 0.1,
    knob: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Parameter of the policy; repeatable.", show_default="none"),
    ] = None,
    salt: Annotated[
        str | None,
        typer.Option(help="Text that decides which sessions are in which arm.", show_default="random"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Another setting of `canary`, such as warmup_seconds=30; repeatable.",
            show_default="none",
        ),
    ] = None,
    model: Model = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Route a share of the sessions under another policy.

    The router rolls the canary back if its TTFT or its errors are surely worse.
    """
    from lmetric.cli.settings import _pair

    body: dict[str, Any] = {"policy": policy, "share": share}
    for flag, texts in (("--knob", knob), ("--set", set_)):
        pairs = {name: value_of(value) for name, value in (_pair(flag, text) for text in texts or [])}
        body |= {"knobs": pairs} if flag == "--knob" and pairs else {} if flag == "--knob" else pairs
    body |= {name: value for name, value in (("salt", salt), ("model", model)) if value is not None}
    _run(url, token, "start", body, as_json)


@group.command("promote", cls=Command)
def promote(url: Url = _URL, model: Model = None, token: Token = None, as_json: AsJson = False) -> None:
    """Use the policy of the canary for all requests.

    It lasts until a restart or reload. Set `policy` in the configuration, too.
    """
    _run(url, token, "promote", {"model": model}, as_json)


@group.command("rollback", cls=Command)
def rollback(url: Url = _URL, model: Model = None, token: Token = None, as_json: AsJson = False) -> None:
    """End the canary, or undo its promotion.

    The policy from before the canary decides all requests.
    """
    _run(url, token, "rollback", {"model": model}, as_json)


def value_of(text: str) -> Any:
    """A number, true, false or null as such; another text unchanged."""
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, int | float | bool) or value is None else text


def _run(url: str, token: str | None, command: str, body: Mapping[str, Any] | None, as_json: bool) -> None:
    import asyncio

    from lmetric.canary.client import lines, send
    from lmetric.cli.show import print_json, stdout

    if not url.startswith(("http://", "https://")):
        hint = f"; did you mean http://{url}?" if "://" not in url else ""
        raise typer.BadParameter(f"{url!r} is not an http:// or https:// URL{hint}", param_hint="URL")
    given = {name: value for name, value in (body or {}).items() if name != "model" or value is not None}
    found = asyncio.run(send(url, token, command, given))
    if as_json:
        print_json(found)
        return
    for state in found if isinstance(found, list) else [found]:
        for line in lines(state):
            stdout().print(line, highlight=False)
    if command == "promote":
        stdout().print(
            "The configuration still has the old policy: set policy and knobs there, and remove canary.",
            highlight=False,
        )

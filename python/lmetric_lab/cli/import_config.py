"""``lmetric-router import-config``: translates the configuration of another router."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    file: Annotated[
        Path,
        typer.Argument(
            help="A script or Kubernetes manifest with the router's command line, or the router's own file."
        ),
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="KIND",
            help="The other router: sglang-router, smg, vllm-router, production-stack, llm-d, litellm, "
            "nginx or kubernetes.",
            show_default="found out from the file",
        ),
    ] = None,
) -> None:
    """Translate the configuration of another router.

    The output is YAML, with a comment for each setting without an equivalent. Save it, and
    check it with config --config FILE. Exit code 2: the file is not a configuration of a known
    router.
    """
    from lmetric_lab.migrate import import_config

    print(import_config(file, kind).render(), end="")

"""``lmetric-router tokenizer``: exports a model's tokenizer as the engines load it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of the model, or Hub repository OWNER/NAME.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write: new, empty, or an earlier export.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of the repository.", show_default="main")
    ] = None,
) -> None:
    """Export a tokenizer as the engines load it.

    vLLM and SGLang load tokenizers with transformers, which replaces parts of tokenizer.json for
    many models. The command needs transformers (extra `tokenizer`), in the version of the engines.
    The router does not need it. HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE apply.
    """
    from lmetric.cli.show import note
    from lmetric.tokens.export import export

    done = export(model, out, revision)
    note(
        f"loaded {model} as {done.tokenizer_class} with transformers {done.transformers}; "
        + (
            "its tokens differ from the model's tokenizer.json"
            if done.rebuilt
            else "as in its tokenizer.json"
        )
    )
    print(f"tokenizer: {done.folder}")

"""``python -m lmetric_lab.emulated``; flags are `EngineOptions`. Exit codes: 1 no start, 2 bad
flags."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pydantic import ValidationError

from lmetric.engines.errors import EngineStartError
from lmetric.standard_streams import open_closed
from lmetric.validation import expected
from lmetric_lab.emulated import EngineOptions, run_engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses the flags (None: flags of the process), runs the engine and returns the exit code."""
    open_closed()
    parser = argparse.ArgumentParser(
        prog="python -m lmetric_lab.emulated", description="An emulated vLLM engine."
    )
    for name, field in EngineOptions.model_fields.items():
        _, about, default = EngineOptions.help_of(name)
        flag, text = f"--{name.replace('_', '-')}", f"{about} Default: {default}."
        if field.annotation is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, action=action, help=text)
        else:
            parser.add_argument(flag, dest=name, default=argparse.SUPPRESS, help=text.replace("%", "%%"))
    try:
        options = EngineOptions.model_validate(vars(parser.parse_args(arguments)))
    except ValidationError as error:
        problems = [
            f"--{str(p['loc'][0]).replace('_', '-')} {p['input']!r}: {expected(p)}" for p in error.errors()
        ]
        parser.error("; ".join(problems))
    try:
        run_engine(options)
    except EngineStartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``lmetric-router profiles``: the values of ``--profile``."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    name: Annotated[str | None, typer.Argument(help="Print this profile as YAML.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the engine profiles, or print one.

    A profile has the step times of a model on a GPU. simulate, study, demo and emulated engines
    use profiles.
    """
    import yaml

    from lmetric.cli.show import print_json
    from lmetric.profiles import ProfileError, load_profile, shipped_profiles

    if name is not None:
        try:
            content = load_profile(name).model_dump(exclude_none=True)
        except ProfileError as error:
            raise typer.BadParameter(str(error), param_hint="NAME") from None
        if as_json:
            print_json(content)
        else:
            # YAML breaks a line at the first space behind `width`.
            print(yaml.safe_dump(content, sort_keys=False, width=50), end="")
        return
    profiles = {each: load_profile(each) for each in shipped_profiles()}
    rows = [
        {
            "name": each,
            "cache_tokens": profile.cache_blocks * profile.block_tokens,
            "max_sequences": profile.max_sequences,
            "max_batch_tokens": profile.max_batch_tokens,
        }
        for each, profile in profiles.items()
    ]
    if as_json:
        print_json(rows)
        return
    width = max(map(len, profiles))
    print(f"{'name':<{width}}  {'cache, tokens':>13}  {'sequences':>9}  {'tokens per step':>15}")
    for row in rows:
        cache, sequences, batch = (row[key] for key in ("cache_tokens", "max_sequences", "max_batch_tokens"))
        print(f"{row['name']:<{width}}  {cache:>13,}  {sequences:>9,}  {batch:>15,}")

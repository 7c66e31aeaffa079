"""``lmetric-router bench``: the latency of routing decisions on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from lmetric.defaults import DEFAULT_POLICY

STAGES = ("hash", "match", "score", "commit", "total")


def command(
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy name; repeatable.", show_default=f"{DEFAULT_POLICY}, round_robin, vllm"),
    ] = None,
    instances: Annotated[
        list[int] | None,
        typer.Option(help="Number of instances; repeatable.", show_default="4, 16, 64, 256, 1024"),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(help="Prompt length; repeatable.", show_default="1000, 8000, 32000, 100000"),
    ] = None,
    iterations: Annotated[int, typer.Option(min=1, help="Decisions timed for each row.")] = 1000,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    stored_pairs: Annotated[int, typer.Option(min=0, help="(instance, block) pairs in the index.")] = 200_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the latency of routing decisions.

    Stages: hash, match, score, commit, and the total. The benchmark times the Rust core in
    process, without HTTP. Every instance caches the first tenth of each prompt, and one instance
    caches nine tenths. Defaults: lmetric, round_robin and vllm over 4 to 1,024 instances and 1k
    to 100k prompt tokens.
    """
    from rich.progress import Progress

    from lmetric._core import bench_decision
    from lmetric.cli.show import print_json, print_table, stderr
    from lmetric_lab.machine import machine

    cells = [
        (name, count, tokens)
        for name in policy or [DEFAULT_POLICY, "round_robin", "vllm"]
        for count in instances or [4, 16, 64, 256, 1024]
        for tokens in prompt_tokens or [1_000, 8_000, 32_000, 100_000]
    ]
    results: list[dict[str, Any]] = []
    with Progress(console=stderr(), transient=True) as progress:
        for name, count, tokens in progress.track(cells, description="timing decisions"):
            results += bench_decision(
                policies=[name],
                instances=[count],
                prompt_tokens=[tokens],
                iterations=iterations,
                block_size=block_size,
                stored_pairs=stored_pairs,
            )
    setting = {"iterations": iterations, "block_size": block_size, "stored_pairs": stored_pairs}
    about = machine()
    if as_json:
        print_json({"results": results, **setting, "machine": about})
        return
    rows = []
    for index in range(0, len(results), len(STAGES)):
        cell = results[index : index + len(STAGES)]
        times = {row["stage"]: f"{row['p50_us']:.2f} / {row['p99_us']:.2f}" for row in cell}
        first = cell[0]
        rows.append(
            [first["policy"], str(first["instances"]), str(first["prompt_tokens"]), *map(times.get, STAGES)]
        )
    title = f"Decision latency in us, p50 / p99 of {iterations} ({about['cpu']}, {about['cores']} cores)"
    print_table(["policy", "instances", "prompt tokens", *STAGES], rows, title=title, keys=3)

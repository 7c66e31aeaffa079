"""`bench/engine_versions.py`, and its tables of the versions of vLLM and SGLang."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

from studies import ROOT, result_files

SGLANG = {
    "srt/disaggregation/kv_events.py": "class BlockStored:\n    block_hashes: list[int]\n    {field}\n",
    "srt/entrypoints/openai/protocol.py": "class A:\n    n: int = {default}\n",
    "srt/managers/io_struct.py": "",
    "srt/entrypoints/http_server.py": "app.{verb}('/flush_cache')\napp.get('/server_info')\n",
    "srt/utils/common.py": "route = Mount('/metrics', app)\n",
    "srt/observability/metrics.py": "names = ['sglang:num_running_reqs', {metric}]\n",
    "srt/server_args.py": "class ServerArgs:\n    model_path: str\n",
}


def tree(folder: Path, **values: str) -> Path:
    """Sources of an engine, with these values in them."""
    for name, text in SGLANG.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.format(**values))
    return folder


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    return importlib.import_module("engine_versions")


def test_names_that_differ_are_found(script: ModuleType, tmp_path: Path) -> None:
    old = tree(tmp_path / "old", field="lora_id: int", default="1", verb="get", metric="'sglang:token_usage'")
    new = tree(
        tmp_path / "new", field="salt: str", default="2", verb="post", metric="'sglang:num_queue_reqs'"
    )
    rows = script.compare("sglang", old, new)
    found = [tuple(row.values()) for row in rows if row["change"] != "missing"]
    assert found == [
        ("events", "BlockStored.lora_id", "removed", "", "int", ""),
        ("events", "BlockStored.salt", "added", "", "", "str"),
        ("fields", "A.n", "changed", "", "int = 1", "int = 2"),
        ("paths", "/flush_cache", "changed", "", "get", "post"),
        ("metrics", "sglang:num_queue_reqs", "added", "yes", "", ""),
        ("metrics", "sglang:token_usage", "removed", "yes", "", ""),
    ]
    missing = {row["name"] for row in rows if row["change"] == "missing"}
    assert {"/v1/loads", "--enable-metrics"} <= missing
    assert not missing & {"/metrics", "/server_info", "--model-path", "sglang:num_running_reqs"}


def test_a_folder_of_something_else_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected the folder of an unpacked engine"):
        script.compare("vllm", tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("engine", "older"),
    [
        ("vllm", {"vllm:gpu_cache_usage_perc"}),  # the name until 0.10
        ("sglang", set()),
    ],
)
def test_the_new_version_has_all_names_that_the_router_uses(engine: str, older: set[str]) -> None:
    rows = result_files.read_table(ROOT / "bench" / "results" / f"engine_versions_{engine}.csv")
    used = {row["name"]: row["change"] for row in rows if row["router"] == "yes"}
    assert used == dict.fromkeys(older, "missing")
    assert len(rows) > 50

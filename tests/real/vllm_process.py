"""Real vLLM engines as child processes, on CPU, with a tiny model."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CACHE = ROOT / ".cache" / "vllm"
START_SECONDS = 900.0  # on a crowded machine
NAMED = {name: os.environ.get(f"TEST_{name}_VENV") for name in ("VLLM", "AIPERF", "CLIENTS")}

TORCHVISION = "torchvision==0.28.0"  # for torch 2.13
MODEL = "tiny"
BLOCK = 32  # tokens; on CPU a multiple of 32
# The flags that docs/reference/engines.md asks operators to set, and flags that make it small.
FLAGS: dict[str, Any] = {
    "served_model_name": MODEL,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 4096,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
    "enable_prompt_tokens_details": True,
    "enable_request_id_headers": True,
    "scheduling_policy": "priority",
    "enable_auto_tool_choice": True,
    "tool_call_parser": "hermes",
    "uvicorn_log_level": "warning",
}
# NIXL between engines on CPU, over TCP; docs/reference/engines.md tells it with what GPUs need.
NIXL: dict[str, Any] = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"kv_lease_duration": 30},
}
# NIXL in both directions. Fetched blocks are released soon. Blocks to be fetched are held for long:
# on busy machines, a transfer of a few tokens took up to 83 s. Blocks fetched after their lease may
# belong to another prompt.
BIDIRECTIONAL: dict[str, Any] = NIXL | {
    "kv_connector_extra_config": {
        "kv_lease_duration": 300,
        "decoder_kv_blocks_ttl": 15,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 0,
        # NIXL's threads poll all the time: no more of them than it needs.
        "num_threads": 0,
    },
}


def cpu_tier(size_bytes: int, **settings: Any) -> dict[str, Any]:
    """Flags of an engine with a tier of this size in host memory (`cpu_offload_spec.py`)."""
    extra = {
        "spec_name": "CpuBuildSpec",
        "spec_module_path": "cpu_offload_spec",
        "cpu_bytes_to_use": size_bytes,
        **settings,
    }
    return {
        "environ": {"PYTHONPATH": str(HERE)},
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    }


def hidden_states(folder: Path, layers: Sequence[int], **settings: Any) -> dict[str, Any]:
    """Flags of an engine that writes the states after this layer, 0 to the number of layers, with
    the connector of lmetric-vllm and its settings."""
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {
        "environ": {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'integrations' / 'vllm'}"},
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": draft,
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "lmetric_vllm",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)} | settings,
        },
    }


ENVIRONMENT = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": "300",  # crowded cores render slowly
    # Or vLLM ends an engine whose worker is paused for 5 minutes: 500 for all requests in flight.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Holds a lock in the cache: two sessions do not make the same thing at once."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def environment() -> Path:
    """The virtual environment with vLLM: $TEST_VLLM_VENV, or a cached one, made on first use."""
    if named := NAMED["VLLM"]:
        if not (Path(named) / "bin" / "python").exists():
            raise FileNotFoundError(f"TEST_VLLM_VENV={named}: no virtual environment there")
        return Path(named)
    target = CACHE / "environment"
    with locked("environment"):
        if not (target / "installed").exists():
            subprocess.run([HERE / "install_vllm", target], check=True, timeout=1800)
            (target / "installed").touch()
    return target


def model(venv: Path, *size: int) -> Path:
    """The folder of the tiny model, made the first time; `size`: layers and hidden size of a larger
    one."""
    name = "-".join(map(str, (MODEL, *size)))
    target = CACHE / name
    maker = HERE / "make_model.py"
    with locked(name):
        made_by = target / "made_by"
        if not made_by.exists() or made_by.read_text() != maker.read_text():
            command = [venv / "bin" / "python", maker, target, *map(str, size)]
            subprocess.run(command, check=True, timeout=300)
            made_by.write_text(maker.read_text())
    return target


def kv_bytes(layers: int, hidden: int) -> int:
    """Bytes of a token's KV cache in the models of `make_model.py`.

    Two tensors of float32 for the only KV head, half of the hidden size.
    """
    return layers * 2 * hidden // 2 * 4


def vision_model(venv: Path) -> tuple[Path, Path]:
    """The folder of the tiny vision model, and that of torchvision, which its image processor
    needs; each made the first time."""
    target, maker = CACHE / "vision", HERE / "make_vision_model.py"
    with locked("vision"):
        made_by = target / "made_by"
        if not made_by.exists() or made_by.read_text() != maker.read_text():
            python, packages = venv / "bin" / "python", target / "packages"
            # Apart: `install_vllm` keeps it out of the environment.
            install = ["-m", "pip", "install", "-q", "--no-deps", "--upgrade", "--target", packages]
            subprocess.run([python, *install, TORCHVISION], check=True, timeout=600)
            environ = {**os.environ, "PYTHONPATH": str(packages)}
            subprocess.run([python, maker, target / "model"], check=True, timeout=300, env=environ)
            made_by.write_text(maker.read_text())
    return target / "model", target / "packages"


def free_port() -> int:
    """A TCP port that is free now. It is below the ports of outgoing connections (Linux: from
    32,768), so it is still free when an engine listens there half a minute later."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def command_line(flags: dict[str, Any]) -> list[str]:
    """The words of vLLM flags: ``max_num_seqs=8`` gives ``--max-num-seqs 8``. A list gives several
    words after the flag; True gives the bare flag, False ``--no-…``, and None nothing."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@dataclass
class VllmEngine:
    """One engine: its flags (over `FLAGS`), its address, its processes."""

    venv: Path
    model: Path
    folder: Path
    flags: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    events_port: int = field(default_factory=free_port)
    replay_port: int = field(default_factory=free_port)
    nixl_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        """As the router calls it."""
        return f"127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        """The file with the engine's output."""
        return self.folder / f"{self.port}.log"

    def all_flags(self) -> dict[str, Any]:
        """The flags it is started with."""
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{self.replay_port}",
        }
        return FLAGS | {"kv_events_config": events} | self.flags

    def start(self) -> None:
        """Starts it; `wait` until it is ready."""
        words = command_line({"model": self.model, "host": "127.0.0.1", "port": self.port} | self.all_flags())
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("LMETRIC_", "PYTHON"))}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.venv / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=inherited
                | ENVIRONMENT
                | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.nixl_port)}
                | self.environ,
                start_new_session=True,
            )

    def healthy(self) -> bool:
        """Whether it answers GET /health well."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def wait(self) -> None:
        """Until it is ready. Raises RuntimeError with the end of its log where it ends instead."""
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                what = "is not ready" if self.process.poll() is None else "ended"
                self.stop()
                raise RuntimeError(f"the engine on port {self.port} {what}:\n{self.said()}")
            time.sleep(0.3)

    def said(self, characters: int = 6000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:] if self.log.exists() else ""

    def first_error(self, lines: int = 80, width: int = 300) -> str:
        """The lines of its log from the first error on: the end of the log has an error for each
        request in flight, and not the cause."""
        with self.log.open(errors="replace") as log:
            found = itertools.dropwhile(lambda line: " ERROR " not in line, log)
            return "\n".join(line.rstrip()[:width] for line in itertools.islice(found, lines))

    def processes(self) -> list[int]:
        """Ids of all processes of the session: workers outlive the process that we started."""
        if self.process is None:
            return []
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue  # it ended just now
                if int(fields[3]) == self.process.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def kill(self) -> None:
        """Ends it at once, as a machine that fails."""
        self._signal(signal.SIGKILL, 10)

    def stop(self) -> None:
        """SIGTERM; SIGKILL for what is left after 20 s."""
        self._signal(signal.SIGTERM, 20)
        self._signal(signal.SIGKILL, 10)
        self.process = None

    def freeze(self) -> None:
        """Stops all its processes, like a machine that stalls; `thaw` resumes them."""
        for pid in self.processes():
            os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets what was frozen go on."""
        for pid in self.processes():
            os.kill(pid, signal.SIGCONT)

    def _signal(self, number: signal.Signals, patience_seconds: float) -> None:
        if self.process is None:
            return
        targets = [self.process.pid] if number == signal.SIGTERM else self.processes()
        for pid in targets:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        deadline = time.monotonic() + patience_seconds
        while self.processes() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.05)
        self.process.poll()


class Engines:
    """Engines that tests share: those with the flags asked for are used again, others make room."""

    AT_ONCE = 2  # each takes 1.4 GB, and a core while it starts

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[VllmEngine] = []
        self.handed_out: list[VllmEngine] = []  # in the present test

    def get(self, count: int = 1, *, environ: dict[str, str] | None = None, **flags: Any) -> list[VllmEngine]:
        """`count` engines that are ready, with `flags` over the defaults (see `command_line`).

        ``kv_events_config=None`` leaves the events off. A test may kill and restart what it got.
        """
        environ = environ or {}
        fitting = [
            engine
            for engine in self._running
            if engine not in self.handed_out and (engine.flags, engine.environ) == (flags, environ)
        ]
        got = [engine for engine in fitting if engine.healthy()][:count]
        keep = [*got, *self.handed_out]
        room = self.AT_ONCE - count - len(self.handed_out)
        for engine in [e for e in self._running if e not in keep]:
            if room <= 0 or not engine.healthy():
                engine.stop()
                self._running.remove(engine)
            room -= 1
        venv = environment()
        new = [
            VllmEngine(venv, model(venv), self._folder, dict(flags), dict(environ))
            for _ in range(count - len(got))
        ]
        self._running += new
        self.handed_out += [*got, *new]
        for engine in new:
            engine.start()
        for engine in new:
            engine.wait()
        return [*got, *new]

    def stop(self) -> None:
        """Stops all."""
        for engine in self._running:
            engine.stop()
        self._running.clear()

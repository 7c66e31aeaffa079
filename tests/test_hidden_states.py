"""Files of hidden states: which requests, the limit of bytes, and how the collector reads them.
`tests/real/test_real_hidden_states.py` runs an engine that writes them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

import train_lengths.collect
import train_lengths.samples
from lmetric.lengths import LengthsError
from lmetric.lengths.files import STATES_FORMAT
from lmetric_vllm.folder import EVERY, StatesFolder, is_collected, name_of
from lmetric_vllm.settings import SettingsError, read_connector_settings
from train_lengths.append import locked_samples
from train_lengths.collect import collect, request_of
from train_lengths.samples import Samples, load_samples, save_samples
from train_lengths.states import read_states

ROOT = Path(__file__).parents[1]
ABOUT = {"format": STATES_FORMAT, "prompt_tokens": "7", "answer_tokens": "50", "every": str(EVERY)}


def states(seed: int, rows: int = 3, width: int = 4) -> Any:
    return np.random.default_rng(seed).normal(size=(rows, width)).astype(np.float32)


def a_file(folder: Path, request_id: str, data: bytes) -> Path:
    assert StatesFolder(folder, 1 << 30).write(name_of(request_id), data)
    return folder / f"{name_of(request_id)}.safetensors"


def by_hand(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "states"
    made.mkdir()
    return made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "kv_connector_extra_config.share: missing"),
        ({"share": 1.5}, "kv_connector_extra_config.share: expected at most 1, got 1.5"),
        ({"share": float("nan")}, "share: expected a finite number"),
        ({"max_bytes": 0}, "kv_connector_extra_config.max_bytes: expected at least 1, got 0"),
        ({"shared_storage_path": ""}, "expected at least 1 character, got ''"),
        ({"allow_custom_save_path": True}, "allow_custom_save_path: unknown setting"),
    ],
)
def test_settings_that_are_wrong_are_named(given: dict[str, Any], message: str) -> None:
    whole = {"share": 0.5, "shared_storage_path": "/s"} | given if given else given
    with pytest.raises(SettingsError) as refused:
        read_connector_settings(whole)
    assert message in str(refused.value)
    assert str(refused.value).startswith("--kv-transfer-config: ")


def test_a_share_of_the_requests_is_collected() -> None:
    ids = [f"cmpl-{number}" for number in range(4000)]
    found = [sum(is_collected(each, share) for each in ids) / len(ids) for share in (0, 0.1, 0.5, 1)]
    assert found[0] == 0
    assert found[1:3] == pytest.approx([0.1, 0.5], abs=0.03)
    assert found[3] == 1
    # Those of a smaller share are among those of a larger one.
    assert {each for each in ids if is_collected(each, 0.1)} < {
        each for each in ids if is_collected(each, 0.5)
    }


def test_a_folder_has_at_most_its_bytes(folder: Path) -> None:
    (folder / "of_an_engine_that_ended.partial").write_bytes(b"x" * 60)
    written = StatesFolder(folder, 100)
    (folder / "other").write_bytes(b"x" * 30)  # counts, too
    assert written.write("a", b"x" * 50)
    assert not written.write("b", b"x" * 21)
    assert written.write("b", b"x" * 20)
    assert sorted(path.name for path in folder.iterdir()) == ["a.safetensors", "b.safetensors", "other"]
    assert stat.S_IMODE((folder / "a.safetensors").stat().st_mode) == 0o600
    (folder / "a.safetensors").unlink()
    assert written.write("c", b"x" * 50)


def test_a_full_disk_leaves_no_partial_file(folder: Path) -> None:
    """The engine logs the error and goes on. Later files are written again."""
    written = StatesFolder(folder, 100)
    (folder / "a.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device"):
        written.write("a", b"x" * 60)
    assert list(folder.iterdir()) == []
    assert written.write("a", b"x" * 60), "bytes that were not written count"


def test_many_files_make_no_write_slower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine leaves states out if writes are slow. With 4,000 files that happened."""
    counts = []
    scan = os.scandir

    def counted(path: Path) -> Any:
        counts.append(path)
        return scan(path)

    written = StatesFolder(folder, 250)
    monkeypatch.setattr(os, "scandir", counted)
    assert all(written.write(str(number), b"x") for number in range(250))
    assert len(counts) == 1
    # A full folder: one count for many refused writes, and writes again after reading.
    assert not any(written.write("full", b"x") for _ in range(30))
    assert len(counts) == 11
    (folder / "0.safetensors").unlink()
    assert sum(written.write(f"again {number}", b"x") for number in range(3)) == 1


@pytest.mark.parametrize("name", ["none", "file"])
def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"shared_storage_path: expected a folder that the engine can"):
        StatesFolder(tmp_path / name, 100)


def test_names_of_files_come_from_no_client(folder: Path) -> None:
    path = a_file(folder, "cmpl-../../etc/passwd", save({"hidden_states": states(0)}, ABOUT))
    assert path.parent == folder
    assert [each.name for each in folder.iterdir()] == [path.name]


def test_files_become_samples_and_are_deleted(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "samples.npz"
    first, second = states(1), states(2)
    one = a_file(folder, "a", save({"hidden_states": first}, ABOUT))
    assert collect(folder, out, skipped := [], hidden_size=4) == 1
    assert not list(folder.iterdir())
    two = a_file(folder, "b", save({"hidden_states": second.astype(np.float16)}, ABOUT))
    (folder / "not_ready.partial").write_bytes(b"half")
    assert collect(folder, out, skipped, hidden_size=4) == 1
    assert [path.name for path in folder.iterdir()] == ["not_ready.partial"]
    assert skipped == []
    samples = load_samples(out)
    assert samples.feature_names == ("h0", "h1", "h2", "h3", "log_generated_tokens", "log_prompt_tokens")
    assert (samples.features[:3, :4] == first).all()
    assert (samples.features[3:, :4] == second.astype(np.float16)).all()
    assert np.expm1(samples.column("log_generated_tokens")).tolist() == pytest.approx([0, 20, 40] * 2)
    assert np.expm1(samples.column("log_prompt_tokens")).tolist() == pytest.approx([7] * 6)
    assert samples.remaining.tolist() == [50, 30, 10] * 2
    assert samples.request_ids.tolist() == [request_of(one)] * 3 + [request_of(two)] * 3


def test_16_bit_states_are_read(folder: Path) -> None:
    given = np.array([[1.5, -2.0, 3e38]], np.float32)
    upper = (given.view(np.uint32) >> 16).astype("<u2").tobytes()
    about = ABOUT | {"answer_tokens": "1"}
    tensor = {"dtype": "BF16", "shape": [1, 3], "data_offsets": [0, 6]}
    path = a_file(folder, "a", by_hand({"__metadata__": about, "hidden_states": tensor}, upper))
    assert read_states(path, 3).states[0].tolist() == pytest.approx(given[0].tolist(), rel=0.01)


def test_an_interrupted_run_is_repeated(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "samples.npz"
    for number in range(5):
        a_file(folder, str(number), save({"hidden_states": states(number)}, ABOUT))
    monkeypatch.setattr(train_lengths.collect, "BATCH_BYTES", 2 * 3 * 6 * 4)  # two requests
    deleted: list[Path] = []
    unlink = Path.unlink

    def ends_at_the_third(path: Path, missing_ok: bool = False) -> None:
        if path.parent == folder:
            if len(deleted) == 2:
                raise KeyboardInterrupt
            deleted.append(path)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", ends_at_the_third)
    with pytest.raises(KeyboardInterrupt):  # when two batches are on the disk, and one is deleted
        collect(folder, out, [], hidden_size=4)
    monkeypatch.undo()
    assert len(load_samples(out)) == 4 * 3
    assert len(list(folder.iterdir())) == 3
    assert collect(folder, out, [], hidden_size=4) == 1
    assert not list(folder.iterdir())
    samples = load_samples(out)
    assert len(samples) == 5 * 3
    assert len(set(samples.request_ids.tolist())) == 5


def with_about(**changes: str) -> bytes:
    return save({"hidden_states": states(0)}, ABOUT | changes)


def with_tensor(**changes: Any) -> bytes:
    tensor = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]} | changes
    return by_hand({"__metadata__": ABOUT, "hidden_states": tensor}, states(0).tobytes())


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not a safetensors file"),
    "short": (b"\x01\x00", "not a safetensors file"),
    "long header": ((1 << 60).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    "half": (with_about()[:-4], "the states are not those of 50 tokens, one in 20"),
    "longer": (with_about() + b"....", "the states are not those of 50 tokens"),
    "pickle": (b"\x80\x04cos\nsystem\n(S'touch x'\ntR.", "not a safetensors file"),
    "no json": (by_hand(b"{"), "a header without the fields"),
    "no text": (by_hand(b"\xff\xfe{}"), "a header without the fields"),
    "deep": (by_hand(b"[" * 16_000), "a header without the fields"),
    "list": (by_hand([1]), "a header without the fields"),
    "of another": (by_hand({"__metadata__": {"format": "pt"}, "hidden_states": {}}), "without the fields"),
    "stock": (save({"hidden_states": states(0)}), "a header without the fields"),
    "format": (with_about(format="pt"), "format is not 'lmetric-hidden-states'"),
    "no tokens": (with_about(answer_tokens="0"), "answer_tokens is not a number from 1"),
    "digits": (with_about(answer_tokens="9" * 5000), "answer_tokens is not a number from 1"),
    "fewer rows": (with_about(answer_tokens="30"), "the states are not those of 30 tokens"),
    "no end": (with_about(every="0"), "every is not a number"),
    "type": (with_tensor(dtype="I64"), "the type is not one of F32, F16, BF16"),
    "type list": (with_tensor(dtype=["F32"]), "the type is not one of F32"),
    "shape": (with_tensor(shape=[4, 3]), "the states are not those"),
    "huge shape": (with_tensor(shape=[3, 1 << 62]), "the states are not those"),
    "no shape": (with_tensor(shape=None), "the states are not those"),
    "offsets": (with_tensor(data_offsets=[0, 1 << 40]), "the states are not those"),
    "nan": (save({"hidden_states": states(0) * np.float32(np.nan)}, ABOUT), "not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_broken_files_are_skipped_with_a_reason(tmp_path: Path, folder: Path, name: str) -> None:
    data, reason = HOSTILE[name]
    broken = a_file(folder, "broken", data)
    good = a_file(folder, "good", with_about())
    skipped: list[str] = []
    assert collect(folder, tmp_path / "samples.npz", skipped, hidden_size=4) == 1
    assert broken.exists()
    assert not good.exists()
    (said,) = skipped
    assert said.startswith(f"{broken}: ")
    assert reason in said


def test_what_is_no_file_is_skipped(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(with_about())
    paths = [folder / f"{name_of(str(number))}.safetensors" for number in range(4)]
    paths[0].symlink_to(secret)
    os.mkfifo(paths[1])
    paths[2].mkdir()
    paths[3].write_bytes(b"x" * 1001)
    monkeypatch.setattr(train_lengths.states, "MAX_FILE_BYTES", 1000)
    assert collect(folder, out := tmp_path / "samples.npz", skipped := [], hidden_size=4) == 0
    assert len(skipped) == 4
    assert any("has 1,001 bytes, at most 1,000 are read" in reason for reason in skipped)
    assert not out.exists()
    assert secret.exists()


def test_a_file_cannot_choose_the_size_of_states(tmp_path: Path, folder: Path) -> None:
    """Neither the first file of a samples file, nor the first one of a run."""
    out = tmp_path / "samples.npz"
    for number in range(2):
        wide = folder / f"{number:032x}.safetensors"  # read before the others
        wide.write_bytes(save({"hidden_states": states(1, width=5)}, ABOUT))
        a_file(folder, str(number), with_about())
        assert collect(folder, out, skipped := [], hidden_size=4) == 1
        reason = "the states are not those of 50 tokens, one in 20, with 4 numbers each"
        assert skipped == [f"{folder / f'{each:032x}.safetensors'}: {reason}" for each in range(number + 1)]
    assert load_samples(out).features.shape == (2 * 3, 4 + 2)
    with pytest.raises(LengthsError, match="other features than those in the file"):
        collect(folder, out, [], hidden_size=5)


def small(**changes: Any) -> Samples:
    columns: dict[str, Any] = {"features": states(0, 2, 2), "remaining": np.ones(2, np.float32)}
    columns |= {"request_ids": np.zeros(2, np.int64), "feature_names": ("a", "b")}
    return Samples(**(columns | changes))


def test_samples_are_appended_to_a_file_of_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "samples.npz"
    save_samples(small(), out)
    with locked_samples(out) as samples:
        samples.append([small(request_ids=np.array([3, 4])), small()])
    assert load_samples(out).request_ids.tolist() == [0, 0, 3, 4, 0, 0]
    whole = out.read_bytes()
    with locked_samples(out) as samples:
        with pytest.raises(LengthsError, match="other features than those in the file"):
            samples.append([small(feature_names=("a", "c"))])
        monkeypatch.setattr("train_lengths.append.MAX_SAMPLE_BYTES", 2 * 20 * 7)
        with pytest.raises(LengthsError, match=r"full \(6 samples\); name another file"):
            samples.append([small()])
    assert out.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [out]
    out.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LengthsError, match="not a samples file"), locked_samples(out):
        pass


def ran(*words: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "train_lengths.collect", *map(str, words)],
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'bench'}"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stderr


def test_the_command(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "samples.npz"
    a_file(folder, "a", with_about())
    broken = a_file(folder, "b", b"")
    reason = f"skipped: {broken}: not a safetensors file\n"
    assert ran(folder, "--hidden-size", 4, "--out", out) == (
        0,
        f"{reason}{out}: 1 more requests; 1 files skipped\n",
    )
    none = tmp_path / "none"
    assert ran(none, "--hidden-size", 4, "--out", out) == (
        2,
        f"train_lengths: {none}: No such file or directory\n",
    )

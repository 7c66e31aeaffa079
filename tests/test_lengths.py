"""Remaining lengths: the network by hand, files, samples from traces, baselines, training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmetric.lengths import (
    PAPER_FEATURES,
    PAPER_HIDDEN,
    ErrorTable,
    LengthsError,
    MlpPredictor,
    error_table,
    load_npz,
    load_onnx,
    load_predictor,
    save_predictor,
    write_onnx,
)
from lmetric.lengths.files import read_arrays
from lmetric.lengths.network import layer_shapes
from lmetric_lab.sim.traces import Trace
from lmetric_lab.sim.traces.turns import SHARED_AFTER
from train_lengths.baselines import Survival, baselines
from train_lengths.fit import Training, fit
from train_lengths.from_trace import TRACE_FEATURES, find_turns, samples_from_trace
from train_lengths.samples import Samples, load_samples, save_samples, split_by_request

PYTHON = Path(__file__).parent.parent / "python"


def floats(*values: Any) -> Any:
    return np.array(values, dtype=np.float32)


def tiny(**changes: Any) -> MlpPredictor:
    """2 features, hidden 2, sigma by prediction (edge 25) and by the second feature (edge 5)."""
    made = MlpPredictor(
        feature_names=("a", "b"),
        feature_mean=floats(1, 0),
        feature_scale=floats(2, 1),
        target_scale=10.0,
        weights=(floats([1, -1], [0.5, 2]), floats([3, 0.5])),
        biases=(),
        errors=ErrorTable(floats(25), 1, floats(5), floats([1, 2], [3, 4])),
        source="by hand",
    )
    return replace(made, **changes)


def test_the_network_is_equation_2() -> None:
    remaining, sigma = tiny().predict(np.array([[5, 1], [1, 4], [3, 8], [-9, 0]]))
    # Row 0: h = (2, 1); W1 h = (1, 3); w2 relu = 3 + 1.5 = 4.5. Row 1: h = (0, 4): (-4, 8) -> 4.
    # Row 2: h = (1, 8): (-7, 16.5) -> 8.25. Row 3: h = (-5, 0): (-5, -2.5) -> 0.
    assert remaining.tolist() == [45.0, 40.0, 82.5, 0.0]
    assert sigma.tolist() == [3.0, 3.0, 4.0, 1.0]
    assert (remaining.dtype, sigma.dtype) == (np.float32, np.float32)


def test_biases_come_before_relu_and_predictions_stay_above_0() -> None:
    made = tiny(biases=(floats(4, -8), floats(-10)))
    # Row 1 of before: (-4 + 4, 8 - 8) -> 0 - 10 -> below 0. Row 0: (5, -5) -> 15 - 10 = 5.
    assert made.predict(floats([5, 1], [1, 4]))[0].tolist() == [50.0, 0.0]


def test_a_value_on_an_edge_belongs_to_the_bucket_above() -> None:
    table = tiny().errors
    assert table.of(floats(25, 24.9, 24.9), floats([0, 4.9], [0, 5], [0, 4.9])).tolist() == [3, 2, 1]


def test_the_papers_network_has_8_4_million_parameters() -> None:
    sizes = [outputs * inputs for outputs, inputs in layer_shapes(PAPER_FEATURES, PAPER_HIDDEN)]
    assert sum(sizes) == pytest.approx(8.4e6, rel=0.01)


def test_no_requests_are_no_predictions() -> None:
    remaining, sigma = tiny().predict(np.empty((0, 2)))
    assert (remaining.shape, sigma.shape) == ((0,), (0,))


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ([1.0, 2.0], r"shape \(n, 2\), got \(2,\); columns: a, b"),
        ([[1.0, 2.0, 3.0]], r"shape \(n, 2\), got \(1, 3\)"),
        ([[1.0, 2.0], [0.0, float("nan")]], "row 1, b: not a finite number"),
        ([["x", "y"]], "must be numbers"),
    ],
)
def test_features_that_do_not_fit_are_refused(features: Any, said: str) -> None:
    with pytest.raises(LengthsError, match=said):
        tiny().predict(features)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"feature_names": ("a", "a")}, "none twice"),
        ({"feature_mean": floats(1)}, r"feature_mean must have the shape \(2,\)"),
        ({"feature_scale": floats(1, 0)}, "feature_scale must be above 0"),
        ({"target_scale": 0.0}, "target_scale must be above 0, got 0"),
        ({"weights": ()}, "weights_0 is missing"),
        (
            {"weights": (floats([1, 1, 1]), floats([1]))},
            r"weights_0 must have the shape \(any, 2\), got \(1, 3\)",
        ),
        ({"weights": (floats([1, 1], [1, 1]),)}, r"weights_0 must have the shape \(1, 2\), got \(2, 2\)"),
        ({"weights": (floats([1, np.inf], [1, 1]), floats([1, 1]))}, "weights_0 must be finite"),
        ({"biases": (floats(1, 1),)}, "2 layers need as many biases, or none, got 1"),
        ({"biases": (floats(1), floats(1))}, r"biases_0 must have the shape \(2,\)"),
        ({"errors": ErrorTable(floats(25), 2, floats(5), floats([1, 2], [3, 4]))}, "column below 2"),
        ({"errors": ErrorTable(floats(25), 1, floats(5), floats([1, 2]))}, r"sigma must have .* \(2, 2\)"),
        ({"errors": ErrorTable(floats(5, 5), 1, floats(), floats([1], [1], [1]))}, "finite and rise"),
        ({"errors": ErrorTable(floats(), 1, floats(), floats([-1]).reshape(1, 1))}, "at least 0"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(LengthsError, match=said):
        tiny(**changes)


@pytest.mark.parametrize("suffix", [".npz", ".onnx"])
@pytest.mark.parametrize("biases", [(), (floats(4, -8), floats(-10))])
def test_a_written_predictor_says_the_same(tmp_path: Path, suffix: str, biases: Any) -> None:
    made, path = tiny(biases=biases), tmp_path / f"predictor{suffix}"
    (write_onnx if suffix == ".onnx" else save_predictor)(made, path)
    read = load_predictor(path, feature_names=("a", "b"))
    features = np.random.default_rng(1).normal(size=(50, 2)) * 5
    for wanted, found in zip(made.predict(features), read.predict(features), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert read.feature_names == ("a", "b")
    assert read.source == "by hand"  # type: ignore[attr-defined]
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    with pytest.raises(LengthsError, match=r"predictor\.(npz|onnx): feature 1 is 'b', wanted 'c'"):
        load_predictor(path, feature_names=("a", "c"))
    with pytest.raises(LengthsError, match="trained on 2 features, wanted 1: a"):
        load_predictor(path, feature_names=("a",))


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    with np.load(path) as arrays:
        content = dict(arrays)
    change(content)
    np.savez(path, **content)
    return path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arrays: arrays.pop("sigma"), "the array 'sigma' is missing; there are: biases_0"),
        (lambda arrays: arrays.pop("weights_0"), "the array 'weights_0' is missing"),
        (lambda arrays: arrays.update(format=np.array("other")), "format is 'other', wanted"),
        (lambda arrays: arrays.update(version=np.array(2)), "version 2; this program reads version 1"),
        (lambda arrays: arrays.update(weights_1=np.ones((1, 3))), r"weights_1 must have the shape \(1, 2\)"),
        (
            lambda arrays: arrays.update(feature_mean=np.array(["x", "y"])),
            "feature_mean must be real numbers",
        ),
        (lambda arrays: arrays.update(feature_mean=np.array([1e300, 0])), "feature_mean must be finite"),
        (lambda arrays: arrays.update(feature_names=np.array([1, 2])), "feature_names must be strings"),
        (lambda arrays: arrays.update(source=np.array([1])), "source must be one string"),
        (lambda arrays: arrays.update(target_scale=np.ones(2)), "target_scale must be one number"),
        (lambda arrays: arrays.update(sigma=np.array([{}], dtype=object)), "not an .npz of plain arrays"),
    ],
)
def test_a_damaged_predictor_is_refused_by_name(tmp_path: Path, change: Any, said: str) -> None:
    path = tmp_path / "predictor.npz"
    save_predictor(tiny(biases=(floats(4, -8), floats(-10))), path)
    with pytest.raises(LengthsError, match=said) as caught:
        load_npz(rewritten(path, change))
    assert str(caught.value).count(str(path)) == 1


def test_damage_anywhere_in_a_file_is_one_error(tmp_path: Path) -> None:
    """Damaged compressed data ended in errors of zlib, tokenize and zipfile."""
    path, chance, refused = tmp_path / "damaged.npz", random.Random(7), 0
    for save in (np.savez, np.savez_compressed):
        whole = io.BytesIO()
        save(whole, feature_names=np.array(["a", "b"]), weights_0=np.arange(300.0).reshape(3, 100))
        for _ in range(400):
            data = bytearray(whole.getvalue())
            for _ in range(chance.choice((1, 1, 2, 5))):
                data[chance.randrange(len(data))] = chance.randrange(256)
            path.write_bytes(data)
            with contextlib.suppress(LengthsError):  # any other error fails
                read_arrays(path)
                refused -= 1
            refused += 1
    assert refused > 600
    # A header that is no Python, under a sound checksum.
    array = io.BytesIO()
    np.save(array, np.ones((2, 3)))
    with zipfile.ZipFile(path, "w") as members:
        members.writestr("a.npy", array.getvalue().replace(b"(2, 3)", b"(2, 3 "))
    with pytest.raises(LengthsError, match=r"not an \.npz"):
        read_arrays(path)


def test_files_that_are_something_else_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("predictor.npz", "predictor.onnx"):
        path = tmp_path / name
        with pytest.raises(FileNotFoundError):
            load_predictor(path)
        path.write_bytes(b"no such thing")
        with pytest.raises(LengthsError, match=name):
            load_predictor(path)
    save_predictor(tiny(), tmp_path / "predictor.npz")
    whole = (tmp_path / "predictor.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LengthsError, match=r"half\.npz: not an \.npz"):
        load_predictor(tmp_path / "half.npz")
    import lmetric.lengths.files as files

    monkeypatch.setattr(files.read_arrays, "__defaults__", (1000,))
    with pytest.raises(LengthsError, match="at most 1,000 are read"):
        load_predictor(tmp_path / "predictor.npz")


def test_a_foreign_onnx_file_is_refused(tmp_path: Path) -> None:
    import onnx
    from onnx import helper

    path = tmp_path / "predictor.onnx"
    write_onnx(tiny(), path)
    model = onnx.load(path)
    helper.set_model_props(model, {})
    onnx.save(model, path)
    with pytest.raises(LengthsError, match="no metadata 'lmetric_lengths'"):
        load_onnx(path)
    helper.set_model_props(model, {"lmetric_lengths": json.dumps({"version": 1, "feature_names": ["a"]})})
    onnx.save(model, path)
    with pytest.raises(LengthsError, match=r"KeyError: 'predicted_edges'"):
        load_onnx(path)


def test_the_error_table_holds_mean_errors_and_falls_back_where_it_saw_few() -> None:
    predicted = np.repeat(floats(10, 20), 100)
    errors = np.repeat(floats(1, 5), 100)
    errors[:50] = 3  # where the feature is 0
    feature = np.ones((200, 1), np.float32)
    feature[:50] = 0
    table = error_table(predicted, errors, feature, feature=0, rows=2, columns=4, at_least=50)
    assert table.predicted_edges.tolist() == [15.0]
    # The edges of the feature's quarters: 0.75 (between 0 and 1), 1, 1.
    assert table.of(floats(10, 10, 20), floats([0], [1], [1])).tolist() == [3.0, 1.0, 5.0]
    assert table.of(floats(20), floats([0])).tolist() == [5.0]  # none was there: the row's
    few = error_table(predicted, errors, feature, feature=0, rows=2, at_least=101)
    assert np.unique(few.sigma).tolist() == [pytest.approx(errors.mean())]


def make_samples(requests: int = 20, each: int = 3) -> Samples:
    ids = np.repeat(np.arange(requests), each)
    features = np.column_stack([ids, np.tile(np.arange(each), requests)])
    return Samples(
        features.astype(np.float32), ids.astype(np.float32), ids.astype(np.int64), ("a", "b"), "made"
    )


def test_samples_keep_through_a_file_and_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "samples.npz"
    made = make_samples()
    save_samples(made, path)
    read = load_samples(path)
    assert (read.features == made.features).all()
    assert (read.remaining == made.remaining).all()
    assert (read.request_ids == made.request_ids).all()
    assert (read.feature_names, read.source) == (("a", "b"), "made")
    for change, said in (
        (lambda arrays: arrays.pop("remaining"), "'remaining' is missing"),
        (lambda arrays: arrays.update(remaining=np.ones(3)), r"remaining must have the shape \(60,\)"),
        (
            lambda arrays: arrays.update(remaining=np.full(60, -1.0)),
            "row 0: -1 is not a finite number from 0",
        ),
        (lambda arrays: arrays.update(remaining=np.ones(60), request_ids=np.ones(60)), "whole numbers"),
        (lambda arrays: arrays.update(request_ids=np.ones(60, int), features=np.ones((60, 3))), r"\(n, 2\)"),
    ):
        with pytest.raises(LengthsError, match=said) as caught:
            load_samples(rewritten(path, change))
        assert str(path) in str(caught.value)
        save_samples(made, path)


def test_no_request_is_in_two_parts_of_a_split() -> None:
    samples = make_samples(requests=100)
    split = split_by_request(samples.request_ids, seed=3)
    parts = [set(samples.request_ids[rows].tolist()) for rows in split]
    assert [len(part) for part in parts] == [70, 15, 15]
    assert set.union(*parts) == set(range(100))
    assert sum(len(rows) for rows in split) == len(samples)
    again, other = split_by_request(samples.request_ids, 3), split_by_request(samples.request_ids, 4)
    assert all((a == b).all() for a, b in zip(split, again, strict=True))
    assert set(samples.request_ids[other.test].tolist()) != parts[2]
    with pytest.raises(LengthsError, match="3 requests: a split into 70%, 15% and 15%"):
        split_by_request(np.arange(3), 0)


def trace(lines: list[tuple[float, int, int, list[int]]], **columns: Any) -> Trace:
    """A trace of (arrival, prompt tokens, answer tokens, blocks of 10 tokens)."""
    arrivals, prompts, answers, blocks = zip(*lines, strict=True)
    return Trace(
        "made",
        np.array(arrivals, dtype=float),
        np.array(prompts),
        np.array(answers),
        np.concatenate(([0], np.cumsum([len(ids) for ids in blocks]))),
        np.array([block for ids in blocks for block in ids], dtype=np.uint64),
        10,
        **columns,
    )


CONVERSATION = [
    (0.0, 25, 45, [1, 2, 3]),  # its block 3 is a partial one
    (5.0, 20, 0, [7, 8]),  # another's, without an answer
    (9.0, 83, 10, [1, 2, 4, 5, 6, 60, 61, 62, 63]),  # the second turn of the first
    (30.0, 100, 100, [1, 2, 4, 5, 6, 60, 61, 62, 64, 65]),  # the third
]


def test_samples_of_a_trace_by_hand() -> None:
    samples = samples_from_trace(trace(CONVERSATION), every=20, at_most=4, seed=1)
    assert samples.feature_names == TRACE_FEATURES
    of = samples.request_ids
    assert of.tolist() == [0, 0, 0, 2, 3, 3, 3, 3]
    generated = np.rint(np.expm1(samples.column("log_generated_tokens"))).astype(int)
    assert generated[of == 0].tolist() == [0, 20, 40]
    assert samples.remaining[of == 0].tolist() == [45, 25, 5]
    drawn = generated[of == 3].tolist()
    assert len(set(drawn)) == 4
    assert set(drawn) < {0, 20, 40, 60, 80}
    assert (samples.remaining[of == 3] == 100 - generated[of == 3]).all()
    # generated; prompt; new of it; turns before; the answer before; the mean one; seconds
    second = np.expm1(samples.features[of == 2][0])
    assert second.tolist() == pytest.approx([0, 83, 83 - 20, 1, 45, 45, 9], rel=1e-5)
    third = np.expm1(samples.features[of == 3][0, 1:])
    assert third.tolist() == pytest.approx([100, 100 - 80, 2, 10, (45 + 10) / 2, 21], rel=1e-5)
    first = np.expm1(samples.features[of == 0][0, 1:])
    assert first.tolist() == pytest.approx([25, 25, 0, 0, 0, 0], rel=1e-5)


def test_a_traces_own_conversations_come_before_its_prefixes() -> None:
    plain = trace(CONVERSATION)
    assert find_turns(plain).previous.tolist() == [-1, -1, 0, 2]
    assert find_turns(replace(plain, sessions=np.array([4, 4, -1, 4]))).previous.tolist() == [-1, 0, -1, 1]
    told = replace(plain, sessions=np.array([4, 4, -1, 4]), previous=np.array([-1, -1, 1, -1]))
    assert find_turns(told).previous.tolist() == [-1, -1, 1, -1]
    # Without prefixes a turn is taken to repeat the prompt before it.
    bare = replace(plain.without_prefixes(), sessions=np.array([4, -1, 4, -1]))
    assert find_turns(bare).shared_tokens.tolist() == [0, 0, 25, 0]
    assert find_turns(plain.without_prefixes()).previous.tolist() == [-1] * 4


def test_a_system_prompt_ties_no_requests_together() -> None:
    lines = [(float(index), 10, 5, [1]) for index in range(1)]
    lines += [(1.0 + index, 20, 5, [1, 100 + index]) for index in range(SHARED_AFTER + 3)]
    previous = find_turns(trace(lines)).previous
    assert previous[1 : SHARED_AFTER + 1].max() == 0  # not yet known as one
    assert previous[SHARED_AFTER:].tolist() == [-1, -1, -1, -1]


def test_a_trace_without_answers_gives_no_samples() -> None:
    with pytest.raises(LengthsError, match="trace made: no request in it generates a token"):
        samples_from_trace(trace([(0.0, 10, 0, [])]))
    with pytest.raises(LengthsError, match="every must be at least 1, got 0"):
        samples_from_trace(trace(CONVERSATION), every=0)


def test_survival_by_hand() -> None:
    survival = Survival(np.array([100.0, 10.0, 30.0, 30.0]))
    asked = np.array([0.0, 9.0, 10.0, 30.0, 100.0, 500.0])
    assert survival.mean(asked).tolist() == pytest.approx([42.5, 33.5, 160 / 3 - 10, 70, 0, 0])
    assert survival.median(asked).tolist() == [30, 21, 20, 70, 0, 0]


def test_baselines_know_the_training_requests_alone() -> None:
    samples = samples_from_trace(trace(CONVERSATION), every=20, at_most=10)
    train = samples.at(np.flatnonzero(samples.request_ids < 3))  # answers of 45 and 10 tokens
    # The samples are at 0, 20, ... 80 generated tokens.
    found = baselines(train, samples.at(np.flatnonzero(samples.request_ids == 3)))
    assert found["mean"].tolist() == [27.5, 7.5, 0, 0, 0]
    assert found["survival mean"].tolist() == [27.5, 25, 5, 0, 0]
    assert found["survival median"].tolist() == [27.5, 25, 5, 0, 0]
    # Prompts of 25 and 83 tokens have a bucket each. The prompt of 100 tokens is near the prompt of
    # 83 tokens, whose answer has 10 tokens.
    assert found["survival by prompt"].tolist() == [10, 25, 5, 0, 0]
    assert found["session mean"].tolist() == pytest.approx([27.5, 7.5, 5, 0, 0], rel=1e-5)


def test_training_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, said in (
        ({"hidden": ()}, "hidden must be"),
        ({"patience": 0}, "patience must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
    ):
        with pytest.raises(LengthsError, match=said):
            fit(make_samples(), replace(Training(), **changes))  # type: ignore[arg-type]
    import train_lengths.fit as module

    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(LengthsError, match=r"training needs PyTorch; run: pip install"):
        fit(make_samples(), Training())


def run_module(name: str, *words: object, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, "-m", f"train_lengths.{name}", *map(str, words)],
        env=os.environ | {"PYTHONPATH": f"{PYTHON}:{PYTHON.parent / 'bench'}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_samples_are_made_by_a_command(tmp_path: Path) -> None:
    file, out = tmp_path / "trace.csv", tmp_path / "samples.npz"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    done = run_module("from_trace", file, "--out", out, "--every", 10)
    assert (done.returncode, done.stderr) == (0, f"{out}: 5 samples of 1 requests\n")
    assert load_samples(out).remaining.tolist() == [44, 34, 24, 14, 4]
    done = run_module("from_trace", tmp_path / "none.csv", "--out", out)
    assert done.returncode == 2
    missing = f"train_lengths: {tmp_path / 'none.csv'}: No such file or directory"
    assert done.stderr.startswith(missing)
    assert done.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_real_training_learns_what_can_be_known(tmp_path: Path) -> None:
    """Answers of 100 tokens times a feature, and a second feature that says nothing."""
    venv = os.environ.get("TEST_VLLM_VENV")
    python = str(Path(venv) / "bin" / "python") if venv else sys.executable
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        pytest.skip("no PyTorch; TEST_VLLM_VENV may name an environment with it")
    random = np.random.default_rng(5)
    kind = random.integers(1, 6, size=800)
    ids = np.repeat(np.arange(800), 5)
    generated = np.tile(np.arange(5) * 20.0, 800)
    features = np.column_stack([np.log1p(generated), kind[ids], random.normal(size=len(ids))])
    samples = Samples(
        features.astype(np.float32),
        (100.0 * kind[ids] - generated).astype(np.float32),
        ids,
        ("log_generated_tokens", "kind", "noise"),
    )
    given, out = tmp_path / "samples.npz", tmp_path / "predictor.npz"
    save_samples(samples, given)
    words = (given, "--out", out, "--hidden", "64,32,16", "--biases", "--json", "--learning-rate", 1e-3)
    done = run_module("train", *words, python=python)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    test = samples.at(split_by_request(ids, 0).test)
    remaining, sigma = load_npz(out).predict(test.features)
    error = float(np.abs(remaining - test.remaining).mean())
    assert told["test_mae_tokens"] == pytest.approx(error, rel=1e-3)  # NumPy agrees with PyTorch
    assert error < 12  # remaining lengths deviate by some 140 tokens
    assert float(sigma.mean()) == pytest.approx(error, rel=0.5)
    assert told["best_epoch"] <= told["epochs"] <= 100
    again = run_module("train", *words, python=python)
    assert json.loads(again.stdout) == told
    done = run_module("train", given, "--out", out, "--learning-rate", 1e12, python=python)
    assert done.returncode == 2
    assert "try a smaller learning_rate" in done.stderr
    done = run_module("train", given, "--out", tmp_path / "none" / "p.npz", python=python)
    assert done.returncode == 2
    assert "cannot be written" in done.stderr

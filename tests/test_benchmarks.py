"""`python -m benchmarks`, at a size where it takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import microbatches
from benchmarks.options import read_options

ROOT = Path(__file__).parents[1]
QUICK = ["--size", "0.01", "--seconds", "0", "--rounds", "2", "--window", "2"]
CONTENDERS = [
    "floor",
    "hand-over",
    "alone",
    "optax.MultiSteps",
    "optax.apply_every",
    "optax.experimental",
    "update",
    "apply_gradients",
    "track_noise",
    "flax.TrainState",
    "flax.Optimizer",
]


def run(*options):
    command = [sys.executable, "-W", "error", "-m", "benchmarks", *options]
    # What is measured does not matter here, and compiling is most of the time.
    env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)


def test_tables_json_and_plot(tmp_path):
    numbers, picture = tmp_path / "numbers.json", tmp_path / "picture.png"
    done = run(
        *QUICK,
        *("--optimizers", "sgd", "--trees", "large", "tiny"),
        *("--json", str(numbers), "--plot", str(picture)),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first_line = done.stdout.splitlines()[0]
    assert "jax" in first_line
    assert "device" in first_line
    for name in CONTENDERS:
        assert done.stdout.count(f" {name} ") >= 2
    assert picture.read_bytes().startswith(b"\x89PNG")

    content = json.loads(numbers.read_text())
    assert content["versions"].keys() >= {"jax", "optax", "python", "device_kind"}
    assert content["options"]["window"] == 2
    assert [table["tree"] for table in content["tables"]] == ["large", "tiny"]
    for table in content["tables"]:
        rows = {row["contender"]: row for row in table["rows"]}
        assert list(rows) == CONTENDERS
        assert rows["floor"]["between_per_floor"] == 1
        assert rows["floor"]["release_ms"] is None
        assert rows["alone"]["between_ms"] is None
    measured = {target["what"]: target["met"] for target in content["targets"]}
    assert None in measured.values()  # AdamW's
    assert {True, False} & set(measured.values())


def test_the_selection_keeps_what_the_others_are_measured_against(tmp_path):
    path = tmp_path / "numbers.json"
    done = run(
        *QUICK,
        *("--optimizers", "adamw", "--trees", "tiny", "--contenders", "update"),
        *("--json", str(path)),
    )
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(path.read_text())["tables"]
    rows = {row["contender"]: row for row in table["rows"]}
    assert list(rows) == ["floor", "hand-over", "alone", "update"]
    assert rows["update"]["mean_per_ideal"] > 0
    assert rows["update"]["mean_per_multi_steps"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--size", "big"], ["--size", "big"]),
        (["--window", "1"], ["--window", "2", "1"]),
        (["--optimizers", "adam"], ["--optimizers", "adam", "adamw"]),
        (["--trees"], ["--trees"]),
        (["--json", "nowhere/numbers.json"], ["--json", "nowhere"]),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *options])
    with pytest.raises(SystemExit) as stop:
        read_options()
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    for word in words:
        assert word in line


def test_microbatches():
    sizes = ("--batch-size", "4", "--microbatches", "2", "--rounds", "2")
    done = run("microbatches", *sizes, "--models", "wide_mlp")
    assert done.returncode == 0, done.stderr
    for name in ("the whole batch", "scan by hand", "optax.microb", "optax_accum"):
        assert f" {name}" in done.stdout
    assert "temporaries / scan by hand" in done.stdout
    done = run("microbatches", "--batch-size", "5", "--microbatches", "2")
    assert done.returncode == 2
    assert "--microbatches" in done.stderr


@pytest.mark.parametrize("model", microbatches.MODELS)
def test_the_models_of_the_microbatches_have_a_loss(model):
    loss_fn, params, batch = microbatches.MODELS[model](3)
    assert jax.eval_shape(loss_fn, params, batch).shape == ()

"""`python -m benchmarks`, at a size where it takes seconds."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from benchmarks import distributed, microbatches
from benchmarks.collectives import sent
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


def test_ours_send_the_parameters_once_a_window_and_the_others_each_microbatch(
    tmp_path, capsys
):
    numbers = tmp_path / "numbers.json"
    small = ("--windows", "3", "--width", "32", "--examples", "1", "--rounds", "1")
    distributed.main([*small, "--json", str(numbers)])
    printed = capsys.readouterr().out
    for words in (*distributed.CONTENDERS, "A window of 3", "1024", "400 GB/s"):
        assert words in printed
    rows = [distributed.Row(**row) for row in json.loads(numbers.read_text())["rows"]]
    found = {row.contender: row for row in rows}
    assert [*found] == [*distributed.CONTENDERS]
    for name, row in found.items():
        times = 1 if name in distributed.OURS else 3
        assert row.count == {"all-reduce": times}, name
        assert row.bytes_per_parameters == pytest.approx(times, rel=1e-3)
        assert row.ms > 0
    (verdict,) = distributed.judge(rows)
    assert verdict.met
    assert not distributed.judge([found["value_and_grad"], _worse(rows)])[0].met


def _worse(rows):
    (row,) = (row for row in rows if row.contender == "accumulate in shard_map")
    return dataclasses.replace(row, bytes_per_parameters=2.0)


def test_what_a_program_sends_is_counted_by_loops_and_branches():
    program = """
%body (x: f32[]) -> f32[] {
  %a = (f32[8]{0}, bf16[4]{0}) all-reduce(%x, %y), to_apply=%add
}
%yes (x: f32[]) -> f32[] {
  %b = f32[2,3]{1,0} all-gather-start(%x), dimensions={0}
}
%no (x: f32[]) -> f32[] {
  ROOT %c = f32[] copy(%x)
}
ENTRY %main (x: f32[]) -> f32[] {
  %w = f32[] while(%x), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %d = f32[] conditional(%p, %x, %x), branch_computations={%no, %yes}
  %e = pred[] all-reduce(%x), to_apply=%or
}
"""  # noqa: E501
    yes, no = (sent(program, release=release) for release in (True, False))
    assert yes.counts == {"all-reduce": 6, "all-gather": 1}
    assert (yes.bytes, no.bytes) == (5 * 40 + 24 + 1, 5 * 40 + 1)
    assert sent(program, release=False, least_bytes=8).counts == {"all-reduce": 5}


def test_on_paper_a_ring_sends_everything_nearly_twice():
    assert distributed.all_reduce_seconds(4e9, 2, 1e9) == 4
    assert distributed.all_reduce_seconds(4e9, 1024, 1e9) == pytest.approx(8, rel=1e-2)


def test_wrong_sizes_of_the_distributed_benchmark_are_one_line():
    done = run("distributed", "--windows", "0")
    assert done.returncode == 2
    assert "--windows needs numbers of 1 or more" in done.stderr

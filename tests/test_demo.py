"""`python -m optax_accum`, at a size where it takes seconds."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from optax_accum._demo import model, report
from optax_accum._demo.contenders import CONTENDERS
from optax_accum._demo.model import make_model
from optax_accum._demo.options import Options, memory_bytes, read_options
from optax_accum._demo.plot import plot
from optax_accum._demo.text import (
    LONGEST,
    PADDING,
    START,
    count_tokens,
    read_text,
    windows,
)
from optax_accum._demo.train import fit, train
from optax_accum._noise import NoiseScale

ROOT = Path(__file__).parents[1]
PYTHON = [sys.executable, "-W", "error"]
DEMO = [*PYTHON, "-m", "optax_accum"]
WINDOW, MICROBATCH_SIZE, STEPS = 3, 2, 2


def run(command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


@contextlib.contextmanager
def quick_to_compile():
    # Nearly all the time here goes into compiling.
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def text():
    return read_text(seed=0)


@pytest.fixture(scope="module")
def heard():
    return []


@pytest.fixture(scope="module")
def result(text, heard):
    with quick_to_compile(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "DEPTH", 1)
        return train(
            text,
            window=WINDOW,
            microbatch_size=MICROBATCH_SIZE,
            steps=STEPS,
            seed=0,
            say=lambda doing, done: heard.append((doing, done)),
        )


def by_name(result):
    return {run.contender.name: run for run in result.runs}


# The whole.


def test_table_and_chart(tmp_path):
    chart = tmp_path / "chart.png"
    sizes = ("--window", "2", "--microbatch-size", "2", "--steps", "2")
    quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    shallow = (
        "import runpy\n"
        "from optax_accum._demo import model\n"
        "model.DEPTH = 1\n"
        "runpy.run_module('optax_accum', run_name='__main__')"
    )
    done = run([*PYTHON, "-c", shallow, *sizes, "--plot", str(chart)], env=quick)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    rows = [line.strip() for line in done.stdout.splitlines()]
    for contender in CONTENDERS:
        (row,) = [row for row in rows if re.match(rf"{contender.name}  +\d", row)]
        assert len(row.removeprefix(contender.name).split()) == 5
    assert rows[-1] == f"Chart: {chart}"
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_it_with_a_word(tmp_path):
    command = [*DEMO, "--steps", "100000", "--plot", str(tmp_path / "chart.png")]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("JAX")
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint == "Interrupted before the end.\n"
    assert not list(tmp_path.iterdir())


def test_the_library_imports_none_of_it():
    code = (
        "import sys, optax_accum\n"
        "demo = {'flax', 'matplotlib', 'rich', 'tyro', 'optax_accum._demo'}\n"
        "print(sorted(demo & sys.modules.keys()), 'optax_accum' in sys.modules)"
    )
    assert run([*PYTHON, "-c", code]).stdout == "[] True\n"


def test_what_is_not_installed_is_named():
    code = (
        "import runpy, sys\n"
        "sys.modules['rich'] = sys.modules['tyro'] = None\n"
        "runpy.run_module('optax_accum', run_name='__main__')"
    )
    done = run([*PYTHON, "-c", code])
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("The demo needs rich, tyro: ")
    assert 'pip install "optax-accum[demo]"' in line


# Options.


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--window", "0"], ["--window", "1 or more", "0"]),
        (["--microbatch-size", "-3"], ["--microbatch-size", "1 or more", "-3"]),
        (["--microbatch", "many"], ["--microbatch-size", "many"]),
        (["--memory", "30MB"], ["--memory", "auto"]),
        (["--microbatch", "auto", "--memory", "lots"], ["--memory", "300MB", "lots"]),
        (["--steps", "0"], ["--steps", "1 or more", "0"]),
        (["--steps", "many"], ["--steps", "many"]),
        (["--steps"], ["--steps"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--seed", str(2**32)], ["--seed", str(2**32)]),
        (["--colour", "red"], ["--colour"]),
        (["--plot", "none"], ["--plot", ".png", "None", "none"]),
        (["--plot", "chart.pdf"], ["--plot", ".png", "chart.pdf"]),
        (["--plot", "nowhere/chart.png"], ["--plot", "folder", "nowhere"]),
    ],
)
def test_a_wrong_value_is_one_line_and_status_2(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["optax_accum", *options])
    with pytest.raises(SystemExit) as stop:
        read_options()
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    for word in words:
        assert word in line


def test_a_wrong_value_is_one_line_in_a_terminal_too():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*DEMO, "--steps", "many"],
        cwd=ROOT,
        env=os.environ | {"TERM": "xterm"},
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error parsing --steps: ")
    assert "many" in line


def test_no_chart(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["optax_accum", "--plot", "None"])
    assert read_options() == Options(plot=None)


@pytest.mark.parametrize(
    ("words", "nbytes"),
    [
        ("300MB", 300_000_000),
        ("1.5 gb", 1_500_000_000),
        ("2k", 2000),
        ("12", 12),
        ("0MB", None),
        ("-3MB", None),
        ("MB", None),
    ],
)
def test_words_for_memory(words, nbytes):
    assert memory_bytes(words) == nbytes


# Training.


def test_the_microbatch_can_be_made_to_fit(text, monkeypatch):
    monkeypatch.setattr(model, "DEPTH", 1)
    with quick_to_compile():
        found = fit(text, batch_size=6, memory=9_000_000, seed=0)
        assert found.microbatch_size in (1, 2, 3)
        assert found.bytes_needed <= 0.9 * 9_000_000
        with pytest.raises(MemoryError):
            fit(text, batch_size=1, memory=1_000_000, seed=0)


def test_weighted_by_tokens_it_is_the_large_batch_and_else_not(result):
    runs = by_name(result)
    large = runs.pop("large batch")
    assert result.tokens.shape == (STEPS, WINDOW)
    assert len(set(result.tokens[0])) > 1
    assert large.distances == [0, 0]
    assert {run.contender.weighted for run in runs.values()} == {True, False}
    for run in runs.values():
        if run.contender.weighted:
            assert max(run.distances) < 2e-6
            np.testing.assert_allclose(run.losses, large.losses, rtol=2e-6)
            np.testing.assert_allclose(
                run.held_out_loss, large.held_out_loss, rtol=2e-6
            )
        else:
            assert min(run.distances) > 1e-4
            # The parameters are the same before the first step, and so is the loss.
            np.testing.assert_allclose(run.losses[0], large.losses[0], rtol=2e-6)
            assert abs(run.losses[1] / large.losses[1] - 1) > 1e-6


def test_everyone_moves_and_is_timed(result):
    for run in result.runs:
        assert run.losses[1] < run.losses[0]
        assert len(run.seconds) == STEPS
        assert 0 < run.median_seconds <= max(run.seconds)


def test_memory_is_that_of_a_step_with_all_its_buffers_donated(result):
    for run in result.runs:
        assert run.memory is not None
        rows = 1 if run.contender.by_microbatch else WINDOW
        batch = 4 * rows * MICROBATCH_SIZE * (1 + LONGEST)
        trees = jax.tree.leaves((run.params, run.opt_state))
        expected = sum(x.nbytes for x in trees) + batch
        kept = run.memory.peak - run.memory.temporary
        # The loss comes out too, and XLA counts a pointer for each result.
        assert expected <= kept <= expected + 16 * len(trees)
    runs = by_name(result)
    temporary = {name: run.memory.temporary for name, run in runs.items()}
    assert temporary["apply_gradients, weight=tokens"] < temporary["optax.MultiSteps"]
    assert temporary["optax.MultiSteps"] < temporary["large batch"]


def test_the_progress_counts_every_turn(result, heard):
    turns = len(CONTENDERS) * (1 + STEPS)
    assert [done for _, done in heard] == pytest.approx(np.arange(turns) / turns)
    assert heard[0][0] == "compiling large batch"
    assert heard[-1][0] == f"window {STEPS} of {STEPS}"


# Report and chart.


def printed(*things):
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(*things)
    return capture.get()


def test_the_conclusion_is_of_what_was_measured(result):
    words = report.conclusion(result)
    runs = by_name(result)
    assert f"{runs['optax.MultiSteps'].distances[-1]:.1e}" in words
    assert f"{result.tokens.min()} to {result.tokens.max()} tokens" in words
    assert f"{runs['large batch'].median_seconds:.3f} s and" in words
    assert f"{runs['large batch'].memory.temporary / 1e6:.1f} MB" in words


def test_the_conclusion_weighs_nothing_in_windows_of_one(result):
    ones = result._replace(tokens=result.tokens[:, :1])
    assert "nothing to weigh" in report.conclusion(ones)
    assert "nothing to weigh" not in report.conclusion(result)


def test_a_backend_that_does_not_tell_its_memory(result, tmp_path):
    runs = [dataclasses.replace(run, memory=None) for run in result.runs]
    for line in printed(report.table(runs)).splitlines()[-len(runs) :]:
        assert re.search(r" - +- +\d", line)
    assert "MB" not in report.conclusion(result._replace(runs=runs))
    plot(tmp_path / "chart.png", runs, "", WINDOW)
    assert (tmp_path / "chart.png").stat().st_size > 0


def test_the_table_fits_a_narrow_terminal(result):
    table = printed(report.table(result.runs))
    for contender in CONTENDERS:
        assert f"\n{contender.name} " in table


def test_a_chart_of_distances_that_are_all_zero(result, tmp_path):
    runs = [dataclasses.replace(run, distances=[0.0] * STEPS) for run in result.runs]
    plot(tmp_path / "chart.png", runs, "", WINDOW)
    assert (tmp_path / "chart.png").stat().st_size > 0


def with_noise(result, *estimate):
    """The result, as if this had been found of the noise at the end."""

    def found(run):
        noise = [NoiseScale(*map(np.float32, estimate))] * STEPS if run.noise else []
        return dataclasses.replace(run, noise=noise)

    return result._replace(runs=[found(run) for run in result.runs])


def options(window):
    return Options(window=window, microbatch_size=MICROBATCH_SIZE)


@pytest.mark.parametrize(
    ("scale", "what_follows"),
    [(40.0, "longer window would still save"), (8.0, "about right"), (1.5, "shorter")],
)
def test_the_noise_scale_is_told_in_words(result, scale, what_follows):
    words = report.noise(with_noise(result, scale, 1.0, scale), options(window=8))
    assert what_follows in words
    assert "a window has 8 microbatches" in words
    number = "1.5" if scale == 1.5 else f"{scale:.0f}" if scale > 9 else "8.0"
    assert f"is {number} microbatches" in words
    assert f"or {report._round(scale * result.tokens.mean())} tokens" in words


@pytest.mark.parametrize("estimate", [(-3.0, -1.0, 3.0), (np.nan,) * 3])
def test_a_noise_scale_that_cannot_be_told_is_no_number(result, estimate, tmp_path):
    hidden = with_noise(result, *estimate)
    assert "hides the gradient" in report.noise(hidden, options(window=8))
    plot(tmp_path / "chart.png", hidden.runs, "", 8)
    assert (tmp_path / "chart.png").stat().st_size > 0


def test_a_window_of_one_tells_nothing_of_the_noise(result):
    assert "tells nothing" in report.noise(result, options(window=1))


def test_the_noise_is_estimated_after_each_window(result):
    for run in result.runs:
        assert len(run.noise) == (STEPS if run.contender.tracks_noise else 0)
    (run,) = (run for run in result.runs if run.noise)
    assert run.contender.name == "apply_gradients, weight=tokens"
    assert all(np.isfinite(x).all() for x in run.noise)


def test_numbers_are_rounded_to_two_digits():
    assert [*map(report._round, (1234.0, 12.34, 1.234, 0.01234))] == [
        *("1200", "12", "1.2", "0.012")
    ]


# Text.


def test_the_text_is_the_seeds(text):
    again, other = read_text(seed=0), read_text(seed=1)
    np.testing.assert_array_equal(text.training, again.training)
    np.testing.assert_array_equal(text.held_out, again.held_out)
    assert not np.array_equal(text.training, other.training)


def test_rows_are_a_start_then_characters_then_padding(text):
    rows = np.concatenate([text.training, text.held_out])
    assert len(text.training) > 1000
    assert (rows[:, 0] == START).all()
    assert rows.max() == text.characters - 1
    lengths = (rows != PADDING).sum(axis=1)
    assert lengths.min() < lengths.max() == 1 + LONGEST
    for row, length in zip(rows, lengths, strict=True):
        assert (row[1:length] > START).all()
        assert (row[length:] == PADDING).all()


def test_what_is_held_out_is_not_trained_on(text):
    rows = np.concatenate([text.training, text.held_out])
    assert len(np.unique(rows, axis=0)) == len(rows)


def test_windows_take_every_row_once_before_any_again():
    rows = np.arange(10)[:, None]
    drawn = windows(rows, window=2, microbatch_size=2, seed=0)
    first = [next(drawn) for _ in range(5)]
    assert first[0].shape == (2, 2, 1)
    order = np.concatenate(first).ravel()
    for epoch in (order[:10], order[10:]):
        assert sorted(epoch) == list(range(10))
    assert list(order[:10]) != list(order[10:])
    again = windows(rows, window=2, microbatch_size=2, seed=0)
    np.testing.assert_array_equal(first[0], next(again))


def test_a_window_may_be_larger_than_the_text():
    rows = np.arange(3)[:, None]
    assert next(windows(rows, window=4, microbatch_size=2, seed=0)).shape == (4, 2, 1)


def test_the_loss_is_the_mean_over_what_is_no_padding(text, monkeypatch):
    monkeypatch.setattr(model, "DEPTH", 1)
    params, loss_fn = make_model(text.characters, seed=0)
    loss_fn = jax.jit(loss_fn)

    rows = text.training[:4]
    lengths = (rows[:, 1:] != PADDING).sum(axis=1)
    loss, tokens = loss_fn(params, rows)
    assert tokens == count_tokens(rows) == lengths.sum()
    assert list(count_tokens(np.stack([rows, rows]))) == [tokens, tokens]
    alone = [loss_fn(params, row[None])[0] for row in rows]
    np.testing.assert_allclose(loss, np.average(alone, weights=lengths), rtol=1e-6)

    shortest = lengths.argmin()
    cut = rows[shortest, None, : 1 + lengths[shortest]]
    assert lengths[shortest] < LONGEST
    np.testing.assert_allclose(loss_fn(params, cut)[0], alone[shortest], rtol=1e-6)

"""Several processes train as one does, and go on from a checkpoint of them all."""

import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
SECONDS = 200  # after which something hangs


def start(process, processes, port, folder, kill=""):
    script = [sys.executable, "-m", "tests.train_in_processes"]
    return subprocess.Popen(
        [*script, str(process), str(processes), str(port), str(folder), kill],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def finish(*running):
    """Waits for all, and leaves none behind."""
    try:
        for process in running:
            _, complaint = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, complaint[-4000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
            process.stderr.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What one process with four devices comes to, and two with two, one killed."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    finish(start(0, 1, 0, one))
    port = free_port()
    first, last = (start(i, 2, port, two, kill="kill") for i in range(2))
    try:
        last.wait(SECONDS)
        assert last.returncode == -signal.SIGKILL, last.stderr.read()[-4000:]
    finally:
        for process in (first, last):
            process.kill()  # the other waits for the dead one
            process.wait()
            process.stderr.close()
    assert not [*two.glob("last*")]
    port = free_port()
    finish(*(start(i, 2, port, two) for i in range(2)))
    return [np.load(path) for path in (one / "last-0.npz", *sorted(two.glob("last*")))]


@pytest.mark.parametrize("way", ["shard_map", "explicit", "value_and_grad"])
def test_killed_and_resumed_they_end_as_a_single_process(runs, way):
    one, *two = ({k: v for k, v in run.items() if k.startswith(way)} for run in runs)
    assert len(two) == 2
    for run in two:
        assert run.keys() == one.keys()
        assert run.pop(f"{way}/resumed") == 5  # in the middle of a window
        for name in run:
            want = one[name]
            np.testing.assert_allclose(run[name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["shard_map", "explicit"])
def test_what_one_device_skips_or_releases_all_do(runs, way):
    # The microbatches 0 1 3, without the NaN of 2; then 4 5 6; 7 stays open.
    for run in runs:
        assert run[f"{way}/skipped"] == 1
        assert run[f"{way}/gradient_step"] == 2
        assert run[f"{way}/mini_step"] == 1


def test_the_ways_agree(runs):
    for run in runs:
        for name in ("w", "v"):
            np.testing.assert_allclose(
                run[f"shard_map/{name}"], run[f"explicit/{name}"], rtol=1e-5, atol=1e-6
            )

"""The command line."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from benchmarks.contenders import CONTENDERS
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.trees import TREES
from optax_accum._demo import command_line

if TYPE_CHECKING:
    OptimizerName = str
    TreeName = str
    ContenderName = str
else:
    literal = tyro.extras.literal_type_from_choices
    OptimizerName = literal(OPTIMIZERS)
    TreeName = literal(TREES)
    ContenderName = literal(c.name for c in CONTENDERS)


@dataclass(frozen=True)
class Options:
    """Measures gradient accumulation against its floor and its peers.

    `python -m benchmarks microbatches` measures `value_and_grad`, and
    `python -m benchmarks distributed` what is sent between devices."""

    optimizers: tuple[OptimizerName, ...] = tuple(OPTIMIZERS)
    """What to accumulate for."""
    trees: tuple[TreeName, ...] = tuple(TREES)
    """Which trees of parameters."""
    contenders: tuple[ContenderName, ...] = tuple(c.name for c in CONTENDERS)
    """What to time; the floor, the hand-over and the optimizer alone always are."""
    size: float = 67.0
    """Megabytes of float32 parameters; the tiny tree has its own few kilobytes."""
    window: int = 8
    """Micro-steps to a window."""
    seconds: float = 15.0
    """Time for each table, half to compile and half to run. Slow ones take longer: all
    is compiled once and runs for two windows."""
    rounds: int = 200
    """Windows of each contender, at most."""
    json: Path | None = None
    """Where to write all numbers."""
    plot: Path | None = None
    """Where to draw the time between releases, as PNG."""


def read_options() -> Options:
    """The options, or one line on stderr and exit status 2."""
    options = command_line.read(Options, prog="python -m benchmarks")
    for name in ("optimizers", "trees", "contenders"):
        if not getattr(options, name):
            command_line.fail(f"--{name} needs at least one name.")
    for name, least in {"size": 1e-3, "window": 2, "seconds": 0, "rounds": 1}.items():
        value = getattr(options, name)
        if not least <= value < float("inf"):
            command_line.fail(
                f"--{name} must be a number of at least {least}, got {value}."
            )
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path and (path.is_dir() or not path.parent.is_dir()):
            command_line.fail(
                f"--{name} must be a file in an existing folder, got {path}."
            )
    return options

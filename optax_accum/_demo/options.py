"""The options of `python -m optax_accum`."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from optax_accum._demo import command_line

LARGEST_SEED = 2**32 - 1
SIZE = 4  # where --microbatch-size does not say another
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
BYTES = re.compile(r"(\d+(?:\.\d+)?) *([kmgt]?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """Trains a small transformer on the text of Python's manual in several ways: with
    one large batch a step, and with the same batch accumulated from microbatches. Then
    compares where they arrive, and what memory and time they take."""

    window: int = 8
    """Microbatches to an optimizer step."""
    microbatch_size: Annotated[
        int | Literal["auto"], tyro.conf.arg(aliases=["--microbatch"])
    ] = SIZE
    """Paragraphs to a microbatch. Or auto: the most, of the 4 to each of --window, with
    which a step of value_and_grad fits into --memory."""
    memory: str | None = None
    """With auto, what memory there is, such as 300MB; if None, what the device has."""
    steps: int = 40
    """Optimizer steps, so windows, to train for."""
    seed: int = 0
    """Draws the first parameters and the order of the text."""
    plot: Path | None = Path("optax_accum_demo.png")
    """Where to draw the chart, as PNG; over what is there. None for no chart."""


def read_options() -> Options:
    """The options, or one line on stderr and exit status 2."""
    options = command_line.read(Options, prog="python -m optax_accum")
    for name in ("window", "microbatch_size", "steps"):
        value = getattr(options, name)
        if value != "auto" and value < 1:
            _fail(name, "1 or more", value)
    if options.memory is not None:
        if options.microbatch_size != "auto":
            command_line.fail("--memory is for --microbatch-size auto.")
        if memory_bytes(options.memory) is None:
            _fail("memory", "a number of bytes such as 300MB or 2GB", options.memory)
    if not 0 <= options.seed <= LARGEST_SEED:
        _fail("seed", f"between 0 and {LARGEST_SEED}", options.seed)
    if options.plot is not None:
        _check_plot(options.plot)
    return options


def memory_bytes(memory: str) -> int | None:
    """The bytes in words such as 300MB; `None` for other words."""
    match = BYTES.fullmatch(memory.strip())
    return match and (round(float(match[1]) * UNITS[match[2].lower()]) or None)


def _check_plot(path: Path) -> None:
    # Before the training: after it, a path that cannot be written costs the run.
    if path.suffix.lower() != ".png":
        _fail("plot", "a file that ends in .png, or None", path)
    if path.is_dir() or not path.parent.is_dir():
        _fail("plot", "a file in an existing folder", path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        _fail("plot", "where you may write", path)


def _fail(name: str, expected: str, got: object) -> None:
    command_line.fail(f"--{name.replace('_', '-')} must be {expected}, got {got}.")

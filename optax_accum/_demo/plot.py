"""The loss curves, how they part, and the memory, as a chart."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from optax_accum._demo.train import Run

COLOURS = ("#9a9a9a", "#c8553d", "#7fb0d6", "#1f5f99", "#e8a030", "#5b8c5a", "#8e6bb0")
GREY = "#6b6b6b"
PALE = 0.35
EPSILON = float(np.finfo(np.float32).eps)


def plot(path: Path, runs: Sequence[Run], caption: str, window: int) -> None:
    """Draws four panels side by side, one colour for each contender."""
    figure = Figure(figsize=(18, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    losses, distances, memory, noise = figure.subplots(1, 4)
    _losses(losses, runs)
    _distances(distances, runs)
    _memory(memory, runs)
    _noise(noise, runs, window)
    for axes in (losses, distances, memory, noise):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=GREY, labelsize=9)
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.set_axisbelow(True)
    figure.legend(
        [Patch(color=colour) for colour in COLOURS[: len(runs)]],
        [run.contender.name for run in runs],
        loc="outside upper center",
        ncols=len(runs),
        frameon=False,
        fontsize=10,
    )
    figure.supxlabel(caption, fontsize=8, color=GREY)
    figure.savefig(path, dpi=160, format="png")


def _losses(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs):
        _curve(axes, run.losses, i, len(runs))
    axes.set_title("Training loss, mean over the window's tokens", fontsize=11)


def _distances(axes: Axes, runs: Sequence[Run]) -> None:
    for i, run in enumerate(runs[1:], start=1):
        # A logarithm has no place for those that are equal to the bit.
        distances = [d if d > 0 else np.nan for d in run.distances]
        _curve(axes, distances, i, len(runs))
    axes.axhline(EPSILON, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        "float32 rounds by this",
        (1, EPSILON),
        xytext=(0, 3),
        textcoords="offset points",
        color=GREY,
        fontsize=8,
    )
    axes.set_yscale("log")
    axes.set_title("Distance of the parameters from the large batch's", fontsize=11)


def _memory(axes: Axes, runs: Sequence[Run]) -> None:
    most = max((run.memory.peak for run in runs if run.memory), default=1) / 1e6
    for i, run in enumerate(runs):
        if run.memory is None:
            continue
        temporary, peak = (size / 1e6 for size in run.memory)
        axes.barh(i, peak, color=COLOURS[i], alpha=PALE)
        axes.barh(i, temporary, color=COLOURS[i])
        axes.text(
            peak + most / 50, i, f"{temporary:.1f} / {peak:.1f}", va="center", size=9
        )
    axes.set_xlim(0, 1.35 * most)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_yticks([])
    axes.set_title("Memory of a compiled step: temporary / peak, MB", fontsize=11)
    axes.set_xlabel("MB", color=GREY)


def _noise(axes: Axes, runs: Sequence[Run], window: int) -> None:
    axes.set_title("Gradient noise scale, in microbatches", fontsize=11)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.axhline(window, color=GREY, linewidth=0.8, linestyle=":")
    axes.annotate(
        "the window",
        (1, window),
        xytext=(0, 3),
        textcoords="offset points",
        color=GREY,
        fontsize=8,
    )
    for i, run in enumerate(runs):
        if run.noise:
            scales = np.array([x.noise_scale for x in run.noise])
            scales[scales <= 0] = np.nan  # where the noise hides the gradient
            axes.plot(range(1, 1 + len(scales)), scales, "o-", color=COLOURS[i], ms=3)
    axes.set_xlabel("window", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _curve(axes: Axes, values: Sequence[float], i: int, count: int) -> None:
    # The curves lie on each other: the first is broad and below, the others are dashed
    # and take turns, so that all of them show.
    style: dict[str, Any] = {"linewidth": 6}
    if i > 0:
        style = {"linewidth": 2, "linestyle": (3 * i, (3, 3 * (count - 2)))}
    if len(values) == 1:
        style["marker"] = "o"
    axes.plot(range(1, 1 + len(values)), values, color=COLOURS[i], **style)
    axes.set_xlabel("window", color=GREY)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))

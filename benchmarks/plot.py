"""The time between releases as a chart."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from benchmarks.contenders import (
    APPLY_GRADIENTS,
    FLOOR,
    HAND_OVER,
    MULTI_STEPS,
    NNX_OPTIMIZER,
    TRACK_NOISE,
    TRAIN_STATE,
    UPDATE,
)
from benchmarks.measure import Table

COLOURS = {
    HAND_OVER: "#d9d9d9",
    MULTI_STEPS: "#c8553d",
    "optax.experimental": "#e8a87c",
    "optax.apply_every": "#c9b79c",
    UPDATE: "#7fb0d6",
    APPLY_GRADIENTS: "#1f5f99",
    TRACK_NOISE: "#5b4b8a",
    TRAIN_STATE: "#2f7f6f",
    NNX_OPTIMIZER: "#86bfae",
}
GREY = "#6b6b6b"


def plot(path: Path, tables: Sequence[Table], caption: str) -> None:
    """Draws a panel for each tree, in it a group of bars for each optimizer."""
    trees = list(dict.fromkeys(t.tree for t in tables))
    columns = [[t for t in tables if t.tree == tree] for tree in trees]
    bars = max(sum(len(_bars(t)) + 1 for t in column) for column in columns)
    figure = Figure(
        figsize=(1.8 + 3.9 * len(trees), 1.9 + 0.2 * bars), layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(trees), squeeze=False, sharex=True, sharey=True)[0]
    handles = {}
    for axes, tree, column in zip(panels, trees, columns, strict=True):
        handles |= _panel(axes, column)
        size = f"{column[0].arrays} arrays, {column[0].parameter_bytes / 1e6:.3g} MB"
        axes.set_title(f"{tree}: {size}", fontsize=10, color=GREY)
    panels[0].invert_yaxis()
    figure.legend(
        handles.values(),
        handles.keys(),
        title="A micro-step between releases, as a multiple of acc + g alone",
        title_fontproperties={"size": 13, "weight": "bold"},
        loc="outside upper center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
    figure.supxlabel(caption, fontsize=8, color=GREY)
    figure.savefig(path, dpi=160, format="png")


def _bars(table: Table) -> dict[str, float]:
    return {
        name: row.between_per_floor
        for name, row in table.rows.items()
        if row.between_per_floor is not None and name != FLOOR
    }


def _panel(axes: Axes, tables: Sequence[Table]) -> dict:
    handles, ticks, y, most = {}, {}, 0, 1.0
    for table in tables:
        bars = _bars(table)
        ticks[table.optimizer] = y + (len(bars) - 1) / 2
        for name, ratio in bars.items():
            # From half the floor on, so that a bar at the floor is still a bar.
            bar = axes.barh(y, ratio - 0.5, left=0.5, height=0.86, color=COLOURS[name])
            axes.annotate(
                f"{ratio:.0f}" if ratio >= 100 else f"{ratio:.3g}",
                (ratio, y),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
            handles.setdefault(name, bar)
            y, most = y + 1, max(most, ratio)
        y += 1
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlim(0.5, max(2.2 * most, axes.get_xlim()[1]))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}x")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_yticks(list(ticks.values()), list(ticks))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors=GREY, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    return handles

"""The numbers for people and, as JSON, for programs."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import optax
import rich.table

from benchmarks.measure import Table
from benchmarks.targets import Verdict

COLUMNS = {
    "between_ms": ("between\nms", ".3g"),
    "between_per_floor": ("/\nfloor", ".2f"),
    "release_ms": ("release\nms", ".3g"),
    "release_per_floor": ("/\nfloor", ".2f"),
    "mean_ms": ("mean\nms", ".3g"),
    "mean_per_floor": ("/\nfloor", ".2f"),
    "mean_per_ideal": ("/\nideal", ".2f"),
    "mean_per_multi_steps": ("/ Multi-\nSteps", ".2f"),
    "temporaries_per_parameters": ("temp. /\nparams", ".3f"),
    "compile_s": ("compile\ns", ".2f"),
}


def versions() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "jax": jax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "device": jax.devices()[0].platform,
        "device_kind": jax.devices()[0].device_kind,
        "cpu_count": os.cpu_count(),
    }


def show_table(table: Table) -> rich.table.Table:
    size = f"{table.arrays} arrays, {table.parameter_bytes / 1e6:.3g} MB"
    view = _titled(f"{table.optimizer}, {table.tree} tree ({size})")
    view.add_column()
    for heading, _ in COLUMNS.values():
        view.add_column(heading, justify="right")
    for name, row in table.rows.items():
        cells = [_number(getattr(row, key), form) for key, (_, form) in COLUMNS.items()]
        view.add_row(name, *cells)
    return view


def show_verdicts(verdicts: Sequence[Verdict]) -> rich.table.Table:
    words = {True: "[green]met", False: "[red]not met", None: "[dim]not measured"}
    view = _titled("Targets")
    view.add_column("measured")
    view.add_column("at most", justify="right")
    view.add_column("worst", justify="right")
    view.add_column()
    view.add_column("where")
    for v in verdicts:
        worst = _number(v.worst, ".4g")
        view.add_row(v.what, f"{v.limit:g}", worst, words[v.met], v.where)
    return view


def write_json(
    path: Path,
    options: dict[str, Any],
    tables: Sequence[Table],
    verdicts: Sequence[Verdict],
) -> None:
    content = {
        "versions": versions(),
        "options": options,
        "tables": [
            asdict(table) | {"rows": [asdict(row) for row in table.rows.values()]}
            for table in tables
        ],
        "targets": [asdict(v) | {"met": v.met} for v in verdicts],
    }
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")


def _titled(title: str) -> rich.table.Table:
    return rich.table.Table(title=title, title_justify="left", title_style="bold")


def _number(x: float | None, form: str) -> str:
    if x is None:
        return "-"
    # Beyond three digits, ".3g" would write 1.23e+03.
    return f"{x:.0f}" if abs(x) >= 100 else format(x, form)

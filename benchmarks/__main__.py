"""Measures, and reports what it found."""

import sys
from dataclasses import asdict

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import distributed, microbatches
from benchmarks.contenders import BASELINES, CONTENDERS
from benchmarks.measure import measure
from benchmarks.options import read_options
from benchmarks.plot import plot
from benchmarks.report import show_table, show_verdicts, versions, write_json
from benchmarks.targets import TARGETS, judge


def main() -> None:
    others = {"microbatches": microbatches.main, "distributed": distributed.main}
    if sys.argv[1:2] and sys.argv[1] in others:
        others[sys.argv[1]](sys.argv[2:])
    else:
        accumulation()


def accumulation() -> None:
    options = read_options()
    # In a pipe nothing says how wide a line may be, and the tables are wide.
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    setting = ", ".join(f"{name} {value}" for name, value in versions().items())
    console.print(setting)
    names = (*BASELINES, *options.contenders)
    contenders = [c for c in CONTENDERS if c.name in names]
    for c in contenders:
        console.print(f"[dim]  {c.name:20}{c.what}")

    # By tree, so that the tables of one tree stand together.
    pairs = [(name, tree) for tree in options.trees for name in options.optimizers]
    tables = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(pairs))
        for name, tree in pairs:

            def say(doing: str, table: str = f"{name}, {tree}") -> None:
                progress.update(task, description=f"{table}: {doing}")

            table = measure(
                name,
                tree,
                contenders,
                megabytes=options.size,
                every=options.window,
                seconds=options.seconds,
                rounds=options.rounds,
                say=say,
            )
            tables.append(table)
            console.print(show_table(table))
            progress.advance(task)

    verdicts = [judge(target, tables) for target in TARGETS]
    console.print(show_verdicts(verdicts))
    if options.json:
        write_json(options.json, asdict(options), tables, verdicts)
    if options.plot:
        plot(options.plot, tables, setting)


if __name__ == "__main__":
    main()

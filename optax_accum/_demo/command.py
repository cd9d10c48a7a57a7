"""The demo from its options to its chart."""

import dataclasses
import sys

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from optax_accum._demo import command_line, report
from optax_accum._demo.options import SIZE, Options, memory_bytes, read_options
from optax_accum._demo.plot import plot
from optax_accum._demo.text import Text, read_text
from optax_accum._demo.train import Result, fit, train


def run() -> None:
    options = read_options()
    # In a pipe nothing says how wide a line may be.
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    text = read_text(options.seed)
    if options.microbatch_size == "auto":
        options = _fitted(text, options, console)
    introduction = report.introduction(text, options)
    console.print(introduction, end="\n\n")
    result = _train(text, options)
    console.print(report.table(result.runs), "")
    console.print(report.legend(), style="dim", end="\n\n")
    console.print(report.conclusion(result))
    console.print(report.noise(result, options))
    if options.plot:
        plot(options.plot, result.runs, introduction, options.window)
        console.print(f"Chart: {options.plot}", markup=False, soft_wrap=True)


def _fitted(text: Text, options: Options, console: Console) -> Options:
    """The options with the window and the microbatch that fit in memory."""
    batch_size = options.window * SIZE
    memory = None if options.memory is None else memory_bytes(options.memory)
    try:
        found = fit(text, batch_size=batch_size, memory=memory, seed=options.seed)
    except MemoryError as error:
        command_line.fail(str(error))
    except ValueError as error:
        if memory is not None:
            raise
        command_line.fail(f"Give --memory, such as 300MB. ({error})")
    console.print(str(found), highlight=False, end="\n\n")
    return dataclasses.replace(
        options,
        microbatch_size=found.microbatch_size,
        window=batch_size // found.microbatch_size,
    )


def _train(text: Text, options: Options) -> Result:
    assert options.microbatch_size != "auto"
    # On stderr, so that it is seen while the table goes into a pipe.
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with progress:
        task = progress.add_task("", total=1)

        def say(doing: str, done: float) -> None:
            progress.update(task, description=doing, completed=done)

        try:
            return train(
                text,
                window=options.window,
                microbatch_size=options.microbatch_size,
                steps=options.steps,
                seed=options.seed,
                say=say,
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
    command_line.fail(
        "The large batch does not fit in memory; give a smaller --window or"
        " --microbatch-size."
    )

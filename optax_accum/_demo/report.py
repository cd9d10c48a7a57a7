"""What the training found, as a table and in words."""

from collections.abc import Sequence

import jax
import numpy as np
import optax
import rich.box
import rich.table

from optax_accum._demo.options import Options
from optax_accum._demo.text import HELD_OUT, LONGEST, Text
from optax_accum._demo.train import Result, Run


def introduction(text: Text, options: Options) -> str:
    device = jax.devices()[0].device_kind
    return (
        f"JAX {jax.__version__}, Optax {optax.__version__}, {device}. Python's manual:"
        f" {len(text.training)} paragraphs of up to {LONGEST} characters, padded, in"
        f" random order. Microbatches to a window: {options.window}; paragraphs to a"
        f" microbatch: {options.microbatch_size}."
    )


def table(runs: Sequence[Run]) -> rich.table.Table:
    # As narrow as it can be, for terminals of 80 columns.
    view = rich.table.Table(box=rich.box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    view.add_column(no_wrap=True)
    for heading in (
        "held-out\nloss",
        "distance\nfrom large",
        "temp.\nMB",
        "peak\nMB",
        "s /\nwindow",
    ):
        view.add_column(heading, justify="right")
    for run in runs:
        view.add_row(
            run.contender.name,
            f"{run.held_out_loss:.4f}",
            "-" if run is runs[0] else f"{run.distances[-1]:.1e}",
            _megabytes(run.memory.temporary) if run.memory else "-",
            _megabytes(run.memory.peak) if run.memory else "-",
            f"{run.median_seconds:.3f}",
        )
    return view


def legend() -> str:
    return (
        f"held-out loss: mean over the tokens of {HELD_OUT} paragraphs not trained on\n"
        "distance: |params - large batch's| / |large batch's|, after the last window\n"
        "temp., peak: of one compiled step, as XLA plans it, with the activations of\n"
        "  a window for the large batch and of a microbatch for the others; the peak\n"
        "  is arguments + outputs - aliased (donated) + temporaries\n"
        "s / window: median seconds, without compilation"
    )


def conclusion(result: Result) -> str:
    """What there is to see, in plain words."""
    large, *others = result.runs
    weighted = [run.distances[-1] for run in others if run.contender.weighted]
    equal = [run.distances[-1] for run in others if not run.contender.weighted]
    tokens = _range([str(count) for count in result.tokens.flat])
    rounding = np.finfo(np.float32).eps
    unweighted = (
        f"With equal weights, where microbatches of {tokens} tokens count the same,"
        f" they end at least {min(equal):.1e} away."
    )
    if result.tokens.shape[1] == 1:
        unweighted = "One microbatch to a window leaves nothing to weigh."
    return (
        f"With weight=tokens the parameters end within {max(weighted):.1e} of the large"
        f" batch's; float32 rounds by {rounding:.1e}.\n"
        f"{unweighted}\n"
        f"A window takes {_costs([large])} as one large batch,"
        f" {_costs(others)} accumulated."
    )


def noise(result: Result, options: Options) -> str:
    """What the gradient noise scale says of the length of the window."""
    (run,) = (run for run in result.runs if run.contender.tracks_noise)
    scale, gradient, _ = map(float, run.noise[-1])
    window, size = options.window, options.microbatch_size
    assert size != "auto"
    if window == 1:
        return "A window of one microbatch tells nothing of the gradient's noise."
    if not (gradient > 0 and np.isfinite(scale)):
        return (
            "The gradient noise scale cannot be told yet: the noise hides the gradient."
            " Average over more windows, by more --steps."
        )
    tokens = scale * float(np.mean(result.tokens))
    told = (
        f"The gradient noise scale is {_round(scale)} microbatches, so"
        f" {_round(scale * size)} paragraphs or {_round(tokens)} tokens; a window has"
        f" {window} microbatches."
    )
    if scale > 2 * window:
        return f"{told}\nA longer window would still save steps at little cost in data."
    if scale < window / 2:
        return (
            f"{told}\nA shorter window with a smaller learning rate would come as far"
            " on less data."
        )
    return f"{told}\nThat is about right: a longer one saves steps, and costs data."


def _round(number: float) -> str:
    """To two digits, as well as an estimate is known."""
    digits = 1 - int(np.floor(np.log10(number)))
    return f"{round(number, digits):.{max(digits, 0)}f}"


def _costs(runs: Sequence[Run]) -> str:
    costs = f"{_range([f'{run.median_seconds:.3f}' for run in runs])} s"
    sizes = [_megabytes(run.memory.temporary) for run in runs if run.memory]
    return f"{costs} and {_range(sizes)} MB of temporaries" if sizes else costs


def _range(numbers: Sequence[str]) -> str:
    least, most = min(numbers, key=float), max(numbers, key=float)
    return least if least == most else f"{least} to {most}"


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f}"

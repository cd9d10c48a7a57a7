"""`python -m benchmarks microbatches`: the window inside one step, and its peers."""

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import jax
import jax.numpy as jnp
import rich.table
from jax import lax
from optax import microbatching
from rich.console import Console

import optax_accum
from benchmarks.report import show_verdicts, versions
from benchmarks.targets import Verdict
from optax_accum._demo import command_line
from optax_accum._demo.model import make_model
from optax_accum._demo.text import read_text

BY_HAND, OPTAX, OURS = "scan by hand", "optax.microbatching", "optax_accum"
Loss = Callable[[Any, Any], jax.Array]


@dataclass(frozen=True)
class Options:
    """Measures value_and_grad over microbatches against a scan and against Optax's."""

    batch_size: int = 32
    """Examples in the large batch."""
    microbatches: int = 8
    """How many microbatches to make of it; has to divide the batch size."""
    rounds: int = 40
    """How often to run each contender."""
    models: tuple[Literal["transformer", "wide_mlp"], ...] = ("transformer", "wide_mlp")
    """The main job's, and one in which the gradients are what is large."""


@dataclass
class Contender:
    """One way, on one model, and what was measured of it."""

    name: str
    step: Any
    temporary_bytes: int | None
    compile_s: float
    seconds: list[float]


def main(args: list[str]) -> None:
    options = command_line.read(Options, "python -m benchmarks microbatches", args)
    for name in ("batch_size", "microbatches", "rounds"):
        if getattr(options, name) < 1:
            command_line.fail(f"--{name.replace('_', '-')} must be 1 or more.")
    if options.batch_size % options.microbatches:
        command_line.fail("--batch-size must be a multiple of --microbatches.")
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in versions().items()))
    measured = {}
    for name in options.models:
        loss_fn, params, batch = MODELS[name](options.batch_size)
        contenders = measure(loss_fn, params, batch, options)
        measured[name] = {c.name: c for c in contenders}
        console.print(table(name, contenders, params))
    console.print(show_verdicts(judge(measured)))


def transformer(batch_size: int) -> tuple[Loss, Any, Any]:
    text = read_text(seed=0)
    params, loss_and_tokens = make_model(text.characters, seed=0)
    batch = jnp.asarray(text.training[:batch_size])
    return lambda params, rows: loss_and_tokens(params, rows)[0], params, batch


def wide_mlp(batch_size: int, width: int = 2048) -> tuple[Loss, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 4)
    params = [0.02 * jax.random.normal(k, (width, width)) for k in keys[:3]]
    batch = jax.random.normal(keys[3], (batch_size, width))

    def loss_fn(params, x):
        y = x
        for kernel in params:
            y = jax.nn.gelu(y @ kernel)
        return jnp.mean((y - x) ** 2)

    return loss_fn, params, batch


MODELS = {"transformer": transformer, "wide_mlp": wide_mlp}


def by_hand(loss_fn: Loss, count: int) -> Callable[..., Any]:
    """What people write: equal weights, no rest, no keys, no auxiliary output."""

    def value_and_grad(params, batch):
        def step(sums, microbatch):
            new = jax.value_and_grad(loss_fn)(params, microbatch)
            return jax.tree.map(jnp.add, sums, new), ()

        zeros = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        batches = batch.reshape(count, -1, *batch.shape[1:])
        sums, _ = lax.scan(step, zeros, batches)
        return jax.tree.map(lambda x: x / count, sums)

    return value_and_grad


def measure(
    loss_fn: Loss, params: Any, batch: Any, options: Options
) -> list[Contender]:
    count = options.microbatches
    ways = {
        "the whole batch": jax.value_and_grad(loss_fn),
        BY_HAND: by_hand(loss_fn, count),
        OPTAX: microbatching.microbatch(
            jax.value_and_grad(loss_fn),
            argnums=1,
            microbatch_size=options.batch_size // count,
            accumulator=microbatching.AccumulationType.MEAN,
        ),
        OURS: optax_accum.value_and_grad(loss_fn, num_microbatches=count),
    }
    contenders = []
    for name, fun in ways.items():
        jax.clear_caches()
        start = time.perf_counter()
        step = jax.jit(fun).lower(params, batch).compile()
        compile_s = time.perf_counter() - start
        memory = step.memory_analysis()
        temporary = memory.temp_size_in_bytes if memory else None
        contenders.append(Contender(name, step, temporary, compile_s, []))
    shuffle = random.Random(0)
    for i in range(options.rounds + 1):
        for c in shuffle.sample(contenders, len(contenders)):
            start = time.perf_counter()
            jax.block_until_ready(c.step(params, batch))
            if i > 0:  # the first is to warm up
                c.seconds.append(time.perf_counter() - start)
    return contenders


def table(model: str, contenders: list[Contender], params: Any) -> rich.table.Table:
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    view = rich.table.Table(
        title=f"{model} ({size / 1e6:.3g} MB of parameters)", title_justify="left"
    )
    for heading in ("", "ms", f"/ {BY_HAND}", "/ Optax's", "temp. MB", "compile s"):
        view.add_column(heading, justify="right" if heading else "left")
    by_name = {c.name: c for c in contenders}
    for c in contenders:
        temporary = c.temporary_bytes
        view.add_row(
            c.name,
            f"{1e3 * median(c.seconds):.1f}",
            f"{_ratio(c, by_name[BY_HAND]):.2f}",
            f"{_ratio(c, by_name[OPTAX]):.2f}",
            "-" if temporary is None else f"{temporary / 1e6:.2f}",
            f"{c.compile_s:.2f}",
        )
    return view


def judge(measured: dict[str, dict[str, Contender]]) -> list[Verdict]:
    """What is promised of `value_and_grad`, and the worst that was measured of it."""

    def verdict(what, limit, value):
        found = [(value(by_name), model) for model, by_name in measured.items()]
        worst, where = max((x for x in found if x[0] is not None), default=(None, None))
        return Verdict(what, limit, worst, where)

    def temporaries(by_name):
        ours, theirs = (by_name[name].temporary_bytes for name in (OURS, BY_HAND))
        return None if ours is None or theirs is None else ours / theirs

    def time(other):
        return lambda by_name: _ratio(by_name[OURS], by_name[other])

    return [
        verdict(f"time / {BY_HAND}", 1.03, time(BY_HAND)),
        verdict(f"time / {OPTAX}", 1.0, time(OPTAX)),
        verdict(f"temporaries / {BY_HAND}", 1.02, temporaries),
    ]


def _ratio(c: Contender, other: Contender) -> float:
    """Of what ran in the same round, so that other work on the machine cancels."""
    return median(x / y for x, y in zip(c.seconds, other.seconds, strict=True))

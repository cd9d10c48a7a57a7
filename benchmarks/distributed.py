"""`python -m benchmarks distributed`: what a window sends, and what that costs."""

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import rich.box
import rich.table
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from rich.console import Console

import optax_accum
from benchmarks.collectives import Sent, sent
from benchmarks.report import show_verdicts, versions
from benchmarks.targets import Verdict
from optax_accum._demo import command_line

CPU_DEVICES = 8
MULTI_STEPS, BY_HAND = "optax.MultiSteps", "scan by hand"
LEAST_BYTES = 1024  # of what counts: not the mean of a loss, nor a sum of weights


@dataclass(frozen=True)
class Options:
    """Counts what a window sends between devices, and measures its time."""

    windows: tuple[int, ...] = (1, 4, 16, 64)
    """Microbatches to a window."""
    width: int = 256
    """Of the model, which has 16 times its square of parameters."""
    examples: int = 8
    """To a microbatch on each device."""
    rounds: int = 5
    """How often to run each contender."""
    json: Path | None = None
    """Where to write all numbers."""


class Program(NamedTuple):
    """One way, ready to run.

    Attributes:
      mesh: over all devices.
      step: `(params, state, batch) -> (params, state)`.
      params: on the mesh.
      state: of the optimizer.
    """

    mesh: Any
    step: Callable[..., Any]
    params: Any
    state: Any


class Contender(NamedTuple):
    """One way to take an optimizer step a window.

    Attributes:
      build: from the mesh, the parameters and the window to the step and the state.
      by_microbatch: does a step see one microbatch, or all of the window?
      kind: of the axes of the mesh.
    """

    build: Callable[..., tuple[Callable[..., Any], Any]]
    by_microbatch: bool
    kind: AxisType


@dataclass(frozen=True)
class Row:
    """What was found of a contender.

    Attributes:
      count: collectives of each name in a window.
      bytes: what one device has in them.
      bytes_per_parameters: that, over the bytes of the parameters.
      ms: median milliseconds of a window.
      per_multi_steps: as a ratio, in the same rounds.
    """

    window: int
    contender: str
    count: dict[str, int]
    bytes: int
    bytes_per_parameters: float
    ms: float
    per_multi_steps: float


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    # Of matrix products only, for what explicit types can tag.
    y = x
    for wide, narrow in params:
        y = jax.nn.gelu(y @ wide) @ narrow
    return jnp.mean((y - x) ** 2)


def _optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-3)


def _multi_steps(params, window):
    tx = optax.MultiSteps(_optimizer(), window)

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step, tx.init(params)


def _large_batch_step(grad_fn):
    tx = _optimizer()

    def step(params, state, x):
        updates, state = tx.update(grad_fn(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


def _scan_by_hand(params, window):
    def grad_fn(params, x):
        def add(sums, x):
            return jax.tree.map(jnp.add, sums, jax.grad(loss_fn)(params, x)), ()

        # Each microbatch has its part on every device.
        parts = x.reshape(-1, window, x.shape[-1]).swapaxes(0, 1)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.tree.map(lambda g: g / window, lax.scan(add, zeros, parts)[0])

    return _large_batch_step(grad_fn), _optimizer().init(params)


def _value_and_grad(params, window):
    grad_fn = optax_accum.grad(loss_fn, num_microbatches=window, reduce_axes="data")
    return _large_batch_step(grad_fn), _optimizer().init(params)


def _accumulate(params, window):
    tx = optax_accum.chain(
        optax_accum.accumulate(window, reduce_axes="data"), _optimizer()
    )

    def step(params, state, x):
        partial = optax_accum.defer_reduction(params, "data")
        grads = jax.grad(loss_fn)(partial, x)
        return optax_accum.apply_gradients(tx, grads, state, params)

    return step, tx.init(params)


def _in_shard_map(params, window):
    step, state = _accumulate(params, window)
    specs = optax_accum.state_specs(state, "data")
    step = jax.shard_map(step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    return step, state


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
CONTENDERS = {
    MULTI_STEPS: Contender(_multi_steps, True, AUTO),
    BY_HAND: Contender(_scan_by_hand, False, AUTO),
    "accumulate in shard_map": Contender(_in_shard_map, True, AUTO),
    "accumulate, explicit mesh": Contender(_accumulate, True, EXPLICIT),
    "value_and_grad": Contender(_value_and_grad, False, AUTO),
}
OURS = [name for name in CONTENDERS if name not in (MULTI_STEPS, BY_HAND)]


def main(args: list[str]) -> None:
    options = command_line.read(Options, "python -m benchmarks distributed", args)
    for name in ("width", "examples", "rounds"):
        if getattr(options, name) < 1:
            command_line.fail(f"--{name} must be 1 or more.")
    if not options.windows or min(options.windows) < 1:
        command_line.fail("--windows needs numbers of 1 or more.")
    if options.json and not options.json.parent.is_dir():
        command_line.fail("--json must be a file in an existing folder.")
    if jax.config.jax_num_cpu_devices != CPU_DEVICES:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", CPU_DEVICES)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    setting = versions() | {"devices": jax.device_count()}
    console.print(", ".join(f"{name} {value}" for name, value in setting.items()))
    rows = []
    for window in options.windows:
        rows += measure(window, options.width, options.examples, options.rounds)
        console.print(show(rows[-len(CONTENDERS) :], options.width))
    console.print(show_verdicts(judge(rows)))
    console.print(on_paper())
    if options.json:
        content = {"versions": setting, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1, default=str))


def measure(window: int, width: int, examples: int, rounds: int) -> list[Row]:
    key = jax.random.key(0)
    layers = [(width, 4 * width), (4 * width, width)]
    params = [
        tuple(0.02 * jax.random.normal(key, shape) for shape in layers)
        for _ in range(2)
    ]
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    data = jax.random.normal(key, (window, examples * jax.device_count(), width))

    programs, batches, found = {}, {}, {}
    for name, c in CONTENDERS.items():
        mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(c.kind,))
        with jax.set_mesh(mesh):
            own = jax.device_put(jax.tree.map(jnp.copy, params), P())
            step, state = c.build(own, window)
            state = jax.tree.map(jnp.copy, state)
            parts = data if c.by_microbatch else data.reshape(1, -1, width)
            batches[name] = [jax.device_put(x, P("data")) for x in parts]
            step = jax.jit(step, donate_argnums=(0, 1))
            # Once, for parameters and state to be laid out as they come out.
            own, state = step(own, state, batches[name][0])
            compiled = step.lower(own, state, batches[name][0]).compile()
            for x in batches[name][1:]:  # to the end of the window
                own, state = step(own, state, x)
        programs[name] = Program(mesh, step, own, state)
        runs = window if c.by_microbatch else 1
        found[name] = in_a_window(compiled.as_text() or "", runs)
    seconds = {name: [] for name in programs}
    shuffle = random.Random(0)
    for i in range(rounds + 1):
        for name in shuffle.sample([*programs], len(programs)):
            seconds_now, programs[name] = run(programs[name], batches[name])
            if i > 0:  # the first is to warm up
                seconds[name].append(seconds_now)

    def ratio(name):
        both = zip(seconds[name], seconds[MULTI_STEPS], strict=True)
        return median(x / y for x, y in both)

    return [
        Row(
            window,
            name,
            dict(found[name].counts),
            found[name].bytes,
            found[name].bytes / size,
            1e3 * median(seconds[name]),
            ratio(name),
        )
        for name in programs
    ]


def run(program: Program, batches: list[jax.Array]) -> tuple[float, Program]:
    """Seconds for a window."""
    mesh, step, params, state = program
    with jax.set_mesh(mesh):
        start = time.perf_counter()
        for x in batches:
            params, state = step(params, state, x)
        jax.block_until_ready((params, state))
        return time.perf_counter() - start, Program(mesh, step, params, state)


def in_a_window(text: str, runs: int) -> Sent:
    """What the runs of a program send, of which the last is the release."""
    between = sent(text, release=False, least_bytes=LEAST_BYTES)
    release = sent(text, release=True, least_bytes=LEAST_BYTES)
    return between.times(runs - 1) + release


def show(rows: list[Row], width: int) -> rich.table.Table:
    view = rich.table.Table(
        title=f"A window of {rows[0].window}, {4 * 16 * width**2 / 1e6:.3g} MB of"
        " parameters",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
    )
    for heading in ("", "collectives", "MB", "/ params", "ms", f"/ {MULTI_STEPS}"):
        view.add_column(heading, justify="right" if heading else "left")
    for row in rows:
        view.add_row(
            row.contender,
            ", ".join(f"{n} {name}" for name, n in sorted(row.count.items())) or "none",
            f"{row.bytes / 1e6:.2f}",
            f"{row.bytes_per_parameters:.2f}",
            f"{row.ms:.1f}",
            f"{row.per_multi_steps:.2f}",
        )
    return view


def judge(rows: list[Row]) -> list[Verdict]:
    """What is promised: the parameters' bytes once a window, however long it is.

    With them may come a few scalars, such as the loss and the weight.
    """
    ours = [row for row in rows if row.contender in OURS]
    worst, where = max(
        (row.bytes_per_parameters, f"{row.contender}, window {row.window}")
        for row in ours
    )
    return [Verdict("bytes sent in a window / parameters", 1.001, worst, where)]


def on_paper() -> rich.table.Table:
    """Seconds that a window of 16 spends in its all-reduces, by their bytes alone."""
    window = 16
    view = rich.table.Table(
        title=f"On paper: seconds that a window of {window} spends in all-reduces of"
        " float32, at\none a microbatch and at one a window. In a ring of n devices"
        " each sends\n2 (n - 1) / n times the bytes over its link.",
        title_justify="left",
        box=rich.box.SIMPLE_HEAD,
    )
    for heading in ("parameters", "devices", "link", "a microbatch", "a window"):
        view.add_column(heading, justify="right")
    for billions in (1, 70):
        for link in (25, 400):
            for n in (8, 64, 1024):
                once = all_reduce_seconds(4e9 * billions, n, 1e9 * link)
                view.add_row(
                    f"{billions}e9",
                    str(n),
                    f"{link} GB/s",
                    f"{window * once:.3g}",
                    f"{once:.3g}",
                )
    return view


def all_reduce_seconds(size: float, devices: int, bandwidth: float) -> float:
    """In a ring, with nothing but the bytes to wait for."""
    return 2 * (devices - 1) / devices * size / bandwidth

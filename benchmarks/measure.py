"""Times contenders against each other, in one process and at the same time."""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.contenders import (
    ALONE,
    BASELINES,
    FLOOR,
    HAND_OVER,
    MULTI_STEPS,
    Contender,
)
from benchmarks.optimizers import OPTIMIZERS
from benchmarks.trees import TREES, draw


@dataclass(frozen=True)
class Row:
    """What was measured of a contender; `None` where there is no such number.

    The mean is over the micro-steps of a window, the ideal what it would be if all took
    as long as the floor and one also as long as the optimizer alone. (With many arrays
    JAX takes its time to hand the parameters and the state over, whatever the step
    does with them; the hand-over says how long.)
    """

    contender: str
    between_ms: float | None
    between_per_floor: float | None
    between_per_hand_over: float | None
    between_per_multi_steps: float | None
    release_ms: float | None
    release_per_floor: float | None
    mean_ms: float | None
    mean_per_floor: float | None
    mean_per_ideal: float | None
    mean_per_multi_steps: float | None
    temporaries_per_parameters: float | None
    compile_s: float | None
    compile_per_multi_steps: float | None
    windows: int


@dataclass(frozen=True)
class Table:
    """The rows of one optimizer on one tree, by contender."""

    optimizer: str
    tree: str
    arrays: int
    parameter_bytes: int
    rows: dict[str, Row]


@dataclass
class Runner:
    """A contender at work."""

    contender: Contender
    step: Any
    carry: Any
    compiled: Any = None
    compile_s: list[float] = field(default_factory=list)
    spent_s: float = 0.0

    @property
    def baseline(self) -> bool:
        return self.contender.name in BASELINES

    def compile(self, grads: Any) -> None:
        jax.clear_caches()
        start = time.perf_counter()
        self.compiled = self.step.lower(self.carry, grads).compile()
        self.compile_s.append(time.perf_counter() - start)

    def run(self, grads: Any) -> float:
        start = time.perf_counter()
        self.carry = jax.block_until_ready(self.compiled(self.carry, grads))
        seconds = time.perf_counter() - start
        self.spent_s += seconds
        return seconds


# Seconds of a window: the median micro-step between releases, and the one at the
# release; NaN where there is none.
Window = tuple[float, float]
NO_WINDOW: Window = (math.nan, math.nan)


def measure(
    optimizer: str,
    tree: str,
    contenders: Sequence[Contender],
    *,
    megabytes: float,
    every: int,
    seconds: float,
    rounds: int,
    say: Callable[[str], None],
) -> Table:
    """Measures the contenders, for about so long and in at most so many rounds."""
    shapes = TREES[tree](megabytes)
    params, grads = draw(shapes, seed=0), draw(shapes, seed=1)
    runners = []
    for contender in contenders:
        if contender.only in (None, optimizer):
            step, carry = contender.build(OPTIMIZERS[optimizer](), params, every)
            # A state may hold the parameters themselves; both are donated.
            carry = jax.tree.map(jnp.array, carry)
            runners.append(Runner(contender, step, carry))
    shuffle = random.Random(0)

    until = time.perf_counter() + seconds / 2
    for _ in range(7):
        for runner in shuffle.sample(runners, len(runners)):
            say(f"compile {runner.contender.name}")
            runner.compile(grads)
        if time.perf_counter() > until:
            break

    # As much work on memory as the floor's, but on its own arrays: none of the
    # contenders finds its data in the caches.
    acc, other = draw(shapes, seed=2), draw(shapes, seed=3)
    add = jax.jit(lambda x, y: jax.tree.map(jnp.add, x, y), donate_argnums=0)

    def spacer() -> None:
        nonlocal acc
        acc = jax.block_until_ready(add(acc, other))

    say("warm up")
    _round(runners, grads, every, shuffle, spacer)
    for runner in runners:
        runner.spent_s = 0.0

    # All get the same time, not the same number of windows: so the quick ones, whose
    # ratios are near 1, are measured the more precisely. The baselines run in every
    # round, for the ratios to be to what ran at the same time.
    share = seconds / 2 / len(runners)
    windows = []
    for i in range(rounds):
        limit = seconds if i < 3 else share
        running = [r for r in runners if r.spent_s <= limit or r.baseline]
        if all(r.baseline for r in running):
            break
        say(f"round {i + 1}")
        windows.append(_round(running, grads, every, shuffle, spacer))

    nbytes = sum(x.nbytes for x in params.values())
    rows = {r.contender.name: _row(r, runners, windows, every, nbytes) for r in runners}
    return Table(optimizer, tree, len(params), nbytes, rows)


def _round(
    runners: list[Runner],
    grads: Any,
    every: int,
    shuffle: random.Random,
    spacer: Callable[[], object],
) -> dict[str, Window]:
    """One window of each, side by side.

    They take turns by micro-step and in an order that changes. Before each comes the
    spacer, which is not timed: some leave caches and heap in a state that slows down
    the next one, and whom they hit must not decide.
    """
    between = {r.contender.name: [] for r in runners}
    release = dict.fromkeys(between, math.nan)
    for i in range(1, every + 1):
        for runner in shuffle.sample(runners, len(runners)):
            name, step = runner.contender.name, runner.contender.step
            spacer()
            if step == "between" or (step == "accumulating" and i < every):
                between[name].append(runner.run(grads))
            elif i == every:
                release[name] = runner.run(grads)
    return {
        name: (median(b or [math.nan]), release[name]) for name, b in between.items()
    }


def _row(
    runner: Runner,
    runners: list[Runner],
    windows: list[dict[str, Window]],
    every: int,
    parameter_bytes: int,
) -> Row:
    def steps(name):
        return np.array([window.get(name, NO_WINDOW) for window in windows]).T

    def mean(name):
        between, release = steps(name)
        return ((every - 1) * between + release) / every

    name = runner.contender.name
    between, release = steps(name)
    floor, alone = steps(FLOOR)[0], steps(ALONE)[1]
    compile_s = {r.contender.name: np.array(r.compile_s) for r in runners}
    memory = runner.compiled.memory_analysis()
    # Ratios are medians of ratios within a round. What else the machine does slows
    # down all that run in a round alike and cancels there; in a ratio of two medians,
    # over different rounds even, it would not.
    return Row(
        contender=name,
        between_ms=_typical(1e3 * between),
        between_per_floor=_typical(between / floor),
        between_per_hand_over=_typical(between / steps(HAND_OVER)[0]),
        between_per_multi_steps=_typical(between / steps(MULTI_STEPS)[0]),
        release_ms=_typical(1e3 * release),
        release_per_floor=_typical(release / floor),
        mean_ms=_typical(1e3 * mean(name)),
        mean_per_floor=_typical(mean(name) / floor),
        mean_per_ideal=_typical(mean(name) / (floor + alone / every)),
        mean_per_multi_steps=_typical(mean(name) / mean(MULTI_STEPS)),
        temporaries_per_parameters=(
            memory.temp_size_in_bytes / parameter_bytes if memory else None
        ),
        compile_s=_typical(compile_s[name]),
        compile_per_multi_steps=_typical(
            compile_s[name] / compile_s.get(MULTI_STEPS, math.nan)
        ),
        windows=sum(name in window for window in windows),
    )


def _typical(x: np.ndarray) -> float | None:
    x = x[~np.isnan(x)]
    return float(np.median(x)) if x.size else None

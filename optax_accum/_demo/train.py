"""Trains the same model by every contender, side by side."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum
from optax_accum._demo.contenders import CONTENDERS, Contender
from optax_accum._demo.model import Loss, make_model
from optax_accum._demo.text import Text, count_tokens, windows
from optax_accum._noise import NoiseScale

LEARNING_RATE = 3e-3
WARM_UP = 10


class Memory(NamedTuple):
    """Bytes that the compiled step needs, by XLA's own account.

    Attributes:
      temporary: beside what comes in and goes out, such as activations.
      peak: all together.
    """

    temporary: int
    peak: int


@dataclass
class Run:
    """One contender, and what has been measured of it.

    Attributes:
      step: the compiled step.
      memory: `None` where the backend does not say.
      losses: for each window, the mean over its tokens of the loss before the step.
      distances: after each window, how far the parameters are from the first run's,
        as a part of their norm.
      seconds: for each window.
      noise: after each window, the smoothed gradient noise scale, if it is tracked.
      held_out_loss: the loss on paragraphs that are not trained on, at the end.
    """

    contender: Contender
    step: Callable[..., Any]
    memory: Memory | None
    params: Any
    opt_state: Any
    losses: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    noise: list[NoiseScale] = field(default_factory=list)
    held_out_loss: float = float("nan")

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


class Result(NamedTuple):
    """What `train` found.

    Attributes:
      runs: one a contender, in the order of `CONTENDERS`.
      tokens: int [steps, window], how many tokens the microbatches had.
    """

    runs: list[Run]
    tokens: np.ndarray


def train(
    text: Text,
    *,
    window: int,
    microbatch_size: int,
    steps: int,
    seed: int,
    say: Callable[[str, float], None] = lambda doing, done: None,
) -> Result:
    """Trains for `steps` windows by each of `CONTENDERS`.

    All have the same first parameters, data and optimizer. They take turns, window by
    window, so that whatever else the machine does slows all of them alike. `say` hears
    of each turn what begins, and what part of the whole is done.
    """
    turns = len(CONTENDERS) * (1 + steps)
    done = (turn / turns for turn in range(turns))
    params, loss_fn = make_model(text.characters, seed)
    batches = windows(text.training, window, microbatch_size, seed)
    runs, tokens = [], []
    # Accelerators would round the factors of a matrix product to fewer bits, and hide
    # in that how well the contenders agree.
    with jax.default_matmul_precision("highest"):
        shape = (window, microbatch_size, text.training.shape[-1])
        for contender in CONTENDERS:
            say(f"compiling {contender.name}", next(done))
            runs.append(_start(contender, loss_fn, params, shape))
        for i in range(steps):
            rows = next(batches)
            tokens.append(count_tokens(rows))
            for run in runs:
                say(f"window {i + 1} of {steps}", next(done))
                _train_window(run, rows)
            for run in runs:
                run.distances.append(float(_distance(run.params, runs[0].params)))
        evaluate = jax.jit(loss_fn)
        for run in runs:
            run.held_out_loss = float(evaluate(run.params, text.held_out)[0])
    return Result(runs, np.stack(tokens))


def fit(
    text: Text, *, batch_size: int, memory: int | None, seed: int
) -> optax_accum.Fit:
    """The largest microbatch, a divisor of the batch, that fits `value_and_grad`.

    Raises:
      MemoryError, ValueError: as `optax_accum.fit_microbatch`.
    """
    params, loss_fn = make_model(text.characters, seed)
    (contender,) = (c for c in CONTENDERS if c.name.startswith("value_and_grad"))

    def build(microbatch_size):
        _, step = contender.build(loss_fn, _optimizer(), batch_size // microbatch_size)
        return jax.jit(step, donate_argnums=(0, 1))

    opt_state = jax.eval_shape(_optimizer().init, params)
    rows = jax.ShapeDtypeStruct((batch_size, text.training.shape[-1]), jnp.int32)
    sizes = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    return optax_accum.fit_microbatch(
        build,
        *(params, opt_state, rows),
        batch_size=batch_size,
        memory_limit=memory,
        candidates=sizes,
    )


def _optimizer() -> optax.GradientTransformation:
    learning_rate = optax.warmup_constant_schedule(
        LEARNING_RATE / WARM_UP, LEARNING_RATE, WARM_UP
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))


def _start(
    contender: Contender, loss_fn: Loss, params: Any, shape: tuple[int, int, int]
) -> Run:
    init, step = contender.build(loss_fn, _optimizer(), shape[0])
    params = jax.tree.map(jnp.copy, params)  # The step will be given them for good.
    opt_state = init(params)
    first, *_ = _batches(contender, np.zeros(shape, np.int32))
    jitted = jax.jit(step, donate_argnums=(0, 1))
    compiled = jitted.lower(params, opt_state, first).compile()
    return Run(contender, compiled, _memory(compiled), params, opt_state)


def _train_window(run: Run, rows: np.ndarray) -> None:
    batches = _batches(run.contender, rows)
    tokens = [count_tokens(batch) for batch in batches]
    on_device = jax.block_until_ready([jnp.asarray(batch) for batch in batches])
    losses = []
    start = time.perf_counter()
    for batch in on_device:
        run.params, run.opt_state, loss = run.step(run.params, run.opt_state, batch)
        losses.append(loss)
    jax.block_until_ready((run.params, run.opt_state))
    run.seconds.append(time.perf_counter() - start)
    run.losses.append(float(np.average(losses, weights=tokens)))
    if run.contender.tracks_noise:
        run.noise.append(jax.device_get(optax_accum.noise_scale(run.opt_state)))


def _batches(contender: Contender, rows: np.ndarray) -> Sequence[np.ndarray]:
    if contender.by_microbatch:
        return list(rows)
    return [rows.reshape(-1, rows.shape[-1])]


def _memory(compiled: jax.stages.Compiled) -> Memory | None:
    sizes = compiled.memory_analysis()
    if sizes is None:
        return None
    temporary = sizes.temp_size_in_bytes
    # What goes out into a donated buffer is counted on both sides.
    kept = sizes.argument_size_in_bytes + sizes.output_size_in_bytes
    return Memory(temporary, kept - sizes.alias_size_in_bytes + temporary)


@jax.jit
def _distance(params: Any, others: Any) -> jax.Array:
    difference = optax.tree.sub(params, others)
    return optax.tree.norm(difference) / optax.tree.norm(others)

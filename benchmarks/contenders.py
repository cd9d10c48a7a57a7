"""What is timed. To add a contender, add a line to `CONTENDERS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax.experimental import aggregating

import optax_accum
from benchmarks import flax_steps

# `(optimizer, params, every) -> (step, carry)`, where the jitted step takes
# `(carry, grads)`, donates the carry and returns the next one.
Build = Callable[[optax.GradientTransformation, optax.Params, int], tuple[Any, Any]]


@dataclass(frozen=True)
class Contender:
    """A way to get through a window.

    Attributes:
      name: in tables and on the command line.
      what: one line for the legend.
      build: makes the step and its carry.
      step: what its step is like: an `"accumulating"` one releases in every `every`-th
        call; another is always like one `"between"` or like one at a `"release"`.
      only: the one optimizer it is right for, if it is not right for all.
    """

    name: str
    what: str
    build: Build
    step: Literal["accumulating", "between", "release"] = "accumulating"
    only: str | None = None


def _floor(optimizer, params, every):
    del optimizer, every

    def step(acc, grads):
        return jax.tree.map(jnp.add, acc, grads)

    return jax.jit(step, donate_argnums=0), optax.tree.zeros_like(params)


def _hand_over(optimizer, params, every):
    del every

    def step(carry, grads):
        params, state, acc = carry
        return params, state, jax.tree.map(jnp.add, acc, grads)

    acc = optax.tree.zeros_like(params)
    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params), acc)


def _plain(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def _stepping(wrap: Callable[[Any, int], Any], micro_step: Callable = _plain) -> Build:
    """A training step with the transform `wrap(optimizer, every)`."""

    def build(optimizer, params, every):
        tx = wrap(optimizer, every)

        def step(carry, grads):
            params, state = carry
            return micro_step(tx, grads, state, params)

        return jax.jit(step, donate_argnums=0), (params, tx.init(params))

    return build


def _ours(optimizer, every):
    return optax_accum.chain(optax_accum.accumulate(every), optimizer)


def _tracking_noise(optimizer, every):
    return optax_accum.chain(optax_accum.accumulate(every, track_noise=True), optimizer)


def _process(optimizer, every):
    return aggregating.process(
        preprocessor=optax.identity(),
        aggregator=aggregating.average_incrementally_updates(
            per_elt_axis=None, accumulation_steps=every
        ),
        postprocessor=optimizer,
    )


FLOOR, HAND_OVER, ALONE = "floor", "hand-over", "alone"
MULTI_STEPS = "optax.MultiSteps"
UPDATE, APPLY_GRADIENTS = "update", "apply_gradients"
TRACK_NOISE = "track_noise"
TRAIN_STATE, NNX_OPTIMIZER = "flax.TrainState", "flax.Optimizer"

# What the others are measured against.
BASELINES = (FLOOR, HAND_OVER, ALONE)

CONTENDERS = (
    Contender(
        FLOOR, "acc + g over the tree: what memory demands", _floor, step="between"
    ),
    Contender(
        HAND_OVER,
        "the floor in a step that takes and returns all that a training step does",
        _hand_over,
        step="between",
    ),
    Contender(
        ALONE,
        "the optimizer and apply_updates, without accumulation",
        _stepping(lambda optimizer, every: optimizer),
        step="release",
    ),
    Contender(MULTI_STEPS, "and apply_updates", _stepping(optax.MultiSteps)),
    Contender(
        "optax.apply_every",
        "chained before the optimizer; right for plain SGD only",
        _stepping(lambda opt, every: optax.chain(optax.apply_every(every), opt)),
        only="sgd",
    ),
    Contender("optax.experimental", "process and apply_updates", _stepping(_process)),
    Contender(UPDATE, "optax_accum, with apply_updates", _stepping(_ours)),
    Contender(
        APPLY_GRADIENTS,
        "optax_accum, both in one",
        _stepping(_ours, optax_accum.apply_gradients),
    ),
    Contender(
        TRACK_NOISE,
        "apply_gradients, and what the noise scale is estimated from",
        _stepping(_tracking_noise, optax_accum.apply_gradients),
    ),
    Contender(
        TRAIN_STATE,
        "that of optax_accum.flax",
        lambda opt, params, every: flax_steps.train_state(_ours(opt, every), params),
    ),
    Contender(
        NNX_OPTIMIZER,
        "that of optax_accum.flax, for NNX",
        lambda opt, params, every: flax_steps.nnx_optimizer(_ours(opt, every), params),
    ),
)

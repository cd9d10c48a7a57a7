r"""The gradient noise scale, from the microbatches that a window has anyway.

Let :math:`w_i` be the weights of a window's :math:`n` microbatches, in proportion to
their numbers of examples, :math:`W` the sum of them, :math:`G` the true gradient and
:math:`S / w_i` the trace of the covariance of the microbatch gradient :math:`g_i`. With
the mean :math:`\bar g = \sum_i w_i g_i / W`, and the mean of the squared norms
:math:`Q = \sum_i w_i |g_i|^2 / W`,

.. math:: E |\bar g|^2 = |G|^2 + S / W, \quad E\, Q = |G|^2 + n S / W,

so that :math:`(Q - |\bar g|^2)\, n / (n - 1)` estimates :math:`n S / W`, the trace of
the covariance of a microbatch of mean weight, and :math:`(n |\bar g|^2 - Q) / (n - 1)`
estimates :math:`|G|^2`, neither with a bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from optax_accum._tree import is_array
from optax_accum._weighted_sum import sum_dtype


class NoiseState(NamedTuple):
    """Scalars from which the noise scale is estimated.

    Attributes:
      squares: the weighted sum of the squared norms of the open window's gradients.
      microbatches: int32, how many they are.
      gradient: the smoothed estimates of the squared norm of the true gradient.
      trace: those of the trace of the covariance of a microbatch's gradient.
      share: the part of 1 that the smoothing has in it so far; divide by it.
    """

    squares: jax.Array
    microbatches: jax.Array
    gradient: jax.Array
    trace: jax.Array
    share: jax.Array


class NoiseScale(NamedTuple):
    """The gradient noise scale, NaN before there is an estimate.

    Attributes:
      noise_scale: float scalar, the batch size, in microbatches, above which a larger
        one stops paying: `trace / gradient_norm_squared`.
      gradient_norm_squared: float scalar, an estimate of the squared norm of the true
        gradient; below 0 where noise hides it.
      trace: float scalar, an estimate of the trace of the covariance of a microbatch's
        gradient.
    """

    noise_scale: jax.Array
    gradient_norm_squared: jax.Array
    trace: jax.Array


def start() -> NoiseState:
    count, *floats = jnp.zeros([], jnp.int32), *(jnp.zeros([], float) for _ in range(4))
    return NoiseState(floats[0], count, *floats[1:])


def window_of(state: NoiseState | tuple[()]) -> tuple[Any, ...]:
    """The sums of the open window, if any: with `reduce_axes` each device has its own.

    All else in the state is the same on all of them.
    """
    return (state.squares, state.microbatches) if state else ()


def on_window(fn: Callable[[Any], Any], state: Any) -> Any:
    """The state with `fn(window_of(state))` in place of `window_of(state)`."""
    if not state:
        return state
    squares, microbatches = fn(window_of(state))
    return state._replace(squares=squares, microbatches=microbatches)


def of_one_window(state: NoiseState, mean: Any, total_weight: Any) -> NoiseState:
    """The estimates of this window alone, if one microbatch in it counted.

    Its `squares` are then those of a window of weight 1, for `add_part_of_window`.
    """
    alone = add_window(
        state, total_weight != 0, squared_norm(mean), total_weight, decay=0.0
    )
    weight = jnp.where(total_weight == 0, 1, total_weight)
    return alone._replace(squares=state.squares / weight)


def squared_norm(tree: Any) -> jax.Array:
    """The sum of the squares of all numbers in a tree, in at least float32."""
    total = jnp.zeros([], float)
    for x in jax.tree.leaves(tree):
        if is_array(x):
            total += _squares(jnp.asarray(x)).astype(total.dtype)
    return total


def _squares(x: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        return _squares(x.real) + _squares(x.imag)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(float)
    if not jax.typeof(x).sharding.mesh.empty and any(jax.typeof(x).sharding.spec):
        return jnp.sum(jnp.square(x.astype(float)))
    # A product, since that is what XLA for CPU computes by several threads.
    every_axis = tuple(range(x.ndim))
    return lax.dot_general(
        x,
        x,
        ((every_axis, every_axis), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=sum_dtype(x.dtype),
    )


def add_microbatch(
    state: NoiseState, grads: Any, weight: Any, *, empty: Any, counted: Any
) -> NoiseState:
    """The state with one more microbatch of the open window."""
    part = of_one_microbatch(squared_norm(grads))
    return add_part_of_window(state, part, weight, empty=empty, counted=counted)


def of_one_microbatch(square: jax.Array) -> NoiseState:
    """What the squared norm of its gradient adds to a window."""
    return start()._replace(squares=square, microbatches=jnp.ones([], jnp.int32))


def add_part_of_window(
    state: NoiseState, part: NoiseState, weight: Any, *, empty: Any, counted: Any
) -> NoiseState:
    """The state with several more, whose mean square and number `part` has."""
    squares = part.squares * (1 if weight is None else weight)
    return state._replace(
        squares=jnp.where(empty, 0, state.squares) + jnp.where(counted, squares, 0),
        microbatches=jnp.where(empty, 0, state.microbatches)
        + jnp.where(counted, part.microbatches, 0),
    )


def add_window(
    state: NoiseState, released: Any, mean_square: Any, total_weight: Any, decay: float
) -> NoiseState:
    """The state after a window, if one is released that has two microbatches or more.

    Args:
      state: with the window's microbatches in it.
      released: boolean scalar.
      mean_square: the squared norm of the window's mean.
      total_weight: the weight of the window.
      decay: of the exponential smoothing over windows.
    """
    n = state.microbatches.astype(state.squares.dtype)
    enough = jnp.logical_and(released, state.microbatches > 1)
    q = state.squares / jnp.where(enough, total_weight, 1)
    others = jnp.where(enough, n - 1, 1)
    new = state._replace(
        gradient=_smooth(state.gradient, (n * mean_square - q) / others, decay),
        trace=_smooth(state.trace, (q - mean_square) * n / others, decay),
        share=_smooth(state.share, 1, decay),
    )
    return jax.tree.map(lambda x, y: jnp.where(enough, x, y), new, state)


def _smooth(old: Any, new: Any, decay: float) -> Any:
    return decay * old + (1 - decay) * new


def estimate(state: NoiseState) -> NoiseScale:
    """The debiased estimates and their ratio."""
    share = jnp.where(state.share == 0, jnp.nan, state.share)
    gradient, trace = state.gradient / share, state.trace / share
    return NoiseScale(trace / gradient, gradient, trace)

"""Run a function at a release, in the buffers of what it replaces, or not at all."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import lax
from jax.core import Tracer

from optax_accum._tree import is_array, like, put
from optax_accum._varying import axes_of, vary

Tree = TypeVar("Tree")


def run_if(
    pred: jax.Array | bool, fn: Callable[[Tree], Tree], old: Tree, *, entwined: bool
) -> Tree:
    """`fn(old)` where `pred`, else `old`: same structure, shapes and dtypes.

    Args:
      pred: boolean scalar.
      fn: gets a tree like `old`, returns another; its arrays are cast to the dtypes of
        `old`, and where it returns `None`, `old` stays.
      old: any pytree. What is not an array in it stays as it is.
      entwined: may a large array of what `fn` returns depend on one of `old` in whose
        place another is returned?

    Raises:
      TypeError: `fn` returns another structure, or arrays that do not fit in place.
    """
    if not isinstance(pred, Tracer):
        return like(fn(old), old, _WHAT) if pred else old

    leaves, treedef = jax.tree.flatten(old)
    slots = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def merge(arrays):
        return treedef.unflatten(put(leaves, slots, arrays))

    def replaced(arrays):
        old = merge(arrays)
        new = treedef.flatten_up_to(like(fn(old), old, _WHAT))
        return [new[i] for i in slots]

    arrays = [leaves[i] for i in slots]
    branches: tuple[Any, Any] = (replaced, lambda arrays: arrays)
    if jax.sharding.get_abstract_mesh().manual_axes:
        branches = _vary_alike(*branches, arrays)

    run, keep = branches
    if not entwined:
        return merge(lax.cond(pred, run, keep, arrays))

    # Why two conditionals: where two results read one input (Lion's update and its
    # momentum), XLA must copy one of them, and it puts these copies in front of the
    # conditional, into every micro-step. In front of the inner one, they are made
    # only at a release.

    def run_inside(arrays):
        return lax.cond(pred, run, keep, arrays)

    return merge(lax.cond(pred, run_inside, keep, arrays))


_WHAT = "The state of what follows the accumulation"


def _vary_alike(run, keep, arrays):
    """`run` and `keep` with results that vary over the same axes of a `shard_map`."""
    axes, run = [], jax.jit(run, inline=True)  # Python is to run once for the two

    def note_axes(arrays):
        new = run(arrays)
        axes.extend(axes_of(x) | axes_of(y) for x, y in zip(arrays, new, strict=True))
        return new

    jax.eval_shape(note_axes, arrays)

    def varying(branch):
        return lambda xs: list(map(vary, branch(xs), axes))

    return varying(run), varying(keep)

"""What else is in an array's type: its layout, and the axes over which it varies."""

from typing import Any

import jax
from jax import lax


def axes_of(x: Any) -> frozenset:
    """The axes over which an array, or what `jax.typeof` says of one, varies."""
    aval = x if hasattr(x, "manual_axis_type") else jax.typeof(x)
    return frozenset(aval.manual_axis_type.varying)


def vary(x: Any, axes: frozenset) -> Any:
    """The same array, taken as one that varies over these axes too."""
    missing = tuple(axes - axes_of(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def zeros_of(aval: Any, dtype: Any = None) -> jax.Array:
    """Zeros of a type as `jax.typeof` gives it, with its layout and varying axes."""
    zeros = lax.full(aval.shape, 0, dtype or aval.dtype, sharding=aval.sharding)
    return vary(zeros, axes_of(aval))


def vary_as_carry(step: Any, carry: Any, xs: Any) -> Any:
    """The first carry of a scan, varying over the axes over which the next ones do."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    before, axes = None, []

    def note_axes(carry, xs):
        carry, _ = step(carry, jax.tree.map(lambda x: x[0], xs))
        axes[:] = map(axes_of, jax.tree.leaves(carry))

    while axes != before:  # what varies may make more vary in the step after
        before = axes.copy()
        jax.eval_shape(note_axes, carry, xs)
        leaves, treedef = jax.tree.flatten(carry)
        carry = treedef.unflatten(map(vary, leaves, axes))
    return carry

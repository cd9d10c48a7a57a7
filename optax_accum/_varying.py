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


def vary_as_carry(step: Any, carry: Any, x: Any) -> Any:
    """The first carry of a scan, varying over the axes over which the next one does."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return carry
    axes = []

    def note_axes(carry, x):
        carry, _ = step(carry, x)
        axes.extend(map(axes_of, jax.tree.leaves(carry)))

    jax.eval_shape(note_axes, carry, x)
    leaves, treedef = jax.tree.flatten(carry)
    return treedef.unflatten(map(vary, leaves, axes))

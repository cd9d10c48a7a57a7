"""The arithmetic of a weighted mean that is added up one term at a time.

The sum is kept plain and divided once, at the end: a sum of integers is then exact to
the bit, and their mean is rounded once.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike


def sum_dtype(dtype: DTypeLike, given: DTypeLike | None = None) -> jnp.dtype:
    """The dtype in which to add up numbers of `dtype`.

    At least float32, or the floating dtype `given`. Complex numbers stay complex; all
    others (integers, float8) are added up as floats.
    """
    if given is not None:
        given = jax.dtypes.canonicalize_dtype(given)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        double = jnp.float64 in (given, jnp.finfo(dtype).dtype)
        return jnp.dtype(jnp.complex128 if double else jnp.complex64)
    if given is not None:
        return given
    wide = dtype in (jnp.float64, jnp.int64, jnp.uint64)
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def add(
    acc: jax.Array,
    x: ArrayLike,
    weight: ArrayLike | None = None,
    *,
    empty: jax.Array | bool = False,
    counted: jax.Array | bool = True,
    divisor: ArrayLike | None = None,
) -> jax.Array:
    """`(acc + weight * x) / divisor`, in the dtype of `acc`.

    Args:
      acc: the sum so far.
      x: the term to add, of the shape of `acc`.
      weight: real scalar of at least 0, 1 if `None`.
      empty: overwrite `acc` in place of adding to it. Nothing then has to zero an
        accumulator before it is used again, and no NaN in it survives.
      counted: `x` is a term of the sum; else it counts as 0, also where it is NaN, and
        so must `weight`.
      divisor: positive scalar, 1 if `None`. It belongs into this pass over memory:
        XLA would not fuse it into the several readers that an optimizer is.
    """
    x = jnp.asarray(x)
    dtype = jnp.promote_types(sum_dtype(acc.dtype), sum_dtype(x.dtype))
    old, new = acc.astype(dtype), x.astype(dtype)
    if counted is not True:  # before the weight, whose derivative is then 0 too
        new = jnp.where(counted, new, 0)
    if weight is not None:
        new = _by_parts(jnp.multiply, new, weight)
    if empty is False:
        new = old + new
    elif empty is not True:
        new = jnp.where(empty, new, old + new)
    if divisor is not None:
        new = divide(new, divisor)
    return new.astype(acc.dtype)


def divide(x: jax.Array, scalar: ArrayLike) -> jax.Array:
    """`x / scalar` for a real scalar that is not negative, rounded once."""
    return _by_parts(_divide, x, scalar)


def _divide(x: jax.Array, scalar: jax.Array) -> jax.Array:
    """`x / scalar`, as it is written.

    XLA makes `x * (1 / scalar)` of a plain division by a broadcast scalar, and that
    rounds twice. By a divisor that depends on the element, if only in form, it divides.
    """
    return x / jnp.where(x < 0, jnp.abs(scalar), scalar)


def _by_parts(op: Callable, x: jax.Array, scalar: ArrayLike) -> jax.Array:
    """`op(x, scalar)`; complex arithmetic would round, and mix NaN into both parts."""
    scalar = jnp.asarray(scalar).astype(jnp.finfo(x.dtype).dtype)
    if jnp.iscomplexobj(x):
        return lax.complex(op(x.real, scalar), op(x.imag, scalar))
    return op(x, scalar)

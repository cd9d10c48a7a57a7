"""Checks of what users pass in: which argument, what it was, what to do."""

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

Every = int | Callable[[jax.Array], ArrayLike] | None


def check_every(every: Any, name: str = "every") -> Every:
    """An int of at least 1, a function or `None`."""
    if every is None or callable(every):
        return cast(Every, every)
    expected = (
        f"{name} must be an int of at least 1, a schedule (a function from"
        f" gradient_step to such an int) or None, got {every!r}"
    )
    if isinstance(every, Tracer):
        raise TypeError(
            f"{expected}, which is traced. The length of a window must be known while"
            " tracing; where it has to vary, give a schedule. Under"
            f" optax.inject_hyperparams, list {name!r} in static_args."
        )
    if isinstance(every, bool | np.bool_):
        raise TypeError(f"{expected}.")
    try:
        value = operator.index(every)
    except TypeError:
        raise TypeError(f"{expected} of type {type(every).__name__}.") from None
    if value < 1:
        raise ValueError(f"{expected}.")
    return value


def check_length(length: ArrayLike) -> jax.Array:
    """What a schedule returned, as an int32 scalar of at least 1."""
    expected = "every(gradient_step) must be a scalar number of at least 1"
    checked = _check_real_scalar(length, expected)
    if not isinstance(length, Tracer) and not np.asarray(length) >= 1:
        raise ValueError(f"{expected}, got {length}.")
    return jnp.maximum(jnp.ceil(checked), 1).astype(jnp.int32)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    if value not in choices:
        wanted = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def check_dtype(dtype: DTypeLike | None, name: str = "dtype") -> jnp.dtype | None:
    """A real floating dtype; of a complex one, the dtype of its parts."""
    if dtype is None:
        return None
    try:
        dtype = jnp.dtype(dtype)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name} must be a floating dtype such as jnp.float32, or None, got"
            f" {dtype!r}."
        )
    return jnp.dtype(jnp.finfo(dtype).dtype)


def check_skip(skip: Any, on_skip: str) -> None:
    if skip is not None and not callable(skip):
        raise TypeError(
            "skip must be a function like optax.skip_not_finite, or None, got"
            f" {skip!r}."
        )
    if skip is None and on_skip != "wait":
        raise ValueError(f"on_skip={on_skip!r} does nothing without skip; give both.")


def check_should_skip(should_skip: Any) -> None:
    if jnp.shape(should_skip) != () or not jnp.issubdtype(
        jnp.result_type(should_skip), jnp.bool_
    ):
        raise TypeError(
            "skip must return a boolean scalar, and a state to keep, got"
            f" {should_skip!r} for the first."
        )


def check_average_args(names: Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "average_args must be a tuple of argument names such as ('value',), got"
            f" {names!r}."
        )
    for name in ("weight", "release"):
        if name in names:
            raise ValueError(
                f"average_args must not name {name!r}, which the accumulation reads"
                " itself."
            )
    if len(set(names)) < len(names):
        raise ValueError(f"average_args names an argument twice: {names!r}.")
    return tuple(names)


def check_weight(weight: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """A real scalar of at least 0 as `dtype`.

    One below 0 is an error where it can be seen without waiting for a device, and NaN
    elsewhere, which shows in the updates of its window.
    """
    expected = (
        "weight must be a real scalar, 0 or more (such as the microbatch's number of"
        " examples or tokens)"
    )
    on_host = isinstance(weight, int | float | np.generic | np.ndarray)
    if on_host and np.any(np.asarray(weight) < 0):
        raise ValueError(f"{expected}, got {weight!r}.")
    checked = _check_real_scalar(weight, expected).astype(dtype)
    return jnp.where(checked < 0, jnp.nan, checked)


def check_release(release: ArrayLike) -> jax.Array | bool:
    """A boolean scalar; a Python one stays so, for tracing to see."""
    if isinstance(release, bool | np.bool_):
        return bool(release)
    release = _check_scalar(release, expected := "release must be a boolean scalar")
    if release.dtype != bool:
        raise TypeError(f"{expected}, got {jax.typeof(release)}.")
    return release


def check_average_arg(name: str, extra_args: dict[str, Any]) -> jax.Array:
    if name not in extra_args:
        raise TypeError(
            f"average_args names {name!r}, so each update must be given {name}=, a"
            f" scalar; it got {sorted(extra_args) or 'no extra arguments'}."
        )
    return _check_real_scalar(
        extra_args[name], f"{name}, named in average_args, must be a real scalar"
    )


def _check_real_scalar(x: Any, expected: str) -> jax.Array:
    x = _check_scalar(x, expected)
    real = jnp.issubdtype(x.dtype, jnp.number) and not jnp.iscomplexobj(x)
    if not real:
        raise TypeError(f"{expected}, got {jax.typeof(x)}.")
    return x


def _check_scalar(x: Any, expected: str) -> jax.Array:
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):  # what jnp raises for strings, for None
        raise TypeError(f"{expected}, got {x!r}.") from None
    if x.shape != ():
        raise ValueError(f"{expected}, got {jax.typeof(x)}.")
    return x

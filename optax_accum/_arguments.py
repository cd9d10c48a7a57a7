"""Checks of what users pass in: which argument, what it was, what to do."""

import difflib
import operator
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from optax_accum._noise import NoiseScale, NoiseState
from optax_accum._roles import Argument
from optax_accum._split import Split
from optax_accum._tree import differentiable, is_array, shorten

LARGEST = 2**31 - 1
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
    if not 1 <= value <= LARGEST:
        raise ValueError(f"{expected}. The largest is {LARGEST}.")
    return value


def check_length(length: ArrayLike) -> jax.Array:
    """What a schedule returned, as an int32 scalar of at least 1."""
    expected = "every(gradient_step) must be a scalar number of at least 1"
    checked = _check_real_scalar(length, expected)
    if not isinstance(length, Tracer) and not np.asarray(length) >= 1:
        raise ValueError(f"{expected}, got {length}.")
    if jnp.issubdtype(checked.dtype, jnp.inexact):
        # Up, but not by the last digit, in which jitted and eager schedules differ.
        checked = jnp.ceil(checked - jnp.minimum(1e-6 * checked, 0.5))
    elif jnp.iinfo(checked.dtype).max > LARGEST:
        checked = jnp.minimum(checked, LARGEST)
    return jnp.maximum(checked, 1).astype(jnp.int32)


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    if value not in choices:
        wanted = " or ".join(map(repr, choices))
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def check_dtype(dtype: DTypeLike | None, name: str = "dtype") -> jnp.dtype | None:
    """A real floating dtype; of a complex one, the dtype of its parts."""
    if dtype is None:
        return None
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.inexact):
        raise TypeError(
            f"{name} must be a floating dtype such as jnp.float32, or None, got"
            f" {dtype!r}."
        )
    return jnp.dtype(jnp.finfo(known).dtype)


def check_skip(skip: Any, on_skip: str) -> None:
    if skip is not None and not callable(skip):
        raise TypeError(
            "skip must be a function like optax.skip_not_finite, or None, got"
            f" {skip!r}."
        )
    if skip is None and on_skip != "wait":
        raise ValueError(f"on_skip={on_skip!r} does nothing without skip; give both.")


def check_decay(name: str, decay: Any) -> None:
    if isinstance(decay, bool) or not isinstance(decay, int | float):
        raise TypeError(f"{name} must be a number from 0 up to 1, got {decay!r}.")
    if not 0 <= decay < 1:
        raise ValueError(f"{name} must be a number from 0 up to 1, got {decay}.")


def check_axes(axes: Any) -> tuple[str, ...]:
    """The names of mesh axes, as a tuple."""
    names = (axes,) if isinstance(axes, str) else axes
    listed = isinstance(names, Sequence) and all(isinstance(x, str) for x in names)
    if not listed or len(set(names)) < len(names):
        raise TypeError(
            "reduce_axes must be the name of a mesh axis, or a tuple of different ones,"
            f" got {axes!r}."
        )
    return tuple(names)


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

    One below 0 or not finite is an error where it can be seen without waiting for a
    device. Elsewhere it is NaN, or makes NaN, in the updates of its window.
    """
    expected = (
        "weight must be a finite real scalar, 0 or more (such as the microbatch's"
        " number of examples or tokens)"
    )
    on_host = isinstance(weight, int | float | np.generic | np.ndarray)
    large = isinstance(weight, int) and abs(weight) > LARGEST
    if on_host and (large or np.asarray(weight).dtype.kind in "iuf"):
        kind = jax.dtypes.canonicalize_dtype(dtype)
        try:
            with np.errstate(over="ignore"):
                number = np.asarray(weight).astype(kind)
        except OverflowError:
            number = np.asarray(np.inf)
        lost = (number < jnp.finfo(kind).tiny) & (np.asarray(weight) > 0)
        if not np.all(np.isfinite(number) & (number >= 0) & ~lost):
            raise ValueError(
                f"{expected}, got {shorten(repr(weight))}, as {kind} {number}."
            )
    checked = _check_real_scalar(weight, expected).astype(dtype)
    return jnp.where(checked < 0, jnp.nan, checked)


def check_release(release: ArrayLike) -> jax.Array | bool:
    """A boolean scalar; a Python one stays so, for tracing to see."""
    if isinstance(release, bool | np.bool_):
        return bool(release)
    checked = _check_scalar(release, expected := "release must be a boolean scalar")
    if checked.dtype != bool:
        got = release if isinstance(release, int | float) else jax.typeof(checked)
        raise TypeError(f"{expected}, got {got}.")
    return checked


def check_noise(noise: Any, track_noise: bool) -> NoiseState | None:
    """What `value_and_grad` said of the noise, if this is it.

    Without `track_noise` an extra argument of this name may be for another transform.
    """
    if not track_noise and isinstance(noise, NoiseState | NoiseScale):
        raise TypeError("noise is given, so give accumulate track_noise=True.")
    if track_noise and noise is not None and not isinstance(noise, NoiseState):
        raise TypeError(
            "noise must be the third of what value_and_grad(..., track_noise=True)"
            f" returned, got {type(noise).__name__}."
        )
    return noise if track_noise else None


def warn_of_typos(extra_args: Collection[str]) -> None:
    """Optax ignores extra arguments that nobody knows; a lost weight is a wrong mean.

    Only a warning, since a transform of the user's may know it.
    """
    for name in extra_args:
        for known in difflib.get_close_matches(name, ("weight", "release"), 1, 0.8):
            warnings.warn(
                f"The accumulation ignores the extra argument {name!r}; did you mean"
                f" {known!r}?",
                stacklevel=2,
            )


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
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    if isinstance(x, int | np.integer) and not -LARGEST <= x <= LARGEST:
        x = float(x)  # JAX would wrap it around
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError):  # what jnp raises for strings, for None
        raise TypeError(f"{expected}, got {x!r}.") from None
    if x.shape != ():
        raise ValueError(f"{expected}, got {jax.typeof(x)}.")
    return x


def check_function(name: str, fun: Any) -> None:
    if not callable(fun):
        raise TypeError(f"{name} must be a function, got {fun!r}.")


def check_argnums(name: str, argnums: Any) -> tuple[int, ...]:
    """The numbers of positional arguments, as a tuple."""
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    try:
        return tuple(map(operator.index, argnums if several else [argnums]))
    except TypeError:
        raise TypeError(
            f"{name} must be an int or a tuple of ints, got {argnums!r}."
        ) from None


def check_trained(argnums: Any) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """The numbers in `argnums`, and the filter of each that is an `nnx.DiffState`."""
    several = isinstance(argnums, Sequence) and not isinstance(argnums, str)
    each = tuple(argnums) if several else (argnums,)
    filters = tuple(getattr(x, "filter", None) for x in each)
    plain = [getattr(x, "argnum", x) for x in each]
    return check_argnums("argnums", plain if several else plain[0]), filters


def check_count(name: str, x: Any) -> int:
    """An int of at least 1."""
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(f"{name} must be an int of at least 1, got {x!r}.")
    if x < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {x}.")
    return operator.index(x)


def check_microbatches(
    microbatch_size: Any, num_microbatches: Any
) -> tuple[int | None, int | None]:
    """Exactly one of the two, an int of at least 1."""
    given = {
        "microbatch_size": microbatch_size,
        "num_microbatches": num_microbatches,
    }
    given = {name: x for name, x in given.items() if x is not None}
    if len(given) != 1:
        raise ValueError(
            "Give either microbatch_size or num_microbatches, got"
            f" {'both' if given else 'neither'}."
        )
    ((name, x),) = given.items()
    x = check_count(name, x)
    return (x, None) if name == "microbatch_size" else (None, x)


def check_batch(batch: dict[Argument, Any]) -> None:
    """That a batch is made of arrays that agree on the number of examples."""
    sizes: dict[int, list[str]] = {}
    for i, tree in batch.items():
        for path, x in jax.tree.leaves_with_path(tree):
            name = f"argument {i}{jax.tree_util.keystr(path)}"
            if not is_array(x):
                raise TypeError(
                    f"The batch must be made of arrays, but {name} is {x!r}."
                )
            if jnp.ndim(x) == 0:
                raise ValueError(
                    "Each array of the batch needs the examples along its leading"
                    f" axis, but {name} is a scalar. Are batch_argnums right, and is"
                    " it an array (of a list, each item is one)?"
                )
            sizes.setdefault(jnp.shape(x)[0], []).append(name)
    if not sizes or 0 in sizes:
        raise ValueError(
            f"There are no examples in the batch, arguments {', '.join(batch)} by"
            " batch_argnums."
        )
    if len(sizes) > 1:
        found = ", ".join(f"{size} in {names[0]}" for size, names in sizes.items())
        raise ValueError(
            "The arrays of the batch must have as many examples each, along their"
            f" leading axes, got {found}."
        )


def check_layout(batch: dict[Argument, Any], split: Split) -> None:
    """On an explicit mesh, that each device keeps its own examples."""
    if split.microbatches == 1:
        return
    for i, x in ((i, x) for i, tree in batch.items() for x in jax.tree.leaves(tree)):
        sharding = jax.typeof(x).sharding
        axes = sharding.spec[0] if sharding.spec else None
        parts = 1
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            parts *= sharding.mesh.shape[axis]
        if split.blocks % parts:
            sizes = [split.size, *([split.rest] if split.rest else [])]
            raise ValueError(
                f"The batch, argument {i}, is sharded {parts} ways over {axes!r}, so"
                f" each microbatch must have a multiple of {parts} examples, got"
                f" microbatches of {' and '.join(map(str, sizes))}. Choose another"
                " microbatch_size, or lay the batch out with jax.sharding.reshard."
            )


def check_differentiable(params: dict[Argument, Any]) -> None:
    """That there is something to differentiate, and that JAX can."""
    for i, tree in params.items():
        leaves = jax.tree.leaves_with_path(tree)
        chosen = differentiable(tree)
        arrays = [(path, x) for path, x in leaves if chosen(x)]
        if leaves and not arrays:
            raise TypeError(
                f"argnums has {i}, but there are no arrays in argument {i} to"
                f" differentiate, which is {jax.tree.structure(tree)}."
            )
        for path, x in arrays:
            if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                raise TypeError(
                    f"argnums has {i}, but argument {i}{jax.tree_util.keystr(path)} is"
                    f" {jax.typeof(x)}; only floats can be differentiated. Pass it in"
                    " another argument."
                )


def check_out(out: Any) -> Any:
    return _check_pair(
        out,
        "With has_aux=True, fun must return a pair of its value and the auxiliary"
        " output; it",
    )


def check_aux_of_carry(out: Any) -> Any:
    return _check_pair(
        out,
        "With carry_argnums, fun must return (value, (carry, aux)), where an empty aux"
        " is (); for the inner pair it",
    )


def check_verdict(out: Any) -> Any:
    return _check_pair(
        out,
        "skip must return a pair (should_skip, skip_state), like optax.skip_not_finite,"
        " where an empty state is (); it",
    )


def _check_pair(out: Any, expected: str) -> Any:
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise TypeError(f"{expected} returned {_describe(out)}.")
    return out


def check_arrays(what: str, out: Any) -> None:
    for path, x in jax.tree.leaves_with_path(out):
        if not is_array(x):
            raise TypeError(
                f"{what} must return arrays, got {x!r} at"
                f" {jax.tree_util.keystr(path) or 'the root'}."
            )


def check_carry(new: Any, count: int) -> None:
    if not isinstance(new, tuple | list) or len(new) != count:
        raise TypeError(
            "fun must return a tuple of what it carries on, one for each of"
            f" carry_argnums, so {count}; got {jax.tree.structure(new)}."
        )


def check_loss(value: Any) -> Any:
    """A scalar; of its dtype `jax.value_and_grad` makes sure."""
    if not is_array(value):
        raise TypeError(
            f"fun must return a scalar loss, got {_describe(value)}. If it returns an"
            " auxiliary output too, say has_aux=True."
        )
    if jnp.shape(value) != ():
        raise ValueError(
            f"fun must return a scalar loss, got {jax.typeof(value)}; for example the"
            " mean over its batch."
        )
    return value


def _describe(out: Any) -> str:
    if is_array(out):
        return str(jax.typeof(out))
    if isinstance(out, tuple | list):
        return f"a {type(out).__name__} of {len(out)}"
    return f"a {type(out).__name__}"

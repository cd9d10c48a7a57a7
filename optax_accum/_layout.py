"""Accumulators that are spread over a mesh: each device holds a part of them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_accum._partial import (
    entry,
    explicit_axes,
    find_mesh,
    kinds_of,
    names_in,
)
from optax_accum._tree import is_array, is_none


class Layout:
    """Where the parts of arrays go that are shaped like the parameters."""

    def __init__(self, sharding: Any):
        """Takes names of mesh axes, or a prefix of the tree with a spec for each."""
        self._names, self._prefix = _names(sharding), sharding

    def put(self, tree: Any) -> Any:
        """The tree with its arrays so laid out; those that are partial are reduced."""
        return self._map(_put, tree)

    def zeros(self, tree: Any, dtype_fn: Callable[[Any], Any]) -> Any:
        """Zeros for the arrays of a tree, made where they belong; `None` for others."""

        def zeros(x, spec):
            if self._names is not None:
                _check_not_laid_out(x, spec, self._prefix)
            shape, dtype = jnp.shape(x), dtype_fn(jnp.result_type(x))
            return jax.jit(lambda: _put(jnp.zeros(shape, dtype), spec))()

        arrays = jax.tree.map(lambda x: x if is_array(x) else None, tree)
        return self._map(zeros, arrays)

    def total(self, rows: Any, grads: Any) -> Any:
        """The sums over the devices of what has a row for each, for these gradients."""
        return self._map(_scatter_rows, grads, rows)

    def back(self, updates: Any, grads: Any) -> Any:
        """Updates as the gradients were laid out, from which they come."""
        return self._map(_back, grads, updates)

    def _map(self, fun: Callable[..., Any], tree: Any, *others: Any) -> Any:
        """`fun(x, spec, ...)` of each array."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=is_none)
        rest = [treedef.flatten_up_to(other) for other in others]
        specs = self._specs(tree, leaves)
        return treedef.unflatten(
            fun(x, spec, *more) if is_array(x) else x
            for x, spec, *more in zip(leaves, specs, *rest, strict=True)
        )

    def _specs(self, tree: Any, leaves: list[Any]) -> list[P]:
        if self._names is not None:
            return [_first_that_fits(x, self._names) for x in leaves]
        try:
            specs = jax.tree.map(
                lambda spec, part: jax.tree.map(
                    lambda _: _spec(spec), part, is_leaf=is_none
                ),
                self._prefix,
                tree,
                is_leaf=_is_spec,
            )
        except ValueError as error:
            raise ValueError(
                "sharding must be a pytree prefix of the parameters, with a"
                f" PartitionSpec or NamedSharding for each, but: {error}"
            ) from None
        return jax.tree.leaves(specs, is_leaf=_is_spec)


def _names(sharding: Any) -> tuple[str, ...] | None:
    names = (sharding,) if isinstance(sharding, str) else sharding
    plain = isinstance(names, tuple) and not _is_spec(names)
    if plain and names and all(isinstance(name, str) for name in names):
        return names
    for x in jax.tree.leaves(sharding, is_leaf=_is_spec) or [sharding]:
        if not _is_spec(x):
            raise TypeError(
                "sharding must be the name of a mesh axis, or several, or a pytree"
                " prefix of the parameters with a PartitionSpec or NamedSharding for"
                f" each, got {x!r}."
            )
    return None


def _is_spec(x: Any) -> bool:
    return isinstance(x, P | NamedSharding)


def _spec(x: Any) -> P:
    return x.spec if isinstance(x, NamedSharding) else x


def _first_that_fits(x: Any, names: tuple[str, ...]) -> P:
    """Along the first dimension that can be divided, and is not yet."""
    if not is_array(x):
        return P()
    mesh = find_mesh(names, x, "sharding")
    count = math.prod(mesh.shape[axis] for axis in names)
    spec: list[Any] = _own(x)
    taken = {axis for axes in spec for axis in names_in(axes)}
    for i, size in enumerate(jnp.shape(x)):
        free = spec[i] is None and not taken & {*names}
        if free and math.prod(jnp.shape(x)) and size % count == 0:
            spec[i] = entry(names)
            break
    # As JAX writes what a step returns, or it would compile twice.
    automatic = kinds_of(mesh)[names[0]] == AxisType.Auto
    while automatic and spec and spec[-1] is None:
        spec.pop()
    return P(*spec)


def _check_not_laid_out(x: Any, spec: P, sharding: Any) -> None:
    """That names do not overrule how a parameter is spread over automatic axes.

    Types do not tell of that, so that a step cannot see it; but `init` gets arrays.
    """
    layout = getattr(x, "sharding", None)
    if isinstance(x, Tracer) or not isinstance(layout, NamedSharding):
        return
    full = [*spec.partitions] + [None] * len(layout.spec)
    for own, new in zip(layout.spec.partitions, full, strict=False):
        if own is not None and names_in(own) != names_in(new):
            raise ValueError(
                f"sharding={sharding!r}, names, is for parameters that are replicated,"
                f" but there is one {jax.typeof(x)} laid out as {layout.spec} over"
                " automatic axes, of which a step is not told. Give sharding a"
                " PartitionSpec for each parameter, or make the mesh explicit."
            )


def _own(x: Any) -> list[Any]:
    """The explicit layout of an array, for each of its dimensions."""
    own = jax.typeof(x).sharding
    spec = [] if own.mesh.empty else [*own.spec.partitions]
    return spec + [None] * (jnp.ndim(x) - len(spec))


def _put(x: Any, spec: P) -> jax.Array:
    names = tuple(axis for axes in spec.partitions for axis in names_in(axes))
    if not names:
        return _reshard(x, spec) if explicit_axes(x) else x
    kinds = {kinds_of(find_mesh(names, x, "sharding"))[axis] for axis in names}
    if AxisType.Manual in kinds:
        raise ValueError(
            f"sharding has {names!r}, which are manual in this shard_map. There, leave"
            " sharding out and scatter the gradients by jax.lax.psum_scatter: the"
            " accumulator is as large as what comes."
        )
    if AxisType.Auto in kinds and explicit_axes(x):
        raise ValueError(
            f"sharding has {names!r}, which are not all explicit as other axes of this"
            " mesh are. Make them all explicit, or all automatic."
        )
    if not isinstance(x, Tracer) and not jax.typeof(x).sharding.spec.unreduced:
        return jax.device_put(x, spec)  # also what is not on the mesh yet
    if kinds == {AxisType.Auto}:
        return lax.with_sharding_constraint(x, spec)
    return _reshard(x, spec)


def _reshard(x: Any, spec: P) -> jax.Array:
    sharding = jax.typeof(x).sharding
    axes = sharding.spec.unreduced
    i = _dimension(spec, _own(x), axes) if axes else None
    if i is None:
        mesh = sharding.mesh if axes else find_mesh((), x)
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    # Said in so many words: for the same by `reshard` XLA reduces everything on every
    # device first, if it has no pass that finds out.
    return jax.shard_map(
        lambda x: lax.psum_scatter(x, spec[i], scatter_dimension=i, tiled=True),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=spec,
        axis_names=explicit_axes(x),
    )(x)


def _dimension(spec: P, own: list[Any], axes: Any) -> int | None:
    """Along which `spec` has these axes in addition to an array's own layout."""
    full = [*spec.partitions] + [None] * (len(own) - len(spec.partitions))
    differ = [i for i, x in enumerate(full) if names_in(x) != names_in(own[i])]
    if len(differ) != 1 or own[differ[0]] or {*names_in(full[differ[0]])} != {*axes}:
        return None
    return differ[0]


def _scatter_rows(grad: Any, spec: P, rows: jax.Array) -> jax.Array:
    sharding = jax.typeof(rows).sharding
    axes, *own = sharding.spec.partitions
    i = _dimension(spec, own, names_in(axes))
    if i is None:
        return jax.sharding.reshard(jnp.sum(rows, axis=0), spec)
    return jax.shard_map(
        lambda x: lax.psum_scatter(x[0], axes, scatter_dimension=i, tiled=True),
        mesh=sharding.mesh,
        in_specs=sharding.spec,
        out_specs=spec,
        axis_names=explicit_axes(rows),
    )(rows)


def _back(grad: Any, spec: P, update: Any) -> Any:
    if not is_array(update):
        return update
    if explicit_axes(grad):
        return jax.sharding.reshard(update, P(*_own(grad)))
    # The layout of the parameters is not known here, but not that of their updates.
    free = [P.UNCONSTRAINED if axes is None else None for axes in spec.partitions]
    free += [P.UNCONSTRAINED] * (jnp.ndim(update) - len(free))
    return lax.with_sharding_constraint(update, P(*free))

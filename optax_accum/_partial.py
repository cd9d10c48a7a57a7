"""Gradients that are partial over mesh axes: added up over the devices at a release.

What differs from device to device has a leading axis in the state, with a row for each
device, laid out over them. An array of a type that says `unreduced` could be added to
as well, but neither be saved nor looked at.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_accum._tree import is_array
from optax_accum._varying import axes_of, vary


class Whole:
    """The gradients are whole, and nothing has to be done."""

    axes: tuple[str, ...] = ()

    def check_params(self, params: Any) -> None:
        """That they are the same on all devices over which gradients are partial.

        Raises:
          ValueError: one of them is not, as far as its type tells.
        """
        for path, x in jax.tree.leaves_with_path(params):
            if is_array(x) and (found := sorted(_differs_over(x) & {*self.axes})):
                raise ValueError(
                    f"The parameter at {_name(path)} is {jax.typeof(x)}, sharded over"
                    f" {found} (or deferred before), so its gradient cannot be partial"
                    " over them. Only what is replicated over reduce_axes can have its"
                    " reduction deferred."
                )

    def zeros(self, x: Any, dtype: Any) -> jax.Array:
        """The first accumulator of a parameter."""
        return jnp.zeros_like(x, dtype=dtype)

    def zero(self, dtype: Any = float) -> jax.Array:
        """The first of a scalar of the state that adds up what comes with gradients."""
        return jnp.zeros([], dtype)

    def zero_of_own(self, dtype: Any = float) -> jax.Array:
        """The first of one that adds up what is computed from each device's part."""
        return self.zero(dtype)

    def defer(self, x: jax.Array) -> jax.Array:
        """A parameter by which the gradients are partial."""
        return x

    def key(self, key: jax.Array) -> jax.Array:
        """A random key, of which each device needs one of its own."""
        return key

    def check_loss(self, value: jax.Array) -> None:
        """That a loss is of what each device has."""

    def check_scatters(self) -> None:
        """That the sum over the devices can be spread over them."""

    def check_state(self, window_weight: jax.Array) -> None:
        """That a state was made for steps like this one."""

    def microbatch_size(self, size: int) -> int:
        """How many examples here are a microbatch of that size."""
        return size

    def parts(self, updates: optax.Updates) -> optax.Updates:
        """The gradients in the form in which they are added up."""
        return updates

    def squares(self, square: Any, grads: Any) -> jax.Array:
        """The squared norm of each part's gradients."""
        return square(grads)

    def mine(self, tree: Any) -> Any:
        """What of the state to compute with."""
        return tree

    def row(self, tree: Any) -> Any:
        """That again, to go into the state."""
        return tree

    def most(self, tree: Any) -> Any:
        """The largest over the devices, for them to agree."""
        return tree

    def totals(self, closed: Any, scalars: Any) -> Any:
        """The sums over the devices where `closed`; any number elsewhere."""
        del closed
        return scalars

    def total(self, acc: jax.Array) -> jax.Array:
        """The sum of an accumulator over the devices. Once a window, it costs."""
        return acc


class Row(Whole):
    """In a `shard_map`, each device has its part, and in the state its row."""

    def __init__(self, axes: tuple[str, ...]):
        self.axes = axes
        # None of them with `check_vma=False`, where types do not tell.
        self._told = axes_of(lax.axis_index(axes))

    def zeros(self, x: Any, dtype: Any) -> jax.Array:
        return self.row(jnp.zeros_like(x, dtype=dtype))

    def zero(self, dtype: Any = float) -> jax.Array:
        return self.row(jnp.zeros([], dtype))

    def defer(self, x: jax.Array) -> jax.Array:
        return vary(x, self._told)

    def key(self, key: jax.Array) -> jax.Array:
        return jax.random.fold_in(key, lax.axis_index(self.axes))

    def check_scatters(self) -> None:
        raise ValueError(
            "In a shard_map accumulate takes no sharding beside reduce_axes: what"
            " follows it sees the whole parameters there. Leave one of them out, or"
            " make the mesh explicit."
        )

    def check_loss(self, value: jax.Array) -> None:
        if not self._told <= axes_of(value):
            raise ValueError(
                f"With reduce_axes={self.axes!r} fun must return the mean over what one"
                " device has, but it has reduced its loss over the devices itself."
            )

    def parts(self, updates: optax.Updates) -> optax.Updates:
        for path, g in jax.tree.leaves_with_path(updates):
            if is_array(g) and not self._told <= axes_of(g):
                raise ValueError(_whole_already(path, g, self.axes))
        return updates

    def mine(self, tree: Any) -> Any:
        for x in jax.tree.leaves(tree):
            if x.shape[:1] != (1,):
                raise ValueError(
                    f"In a shard_map, accumulate(reduce_axes={self.axes!r}) has for"
                    " what differs between the devices one row of the state on each,"
                    f" but got {jax.typeof(x)}. Give the shard_map the specs of"
                    " optax_accum.state_specs, and call init in it, or outside under"
                    " jax.set_mesh of a mesh with automatic axes."
                )
        return jax.tree.map(lambda x: x[0], tree)

    def row(self, tree: Any) -> Any:
        return jax.tree.map(lambda x: vary(x, self._told)[None], tree)

    def most(self, tree: Any) -> Any:
        def most(x):
            x = vary(jnp.asarray(x), self._told)
            if x.dtype == bool:
                return lax.pmax(x.astype(jnp.int32), self.axes).astype(bool)
            if jnp.iscomplexobj(x):
                return lax.complex(most(x.real), most(x.imag))
            return lax.pmax(x, self.axes)

        return jax.tree.map(most, tree)

    def totals(self, closed: Any, scalars: Any) -> Any:
        leaves, treedef = jax.tree.flatten(scalars)
        dtype = jnp.result_type(float, *leaves)
        # In one array, for one message.
        stacked = vary(jnp.stack([x.astype(dtype) for x in leaves]), self._told)
        if closed is True:
            stacked = self.total(stacked)
        else:
            others = axes_of(stacked) - self._told
            zeros = vary(jnp.zeros(stacked.shape, dtype), others)
            stacked = lax.cond(closed, self.total, lambda _: zeros, stacked)
        return treedef.unflatten(
            x.astype(leaf.dtype) for x, leaf in zip(stacked, leaves, strict=True)
        )

    def total(self, acc: jax.Array) -> jax.Array:
        return lax.psum(acc, self.axes)


class Rows(Whole):
    """On an explicit mesh all rows are at hand, each of them where it comes from."""

    def __init__(self, axes: tuple[str, ...], mesh: Any):
        self.axes, self._mesh = axes, mesh
        self._count = math.prod(mesh.shape[axis] for axis in axes)

    def zeros(self, x: Any, dtype: Any) -> jax.Array:
        return self._zeros(jnp.shape(x), dtype, jax.typeof(x).sharding.spec.partitions)

    def zero_of_own(self, dtype: Any = float) -> jax.Array:
        return self._zeros((), dtype, ())

    def defer(self, x: jax.Array) -> jax.Array:
        spec = jax.typeof(x).sharding.spec
        reduced = frozenset(self.axes) | spec.reduced
        spec = P(*spec.partitions, unreduced=spec.unreduced, reduced=reduced)
        return jax.sharding.reshard(x, NamedSharding(self._mesh, spec))

    def parts(self, updates: optax.Updates) -> optax.Updates:
        def rows(path, g):
            if not is_array(g):
                return g
            sharding = jax.typeof(g).sharding
            if not set(self.axes) <= sharding.spec.unreduced:
                raise ValueError(_whole_already(path, g, self.axes))
            if extra := sorted(sharding.spec.unreduced - set(self.axes)):
                raise ValueError(
                    f"The gradient at {_name(path)} is {jax.typeof(g)}, partial over"
                    f" {extra} too. Give accumulate those in reduce_axes."
                )
            # What is unreduced cannot be weighted, or searched for NaN. Here each
            # device only takes its part for what it is, and nothing is sent.
            return jax.shard_map(
                lambda x: x[None],
                mesh=sharding.mesh,
                in_specs=sharding.spec,
                out_specs=P(entry(self.axes), *sharding.spec.partitions),
                axis_names=explicit_axes(g),
                check_vma=False,
            )(g)

        return jax.tree.map_with_path(rows, updates)

    def check_state(self, window_weight: jax.Array) -> None:
        if window_weight.ndim:
            raise ValueError(
                "The state was made for steps in a shard_map. Outside of one, on a mesh"
                " with explicit axes, start from tx.init(params) under jax.set_mesh."
            )

    def squares(self, square: Any, grads: Any) -> jax.Array:
        # Each part is that of one device in a mean over all of them. Of the weight too
        # it has one part in so many.
        return jnp.square(self._count) * jax.vmap(square)(grads) / self._count

    def totals(self, closed: Any, scalars: Any) -> Any:
        def total(x):
            if x.ndim == 0:
                return x
            if closed is True:
                return self.total(x)
            return lax.cond(closed, self.total, lambda x: jnp.zeros([], x.dtype), x)

        return jax.tree.map(total, scalars)

    def total(self, acc: jax.Array) -> jax.Array:
        return jnp.sum(acc, axis=0, dtype=acc.dtype)

    def _zeros(self, shape: Any, dtype: Any, spec: Any) -> jax.Array:
        shape = (self._count, *shape)
        layout = NamedSharding(self._mesh, P(entry(self.axes), *spec))

        @jax.jit  # so that it is made where it belongs
        def zeros():
            return jnp.zeros(shape, dtype, out_sharding=layout)

        return zeros()


class RowsToShard(Rows):
    """On an automatic mesh the state is made with all rows, for `shard_map` to take."""

    def zero(self, dtype: Any = float) -> jax.Array:
        return self._zeros((), dtype, ())

    def zeros(self, x: Any, dtype: Any) -> jax.Array:
        layout = getattr(x, "sharding", None)
        spec = [P.UNCONSTRAINED] * jnp.ndim(x)
        if isinstance(layout, NamedSharding):
            spec = [*layout.spec, *[None] * (jnp.ndim(x) - len(layout.spec))]
        return self._zeros(jnp.shape(x), dtype, spec)

    def defer(self, x: jax.Array) -> jax.Array:
        raise self._too_late()

    def parts(self, updates: optax.Updates) -> optax.Updates:
        raise self._too_late()

    def _too_late(self) -> ValueError:
        return ValueError(
            f"With reduce_axes={self.axes!r} gradients have to come partial over"
            " these axes, but over automatic ones JAX reduces them before anyone sees"
            " them. Take the step into jax.shard_map; or use"
            " optax_accum.value_and_grad(..., reduce_axes=...) in place of accumulate;"
            " or make the axes of the mesh explicit."
        )

    def _zeros(self, shape: Any, dtype: Any, spec: Any) -> jax.Array:
        shape, spec = (self._count, *shape), P(entry(self.axes), *spec)

        @jax.jit
        def zeros():
            return lax.with_sharding_constraint(jnp.zeros(shape, dtype), spec)

        return zeros()


def partial_over(axes: tuple[str, ...], tree: Any) -> Whole:
    """How gradients are partial over these axes; `tree` is them or their parameters."""
    if not axes:
        return Whole()
    mesh = find_mesh(axes, tree)
    kinds = {kinds_of(mesh)[axis] for axis in axes}
    if kinds == {AxisType.Manual}:
        return Row(axes)
    if kinds == {AxisType.Explicit}:
        return Rows(axes, mesh)
    if kinds == {AxisType.Auto}:
        return RowsToShard(axes, mesh)
    raise ValueError(
        f"reduce_axes={axes!r} must be all manual, all explicit or all automatic, but"
        f" they are {[str(kinds_of(mesh)[axis]) for axis in axes]}."
    )


def find_mesh(axes: tuple[str, ...], tree: Any, name: str = "reduce_axes") -> Any:
    """The mesh that is in use here; `name` is the argument that has the axes.

    Raises:
      ValueError: there is none with these axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        traced = [x for x in jax.tree.leaves(tree) if isinstance(x, Tracer)]
        meshes = [jax.typeof(x).sharding.mesh for x in traced]
        mesh = next((mesh for mesh in meshes if not mesh.empty), mesh)
    if missing := [axis for axis in axes if axis not in mesh.axis_names]:
        there = f"there is {mesh.axis_names!r}" if mesh.axis_names else "there is none"
        raise ValueError(
            f"{name} has {missing[0]!r}, which must be an axis of the mesh in use,"
            f" but {there}. Call this under jax.set_mesh(mesh), or in a jax.shard_map."
        )
    return mesh


def kinds_of(mesh: Any) -> dict[str, AxisType]:
    """The axes of a mesh, and what kind each is of."""
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def explicit_axes(x: Any) -> set[str]:
    """The axes of the mesh that an array is on, as far as its type tells of them."""
    kinds = kinds_of(jax.typeof(x).sharding.mesh)
    return {axis for axis, kind in kinds.items() if kind == AxisType.Explicit}


def entry(axes: tuple[str, ...]) -> Any:
    """Axes as an entry of a `PartitionSpec`, as JAX writes it, which compares that."""
    return axes[0] if len(axes) == 1 else axes or None


def names_in(entry: Any) -> tuple[str, ...]:
    """The axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def axes_in(aval: Any) -> set[str]:
    """The explicit axes over which an array of this type is sharded."""
    return {axis for x in aval.sharding.spec.partitions for axis in names_in(x)}


def _differs_over(x: Any) -> set[str]:
    """The axes along which not all devices have the same, as far as JAX tells."""
    layout = getattr(x, "sharding", None)
    spec = layout.spec.partitions if isinstance(layout, NamedSharding) else ()
    return {a for e in spec for a in names_in(e)} | axes_in(jax.typeof(x)) | axes_of(x)


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "the root"


def _whole_already(path: Any, g: Any, axes: tuple[str, ...]) -> str:
    return (
        f"The gradient at {_name(path)} is {jax.typeof(g)}, not partial over"
        f" reduce_axes={axes!r}: JAX reduced it, at the cost of an all-reduce for each"
        " microbatch. Differentiate with respect to"
        " optax_accum.defer_reduction(params, reduce_axes)."
    )

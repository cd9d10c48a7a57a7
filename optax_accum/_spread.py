"""Takes a window to the devices, each of which then has its part of the batch."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from optax_accum._partial import (
    Row,
    Whole,
    axes_in,
    entry,
    find_mesh,
    kinds_of,
    names_in,
)
from optax_accum._scan import Found
from optax_accum._tree import is_array, put
from optax_accum._varying import axes_of


def spread(
    window: Callable[..., Found],
    axes: tuple[str, ...],
    inputs: Any,
    batch: Any,
    keys: Any,
    carry: Any,
) -> Found:
    """`window(over, inputs, batch, keys, carry)` over the devices along these axes.

    Where they are not manual yet they are for the length of this, and no others. The
    batch is then sharded, and all else replicated over them.

    Raises:
      ValueError: there is no mesh with these axes, or they are manual in part; the
        batch cannot be divided among the devices; another argument is sharded over
        them; or what is carried on differs between them.
    """
    if not axes:
        return window(Whole(), inputs, batch, keys, carry)
    mesh = find_mesh(axes, (inputs, batch))
    kinds = {kinds_of(mesh)[axis] for axis in axes}
    if kinds == {AxisType.Manual}:
        return window(Row(axes), inputs, batch, keys, carry)
    if AxisType.Manual in kinds:
        raise ValueError(
            f"reduce_axes={axes!r} must be manual all or none, but in this shard_map"
            f" {mesh.manual_axes!r} are."
        )
    count = math.prod(mesh.shape[axis] for axis in axes)
    batch = jax.tree.map_with_path(
        lambda path, x: _spread_out(path, x, axes, mesh, count), batch
    )
    for path, x in jax.tree.leaves_with_path((inputs, keys, carry)):
        _check_replicated(path, x, axes)

    # What is no array, a function in a model, goes by the side.
    leaves, treedef = jax.tree.flatten((inputs, batch, keys, carry))
    slots = [i for i, x in enumerate(leaves) if is_array(x)]
    first, last = (len(jax.tree.leaves(tree)) for tree in (inputs, (inputs, batch)))
    specs = [P(axes) if first <= i < last else P() for i in slots]
    merges = []

    def local(arrays):
        here = treedef.unflatten(put(leaves, slots, arrays))
        found = window(Spread(axes, count), *here)
        for path, x in jax.tree.leaves_with_path(found.carry):
            _check_agreed(path, x, axes)
        merges.append(found.merge)
        return found.stacked, found.reduced, found.carry, found.noise

    found = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P(axes), P(), P(), P()),
        axis_names=set(axes),
    )([leaves[i] for i in slots])
    return Found(*found, merges[-1])


class Spread(Row):
    """In the `shard_map` that is made here, sizes are counted over all its devices."""

    def __init__(self, axes: tuple[str, ...], count: int):
        super().__init__(axes)
        self._count = count

    def microbatch_size(self, size: int) -> int:
        if size % self._count:
            raise ValueError(
                f"microbatch_size counts the examples over all {self._count} devices"
                f" along {self.axes!r}, so it must be a multiple of that, got {size}."
            )
        return size // self._count


def _spread_out(path: Any, x: Any, axes: tuple[str, ...], mesh: Any, count: int) -> Any:
    """An array of the batch on its way in."""
    name = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
    if jnp.shape(x)[0] % count:
        raise ValueError(
            f"The batch must have a multiple of {count} examples, one for each device"
            f" along reduce_axes={axes!r}, got {jax.typeof(x)} in {name}."
        )
    # An explicit axis has to be in its type before a `shard_map` can take it.
    explicit = tuple(a for a in axes if kinds_of(mesh)[a] == AxisType.Explicit)
    first, *rest = map(names_in, jax.typeof(x).sharding.spec.partitions or (None,))
    if first[: len(explicit)] == explicit:
        return x
    first, *rest = (
        tuple(a for a in names if a not in explicit) for names in (first, *rest)
    )
    return jax.sharding.reshard(x, P((*explicit, *first), *map(entry, rest)))


def _check_replicated(path: Any, x: Any, axes: tuple[str, ...]) -> None:
    if is_array(x) and (found := sorted(axes_in(jax.typeof(x)) & set(axes))):
        raise ValueError(
            f"There is {jax.typeof(x)} at {jax.tree_util.keystr(path[1:])}, sharded"
            f" over {found}. What is not in the batch must be replicated over"
            " reduce_axes."
        )


def _check_agreed(path: Any, x: Any, axes: tuple[str, ...]) -> None:
    if axes_of(x) & set(axes):
        raise ValueError(
            f"What is carried on must be the same on all devices along reduce_axes="
            f"{axes!r}, but {jax.tree_util.keystr(path[1:])} is computed from what each"
            " device has. Average it in fun by jax.lax.pmean, or, for a batch"
            " normalisation, give it axis_name; else return it in aux."
        )

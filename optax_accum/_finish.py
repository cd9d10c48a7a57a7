"""The end of `update`: what comes out of a micro-step as updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._conditional import run_if
from optax_accum._once import traced_once
from optax_accum._tree import is_array, is_none, where_else_zero
from optax_accum._varying import axes_of, zeros_of
from optax_accum._window import Window


def finish(
    window: Window, params: optax.Params | None
) -> tuple[optax.Updates, optax.OptState]:
    """The end of `update`: at a release what comes out downstream, else zeros.

    At a release the accumulator is dead, so its buffer carries the update out and no
    tree of updates is ever allocated: the selection fuses into what reads the updates.
    Leaves that the accumulator cannot hold exactly get a buffer of their own.
    """

    def downstream(mean, tail_state, params):
        updates, tail_state = window.downstream(mean, tail_state, params)
        return updates if window.back is None else window.back(updates), tail_state

    downstream = traced_once(downstream, window.mean, window.tail_state, params)
    leaves, treedef = _types(downstream, window.mean, window.tail_state, params)
    accs, acc_def = jax.tree.flatten(window.mean, is_leaf=is_none)
    carried, own = set(), {}
    for i, u in enumerate(leaves):
        if window.back is None and treedef == acc_def and _can_carry(accs[i], u):
            carried.add(i)
        elif is_array(u):
            own[i] = zeros_of(u)

    def release(buffers):
        mean, own, tail_state = buffers
        updates, tail_state = downstream(mean, tail_state, params)
        updates = treedef.flatten_up_to(updates)
        mean = acc_def.flatten_up_to(mean)
        for i in carried:
            mean[i] = updates[i].astype(accs[i].dtype)
        return acc_def.unflatten(mean), {i: updates[i] for i in own}, tail_state

    acc_grads, own, tail_state = run_if(
        window.released,
        release,
        (window.mean, own, window.tail_state),
        entwined=has_arrays(window.tail_state),
    )
    accs = acc_def.flatten_up_to(acc_grads)
    for i in carried:
        emitted = where_else_zero(window.released, accs[i])
        leaves[i] = emitted.astype(leaves[i].dtype)
    for i in own:
        leaves[i] = own[i]
    return treedef.unflatten(leaves), window.close(acc_grads, tail_state)


def has_arrays(tail_state: optax.OptState) -> bool:
    """Whether a state has more than counters: moments, which updates are made of."""
    return any(jnp.ndim(x) > 0 for x in jax.tree.leaves(tail_state) if is_array(x))


def _types(downstream: Callable[..., Any], *args: Any) -> tuple[list, Any]:
    """The types of the updates at a release; what is no array comes as it is."""
    leaves, treedef = [], None

    def note():
        nonlocal treedef
        updates, treedef = jax.tree.flatten(downstream(*args)[0], is_leaf=is_none)
        leaves.extend(jax.typeof(u) if is_array(u) else u for u in updates)

    jax.eval_shape(note)
    return leaves, treedef


def _can_carry(acc: Any, update: Any) -> bool:
    """Whether an accumulator leaf can hold an update without losing anything."""
    if not (is_array(acc) and is_array(update)) or acc.shape != update.shape:
        return False
    acc = jax.typeof(acc)
    if acc.sharding != update.sharding or axes_of(acc) != axes_of(update):
        return False
    if jnp.issubdtype(acc.dtype, jnp.complexfloating) != jnp.issubdtype(
        update.dtype, jnp.complexfloating
    ):
        return False
    wide = acc.dtype in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128)
    return (
        wide
        and jnp.issubdtype(update.dtype, jnp.inexact)
        and (jnp.finfo(update.dtype).bits <= jnp.finfo(acc.dtype).bits)
    )

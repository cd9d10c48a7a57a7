"""Let Python run once for what has to be traced twice."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer

from optax_accum._tree import is_array, is_none, put


def traced_once(fn: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """`fn`, to be traced with arguments like these: JAX repeats what it saw it do.

    In time to trace that is worth a second conditional. The arguments and what `fn`
    returns are trees with anything in them; what is not an array in the arguments is
    that of `args`. Without tracers in `args` it is `fn` itself: nothing is compiled.
    """
    leaves, treedef = jax.tree.flatten(args)
    if not any(isinstance(x, Tracer) for x in leaves):
        return fn
    slots = [i for i, x in enumerate(leaves) if is_array(x)]
    others = put(leaves, slots, [None] * len(slots))
    result: Any = None

    @functools.partial(jax.jit, inline=True)
    def run(arrays):
        nonlocal result
        out = fn(*treedef.unflatten(put(others, slots, arrays)))
        leaves, out_def = jax.tree.flatten(out, is_leaf=is_none)
        out_slots = [i for i, x in enumerate(leaves) if is_array(x)]
        arrays = [leaves[i] for i in out_slots]
        result = put(leaves, out_slots, [None] * len(arrays)), out_slots, out_def
        return arrays

    def traced(*args):
        leaves = treedef.flatten_up_to(args)
        arrays = run([leaves[i] for i in slots])
        others, out_slots, out_def = result
        return out_def.unflatten(put(others, out_slots, arrays))

    return traced

"""What a state tells about the accumulation in it."""

import jax
import jax.numpy as jnp
import optax

from optax_accum._accumulate import AccumulateState
from optax_accum._tree import shorten


def released(opt_state: optax.OptState) -> jax.Array:
    """Whether the last micro-step released, so that the parameters moved.

    Args:
      opt_state: a state with an :class:`optax_accum.AccumulateState` anywhere in it.

    Returns:
      Boolean scalar, true for exactly one micro-step a window. Where there are several
      accumulations (in the parts of :func:`optax.partition`): whether any released.

    Raises:
      ValueError: there is no accumulation in the state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> tx = optax_accum.accumulate(every=1)
      >>> state = tx.init(jnp.zeros(2))
      >>> print(optax_accum.released(state))
      False
      >>> _, state = tx.update(jnp.ones(2), state)
      >>> print(optax_accum.released(state))
      True
    """
    states = _at_least_one(opt_state)
    return jnp.any(jnp.stack([s.released for s in states.values()]), axis=0)


def metrics(opt_state: optax.OptState) -> dict[str, jax.Array]:
    """What a logger wants to know of the accumulation.

    Nothing in it waits for the device, inside ``jit`` or out, and the values survive
    the donation of the state.

    Args:
      opt_state: a state with an :class:`optax_accum.AccumulateState` anywhere in it,
        or a tree that holds one, such as a ``TrainState``.

    Returns:
      A flat dict of scalars:

      - ``mini_step``: micro-steps taken in the open window.
      - ``gradient_step``: windows released.
      - ``released``: whether the last micro-step released.
      - ``window_weight``: weight of the open window so far; after a release, that of
        the window that was released, for example its number of tokens.
      - ``skipped``: microbatches that ``skip`` has left out in all.

      Where there are several accumulations (in the parts of :func:`optax.partition`),
      each name has the place of its accumulation in front of it.

    Raises:
      ValueError: there is no accumulation in the state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> tx = optax_accum.accumulate(every=2)
      >>> _, state = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)), weight=10)
      >>> for name, value in optax_accum.metrics(state).items():
      ...     print(name, value)
      mini_step 1
      gradient_step 0
      released False
      window_weight 10.0
      skipped 0
    """
    states = _at_least_one(opt_state)
    flat = {}
    for place, state in states.items():
        prefix = f"{place}/" if len(states) > 1 else ""
        for name in _SCALARS:
            value = getattr(state, name)
            if isinstance(value, tuple):  # without `skip`
                value = jnp.zeros_like(state.mini_step)
            flat[prefix + name] = jnp.array(value)
    return flat


_SCALARS = ("mini_step", "gradient_step", "released", "window_weight", "skipped")


def accumulate_states(opt_state: optax.OptState) -> dict[str, AccumulateState]:
    """All states of `accumulate` in a state, however deep, by their places."""
    leaves = jax.tree.leaves_with_path(
        opt_state, is_leaf=lambda x: isinstance(x, AccumulateState)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in leaves
        if isinstance(x, AccumulateState)
    }


def one_state(opt_state: optax.OptState) -> AccumulateState:
    """The state of the only accumulation.

    Raises:
      ValueError: there is none, or more than one.
    """
    states = _at_least_one(opt_state)
    if len(states) > 1:
        raise ValueError(
            f"There are {len(states)} accumulations in opt_state, at {[*states]};"
            " optax_accum.metrics tells of them all."
        )
    return next(iter(states.values()))


def _at_least_one(opt_state: optax.OptState) -> dict[str, AccumulateState]:
    states = accumulate_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state has no AccumulateState in it; was it made by a transform of"
            f" optax_accum? Its structure is {shorten(jax.tree.structure(opt_state))}."
        )
    return states

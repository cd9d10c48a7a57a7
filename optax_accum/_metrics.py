"""What a state tells about the accumulation in it."""

import jax
import jax.numpy as jnp
import optax

from optax_accum._accumulate import AccumulateState
from optax_accum._noise import NoiseScale, NoiseState, estimate
from optax_accum._tree import shorten


def released(opt_state: optax.OptState) -> jax.Array:
    """Whether the last micro-step released, so that the parameters moved.

    Args:
      opt_state: a state with an :class:`optax_accum.AccumulateState` anywhere in it.

    Returns:
      Boolean scalar, true for exactly one micro-step a window. Where there are several
      accumulations (in the parts of :func:`optax.partition`): whether any released. A
      wrapper that puts the old state back, such as :func:`optax.apply_if_finite`, puts
      this back too.

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
    states = at_least_one(opt_state)
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
        the window that was released, for example its number of tokens. With
        ``reduce_axes`` that of all devices together; in the ``shard_map``, of one.
      - ``skipped``: microbatches that ``skip`` has left out in all.
      - with ``track_noise``, ``noise_scale``, ``gradient_norm_squared`` and ``trace``:
        see :func:`optax_accum.noise_scale`.

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
    states = at_least_one(opt_state)
    flat = {}
    for place, state in states.items():
        prefix = f"{place}/" if len(states) > 1 else ""
        for name in _SCALARS:
            value = getattr(state, name)
            if isinstance(value, tuple):  # without `skip`
                value = jnp.zeros_like(state.mini_step)
            if jnp.ndim(value) > jnp.ndim(state.mini_step):  # a row for each device
                value = jnp.sum(value, axis=-1)
            flat[prefix + name] = jnp.array(value)
        if isinstance(state.noise, NoiseState):
            for name, value in estimate(state.noise)._asdict().items():
                flat[prefix + name] = value
    return flat


def noise_scale(opt_state: optax.OptState | NoiseState) -> NoiseScale:
    r"""The gradient noise scale, estimated from the windows so far.

    It is the batch size, in microbatches, above which a larger batch stops paying: at
    it, twice the batch saves a quarter of the steps, for half as much again of the
    computation. Times the examples (or tokens) of a mean microbatch it is in examples
    (or tokens). With ``reduce_axes`` a microbatch is what one device has of it. It
    grows as training goes on.

    Each window of :math:`n` microbatches gives unbiased estimates of the squared norm
    of the true gradient and of the trace of a microbatch gradient's covariance,

    .. math::
      \frac{n |\bar g|^2 - Q}{n - 1}, \qquad \frac{n (Q - |\bar g|^2)}{n - 1}, \qquad
      Q = \sum_i w_i |g_i|^2 \,/\, \sum_i w_i ,

    for weights :math:`w_i` in proportion to the numbers of examples, equal or not. Both
    are smoothed over the windows before they are divided, and the smoothing is
    debiased. Skipped microbatches do not count.

    Args:
      opt_state: a state with that of one ``accumulate(..., track_noise=True)`` in it;
        or what ``value_and_grad(..., track_noise=True)`` returned, for the estimates of
        one batch.

    Returns:
      A ``NoiseScale`` of float scalars: ``noise_scale``, ``gradient_norm_squared`` and
      ``trace``. NaN until a window of at least two microbatches has been released: one
      alone tells nothing of the noise.

    Raises:
      ValueError: there is not exactly one accumulation in the state, or it does not
        track the noise.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> tx = optax_accum.accumulate(every=2, track_noise=True)
      >>> state = tx.init(jnp.zeros(2))
      >>> for grads in jnp.array([[1.0, 2.0], [3.0, 2.0]]):
      ...     _, state = tx.update(grads, state)
      >>> print(optax_accum.noise_scale(state).trace)
      2.0

    References:
      McCandlish et al., `An Empirical Model of Large-Batch Training
      <https://arxiv.org/abs/1812.06162>`_, 2018, appendix A.1, for equal weights.
    """
    if isinstance(opt_state, NoiseState):
        return estimate(opt_state)
    state = one_state(opt_state)
    if not isinstance(state.noise, NoiseState):
        raise ValueError("Give accumulate track_noise=True for the noise scale.")
    return estimate(state.noise)


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
    states = at_least_one(opt_state)
    if len(states) > 1:
        raise ValueError(
            f"There are {len(states)} accumulations in opt_state, at {[*states]};"
            " optax_accum.metrics tells of them all."
        )
    return next(iter(states.values()))


def at_least_one(opt_state: optax.OptState) -> dict[str, AccumulateState]:
    """The states of all accumulations, of which there must be one."""
    states = accumulate_states(opt_state)
    if not states:
        raise ValueError(
            "opt_state has no AccumulateState in it; was it made by a transform of"
            f" optax_accum? Its structure is {shorten(jax.tree.structure(opt_state))}."
        )
    return states

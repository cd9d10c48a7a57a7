"""Chains whose tail runs only at a release, and the short way to end a micro-step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_accum._conditional import run_if
from optax_accum._finish import finish, has_arrays
from optax_accum._metrics import accumulate_states
from optax_accum._tree import is_array, is_none, put, shorten
from optax_accum._window import Accumulation


def chain(
    *transforms: optax.GradientTransformation,
) -> Accumulation:
    """:func:`optax.chain`, but what follows the accumulation runs only at a release.

    The transforms before :func:`optax_accum.accumulate` see every microbatch. Those
    after it see one gradient a window, the mean, and in all other micro-steps neither
    they nor their states are touched and the updates are zero.

    Args:
      *transforms: any Optax transforms, exactly one of them an accumulation: what
        ``accumulate``, ``chain`` or ``MultiSteps`` of this library return.

    Returns:
      A transform whose state is the tuple of the transforms' states, as from
      ``optax.chain``. Updates and states have the dtypes that the transforms alone
      would give. It takes extra arguments, see :func:`optax_accum.accumulate`.

    Raises:
      ValueError: there is no accumulation among the transforms, or more than one.
      TypeError: one of them is not a transform; or, when ``update`` is traced, a
        transform after the accumulation changes the structure or shapes of its state.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> tx = optax_accum.chain(
      ...     optax.zero_nans(),  # every microbatch
      ...     optax_accum.accumulate(every=2),
      ...     optax.clip_by_global_norm(1.0),  # once a window, the mean
      ...     optax.sgd(0.5),
      ... )
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> for grads in jnp.array([[1.0, 0.0], [3.0, 0.0]]):
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, optax_accum.released(state))
      [1. 2.] False
      [0.5 2. ] True
    """
    at, accumulation = _find_accumulation(transforms)
    head = [optax.with_extra_args_support(t) for t in transforms[:at]]
    tail = [optax.with_extra_args_support(t) for t in transforms[at + 1 :]]

    def init_fn(params):
        spread = accumulation.spread(params)
        state = (
            *(t.init(params) for t in transforms[: at + 1]),
            *(t.init(spread) for t in tail),
        )
        if len(accumulate_states(state)) > 1:
            raise ValueError(
                "There is more than one accumulation in the chain; one of them is"
                " inside another transform. Their windows would multiply. Keep one."
            )
        return state

    def micro_step(updates, state, params=None, **extra_args):
        _check_state(state, len(transforms))
        head_state = []
        theirs = {k: v for k, v in extra_args.items() if k not in ("weight", "release")}
        for t, s in zip(head, state[:at], strict=True):
            updates, s = t.update(updates, s, params, **theirs)
            head_state.append(s)
        window = accumulation.micro_step(updates, state[at], params, **extra_args)

        def downstream(mean, tail_state, params):
            inner, *states = tail_state
            updates, inner = window.downstream(mean, inner, params)
            params = accumulation.spread(params)
            new_states = []
            for t, s in zip(tail, states, strict=True):
                updates, s = t.update(updates, s, params, **window.extra_args)
                new_states.append(s)
            return updates, (inner, *new_states)

        def close(acc_grads, tail_state):
            inner, *states = tail_state
            return (*head_state, window.close(acc_grads, inner), *states)

        return window._replace(
            tail_state=(window.tail_state, *state[at + 1 :]),
            downstream=downstream,
            close=close,
        )

    def update_fn(updates, state, params=None, **extra_args):
        return finish(micro_step(updates, state, params, **extra_args), params)

    return Accumulation(init_fn, update_fn, micro_step, accumulation.spread)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: optax.Updates,
    opt_state: optax.OptState,
    params: optax.Params,
    **extra_args: Any,
) -> tuple[optax.Params, optax.OptState]:
    """`tx.update` and :func:`optax.apply_updates` in one.

    Between releases the parameters are neither read nor written, which for a transform
    of this library makes a micro-step as cheap as adding the gradients up. Other
    transforms, also those that wrap one of this library, take the plain way.

    Args:
      tx: any Optax transform.
      grads: gradients, a tree that matches ``params``.
      opt_state: the state of ``tx``. Donate it and ``params`` to the jitted step.
      params: parameters. What has ``None`` or ``float0`` for a gradient stays as it
        is, so an Equinox model will do.
      **extra_args: for ``tx.update``; see :func:`optax_accum.accumulate`.

    Returns:
      The new ``params``, in their shapes and dtypes, and the new ``opt_state``.

    Raises:
      TypeError: ``opt_state`` is not a state of ``tx``; or there is a ``weight`` or a
        ``release``, and no accumulation in ``tx`` to read it.
      ValueError: ``params`` does not match ``grads``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> tx = optax_accum.chain(optax_accum.accumulate(every=2), optax.sgd(0.5))
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> for grads in jnp.array([[1.0, 0.0], [3.0, 0.0]]):
      ...     params, state = optax_accum.apply_gradients(tx, grads, state, params)
      ...     print(params)
      [1. 2.]
      [0. 2.]
    """
    if not isinstance(tx, Accumulation):
        _check_someone_reads(extra_args, opt_state)
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return _apply(params, updates), opt_state

    # The `float0` of an integer parameter is no gradient, and Optax cannot take it.
    grads = jax.tree.map(lambda g: g if is_array(g) else None, grads)
    window = tx.micro_step(grads, opt_state, params, **extra_args)

    # What has no gradient stays as it is, also what is no array to JAX until it has
    # been through a conditional: a Python number in a model.
    leaves, treedef = jax.tree.flatten(grads, is_leaf=is_none)
    parts = _parts(params, treedef)
    moving = [i for i, g in enumerate(leaves) if is_array(g)]
    for i in moving:
        if not is_array(parts[i]) or jnp.shape(parts[i]) != jnp.shape(leaves[i]):
            raise ValueError(
                f"A gradient is {jax.typeof(leaves[i])}, and its parameter"
                f" {shorten(parts[i])}."
            )

    def fill(moved):
        return treedef.unflatten(put(parts, moving, moved))

    def release(moving_and_state):
        moved, tail_state = moving_and_state
        here = fill(moved)
        updates, tail_state = window.downstream(window.mean, tail_state, here)
        if window.back is not None:
            updates = window.back(updates)
        moved = treedef.flatten_up_to(_apply(here, updates))
        return [moved[i] for i in moving], tail_state

    before = [parts[i] for i in moving], window.tail_state
    moved, tail_state = run_if(
        window.released, release, before, entwined=has_arrays(window.tail_state)
    )
    return fill(moved), window.close(window.mean, tail_state)


def _parts(params: optax.Params, treedef: Any) -> list[Any]:
    """What of the parameters belongs to each gradient."""
    try:
        return treedef.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            f"params must have the structure of grads, but: {error}"
        ) from None


def _find_accumulation(transforms: Any) -> tuple[int, Accumulation]:
    for t in transforms:
        if not (callable(getattr(t, "init", None)) and hasattr(t, "update")):
            raise TypeError(
                f"chain takes Optax transforms, got {t!r} of type {type(t).__name__}."
            )
    found = [(i, t) for i, t in enumerate(transforms) if isinstance(t, Accumulation)]
    if not found:
        raise ValueError(
            "chain needs exactly one accumulation among its transforms, got 0. Give it"
            " optax_accum.accumulate(...) directly: inside another transform, such as"
            " optax.chain or optax.masked, it cannot be seen."
        )
    if len(found) > 1:
        raise ValueError(
            "chain needs exactly one accumulation among its transforms, got"
            f" {len(found)} (MultiSteps and a chain are one each). Their windows would"
            " multiply; keep one."
        )
    return found[0]


def _check_someone_reads(extra_args: dict[str, Any], opt_state: optax.OptState) -> None:
    """Optax's transforms ignore what they do not know; a weight lost is an error."""
    lost = sorted({"weight", "release"} & extra_args.keys())
    if lost and not accumulate_states(opt_state):
        raise TypeError(
            f"{lost[0]} is for an accumulation, but there is none in tx. Chain"
            " optax_accum.accumulate(...) in front of the optimizer."
        )


def _check_state(state: Any, length: int) -> None:
    if isinstance(state, optax.MultiStepsState):
        raise TypeError(
            "The state is one of optax.MultiSteps; from_multi_steps_state makes one of"
            " this library from it."
        )
    if not isinstance(state, tuple) or len(state) != length:
        hint = (
            "The order is tx, grads, opt_state, params in apply_gradients; a checkpoint"
            " is to be restored into the structure of tx.init(params)."
        )
        if hasattr(state, "opt_state"):
            hint = "Pass its opt_state."
        raise TypeError(
            f"The state must be a tuple of {length}, as from init of this chain, got"
            f" {shorten(jax.tree.structure(state))}. {hint}"
        )


def _apply(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """`optax.apply_updates` that leaves alone what has no update."""

    def apply(u, p):
        return optax.apply_updates(p, u) if is_array(u) else p

    return jax.tree.map(apply, updates, params, is_leaf=is_none)

"""What a training step over many devices says about parameters and state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from optax_accum import _arguments as arguments
from optax_accum._accumulate import AccumulateState
from optax_accum._metrics import at_least_one
from optax_accum._noise import on_window
from optax_accum._partial import entry, partial_over
from optax_accum._tree import is_array


def defer_reduction(
    params: optax.Params, reduce_axes: str | Sequence[str]
) -> optax.Params:
    """The same parameters, but gradients by them stay partial over mesh axes.

    JAX makes the gradient by a parameter that is the same on all devices the same, too:
    it adds an all-reduce to each backward pass. By what this returns there is none, and
    ``accumulate(every, reduce_axes=...)`` reduces once a window.

    Call it in the training step, in front of the differentiation. It costs nothing: in
    a ``shard_map`` it is :func:`jax.lax.pcast` to varying, on an explicit mesh
    ``jax.sharding.reshard`` to a spec with these axes in ``reduced``.

    Args:
      params: a pytree of arrays, replicated over these axes. Only floating and complex
        arrays are changed.
      reduce_axes: the name of a mesh axis, or several.

    Returns:
      The parameters to differentiate with respect to; the optimizer gets the old ones.

    Raises:
      TypeError: ``reduce_axes`` are no names.
      ValueError: the axes are automatic, and outside of a ``shard_map`` nothing can be
        deferred there (see :func:`optax_accum.value_and_grad` for those); there is no
        mesh with these axes; or a parameter is sharded over them.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> mesh = jax.make_mesh((1,), ("data",))  # explicit
      >>> def grad_fn(params, x):
      ...     params = optax_accum.defer_reduction(params, "data")
      ...     return jax.grad(lambda params: jnp.mean(x @ params))(params)
      >>> with jax.set_mesh(mesh):
      ...     x = jax.device_put(jnp.ones((4, 2)), jax.P("data"))
      ...     print(jax.typeof(grad_fn(jnp.ones(2), x)))
      float32[2]{U:data}
    """
    over = partial_over(arguments.check_axes(reduce_axes), params)
    over.check_params(params)

    def defer(x):
        if not is_array(x) or not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        return over.defer(jnp.asarray(x))

    return jax.tree.map(defer, params)


def state_specs(opt_state: optax.OptState, reduce_axes: str | Sequence[str]) -> Any:
    """How a state goes into a ``shard_map`` and out of it.

    Args:
      opt_state: a state with that of ``accumulate(..., reduce_axes=...)`` in it, made
        in a ``shard_map`` or on a mesh with automatic axes; or its shapes, by
        ``jax.eval_shape(tx.init, params)`` on a mesh of any kind.
      reduce_axes: as for ``accumulate``.

    Returns:
      A tree like the state, of :class:`jax.sharding.PartitionSpec`: for the
      ``in_specs`` and ``out_specs`` of :func:`jax.shard_map`. What differs from device
      to device has a leading axis over ``reduce_axes``, all else is replicated.

    Raises:
      TypeError: ``reduce_axes`` are no names.
      ValueError: there is no accumulation in the state, or it was made for steps that
        are not in a ``shard_map``.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> automatic = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=automatic)
      >>> tx = optax_accum.accumulate(every=2, reduce_axes="data")
      >>> with jax.set_mesh(mesh):
      ...     state = tx.init(jnp.zeros(3))
      >>> print(state.acc_grads.shape)
      (1, 3)
      >>> specs = optax_accum.state_specs(state, "data")
      >>> print(specs.acc_grads == jax.P("data"), specs.mini_step == jax.P())
      True True
    """
    axes = entry(arguments.check_axes(reduce_axes))
    at_least_one(opt_state)

    def replicated(tree):
        return jax.tree.map(lambda _: P(), tree)

    def by_rows(tree):
        return jax.tree.map(lambda _: P(axes), tree)

    def specs(x):
        if not isinstance(x, AccumulateState):
            return P()
        if isinstance(x.window_weight, jax.Array) and not x.window_weight.ndim:
            raise ValueError(
                "This state cannot go into a shard_map, where what differs from device"
                " to device needs a row for each: it was made without reduce_axes, or"
                " on a mesh with explicit axes for steps without one. Call init in a"
                " shard_map with state_specs(jax.eval_shape(tx.init, params), ...) as"
                " its out_specs."
            )
        return replicated(x)._replace(
            acc_grads=by_rows(x.acc_grads),
            window_weight=by_rows(x.window_weight),
            acc_args=by_rows(x.acc_args),
            noise=on_window(by_rows, replicated(x.noise)),
        )

    return jax.tree.map(
        specs, opt_state, is_leaf=lambda x: isinstance(x, AccumulateState)
    )

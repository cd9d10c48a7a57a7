"""Flax's `TrainState` and `Optimizer`, by way of `optax_accum.apply_gradients`.

Flax's own take this library's transforms too. What these save is a pass over the
parameters in every micro-step: between releases they are neither read nor written.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.typing import ArrayLike

from optax_accum._arguments import check_weight
from optax_accum._chain import apply_gradients
from optax_accum._metrics import accumulate_states, one_state


class TrainState(train_state.TrainState):
    """:class:`flax.training.train_state.TrainState` that takes the fast path.

    Attributes:
      step: int scalar, the micro-steps taken: one for each ``apply_gradients``.
      apply_fn: see Flax.
      params: the parameters. Those in a collection ``_overwrite_with_gradient``, which
        Flax keeps for fp8, are replaced by their gradients in every micro-step that
        counts: not in one that ``skip`` left out or that has a weight of 0.
      tx: any Optax transform; an accumulation for what is said here to make sense.
      opt_state: its state. ``optax_accum.released`` and ``optax_accum.metrics`` take
        it, or the whole ``TrainState``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> import optax_accum.flax
      >>> state = optax_accum.flax.TrainState.create(
      ...     apply_fn=lambda params, x: x @ params,
      ...     params=jnp.array([1.0, 2.0]),
      ...     tx=optax_accum.chain(optax_accum.accumulate(every=2), optax.sgd(0.5)),
      ... )
      >>> for grads in jnp.array([[1.0, 0.0], [3.0, 0.0]]):
      ...     state = state.apply_gradients(grads=grads)
      ...     print(state.step, state.gradient_step, state.params)
      1 0 [1. 2.]
      2 1 [0. 2.]
    """

    @property
    def gradient_step(self) -> jax.Array:
        """int32 scalar, how many windows have been released.

        Raises:
          ValueError: there is not exactly one accumulation in ``tx``.
        """
        return jnp.array(one_state(self.opt_state).gradient_step)

    def apply_gradients(
        self,
        *,
        grads: Any,
        weight: ArrayLike | None = None,
        release: ArrayLike | None = None,
        extra_args: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """The state after one more microbatch.

        Args:
          grads: gradients, with the structure of ``params``.
          weight: real scalar, 0 or more; see :func:`optax_accum.accumulate`.
          release: boolean scalar; see :func:`optax_accum.accumulate`.
          extra_args: what else ``tx.update`` is to be given, such as ``value``.
          **kwargs: other fields to replace, such as ``batch_stats``.

        Returns:
          The new state, with ``step`` one higher.

        Raises:
          TypeError: there is no such field to replace; or as
            :func:`optax_accum.apply_gradients`.
          ValueError: as :func:`optax_accum.apply_gradients`.
        """
        extra_args = dict(extra_args or {})
        for name, value in (("weight", weight), ("release", release)):
            if value is not None and extra_args.setdefault(name, value) is not value:
                raise TypeError(f"{name} is given twice, in extra_args too.")
        fields = {field.name for field in dataclasses.fields(self)}
        if unknown := sorted(kwargs.keys() - fields):
            raise TypeError(
                f"{unknown[0]} is no field of {type(self).__name__}. What is for"
                f" tx.update goes into extra_args={{{unknown[0]!r}: ...}}."
            )

        overwrites = isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads
        params, opt_state = apply_gradients(
            self.tx,
            grads["params"] if overwrites else grads,
            self.opt_state,
            self.params["params"] if overwrites else self.params,
            **extra_args,
        )
        if overwrites:
            counted = _none_skipped(self.opt_state, opt_state)
            if extra_args.get("weight") is not None:
                counted &= check_weight(extra_args["weight"], float) != 0
            overwritten = jax.tree.map(
                lambda new, old: jnp.where(counted, new, old),
                grads[OVERWRITE_WITH_GRADIENT],
                self.params[OVERWRITE_WITH_GRADIENT],
            )
            params = {"params": params, OVERWRITE_WITH_GRADIENT: overwritten}
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **kwargs
        )


M = TypeVar("M")


class Optimizer(nnx.Optimizer[M]):
    """:class:`flax.nnx.Optimizer` that takes the fast path.

    Attributes:
      step: uint32 scalar, the micro-steps taken: one for each ``update``.
      tx: any Optax transform; an accumulation for what is said here to make sense.
      opt_state: its state, for ``optax_accum.released`` and ``optax_accum.metrics``.

    Examples:
      >>> from flax import nnx
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> import optax_accum.flax
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = optax_accum.flax.Optimizer(
      ...     model,
      ...     optax_accum.chain(optax_accum.accumulate(every=2), optax.sgd(0.5)),
      ...     wrt=nnx.Param,
      ... )
      >>> for x in jnp.eye(2):
      ...     grads = nnx.grad(lambda model: jnp.mean(model(x)))(model)
      ...     optimizer.update(model, grads)
      ...     print(optimizer.gradient_step, model.bias[...])
      0 [0.]
      1 [-0.5]
    """

    @property
    def gradient_step(self) -> jax.Array:
        """int32 scalar, how many windows have been released.

        Raises:
          ValueError: there is not exactly one accumulation in ``tx``.
        """
        return jnp.array(one_state(self.opt_state).gradient_step)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, model: M, grads: Any, **kwargs: Any
    ) -> None:
        """Takes one more microbatch: updates the model and this optimizer in place.

        Unlike Flax's it returns nothing, since there is no tree of updates.

        Args:
          model: the model that the optimizer was made with.
          grads: gradients as from ``nnx.grad``, with respect to ``wrt``.
          **kwargs: extra arguments of ``tx.update``, such as ``weight`` and
            ``release``; see :func:`optax_accum.accumulate`.

        Raises:
          TypeError, ValueError: as :func:`optax_accum.apply_gradients`.
        """
        params, opt_state = apply_gradients(
            self.tx,
            nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph)),
            nnx.as_pure(self.opt_state),
            nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph)),
            **nnx.as_pure(kwargs),
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))
        self.step[...] += 1


def _none_skipped(old: optax.OptState, new: optax.OptState) -> Any:
    """Whether every accumulation accepted the microbatch between these two states."""
    accepted: Any = True
    for place, state in accumulate_states(old).items():
        if not isinstance(state.skipped, tuple):
            accepted &= state.skipped == accumulate_states(new)[place].skipped
    return accepted

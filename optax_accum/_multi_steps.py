"""The drop-in for `optax.MultiSteps`, and the way over from its checkpoints."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _arguments as arguments
from optax_accum._accumulate import AccumulateState, SkipFn, accumulate
from optax_accum._chain import chain
from optax_accum._finish import finish
from optax_accum._metrics import released
from optax_accum._nnx import pure
from optax_accum._tree import like
from optax_accum._window import Accumulation


class MultiStepsState(NamedTuple):
    """State of `MultiSteps`, with the attributes of `optax.MultiStepsState`.

    Attributes:
      accumulate_state: the state of the accumulation.
      inner_opt_state: the state of the wrapped optimizer.
    """

    accumulate_state: AccumulateState
    inner_opt_state: optax.OptState

    @property
    def mini_step(self) -> jax.Array:
        """int32 scalar, the micro-steps taken in the open window."""
        return self.accumulate_state.mini_step

    @property
    def gradient_step(self) -> jax.Array:
        """int32 scalar, how many windows have been released."""
        return self.accumulate_state.gradient_step

    @property
    def acc_grads(self) -> optax.Updates:
        """The open window's weighted sum of gradients (in Optax: their mean)."""
        return self.accumulate_state.acc_grads

    @property
    def skip_state(self) -> Any:
        """What `should_skip_update_fn` returned beside its verdict."""
        return self.accumulate_state.skip_state


class MultiSteps(Accumulation):
    """:class:`optax.MultiSteps` with another engine: change the import, no more.

    The optimizer runs only at a release, on the exact mean; see
    :func:`optax_accum.accumulate` for the extra arguments ``weight`` and ``release``
    that ``update`` takes besides the optimizer's own. It is itself an Optax transform,
    so it goes wherever one is wanted, and :func:`optax_accum.apply_gradients` takes
    the fast path with it.

    Where Optax's behaviour is a defect, this differs: a NaN spoils one window, not the
    run; nothing is lost of complex and float64 gradients; ``has_updated`` is true for
    one micro-step a window, also if a skipped one follows; a schedule is read once a
    window; ``every_k_schedule=0`` is an error. ``acc_grads`` holds a sum, not a mean.

    Args:
      opt: the optimizer to wrap.
      every_k_schedule: microbatches to a window, an int of at least 1 or a function
        from ``gradient_step`` to one.
      use_grad_mean: hand the mean on, or else the sum.
      should_skip_update_fn: see ``skip`` of ``accumulate``.
      accumulator_dtype: see ``dtype`` of ``accumulate``; by default at least float32.
      reduce_axes: see ``accumulate``.

    Raises:
      TypeError, ValueError: as ``accumulate`` and ``chain``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> tx = optax_accum.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> for grads in jnp.array([[1.0, 0.0], [3.0, 0.0]]):
      ...     updates, state = tx.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      ...     print(params, tx.has_updated(state))
      [1. 2.] False
      [-1.  2.] True
    """

    inner_opt: optax.GradientTransformationExtraArgs

    def __new__(
        cls,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[jax.Array], ArrayLike],
        use_grad_mean: bool = True,
        should_skip_update_fn: SkipFn | None = None,
        accumulator_dtype: DTypeLike | None = None,
        *,
        reduce_axes: str | Sequence[str] = (),
    ) -> Self:
        tx = chain(
            accumulate(
                arguments.check_every(every_k_schedule, "every_k_schedule"),
                reduction="mean" if use_grad_mean else "sum",
                skip=should_skip_update_fn,
                dtype=arguments.check_dtype(accumulator_dtype, "accumulator_dtype"),
                reduce_axes=reduce_axes,
            ),
            opt,
        )

        def init_fn(params):
            state: Any = tx.init(params)
            return MultiStepsState(*state)

        def micro_step(updates, state, params=None, **extra_args):
            # Another type of state is left for the chain to refuse.
            ours = (*state,) if isinstance(state, MultiStepsState) else state
            window = tx.micro_step(updates, ours, params, **extra_args)

            def close(acc_grads, tail_state):
                new: Any = window.close(acc_grads, tail_state)
                return MultiStepsState(*new)

            return window._replace(close=close)

        def update_fn(updates, state, params=None, **extra_args):
            return finish(micro_step(updates, state, params, **extra_args), params)

        self = super().__new__(cls, init_fn, update_fn, micro_step, tx.spread)
        self.inner_opt = optax.with_extra_args_support(opt)
        return self

    def has_updated(self, state: optax.OptState) -> jax.Array:
        """Boolean scalar: did the last micro-step update the parameters?"""
        return released(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Itself."""
        return self


def from_multi_steps_state(
    state: optax.MultiStepsState,
    tx: optax.GradientTransformation,
    params: optax.Params,
    *,
    use_grad_mean: bool = True,
) -> optax.OptState:
    """Takes over the state of an `optax.MultiSteps`, also in the middle of a window.

    Args:
      state: the state, for example restored from a checkpoint. That of an
        ``nnx.Optimizer`` will do; put the result into the new one by
        ``nnx.update(optimizer.opt_state, nnx.state(result))``.
      tx: the transform to go on with: this library's ``MultiSteps`` around the same
        optimizer, or a ``chain`` whose transforms after ``accumulate`` are that
        optimizer. Transforms before it start afresh.
      params: the parameters, for shapes, dtypes and placement.
      use_grad_mean: what the ``optax.MultiSteps`` was built with. With ``True`` its
        ``acc_grads`` holds a mean, which becomes a sum here.

    Returns:
      A state of ``tx``. Of a window that was released just before, the weight is not
      known: ``window_weight`` is 0.

    Raises:
      TypeError: ``state`` is no ``optax.MultiStepsState``, or does not belong to the
        optimizer in ``tx``.
      ValueError: ``tx`` is of another form; or the state is in the middle of a window
        and ``tx`` has ``reduce_axes``, ``average_args`` or ``track_noise``, for which
        Optax did not keep what is past, or ``every=1``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> params = jnp.array([1.0, 2.0])
      >>> old = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
      >>> _, old_state = old.update(jnp.array([1.0, 0.0]), old.init(params), params)
      >>> tx = optax_accum.MultiSteps(optax.sgd(1.0), every_k_schedule=2)
      >>> state = optax_accum.from_multi_steps_state(old_state, tx, params)
      >>> updates, state = tx.update(jnp.array([3.0, 0.0]), state, params)
      >>> print(updates)
      [-2. -0.]
    """
    if not hasattr(state, "inner_opt_state") or not hasattr(state, "acc_grads"):
        raise TypeError(
            f"state must be an optax.MultiStepsState, got {type(state).__name__}."
            " Restore a checkpoint into the structure of optax.MultiSteps(...).init."
        )
    state, params = pure(state), pure(params)
    if isinstance(state, MultiStepsState):
        raise TypeError("state is of this library already; go on with it as it is.")
    if not callable(getattr(tx, "init", None)):
        raise TypeError(
            f"tx must be the transform to go on with, got {type(tx).__name__}. The"
            " order is state, tx, params."
        )
    mini_step, gradient_step = map(jnp.int32, (state.mini_step, state.gradient_step))
    fresh: Any = tx.init(params)
    at = [i for i, s in enumerate(fresh) if isinstance(s, AccumulateState)]
    if not isinstance(fresh, tuple) or not at:
        raise ValueError(
            "tx must be a MultiSteps of this library, or a chain with accumulate"
            " directly in it."
        )
    head, ours, tail = fresh[: at[0]], fresh[at[0]], fresh[at[0] + 1 :]
    count = mini_step if use_grad_mean else 1
    sums, window_weight = ours.acc_grads, mini_step.astype(float)
    rows, none = _has_rows(sums, params), not jax.tree.leaves(sums)
    keeps_other = {
        f"average_args={tuple(ours.acc_args)}": ours.acc_args,
        "track_noise=True": ours.noise,
        "reduce_axes": rows,
        "every=1 and no accumulator": none and jax.tree.leaves(params),
    }
    for what, does in keeps_other.items():
        if does and mini_step > 0:
            raise ValueError(
                f"tx has {what}, but the state is in the middle of a window (mini_step"
                f" {mini_step}), of which optax.MultiSteps keeps the gradient alone."
                " Convert it at the end of a window."
            )
    if rows:
        window_weight = ours.window_weight
    elif not none:
        sums = like(state.acc_grads, sums, "acc_grads")
        sums = jax.tree.map(lambda mean: mean * count, sums)
    inner = state.inner_opt_state
    inner = (inner,) if len(tail) == 1 else tuple(inner)
    ours = AccumulateState(
        mini_step=mini_step,
        gradient_step=gradient_step,
        acc_grads=sums,
        window_weight=window_weight,
        released=(mini_step == 0) & (gradient_step > 0),
        every=ours.every,
        acc_args=ours.acc_args,
        skipped=ours.skipped,
        skip_state=like(state.skip_state, ours.skip_state, "skip_state"),
        noise=ours.noise,
    )
    new = (*head, ours, *like(inner, tail, "inner_opt_state"))
    return MultiStepsState(*new) if isinstance(fresh, MultiStepsState) else new


def _has_rows(acc_grads: Any, params: Any) -> bool:
    """Whether an accumulator has the leading axis that `reduce_axes` gives it."""
    pairs = zip(jax.tree.leaves(acc_grads), jax.tree.leaves(params), strict=False)
    return any(jnp.ndim(acc) > jnp.ndim(p) for acc, p in pairs)

"""The transform that accumulates, and its state."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _arguments as arguments
from optax_accum import _noise as noise
from optax_accum._finish import finish
from optax_accum._layout import Layout
from optax_accum._partial import Whole, partial_over
from optax_accum._tree import is_array, is_none, like, shorten, where_else_zero
from optax_accum._weighted_sum import add, divide, sum_dtype
from optax_accum._window import Accumulation, Window

SkipFn = Callable[
    [optax.Updates, jax.Array, optax.Params | None], tuple[jax.Array, Any]
]


class AccumulateState(NamedTuple):
    """State of `accumulate`: arrays whose shapes and dtypes never change.

    Attributes:
      mini_step: int32 scalar, the micro-steps taken in the open window.
      gradient_step: int32 scalar, how many windows have been released.
      acc_grads: the weighted sum of the open window's gradients, shaped like the
        parameters, in the accumulator's dtypes. After a release, and where
        `window_weight` is 0, its numbers mean nothing. `()` for `every=1`. With
        `reduce_axes` it has a leading axis of the devices, sharded over them, and so,
        in a `shard_map`, have `window_weight` and `acc_args`.
      window_weight: float scalar, the weight of the open window's microbatches so far;
        after a release, that of the window which it closed.
      released: boolean scalar, whether the last micro-step released.
      every: int32 scalar, the length of the open window where a schedule gives it, 0
        before it is read; else `()`.
      acc_args: dict of float scalars, the weighted sums of `average_args`.
      skipped: int32 scalar, the microbatches that `skip` has left out since `init`;
        `()` without `skip`.
      skip_state: what `skip` returned beside its last verdict; `()` without `skip`.
      noise: scalars from which `optax_accum.noise_scale` estimates; `()` without
        `track_noise`.
    """

    mini_step: jax.Array
    gradient_step: jax.Array
    acc_grads: optax.Updates
    window_weight: jax.Array
    released: jax.Array
    every: jax.Array | tuple[()]
    acc_args: dict[str, jax.Array]
    skipped: jax.Array | tuple[()]
    skip_state: Any
    noise: noise.NoiseState | tuple[()]


def accumulate(
    every: int | Callable[[jax.Array], ArrayLike] | None,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    dtype: DTypeLike | None = None,
    skip: SkipFn | None = None,
    on_skip: Literal["wait", "shrink"] = "wait",
    average_args: Sequence[str] = (),
    track_noise: bool = False,
    noise_decay: float = 0.9,
    reduce_axes: str | Sequence[str] = (),
    sharding: Any = None,
) -> Accumulation:
    r"""Accumulates gradients and hands on their mean at the end of each window.

    In :func:`optax_accum.chain`, what follows it runs only when a window of ``every``
    microbatches is full, on

    .. math:: \bar g = \sum_i w_i g_i \,/\, \sum_i w_i ,

    the mean of the window's gradients :math:`g_i` under the weights :math:`w_i`. It is
    the gradient of the large batch where :math:`w_i` is the number of examples (or
    tokens) over which the loss of microbatch :math:`i` is a mean. In all other
    micro-steps the updates are zero and nothing downstream runs.

    ``update`` reads these extra arguments, all optional and all traceable:

    - ``weight``: real scalar, 0 or more, default 1: :math:`w_i`. A microbatch of weight
      0 uses up a slot of its window and adds nothing, not even a NaN.
    - ``release``: boolean scalar: close the window with this microbatch, full or not.
    - those named in ``average_args``.
    - ``noise``, with ``track_noise``: what ``value_and_grad(..., track_noise=True)``
      returned beside these gradients, for the estimates to count its microbatches.

    All others are passed on to the other transforms of the chain. A gradient that is
    ``None`` adds nothing, and where it is ``None`` at a release, its parameter stays as
    it is.

    Args:
      every: microbatches to a window. An int of at least 1; or a schedule, a function
        from ``gradient_step`` (int32 scalar) to a number of at least 1, which is read
        at the start of each window and rounded up; or ``None``, to release only when
        ``release`` says so. ``every=1`` keeps no accumulator.
      reduction: ``"mean"``, or ``"sum"`` for :math:`\sum_i w_i g_i`.
      dtype: floating dtype of the accumulator. By default the parameters' own,
        promoted to at least float32. Complex parameters have a complex accumulator
        under any ``dtype``.
      skip: which microbatches to leave out, as for :class:`optax.MultiSteps`:
        ``skip(updates, gradient_step, params) -> (should_skip, skip_state)``, for
        example :func:`optax.skip_not_finite`. A microbatch left out is as if it had
        never come; ``release=True`` on it releases what was accepted before it.
      on_skip: ``"wait"`` for a replacement; or ``"shrink"`` the window: the slot is
        used up and the mean is over the others.
      average_args: names of scalar extra arguments of which downstream transforms see
        the window's weighted mean, not the last microbatch's value; ``("value",)`` for
        :func:`optax.contrib.reduce_on_plateau`.
      track_noise: keep what :func:`optax_accum.noise_scale` estimates from, for one
        more read of each gradient that comes without a ``noise``. Weights then have to
        be in proportion to the numbers of examples (or tokens).
      noise_decay: how much of these estimates each window keeps, from 0 up to 1.
      reduce_axes: mesh axes over which the gradients come partial, each device having
        its own part, see :func:`optax_accum.defer_reduction`. They are reduced once, at
        the release. In a ``shard_map``, where each device has a ``weight`` of its own,
        the mean is over all of them; ``release`` or ``skip`` on one device counts on
        all, and :func:`optax_accum.state_specs` tells how the state is sharded. What
        stands before ``accumulate``, ``skip`` and ``track_noise`` see each device's
        part alone, which for the noise scale is the microbatch; on an explicit mesh
        ``skip`` sees all, along a leading axis.
      sharding: spread the accumulator over the mesh (ZeRO-2), for each device to hold a
        part of it and each microbatch to cost a reduce-scatter, not an all-reduce. The
        name of a mesh axis, or several, which split each array along the first
        dimension that they divide, where there is one; or, also for parameters that are
        spread over automatic axes themselves, a pytree prefix of the parameters with a
        ``PartitionSpec`` or ``NamedSharding`` for each. What follows in the chain sees
        gradients and parameters so laid out, and its state is too; the updates that
        come out are like the parameters again. With ``reduce_axes`` the accumulator is
        each device's own, and the release is the reduce-scatter (ZeRO-1). By default it
        is laid out like the parameters, also where these are spread themselves.

    Returns:
      A transform whose state is an :class:`AccumulateState`. What it releases has the
      dtypes of the gradients (integers as floats). A window with nothing in it, all
      skipped or of total weight 0, releases nothing and starts over.

    Raises:
      TypeError: an argument is of a wrong type, or the accumulator cannot hold the
        gradients' dtype.
      ValueError: an argument has a wrong value; the gradients do not match the
        parameters that ``init`` was given; or JAX has already reduced them over
        ``reduce_axes``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> import optax_accum
      >>> tx = optax_accum.chain(optax_accum.accumulate(every=2), optax.sgd(1.0))
      >>> params = jnp.array([1.0, 2.0])
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([1.0, 0.0]), state, params, weight=3)
      >>> print(updates, optax.tree.get(state, "mini_step"))
      [0. 0.] 1
      >>> updates, state = tx.update(jnp.array([5.0, 4.0]), state, params, weight=1)
      >>> print(updates, optax.tree.get(state, "gradient_step"))
      [-2. -1.] 1

    References:
      Goyal et al., `Accurate, Large Minibatch SGD
      <https://arxiv.org/abs/1706.02677>`_, 2017: the gradient of a large batch as the
      mean over its parts, and why each part must be normalised by the size of the
      whole (section 3, equations 2 and 4).
    """
    every = arguments.check_every(every)
    schedule = every if callable(every) else None
    dtype = arguments.check_dtype(dtype)
    average_args = arguments.check_average_args(average_args)
    arguments.check_choice("reduction", reduction, ("mean", "sum"))
    arguments.check_choice("on_skip", on_skip, ("wait", "shrink"))
    arguments.check_skip(skip, on_skip)
    arguments.check_decay("noise_decay", noise_decay)
    axes = arguments.check_axes(reduce_axes)
    layout = None if sharding is None else Layout(sharding)

    def init_fn(params):
        if isinstance(params, optax.LookaheadParams):
            raise TypeError(
                "Gradients for optax.LookaheadParams are not shaped like them, so they"
                " cannot be accumulated downstream of them. Put the lookahead around:"
                " optax.lookahead(chain(...), sync_period) where sync_period counts"
                " micro-steps."
            )
        start = jnp.zeros([], jnp.int32)
        over = partial_over(axes, params)
        over.check_params(params)
        acc_grads, skipped, skip_state, noise_state = (), (), (), ()
        if schedule is not None:
            arguments.check_length(schedule(start))
        if every != 1 and layout is not None and not axes:
            acc_grads = layout.zeros(params, lambda own: sum_dtype(own, dtype))
        elif every != 1:
            acc_grads = _zeros_like(params, lambda own: sum_dtype(own, dtype), over)
        if skip is not None:
            verdict = skip(_zeros_like(params, lambda own: own), start, params)
            _, skip_state = arguments.check_verdict(verdict)
            skipped = jnp.zeros([], jnp.int32)
        if track_noise:
            zeros = over.zero_of_own(), over.zero_of_own(jnp.int32)
            noise_state = noise.on_window(lambda _: zeros, noise.start())
        return AccumulateState(
            mini_step=jnp.zeros([], jnp.int32),
            gradient_step=jnp.zeros([], jnp.int32),
            acc_grads=acc_grads,
            window_weight=over.zero(),
            released=jnp.zeros([], bool),
            every=() if schedule is None else jnp.zeros([], jnp.int32),
            acc_args={name: over.zero() for name in average_args},
            skipped=skipped,
            skip_state=jax.tree.map(jnp.array, skip_state),
            noise=noise_state,
        )

    # What tracing can decide stays a Python bool in here, so that nobody pays for what
    # they do not use: a plain `every=1` compiles to the optimizer alone.
    def micro_step(
        updates, state, params=None, *, weight=None, release=None, **extra_args
    ):
        _check_state(state, every, average_args, track_noise, skip, axes)
        over, given = partial_over(axes, updates), updates
        if layout is not None:
            over.check_scatters()
        updates = over.parts(updates)
        over.check_state(state.window_weight)
        if layout is not None and not axes:
            updates = layout.put(updates)
        part_of_noise = arguments.check_noise(extra_args.get("noise"), track_noise)
        arguments.warn_of_typos(extra_args.keys() - set(average_args))
        leaves, treedef = jax.tree.flatten(updates, is_leaf=is_none)
        grads = [jnp.asarray(g) if is_array(g) else g for g in leaves]
        if every == 1:
            accs = _zeros_like(grads, lambda own: sum_dtype(own, dtype))
        else:
            accs = _matching(over.mine(state.acc_grads), updates, dtype)

        # Accept or skip.
        accepted, skipped, skip_state = True, (), ()
        if skip is not None:
            accepted, skip_state = _judge(skip, updates, state, params, over)
            one_more = optax.safe_increment(state.skipped)
            skipped = jnp.where(accepted, state.skipped, one_more)
        counted = accepted
        if weight is not None:
            weight = arguments.check_weight(weight, state.window_weight.dtype)
            if accepted is not True:
                weight = jnp.where(accepted, weight, 0)
            counted = weight != 0

        # Add.
        window_weight = over.mine(state.window_weight)
        so_far = 0 if every == 1 else jnp.where(state.released, 0, window_weight)
        added = jnp.where(counted, 1 if weight is None else weight, 0)
        window_weight = so_far + added.astype(window_weight.dtype)
        empty = every == 1 or so_far == 0

        def accumulated(acc, x, divisor=None):
            return add(acc, x, weight, empty=empty, counted=counted, divisor=divisor)

        own_args = {n: arguments.check_average_arg(n, extra_args) for n in average_args}
        acc_args = {
            name: accumulated(acc, own_args[name])
            for name, acc in over.mine(state.acc_args).items()
        }
        noise_state, mean_square = (), ()
        if track_noise:
            if part_of_noise is None:
                square = over.squares(noise.squared_norm, grads)
                part_of_noise = noise.of_one_microbatch(square)
            noise_state = noise.add_part_of_window(
                noise.on_window(over.mine, state.noise),
                part_of_noise,
                weight,
                empty=empty,
                counted=counted,
            )
            mean_square = jnp.zeros([], float)

        # Release or not.
        mini_step = optax.safe_increment(state.mini_step)
        if on_skip == "wait":
            mini_step = jnp.where(accepted, mini_step, state.mini_step)
        length: Any = every
        if schedule is not None:
            now = arguments.check_length(schedule(state.gradient_step))
            length = jnp.where(state.every == 0, now, state.every)
        closed = every == 1 or (every is not None and mini_step >= length)
        if release is not None:
            release = arguments.check_release(release)
            if not isinstance(release, bool):
                release = over.most(release)
            closed = _any(closed, release)
        total_weight, total_args, total_noise = over.totals(
            closed, (window_weight, acc_args, noise.window_of(noise_state))
        )
        released = _all(closed, counted is True or total_weight != 0)
        divisor = jnp.where(released, total_weight, 1)
        window_args = extra_args | {
            name: _cast_like(divide(total, divisor), own_args[name])
            for name, total in total_args.items()
        }

        # The mean, where it can be had in the pass over memory that adds.
        divides = reduction == "mean" and not (every == 1 and weight is None)
        mean = treedef.unflatten(
            accumulated(acc, g, divisor if divides and not axes else None)
            if is_array(g)
            else where_else_zero(jnp.logical_not(empty), acc)
            for acc, g in zip(accs, grads, strict=True)
        )

        def downstream(mean, mean_square, params):
            del params
            if axes:
                if layout is None:
                    mean = jax.tree.map(over.total, mean)
                else:
                    mean = layout.total(mean, given)
                if reduction == "mean":
                    mean = jax.tree.map(lambda x: divide(x, divisor), mean)
            if track_noise:
                # Behind a barrier, or XLA would share its squares with those that the
                # optimizer takes, which for that would have to be written out.
                mean_square = noise.squared_norm(lax.optimization_barrier(mean))
                mean, mean_square = lax.optimization_barrier((mean, mean_square))
            means = map(_cast_like, treedef.flatten_up_to(mean), grads)
            return treedef.unflatten(means), mean_square

        def close(acc_grads, mean_square):
            noise_after = noise_state
            if isinstance(noise_after, noise.NoiseState):
                if reduction == "sum":
                    mean_square /= jnp.square(divisor)
                smoothed = noise.add_window(
                    noise.on_window(lambda _: total_noise, noise_state),
                    released,
                    mean_square,
                    total_weight,
                    noise_decay,
                )
                own = over.row(noise.window_of(noise_state))
                noise_after = noise.on_window(lambda _: own, smoothed)
            return AccumulateState(
                mini_step=jnp.where(closed, 0, mini_step),
                gradient_step=jnp.where(
                    released,
                    optax.safe_increment(state.gradient_step),
                    state.gradient_step,
                ),
                acc_grads=() if every == 1 else over.row(acc_grads),
                window_weight=over.row(window_weight),
                released=jnp.array(released),
                every=() if schedule is None else jnp.where(closed, 0, length),
                acc_args=over.row(acc_args),
                skipped=skipped,
                skip_state=skip_state,
                noise=noise_after,
            )

        back = None
        if layout is not None:
            back = functools.partial(layout.back, grads=given)
        return Window(released, mean, mean_square, window_args, downstream, close, back)

    def spread(params):
        if layout is None or params is None:  # `update` may be given none
            return params
        return layout.put(params)

    def update_fn(updates, state, params=None, **extra_args):
        window = micro_step(updates, state, params, **extra_args)
        if axes or layout is not None:  # only at a release
            return finish(window, params)
        updates, tail = window.downstream(window.mean, window.tail_state, params)
        return where_else_zero(window.released, updates), window.close(
            window.mean, tail
        )

    return Accumulation(init_fn, update_fn, micro_step, spread)


def _check_state(
    state: Any,
    every: Any,
    average_args: Sequence[str],
    track_noise: bool,
    skip: Any,
    axes: tuple[str, ...],
) -> None:
    if not isinstance(state, AccumulateState):
        raise TypeError(
            "The state of accumulate must be an AccumulateState, as from init, got"
            f" {type(state).__name__}."
        )
    scheduled, has_acc = callable(every), bool(jax.tree.leaves(state.acc_grads))
    fits = {
        "every": isinstance(state.every, tuple) != scheduled
        and not (has_acc and every == 1),
        "average_args": set(state.acc_args) == set(average_args),
        "track_noise": isinstance(state.noise, noise.NoiseState) == track_noise,
        "skip": isinstance(state.skipped, tuple) == (skip is None),
        "reduce_axes": bool(axes) or jnp.ndim(state.window_weight) == 0,
    }
    for name in fits:
        if not fits[name]:
            raise ValueError(
                f"The state is from an accumulate with another {name}, and its"
                " structure is another. Start from init and copy over what is to stay."
            )


def _zeros_like(
    tree: Any, dtype_fn: Callable[[DTypeLike], DTypeLike], over: Whole | None = None
) -> Any:
    """Zeros, laid out over devices like the tree; `None` for what is not an array."""
    over = over or Whole()

    def zeros(x):
        if not is_array(x):
            return None
        return over.zeros(x, dtype_fn(jnp.result_type(x)))

    return jax.tree.map(zeros, tree)


def _matching(acc_grads: Any, updates: Any, dtype: DTypeLike | None) -> list[Any]:
    """The accumulators for the leaves of `updates`, with `None` as a leaf."""
    accs, acc_def = jax.tree.flatten_with_path(acc_grads, is_leaf=is_none)
    grads, grad_def = jax.tree.flatten_with_path(updates, is_leaf=is_none)
    if acc_def != grad_def:
        name = jax.tree_util.keystr
        odd = sorted(name(p) for p in dict(grads).keys() - dict(accs).keys())
        missing = sorted(name(p) for p in dict(accs).keys() - dict(grads).keys())
        differs = f"unexpected: {shorten(odd)}, missing: {shorten(missing)}"
        if not odd and not missing:
            differs = "the names are the same, but the containers are of other types"
        raise ValueError(
            "The gradients must have the structure of the parameters given to init;"
            f" {differs}."
            f"\n  parameters: {shorten(acc_def)}\n  gradients:  {shorten(grad_def)}"
        )
    for (path, acc), (_, g) in zip(accs, grads, strict=True):
        if is_array(g):
            _check_fits(jax.tree_util.keystr(path) or "the root", acc, g, dtype)
    return [acc for _, acc in accs]


def _check_fits(name: str, acc: Any, g: Any, dtype: DTypeLike | None) -> None:
    grad_type = jax.typeof(g)
    if acc is None:
        raise ValueError(
            f"There is a gradient {grad_type} at {name}, where the parameters given to"
            " init have nothing to train."
        )
    _check_layout(name, jax.typeof(acc), grad_type)
    if jnp.shape(g) != acc.shape:
        raise ValueError(
            "The gradients must have the shapes of the parameters given to init; at"
            f" {name} the gradient is {grad_type}, the parameter has {acc.shape}."
        )
    wide = sum_dtype(grad_type.dtype, dtype)
    if jnp.promote_types(wide, acc.dtype) != acc.dtype:
        raise TypeError(
            f"The gradient at {name} is {grad_type}, but its accumulator {acc.dtype},"
            " from the dtype of the parameter given to init. Cast one to the other, or"
            " give accumulate a dtype."
        )


def _check_layout(name: str, acc: Any, g: Any) -> None:
    """That both are laid out alike, which an explicit mesh makes part of the type."""
    meshes = acc.sharding.mesh, g.sharding.mesh
    if partial := sorted(g.sharding.spec.unreduced - acc.sharding.spec.unreduced):
        raise ValueError(
            f"The gradient at {name} is {g}, partial over {partial}. Give accumulate"
            " these axes as reduce_axes, to reduce it at the release, or a sharding."
        )
    if not any(mesh.empty for mesh in meshes) and acc.sharding != g.sharding:
        raise ValueError(
            f"The gradient at {name} is {g}, its accumulator {acc}, as the parameter"
            " given to init. Use jax.sharding.reshard to lay the gradient out alike."
            + (f" The meshes are {meshes!r}." if meshes[0] != meshes[1] else "")
        )


def _judge(
    skip: SkipFn, updates: Any, state: AccumulateState, params: Any, over: Whole
) -> tuple[jax.Array, Any]:
    """Whether to accept a microbatch, and the state that `skip` returns with it."""
    updates = jax.tree.map(lambda g: g if is_array(g) else None, updates)
    verdict = skip(updates, state.gradient_step, params)
    should_skip, skip_state = arguments.check_verdict(verdict)
    arguments.check_should_skip(should_skip)
    skip_state = like(skip_state, state.skip_state, "The state that skip returns")
    return jnp.logical_not(over.most(should_skip)), over.most(skip_state)


def _cast_like(x: jax.Array, like: Any) -> Any:
    """A mean in the dtype of what it is a mean of, unless that is an integer's."""
    if not is_array(like):
        return like
    return x.astype(like.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else x


def _all(x: Any, y: Any) -> jax.Array | bool:
    """`x and y`, a Python `bool` where one of them settles it."""
    if isinstance(x, bool):
        return y if x else False
    if isinstance(y, bool):
        return x if y else False
    return jnp.logical_and(x, y)


def _any(x: Any, y: Any) -> jax.Array | bool:
    """`x or y`, a Python `bool` where one of them settles it."""
    if isinstance(x, bool):
        return True if x else y
    if isinstance(y, bool):
        return True if y else x
    return jnp.logical_or(x, y)

"""The window inside one step: gradients of a large batch, a microbatch at a time."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _arguments as arguments
from optax_accum._accumulate import SkipFn
from optax_accum._nnx import Modules
from optax_accum._split import Split, split_keys
from optax_accum._tree import is_array, like
from optax_accum._varying import vary_as_carry, zeros_of
from optax_accum._weighted_sum import add, divide, sum_dtype

AUX = ("mean", "sum", "stack", "last")


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] = 1,
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    weight: Callable[..., ArrayLike] | None = None,
    key_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    aux: Any = "mean",
    dtype: DTypeLike | None = None,
    skip: SkipFn | None = None,
) -> Callable[..., Any]:
    r""":func:`jax.value_and_grad` of a large batch that holds one microbatch at a time.

    The batch is taken in microbatches, one after the other in a ``lax.scan``, and value
    and gradients are the means over them under their weights,

    .. math:: \bar g = \sum_i w_i g_i \,/\, \sum_i w_i .

    With the default weight, a microbatch's number of examples, that is the gradient of
    a loss that is a mean over the examples of its batch. Any batch size will do: 10
    examples in microbatches of 4 are 4, 4 and 2 of them, without padding.

    Which examples go together is not said. They are chosen so that a batch sharded over
    devices is split with no communication, each device keeping its own, where its
    shards divide evenly into microbatches.

    Args:
      fun: the loss. It returns a scalar, the mean over its batch; with ``has_aux``, the
        scalar and a pytree.
      argnums: which positional arguments to differentiate with respect to. A Flax NNX
        module may be among them: its ``nnx.Param`` are differentiated, as by
        ``nnx.value_and_grad``, and the rest of its state (batch statistics, counts of
        random streams) is carried from microbatch to microbatch and updated in it.
        Batch normalisation thus normalises each microbatch by its own statistics,
        and its running averages move once for each: not what one large batch does.
      has_aux: whether ``fun`` returns a pair of value and auxiliary output.
      batch_argnums: which positional arguments are the batch: pytrees of arrays with
        the examples along the leading axis, as many in all of them.
      microbatch_size: examples to a microbatch. More than there are: all at once.
      num_microbatches: or how many microbatches of equal size, to rounding up; fewer if
        that uses all examples up.
      weight: the weight of a microbatch in the means, a function of the arguments that
        ``fun`` gets which returns a real scalar, 0 or more; for example the number of
        tokens that are not masked. A microbatch of weight 0 adds nothing, not even NaN;
        if all are, value and gradients are 0.
      key_argnums: which positional arguments are random keys, old-style or new. Each
        microbatch gets one of its own, split from the one that is given.
      carry_argnums: which positional arguments are carried from microbatch to
        microbatch, such as Linen's ``batch_stats``. ``fun`` then returns
        ``(value, (carry, aux))``, with ``carry`` a new such argument, a tuple of them
        if ``carry_argnums`` is a sequence. What is said above of batch normalisation
        holds.
      aux: what becomes of the auxiliary outputs of all microbatches; for all of them,
        or a pytree prefix of them: ``"mean"``, by weight; ``"sum"``, not weighted;
        ``"stack"``, concatenated along the leading axis, which must be that of the
        examples, in the order of the batch; or ``"last"``.
      dtype: floating dtype in which to add up and to return the gradients. By default
        they are added up in at least float32 and returned in their own.
      skip: which microbatches to leave out, see :func:`optax_accum.accumulate`, here
        with a ``gradient_step`` of 0 and no state from one microbatch to the next. One
        that is left out is in no mean, sum or "last", and its carry is dropped.

    Returns:
      A function with the arguments of ``fun`` that returns what
      ``jax.value_and_grad(fun, argnums, has_aux)`` returns.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: an argument has a wrong value; or, when the function is called, there
        is no batch, its sizes differ, or the loss or the weight is not a scalar.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params) ** 2)
      >>> loss_and_grad = optax_accum.value_and_grad(loss_fn, microbatch_size=2)
      >>> params, batch = jnp.array([1.0, 2.0]), jnp.arange(10.0).reshape(5, 2)
      >>> loss, grads = jax.jit(loss_and_grad)(params, batch)
      >>> print(loss, grads)
      268.0 [160. 188.]
      >>> loss, grads = jax.value_and_grad(loss_fn)(params, batch)
      >>> print(loss, grads)
      268.0 [160. 188.]

    References:
      Goyal et al., `Accurate, Large Minibatch SGD
      <https://arxiv.org/abs/1706.02677>`_, 2017, section 3.
    """
    arguments.check_function("fun", fun)
    single = not isinstance(argnums, Sequence)
    plain_argnums, filters = arguments.check_trained(argnums)
    numbers = {
        "argnums": plain_argnums,
        "batch_argnums": arguments.check_argnums("batch_argnums", batch_argnums),
        "key_argnums": arguments.check_argnums("key_argnums", key_argnums),
        "carry_argnums": arguments.check_argnums("carry_argnums", carry_argnums),
    }
    arguments.check_microbatches(microbatch_size, num_microbatches)
    if weight is not None:
        arguments.check_function("weight", weight)
    arguments.check_skip(skip, "wait")
    dtype = arguments.check_dtype(dtype)
    for mode in jax.tree.leaves(aux):
        arguments.check_choice("aux", mode, AUX)
    if not has_aux and (numbers["carry_argnums"] or aux != "mean"):
        name = "carry_argnums" if numbers["carry_argnums"] else "aux"
        raise ValueError(f"{name} needs has_aux=True, and a fun that returns it.")

    @functools.wraps(fun)
    def value_and_grad_fn(*args, **kwargs):
        args, kwargs = _by_position(fun, args, kwargs)
        trained, batched, keyed, carried = arguments.resolve_argnums(numbers, args)
        batch_size = arguments.check_batch({i: args[i] for i in batched})
        size = microbatch_size or -(-batch_size // (num_microbatches or 1))
        split = Split.of(batch_size, size)
        arguments.check_layout({i: args[i] for i in batched}, split)
        same = {
            i: x for i, x in enumerate(args) if i not in (*batched, *keyed, *carried)
        }
        modules = Modules(same | kwargs, dict(zip(trained, filters, strict=True)))
        params = tuple(modules.inputs[i] for i in trained)
        arguments.check_differentiable(dict(zip(trained, params, strict=True)))

        # What differs from one microbatch to the next is an argument here too. What
        # else `fun` gets is the same for all, and does not have to be made of arrays.
        @functools.partial(jax.jit, inline=True)
        def one(batch, keys, carry):
            carry_args, module_state = carry
            inputs = modules.inputs | batch | keys | carry_args

            def call(f, inputs):
                inputs, current_state = modules.merge(inputs, module_state)
                positional = [inputs[i] for i in range(len(args))]
                return f(*positional, **{k: inputs[k] for k in kwargs}), current_state

            def loss_fn(params):
                here = dict(zip(trained, params, strict=True))
                out, current_state = call(fun, inputs | here)
                value, out = arguments.check_out(out) if has_aux else (out, ())
                new = {}
                if carried:
                    new, out = arguments.check_pair("fun in its aux", out)
                    new = (new,) if isinstance(carry_argnums, int) else new
                    arguments.check_carry(new, len(carried))
                    new = dict(zip(carried, new, strict=True))
                arguments.check_arrays("fun in its aux", out)
                return arguments.check_loss(value), (out, (new, current_state()))

            (value, (out, new)), grads = _value_and_grad(loss_fn, params)
            whole = params
            if single:
                (whole,), (grads,) = params, grads
            counts, counted = None, None
            if skip is not None:
                verdict = skip(grads, jnp.zeros([], jnp.int32), whole)
                skipped, _ = arguments.check_pair("skip", verdict)
                arguments.check_should_skip(skipped)
                counted = jnp.logical_not(skipped)
            if weight is not None:
                counts, _ = call(weight, inputs)
                counts = arguments.check_weight(counts, float)
                if counted is not None:
                    counts = jnp.where(counted, counts, 0)
                counted = counts != 0
            new = like(new, carry, "What fun carries on", cast=False)
            return _Part((value, grads, out), new, counts, counted)

        batch = {i: args[i] for i in batched}
        keys = split_keys({i: args[i] for i in keyed}, split.microbatches)
        carry = {i: args[i] for i in carried}, modules.state
        slots, treedef = _slots(one, split, batch, keys, carry, aux, dtype)

        def take(sums, batch, keys, share, empty=False):
            part = one(batch, keys, sums.carry)
            if split.microbatches == 1:  # a mean over one, whatever its weight
                part, share = part._replace(weight=None), 1
            return _add(slots, sums, part, share, empty)

        def step(sums, xs, empty=False):
            i, keys = xs
            share = split.size // split.blocks
            return take(sums, split.full(batch, i), keys, share, empty)

        def key(i):
            return jax.tree.map(lambda x: x[i], keys)

        sums = _Sums(jnp.zeros([], float), [slot.zeros() for slot in slots], carry)
        if split.whole == 1:
            sums, stacks = step(sums, (0, key(0)), empty=True)
            stacks = [x[None] for x in stacks]
        else:
            xs = jnp.arange(split.whole), key(slice(split.whole))
            sums = vary_as_carry(step, sums, (0, key(0)))
            sums, stacks = lax.scan(step, sums, xs)
        rests = [None] * len(stacks)
        if split.rest:
            share = split.rest // split.blocks
            sums, rests = take(sums, split.last(batch), key(-1), share)

        carry_args, module_state = sums.carry
        modules.update(module_state)
        joined = map(split.join, stacks, rests)
        divisor = jnp.where(sums.weight == 0, 1, sums.weight)
        value, grads, out = treedef.unflatten(
            next(joined) if slot.mode == "stack" else slot.result(x, divisor)
            for slot, x in zip(slots, sums.leaves, strict=True)
        )
        if carried:
            new = tuple(carry_args[i] for i in carried)
            out = (new[0] if isinstance(carry_argnums, int) else new, out)
        return ((value, out), grads) if has_aux else (value, grads)

    return value_and_grad_fn


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """:func:`optax_accum.value_and_grad` without the value, like :func:`jax.grad`.

    Args:
      fun: the loss.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether ``fun`` returns a pair of value and auxiliary output.
      **options: the other arguments of :func:`optax_accum.value_and_grad`.

    Returns:
      A function with the arguments of ``fun`` that returns the gradients; with
      ``has_aux``, the gradients and the auxiliary output.

    Raises:
      TypeError, ValueError: as ``value_and_grad``.

    Examples:
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch @ params) ** 2)
      >>> grad_fn = optax_accum.grad(loss_fn, num_microbatches=2)
      >>> print(grad_fn(jnp.array([1.0, 2.0]), jnp.arange(10.0).reshape(5, 2)))
      [160. 188.]
    """
    value_and_grad_fn = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def grad_fn(*args, **kwargs):
        value, grads = value_and_grad_fn(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_fn


def _value_and_grad(loss_fn: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
    """With auxiliary output, and by the arrays in `params`; `None` for other leaves."""
    leaves, treedef = jax.tree.flatten(params)
    slots = [i for i, x in enumerate(leaves) if is_array(x)]

    def fill(rest, arrays):
        filled = list(rest)
        for i, x in zip(slots, arrays, strict=True):
            filled[i] = x
        return treedef.unflatten(filled)

    out, grads = jax.value_and_grad(
        lambda arrays: loss_fn(fill(leaves, arrays)), has_aux=True
    )([leaves[i] for i in slots])
    return out, fill([None] * len(leaves), grads)


class _Part(NamedTuple):
    """What one microbatch gives; `None` for the usual weight, or if it must count."""

    out: Any
    carry: Any
    weight: jax.Array | None
    counted: jax.Array | None


class _Sums(NamedTuple):
    """What is kept of all microbatches so far."""

    weight: jax.Array
    leaves: list[Any]
    carry: Any


class _Slot(NamedTuple):
    """What becomes of one array that each microbatch gives: value, gradient or aux."""

    mode: str
    type: Any
    sum_dtype: jnp.dtype
    dtype: jnp.dtype

    @classmethod
    def of(cls, mode: str, x: Any, given: DTypeLike | None = None) -> "_Slot":
        inexact = jnp.issubdtype(x.dtype, jnp.inexact)
        wide = sum_dtype(x.dtype, given)
        if mode == "sum" and not inexact:  # whole numbers stay whole
            wide = jnp.promote_types(x.dtype, jnp.int32)
        elif mode in ("last", "stack"):
            wide = x.dtype
        own = x.dtype if inexact and given is None else wide
        return cls(mode, x, wide, own)

    def zeros(self) -> Any:
        if self.mode == "stack":
            return ()
        return zeros_of(self.type, self.sum_dtype)

    def add(
        self, acc: Any, x: jax.Array, weight: Any, empty: bool, counted: Any
    ) -> Any:
        if self.mode == "stack":
            return ()
        if self.mode == "last":
            return jnp.where(counted, x, acc)
        if jnp.issubdtype(self.sum_dtype, jnp.integer):
            return jnp.where(counted, acc + x, acc)
        weight = weight if self.mode == "mean" else None
        return add(acc, x, weight, empty=empty, counted=counted)

    def result(self, acc: jax.Array, divisor: jax.Array) -> jax.Array:
        if self.mode == "last":  # of any dtype, a random key's too
            return acc
        return (divide(acc, divisor) if self.mode == "mean" else acc).astype(self.dtype)


def _slots(one, split, batch, keys, carry, aux, dtype) -> tuple[list[_Slot], Any]:
    """A slot for each array in value, gradients and aux; and how they are nested."""
    noted = []

    def note(batch, keys, carry):
        keys = jax.tree.map(lambda x: x[0], keys)
        for part in (
            split.full(batch, 0),
            *([split.last(batch)] if split.rest else []),
        ):
            noted.append(jax.tree.map(jax.typeof, one(part, keys, carry).out))

    jax.eval_shape(note, batch, keys, carry)
    value, grads, out = types = noted[0]
    others = jax.tree.leaves(noted[-1][2])
    try:
        modes = jax.tree.map(lambda mode, x: jax.tree.map(lambda _: mode, x), aux, out)
    except ValueError:
        raise ValueError(
            "aux must be one of the words, or a pytree prefix of what fun returns as"
            f" its auxiliary output, got {aux!r} for {jax.tree.structure(out)}."
        ) from None
    slots = [_Slot.of("mean", value)]
    slots += [_Slot.of("mean", g, dtype) for g in jax.tree.leaves(grads)]
    for mode, (path, x), last in zip(
        jax.tree.leaves(modes), jax.tree.leaves_with_path(out), others, strict=True
    ):
        at = jax.tree_util.keystr(path) or "the root"
        if mode == "stack" and x.shape[:1] != (split.size,):
            raise ValueError(
                'aux="stack" needs arrays with the examples along their leading axis,'
                f" here {split.size} of them; at {at} there is {x}."
            )
        if mode != "stack" and x.shape != last.shape:
            raise ValueError(
                f"The auxiliary output at {at} is {x} for a microbatch of {split.size}"
                f" examples and {last} for the last one, of {split.rest}, so there is"
                f' no {mode} of it. If it has a row for each example, say aux="stack".'
            )
        slots.append(_Slot.of(mode, x))
    return slots, jax.tree.structure(types)


def _add(
    slots: list[_Slot], sums: _Sums, part: _Part, share: int, empty: bool
) -> tuple[_Sums, list[jax.Array]]:
    """The sums with one more microbatch, and what is to be stacked of it."""
    weight = part.weight
    if weight is None and share != 1:
        weight = share
    counted: Any = True if part.counted is None else part.counted
    out = jax.tree.leaves(part.out)
    leaves = [
        slot.add(acc, x, weight, empty, counted)
        for slot, acc, x in zip(slots, sums.leaves, out, strict=True)
    ]
    added = jnp.where(counted, 1 if weight is None else weight, 0)
    carry = part.carry
    if part.counted is not None:
        carry = jax.tree.map(
            lambda new, old: jnp.where(counted, new, old), carry, sums.carry
        )
    stacked = [x for slot, x in zip(slots, out, strict=True) if slot.mode == "stack"]
    return _Sums(sums.weight + added, leaves, carry), stacked


def _by_position(
    fun: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The same arguments, as many as possible by position, for numbers to find them."""
    try:
        bound = inspect.signature(fun).bind(*args, **kwargs)
    except (TypeError, ValueError):  # `fun` itself says best what is wrong with them
        return args, kwargs
    return bound.args, bound.kwargs

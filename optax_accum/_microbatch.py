"""The window inside one step: gradients of a large batch, a microbatch at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from optax_accum import _arguments as arguments
from optax_accum._accumulate import SkipFn
from optax_accum._nnx import Modules
from optax_accum._partial import Whole
from optax_accum._reduction import MODES, Part
from optax_accum._roles import find_arguments
from optax_accum._scan import add_up
from optax_accum._split import Split
from optax_accum._spread import spread
from optax_accum._tree import differentiable, is_array, like, put


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
    track_noise: bool = False,
    reduce_axes: str | Sequence[str] = (),
) -> Callable[..., Any]:
    r""":func:`jax.value_and_grad` of a large batch that holds one microbatch at a time.

    The batch is taken in microbatches, one after the other in a ``lax.scan``, and value
    and gradients are the means over them under their weights,

    .. math:: \bar g = \sum_i w_i g_i \,/\, \sum_i w_i .

    With the default weight, a microbatch's number of examples, that is the gradient of
    a loss that is a mean over the examples of its batch. Any batch size will do: 10
    examples in microbatches of 4 are 4, 4 and 2 of them, without padding.

    Call it inside ``jax.jit``, as any training step (``nnx.jit`` if modules of NNX are
    to be updated); outside, each call compiles anew.

    A microbatch takes its examples from all over the batch, so neighbours are in
    different ones, as far as its size and what is left over have divisors in common. A
    batch that is sharded over devices is thus split with no communication, each device
    keeping its own, if both (counted over all devices) are multiples of their number.

    Args:
      fun: the loss. It returns a scalar, the mean over its batch; with ``has_aux``, the
        scalar and a pytree.
      argnums: which positional arguments to differentiate with respect to. Leaves that
        are functions, and in an Equinox model all that ``eqx.filter_grad`` does not
        differentiate, have ``None`` for gradients.
        Of a Flax NNX module the ``nnx.Param`` are differentiated, or what an
        ``nnx.DiffState`` says, as by ``nnx.value_and_grad``. What else NNX objects
        hold, in whichever argument (batch statistics, random streams, metrics), is
        carried from microbatch to microbatch and updated in them; what ``fun`` assigns
        to a variable that is differentiated is dropped. Batch normalisation thus
        normalises each microbatch by its own statistics, and its running averages move
        once for each: not what one large batch does.
      has_aux: whether ``fun`` returns a pair of value and auxiliary output.
      batch_argnums: which positional arguments are the batch: pytrees of arrays with
        the examples along the leading axis, as many in all of them. All other arguments
        are the same for every microbatch.
      microbatch_size: examples to a microbatch. More than there are: all at once.
      num_microbatches: or how many microbatches of equal size, to rounding up; fewer if
        that uses all examples up.
      weight: the weight of a microbatch in the means, a function of the arguments that
        ``fun`` gets which returns a real scalar, 0 or more; for example the number of
        tokens that are not masked. A microbatch of weight 0 adds nothing, not even NaN,
        and its carry is dropped; if all are of weight 0, value and gradients are 0.
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
        examples, in the order of the batch, with those left out; or ``"last"``. An
        array with a row for each example has to be stacked.
      dtype: floating dtype in which to add up and to return the gradients. By default
        they are added up in at least float32 and returned in their own. What is added
        up is the weighted sum, which in float16 soon overflows.
      skip: which microbatches to leave out, see :func:`optax_accum.accumulate`, here
        with a ``gradient_step`` of 0 and no state from one microbatch to the next. One
        that is left out is in no mean, sum or "last", and its carry is dropped. (The
        ``"sum"`` of a 1 in ``aux`` tells how many there were that are not.)
      track_noise: return as a third result what :func:`optax_accum.noise_scale` reads,
        for one more read of each microbatch's gradient: scalars with the estimates of
        this batch alone. To smooth them over batches, give them to ``update`` as
        ``noise``; see :func:`optax_accum.accumulate`.
      reduce_axes: mesh axes over which the batch is sharded, and the parameters are
        replicated. Each device then adds up the gradients of its own examples, and one
        reduction follows the last microbatch, where JAX by itself has one for each.
        The scan goes into a :func:`jax.shard_map` over these axes, unless it is in one
        already; all others stay as they are. ``fun``, ``weight`` and ``skip`` then get
        what one device has, and each device a random key of its own. What one device
        has of a microbatch adds nothing if its weight is 0; what ``skip`` leaves out on
        one device is left out on all. What is carried on must be the same on all
        devices (:func:`jax.lax.pmean`, or ``axis_name`` of a batch normalisation); it
        goes on if any device has weight, and for them to agree on that, one number is
        sent for each microbatch. There is no ``aux="last"``.

    Returns:
      A function with the arguments of ``fun`` that returns what
      ``jax.value_and_grad(fun, argnums, has_aux)`` returns, and the noise if tracked.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: an argument has a wrong value; or, when the function is called, there
        is no batch, its sizes differ, the loss or the weight is not a scalar, there is
        no mesh with ``reduce_axes`` or the batch cannot be divided among its devices,
        or in a ``shard_map`` the weight, or what ``skip`` says, differs from device to
        device and a gradient, summed over them by JAX, does not.

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
    single, single_carry = (
        not isinstance(x, Sequence) for x in (argnums, carry_argnums)
    )
    plain_argnums, filters = arguments.check_trained(argnums)
    numbers = {
        "argnums": plain_argnums,
        "batch_argnums": arguments.check_argnums("batch_argnums", batch_argnums),
        "key_argnums": arguments.check_argnums("key_argnums", key_argnums),
        "carry_argnums": arguments.check_argnums("carry_argnums", carry_argnums),
    }
    microbatch_size, num_microbatches = arguments.check_microbatches(
        microbatch_size, num_microbatches
    )
    if weight is not None:
        arguments.check_function("weight", weight)
    arguments.check_skip(skip, "wait")
    dtype = arguments.check_dtype(dtype)
    axes = arguments.check_axes(reduce_axes)
    for mode in jax.tree.leaves(aux):
        arguments.check_choice("aux", mode, MODES)
    if not has_aux and (numbers["carry_argnums"] or aux != "mean"):
        name = "carry_argnums" if numbers["carry_argnums"] else "aux"
        raise ValueError(f"{name} needs has_aux=True, and a fun that returns it.")

    @functools.wraps(fun)
    def value_and_grad_fn(*args, **kwargs):
        given = {str(i): x for i, x in enumerate(args)} | kwargs
        trained, batched, keyed, carried = find_arguments(fun, args, kwargs, numbers)
        batch, keys, carry = (
            {name: given.pop(name) for name in role}
            for role in (batched, keyed, carried)
        )
        modules = Modules(given, dict(zip(trained, filters, strict=True)))
        arguments.check_batch(batch)
        params = tuple(modules.inputs[name] for name in trained)
        arguments.check_differentiable(dict(zip(trained, params, strict=True)))

        def call(f, inputs, module_state):
            inputs, current_state = modules.merge(inputs, module_state)
            by_name = {name: inputs[name] for name in kwargs}
            by_position = (inputs[str(i)] for i in range(len(args)))
            return f(*by_position, **by_name), current_state

        def window(over, inputs, batch, keys, carry):
            """The results of all microbatches that are here."""
            batch_size = len(jax.tree.leaves(batch)[0])
            if num_microbatches is None:
                size = over.microbatch_size(microbatch_size)
            else:
                size = -(-batch_size // num_microbatches)
            split = Split.of(batch_size, size)
            arguments.check_layout(batch, split)
            params = tuple(_defer(over, inputs[name]) for name in trained)
            carry, module_state = carry
            carry = carry, _own_streams(over, module_state)

            # What differs from one microbatch to the next is an argument here too. What
            # else `fun` gets is the same for all, and need not be made of arrays.
            @functools.partial(jax.jit, inline=True)
            def one(batch, keys, carry):
                carry, module_state = carry
                now = inputs | batch | keys | carry

                def loss_fn(params):
                    here = now | dict(zip(trained, params, strict=True))
                    out, current_state = call(fun, here, module_state)
                    value, out = arguments.check_out(out) if has_aux else (out, ())
                    new = ()
                    if carried:
                        new, out = arguments.check_aux_of_carry(out)
                        new = (new,) if single_carry else new
                        arguments.check_carry(new, len(carried))
                    arguments.check_arrays("fun in its aux", out)
                    over.check_loss(value := arguments.check_loss(value))
                    return value, (out, new, current_state())

                (value, (out, new, new_state)), grads = _value_and_grad(loss_fn, params)
                new = dict(zip(carried, new, strict=True))
                new = like(new, carry, "What fun carries on", exact=True)
                new_state = like(
                    new_state, module_state, "A module's state", exact=True
                )
                counts, counted = None, None
                if skip is not None:
                    step = jnp.zeros([], jnp.int32)
                    verdict = skip(_one(single, grads), step, _one(single, params))
                    skipped, _ = arguments.check_verdict(verdict)
                    arguments.check_should_skip(skipped)
                    counted = jnp.logical_not(over.most(skipped))
                if weight is not None:
                    here = now | dict(zip(trained, params, strict=True))
                    counts, _ = call(weight, here, module_state)
                    counts = arguments.check_weight(counts, float)
                    if counted is not None:
                        counts = jnp.where(counted, counts, 0)
                    counted = counts != 0
                carried_on = new, new_state
                if counted is not None and jax.tree.leaves(carried_on):
                    # The devices have to agree on what goes on.
                    kept = counted if weight is None else over.most(counted)
                    carried_on = jax.tree.map(
                        lambda new, old: jnp.where(kept, new, old),
                        carried_on,
                        (carry, module_state),
                    )
                return Part((value, grads, out), carried_on, counts, counted)

            found = add_up(
                one, split, batch, keys, carry, aux, dtype, track_noise, over
            )
            carry, new_state = found.carry
            new_state = _old_streams(new_state, module_state)
            return found._replace(carry=(carry, new_state))

        found = spread(
            window, axes, modules.inputs, batch, keys, (carry, modules.state)
        )
        value, grads, out = found.out
        carry, module_state = found.carry
        modules.update(module_state)
        grads = _one(single, grads)
        if carried:
            out = _one(single_carry, tuple(carry[name] for name in carried)), out
        result = ((value, out), grads) if has_aux else (value, grads)
        return (*result, found.noise) if track_noise else result

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
      A function with the arguments of ``fun`` that returns the gradients; after them,
      with ``has_aux``, the auxiliary output and, with ``track_noise``, the noise.

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
        value, *rest = value_and_grad_fn(*args, **kwargs)
        if has_aux:
            rest.insert(1, value[1])
        return tuple(rest) if len(rest) > 1 else rest[0]

    return grad_fn


def _value_and_grad(loss_fn: Callable[[Any], Any], params: Any) -> tuple[Any, Any]:
    """With auxiliary output. What is not to be differentiated has `None`."""
    leaves, treedef = jax.tree.flatten(params)
    chosen = [differentiable(tree)(x) for tree in params for x in jax.tree.leaves(tree)]
    slots = [i for i, x in enumerate(chosen) if x]

    def of_arrays(arrays):
        return loss_fn(treedef.unflatten(put(leaves, slots, arrays)))

    arrays = [leaves[i] for i in slots]
    out, grads = jax.value_and_grad(of_arrays, has_aux=True)(arrays)
    return out, treedef.unflatten(put([None] * len(leaves), slots, grads))


def _one(single: bool, items: tuple) -> Any:
    return items[0] if single else items


def _defer(over: Whole, params: Any) -> Any:
    """Parameters whose gradients stay on the devices."""
    over.check_params(params)
    chosen = differentiable(params)
    return jax.tree.map(
        lambda x: over.defer(jnp.asarray(x)) if chosen(x) else x, params
    )


def _own_streams(over: Whole, state: Any) -> Any:
    """The random streams of modules, drawing other numbers on each device."""
    return jax.tree.map(lambda x: over.key(x) if _is_key(x) else x, state)


def _old_streams(state: Any, old: Any) -> Any:
    """The state with the keys that came in; what has been drawn is in a counter."""
    return jax.tree.map(lambda x, y: y if _is_key(y) else x, state, old)


def _is_key(x: Any) -> bool:
    return is_array(x) and jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)

"""What becomes of the arrays that each microbatch gives: value, gradients, aux."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from optax_accum import _noise as noise
from optax_accum._partial import Whole
from optax_accum._split import Split
from optax_accum._varying import axes_of, zeros_of
from optax_accum._weighted_sum import add, sum_dtype

MODES = ("mean", "sum", "stack", "last")


class Part(NamedTuple):
    """What one microbatch gives.

    Attributes:
      out: its value, gradients and auxiliary output.
      carry: what goes on to the next one.
      weight: float scalar, or `None` for the usual weight.
      counted: boolean scalar, or `None` if it counts in any case.
    """

    out: Any
    carry: Any
    weight: jax.Array | None
    counted: jax.Array | None


class Sums(NamedTuple):
    """What is kept of all microbatches so far.

    Attributes:
      weight: float scalar, the sum of their weights.
      leaves: the sums, or what else becomes of each array.
      carry: what goes on to the next microbatch.
      noise: of the gradients, if that is tracked.
    """

    weight: jax.Array
    leaves: list[Any]
    carry: Any
    noise: noise.NoiseState | tuple[()]


class Reduction(NamedTuple):
    """How to reduce one array over the microbatches.

    Attributes:
      mode: one of `MODES`.
      type: of the array, as `jax.typeof` gives it.
      sum_dtype: the dtype in which to add it up.
      dtype: the dtype of the result.
    """

    mode: str
    type: Any
    sum_dtype: jnp.dtype
    dtype: jnp.dtype

    @classmethod
    def of(cls, mode: str, x: Any, given: DTypeLike | None = None) -> "Reduction":
        if mode in ("last", "stack"):
            return cls(mode, x, x.dtype, x.dtype)
        wide = sum_dtype(x.dtype, given)
        if mode == "sum" and not jnp.issubdtype(x.dtype, jnp.inexact):
            # Whole numbers stay whole.
            unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
            wide = jnp.dtype(jnp.uint32 if unsigned else jnp.int32)
            wide = max(wide, x.dtype, key=lambda dtype: dtype.itemsize)
        own = jnp.issubdtype(x.dtype, jnp.inexact) and given is None
        return cls(mode, x, wide, x.dtype if own else wide)

    def zeros(self) -> Any:
        if self.mode == "stack":
            return ()
        return zeros_of(self.type, self.sum_dtype)

    def add(
        self,
        acc: Any,
        x: jax.Array,
        weight: Any,
        *,
        empty: bool,
        counted: Any,
        divisor: Any,
    ) -> Any:
        if self.mode == "stack":
            return ()
        if self.mode == "last":
            return jnp.where(counted, x, acc)
        if jnp.issubdtype(self.sum_dtype, jnp.integer):
            return jnp.where(counted, acc + x.astype(acc.dtype), acc)
        if self.mode == "sum":
            return add(acc, x, empty=empty, counted=counted)
        return add(acc, x, weight, empty=empty, counted=counted, divisor=divisor)

    def result(self, acc: jax.Array) -> jax.Array:
        # What is "last" may be of any dtype, a random key's too.
        return acc if self.mode == "last" else acc.astype(self.dtype)


def plan(
    one: Callable[..., Part],
    split: Split,
    batch: Any,
    keys: Any,
    carry: Any,
    aux: Any,
    dtype: DTypeLike | None,
    over: Whole,
) -> tuple[list[Reduction], Any]:
    """A reduction for each array that `one` gives, and how these arrays are nested.

    Raises:
      TypeError, ValueError: the auxiliary output does not fit its modes in `aux`.
    """
    parts = _types(one, split, batch, keys, carry)
    for part in parts:
        _check_agreement(part)
    types = [part.out for part in parts]
    value, grads, out = types[0]
    structure, of_last = map(jax.tree.structure, (out, types[-1][2]))
    if structure != of_last:
        raise ValueError(
            "fun must return the same auxiliary output for each microbatch, but for one"
            f" of {split.size} examples it is {structure}, and {of_last} for the last"
            f" one, of {split.rest}."
        )
    try:
        modes = jax.tree.map(lambda mode, x: jax.tree.map(lambda _: mode, x), aux, out)
    except ValueError:
        raise ValueError(
            "aux must be one of the words, or a pytree prefix of what fun returns as"
            f" its auxiliary output, got {aux!r} for {jax.tree.structure(out)}."
        ) from None
    reductions = [Reduction.of("mean", value)]
    reductions += [Reduction.of("mean", g, dtype) for g in jax.tree.leaves(grads)]
    rests = jax.tree.leaves(types[-1][2])
    for mode, (path, x), rest in zip(
        jax.tree.leaves(modes), jax.tree.leaves_with_path(out), rests, strict=True
    ):
        at = jax.tree_util.keystr(path) or "the root"
        if mode == "last" and over.axes:
            raise ValueError(
                f'aux="last" at {at} is of one device; with reduce_axes={over.axes!r}'
                ' say "mean", "sum" or "stack".'
            )
        _check_mode(mode, at, x, rest, split)
        reductions.append(Reduction.of(mode, x))
    if not split.rest and split.microbatches > 1:
        _check_no_rows(one, split, batch, keys, carry, modes, out)
    return reductions, jax.tree.structure(types[0])


def _types(
    one: Callable[..., Part], split: Split, batch: Any, keys: Any, carry: Any
) -> list[Part]:
    """The types of what `one` gives of a whole microbatch, and of the rest if any."""
    takes = [lambda batch: split.full(batch, 0)] + [split.last] * (split.rest > 0)
    return [_types_of(one, take, batch, keys, carry) for take in takes]


def _types_of(
    one: Callable[..., Part],
    take: Callable[[Any], Any],
    batch: Any,
    keys: Any,
    carry: Any,
) -> Part:
    noted = []

    def note(batch, keys, carry):
        key = jax.tree.map(lambda x: x[0], keys)
        noted.append(jax.tree.map(jax.typeof, one(take(batch), key, carry)))

    jax.eval_shape(note, batch, keys, carry)
    return noted[0]


def _check_agreement(part: Part) -> None:
    """That no device weights a gradient otherwise than the devices it is the sum over.

    JAX sums a gradient over the devices over which the parameter does not vary, and
    then it is too late to weight what each of them had.
    """
    ours = axes_of(part.weight) if part.weight is not None else frozenset()
    ours |= axes_of(part.counted) if part.counted is not None else frozenset()
    for path, g in jax.tree.leaves_with_path(part.out[1]):
        if extra := sorted(ours - axes_of(g)):
            raise ValueError(
                f"The weight, or what skip says, varies over the mesh axes {extra}, but"
                f" the gradient {jax.tree_util.keystr(path)} does not: JAX has summed"
                " it over them. Give value_and_grad these axes as reduce_axes, for it"
                " to reduce what is weighted; or make them agree (jax.lax.psum)."
            )


def _check_mode(mode: str, at: str, x: Any, rest: Any, split: Split) -> None:
    """That an auxiliary output, and that of the last microbatch, can be so reduced."""
    if mode == "stack":
        for out, size in ((x, split.size), (rest, split.rest or split.size)):
            if out.shape[:1] != (size,):
                raise ValueError(
                    'aux="stack" needs arrays with the examples along their leading'
                    f" axis, here {size} of them; at {at} there is {out}."
                )
    if x.dtype != rest.dtype:
        raise TypeError(
            f"The auxiliary output at {at} is {x} for a microbatch of {split.size}"
            f" examples and {rest} for the last one, of {split.rest}. It must be of one"
            " dtype."
        )
    if mode != "stack" and x.shape != rest.shape:
        raise ValueError(
            f"The auxiliary output at {at} is {x} for a microbatch of {split.size}"
            f" examples and {rest} for the last one, of {split.rest}, so there is no"
            f' {mode} of it. If it has a row for each example, say aux="stack".'
        )
    if mode in ("mean", "sum") and not (
        jnp.issubdtype(x.dtype, jnp.number) or x.dtype == jnp.bool_
    ):
        raise TypeError(
            f'The auxiliary output at {at} is {x}, which has no {mode}. Say aux="last"'
            ' or aux="stack" for it.'
        )


def _check_no_rows(
    one: Callable[..., Part],
    split: Split,
    batch: Any,
    keys: Any,
    carry: Any,
    modes: Any,
    out: Any,
) -> None:
    """That no rows of examples are added up, where no other size has shown them.

    They are as long as a microbatch, and of one twice as large twice as long.
    """
    leaves = jax.tree.leaves_with_path(out)
    looks = [
        mode != "stack" and x.shape[:1] == (split.size,)
        for mode, (_, x) in zip(jax.tree.leaves(modes), leaves, strict=True)
    ]
    if not any(looks):
        return
    twice = Split.of(split.whole * split.size, 2 * split.size)
    try:
        larger = _types_of(one, lambda x: twice.full(x, 0), batch, keys, carry).out[2]
    except Exception:  # it may be made for its size alone
        return
    if jax.tree.structure(larger) != jax.tree.structure(out):
        return
    for (path, x), y, look in zip(leaves, jax.tree.leaves(larger), looks, strict=True):
        if look and y.shape[:1] == (2 * split.size,):
            raise ValueError(
                f"The auxiliary output at {jax.tree_util.keystr(path) or 'the root'} is"
                f" {x} for a microbatch of {split.size} examples and {y} for one of"
                f' {2 * split.size}. It has a row for each example: say aux="stack".'
            )


def add_part(
    reductions: list[Reduction],
    sums: Sums,
    part: Part,
    share: int,
    *,
    first: bool,
    last: jax.Array | bool,
) -> tuple[Sums, list[jax.Array]]:
    """The sums with one more microbatch, and what is to be stacked of it.

    Without a weight of its own the microbatch has that of its `share`. With the last
    one the weighted sums become means, in the same pass over memory.
    """
    weight = part.weight
    if weight is None and share != 1:
        weight = share
    counted: Any = True if part.counted is None else part.counted
    added = jnp.where(counted, 1 if weight is None else weight, 0)
    total = sums.weight + added.astype(sums.weight.dtype)
    divisor = jnp.where(jnp.logical_and(last, total != 0), total, 1)
    out = jax.tree.leaves(part.out)
    leaves = [
        r.add(acc, x, weight, empty=first, counted=counted, divisor=divisor)
        for r, acc, x in zip(reductions, sums.leaves, out, strict=True)
    ]
    noise_state = sums.noise
    if isinstance(noise_state, noise.NoiseState):
        noise_state = noise.add_microbatch(
            noise_state, part.out[1], weight, empty=first, counted=counted
        )
    stacked = [x for r, x in zip(reductions, out, strict=True) if r.mode == "stack"]
    return Sums(total, leaves, part.carry, noise_state), stacked

"""Adds up a window's microbatches, one after the other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from optax_accum import _noise as noise
from optax_accum._partial import Whole
from optax_accum._reduction import Part, Reduction, Sums, add_part, plan
from optax_accum._split import Split, split_keys
from optax_accum._varying import vary_as_carry
from optax_accum._weighted_sum import divide


class Found(NamedTuple):
    """What the window comes to.

    Attributes:
      stacked: the results that have a row for each example, in a list.
      reduced: all other results, in a list.
      carry: what the last microbatch hands on.
      noise: of the gradients, if that is tracked.
      merge: from the first two to the value, the gradients and the auxiliary output.
    """

    stacked: list[jax.Array]
    reduced: list[jax.Array]
    carry: Any
    noise: noise.NoiseState | tuple[()]
    merge: Callable[[list[jax.Array], list[jax.Array]], Any]

    @property
    def out(self) -> Any:
        return self.merge(self.stacked, self.reduced)


def add_up(
    one: Callable[..., Part],
    split: Split,
    batch: Any,
    keys: Any,
    carry: Any,
    aux: Any,
    dtype: DTypeLike | None,
    track_noise: bool,
    over: Whole,
) -> Found:
    """The results of `one(batch, keys, carry)` for each microbatch, reduced.

    Args:
      one: what becomes of a microbatch.
      split: how to cut the batch.
      batch: arrays with the examples of all microbatches along their leading axes.
      keys: random keys, to be split for the microbatches.
      carry: what the first microbatch gets of those before it.
      aux: the modes of the auxiliary output.
      dtype: in which to add up the gradients.
      track_noise: whether to.
      over: the devices over which to reduce at the end.
    """
    keys, last_key = split_keys(keys, split, over.key)
    reductions, treedef = plan(one, split, batch, keys, carry, aux, dtype, over)

    def take(sums, batch, key, size, *, first=False, last):
        part, share = one(batch, key, sums.carry), size // split.blocks
        if split.microbatches == 1 and not over.axes:
            share = 1  # a mean over one
            if part.weight is not None:
                good = jnp.where(jnp.isfinite(part.weight), 1.0, jnp.nan)
                part = part._replace(weight=good)
        if over.axes:  # the mean is over those of the other devices too
            last = False
        return add_part(reductions, sums, part, share, first=first, last=last)

    def step(sums, xs):
        i, key = xs
        last = split.rest == 0 and i == split.whole - 1
        return take(sums, split.full(batch, i), key, split.size, last=last)

    sums = Sums(
        jnp.zeros([], float),
        [r.zeros() for r in reductions],
        carry,
        noise.start() if track_noise else (),
    )
    if split.whole == 1:
        key = jax.tree.map(lambda x: x[0], keys)
        batch_of_one = split.full(batch, 0)
        only = not split.rest
        sums, stacks = take(sums, batch_of_one, key, split.size, first=True, last=only)
        stacks = [x[None] for x in stacks]
    else:
        xs = jnp.arange(split.whole), keys
        sums = vary_as_carry(step, sums, xs)
        sums, stacks = lax.scan(step, sums, xs)
    rests = [None] * len(stacks)
    if split.rest:
        sums, rests = take(sums, split.last(batch), last_key, split.rest, last=True)
    if over.axes:
        sums = _over_devices(reductions, sums, over)

    of_noise = sums.noise
    if isinstance(of_noise, noise.NoiseState):
        means = treedef.unflatten(sums.leaves)[1]
        of_noise = noise.of_one_window(of_noise, means, sums.weight)

    def merge(stacked, reduced):
        stacked, reduced = iter(stacked), iter(reduced)
        return treedef.unflatten(
            next(stacked if r.mode == "stack" else reduced) for r in reductions
        )

    return Found(
        [split.join(*x) for x in zip(stacks, rests, strict=True)],
        [
            r.result(x)
            for r, x in zip(reductions, sums.leaves, strict=True)
            if r.mode != "stack"
        ],
        sums.carry,
        of_noise,
        merge,
    )


def _over_devices(reductions: list[Reduction], sums: Sums, over: Whole) -> Sums:
    """The sums of all devices, and of the weighted ones the means."""
    weight, of_noise = over.totals(True, (sums.weight, noise.window_of(sums.noise)))
    divisor = jnp.where(weight == 0, 1, weight)
    leaves = []
    for r, x in zip(reductions, sums.leaves, strict=True):
        if r.mode != "stack":
            x = over.total(x)
        if r.mode == "mean":
            x = divide(x, divisor)
        leaves.append(x)
    of_all = noise.on_window(lambda _: of_noise, sums.noise)
    return sums._replace(weight=weight, leaves=leaves, noise=of_all)

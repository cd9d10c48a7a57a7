"""Cuts a batch into microbatches, and puts together again what comes of them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Split(NamedTuple):
    """How to cut: `whole` microbatches of `size` examples, then one of `rest`, if any.

    A microbatch takes its examples from several blocks of the batch, equally many from
    each, not all from one place. Of a batch that is sharded over devices each device
    then has its part of every microbatch in its own shard, if it has whole blocks.
    """

    whole: int
    size: int
    rest: int

    @classmethod
    def of(cls, batch_size: int, size: int) -> "Split":
        size = min(size, batch_size)
        return cls(batch_size // size, size, batch_size % size)

    @property
    def microbatches(self) -> int:
        return self.whole + (self.rest > 0)

    @property
    def blocks(self) -> int:
        """As many as can be: into so many parts both sizes can be divided."""
        return math.gcd(self.size, self.rest)

    def full(self, batch: Any, i: Any) -> Any:
        """The microbatch at `i`, of `size` examples, out of arrays of all of them."""
        width = self.size // self.blocks

        def take(x):
            part = lax.dynamic_slice_in_dim(self._blocked(x), i * width, width, axis=1)
            return part.reshape(self.size, *x.shape[1:])

        return jax.tree.map(take, batch)

    def last(self, batch: Any) -> Any:
        """The microbatch of `rest` examples."""
        width = self.rest // self.blocks

        def take(x):
            return self._blocked(x)[:, -width:].reshape(self.rest, *x.shape[1:])

        return jax.tree.map(take, batch)

    def join(self, full: jax.Array, last: jax.Array | None) -> jax.Array:
        """The examples of `[whole, size, ...]` and `[rest, ...]` in their old order."""
        width, trailing = self.size // self.blocks, full.shape[2:]
        blocked = full.reshape(self.whole, self.blocks, width, *trailing)
        blocked = jnp.moveaxis(blocked, 0, 1)
        blocked = blocked.reshape(self.blocks, self.whole * width, *trailing)
        if last is not None:
            blocked = jnp.concatenate([blocked, self._blocked(last)], axis=1)
        return blocked.reshape(self.whole * self.size + self.rest, *trailing)

    def _blocked(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.blocks, x.shape[0] // self.blocks, *x.shape[1:])


def split_keys(
    keys: dict[Any, Any], split: Split, own: Callable[[jax.Array], jax.Array]
) -> tuple[Any, Any]:
    """A key for each microbatch: those of the whole ones, stacked, and of the rest.

    What `own` makes of a key is split in its place.
    """
    whole, last = {}, {}
    for name, tree in keys.items():
        try:
            # A single microbatch is the batch, and so gets what the batch would.
            tree = jax.tree.map(own, tree)
            each = jax.tree.map(
                lambda key: jax.random.split(key, max(split.microbatches, 2)), tree
            )
            if split.microbatches == 1:
                each = jax.tree.map(lambda key: key[None], tree)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"By key_argnums argument {name} is random keys, but: {error}"
            ) from None
        whole[name], last[name] = each, None
        if split.rest:
            whole[name] = jax.tree.map(lambda x: x[:-1], each)
            last[name] = jax.tree.map(lambda x: x[-1], each)
    return whole, last

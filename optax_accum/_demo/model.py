"""A small decoder-only transformer, and its loss."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from optax_accum._demo.text import LONGEST, PADDING

WIDTH = 64
DEPTH = 2
HEADS = 4

Loss = Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]


class Block(nnx.Module):
    """Attention, then an MLP, both on what has been normalised.

    Nothing has a bias. That of the keys would have a gradient of zero and for it mere
    rounding, of which AdamW makes whole steps.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """From tokens, int [rows, length], to logits [rows, length, characters]."""

    def __init__(self, characters: int, rngs: nnx.Rngs):
        self.token = nnx.Embed(characters, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LONGEST, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.logits = nnx.Linear(WIDTH, characters, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # The padding is at the end, so the causal mask already hides it.
        mask = nnx.make_causal_mask(tokens)
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.logits(self.norm(x))


def make_model(characters: int, seed: int) -> tuple[nnx.State, Loss]:
    """The first parameters, a tree of arrays, and the loss to train them by.

    The loss of a batch is the mean over its tokens; beside it comes their number.
    """
    graph, params = nnx.split(Transformer(characters, nnx.Rngs(seed)))

    def loss_fn(params, rows):
        model = nnx.merge(graph, params)
        targets = rows[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(rows[:, :-1]), targets
        )
        counted = targets != PADDING
        return jnp.mean(losses, where=counted), jnp.sum(counted)

    return params, loss_fn

"""A small model, its losses and batches, for the tests of microbatches."""

import functools

import jax
import jax.numpy as jnp
from helpers import assert_trees_equal

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0], [0.1, 0.2]]), "b": jnp.ones(2)}
close = functools.partial(assert_trees_equal, rtol=2e-5, atol=1e-6)


def draw(size, seed=0):
    x, y, mask = jax.random.split(jax.random.key(seed), 3)
    return {
        "x": jax.random.normal(x, (size, 3)),
        "y": jax.random.normal(y, (size, 2)),
        "mask": jax.random.bernoulli(mask, 0.6, (size,)),
    }


def loss_fn(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) + params["b"]
    return jnp.mean((predicted - batch["y"]) ** 2)


def masked_loss(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) + params["b"]
    losses = jnp.sum((predicted - batch["y"]) ** 2, axis=-1)
    return jnp.mean(losses, where=batch["mask"])


def count(params, batch):
    return batch["mask"].sum()

"""Training steps by the train states of `optax_accum.flax`."""

from typing import Any

import jax
import optax
from flax import nnx

import optax_accum.flax


def train_state(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """A jitted step `(state, grads) -> state`, and its first state."""
    state = optax_accum.flax.TrainState.create(apply_fn=None, params=params, tx=tx)

    def step(state, grads):
        return state.apply_gradients(grads=grads)

    return jax.jit(step, donate_argnums=0), state


class Model(nnx.Module):
    """No more than its parameters."""

    def __init__(self, params: Any):
        for name, value in params.items():
            setattr(self, name, nnx.Param(value))


def nnx_optimizer(tx: optax.GradientTransformation, params: Any) -> tuple[Any, Any]:
    """A jitted step `(state, grads) -> state`, of the model and the optimizer."""
    model = Model(params)
    optimizer = optax_accum.flax.Optimizer(model, tx, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state, grads):
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, nnx.state(Model(grads)))
        return nnx.state((model, optimizer))

    return jax.jit(step, donate_argnums=0), state

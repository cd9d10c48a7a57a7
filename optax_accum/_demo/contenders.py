"""The ways to take one optimizer step a window; a row of the table each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import optax

import optax_accum
from optax_accum._demo.model import Loss
from optax_accum._demo.text import count_tokens

# The state follows the parameters, and both come back in that order: JAX gives a
# donated buffer to the first output of its shape, and so each goes back into its own.
Step = Callable[[Any, Any, jax.Array], tuple[Any, Any, jax.Array]]
Init = Callable[[Any], Any]


@dataclass(frozen=True)
class Contender:
    """One way.

    Attributes:
      name: what the table calls it.
      by_microbatch: whether a step sees one microbatch, or the window's rows at once.
      weighted: whether every token counts the same, in whichever microbatch it is.
      build: from the loss, the optimizer and the window to the optimizer state's init
        and the step `(params, opt_state, rows) -> (params, opt_state, loss)`.
      tracks_noise: whether the state tells of the gradient noise scale.
    """

    name: str
    by_microbatch: bool
    weighted: bool
    build: Callable[[Loss, optax.GradientTransformation, int], tuple[Init, Step]]
    tracks_noise: bool = False


def _large_batch(loss_fn, optimizer, window):
    del window
    return optimizer.init, _update_step(loss_fn, optimizer)


def _multi_steps(loss_fn, optimizer, window):
    tx = optax.MultiSteps(optimizer, window)
    return tx.init, _update_step(loss_fn, tx)


def _update(loss_fn, optimizer, window):
    tx = optax_accum.chain(optax_accum.accumulate(window), optimizer)

    def step(params, opt_state, rows):
        (loss, tokens), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params, weight=tokens)
        return optax.apply_updates(params, updates), opt_state, loss

    return tx.init, step


def _apply_gradients(loss_fn, optimizer, window):
    tx = optax_accum.chain(optax_accum.accumulate(window, track_noise=True), optimizer)

    def step(params, opt_state, rows):
        (loss, tokens), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rows)
        params, opt_state = optax_accum.apply_gradients(
            tx, grads, opt_state, params, weight=tokens
        )
        return params, opt_state, loss

    return tx.init, step


def _without_weight(loss_fn, optimizer, window):
    tx = optax_accum.chain(optax_accum.accumulate(window), optimizer)

    def step(params, opt_state, rows):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rows)
        params, opt_state = optax_accum.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    return tx.init, step


def _value_and_grad(loss_fn, optimizer, window):
    loss_and_grad = optax_accum.value_and_grad(
        loss_fn,
        has_aux=True,
        num_microbatches=window,
        weight=lambda params, rows: count_tokens(rows),
    )

    def step(params, opt_state, rows):
        (loss, _), grads = loss_and_grad(params, rows)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return optimizer.init, step


def _update_step(loss_fn, tx):
    def step(params, opt_state, rows):
        (loss, _), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


# The first is the one that the others are compared with.
CONTENDERS = (
    Contender(
        "large batch",
        by_microbatch=False,
        weighted=True,
        build=_large_batch,
    ),
    Contender(
        "optax.MultiSteps",
        by_microbatch=True,
        weighted=False,
        build=_multi_steps,
    ),
    Contender(
        "update, weight=tokens",
        by_microbatch=True,
        weighted=True,
        build=_update,
    ),
    Contender(
        "apply_gradients, weight=tokens",
        by_microbatch=True,
        weighted=True,
        build=_apply_gradients,
        tracks_noise=True,
    ),
    Contender(
        "value_and_grad, weight=tokens",
        by_microbatch=False,
        weighted=True,
        build=_value_and_grad,
    ),
    Contender(
        "apply_gradients, no weight",
        by_microbatch=True,
        weighted=False,
        build=_without_weight,
    ),
)

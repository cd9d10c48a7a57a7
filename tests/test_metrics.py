"""What `metrics` and `released` tell a training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal

import optax_accum
from optax_accum import accumulate, chain, metrics, released

GRADS = jnp.ones(2)
BAD = jnp.array([jnp.nan, 1.0])
PARAMS = jnp.zeros(2)


def as_numbers(state):
    return {name: value.item() for name, value in metrics(state).items()}


def test_metrics_follow_a_window_and_tell_the_weight_that_was_released():
    tx = chain(accumulate(2, skip=optax.skip_not_finite), optax.sgd(1.0))
    state, seen = tx.init(PARAMS), []
    for grads, weight in [(GRADS, 3), (BAD, 100), (GRADS, 5), (BAD, 7), (GRADS, 2)]:
        _, state = tx.update(grads, state, PARAMS, weight=weight)
        seen.append(tuple(as_numbers(state).values()))
    assert [*metrics(state)] == [
        "mini_step",
        "gradient_step",
        "released",
        "window_weight",
        "skipped",
    ]
    assert seen == [
        (1, 0, False, 3.0, 0),
        (1, 0, False, 3.0, 1),
        (0, 1, True, 8.0, 1),
        (0, 1, False, 0.0, 2),
        (1, 1, False, 2.0, 2),
    ]


def test_metrics_are_scalars_of_a_traced_state_too_and_wait_for_nothing():
    tx = accumulate(2)
    eager = metrics(tx.init(PARAMS))
    jitted = jax.jit(metrics)(tx.init(PARAMS))
    assert_trees_equal(jitted, eager)
    assert all(value.shape == () for value in eager.values())
    with jax.transfer_guard_device_to_host("disallow"):
        metrics(tx.init(PARAMS))


def test_metrics_outlive_a_state_that_is_donated():
    tx = accumulate(3)
    step = jax.jit(lambda state: tx.update(GRADS, state)[1], donate_argnums=0)
    state = step(tx.init(PARAMS))
    before = metrics(state)
    state = step(state)
    assert before["mini_step"] == 1
    assert metrics(state)["mini_step"] == 2


def test_several_accumulations_are_told_apart_by_their_places():
    labels = {"a": "slow", "b": "fast"}
    tx = optax.partition(
        {
            "slow": chain(accumulate(2), optax.sgd(1.0)),
            "fast": chain(accumulate(1), optax.sgd(1.0)),
        },
        labels,
    )
    params = {"a": PARAMS, "b": PARAMS}
    _, state = tx.update(params, tx.init(params), params)
    numbers = as_numbers(state)
    assert len(numbers) == 10
    assert [v for k, v in numbers.items() if k.endswith("released")] == [True, False]
    (slow,) = (k for k in numbers if "slow" in k and k.endswith("/mini_step"))
    assert numbers[slow] == 1
    assert released(state)


def test_without_an_accumulation_it_says_so():
    for tell in (metrics, released):
        with pytest.raises(ValueError, match="no AccumulateState"):
            tell(optax.adam(0.1).init(PARAMS))


def test_an_ensemble_has_metrics_of_each_member():
    tx = chain(accumulate(2), optax.sgd(1.0))
    params = jnp.zeros((3, 2))
    state = jax.vmap(tx.init)(params)
    weights = jnp.arange(3.0)
    step = jax.vmap(lambda g, s, p, w: tx.update(g, s, p, weight=w))
    _, state = step(params, state, params, weights)
    np.testing.assert_array_equal(metrics(state)["window_weight"], weights)


def test_the_weight_of_a_window_starts_over_after_a_release():
    tx = chain(accumulate(None), optax.sgd(1.0))
    state = tx.init(PARAMS)
    for i, release in enumerate([True, True, False, True]):
        updates, state = tx.update(
            (i + 1) * GRADS, state, PARAMS, weight=10, release=release
        )
        assert bool(released(state)) == release
    np.testing.assert_array_equal(updates, [-3.5, -3.5])
    assert optax_accum.metrics(state)["window_weight"] == 20

"""`accumulate` against the oracle, over everything that can vary from call to call."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal, recorder, types
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle

import optax_accum

SCHEDULES = {
    "grows": lambda step: step + 1,
    "shrinks": lambda step: 3 - (step > 0) - (step > 2),
    "steady": lambda step: 2,
}


@functools.cache
def jitted_steps(form, every, reduction, on_skip):
    """One compiled step for each way to call it; gradients of 666 are skipped."""

    def skip(updates, gradient_step, params):
        return jnp.any(updates["x"] == 666), ()

    tx = optax_accum.chain(
        optax_accum.accumulate(
            SCHEDULES.get(every, every),
            reduction=reduction,
            skip=None if on_skip is None else skip,
            on_skip=on_skip or "wait",
            average_args=("value",),
        ),
        recorder(),
        optax.scale(-1.0),
    )
    return tx, jax.jit(functools.partial(FORMS[form], tx))


micro_steps = st.lists(
    st.fixed_dictionaries(
        {"grad": st.integers(-8, 8), "value": st.integers(-8, 8)},
        optional={
            "weight": st.integers(0, 3),
            "release": st.booleans(),
            "skip": st.booleans(),
        },
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    steps=micro_steps,
    every=st.sampled_from([1, 2, 3, None, *SCHEDULES]),
    reduction=st.sampled_from(["mean", "sum"]),
    on_skip=st.sampled_from([None, "wait", "shrink"]),
)
def test_agrees_with_the_oracle_to_the_bit_for_integers(
    form, steps, every, reduction, on_skip
):
    tx, step = jitted_steps(form, every, reduction, on_skip)
    oracle = Oracle(SCHEDULES.get(every, every), reduction, on_skip or "wait")
    params = {"x": jnp.array([100.0, -100.0])}
    state = tx.init(params)
    state_types, calls = types(state), 0
    for kwargs in steps:
        kwargs = dict(kwargs)
        if on_skip is None:
            kwargs.pop("skip", None)
        out = oracle.step([kwargs["grad"], 1.0], **without(kwargs, "grad"))
        first = 666.0 if kwargs.get("skip") else float(kwargs["grad"])
        grads = {"x": jnp.array([first, 1.0])}
        before = params, state[1:]
        params, state = step(grads, state, params, **without(kwargs, "grad", "skip"))

        assert types(state) == state_types
        assert state[0].mini_step == oracle.mini_step
        assert state[0].gradient_step == oracle.gradient_step
        assert optax_accum.released(state) == oracle.released
        if out is None:
            assert_trees_equal((params, state[1:]), before)
        else:
            calls += 1
            mean, value = out
            np.testing.assert_array_equal(state[1].updates["x"], np.float32(mean))
            np.testing.assert_array_equal(state[1].value, np.float32(value))
            want = before[0]["x"] - np.float32(mean)
            np.testing.assert_array_equal(params["x"], want)
        assert state[1].calls == calls


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-(2**15), 2**15), min_size=1, max_size=40),
    st.integers(1, 200),
)
def test_the_mean_of_integers_is_rounded_once(numbers, weight):
    # XLA turns a division by a scalar into a multiplication, which rounds twice.
    params = jnp.zeros(len(numbers))
    tx, step = jitted_mean(len(numbers))
    _, state = step(jnp.float32(numbers), tx.init(params), params, weight=weight)
    updates, _ = step(params, state, params, weight=201.0 - weight)
    want = np.float64(numbers) * weight / 201
    np.testing.assert_array_equal(updates, want.astype(np.float32))


@functools.cache
def jitted_mean(size):
    tx = optax_accum.accumulate(2)
    return tx, jax.jit(tx.update)


def without(kwargs, *names):
    return {k: v for k, v in kwargs.items() if k not in names}

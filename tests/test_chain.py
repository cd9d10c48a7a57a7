"""`chain`, `apply_gradients` and `released`: what runs when, on what."""

import copy
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal, recorder

import optax_accum
from optax_accum import accumulate, chain, released

PARAMS = {"w": jnp.array([1.0, -2.0])}


def run(tx, grads, form="update", params=PARAMS, **extra_args):
    step = jax.jit(functools.partial(FORMS[form], tx))
    state = tx.init(params)
    for g in grads:
        params, state = step({"w": jnp.asarray(g)}, state, params, **extra_args)
    return params, state


def test_the_readme_example_is_adam_on_the_large_batch():
    grads = np.array([[1.0, 0.0], [3.0, 4.0]], np.float32)
    tx = chain(accumulate(2), optax.adam(0.1))
    opt = optax.adam(0.1)
    updates, _ = opt.update({"w": jnp.array([2.0, 2.0])}, opt.init(PARAMS), PARAMS)
    for form in FORMS:
        params, _ = run(tx, grads, form)
        want = optax.apply_updates(PARAMS, updates)
        assert_trees_equal(params, want, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_upstream_sees_every_microbatch_and_downstream_the_mean(form):
    tx = chain(optax.clip(1.0), recorder(), accumulate(2), recorder(), optax.sgd(1.0))
    grads = [[4.0, 1.0], [0.0, 1.0], [9.0, 9.0]]
    _, state = run(tx, grads, form)
    assert state[1].calls == 3
    assert state[3].calls == 1
    np.testing.assert_array_equal(state[3].updates["w"], [0.5, 1.0])


def test_the_state_is_that_of_optax_chain():
    tx = chain(optax.trace(0.9), accumulate(2), optax.adam(0.1))
    plain = optax.chain(optax.trace(0.9), accumulate(2), optax.adam(0.1))
    assert_trees_equal(tx.init(PARAMS), plain.init(PARAMS))
    state = tx.init(PARAMS)
    assert optax.tree.get(state, "mini_step") == 0
    assert_trees_equal(optax.tree.get(state, "acc_grads"), {"w": jnp.zeros(2)})


@pytest.mark.parametrize("form", FORMS)
def test_chains_nest(form):
    grads = [[1.0, 0.0], [3.0, 4.0], [0.0, 0.0]]
    flat = chain(optax.clip(2.0), accumulate(3), optax.trace(0.5), optax.sgd(0.1))
    inner = chain(accumulate(3), optax.trace(0.5))
    nested = chain(optax.clip(2.0), inner, optax.sgd(0.1))
    want, flat_state = run(flat, grads, form)
    got, state = run(nested, grads, form)
    assert_trees_equal(got, want)
    assert_trees_equal(state[1], flat_state[1:3])
    assert released(state)
    multi_steps = optax_accum.MultiSteps(optax.trace(0.5), 3)
    got, state = run(chain(optax.clip(2.0), multi_steps, optax.sgd(0.1)), grads, form)
    assert_trees_equal(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_the_accumulation_may_be_last_or_alone(form):
    want = {"w": PARAMS["w"] + jnp.array([2.0, 2.0])}
    grads = [[1.0, 0.0], [3.0, 4.0]]
    for tx in (
        accumulate(2),
        chain(accumulate(2)),
        chain(optax.clip(9), accumulate(2)),
    ):
        params, state = run(tx, grads, form)
        assert_trees_equal(params, want)
        assert released(state)


def test_apply_gradients_takes_any_other_transform():
    for tx in (
        optax.adam(0.1),
        optax.chain(optax.clip(1.0), accumulate(2), optax.sgd(0.1)),
        optax.inject_hyperparams(lambda lr: chain(accumulate(2), optax.adam(lr)))(
            lr=0.1
        ),
    ):
        grads = [[1.0, 0.0], [3.0, 4.0]]
        want, _ = run(tx, grads, "update")
        got, _ = run(tx, grads, "apply_gradients")
        assert_trees_equal(got, want)


def test_released_is_true_once_a_window_however_the_state_is_nested():
    tx = optax.named_chain(("tx", optax.flatten(chain(accumulate(2), optax.sgd(0.1)))))
    state = tx.init(PARAMS)
    seen = [released(state)]
    for _ in range(4):
        _, state = tx.update(PARAMS, state, PARAMS)
        seen.append(released(state))
    assert seen == [False, False, True, False, True]
    assert all(x.shape == () and x.dtype == bool for x in seen)


def test_released_is_false_after_a_skipped_microbatch():
    tx = chain(accumulate(1, skip=optax.skip_not_finite), optax.sgd(0.1))
    _, state = run(tx, [[1.0, 1.0]])
    assert released(state)
    _, state = run(tx, [[1.0, 1.0], [np.nan, 1.0]])
    assert not released(state)


def test_in_the_parts_of_a_partition_any_release_counts():
    tx = optax.partition(
        {"a": chain(accumulate(2), optax.sgd(0.1)), "b": optax.sgd(0.1)},
        {"x": "a", "y": "b"},
    )
    params = {"x": jnp.ones(2), "y": jnp.ones(2)}
    state = tx.init(params)
    for want in (False, True, False):
        updates, state = jax.jit(tx.update)(params, state, params)
        assert released(state) == want
        np.testing.assert_array_equal(updates["x"], jnp.full(2, -0.1 if want else 0))
        np.testing.assert_array_equal(updates["y"], jnp.full(2, -0.1))


def test_a_plain_optax_chain_works_where_zero_updates_mean_nothing():
    tx = optax.chain(accumulate(2), optax.sgd(0.5))
    params, _ = run(tx, [[1.0, 0.0], [3.0, 4.0]])
    np.testing.assert_array_equal(
        params["w"], PARAMS["w"] - 0.5 * jnp.array([2.0, 2.0])
    )


@pytest.mark.parametrize("form", FORMS)
def test_downstream_sees_the_weighted_mean_of_named_arguments(form):
    tx = chain(accumulate(2, average_args=("value",)), recorder(), optax.sgd(1.0))
    step = jax.jit(functools.partial(FORMS[form], tx))
    params, state = PARAMS, tx.init(PARAMS)
    for value, weight in ((1.0, 3.0), (101.0, 1.0)):
        params, state = step(PARAMS, state, params, value=value, weight=weight)
    assert state[1].value == 26.0


def test_reduce_on_plateau_sees_the_window_and_not_its_last_microbatch():
    plateau = optax.contrib.reduce_on_plateau(patience=1, accumulation_size=1)
    tx = chain(accumulate(2, average_args=("value",)), optax.sgd(1.0), plateau)
    state = tx.init(PARAMS)
    for value in (1.0, 100.0):
        _, state = jax.jit(tx.update)(PARAMS, state, PARAMS, value=value)
    assert state[2].best_value == 50.5


def test_other_extra_arguments_reach_both_sides_and_ours_stay_with_us():
    def spy(wanted):
        def update_fn(updates, state, params=None, **extra_args):
            assert sorted(extra_args) == wanted
            return updates, state

        return optax.GradientTransformationExtraArgs(optax.identity().init, update_fn)

    tx = chain(spy(["loss"]), accumulate(1), spy(["loss"]))
    tx.update(PARAMS, tx.init(PARAMS), PARAMS, loss=1.0, weight=2.0, release=True)


def test_a_fractional_schedule_is_rounded_up():
    tx = chain(accumulate(lambda step: 1.5), optax.sgd(1.0))
    state = tx.init(PARAMS)
    for want in (False, True):
        _, state = jax.jit(tx.update)(PARAMS, state, PARAMS)
        assert released(state) == want


def test_a_schedule_is_read_once_a_window():
    # The step is compiled with another schedule in the middle of a window.
    def steps_to_release(first, then):
        state = chain(accumulate(first), optax.sgd(1.0)).init(PARAMS)
        _, state = chain(accumulate(first), optax.sgd(1.0)).update(PARAMS, state)
        tx, steps = chain(accumulate(then), optax.sgd(1.0)), 1
        while not released(state):
            _, state = tx.update(PARAMS, state)
            steps += 1
        return steps

    assert steps_to_release(lambda step: 3, lambda step: 2) == 3
    assert steps_to_release(lambda step: 3, lambda step: 5) == 3


def test_counters_saturate():
    tx = chain(accumulate(None), optax.sgd(1.0))
    state = tx.init(PARAMS)
    top = jnp.iinfo(jnp.int32).max
    state = (state[0]._replace(mini_step=jnp.int32(top)), *state[1:])
    _, state = tx.update(PARAMS, state)
    assert state[0].mini_step == top
    state = (state[0]._replace(gradient_step=jnp.int32(top)), *state[1:])
    _, state = tx.update(PARAMS, state, release=True)
    assert state[0].gradient_step == top


def test_transforms_can_be_copied_and_hashed():
    for tx in (
        chain(accumulate(2), optax.sgd(1.0)),
        optax_accum.MultiSteps(optax.sgd(1.0), 2),
    ):
        for same in (copy.copy(tx), copy.deepcopy(tx)):
            assert type(same) is type(tx)
            assert_trees_equal(run(same, [[1.0, 1.0]] * 2), run(tx, [[1.0, 1.0]] * 2))
            run(same, [[1.0, 1.0]], "apply_gradients")
        assert isinstance(hash(tx), int)


@pytest.mark.parametrize(
    "tx",
    [
        optax_accum.accumulate(2),
        optax_accum.chain(optax_accum.accumulate(2), optax.adam(0.1)),
        optax_accum.MultiSteps(optax.adam(0.1), 2),
    ],
    ids=["accumulate", "chain", "MultiSteps"],
)
def test_transforms_come_back_whole_from_a_pytree(tx):
    same = jax.tree.map(lambda x: x, tx)
    assert type(same) is type(tx)
    assert same == tx
    assert vars(same) == vars(tx)
    params = jnp.ones(2)
    state = eqx.filter_jit(lambda tx: tx.init(params))(tx)
    _, state = eqx.filter_jit(lambda tx: tx.update(params, state, params))(tx)
    assert optax.tree.get(state, "mini_step") == 1


def test_with_another_update_a_chain_is_any_transform():
    tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(1.0))
    other = tx._replace(update=lambda g, s, p=None, **extra_args: (-g, s))
    params, _ = optax_accum.apply_gradients(
        other, jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2)
    )
    np.testing.assert_array_equal(params, jnp.zeros(2))


def test_a_schedule_of_floats_is_as_long_jitted_as_eager():
    tx = optax_accum.accumulate(optax.linear_schedule(1, 11, 10))
    for update in (tx.update, jax.jit(tx.update)):
        state, lengths, length = tx.init(jnp.ones(1)), [], 0
        while len(lengths) < 10:
            _, state = update(jnp.ones(1), state)
            length += 1
            if optax_accum.released(state):
                lengths.append(length)
                length = 0
        assert lengths == list(range(1, 11))

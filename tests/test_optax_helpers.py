"""Optax's own tools: each gives the large batch's result, or says why it cannot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_accum import accumulate, apply_gradients, chain

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, 0.2])}
X = jax.random.normal(jax.random.key(0), (12, 4, 2))  # four windows of three
WINDOWS = X.reshape(4, 12, 2)
close = functools.partial(assert_trees_equal, rtol=1e-5, atol=1e-6)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - 1) ** 2)


def train(tx, form, batches, params=PARAMS, extra_args=None):
    """`extra_args` gives those of a step from `(params, batch, value, grads)`."""

    @jax.jit
    def step(params, state, x):
        value, grads = jax.value_and_grad(loss_fn)(params, x)
        args = extra_args(params, x, value, grads) if extra_args else {}
        return FORMS[form](tx, grads, state, params, **args)

    state = tx.init(params)
    for x in batches:
        params, state = step(params, state, x)
    return params, state


def large_batch(opt, **kwargs):
    opt = optax.with_extra_args_support(opt)
    return train(opt, "update", WINDOWS, **kwargs)


def value_only(params, x, value, grads):
    return {"value": value}


@pytest.mark.parametrize("form", FORMS)
def test_reduce_on_plateau_and_polyak_sgd_see_the_loss_of_the_window(form):
    for opt in (
        optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1)),
        optax.polyak_sgd(1.0),
    ):
        want, _ = large_batch(opt, extra_args=value_only)
        tx = chain(accumulate(3, average_args=("value",)), opt)
        got, _ = train(tx, form, X, extra_args=value_only)
        close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_schedule_free_gives_the_same_parameters_to_evaluate(form):
    opt = optax.contrib.schedule_free_adamw(0.1, warmup_steps=2)
    evaluate = optax.contrib.schedule_free_eval_params
    params, state = large_batch(opt)
    want = evaluate(state, params)
    params, state = train(chain(accumulate(3), opt), form, X)
    close(evaluate(state[1], params), want)


@pytest.mark.parametrize("form", FORMS)
def test_sam_takes_its_adversarial_steps_on_means_too(form):
    opt = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05), sync_period=2)
    want, _ = large_batch(opt)
    got, _ = train(chain(accumulate(3), opt), form, X)
    close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_opaque_sam_asks_for_the_gradients_of_the_whole_window(form):
    opt = optax.contrib.sam(
        optax.sgd(0.1), optax.sgd(0.05), sync_period=2, opaque_mode=True
    )

    def grad_fn_of_the_batch(params, x, value, grads):
        return {"grad_fn": lambda p, i: jax.grad(loss_fn)(p, WINDOWS[0])}

    want, _ = train(opt, "update", WINDOWS[:1], extra_args=grad_fn_of_the_batch)
    tx = chain(accumulate(3), opt)
    got, _ = train(tx, form, X[:3], extra_args=grad_fn_of_the_batch)
    close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_a_line_search_that_is_given_the_loss_of_the_window(form):
    opt = optax.lbfgs(memory_size=3)

    def searching(whole):
        def extra_args(params, x, value, grads):
            value_fn = functools.partial(loss_fn, x=whole)
            value, grad = jax.value_and_grad(value_fn)(params)
            return {"value": value, "grad": grad, "value_fn": value_fn}

        return extra_args

    want, _ = train(opt, "update", WINDOWS[:1], extra_args=searching(WINDOWS[0]))
    tx = chain(accumulate(3), opt)
    got, _ = train(tx, form, X[:3], extra_args=searching(WINDOWS[0]))
    close(got, want)


def test_lookahead_goes_around_the_chain_and_counts_micro_steps():
    start = optax.LookaheadParams.init_synced(PARAMS)

    def train_fast(tx, batches):
        @jax.jit
        def step(params, state, x):
            grads = jax.grad(loss_fn)(params.fast, x)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = start, tx.init(start)
        for x in batches:
            params, state = step(params, state, x)
        return params

    opt = optax.sgd(0.5, momentum=0.9)
    want = train_fast(optax.lookahead(opt, 2, 0.5), WINDOWS)
    tx = optax.lookahead(
        chain(accumulate(3), opt), sync_period=2 * 3, slow_step_size=0.5
    )
    close(train_fast(tx, X), want)
    with pytest.raises(TypeError, match=r"lookahead\(chain\("):
        chain(accumulate(3), optax.lookahead(opt, 2, 0.5)).init(start)


def test_a_learning_rate_changed_in_a_window_counts_at_its_release():
    tx = chain(accumulate(2), optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    params = jnp.zeros(2)
    state = tx.init(params)
    step = jax.jit(functools.partial(apply_gradients, tx))
    params, state = step(jnp.ones(2), state, params)
    state = optax.tree.set(state, learning_rate=jnp.float32(3.0))
    params, state = step(jnp.ones(2), state, params)
    np.testing.assert_array_equal(params, [-3.0, -3.0])


def test_get_set_and_map_params_reach_into_the_state():
    tx = chain(accumulate(2), optax.adam(0.1))
    state = tx.init(PARAMS)
    for name in ("mini_step", "gradient_step", "window_weight", "released"):
        assert optax.tree.get(state, name) == 0
    state = optax.tree.set(state, mini_step=jnp.int32(1))
    assert state[0].mini_step == 1
    state = optax.tree.map_params(tx, lambda x: x + 1, state)
    assert_trees_equal(state[0].acc_grads, optax.tree.ones_like(PARAMS))
    assert_trees_equal(state[1][0].mu, optax.tree.ones_like(PARAMS))
    assert state[0].mini_step == 1


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.named_chain(("tx", tx))]
)
def test_map_params_lays_the_accumulator_out_as_the_parameters(wrap):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    tx = wrap(chain(accumulate(2), optax.adam(0.1)))
    layout = {
        "w": NamedSharding(mesh, PartitionSpec("data", None)),
        "b": NamedSharding(mesh, PartitionSpec()),
    }
    replicated = NamedSharding(mesh, PartitionSpec())
    layouts = optax.tree.map_params(
        tx,
        lambda _, sharding: sharding,
        jax.eval_shape(tx.init, PARAMS),
        layout,
        transform_non_params=lambda _: replicated,
    )
    state = jax.jit(tx.init, out_shardings=layouts)(PARAMS)
    acc_grads = optax.tree.get(state, "acc_grads")
    assert {name: x.sharding for name, x in acc_grads.items()} == layout
    assert optax.tree.get(state, "mini_step").sharding == replicated


@pytest.mark.parametrize("form", FORMS)
def test_frozen_parameters_stay(form):
    opt = optax.chain(optax.adam(0.1), optax.freeze({"w": False, "b": True}))
    want, _ = large_batch(opt)
    got, _ = train(chain(accumulate(3), opt), form, X)
    close(got, want)
    assert_trees_equal(got["b"], PARAMS["b"])

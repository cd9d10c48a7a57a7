"""In Flax's `TrainState` and `nnx.Optimizer`, and in those of `optax_accum.flax`."""

import functools

import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from helpers import assert_trees_equal, recorder
from hlo import copies, lines_between_releases

import optax_accum
import optax_accum.flax
from optax_accum import accumulate, chain

X = jax.random.normal(jax.random.key(0), (6, 4, 3))  # two windows of three
Y = jnp.sum(X, axis=-1, keepdims=True)
OPT = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
WAYS = {
    "chain": lambda: chain(accumulate(3), OPT),
    "MultiSteps": lambda: optax_accum.MultiSteps(OPT, 3),
}
TRAIN_STATES = [flax.training.train_state.TrainState, optax_accum.flax.TrainState]
OPTIMIZERS = [nnx.Optimizer, optax_accum.flax.Optimizer]
close = functools.partial(assert_trees_equal, rtol=1e-5, atol=1e-6)


def whose(cls):
    return cls.__module__.partition(".")[0]


def mse(prediction, y):
    return jnp.mean((prediction - y) ** 2)


def large_batches():
    return zip(X.reshape(2, 12, 3), Y.reshape(2, 12, 1), strict=True)


# Linen.

LINEN = linen.Sequential([linen.Dense(4), jnp.tanh, linen.Dense(1)])


def linen_loss(params, x, y):
    return mse(LINEN.apply({"params": params}, x), y)


def linen_state(cls, tx):
    params = LINEN.init(jax.random.key(1), X[0])["params"]
    return cls.create(apply_fn=LINEN.apply, params=params, tx=tx)


@functools.partial(jax.jit, donate_argnums=0)
def linen_step(state, x, y):
    return state.apply_gradients(grads=jax.grad(linen_loss)(state.params, x, y))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", TRAIN_STATES, ids=whose)
def test_a_linen_train_state_gives_the_large_batchs_result(cls, way):
    want = linen_state(TRAIN_STATES[0], OPT)
    for x, y in large_batches():
        want = linen_step(want, x, y)
    got = linen_state(cls, WAYS[way]())
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        got = linen_step(got, x, y)
        assert got.step == i + 1
        assert bool(optax_accum.released(got)) == (i % 3 == 2)
    close(got.params, want.params)
    close(got.opt_state[1], want.opt_state)


def test_a_train_state_counts_windows_beside_micro_steps_and_takes_extra_arguments():
    tx = chain(accumulate(3, average_args=("value",)), recorder(), optax.sgd(1.0))
    state = optax_accum.flax.TrainState.create(
        apply_fn=None, params=jnp.zeros(2), tx=tx
    )

    @jax.jit
    def step(state, grads, weight, value):
        return state.apply_gradients(
            grads=grads,
            weight=weight,
            release=weight > 2,
            extra_args={"value": value},
        )

    state = step(state, jnp.ones(2), 1, 5.0)
    assert (state.step, state.gradient_step) == (1, 0)
    state = step(state, jnp.full(2, 5.0), 3, 1.0)
    assert (state.step, state.gradient_step) == (2, 1)
    np.testing.assert_array_equal(state.params, [-4.0, -4.0])
    assert state.opt_state[1].value == 2.0


def test_a_train_state_can_be_subclassed_and_its_fields_replaced():
    class WithStats(optax_accum.flax.TrainState):
        batch_stats: jax.Array

    state = WithStats.create(
        apply_fn=None, params=jnp.ones(2), tx=WAYS["chain"](), batch_stats=jnp.zeros(2)
    )
    state = state.apply_gradients(grads=jnp.ones(2), batch_stats=jnp.ones(2))
    assert_trees_equal(state.batch_stats, jnp.ones(2))
    assert state.replace(step=7).step == 7
    with pytest.raises(TypeError, match=r"value is no field of WithStats.*extra_args"):
        state.apply_gradients(grads=jnp.ones(2), value=1)
    with pytest.raises(TypeError, match="weight is given twice"):
        state.apply_gradients(grads=jnp.ones(2), weight=1, extra_args={"weight": 2})


def test_any_optax_transform_goes_into_the_subclasses_too():
    want, got = (linen_state(cls, OPT) for cls in TRAIN_STATES)
    for x, y in large_batches():
        want, got = linen_step(want, x, y), linen_step(got, x, y)
    close(got.params, want.params)
    with pytest.raises(TypeError, match="weight is for an accumulation"):
        got.apply_gradients(grads=got.params, weight=2)
    with pytest.raises(ValueError, match="no AccumulateState"):
        got.gradient_step  # noqa: B018


@pytest.mark.parametrize("cls", TRAIN_STATES, ids=whose)
def test_fp8_parameters_are_overwritten_by_their_gradients_in_each_micro_step(cls):
    params = {"params": jnp.zeros(2), OVERWRITE_WITH_GRADIENT: {"scale": jnp.zeros(1)}}
    tx = chain(accumulate(2), optax.sgd(1.0))
    state = cls.create(apply_fn=None, params=params, tx=tx)
    for i in (1.0, 2.0):
        grads = {
            "params": jnp.full(2, i),
            OVERWRITE_WITH_GRADIENT: {"scale": jnp.array([i])},
        }
        state = jax.jit(cls.apply_gradients)(state, grads=grads)
        assert state.params[OVERWRITE_WITH_GRADIENT]["scale"] == i
    assert_trees_equal(state.params["params"], jnp.full(2, -1.5))


def test_a_microbatch_that_does_not_count_overwrites_no_fp8_parameters():
    params = {"params": jnp.zeros(2), OVERWRITE_WITH_GRADIENT: jnp.zeros(1)}
    bad = jax.tree.map(lambda p: p * jnp.nan, params)
    tx = chain(accumulate(1, skip=optax.skip_not_finite), optax.sgd(1.0))
    state = optax_accum.flax.TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads=bad)
    assert_trees_equal(state.params, params)
    tx = chain(accumulate(1), optax.sgd(1.0))
    state = optax_accum.flax.TrainState.create(apply_fn=None, params=params, tx=tx)
    assert_trees_equal(state.apply_gradients(grads=bad, weight=0).params, params)


# NNX.


class Model(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(1)
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.out(jnp.tanh(self.hidden(x)))


def nnx_step(model, optimizer, x, y, **kwargs):
    argnums = nnx.DiffState(0, optimizer.wrt)
    grads = nnx.grad(lambda model: mse(model(x), y), argnums=argnums)(model)
    optimizer.update(model, grads, **kwargs)


def arrays(node):
    return nnx.to_pure_dict(nnx.state(node))


@pytest.mark.parametrize(
    "wrt", [nnx.Param, nnx.All(nnx.Param, nnx.PathContains("out"))]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", OPTIMIZERS, ids=whose)
def test_an_nnx_optimizer_gives_the_large_batchs_result(cls, way, wrt):
    step = nnx.jit(nnx_step, donate_argnames=("model", "optimizer"))
    want = Model()
    optimizer = nnx.Optimizer(want, OPT, wrt=wrt)
    for x, y in large_batches():
        step(want, optimizer, x, y)
    want.calls[...] = 6

    got = Model()
    optimizer = cls(got, WAYS[way](), wrt=wrt)
    for i, (x, y) in enumerate(zip(X, Y, strict=True)):
        step(got, optimizer, x, y)
        assert optimizer.step[...] == i + 1
        assert bool(optax_accum.released(optimizer.opt_state)) == (i % 3 == 2)
    close(arrays(got), arrays(want))


def test_an_optimizer_counts_windows_and_takes_extra_arguments():
    model = Model()
    optimizer = optax_accum.flax.Optimizer(model, WAYS["chain"](), wrt=nnx.Param)
    step = nnx.jit(nnx_step)
    step(model, optimizer, X[0], Y[0], weight=3)
    assert optimizer.gradient_step == 0
    step(model, optimizer, X[1], Y[1], weight=jnp.float32(5), release=True)
    assert optimizer.gradient_step == 1
    assert optimizer.step[...] == 2
    metrics = optax_accum.metrics(optimizer.opt_state)
    assert {type(x) for x in metrics.values()} == {type(jnp.zeros([]))}
    assert metrics["window_weight"] == 8


def test_an_optimizer_takes_the_values_of_a_loss_that_is_averaged():
    model = Model()
    tx = chain(accumulate(2, average_args=("value",)), recorder(), optax.sgd(0.1))
    optimizer = optax_accum.flax.Optimizer(model, tx, wrt=nnx.Param)
    for value in (1.0, 4.0):
        nnx_step(model, optimizer, X[0], Y[0], value=value)
    assert optimizer.opt_state[1].value[...] == 2.5


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=whose)
def test_an_optimizer_has_specs_for_a_shard_map(cls):
    tx = chain(accumulate(3, reduce_axes="data"), optax.sgd(0.1))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        optimizer = cls(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    specs = optax_accum.state_specs(optimizer, "data")
    rows = jax.tree.map(lambda x, spec: x.shape[:1] == (8,), optimizer, specs)
    over = jax.tree.map(lambda spec: spec == jax.P("data"), specs)
    assert jax.tree.leaves(rows) == jax.tree.leaves(over)
    assert sum(jax.tree.leaves(rows)) == 3  # kernel, bias and weight


# What the subclasses are for.


SIDE = 512


def train_state_step():
    tx = chain(accumulate(8), optax.adamw(0.1))
    params = {"w": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)}
    state = jax.eval_shape(
        lambda params: optax_accum.flax.TrainState.create(
            apply_fn=None, params=params, tx=tx
        ),
        params,
    )
    return lambda state, grads: state.apply_gradients(grads=grads), state, params


def optimizer_step():
    tx = chain(accumulate(8), optax.adamw(0.1))
    model = nnx.Linear(SIDE, SIDE, rngs=nnx.Rngs(0))
    optimizer = optax_accum.flax.Optimizer(model, tx, wrt=nnx.Param)
    graph, carry = nnx.split((model, optimizer))

    def step(carry, grads):
        model, optimizer = nnx.merge(graph, carry)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer))

    return step, carry, nnx.state(model, nnx.Param)


@pytest.mark.parametrize("make", [train_state_step, optimizer_step])
def test_between_releases_nothing_is_copied_and_the_parameters_are_not_read(make):
    step, carry, grads = make()
    compiled = jax.jit(step, donate_argnums=0).lower(carry, grads).compile()
    lines = lines_between_releases(compiled.as_text())
    assert copies(lines, at_least=SIDE) == []
    memory = compiled.memory_analysis()
    nbytes = 4 * SIDE**2
    assert memory.temp_size_in_bytes <= 0.01 * nbytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 0.01 * nbytes

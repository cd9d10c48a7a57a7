"""The JAX and Optax transformations around an accumulation, and inside it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal, types
from jax.sharding import AxisType, PartitionSpec

import optax_accum
from optax_accum import accumulate, chain

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, 0.2])}


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"]) ** 2)


X = jax.random.normal(jax.random.key(0), (6, 4, 2))  # two windows of three


def micro_step(tx, form):
    def step(carry, x):
        params, state = carry
        grads = jax.grad(loss_fn)(params, x)
        return FORMS[form](tx, grads, state, params), ()

    return step


def large_batch(opt, params=PARAMS, x=X):
    state = opt.init(params)
    for window in x.reshape(-1, 12, 2):
        grads = jax.grad(loss_fn)(params, window)
        updates, state = opt.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def train(tx, form="update", params=PARAMS, x=X):
    step = jax.jit(micro_step(tx, form))
    carry = params, tx.init(params)
    for microbatch in x:
        carry, _ = step(carry, microbatch)
    return carry


close = functools.partial(assert_trees_equal, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_jit_compiles_once_and_eager_agrees(form):
    tx = chain(accumulate(3), optax.adamw(0.1))
    step = jax.jit(micro_step(tx, form))
    eager = jitted = PARAMS, tx.init(PARAMS)
    for x in X:
        jitted, _ = step(jitted, x)
        eager, _ = micro_step(tx, form)(eager, x)
        close(eager, jitted)
    assert step._cache_size() == 1
    close(jitted[0], large_batch(optax.adamw(0.1))[0])


@pytest.mark.parametrize("form", FORMS)
def test_disabled_jit_agrees(form):
    tx = chain(accumulate(3), optax.adamw(0.1))
    with jax.disable_jit():
        carry = PARAMS, tx.init(PARAMS)
        for x in X[:3]:
            carry, _ = micro_step(tx, form)(carry, x)
    close(carry, train(tx, form, x=X[:3]))


@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_a_scan_carry(form):
    tx = chain(optax.zero_nans(), accumulate(3), optax.adamw(0.1))
    carry, _ = jax.jit(lambda c: jax.lax.scan(micro_step(tx, form), c, X))(
        (PARAMS, tx.init(PARAMS))
    )
    close(carry, train(tx, form))


@pytest.mark.parametrize("form", FORMS)
def test_vmap_trains_an_ensemble(form):
    tx = chain(accumulate(3), optax.adamw(0.1))
    ensemble = jax.tree.map(lambda p: jnp.stack([p, 2 * p, -p]), PARAMS)
    state = jax.vmap(tx.init)(ensemble)
    step = jax.jit(jax.vmap(micro_step(tx, form), in_axes=(0, None)))
    carry = ensemble, state
    for x in X:
        carry, _ = step(carry, x)
    for i in range(3):
        member = jax.tree.map(lambda p, i=i: p[i], ensemble)
        close(jax.tree.map(lambda p, i=i: p[i], carry[0]), train(tx, form, member)[0])


def test_the_members_of_an_ensemble_may_release_at_different_times():
    tx = chain(accumulate(None), optax.sgd(1.0, momentum=0.9))
    params = jnp.zeros((2, 3))
    state = jax.vmap(tx.init)(params)

    @jax.jit
    @jax.vmap
    def step(params, state, release):
        grads = jnp.ones(3)
        return optax_accum.apply_gradients(tx, grads, state, params, release=release)

    params, state = step(params, state, jnp.array([True, False]))
    np.testing.assert_array_equal(params, [[-1.0] * 3, [0.0] * 3])
    params, state = step(params, state, jnp.array([False, True]))
    np.testing.assert_array_equal(params, [[-1.0] * 3, [-1.0] * 3])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opt", [optax.sgd(0.1, momentum=0.9), optax.adam(0.1)])
def test_gradients_flow_through_whole_windows(opt, form):
    tx = chain(accumulate(3), opt)

    def after_training(scale, tx, x, step):
        params = jax.tree.map(lambda p: scale * p, PARAMS)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), x)
        return loss_fn(params, X[0])

    def large_step(carry, x):
        params, state = carry
        updates, state = opt.update(jax.grad(loss_fn)(params, x), state, params)
        return (optax.apply_updates(params, updates), state), ()

    want = (opt, X.reshape(-1, 12, 2), large_step)
    got = (tx, X, micro_step(tx, form))
    for transform in (jax.grad, jax.jacfwd):
        fn = transform(after_training)
        np.testing.assert_allclose(fn(1.2, *got), fn(1.2, *want), rtol=1e-4)


def test_gradients_flow_to_the_weights():
    tx = chain(accumulate(2), optax.sgd(1.0))
    grads = jnp.array([[1.0, 2.0], [5.0, -2.0]])

    def moved(weights):
        params = jnp.zeros(2)
        state = tx.init(params)
        for g, w in zip(grads, weights, strict=True):
            params, state = optax_accum.apply_gradients(tx, g, state, params, weight=w)
        return params.sum()

    def want(weights):
        return -(weights @ grads / weights.sum()).sum()

    w = jnp.array([1.0, 3.0])
    np.testing.assert_allclose(
        jax.grad(jax.jit(moved))(w), jax.grad(want)(w), rtol=1e-6
    )


@pytest.mark.parametrize("form", FORMS)
def test_donated_buffers_are_reused(form):
    tx = chain(accumulate(3), optax.adamw(0.1))
    step = jax.jit(micro_step(tx, form), donate_argnums=0)
    params = jax.tree.map(jnp.copy, PARAMS)
    carry = params, tx.init(params)
    for x in X:
        old = carry
        carry, _ = step(carry, x)
        assert all(x.is_deleted() for x in jax.tree.leaves(old) if x.ndim)
    close(carry[0], train(tx, form)[0])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.masked(tx, {"w": True, "b": True}),
        lambda tx: optax.partition({"all": tx}, {"w": "all", "b": "all"}),
        lambda tx: optax.named_chain(("tx", tx)),
        lambda tx: optax.flatten(tx),
        lambda tx: optax.apply_if_finite(tx, 3),
        lambda tx: optax.with_extra_args_support(tx),
        lambda tx: optax.inject_hyperparams(lambda unused: tx)(unused=1.0),
        lambda tx: optax.selective_transform(tx, freeze_mask={"w": False, "b": False}),
    ],
    ids=[
        "masked",
        "partition",
        "named_chain",
        "flatten",
        "apply_if_finite",
        "with_extra_args_support",
        "inject_hyperparams",
        "selective_transform",
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_optax_wrappers_go_around_and_inside(wrap, form):
    opt = optax.adamw(0.1)
    want, _ = large_batch(opt)
    close(train(wrap(chain(accumulate(3), opt)), form)[0], want)
    close(train(chain(accumulate(3), wrap(opt)), form)[0], want)


@pytest.fixture
def mesh():
    devices = np.array(jax.devices()[:2])
    if len(devices) < 2:
        pytest.skip("needs two devices")
    return jax.sharding.Mesh(devices, ("data",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("manual", [False, True])
def test_the_python_downstream_runs_once_in_a_compilation(mesh, form, manual):
    # Most of the time that tracing takes is an optimizer's.
    calls = []
    note = optax.stateless(lambda updates, _: calls.append(1) or updates)
    tx = chain(accumulate(3), note, optax.adam(0.1))

    def step(params, state, x):
        with jax.checking_leaks():
            return micro_step(tx, form)((params, state), x)[0]

    if manual:
        same, data = PartitionSpec(), PartitionSpec("data")
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(same, same, data), out_specs=same
        )
    state = tx.init(PARAMS)
    calls.clear()
    jax.jit(step).lower(PARAMS, state, jnp.ones((8, 2)))
    assert len(calls) == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opt", [optax.adamw(0.1), optax.lion(0.1)])
def test_shard_map_with_reduced_gradients(mesh, form, opt):
    tx = chain(accumulate(3), opt)
    data, same = PartitionSpec("data"), PartitionSpec()

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(same, same, data), out_specs=same
    )
    def step(params, state, x):
        local = jax.lax.pcast(params, "data", to="varying")
        grads = jax.lax.pmean(jax.grad(loss_fn)(local, x), "data")
        return FORMS[form](tx, grads, state, params)

    carry = PARAMS, tx.init(PARAMS)
    for x in X:
        carry = step(*carry, x)
    close(carry[0], large_batch(opt)[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("opt", [optax.adamw(0.1), optax.lion(0.1)])
def test_shard_map_with_a_model_on_each_device(mesh, form, opt):
    # Everything varies over the devices, but the states start as plain zeros.
    tx = chain(accumulate(3), opt)
    data = PartitionSpec("data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(data, data), out_specs=data)
    def window(params, x):
        params = jax.tree.map(lambda p: p[0], params)
        carry = params, tx.init(params)
        for microbatch in x:
            carry, _ = micro_step(tx, form)(carry, microbatch)
        return jax.tree.map(lambda p: p[None], carry[0])

    models = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)
    models = window(models, jnp.concatenate([X[:3], X[3:]]))
    for i in range(2):
        start = jax.tree.map(lambda p, i=i: (i + 1) * p, PARAMS)
        got = jax.tree.map(lambda p, i=i: p[i], models)
        close(got, train(tx, form, start, X[3 * i : 3 * i + 3])[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_accumulator_follows_the_sharding_of_the_parameters(form, kind):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
        params = jax.device_put(jnp.arange(8.0), sharding)
        tx = chain(accumulate(2), optax.adam(0.5))
        state = tx.init(params)
        assert state[0].acc_grads.sharding == sharding
        step = jax.jit(functools.partial(FORMS[form], tx))
        for _ in range(2):
            params, state = step(jnp.ones_like(params), state, params)
        assert params.sharding == sharding
        assert state[0].acc_grads.sharding == sharding
    np.testing.assert_allclose(params, jnp.arange(8.0) - 0.5, rtol=1e-5)


def test_init_can_be_evaluated_without_memory():
    tx = chain(accumulate(2), optax.adam(0.1))
    shapes = jax.eval_shape(tx.init, PARAMS)
    assert types(shapes) == types(tx.init(PARAMS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_explicitly_sharded_parameters_and_updates_keep_their_layout(form, dtype):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    tx = chain(accumulate(2, dtype=dtype), optax.adamw(0.1))
    with jax.set_mesh(mesh):
        sharding = jax.NamedSharding(mesh, PartitionSpec("x"))
        params = jax.device_put(jnp.ones(4), sharding)
        state = tx.init(params)
        step = jax.jit(functools.partial(FORMS[form], tx))
        new = params
        for _ in range(2):
            new, state = step(params, state, new)
            assert jax.typeof(new) == jax.typeof(params)
        other = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, PartitionSpec()))
        with pytest.raises(ValueError, match="reshard"):
            step(other, state, new)


@pytest.mark.parametrize("form", FORMS)
def test_a_mean_over_devices_once_a_window_is_the_same_on_all(form):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    pmean = optax.stateless(lambda updates, params: jax.lax.pmean(updates, "x"))
    tx = chain(accumulate(2), pmean, optax.sgd(1.0))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("x")),
        out_specs=PartitionSpec(),
    )
    def train_window(params, grads):
        # Each device has gradients of its own, and so an accumulator.
        state = jax.tree.map(
            lambda x: jax.lax.pcast(x, "x", to="varying"), tx.init(params)
        )
        for g in grads:
            params, state = FORMS[form](tx, g, state, params)
        return params

    grads = jnp.arange(8.0).reshape(4, 2)  # two microbatches on each device
    with jax.set_mesh(mesh):
        params = train_window(jnp.zeros(2), grads)
    np.testing.assert_array_equal(params, -grads.mean(0))

"""Microbatches of a batch that is spread over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from losses import PARAMS, close, count, draw, loss_fn, masked_loss
from test_microbatch import with_aux

import optax_accum

COLLECTIVES = ("all-to-all", "collective-permute", "all-gather")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("batch_size", "size"), [(16, 4), (16, 2), (20, 8), (6, 8)])
def test_a_sharded_batch_stays_where_it_is(batch_size, size, axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    sharding = NamedSharding(mesh, P("data"))
    batch = jax.device_put(draw(batch_size), sharding)
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    modes = {"mean": "mean", "sum": "sum", "stack": "stack", "last": "last"}
    ours = optax_accum.value_and_grad(
        with_aux, has_aux=True, microbatch_size=size, aux=modes
    )
    compiled = jax.jit(ours).lower(params, batch).compile()
    for name in COLLECTIVES:
        assert f" {name}" not in compiled.as_text()
    (value, aux), grads = compiled(params, batch)
    (want_value, want), want_grads = jax.value_and_grad(with_aux, has_aux=True)(
        PARAMS, draw(batch_size)
    )
    assert aux["stack"].sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(aux["stack"], want["stack"], rtol=1e-5)
    close((value, grads), (want_value, want_grads))


def test_explicitly_sharded_parameters_keep_their_layout():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones((4, 2)), NamedSharding(mesh, P("data")))
        x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
        ours = optax_accum.grad(
            lambda w, x: jnp.mean(x) * jnp.sum(w**2), microbatch_size=2
        )
        grads = jax.jit(ours)(params, x)
        assert jax.typeof(grads).sharding == jax.typeof(params).sharding
    np.testing.assert_allclose(grads, np.full((4, 2), 7.0))


@pytest.mark.parametrize("weight", [None, count])
def test_inside_shard_map_each_device_has_its_own_mean(weight):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    fun = loss_fn if weight is None else masked_loss
    ours = optax_accum.value_and_grad(fun, microbatch_size=2, weight=weight)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    )
    def on_each(params, batch):
        params = jax.lax.pcast(params, "data", to="varying")
        return jax.tree.map(lambda x: x[None], ours(params, batch))

    batch = draw(10)
    got = on_each(PARAMS, batch)
    for i in range(2):
        half = jax.tree.map(lambda x, i=i: x[5 * i : 5 * i + 5], batch)
        want = jax.value_and_grad(fun)(PARAMS, half)
        close(jax.tree.map(lambda x, i=i: x[i], got), want)


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_layout_that_cannot_be_split_where_it_is_is_refused(size):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8), jax.P("data"))
        ours = optax_accum.value_and_grad(
            lambda w, x: w * jnp.mean(x), microbatch_size=size
        )
        with pytest.raises(ValueError, match=r"2 ways over 'data'.*multiple of 2"):
            jax.jit(ours)(1.0, x)


def in_shard_map(fun):
    """Of a function whose first result differs from device to device."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": (P("data"), P())}
    return jax.jit(jax.shard_map(fun, mesh=mesh, **specs))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_gradients_by_replicated_parameters_are_summed_over_the_devices(size):
    ours = optax_accum.value_and_grad(loss_fn, microbatch_size=size)

    def apart(fun):
        def on_each(params, batch):
            value, grads = fun(params, batch)
            return value[None], grads

        return in_shard_map(on_each)

    batch = draw(10)
    want = apart(jax.value_and_grad(loss_fn))(PARAMS, batch)
    close(apart(ours)(PARAMS, batch), want)


def test_a_loss_that_is_reduced_over_the_devices_itself():
    def fun(params, batch):
        return jax.lax.pmean(loss_fn(params, batch), "data")

    def apart(fun):
        def on_each(params, batch):
            value, grads = fun(params, batch)
            return jax.lax.pcast(value, "data", to="varying")[None], grads

        return in_shard_map(on_each)

    batch = draw(10)
    skip = optax.skip_not_finite
    ours = optax_accum.value_and_grad(fun, microbatch_size=2, skip=skip)
    close(apart(ours)(PARAMS, batch), apart(jax.value_and_grad(fun))(PARAMS, batch))


@pytest.mark.parametrize(
    "options",
    [
        {"weight": count},
        {"skip": lambda grads, step, params: (jax.lax.axis_index("data") > 0, ())},
    ],
)
def test_weights_that_differ_where_gradients_are_summed_are_refused(options):
    # JAX sums over the devices before anything can be weighted.
    def local(params, batch):
        ours = optax_accum.value_and_grad(masked_loss, microbatch_size=2, **options)
        value, grads = ours(params, batch)
        return value[None], grads

    with pytest.raises(ValueError, match=r"varies over the mesh axes \['data'\]"):
        in_shard_map(local)(PARAMS, draw(8))


def test_a_mesh_that_is_manual_in_part():
    mesh = jax.make_mesh((2, 1), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def apart(fun):
        return jax.jit(
            jax.shard_map(
                fun,
                mesh=mesh,
                in_specs=(P(), P("data")),
                out_specs=P(),
                axis_names={"data"},
            )
        )

    ours = optax_accum.grad(loss_fn, microbatch_size=2)
    batch = draw(10)
    close(apart(ours)(PARAMS, batch), apart(jax.grad(loss_fn))(PARAMS, batch))


def test_what_is_carried_may_come_to_differ_from_device_to_device_later():
    def fun(w, x, carry):
        return w * jnp.mean(x), ((jnp.sum(x), carry[0]), ())

    ours = optax_accum.value_and_grad(
        fun, has_aux=True, carry_argnums=2, microbatch_size=1
    )

    def local(w, x):
        (value, (carry, _)), grads = ours(w, x, (0.0, 0.0))
        return jnp.stack([value, *carry])[None], grads

    got, _ = in_shard_map(local)(1.0, jnp.arange(6.0))
    np.testing.assert_array_equal(got, [[1.0, 2.0, 1.0], [4.0, 5.0, 4.0]])

"""A window in one step over many devices: one reduction, after the last microbatch."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from losses import PARAMS, close, count, draw, loss_fn, masked_loss

import optax_accum

N = 8
BYTES = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
KINDS = [AxisType.Auto, AxisType.Explicit]
ours = functools.partial(optax_accum.value_and_grad, reduce_axes="data")


def on_mesh(fun, *args, kind=AxisType.Auto, shape=(N,), names=("data",), batches=1):
    """What a function gives whose last arguments are sharded over "data"."""
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    with jax.set_mesh(mesh):
        first = len(args) - batches
        args = [
            jax.device_put(x, NamedSharding(mesh, P("data") if i >= first else P()))
            for i, x in enumerate(args)
        ]
        return jax.jit(fun)(*args)


def microbatches(x):
    """Four examples on each device, in two microbatches that interleave them."""
    return x.reshape(N, 2, 2, 3).transpose(2, 0, 1, 3).reshape(2, 2 * N, 3)


def with_aux(params, batch):
    value = loss_fn(params, batch)
    rows = jnp.sum(batch["x"], axis=-1)
    return value, {"mean": value, "sum": len(rows), "stack": rows}


MODES = {"mean": "mean", "sum": "sum", "stack": "stack"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "how",
    [
        {"microbatch_size": 8},
        {"microbatch_size": 16},
        {"microbatch_size": 24},
        {"microbatch_size": 400},
        {"num_microbatches": 3},
        {"num_microbatches": 1},
    ],
    ids=str,
)
def test_it_is_the_large_batch_whatever_the_microbatches(how, kind):
    batch = draw(40)
    fun = ours(with_aux, has_aux=True, aux=MODES, **how)
    (value, aux), grads = on_mesh(fun, PARAMS, batch, kind=kind)
    (want, want_aux), want_grads = jax.value_and_grad(with_aux, has_aux=True)(
        PARAMS, batch
    )
    close((value, grads), (want, want_grads))
    np.testing.assert_allclose(aux["stack"], want_aux["stack"], rtol=1e-5)
    assert aux["sum"] == 40
    np.testing.assert_allclose(aux["mean"], want_aux["mean"], rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [8, 16, 40])
def test_the_mean_is_over_the_tokens_of_all_devices(size, kind):
    batch = draw(40)
    fun = ours(masked_loss, microbatch_size=size, weight=count)
    close(
        on_mesh(fun, PARAMS, batch, kind=kind),
        jax.value_and_grad(masked_loss)(PARAMS, batch),
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_it_reduces_over_its_axes(check_vma):
    batch = draw(40)
    fun = ours(masked_loss, microbatch_size=2, weight=count)

    def local(params, batch):
        return jax.shard_map(
            fun, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
        )(params, batch)

    want = jax.value_and_grad(masked_loss)(PARAMS, batch)
    close(on_mesh(local, PARAMS, batch), want)


def test_in_a_shard_map_over_some_axes_the_others_stay_automatic():
    def fun(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w, x = jnp.linspace(-1, 1, 6).reshape(3, 2), draw(16)["x"][:, :3]
    with jax.set_mesh(mesh):
        on_devices = jax.device_put((w, x), (P(None, "model"), P("data")))
        compiled = jax.jit(ours(fun, microbatch_size=8)).lower(*on_devices).compile()
        value, grads = compiled(*on_devices)
    assert grads.sharding.is_equivalent_to(on_devices[0].sharding, 2)
    found = [c for c in collectives(compiled.as_text()) if not c.in_loop]
    # A half of the parameters on each, with the loss and the weight.
    assert {c.bytes for c in found if c.name == "all-reduce"} == {w.nbytes // 2 + 8}
    close((value, grads), jax.value_and_grad(fun)(w, x))


@pytest.mark.parametrize("kind", KINDS)
def test_one_reduction_follows_the_loop(kind):
    mesh = jax.make_mesh((N,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        batch = jax.device_put(draw(80), P("data"))
        params = jax.device_put(PARAMS, P())

        def found(**options):
            fun = optax_accum.value_and_grad(loss_fn, microbatch_size=16, **options)
            text = jax.jit(fun).lower(params, batch).compile().as_text()
            return [c for c in collectives(text) if c.bytes >= BYTES]

        (reduction,) = found(reduce_axes="data")
        assert (reduction.name, reduction.in_loop) == ("all-reduce", False)
        assert reduction.bytes <= BYTES + 16  # the loss and the weight go along
        assert any(c.in_loop for c in found())  # which is what this is for


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_on_one_device_leaves_its_microbatch_out_on_all(kind):
    batch = draw(40)
    # The fourth of five examples of each device is in the fourth microbatch.
    bad = batch | {"x": batch["x"].at[13].set(jnp.nan)}
    kept = np.delete(np.arange(40), np.arange(3, 40, 5))
    fun = ours(loss_fn, microbatch_size=8, skip=optax.skip_not_finite)
    got = on_mesh(fun, PARAMS, bad, kind=kind)
    want = jax.value_and_grad(loss_fn)(PARAMS, jax.tree.map(lambda x: x[kept], batch))
    close(got, want)


def test_a_device_without_tokens_adds_nothing():
    batch = draw(40)
    batch["mask"] = batch["mask"] & (jnp.arange(40) >= 20)
    fun = ours(masked_loss, microbatch_size=8, weight=count)
    want = jax.value_and_grad(masked_loss)(PARAMS, batch)
    close(on_mesh(fun, PARAMS, batch), want)


def test_small_batches_of_the_noise_are_what_one_device_has():
    def fun(w, x):
        return jnp.mean(x @ w)

    w, x = jnp.ones(3), jax.random.normal(jax.random.key(0), (4 * N, 3))
    _, _, noise = on_mesh(ours(fun, microbatch_size=2 * N, track_noise=True), w, x)
    tx = optax_accum.accumulate(2 * N, track_noise=True, noise_decay=0.0)
    state = tx.init(w)
    for two in microbatches(x).reshape(2 * N, 2, 3):
        _, state = tx.update(jnp.mean(two, axis=0), state)
    got, want = map(optax_accum.noise_scale, (noise, state))
    np.testing.assert_allclose(got, want, rtol=1e-4)


# What is not an array, or not of the batch.


def test_equinox_models_and_closed_over_arrays():
    model = eqx.nn.MLP(3, 1, width_size=4, depth=1, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (32, 3))
    scale = jnp.arange(3.0)

    def fun(model, x):
        return jnp.mean(jax.vmap(model)(x * scale) ** 2)

    def grads_of(x):
        return ours(fun, microbatch_size=16)(model, x)[1].layers[0].weight

    want = eqx.filter_grad(fun)(model, x).layers[0].weight
    close(on_mesh(grads_of, x), want)


def test_each_device_has_a_random_key_of_its_own():
    def fun(w, x, key):
        noise = jax.random.normal(key, x.shape)
        return w * jnp.mean(noise), noise

    fun = ours(fun, has_aux=True, key_argnums=2, microbatch_size=16, aux="stack")
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        (_, noise), _ = on_mesh(
            lambda w, x, key=key: fun(w, x, key), 1.0, jnp.zeros(64)
        )
        assert len(np.unique(noise)) == 64


def test_random_streams_of_modules_differ_on_the_devices_and_go_on():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.dropout = nnx.Param(jnp.ones(())), nnx.Dropout(0.5)
            self.rngs = nnx.Rngs(dropout=0)

        def __call__(self, x):
            return self.w * self.dropout(x, rngs=self.rngs)

    def fun(model, x):
        out = model(x)
        return jnp.mean(out), out

    fun = ours(fun, has_aux=True, microbatch_size=4 * N, aux="stack")
    model, mesh = Model(), jax.make_mesh((N,), ("data",))
    key = jax.random.key_data(model.rngs.dropout.key[...])
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(16 * N), P("data"))
        (_, out), _ = nnx.jit(fun)(model, x)
    rows = {tuple(np.asarray(row) > 0) for row in out.reshape(N, 16)}
    assert len(rows) == N
    assert model.rngs.dropout.count[...] == 4
    np.testing.assert_array_equal(jax.random.key_data(model.rngs.dropout.key[...]), key)


class Normalised(nnx.Module):
    def __init__(self, axis_name=None):
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, axis_name=axis_name, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return jnp.mean(self.out(self.norm(x)) ** 2)


def step_of(model):
    fun = ours(lambda model, x: model(x), microbatch_size=16)
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        x = jax.random.normal(jax.random.key(0), (32, 3))
        return nnx.jit(fun)(model, jax.device_put(x, P("data")))


def test_batch_statistics_over_the_devices_are_carried():
    model = Normalised(axis_name="data")
    step_of(model)
    want = Normalised()
    for x in microbatches(jax.random.normal(jax.random.key(0), (32, 3))):
        want(x)
    np.testing.assert_allclose(
        model.norm.mean[...], want.norm.mean[...], rtol=1e-4, atol=1e-6
    )


def test_what_is_carried_goes_on_if_any_device_has_tokens():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.calls = nnx.Param(jnp.ones(3)), nnx.Variable(jnp.zeros([]))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x, mask):
            self.calls[...] += 1
            each = self.dropout(x) @ self.w[...]
            return jnp.sum(each * mask) / jnp.maximum(jnp.sum(mask), 1)

    fun = ours(
        lambda model, x, mask: model(x, mask),
        batch_argnums=(1, 2),
        microbatch_size=16,
        weight=lambda model, x, mask: jnp.sum(mask),
    )
    # The only token is on the fourth device, in the first of two microbatches.
    mask, model = jnp.arange(4 * N) == 12, Model()
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        batch = jax.device_put((jnp.ones((4 * N, 3)), mask), P("data"))
        nnx.jit(fun)(model, *batch)
    assert model.calls[...] == 1
    assert model.dropout.rngs.count[...] == 1


def test_what_is_carried_and_differs_between_devices_is_refused():
    with pytest.raises(ValueError, match=r"same on all devices.*mean.*axis_name"):
        step_of(Normalised())

    def fun(w, x, carry):
        return w * jnp.mean(x), (carry + jnp.sum(x), ())

    fun = ours(fun, has_aux=True, carry_argnums=2, microbatch_size=16)
    with pytest.raises(ValueError, match=r"same on all devices.*'2'.*pmean"):
        on_mesh(lambda w, x: fun(w, x, 0.0), 1.0, jnp.ones(64))


# Wrong arguments.


@pytest.mark.parametrize("size", [1, 12])
def test_sizes_are_counted_over_all_devices(size):
    with pytest.raises(ValueError, match=rf"all 8 devices.*multiple.*got {size}"):
        on_mesh(ours(loss_fn, microbatch_size=size), PARAMS, draw(40))


def test_a_batch_that_cannot_be_divided_is_refused():
    fun = ours(loss_fn, microbatch_size=8)
    mesh = jax.make_mesh((N,), ("data",))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"multiple of 8 examples.*argument 1\['"),
    ):
        jax.jit(fun)(PARAMS, draw(42))


def test_without_a_mesh_the_error_says_how_to_set_one():
    with pytest.raises(ValueError, match=r"'data'.*there is none.*set_mesh"):
        ours(loss_fn, microbatch_size=8)(PARAMS, draw(40))


def test_the_last_of_several_devices_is_refused():
    fun = ours(with_aux, has_aux=True, aux="last", microbatch_size=8)
    with pytest.raises(ValueError, match=r'aux="last".*of one device'):
        on_mesh(fun, PARAMS, draw(40))


def test_a_loss_that_is_reduced_over_the_devices_itself_is_refused():
    def fun(params, batch):
        return jax.lax.pmean(loss_fn(params, batch), "data")

    with pytest.raises(ValueError, match="reduced its loss over the devices itself"):
        on_mesh(ours(fun, microbatch_size=8), PARAMS, draw(40))


def test_parameters_that_are_sharded_over_the_axis_are_refused():
    mesh = jax.make_mesh((N,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        w, x = jax.device_put((jnp.ones(N), jnp.ones((16, N))), P("data"))
        fun = ours(lambda w, x: jnp.mean(x) * jnp.sum(w), microbatch_size=8)
        with pytest.raises(ValueError, match=r"sharded over \['data'\].*replicated"):
            jax.jit(fun)(w, x)


@pytest.mark.parametrize("under", [jax.jit, lambda fun: fun], ids=["jit", "bare"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_not_sharded_yet_is_shared_out(kind, under):
    batch = jax.tree.map(np.asarray, draw(40))
    with jax.set_mesh(jax.make_mesh((N,), ("data",), axis_types=(kind,))):
        got = under(ours(loss_fn, microbatch_size=16))(PARAMS, batch)
    close(got, jax.value_and_grad(loss_fn)(PARAMS, batch))


@pytest.mark.parametrize(
    "spec", ["data", "model", ("model", "data"), ("data", "model")]
)
@pytest.mark.parametrize("axes", ["data", ("data", "model"), ("model", "data")])
def test_an_explicit_batch_on_other_axes_is_laid_out_over_these_too(spec, axes):
    batch = draw(40)
    kinds = (AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)):
        batch = jax.device_put(batch, P(spec))
        fun = optax_accum.value_and_grad(loss_fn, microbatch_size=16, reduce_axes=axes)
        got = jax.jit(fun)(PARAMS, batch)
    close(got, jax.value_and_grad(loss_fn)(PARAMS, draw(40)))


@pytest.mark.parametrize("batch", [1.0, jax.random.key(0)])
def test_a_batch_without_examples_is_named(batch):
    fun = ours(loss_fn, microbatch_size=8)
    with (
        jax.set_mesh(jax.make_mesh((N,), ("data",))),
        pytest.raises(ValueError, match="leading axis, but argument 1 is a scalar"),
    ):
        fun(PARAMS, batch)

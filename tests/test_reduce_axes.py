"""Gradients that are partial over devices are reduced once a window, and exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum
from optax_accum import accumulate, chain, defer_reduction, state_specs

N = 8
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4), "b": jnp.linspace(0, 1, 4)}
DATA = jax.random.normal(jax.random.key(0), (6, 2 * N, 3))  # microbatches
MASK = jax.random.bernoulli(jax.random.key(1), 0.6, (6, 2 * N))
close = functools.partial(assert_trees_equal, rtol=2e-5, atol=2e-6)


def loss_fn(params, x, mask):
    out, b = x @ params["w"], params["b"]
    spec = jax.typeof(out).sharding.spec
    if "data" in spec:  # JAX has no sum of a tagged bias and a sharded array
        b = jax.sharding.reshard(jnp.broadcast_to(b, out.shape), spec)
    losses = jnp.sum(jnp.tanh(out + b) ** 2, axis=-1)
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)


def mesh_of(kind, shape=(N,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def large_batches(optimizer, window, mask=MASK):
    """The parameters after a step on each window's examples at once."""
    params, state = PARAMS, optimizer.init(PARAMS)
    for i in range(0, len(DATA), window):
        x, m = DATA[i : i + window].reshape(-1, 3), mask[i : i + window].reshape(-1)
        grads = jax.grad(loss_fn)(params, x, m)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


class Run:
    """Training on a mesh, in a `shard_map` or by explicit types."""

    def __init__(self, way, tx, form="apply_gradients", weighted=True, **shard_map):
        kind = AxisType.Auto if way == "shard_map" else AxisType.Explicit
        self.mesh, self.tx = mesh_of(kind), tx

        def step(params, state, x, mask):
            grads = jax.grad(loss_fn)(defer_reduction(params, "data"), x, mask)
            more = {"weight": jnp.sum(mask)} if weighted else {}
            return FORMS[form](tx, grads, state, params, **more)

        with jax.set_mesh(self.mesh):
            # Copies, since the steps are given their buffers.
            self.params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), P())
            self.state = tx.init(self.params)
            if way == "shard_map":
                specs = state_specs(self.state, "data")
                step = jax.shard_map(
                    step,
                    in_specs=(P(), specs, P("data"), P("data")),
                    out_specs=(P(), specs),
                    **shard_map,
                )
            self.step = jax.jit(step, donate_argnums=(0, 1))

    def data(self, *arrays):
        return jax.device_put(arrays, NamedSharding(self.mesh, P("data")))

    def take(self, x, mask):
        with jax.set_mesh(self.mesh):
            data = self.data(x, mask)
            self.params, self.state = self.step(self.params, self.state, *data)

    def text(self):
        with jax.set_mesh(self.mesh):
            data = self.data(DATA[0], MASK[0])
            return self.step.lower(self.params, self.state, *data).compile().as_text()


WAYS = ["shard_map", "explicit"]
ADAM = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.05))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("window", [1, 3])
def test_unequal_weights_on_the_devices_give_the_large_batch(way, form, window):
    run = Run(way, chain(accumulate(window, reduce_axes="data"), ADAM), form)
    for x, mask in zip(DATA, MASK, strict=True):
        run.take(x, mask)
    close(run.params, large_batches(ADAM, window))
    assert optax.tree.get(run.state, "gradient_step") == len(DATA) // window


@pytest.mark.parametrize("way", WAYS)
def test_multi_steps_reduces_once_a_window_too(way):
    tx = optax_accum.MultiSteps(ADAM, 3, reduce_axes="data")
    run = Run(way, tx, weighted=False)
    for x in DATA:
        run.take(x, jnp.ones(len(x)))
    close(run.params, large_batches(ADAM, 3, jnp.ones_like(MASK)))


def test_without_types_of_what_varies_the_mean_is_the_same():
    tx = chain(accumulate(3, reduce_axes=("data",)), ADAM)
    run = Run("shard_map", tx, check_vma=False)
    for x, mask in zip(DATA, MASK, strict=True):
        run.take(x, mask)
    close(run.params, large_batches(ADAM, 3))


SCALARS = 16  # bytes, at most, of a few scalars
BYTES = sum(x.nbytes for x in jax.tree.leaves(PARAMS))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("weighted", [True, False])
def test_nothing_is_sent_between_releases_and_the_parameters_once(way, form, weighted):
    tx = chain(accumulate(3, reduce_axes="data"), ADAM)
    found = collectives(Run(way, tx, form, weighted).text())
    assert {c.name for c in found} == {"all-reduce"}
    of_gradients = [c for c in found if c.bytes > SCALARS]
    assert [c.bytes for c in of_gradients] == [BYTES]
    assert all(c.at_release for c in of_gradients)
    # On an explicit mesh the loss and the weight are those of all devices. In a
    # `shard_map` each device has its own, and the weight is added up at the release.
    assert all(
        c.at_release == (way == "shard_map") for c in found if c.bytes <= SCALARS
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_bare_accumulation_reduces_only_at_a_release(way):
    tx = optax.chain(accumulate(3, reduce_axes="data"), optax.sgd(0.1))
    run = Run(way, tx, "update")
    found = [c for c in collectives(run.text()) if c.bytes > SCALARS]
    assert [c.at_release for c in found] == [True]
    for x, mask in zip(DATA, MASK, strict=True):
        run.take(x, mask)
    close(run.params, large_batches(optax.sgd(0.1), 3))


@pytest.mark.parametrize("way", WAYS)
def test_integer_gradients_are_exact_to_the_bit(way):
    tx = chain(accumulate(2, reduce_axes="data"), optax.sgd(1.0))
    mesh = mesh_of(AxisType.Auto if way == "shard_map" else AxisType.Explicit)
    grads = jax.random.randint(jax.random.key(2), (2, N, 5), -1000, 1000)

    def step(params, state, g):
        part = defer_reduction(params, "data")
        g = jax.grad(lambda p: jnp.sum(g.astype(jnp.float32) @ p))(part)
        return optax_accum.apply_gradients(tx, g, state, params)

    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.zeros(5), P())
        state = tx.init(params)
        if way == "shard_map":
            specs = state_specs(state, "data")
            step = jax.shard_map(
                step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
            )
        for g in grads:
            g = jax.device_put(g, P("data"))
            params, state = jax.jit(step)(params, state, g)
    total = -np.sum(np.asarray(grads, np.float32), axis=(0, 1))
    count = 2 * N if way == "shard_map" else 2  # whose gradients it is the mean of
    np.testing.assert_array_equal(params, np.float32(total) / np.float32(count))


# Agreement.


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_skip", ["wait", "shrink"])
def test_a_nan_on_one_shard_skips_everywhere(way, on_skip):
    skip = optax.skip_not_finite
    tx = accumulate(2, reduce_axes="data", skip=skip, on_skip=on_skip)
    run = Run(way, chain(tx, ADAM))
    whole = chain(accumulate(2 if on_skip == "wait" else 1), ADAM)
    bad = DATA[0].at[5].set(jnp.nan)
    mask = jnp.ones(2 * N)
    for x in (DATA[1], bad, *([DATA[2]] if on_skip == "wait" else [])):
        run.take(x, mask)
    params, state = PARAMS, whole.init(PARAMS)
    for x in DATA[1 : 3 if on_skip == "wait" else 2]:
        grads = jax.grad(loss_fn)(params, x, mask)
        params, state = optax_accum.apply_gradients(whole, grads, state, params)
    close(run.params, params)
    metrics = optax_accum.metrics(run.state)
    assert (metrics["skipped"], metrics["gradient_step"]) == (1, 1)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.complex64])
def test_devices_agree_on_a_state_of_skip_of_any_dtype(dtype):
    def skip(updates, gradient_step, params):
        return jnp.any(updates > 5), jnp.sum(updates).astype(dtype)

    tx = accumulate(2, reduce_axes="data", skip=skip)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        state = tx.init(jnp.zeros(1))
        specs = state_specs(state, "data")
        step = jax.shard_map(
            lambda g, state: tx.update(g, state)[1],
            in_specs=(P("data"), specs),
            out_specs=specs,
        )
        state = jax.jit(step)(jnp.arange(float(N)), state)
    assert (state.skip_state, state.skipped) == (N - 1, 1)


def test_a_release_on_one_device_is_one_on_all():
    tx = chain(accumulate(None, reduce_axes="data"), optax.sgd(1.0))
    mesh = mesh_of(AxisType.Auto)

    def step(params, state, g):
        release = jax.lax.axis_index("data") == 3
        return optax_accum.apply_gradients(
            tx, g[0], state, params, release=release, weight=jax.lax.axis_index("data")
        )

    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.zeros(2), P())
        state = tx.init(params)
        specs = state_specs(state, "data")
        step = jax.jit(
            jax.shard_map(
                step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
            )
        )
        grads = jax.device_put(jnp.arange(2.0 * N).reshape(N, 2), P("data"))
        params, state = step(params, state, grads)
    want = -np.average(np.arange(2.0 * N).reshape(N, 2), axis=0, weights=range(N))
    np.testing.assert_allclose(params, want, rtol=1e-6)
    assert optax_accum.metrics(state)["window_weight"] == sum(range(N))


def test_a_window_without_weight_on_any_device_releases_nothing():
    run = Run("shard_map", chain(accumulate(2, reduce_axes="data"), ADAM))
    for x in DATA[:2]:
        run.take(x, jnp.zeros(2 * N, bool))
    assert optax_accum.metrics(run.state)["gradient_step"] == 0
    assert_trees_equal(jax.device_get(run.params), jax.device_get(PARAMS))
    for x, mask in zip(DATA, MASK, strict=True):  # only half of the devices have any
        run.take(x, mask & (jnp.arange(2 * N) < N))
    close(run.params, large_batches(ADAM, 2, MASK & (jnp.arange(2 * N) < N)))


@pytest.mark.parametrize("way", WAYS)
def test_arguments_to_average_are_over_all_devices(way):
    tx = chain(
        accumulate(2, reduce_axes="data", average_args=("value",)),
        optax.GradientTransformationExtraArgs(
            lambda params: jnp.zeros([]),
            lambda updates, state, params=None, *, value: (updates, value),
        ),
    )
    state = linear_steps(way, tx, DATA[:2])[-1]
    np.testing.assert_allclose(state[1], np.mean(DATA[:2] @ np.ones(3)), rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("every", [1, 2])
def test_the_noise_of_every_window_is_over_all_devices(way, every):
    tx = chain(accumulate(every, reduce_axes="data", track_noise=True), optax.sgd(0.0))
    # A small batch is what one device has of a microbatch.
    alone_tx = accumulate(every * N, track_noise=True)
    alone, want = alone_tx.init(jnp.ones(3)), [np.nan] * 3
    steps = zip(DATA, linear_steps(way, tx, DATA), strict=True)
    for i, (data, state) in enumerate(steps, 1):
        for x in data.reshape(N, 2, 3):
            _, alone = alone_tx.update(jnp.mean(x, axis=0), alone)
        if i % every == 0:  # and until the next release it stays
            want = optax_accum.noise_scale(alone)
        got = optax_accum.noise_scale(state)
        np.testing.assert_allclose(got, want, rtol=1e-4)


def linear_steps(way, tx, data):
    """The states after steps on the mean of `x @ params`, with the loss as `value`."""
    mesh = mesh_of(AxisType.Auto if way == "shard_map" else AxisType.Explicit)

    def step(params, state, x):
        part = defer_reduction(params, "data")
        value, grads = jax.value_and_grad(lambda p: jnp.mean(x @ p))(part)
        return optax_accum.apply_gradients(tx, grads, state, params, value=value)

    with jax.set_mesh(mesh):
        params = jax.device_put(jnp.ones(3), P())
        state = tx.init(params)
        if way == "shard_map":
            specs = state_specs(state, "data")
            step = jax.shard_map(
                step, in_specs=(P(), specs, P("data")), out_specs=(P(), specs)
            )
        step, states = jax.jit(step), []
        for x in data:
            params, state = step(params, state, jax.device_put(x, P("data")))
            states.append(state)
    return states


# Tags, specs and errors.


def on_explicit_mesh(fun, *args):
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        return jax.jit(fun)(*args)


def test_a_gradient_that_was_reduced_already_is_an_error():
    tx = accumulate(2, reduce_axes="data")
    match = r"\['b'\].*not partial over.*'data'.*defer_reduction"

    def step(x):
        grads = jax.grad(loss_fn)(PARAMS, x, 1.0)
        return tx.update(grads, tx.init(PARAMS))[1].mini_step

    with (
        pytest.raises(ValueError, match=match),
        jax.set_mesh(mesh_of(AxisType.Explicit)),
    ):
        jax.jit(step)(jax.device_put(DATA[0], P("data")))
    with pytest.raises(ValueError, match=match), jax.set_mesh(mesh_of(AxisType.Auto)):
        jax.jit(jax.shard_map(step, in_specs=P("data"), out_specs=P()))(DATA[0])


def test_on_an_automatic_mesh_the_error_says_where_to_go():
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        tx = accumulate(2, reduce_axes="data")
        state = tx.init(PARAMS)
        with pytest.raises(ValueError, match=r"shard_map.*value_and_grad.*explicit"):
            jax.jit(tx.update)(PARAMS, state)
        with pytest.raises(ValueError, match=r"shard_map.*value_and_grad.*explicit"):
            defer_reduction(PARAMS, "data")


def test_without_a_mesh_or_with_another_the_error_names_the_axis():
    tx = accumulate(2, reduce_axes="data")
    with pytest.raises(ValueError, match="'data', which must be an axis of the mesh"):
        tx.init(PARAMS)
    with jax.set_mesh(mesh_of(AxisType.Explicit, names=("batch",))):
        with pytest.raises(ValueError, match=r"there is \('batch',\)"):
            tx.init(PARAMS)
        with pytest.raises(ValueError, match=r"there is \('batch',\)"):
            defer_reduction(PARAMS, "data")


@pytest.mark.parametrize("axes", [1, ("data", 1), ("data", "data"), None, {"data"}])
def test_names_of_axes_are_checked(axes):
    for make in (
        lambda: accumulate(2, reduce_axes=axes),
        lambda: optax_accum.value_and_grad(
            loss_fn, microbatch_size=2, reduce_axes=axes
        ),
        lambda: defer_reduction(PARAMS, axes),
    ):
        with pytest.raises(TypeError, match="reduce_axes must be the name"):
            make()


def test_a_state_of_another_reduce_axes_is_refused():
    tx, plain = accumulate(2, reduce_axes="data"), accumulate(2)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        rows = tx.init(PARAMS)
        with pytest.raises(ValueError, match="another reduce_axes"):
            plain.update(PARAMS, rows)
        specs = jax.tree.map(lambda _: P(), plain.init(PARAMS))

        def step(state):
            grads = jax.lax.pcast(PARAMS, "data", to="varying")
            return tx.update(grads, state)[1].mini_step

        match = r"one row of the state on each.*state_specs"
        with pytest.raises(ValueError, match=match):
            jax.jit(jax.shard_map(step, in_specs=(specs,), out_specs=P()))(
                plain.init(PARAMS)
            )


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_that_are_sharded_over_the_axis_are_refused(kind):
    tx = accumulate(2, reduce_axes="data")
    with jax.set_mesh(mesh_of(kind)):
        params = {"w": jax.device_put(jnp.zeros(N), P("data"))}
        for fun in (tx.init, lambda params: defer_reduction(params, "data")):
            local = jax.shard_map(fun, in_specs=P("data"), out_specs=P("data"))
            for call in (fun, local):
                with pytest.raises(
                    ValueError, match=r"\['w'\].*sharded over \['data'\]"
                ):
                    call(params)


def test_a_state_of_a_shard_map_is_refused_outside_of_one():
    tx = accumulate(2, reduce_axes="data")
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        state = tx.init(PARAMS)
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        x = jax.device_put(DATA[0], P("data"))
        grads = jax.grad(loss_fn)(defer_reduction(PARAMS, "data"), x, 1.0)
        with pytest.raises(ValueError, match="made for steps in a shard_map"):
            tx.update(grads, jax.device_get(state), PARAMS)


@pytest.mark.parametrize("way", WAYS)
def test_the_noise_has_the_dtypes_of_its_state_under_x64(way):
    with jax.enable_x64(True):
        tx = chain(accumulate(2, reduce_axes="data", track_noise=True), optax.sgd(0.0))
        states = linear_steps(way, tx, DATA[:2])
        assert states[-1][0].noise.microbatches.dtype == jnp.int32
        assert np.isfinite(optax_accum.noise_scale(states[-1]).trace)


def test_with_parameters_sharded_over_another_axis():
    mesh = mesh_of(AxisType.Explicit, (4, 2), ("data", "model"))
    tx = chain(accumulate(2, reduce_axes="data"), ADAM)

    def step(params, state, x):
        grads = jax.grad(loss_fn)(defer_reduction(params, "data"), x, 1.0)
        return optax_accum.apply_gradients(tx, grads, state, params)

    with jax.set_mesh(mesh):
        specs = {"w": P(None, "model"), "b": P("model")}
        params = jax.device_put(PARAMS, jax.tree.map(lambda s: s, specs))
        state = tx.init(params)
        assert jax.typeof(state[0].acc_grads["w"]).sharding.spec == P(
            "data", None, "model"
        )
        for x in DATA[:2]:
            params, state = jax.jit(step)(params, state, jax.device_put(x, P("data")))
        assert jax.typeof(params["w"]).sharding.spec == P(None, "model")
    want, state = PARAMS, chain(accumulate(2), ADAM).init(PARAMS)
    for x in DATA[:2]:
        grads = jax.grad(loss_fn)(want, x, 1.0)
        want, state = optax_accum.apply_gradients(
            chain(accumulate(2), ADAM), grads, state, want
        )
    close(jax.device_get(params), jax.device_get(want))


def test_old_states_convert_at_the_end_of_a_window_only():
    old = optax.MultiSteps(optax.sgd(1.0), 2)
    tx = optax_accum.MultiSteps(optax.sgd(1.0), 2, reduce_axes="data")
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        state = old.init(PARAMS)
        new = optax_accum.from_multi_steps_state(state, tx, PARAMS)
        assert new.acc_grads["b"].shape == (N, 4)
        _, state = old.update(PARAMS, state, PARAMS)
        with pytest.raises(ValueError, match=r"reduce_axes.*middle of a window"):
            optax_accum.from_multi_steps_state(state, tx, PARAMS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_state_is_made_in_the_shard_map_on_any_mesh(kind):
    tx = chain(accumulate(2, reduce_axes="data", average_args=("loss",)), ADAM)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        specs = state_specs(jax.eval_shape(tx.init, PARAMS), "data")
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
    got = jax.jit(init)(PARAMS)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        want = tx.init(PARAMS)
    assert_trees_equal(got, want)
    assert got[0].acc_grads["b"].sharding.spec[0] == "data"


def test_specs_are_of_states_that_can_go_into_a_shard_map():
    match = r"a row for each.*Call init in a shard_map"
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        state = accumulate(2, reduce_axes="data").init(PARAMS)
        with pytest.raises(ValueError, match=match):
            state_specs(state, "data")
    with pytest.raises(ValueError, match=match):
        state_specs(accumulate(2).init(PARAMS), "data")


def test_a_weight_that_varies_over_another_axis_is_left_to_the_specs():
    mesh = mesh_of(AxisType.Auto, (4, 2), ("data", "model"))
    tx = accumulate(2, reduce_axes="data")
    with jax.set_mesh(mesh):
        state = tx.init(PARAMS)
        specs = state_specs(state, "data")

        def step(grads, state):
            grads = jax.tree.map(
                lambda g: jax.lax.pcast(g, "data", to="varying"), grads
            )
            weight = jnp.float32(jax.lax.axis_index("model"))
            return tx.update(grads, state, weight=weight)[1]

        step = jax.shard_map(step, in_specs=(P(), specs), out_specs=specs)
        with pytest.raises(ValueError, match=r"out_specs.*window_weight"):
            jax.jit(step)(PARAMS, state)


def test_specs_are_of_states_only():
    with pytest.raises(ValueError, match="no AccumulateState in it"):
        state_specs(accumulate(2, reduce_axes="data"), "data")

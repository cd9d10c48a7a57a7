"""`value_and_grad` over microbatches against that of the whole batch."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_accum

PARAMS = {"w": jnp.array([[1.0, -2.0], [0.5, 3.0], [0.1, 0.2]]), "b": jnp.ones(2)}
close = functools.partial(assert_trees_equal, rtol=2e-5, atol=1e-6)


def draw(size, seed=0):
    x, y, mask = jax.random.split(jax.random.key(seed), 3)
    return {
        "x": jax.random.normal(x, (size, 3)),
        "y": jax.random.normal(y, (size, 2)),
        "mask": jax.random.bernoulli(mask, 0.6, (size,)),
    }


def loss_fn(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) + params["b"]
    return jnp.mean((predicted - batch["y"]) ** 2)


def masked_loss(params, batch):
    predicted = jnp.tanh(batch["x"] @ params["w"]) + params["b"]
    losses = jnp.sum((predicted - batch["y"]) ** 2, axis=-1)
    return jnp.mean(losses, where=batch["mask"])


def count(params, batch):
    return batch["mask"].sum()


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    batch_size=st.integers(1, 13),
    size=st.integers(1, 15),
    name=st.sampled_from(["microbatch_size", "num_microbatches"]),
    masked=st.booleans(),
)
def test_it_is_the_gradient_of_the_whole_batch(batch_size, size, name, masked):
    batch = draw(batch_size)
    batch["mask"] = batch["mask"].at[0].set(True)  # else 0 / 0 is the right answer
    fun, weight = (masked_loss, count) if masked else (loss_fn, None)
    ours = optax_accum.value_and_grad(fun, weight=weight, **{name: size})
    close(jax.jit(ours)(PARAMS, batch), jax.value_and_grad(fun)(PARAMS, batch))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
@pytest.mark.parametrize("given_dtype", [None, "float32", "bfloat16"])
def test_dtypes(dtype, given_dtype):
    params = jnp.ones(3, dtype)
    batch = jnp.arange(12.0).reshape(4, 3).astype(dtype)

    def fun(params, batch):
        return jnp.mean((batch @ params).real)

    value, grads = optax_accum.value_and_grad(
        fun, microbatch_size=2, dtype=given_dtype
    )(params, batch)
    want_value, want_grads = jax.value_and_grad(fun)(params, batch)
    assert value.dtype == want_value.dtype
    own = jnp.dtype(dtype)
    if given_dtype:
        own = jnp.complex64 if dtype == "complex64" else jnp.dtype(given_dtype)
    assert grads.dtype == own
    np.testing.assert_allclose(
        np.asarray(grads, "complex64"), np.asarray(want_grads, "complex64"), rtol=1e-2
    )


def test_half_precision_is_added_up_in_float32():
    # 1 + 256 * (1 / 256) in bfloat16 stays 1 if each term is added to it.
    batch = jnp.array([1.0] + [1 / 256] * 256, "bfloat16")
    grads = optax_accum.grad(lambda w, x: jnp.mean(w * x), microbatch_size=1)(
        jnp.ones([], "bfloat16"), batch
    )
    assert grads == jnp.bfloat16(2 / 257)


def test_integers_are_exact():
    batch = jnp.array([3.0, 5.0, 7.0, 11.0, 13.0])
    for size in range(1, 6):
        grads = optax_accum.grad(lambda w, x: w * jnp.mean(x), microbatch_size=size)
        if size in (1, 2, 5):  # where the means of the microbatches are exact
            assert grads(1.0, batch) == jnp.float32(39) / 5


@pytest.mark.parametrize("weight", [lambda params, x: 0.0, lambda params, x: x[0] * 0])
def test_no_weight_at_all_gives_zeros(weight):
    fun = optax_accum.value_and_grad(
        lambda w, x: jnp.mean(w * x) / 0.0, microbatch_size=2, weight=weight
    )
    for size in (2, 4, 5):
        assert fun(1.0, jnp.arange(float(size))) == (0, 0)


def test_a_microbatch_of_weight_zero_adds_no_nan():
    batch = draw(6)
    batch["mask"] = jnp.array([True, True, True, False, False, False])
    for blocks in (batch, jax.tree.map(lambda x: x[::-1], batch)):
        got = optax_accum.value_and_grad(masked_loss, microbatch_size=1, weight=count)
        close(got(PARAMS, blocks), jax.value_and_grad(masked_loss)(PARAMS, blocks))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_skip_leaves_the_mean_over_the_others(size):
    batch = draw(8)
    batch["x"] = batch["x"].at[2].set(jnp.nan)
    ours = optax_accum.value_and_grad(
        loss_fn, microbatch_size=1, skip=optax.skip_not_finite
    )
    rest = jax.tree.map(lambda x: np.delete(x, 2, axis=0), batch)
    close(ours(PARAMS, batch), jax.value_and_grad(loss_fn)(PARAMS, rest))
    ours = optax_accum.value_and_grad(
        loss_fn, microbatch_size=size, skip=optax.skip_not_finite
    )
    value, grads = ours(PARAMS, batch)
    assert jnp.isfinite(value)
    assert (value == 0) == (size == 8)
    assert all(jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads))


# Auxiliary outputs.


def with_aux(params, batch):
    errors = jnp.abs(batch["x"] @ params["w"] - batch["y"])
    aux = {
        "mean": jnp.mean(errors),
        "sum": jnp.sum(errors > 1, dtype=jnp.int32),
        "stack": errors,
        "last": batch["x"].shape[0],
    }
    return loss_fn(params, batch), aux


@pytest.mark.parametrize("batch_size", [4, 8, 9, 10])
def test_aux_by_mode(batch_size):
    batch = draw(batch_size)
    modes = {"mean": "mean", "sum": "sum", "stack": "stack", "last": "last"}
    ours = optax_accum.value_and_grad(with_aux, 0, True, microbatch_size=4, aux=modes)
    (value, aux), grads = jax.jit(ours)(PARAMS, batch)
    want = jax.value_and_grad(with_aux, has_aux=True)(PARAMS, batch)
    last = aux.pop("last")
    want[0][1].pop("last")
    close(((value, aux), grads), want)
    assert last == (batch_size % 4 or 4)


def test_aux_modes_are_a_prefix_and_the_mean_is_by_weight():
    def fun(params, batch):
        n = batch["mask"].sum()
        return masked_loss(params, batch), {"a": (n, n / 2), "b": batch["y"]}

    batch = draw(10)
    ours = optax_accum.value_and_grad(
        fun,
        has_aux=True,
        microbatch_size=5,
        weight=count,
        aux={"a": "mean", "b": "stack"},
    )
    (_, aux), _ = ours(PARAMS, batch)
    # Which five go together is not said; whichever, by weight the mean of n is this.
    n = np.array([batch["mask"][i::2].sum() for i in range(2)])
    np.testing.assert_allclose(aux["a"][0], (n * n).sum() / n.sum(), rtol=1e-6)
    np.testing.assert_allclose(aux["a"][1], (n * n).sum() / n.sum() / 2, rtol=1e-6)
    assert_trees_equal(aux["b"], batch["y"])


def test_whole_numbers_are_summed_as_such():
    def fun(w, x):
        return w * jnp.mean(x), jnp.int32(2**24 + 1)

    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=1, aux="sum")
    (_, total), _ = ours(1.0, jnp.ones(3))
    assert total == 3 * (2**24 + 1)
    assert total.dtype == jnp.int32


# Keys.


def noisy_loss(params, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return loss_fn(params, batch | {"x": batch["x"] + noise})


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_each_microbatch_has_a_key_of_its_own(make):
    batch, key = draw(6), make(7)
    ours = optax_accum.value_and_grad(noisy_loss, microbatch_size=2, key_argnums=2)
    keys = jax.random.split(key, 3)
    want = [
        jax.value_and_grad(noisy_loss)(
            PARAMS, jax.tree.map(lambda x, i=i: x[i::3], batch), keys[i]
        )
        for i in range(3)
    ]
    mean = jax.tree.map(lambda *xs: sum(xs) / 3, *want)
    close(ours(PARAMS, batch, key), mean)
    close(jax.jit(ours)(PARAMS, batch, key), mean)


def test_a_single_microbatch_is_the_batch_with_its_key():
    batch, key = draw(3), jax.random.key(1)
    ours = optax_accum.value_and_grad(noisy_loss, microbatch_size=5, key_argnums=2)
    want = jax.value_and_grad(noisy_loss)(PARAMS, batch, key)
    close(ours(PARAMS, batch, key), want)


# What is carried.


def test_carried_arguments_go_from_microbatch_to_microbatch():
    def fun(params, stats, batch):
        mean = batch["x"].mean(0)
        new = {"mean": 0.5 * stats["mean"] + 0.5 * mean, "steps": stats["steps"] + 1}
        return loss_fn(params, batch), (new, mean)

    batch = draw(7)
    stats = {"mean": jnp.zeros(3), "steps": 0}
    ours = optax_accum.value_and_grad(
        fun,
        has_aux=True,
        batch_argnums=2,
        carry_argnums=1,
        microbatch_size=3,
    )
    (value, (new, mean)), grads = jax.jit(ours)(PARAMS, stats, batch)
    assert new["steps"] == 3
    close((value, grads), jax.value_and_grad(loss_fn)(PARAMS, batch))
    np.testing.assert_allclose(mean, batch["x"].mean(0), rtol=1e-5)
    want = np.zeros(3)
    for i in (slice(0, 3), slice(3, 6), slice(6, 7)):  # gcd 1: in order
        want = 0.5 * want + 0.5 * np.mean(batch["x"][i], axis=0)
    np.testing.assert_allclose(new["mean"], want, rtol=1e-5)


def test_a_skipped_microbatch_carries_nothing_on():
    def fun(w, stats, x):
        return w * jnp.mean(x), ((stats + x[0],), ())

    ours = optax_accum.value_and_grad(
        fun,
        has_aux=True,
        batch_argnums=2,
        carry_argnums=(1,),
        microbatch_size=1,
        skip=optax.skip_not_finite,
    )
    x = jnp.array([1.0, jnp.nan, 4.0])
    (value, ((stats,), ())), grads = ours(2.0, 0.0, x)
    assert (value, stats, grads) == (5.0, 5.0, 2.5)


# Transformations around and inside.


def test_arguments_by_keyword_and_partial():
    def fun(scale, params, batch, *, shift=0.0):
        return scale * loss_fn(params, batch) + shift

    batch = draw(5)
    want = jax.value_and_grad(fun, 1)(2.0, PARAMS, batch, shift=1.0)
    options = {"argnums": 1, "batch_argnums": 2, "microbatch_size": 2}
    ours = optax_accum.value_and_grad(fun, **options)
    close(ours(2.0, PARAMS, batch, shift=1.0), want)
    close(ours(2.0, batch=batch, params=PARAMS, shift=1.0), want)
    ours = optax_accum.value_and_grad(
        functools.partial(fun, 2.0, shift=1.0), microbatch_size=2
    )
    close(ours(PARAMS, batch), want)


def test_several_arguments_and_numbers_from_the_end():
    def fun(w, x, b, y):
        return jnp.mean((x @ w + b - y) ** 2)

    batch = draw(5)
    args = PARAMS["w"], batch["x"], PARAMS["b"], batch["y"]
    ours = optax_accum.value_and_grad(
        fun, (0, -2), batch_argnums=(1, 3), microbatch_size=2
    )
    close(ours(*args), jax.value_and_grad(fun, (0, 2))(*args))
    grads = optax_accum.grad(fun, (2,), batch_argnums=(1, 3), microbatch_size=2)(*args)
    close(grads, jax.grad(fun, (2,))(*args))


def test_arguments_need_not_be_arrays():
    def fun(params, batch, activation, power=2):
        return jnp.mean(activation(batch["x"] @ params["w"]) ** power)

    ours = optax_accum.value_and_grad(fun, microbatch_size=2)
    want = jax.value_and_grad(fun)(PARAMS, draw(5), jnp.tanh, power=4)
    close(ours(PARAMS, draw(5), jnp.tanh, power=4), want)


def test_vmap_over_models_scan_around_and_checkpoint_inside():
    ensemble = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)
    ours = optax_accum.value_and_grad(jax.checkpoint(loss_fn), microbatch_size=2)
    whole = jax.value_and_grad(loss_fn)
    got = jax.jit(jax.vmap(ours, (0, None)))(ensemble, draw(5))
    close(got, jax.vmap(whole, (0, None))(ensemble, draw(5)))

    def descend(fun):
        def step(params, x):
            value, grads = fun(params, draw(5) | {"x": x})
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        xs = jax.random.normal(jax.random.key(3), (3, 5, 3))
        return jax.jit(lambda params: jax.lax.scan(step, params, xs))(PARAMS)

    close(descend(ours), descend(whole))
    hessian = jax.jacfwd(optax_accum.grad(loss_fn, microbatch_size=2))
    close(hessian(PARAMS, draw(5)), jax.hessian(loss_fn)(PARAMS, draw(5)))


def test_it_is_compiled_once_for_any_number_of_microbatches():
    sizes = []
    for n in (4, 64):
        ours = jax.jit(optax_accum.value_and_grad(loss_fn, microbatch_size=2))
        sizes.append(len(ours.lower(PARAMS, draw(2 * n)).as_text()))
    assert sizes[1] < 1.05 * sizes[0]


# Sharded batches.

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


# Errors.


def raises(error, *words):
    return pytest.raises(error, match="(?s)" + ".*".join(words))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, ["microbatch_size or num_microbatches", "neither"]),
        ({"microbatch_size": 2, "num_microbatches": 2}, ValueError, ["both"]),
        ({"microbatch_size": 0}, ValueError, ["microbatch_size", "at least 1", "0"]),
        ({"num_microbatches": -1}, ValueError, ["num_microbatches", "-1"]),
        ({"microbatch_size": 2.0}, TypeError, ["microbatch_size", "2.0"]),
        ({"num_microbatches": True}, TypeError, ["num_microbatches", "True"]),
        ({"argnums": "0"}, TypeError, ["argnums", "'0'"]),
        ({"batch_argnums": None}, TypeError, ["batch_argnums", "None"]),
        ({"weight": 3}, TypeError, ["weight", "function", "3"]),
        ({"skip": True}, TypeError, ["skip", "True"]),
        ({"dtype": "int32"}, TypeError, ["dtype", "int32"]),
        ({"has_aux": True, "aux": "max"}, ValueError, ["aux", "'max'"]),
        ({"aux": "sum"}, ValueError, ["aux", "has_aux"]),
        ({"carry_argnums": 2}, ValueError, ["carry_argnums", "has_aux"]),
    ],
)
def test_wrong_options_are_refused_when_it_is_built(options, error, words):
    if words[0] not in options and "neither" not in words and "both" not in words:
        options = {"microbatch_size": 2} | options
    elif options.keys() & {"microbatch_size", "num_microbatches"} == set():
        options = options if "neither" in words else {"microbatch_size": 2} | options
    with raises(error, *words):
        optax_accum.value_and_grad(loss_fn, **options)


@pytest.mark.parametrize(
    ("options", "args", "error", "words"),
    [
        ({}, (PARAMS,), ValueError, ["batch_argnums has 1", "1 positional"]),
        ({"batch_argnums": 0}, (PARAMS, 1), ValueError, ["argnums", "argument 0"]),
        ({}, (PARAMS, draw(4) | {"y": jnp.ones(3)}), ValueError, ["3 in", "'y'"]),
        ({}, (PARAMS, draw(4) | {"y": 1.0}), ValueError, ["'y'", "scalar"]),
        ({}, (PARAMS, {}), ValueError, ["no examples"]),
        ({}, (PARAMS, jnp.ones((0, 3))), ValueError, ["no examples"]),
        ({"weight": lambda p, b: b["mask"]}, (PARAMS, draw(4)), ValueError, ["weight"]),
        ({"has_aux": True}, (PARAMS, draw(4)), TypeError, ["has_aux", "float32"]),
        ({}, ({"n": jnp.arange(3)}, draw(4)), TypeError, ["argnums", "'n'", "int32"]),
    ],
)
def test_wrong_arguments_are_named_when_it_is_called(options, args, error, words):
    ours = optax_accum.value_and_grad(loss_fn, microbatch_size=2, **options)
    with raises(error, *words):
        jax.jit(ours)(*args)


def test_a_loss_for_each_example_is_refused():
    ours = optax_accum.value_and_grad(lambda w, x: w * x, microbatch_size=2)
    with raises(ValueError, "fun must return a scalar", r"float32\[2\]"):
        ours(1.0, jnp.ones(4))


def test_what_is_no_array_is_refused():
    ours = optax_accum.value_and_grad(loss_fn, microbatch_size=2)
    with raises(TypeError, "arrays", "'y'", "label"):
        ours(PARAMS, draw(4) | {"y": "label"})
    with raises(TypeError, "argnums", "no arrays", "'f'"):
        ours({"f": jnp.tanh}, draw(4))


def test_an_auxiliary_output_that_was_not_announced_is_refused():
    def fun(w, x):
        return w * jnp.mean(x), {"n": 1.0}

    with raises(TypeError, "scalar loss, got a tuple of 2", "has_aux=True"):
        optax_accum.value_and_grad(fun, microbatch_size=2)(1.0, jnp.ones(4))


def test_an_auxiliary_output_that_is_no_array_is_refused():
    def fun(w, x):
        return w * jnp.mean(x), {"name": "train"}

    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=2)
    with raises(TypeError, "arrays", "'train'", "'name'"):
        ours(1.0, jnp.ones(4))


@pytest.mark.parametrize("aux", ["mean", "sum", "last"])
@pytest.mark.parametrize("size", [3, 4])  # 3 + 1 would broadcast, 4 + 3 would not
def test_a_row_for_each_example_has_to_be_stacked(aux, size):
    def fun(w, x):
        return jnp.mean(w * x), {"rows": w * x}

    x = jnp.arange(7.0)
    ours = functools.partial(
        optax_accum.value_and_grad, fun, has_aux=True, microbatch_size=size
    )
    with raises(ValueError, r"\['rows'\]", f"no {aux}", '"stack"'):
        ours(aux=aux)(2.0, x)
    (_, out), _ = ours(aux="stack")(2.0, x)
    np.testing.assert_array_equal(out["rows"], 2 * x)


def test_the_last_of_an_auxiliary_output_may_be_of_any_dtype():
    def fun(w, key, x):
        out = {"key": key, "count": x.astype(int)[0], "any": x[0] > 2}
        return w * jnp.mean(x), out

    ours = optax_accum.value_and_grad(
        fun, has_aux=True, batch_argnums=2, key_argnums=1, microbatch_size=1, aux="last"
    )
    key = jax.random.key(0)
    (_, out), _ = ours(1.0, key, jnp.arange(4.0))
    want = {"key": jax.random.split(key, 4)[3], "count": 3, "any": True}
    assert_trees_equal(out, jax.tree.map(jnp.asarray, want))


def test_leaves_that_are_functions_have_no_gradients():
    model = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    batch = draw(5)

    def fun(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    ours = eqx.filter_jit(optax_accum.value_and_grad(fun, microbatch_size=2))
    got, want = ours(model, batch), eqx.filter_value_and_grad(fun)(model, batch)
    assert_trees_equal(got, want, rtol=1e-5, atol=1e-6)


def test_aux_that_does_not_fit_its_modes_is_refused():
    def fun(w, x):
        return w * jnp.mean(x), {"a": jnp.sum(x)}

    ours = functools.partial(
        optax_accum.value_and_grad, fun, has_aux=True, microbatch_size=2
    )
    with raises(ValueError, "aux", "prefix", "'b'"):
        ours(aux={"b": "sum"})(1.0, jnp.ones(4))
    with raises(ValueError, '"stack"', r"\['a'\]", r"float32\[\]"):
        ours(aux="stack")(1.0, jnp.ones(4))


def test_what_is_carried_must_keep_its_type():
    def fun(w, stats, x):
        return w * jnp.mean(x), (jnp.stack([stats, stats]), ())

    ours = optax_accum.value_and_grad(
        fun, has_aux=True, batch_argnums=2, carry_argnums=1, microbatch_size=1
    )
    with raises(TypeError, "carries on", "shapes"):
        ours(1.0, jnp.zeros([]), jnp.ones(4))
    ours = optax_accum.value_and_grad(
        fun, has_aux=True, batch_argnums=2, carry_argnums=(1,), microbatch_size=1
    )
    with raises(TypeError, "tuple of what it carries on", "so 1"):
        ours(1.0, jnp.zeros([]), jnp.ones(4))
    ours = optax_accum.value_and_grad(
        lambda w, n, x: (w * jnp.mean(x), (n * 1.5, ())),
        has_aux=True,
        batch_argnums=2,
        carry_argnums=1,
        microbatch_size=1,
    )
    with raises(TypeError, "carries on", "dtypes", "float32", "int32"):
        ours(1.0, 1, jnp.ones(4))


@pytest.mark.parametrize("size", [1, 3, 5])
def test_a_layout_that_cannot_be_split_where_it_is_is_refused(size):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones(8), jax.P("data"))
        ours = optax_accum.value_and_grad(
            lambda w, x: w * jnp.mean(x), microbatch_size=size
        )
        with raises(ValueError, "sharded 2 ways", "'data'", "multiple of 2"):
            jax.jit(ours)(1.0, x)

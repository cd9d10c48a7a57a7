"""`value_and_grad` over microbatches against that of the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_trees_equal
from hypothesis import given, settings
from hypothesis import strategies as st
from losses import PARAMS, close, count, draw, loss_fn, masked_loss

import optax_accum


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


def parameters():
    shapes = st.sampled_from([(), (3,), (2, 2), (0,)])
    dtypes = st.sampled_from(["float32", "bfloat16", "float16", "complex64"])
    leaves = st.builds(jnp.ones, shapes, dtypes) | st.none()

    def extend(children):
        return (
            st.lists(children, max_size=2)
            | st.tuples(children, children)
            | st.dictionaries(st.sampled_from("ab"), children, max_size=2)
        )

    return st.recursive(leaves, extend, max_leaves=4)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    params=parameters(),
    batch_size=st.integers(1, 9),
    size=st.integers(1, 9),
    weights=st.lists(st.integers(0, 3), min_size=9, max_size=9),
)
def test_any_tree_of_any_dtypes_by_any_weights(params, batch_size, size, weights):
    batch = {
        "x": jnp.arange(1.0, 1.0 + batch_size),
        "w": jnp.array(weights[:batch_size], float).at[0].set(1),
    }

    def fun(params, batch):
        value = sum(jnp.sum(p.astype(complex)).real for p in jax.tree.leaves(params))
        mean = jnp.sum(batch["w"] * batch["x"]) / jnp.maximum(batch["w"].sum(), 1)
        return mean * (1.0 + value)

    ours = optax_accum.value_and_grad(
        fun, microbatch_size=size, weight=lambda params, batch: batch["w"].sum()
    )
    got, want = ours(params, batch), jax.value_and_grad(fun)(params, batch)
    assert_trees_equal(
        jax.tree.map(lambda x: x.astype(complex), got),
        jax.tree.map(lambda x: x.astype(complex), want),
        rtol=1e-2,
    )
    assert_trees_equal(*(jax.tree.map(lambda x: x * 0, tree) for tree in (got, want)))


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


@pytest.mark.parametrize("weight", [-1.0, jnp.nan, jnp.inf])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_traced_weight_that_is_no_number_gives_nan(weight, size):
    fun = optax_accum.value_and_grad(
        lambda w, x: jnp.mean(w * x),
        microbatch_size=size,
        weight=lambda w, x: jnp.float32(weight),
    )
    assert np.isnan(fun(1.0, jnp.ones(4))).all()


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


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_in_a_narrow_dtype_only_the_sum_is_narrow(dtype):
    # The weight of the whole batch is no number of that dtype.
    def fun(w, x):
        return jnp.mean(w * x)

    ours = optax_accum.grad(
        fun, microbatch_size=2, dtype=dtype, weight=lambda w, x: 8195.0
    )
    grads = jax.jit(ours)(1.0, jnp.full(20, 1 / 8))
    assert grads.dtype == dtype
    np.testing.assert_allclose(np.float32(grads), 1 / 8, rtol=4e-2)
    many = optax_accum.grad(fun, microbatch_size=10007, dtype=dtype)
    grads = np.float32(many(1.0, jnp.full(100_001, 2**-12)))
    np.testing.assert_allclose(grads, 2**-12, rtol=4e-2)


@pytest.mark.parametrize("aux", ["mean", "sum", "last"])
@pytest.mark.parametrize("size", [3, 4])  # 3 + 1 would broadcast, 4 + 3 would not
def test_a_row_for_each_example_has_to_be_stacked(aux, size):
    def fun(w, x):
        return jnp.mean(w * x), {"rows": w * x}

    x = jnp.arange(7.0)
    ours = functools.partial(
        optax_accum.value_and_grad, fun, has_aux=True, microbatch_size=size
    )
    with pytest.raises(ValueError, match=rf"(?s)\['rows'\].*no {aux}.*stack"):
        ours(aux=aux)(2.0, x)
    (_, out), _ = ours(aux="stack")(2.0, x)
    np.testing.assert_array_equal(out["rows"], 2 * x)


@pytest.mark.parametrize(
    ("rest", "error", "words"),
    [
        ({"b": 1.0, "c": 2.0}, ValueError, r"same auxiliary output.*'a'.*'c'"),
        ({"a": 1.0}, ValueError, "same auxiliary output"),
        ({"a": 1.0, "b": 2}, TypeError, r"\['b'\] is .*float32.* of one dtype"),
    ],
)
def test_the_last_microbatch_must_return_what_the_others_do(rest, error, words):
    def fun(w, x):
        return jnp.mean(w * x), {"a": 1.0, "b": 2.0} if len(x) == 4 else rest

    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=4, aux="sum")
    with pytest.raises(error, match=words):
        ours(1.0, jnp.ones(6))


@pytest.mark.parametrize("aux", ["mean", "sum", "last"])
def test_rows_are_found_where_all_microbatches_are_of_one_size(aux):
    def fun(w, x):
        return jnp.mean(w * x), {"rows": w * x, "classes": jnp.zeros(4)}

    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=4, aux=aux)
    with pytest.raises(ValueError, match=r"(?s)\['rows'\].*of 4 .*of 8.*stack"):
        ours(2.0, jnp.arange(8.0))

    def made_for_four(w, x):
        x.reshape(4)
        return jnp.mean(w * x), jnp.zeros(4)

    ours = functools.partial(optax_accum.value_and_grad, has_aux=True, aux=aux)
    (_, out), _ = ours(made_for_four, microbatch_size=4)(2.0, jnp.arange(8.0))
    np.testing.assert_array_equal(out, np.zeros(4))
    (_, out), _ = ours(fun, microbatch_size=8)(2.0, jnp.arange(8.0))  # all at once
    np.testing.assert_array_equal(out["rows"], 2 * jnp.arange(8.0))


def test_only_rows_of_the_examples_can_be_stacked():
    def fun(w, x):
        return jnp.mean(w * x), jnp.arange(4.0)  # as many as examples, by chance

    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=4, aux="stack")
    with pytest.raises(ValueError, match="here 2 of them"):
        ours(1.0, jnp.ones(10))


@pytest.mark.parametrize("rows", [7, 8])
def test_empty_rows_can_be_stacked(rows):
    def fun(w, x):
        return jnp.mean(w * x), jnp.zeros((*x.shape, 0, 2))

    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=4, aux="stack")
    (_, out), _ = ours(1.0, jnp.ones(rows))
    assert out.shape == (rows, 0, 2)


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


def test_a_random_key_has_no_mean():
    def fun(w, key, x):
        return w * jnp.mean(x), key

    ours = optax_accum.value_and_grad(
        fun, has_aux=True, batch_argnums=2, key_argnums=1, microbatch_size=2
    )
    with pytest.raises(TypeError, match=r"no mean.*last"):
        ours(1.0, jax.random.key(0), jnp.ones(4))


def test_unsigned_numbers_are_summed_as_such():
    def fun(w, x):
        return w * jnp.mean(x), {"u": jnp.uint32(2**31), "b": x[0] > 0}

    ours = optax_accum.value_and_grad(
        fun, has_aux=True, microbatch_size=4, aux={"u": "last", "b": "sum"}
    )
    with jax.numpy_dtype_promotion("strict"):
        (_, out), _ = ours(1.0, jnp.ones(8))
    assert_trees_equal(out, {"u": jnp.uint32(2**31), "b": jnp.int32(2)})
    ours = optax_accum.value_and_grad(fun, has_aux=True, microbatch_size=8, aux="sum")
    assert ours(1.0, jnp.ones(8))[0][1]["u"] == np.uint32(2**31)


def test_no_random_key_is_used_twice():
    def fun(w, key, x):
        return jnp.mean(w * x * jax.random.normal(key, x.shape))

    ours = optax_accum.value_and_grad(
        fun, batch_argnums=2, key_argnums=1, microbatch_size=4
    )
    with jax.debug_key_reuse(True):
        jax.jit(ours)(1.0, jax.random.key(0), jnp.ones(10))

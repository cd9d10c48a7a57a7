"""How `value_and_grad` finds its arguments, and what it says if they are wrong."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_equal
from losses import PARAMS, close, draw, loss_fn

import optax_accum


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


class Scaled(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    scale: float
    count: jax.Array

    def __call__(self, x):
        return self.scale * self.dropout(self.mlp(x), inference=True)


def test_of_an_equinox_model_the_arrays_of_floats_are_differentiated():
    mlp = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    model = Scaled(mlp, eqx.nn.Dropout(), 0.5, jnp.arange(3))
    batch = draw(5)

    def fun(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    ours = eqx.filter_jit(optax_accum.value_and_grad(fun, microbatch_size=2))
    got, want = ours(model, batch), eqx.filter_value_and_grad(fun)(model, batch)
    assert_trees_equal(got, want, rtol=1e-5, atol=1e-6)


def test_a_batch_may_be_given_in_part_by_name():
    def fun(params, x, y):
        return loss_fn(params, {"x": x, "y": y})

    batch = draw(5)
    ours = optax_accum.value_and_grad(fun, batch_argnums=(1, 2), microbatch_size=2)
    want = jax.value_and_grad(loss_fn)(PARAMS, batch)
    close(jax.jit(ours)(PARAMS, batch["x"], y=batch["y"]), want)


def test_numbers_from_the_end_count_what_is_given_by_position():
    def fun(batch, params, scale=1.0):
        return scale * loss_fn(params, batch)

    ours = optax_accum.value_and_grad(fun, -1, batch_argnums=-2, microbatch_size=2)
    batch = draw(5)
    want = jax.value_and_grad(fun, -1)(batch, PARAMS, scale=2.0)
    close(ours(batch, PARAMS, scale=2.0), want)


def test_a_number_finds_an_argument_by_name_beyond_a_default():
    def fun(params, scale=2.0, batch=None):
        return scale * loss_fn(params, batch)

    ours = optax_accum.value_and_grad(fun, batch_argnums=2, microbatch_size=2)
    close(ours(PARAMS, batch=draw(5)), jax.value_and_grad(fun)(PARAMS, 2.0, draw(5)))


def test_a_decorated_function_is_called_as_it_was_written():
    def fun(params, batch, scale=1.0):
        return scale * loss_fn(params, batch)

    @functools.wraps(fun)
    def shifted(params, batch, shift=0.0, **kwargs):
        return shift + fun(params, batch, **kwargs)

    @functools.wraps(fun)
    def handed_on(*args, **kwargs):
        return fun(*args, **kwargs)

    batch = draw(5)
    for decorated in (shifted, handed_on, jax.jit(fun)):
        ours = optax_accum.value_and_grad(
            decorated, microbatch_size=2, weight=lambda params, batch, scale: 1.0
        )
        close(
            jax.tree.map(jnp.shape, ours(PARAMS, batch, scale=3.0)),
            jax.tree.map(jnp.shape, jax.value_and_grad(fun)(PARAMS, batch)),
        )
        ours = optax_accum.value_and_grad(decorated, microbatch_size=2)
        want = jax.value_and_grad(fun)(PARAMS, batch, scale=3.0)
        close(ours(PARAMS, batch, scale=3.0), want)
    ours = optax_accum.value_and_grad(handed_on, microbatch_size=2)
    close(ours(PARAMS, batch=batch), jax.value_and_grad(fun)(PARAMS, batch))


def test_numbers_and_sizes_of_numpy_are_ints():
    batch = draw(5)
    ours = optax_accum.value_and_grad(
        loss_fn,
        np.int64(0),
        batch_argnums=np.array(1)[()],
        microbatch_size=np.uint8(2),
    )
    close(ours(PARAMS, batch), jax.value_and_grad(loss_fn)(PARAMS, batch))
    ours = optax_accum.value_and_grad(loss_fn, num_microbatches=np.uint32(2))
    close(ours(PARAMS, batch), jax.value_and_grad(loss_fn)(PARAMS, batch))

    def carrying(w, total, x):
        return w * jnp.mean(x), (total + jnp.sum(x), ())

    ours = optax_accum.value_and_grad(
        carrying,
        has_aux=True,
        batch_argnums=2,
        carry_argnums=np.int64(1),
        microbatch_size=1,
    )
    assert ours(1.0, 0.0, jnp.ones(3))[0][1][0] == 3


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
    ours = optax_accum.value_and_grad(
        lambda w, n, x: (w * jnp.mean(x), (None, ())),
        has_aux=True,
        batch_argnums=2,
        carry_argnums=1,
        microbatch_size=1,
    )
    with raises(TypeError, "carries on", "NoneType"):
        ours(1.0, 1.0, jnp.ones(4))
    ours = optax_accum.value_and_grad(
        lambda w, n, x: (w * jnp.mean(x), n),
        has_aux=True,
        batch_argnums=2,
        carry_argnums=1,
        microbatch_size=1,
    )
    with raises(TypeError, "carry_argnums", r"\(value, \(carry, aux\)\)", "float32"):
        ours(1.0, 1.0, jnp.ones(4))


def test_a_keyword_that_is_a_number_is_refused():
    def fun(w, x, **kwargs):
        return w * jnp.mean(x)

    with raises(ValueError, "number for a name", "'0'"):
        optax_accum.grad(fun, microbatch_size=2)(1.0, jnp.ones(4), **{"0": 7.0})


@pytest.mark.parametrize("key", [3, "key", jax.random.split(jax.random.key(0), 3)])
@pytest.mark.parametrize("size", [1, 4])
def test_what_is_no_random_key_is_refused(key, size):
    ours = optax_accum.value_and_grad(
        lambda w, key, x: w, batch_argnums=2, key_argnums=1, microbatch_size=size
    )
    with raises(TypeError, "key_argnums", "argument 1"):
        ours(1.0, key, jnp.ones(4))


def test_an_argument_has_one_role_and_once():
    for options, words in (
        ({"argnums": (0, 0)}, ["argnums has argument 0 twice"]),
        ({"argnums": (0, -2)}, ["argnums has argument 0 twice"]),
        ({"key_argnums": 1}, ["key_argnums and batch_argnums", "argument 1"]),
    ):
        ours = optax_accum.value_and_grad(loss_fn, microbatch_size=2, **options)
        with raises(ValueError, *words):
            ours(PARAMS, draw(4))

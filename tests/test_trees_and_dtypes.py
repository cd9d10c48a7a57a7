"""Any pytree and any dtype: exact where it can be, and stable from call to call."""

import dataclasses
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal, types
from hypothesis import given, settings
from hypothesis import strategies as st

import optax_accum

FLOAT0 = jax.dtypes.float0


class Pair(NamedTuple):
    first: object
    second: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    x: object


def leaves():
    shapes = st.sampled_from([(), (3,), (2, 2), (0,), (2, 0)])
    dtypes = st.sampled_from(["float32", "bfloat16", "float16", "complex64", "int32"])
    arrays = st.builds(lambda s, d: jnp.ones(s, d), shapes, dtypes)
    return arrays | st.just(None) | st.just(optax.MaskedNode())


def trees():
    def extend(children):
        return (
            st.lists(children, max_size=3)
            | st.tuples(children, children)
            | st.builds(Pair, children, children)
            | st.dictionaries(st.sampled_from("abc"), children)
        )

    return st.recursive(leaves(), extend, max_leaves=5)


def is_int(x):
    return jnp.issubdtype(x.dtype, jnp.integer)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(params=trees(), seed=st.integers(0, 100))
def test_any_tree_accumulates_exactly_and_keeps_its_types(params, seed):
    rng = np.random.default_rng(seed)
    tx = optax_accum.chain(optax_accum.accumulate(every=2), optax.identity())
    state = tx.init(params)
    state_types = types(state)

    def integers(p):
        return jnp.asarray(rng.integers(-4, 5, p.shape)).astype(p.dtype)

    window = [jax.tree.map(integers, params) for _ in range(2)]
    updates = None
    for grads in window:
        assert updates is None or not any(map(jnp.any, jax.tree.leaves(updates)))
        updates, state = tx.update(grads, state, params)
        assert types(state) == state_types
    want = jax.tree.map(
        lambda a, b: ((a + b) / 2).astype(jnp.float32 if is_int(a) else a.dtype),
        *window,
    )
    assert_trees_equal(updates, want)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_are_those_of_the_optimizer_alone(dtype, form, every):
    params = {"w": jnp.ones((2, 3), dtype), "b": jnp.ones([], dtype)}
    grads = jax.tree.map(jnp.ones_like, params)
    opt = optax.adamw(0.1)
    want_updates, want_state = jax.jit(opt.update)(grads, opt.init(params), params)
    tx = optax_accum.chain(optax_accum.accumulate(every), opt)
    state = tx.init(params)
    updates, _ = jax.jit(tx.update)(grads, state, params)
    assert types(updates) == types(want_updates)
    step = jax.jit(FORMS[form], static_argnums=0)
    new_params, new_state = step(tx, grads, state, params)
    assert types(new_params) == types(params)
    assert types(new_state) == types(state)
    assert types(new_state[1]) == types(want_state)


def test_half_precision_is_summed_in_float32():
    n = 300  # in bfloat16, 256 + 1 == 256
    tx = optax_accum.chain(optax_accum.accumulate(n, reduction="sum"), optax.scale(1.0))
    params = jnp.zeros(2, jnp.bfloat16)

    def step(state, grads):
        updates, state = tx.update(grads, state, params)
        return state, updates

    state, updates = jax.lax.scan(step, tx.init(params), jnp.ones((n, 2), "bfloat16"))
    assert state[0].acc_grads.dtype == jnp.float32
    np.testing.assert_array_equal(updates[-1], jnp.full(2, n, jnp.bfloat16))


def test_a_given_dtype_is_the_accumulators_and_not_the_updates():
    params = {"real": jnp.zeros(2), "complex": jnp.zeros(2, jnp.complex64)}
    tx = optax_accum.chain(
        optax_accum.accumulate(2, dtype=jnp.bfloat16), optax.sgd(1.0)
    )
    state = tx.init(params)
    assert state[0].acc_grads["real"].dtype == jnp.bfloat16
    assert state[0].acc_grads["complex"].dtype == jnp.complex64
    grads = {"real": jnp.array([1.0, 3.0]), "complex": jnp.array([1 + 2j, 3j])}
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert_trees_equal(updates, jax.tree.map(jnp.negative, grads))


def test_an_update_that_does_not_fit_the_accumulator_keeps_its_bits():
    # A float32 update in a bfloat16 accumulator, updates of another shape and of
    # another structure: none may travel in the accumulator's buffer.
    params = jnp.zeros(2)
    third = optax.stateless(lambda g, p: g / 3)
    tx = optax_accum.chain(optax_accum.accumulate(2, dtype=jnp.bfloat16), third)
    step, state = jax.jit(tx.update), tx.init(params)
    for _ in range(2):
        updates, state = step(jnp.ones(2), state, params)
    np.testing.assert_array_equal(updates, jnp.ones(2) / 3)

    doubled = optax.stateless(lambda g, p: {"x": jnp.concatenate([g, g])})
    tx = optax_accum.chain(optax_accum.accumulate(2), doubled)
    step, state = jax.jit(tx.update), tx.init(params)
    for want in (jnp.zeros(4), jnp.ones(4)):
        updates, state = step(jnp.ones(2), state, params)
        assert_trees_equal(updates, {"x": want})


def test_float64_and_complex128_stay_so_under_x64():
    with jax.enable_x64(True):
        params = {"d": jnp.zeros(2, "float64"), "c": jnp.zeros(2, "complex128")}
        tx = optax_accum.chain(optax_accum.accumulate(3), optax.sgd(1.0))
        state = tx.init(params)
        third = np.float64(1) / 3
        grads = {"d": jnp.full(2, third), "c": jnp.full(2, third * (1 + 2j))}
        for _ in range(3):
            updates, state = jax.jit(tx.update)(grads, state, params)
        assert types(state[0].acc_grads) == types(params)
        assert_trees_equal(updates, jax.tree.map(jnp.negative, grads), rtol=1e-15)


def test_complex_gradients_keep_their_imaginary_part_to_the_bit():
    params = jnp.zeros(3, jnp.complex64)
    tx = optax_accum.chain(optax_accum.accumulate(3), optax.sgd(1.0))
    state = tx.init(params)
    for k in range(3):
        grads = jnp.array([1 + 2j, 1j * k, k])
        updates, state = jax.jit(tx.update)(grads, state, params, weight=k + 1)
    want = -jnp.array([1 + 2j, 8j / 6, 8 / 6], jnp.complex64)
    np.testing.assert_array_equal(updates, want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [1, 2])
def test_float0_gradients_of_integer_parameters_pass_through(form, every):
    params = {"n": jnp.arange(3), "w": jnp.ones(3)}
    grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2), allow_int=True)(params)
    assert grads["n"].dtype == FLOAT0
    tail = optax.masked(optax.sgd(0.25), {"n": False, "w": True})
    tx = optax_accum.chain(optax_accum.accumulate(every), tail)
    state = tx.init(params)
    for _ in range(every):
        updates, _ = jax.jit(tx.update)(grads, state, params)
        assert updates["n"].dtype == FLOAT0
        if form == "apply_gradients":
            step = jax.jit(lambda g, s, p: FORMS[form](tx, g, s, p))
            params, state = step(grads, state, params)
        else:
            updates, state = jax.jit(tx.update)(grads, state, params)
            params["w"] = params["w"] + updates["w"]
    assert_trees_equal(params, {"n": jnp.arange(3), "w": jnp.full(3, 0.5)}, rtol=1e-6)


def test_none_gradients_leave_a_parameter_alone():
    params = {"frozen": jnp.ones(2), "w": jnp.ones(2)}
    tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(0.5, momentum=0.9))
    state = tx.init(params)
    state_types = types(state)
    step = jax.jit(lambda g, s, p: optax_accum.apply_gradients(tx, g, s, p))
    for _ in range(4):
        params, state = step({"frozen": None, "w": jnp.ones(2)}, state, params)
        assert types(state) == state_types
    np.testing.assert_array_equal(params["frozen"], jnp.ones(2))
    np.testing.assert_allclose(params["w"], 1 - 0.5 * (1 + 1.9), rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_that_is_none_in_one_microbatch_adds_nothing(form):
    tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(1.0))
    params, one = {"a": jnp.zeros(1), "b": jnp.zeros(1)}, jnp.ones(1)
    state = tx.init(params)
    for b in (100 * one, 100 * one, None, one):  # two windows
        grads = {"a": one, "b": b}
        if form == "apply_gradients":
            params, state = optax_accum.apply_gradients(tx, grads, state, params)
        else:  # by Equinox's `apply_updates`, since that of Optax takes no `None`
            updates, state = tx.update(grads, state, params)
            params = eqx.apply_updates(params, updates)
    assert_trees_equal(params, {"a": jnp.array([-2.0]), "b": jnp.array([-100.5])})


@pytest.mark.parametrize("every", [1, 2])
def test_a_whole_part_without_gradients_stays_as_it_is(every):
    tx = optax_accum.chain(optax_accum.accumulate(every), optax.sgd(1.0))
    params = {"a": jnp.zeros(1), "b": {"w": jnp.ones(2), "n": 3}}
    state = tx.init({"a": params["a"], "b": None})
    for _ in range(2):
        params, state = optax_accum.apply_gradients(
            tx, {"a": jnp.ones(1), "b": None}, state, params
        )
    assert_trees_equal(params["b"], {"w": jnp.ones(2), "n": 3})
    np.testing.assert_array_equal(params["a"], [-2.0 / every])


@pytest.mark.parametrize("form", ["update", "apply_gradients"])
def test_an_equinox_model_may_be_passed_as_params(form):
    model = eqx.nn.MLP(2, 2, 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (4, 8, 2))

    @eqx.filter_grad
    def grad_fn(model, x):
        return jnp.mean((jax.vmap(model)(x) - x) ** 2)

    opt = optax.adamw(0.1)
    opt_state = opt.init(eqx.filter(model, eqx.is_array))
    grads = grad_fn(model, x.reshape(-1, 2))
    want = eqx.apply_updates(
        model, opt.update(grads, opt_state, eqx.filter(model, eqx.is_array))[0]
    )

    tx = optax_accum.chain(optax_accum.accumulate(4), opt)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, x):
        grads = grad_fn(model, x)
        if form == "apply_gradients":
            return optax_accum.apply_gradients(tx, grads, state, model)
        arrays = eqx.filter(model, eqx.is_array)
        updates, state = tx.update(grads, state, arrays)
        return eqx.apply_updates(model, updates), state

    for microbatch in x:
        model, state = step(model, state, microbatch)
    got, want = (eqx.filter(m, eqx.is_array) for m in (model, want))
    assert_trees_equal(got, want, rtol=1e-4, atol=1e-6)


class Scaled(eqx.Module):
    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    scale: float
    count: jax.Array

    def __call__(self, x, key):
        return self.scale * self.linear(self.dropout(x, key=key))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("jit", [eqx.filter_jit, lambda f: f], ids=["jit", "eager"])
def test_settings_in_an_equinox_model_stay_what_they_are(every, jit):
    linear = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    model = Scaled(linear, eqx.nn.Dropout(0.1), 0.5, jnp.arange(3))
    tx = optax_accum.chain(optax_accum.accumulate(every), optax.adamw(0.1))
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @jit
    def step(model, state, key):
        grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(2), key)))(model)
        return optax_accum.apply_gradients(tx, grads, state, model)

    new = model
    for i in range(2):
        new, state = step(new, state, jax.random.key(i))
    assert (new.dropout.inference, new.dropout.p, new.scale) == (False, 0.1, 0.5)
    assert type(new.dropout.inference) is bool
    assert type(new.scale) is float
    assert_trees_equal(new.count, model.count)
    assert jnp.any(new.linear.weight != model.linear.weight)


def test_update_accepts_an_equinox_model_with_functions_as_params():
    model = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    grads = eqx.filter_grad(lambda m: jnp.sum(m(jnp.ones(2))))(model)
    tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(0.1))
    state = tx.init(model)
    for _ in range(2):
        updates, state = tx.update(grads, state, model)
        model = eqx.apply_updates(model, updates)
    assert optax_accum.released(state)


def test_a_registered_dataclass_and_typed_keys_in_the_downstream_state_work():
    params = Data(jnp.ones(3))
    tx = optax_accum.chain(
        optax_accum.accumulate(2), optax.add_noise(0.1, 0.5, key=jax.random.key(3))
    )
    state = tx.init(params)
    step = jax.jit(tx.update)
    for _ in range(2):
        updates, state = step(Data(jnp.ones(3)), state, params)
    assert isinstance(updates, Data)
    assert jnp.any(updates.x != 1)


@pytest.mark.parametrize("params", [{}, (), None, [None, {}]])
def test_an_empty_tree_still_counts(params):
    tx = optax_accum.chain(optax_accum.accumulate(2), optax.adam(0.1))
    state = tx.init(params)
    for _ in range(4):
        updates, state = jax.jit(tx.update)(params, state, params)
    assert updates == params
    assert state[0].gradient_step == 2


def test_float8_parameters_have_float32_accumulators():
    dtype = jnp.float8_e4m3fn
    tx = optax_accum.chain(
        optax_accum.accumulate(2, track_noise=True), optax.identity()
    )
    params = jnp.zeros(2, dtype)
    state = tx.init(params)
    for x in (1.0, 3.0):
        updates, state = jax.jit(tx.update)(jnp.full(2, x, dtype), state, params)
    assert state[0].acc_grads.dtype == jnp.float32
    assert updates.dtype == dtype
    np.testing.assert_array_equal(updates.astype(jnp.float32), [2.0, 2.0])
    assert optax_accum.noise_scale(state).trace == 4.0


def test_a_dtype_that_jax_does_not_have_without_x64_is_the_nearest():
    tx = optax_accum.accumulate(2, dtype=jnp.float64)
    _, state = tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
    assert state.acc_grads.dtype == jnp.float32


def test_dtypes_are_promoted_by_hand_where_jax_is_strict():
    with jax.numpy_dtype_promotion("strict"):
        tx = optax_accum.accumulate(2, track_noise=True)
        grads = jnp.ones(3, jnp.bfloat16)
        _, state = tx.update(grads, tx.init(grads), weight=jnp.bfloat16(2))
        fun = optax_accum.value_and_grad(
            lambda w, x: jnp.mean(w * x), microbatch_size=2, track_noise=True
        )
        *_, noise = fun(jnp.bfloat16(1), jnp.ones(5, jnp.bfloat16))
    assert (state.noise.squares, noise.gradient) == (6, 1)


@pytest.mark.parametrize(
    ("own", "wider"), [("float32", "float64"), ("float32", "complex64")]
)
def test_updates_that_the_accumulator_cannot_hold_lose_nothing(own, wider):
    with jax.enable_x64(True):
        factor = jnp.asarray(1 / 3 + (1j if wider == "complex64" else 0), wider)
        widen = optax.stateless(lambda updates, params: updates * factor)
        tx = optax_accum.chain(optax_accum.accumulate(2), widen)
        params = jnp.zeros(2, own)
        state = tx.init(params)
        for grads in jnp.array([[1.0, 2.0], [3.0, 4.0]], own):
            updates, state = jax.jit(tx.update)(grads, state, params)
        assert state[0].acc_grads.dtype == own
        assert_trees_equal(updates, jnp.array([2.0, 3.0], own) * factor)


def test_an_integer_parameter_stays_where_gradients_are_applied():
    params = {"w": jnp.ones(3), "n": jnp.arange(3)}

    @jax.jit
    def step(state, params):
        grad_fn = jax.grad(lambda p: jnp.sum(p["w"] * p["n"]), allow_int=True)
        return optax_accum.apply_gradients(tx, grad_fn(params), state, params)

    tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(0.1))
    state, new = tx.init(params), params
    for _ in range(2):
        new, state = step(state, new)
    assert_trees_equal(new["n"], params["n"])
    assert jnp.any(new["w"] != params["w"])


def test_a_parameter_of_another_shape_than_its_gradient_is_refused_at_once():
    tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(0.1))
    grads = {"a": jnp.ones(2)}
    for wrong in (jnp.ones(3), None):
        with pytest.raises(ValueError, match=r"gradient is float32\[2\]"):
            optax_accum.apply_gradients(tx, grads, tx.init(grads), {"a": wrong})

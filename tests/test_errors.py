"""Wrong use is an error when the transform is built or traced, and says what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.train_state import TrainState
from helpers import FORMS

import optax_accum
from optax_accum import accumulate, chain

PARAMS = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}


def raises(error, *words):
    pattern = "".join(f"(?=.*{word})" for word in words)
    return pytest.raises(error, match=f"(?s){pattern}")


@pytest.mark.parametrize(
    ("every", "error"),
    [
        (0, ValueError),
        (-3, ValueError),
        (2.0, TypeError),
        (2.5, TypeError),
        (True, TypeError),
        (np.True_, TypeError),
        ("8", TypeError),
        (np.array([2, 3]), TypeError),
        (np.int64(0), ValueError),
    ],
)
def test_every_must_be_a_positive_int(every, error):
    with raises(error, "every must be an int of at least 1", repr(every)[:3]):
        accumulate(every)
    with raises(error, "every_k_schedule must be"):
        optax_accum.MultiSteps(optax.sgd(0.1), every)


@pytest.mark.parametrize("every", [np.int64(2), np.array(2), jnp.int32(2)])
def test_every_may_be_any_integer(every):
    state = accumulate(every).init(PARAMS)
    for _ in range(2):
        _, state = accumulate(every).update(PARAMS, state)
    assert optax_accum.released(state)


def test_a_traced_every_says_to_use_a_schedule():
    with raises(TypeError, "every must be", "traced", "schedule"):
        jax.jit(lambda n: accumulate(n).init(PARAMS))(2)
    injected = optax.inject_hyperparams(accumulate)(every=2)
    with raises(TypeError, "every must be", "static_args"):
        injected.update(PARAMS, jax.jit(injected.init)(PARAMS))


@pytest.mark.parametrize(
    ("schedule", "error"),
    [
        (lambda step: 0, ValueError),
        (lambda step: -1.5, ValueError),
        (lambda step: jnp.ones(2), ValueError),
        (lambda step: "2", TypeError),
        (lambda step: True, TypeError),
        (lambda step: None, TypeError),
    ],
)
def test_a_schedule_must_return_a_positive_number(schedule, error):
    with raises(error, r"every\(gradient_step\) must be a scalar number of at least 1"):
        accumulate(schedule).init(PARAMS)


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"reduction": "avg"}, ValueError, ["reduction", "mean", "sum", "avg"]),
        ({"on_skip": "drop"}, ValueError, ["on_skip", "wait", "shrink", "drop"]),
        ({"on_skip": "shrink"}, ValueError, ["on_skip", "skip"]),
        ({"skip": True}, TypeError, ["skip must be a function", "True"]),
        ({"dtype": "int32"}, TypeError, ["dtype must be a floating dtype", "int32"]),
        ({"dtype": "nonsense"}, TypeError, ["dtype must be a floating dtype"]),
        ({"average_args": "value"}, TypeError, ["average_args", "tuple", "'value'"]),
        ({"average_args": (1,)}, TypeError, ["average_args", "1"]),
        ({"average_args": 1}, TypeError, ["average_args", "1"]),
        ({"average_args": ("weight",)}, ValueError, ["average_args", "'weight'"]),
        ({"average_args": ("v", "v")}, ValueError, ["average_args", "twice"]),
    ],
)
def test_options_are_checked(kwargs, error, words):
    with raises(error, *words):
        accumulate(2, **kwargs)


@pytest.mark.parametrize("form", ["update", "apply_gradients"])
@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"weight": jnp.ones(2)}, ValueError, ["weight", r"float32\[2\]"]),
        ({"weight": -1}, ValueError, ["weight", "-1"]),
        ({"weight": np.float32(-1)}, ValueError, ["weight", "0 or more"]),
        ({"weight": 1j}, TypeError, ["weight", "complex64"]),
        ({"weight": True}, TypeError, ["weight", "bool"]),
        ({"weight": "2"}, TypeError, ["weight", "'2'"]),
        ({"release": jnp.zeros(2, bool)}, ValueError, ["release", r"bool\[2\]"]),
        ({"release": 1}, TypeError, ["release", "boolean", "got 1"]),
        ({"value": jnp.ones(2)}, ValueError, ["value", "average_args"]),
    ],
)
def test_extra_arguments_are_checked(form, kwargs, error, words):
    tx = chain(accumulate(2, average_args=("value",)), optax.sgd(0.1))
    kwargs = {"value": 1.0} | kwargs
    fn = (
        tx.update
        if form == "update"
        else functools.partial(optax_accum.apply_gradients, tx)
    )
    with raises(error, *words):
        fn(PARAMS, tx.init(PARAMS), PARAMS, **kwargs)


def test_a_missing_averaged_argument_is_named():
    tx = chain(accumulate(2, average_args=("value",)), optax.sgd(0.1))
    with raises(TypeError, "average_args names 'value'", "loss"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, loss=1.0)


def test_apply_gradients_does_not_swallow_what_a_transform_cannot_take():
    tx = optax.sgd(0.1)
    tx = optax.GradientTransformation(tx.init, lambda u, s, p=None: tx.update(u, s, p))
    with pytest.raises(TypeError, match="weight"):
        optax_accum.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS, weight=2)


@pytest.mark.parametrize(
    ("transforms", "error", "words"),
    [
        ([], ValueError, ["exactly one accumulation", "got 0"]),
        ([optax.sgd(0.1)], ValueError, ["got 0", "directly"]),
        ([optax.chain(accumulate(2)), optax.sgd(0.1)], ValueError, ["got 0"]),
        ([accumulate(2), accumulate(2)], ValueError, ["got 2"]),
        ([accumulate(2), chain(accumulate(2))], ValueError, ["got 2"]),
        ([accumulate(2), optax.adam], TypeError, ["takes Optax transforms", "adam"]),
        ([[accumulate(2)]], TypeError, ["takes Optax transforms", "list"]),
        ([2], TypeError, ["takes Optax transforms", "int"]),
    ],
)
def test_chain_takes_transforms_with_one_accumulation(transforms, error, words):
    with raises(error, *words):
        chain(*transforms)


def test_an_accumulation_hidden_in_another_transform_is_found_at_init():
    hidden = optax.chain(accumulate(2), optax.sgd(0.1))
    with raises(ValueError, "more than one accumulation"):
        chain(accumulate(2), hidden).init(PARAMS)


@pytest.mark.parametrize(
    ("grads", "error", "words"),
    [
        ({"a": PARAMS["a"]}, ValueError, [r"missing: \[\"\['b'\]\"\]"]),
        (PARAMS | {"c": PARAMS["a"]}, ValueError, [r"unexpected: \[\"\['c'\]\"\]"]),
        ([PARAMS["a"], PARAMS["b"]], ValueError, ["structure of the parameters"]),
        (
            PARAMS | {"b": jnp.ones((3, 2))},
            ValueError,
            ["'b'", r"\[3,2\]", r"\(2, 3\)"],
        ),
        (PARAMS | {"b": jnp.ones((2, 3)) * 1j}, TypeError, ["'b'", "complex64"]),
        (None, ValueError, ["structure of the parameters"]),
    ],
)
@pytest.mark.parametrize("form", ["update", "apply_gradients"])
def test_gradients_must_match_the_parameters(form, grads, error, words):
    tx = chain(accumulate(2), optax.sgd(0.1))
    state = tx.init(PARAMS)
    with raises(error, *words):
        if form == "update":
            jax.jit(tx.update)(grads, state, PARAMS)
        else:
            optax_accum.apply_gradients(tx, grads, state, PARAMS)


def test_a_gradient_where_there_was_no_parameter_is_named():
    tx = chain(accumulate(2), optax.sgd(0.1))
    with raises(ValueError, r"\['a'\]", "nothing to train"):
        tx.update(PARAMS, tx.init({"a": None, "b": PARAMS["b"]}))


def test_gradients_more_precise_than_their_accumulator_are_refused():
    with jax.enable_x64(True):
        tx = chain(accumulate(2), optax.sgd(0.1))
        state = tx.init(jnp.ones(2, "float32"))
        with raises(TypeError, "float64", "accumulator float32", "dtype"):
            tx.update(jnp.ones(2, "float64"), state)
        tx = chain(accumulate(2, dtype="float32"), optax.sgd(0.1))
        tx.update(jnp.ones(2, "float64"), tx.init(jnp.ones(2, "float32")))


def test_a_state_of_another_chain_is_refused():
    tx = chain(accumulate(2), optax.sgd(0.1))
    with raises(TypeError, "tuple of 2", "as from init"):
        tx.update(PARAMS, (*tx.init(PARAMS), ()))


def test_released_needs_an_accumulation():
    with raises(ValueError, "no AccumulateState"):
        optax_accum.released(optax.adam(0.1).init(PARAMS))


@pytest.mark.parametrize(
    "verdict", [jnp.zeros(2, bool), jnp.zeros([]), 1], ids=["shape", "dtype", "int"]
)
def test_skip_must_return_a_boolean_scalar(verdict):
    tx = chain(accumulate(2, skip=lambda *_: (verdict, ())), optax.sgd(0.1))
    with raises(TypeError, "skip must return a boolean scalar"):
        tx.update(PARAMS, tx.init(PARAMS))


def test_skip_must_return_a_pair():
    tx = accumulate(2, skip=lambda *_: False)
    with raises(TypeError, "skip must return a pair", "should_skip, skip_state"):
        tx.init(PARAMS)


def test_skip_must_keep_the_structure_of_its_state():
    def skip(updates, gradient_step, params):
        seen = [] if isinstance(gradient_step, jax.core.Tracer) else [1]
        return jnp.array(False), seen

    tx = chain(accumulate(2, skip=skip), optax.sgd(0.1))
    with raises(TypeError, "state that skip returns", "structure"):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    ("grow", "words"),
    [
        (lambda s: {"x": s}, ["structure"]),
        (lambda s: jnp.concatenate([s, s]), [r"float32\[4\] for float32\[2\]"]),
        (lambda s: s * 1j, ["complex64", "for float32"]),
    ],
)
def test_a_downstream_state_that_changes_its_type_is_named(grow, words):
    odd = optax.GradientTransformation(
        lambda params: jnp.zeros(2), lambda u, s, p=None: (u, grow(s))
    )
    tx = chain(accumulate(2), odd)
    with raises(TypeError, "what follows the accumulation", *words):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("every", [1, 2])
def test_a_downstream_state_that_begins_as_a_whole_number_is_not_rounded(every):
    mean = optax.GradientTransformation(
        lambda params: 0, lambda u, s, p=None: (u, 0.5 * s + 0.5 * u["a"][0])
    )
    tx = chain(accumulate(every), mean)
    with raises(TypeError, "what follows the accumulation", "float32.*for .*int32"):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS))


def test_a_transform_whose_state_has_no_fixed_structure_is_refused():
    # `optax.monitor` adds its measurements in its first update.
    tx = chain(accumulate(2), optax.monitor({"norm": optax.tree.norm}))
    with raises(TypeError, "what follows the accumulation", "norm"):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS))


def test_arguments_in_the_wrong_order_are_told():
    tx = chain(accumulate(2), optax.sgd(0.1))
    with raises(
        TypeError, "tuple of 2", "tx, grads, opt_state, params in apply_gradients"
    ):
        optax_accum.apply_gradients(tx, PARAMS, PARAMS, tx.init(PARAMS))
    with raises(TypeError, "AccumulateState", "got dict"):
        accumulate(2).update(PARAMS, PARAMS)


def test_a_state_of_optax_is_told_from_ours():
    state = optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS)
    for tx in (
        optax_accum.MultiSteps(optax.sgd(0.1), 2),
        chain(accumulate(2), optax.sgd(0.1)),
    ):
        with raises(TypeError, "from_multi_steps_state"):
            tx.update(PARAMS, state)


@pytest.mark.parametrize(
    ("before", "now", "name"),
    [
        (accumulate(2), accumulate(lambda step: 2), "every"),
        (accumulate(lambda step: 2), accumulate(2), "every"),
        (accumulate(2), accumulate(1), "every"),
        (accumulate(2), accumulate(2, average_args=("value",)), "average_args"),
        (accumulate(2), accumulate(2, skip=optax.skip_not_finite), "skip"),
        (accumulate(2, skip=optax.skip_not_finite), accumulate(2), "skip"),
        (accumulate(2), accumulate(2, track_noise=True), "track_noise"),
    ],
)
def test_a_state_of_another_accumulate_is_refused(before, now, name):
    with raises(ValueError, f"another {name}"):
        now.update(PARAMS, before.init(PARAMS), value=1.0)


def test_containers_of_another_type_are_told():
    tx = chain(accumulate(2), optax.sgd(0.1))
    state = tx.init(FrozenDict(PARAMS))
    with raises(ValueError, "containers are of other types", "FrozenDict"):
        tx.update(PARAMS, state)


@pytest.mark.parametrize("argument", [{"weight": 1.0}, {"release": True}])
def test_a_weight_that_nobody_reads_is_not_lost(argument):
    opt = optax.adam(0.1)
    with raises(TypeError, next(iter(argument)), "no"):
        optax_accum.apply_gradients(opt, PARAMS, opt.init(PARAMS), PARAMS, **argument)
    masked = optax.masked(chain(accumulate(2), opt), True)
    state = masked.init(PARAMS)
    optax_accum.apply_gradients(masked, PARAMS, state, PARAMS, **argument)


@pytest.mark.parametrize(
    "weight",
    [
        np.nan,
        np.inf,
        np.float32("nan"),
        -0.5,
        -3,
        10**400,
        1e39,
        1e-41,
        np.array(1e-41),
    ],
)
def test_a_weight_that_is_no_number_is_refused_where_it_can_be_seen(weight):
    with raises(ValueError, "finite real scalar", "0 or more"):
        accumulate(2).update(PARAMS, accumulate(2).init(PARAMS), weight=weight)


@pytest.mark.parametrize(
    ("weight", "total"),
    [
        (np.int64(2**32 + 5), 2.0**32),
        (np.uint64(2**63), 2.0**63),
        (2**33, 2.0**33),
        (np.array(3_000_000_000), 3e9),
    ],
)
def test_a_large_whole_number_does_not_wrap_around(weight, total):
    tx = accumulate(2, average_args=("value",))
    _, state = tx.update(PARAMS, tx.init(PARAMS), weight=weight, value=weight)
    np.testing.assert_allclose(state.window_weight, total, rtol=1e-6)
    np.testing.assert_allclose(state.acc_args["value"], total**2, rtol=1e-6)


def test_a_window_longer_than_can_be_counted():
    with raises(ValueError, "every", "largest is 2147483647"):
        accumulate(2**33)
    for long in (2**40, np.inf, jnp.uint32(2**32 - 1), np.uint64(2**63)):
        tx = accumulate(lambda step, long=long: long)
        for update in (tx.update, jax.jit(tx.update)):
            _, state = update(PARAMS, tx.init(PARAMS))
            assert state.every == 2**31 - 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["weights", "wieght", "realease"])
def test_an_extra_argument_that_looks_like_a_typo_is_warned_of(form, name):
    tx = chain(accumulate(2), optax.sgd(0.1))
    with pytest.warns(UserWarning, match=f"{name!r}; did you mean"):
        FORMS[form](tx, PARAMS, tx.init(PARAMS), PARAMS, **{name: 1})


def test_a_whole_train_state_for_its_part_is_told():
    tx = chain(accumulate(2), optax.sgd(0.1))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with raises(TypeError, "tuple of 2", "Pass its opt_state"):
        tx.update(PARAMS, state, PARAMS)


def test_parameters_must_match_the_gradients():
    tx = chain(accumulate(2), optax.sgd(0.1))
    for params in (None, {"a": jnp.ones(2)}):
        with raises(ValueError, "params must have the structure of grads"):
            optax_accum.apply_gradients(tx, PARAMS, tx.init(PARAMS), params)


def test_the_structure_of_a_large_model_does_not_flood_an_error():
    params = {f"layer{i}": jnp.ones(2) for i in range(1000)}
    tx = chain(accumulate(2), optax.sgd(0.1))
    with pytest.raises(ValueError, match="unexpected") as caught:
        tx.update({"a": jnp.ones(2)}, tx.init(params), params)
    assert len(str(caught.value)) < 2500

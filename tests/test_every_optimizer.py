"""Every transform that Optax offers: the window equals the large batch."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal

import optax_accum


def matrices(params):
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


# What cannot be built from a learning rate alone.
BUILT = {
    "adafactor": lambda f: f(0.1, min_dim_size_to_factor=2),
    "adaptive_grad_clip": lambda f: f(0.1),
    "add_decayed_weights": lambda f: f(0.1),
    "add_noise": lambda f: f(0.1, 0.5, key=0),
    "apply_every": lambda f: f(2),
    "apply_if_finite": lambda f: f(optax.adam(0.1), 2),
    "chain": lambda f: f(optax.clip(1.0), optax.adam(0.1)),
    "clip": lambda f: f(1.0),
    "clip_by_block_rms": lambda f: f(1.0),
    "clip_by_global_norm": lambda f: f(1.0),
    "conditionally_mask": lambda f: f(optax.adam(0.1), lambda step: step % 2 == 0),
    "conditionally_transform": lambda f: f(optax.adam(0.1), lambda step: step > 0),
    "ema": lambda f: f(0.9),
    "flatten": lambda f: f(optax.adam(0.1)),
    "freeze": lambda f: f({"w": True, "b": False}),
    "inject_hyperparams": lambda f: f(optax.adam)(learning_rate=0.1),
    "inject_stateful_hyperparams": lambda f: f(optax.adam)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 3)
    ),
    "lbfgs": lambda f: f(0.1, linesearch=None),
    "lookahead": None,  # its parameters are not shaped like its gradients
    "masked": lambda f: f(optax.adam(0.1), {"w": True, "b": False}),
    "measure_with_ema": None,  # for `monitor`, see `test_errors.py`
    "mechanize": lambda f: f(optax.sgd(0.1)),
    "multi_transform": lambda f: f(
        {"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}
    ),
    "named_chain": lambda f: f(("clip", optax.clip(1.0)), ("adam", optax.adam(0.1))),
    "noisy_sgd": lambda f: f(0.1, key=0),
    "partition": lambda f: f(
        {"a": optax.adam(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}
    ),
    "polyak_sgd": lambda f: f(1.0),
    "sam": lambda f: f(optax.adam(0.1), optax.sgd(0.05), sync_period=2),
    "scale": lambda f: f(0.1),
    "scale_by_backtracking_linesearch": lambda f: f(5),
    "scale_by_galore": lambda f: f(2),
    "scale_by_muon": lambda f: optax.masked(
        f(weight_dimension_numbers=matrices), {"w": True, "b": False}
    ),
    "scale_by_schedule": lambda f: f(optax.linear_schedule(0.1, 0.01, 3)),
    "scale_by_zoom_linesearch": lambda f: f(5),
    "schedule_free": lambda f: f(optax.sgd(0.1), 0.1),
    "selective_transform": lambda f: f(
        optax.adam(0.1), freeze_mask={"w": True, "b": False}
    ),
    "snapshot": lambda f: f("norm", lambda updates, **_: optax.tree.norm(updates)),
    "split_real_and_imaginary": lambda f: f(optax.adam(0.1)),
    "stateless": lambda f: f(lambda updates, params: optax.tree.scale(2.0, updates)),
    "stateless_with_tree_map": lambda f: f(lambda g, p: g + p),
    "trace": lambda f: f(0.9),
    "with_extra_args_support": lambda f: f(optax.adam(0.1)),
}
# They take gradients with a leading axis of examples: they go before `accumulate`.
PER_EXAMPLE = {"differentially_private_aggregate", "dpsgd"}


def discover():
    for module in (optax, optax.contrib):
        for name, fn in vars(module).items():
            private = name.startswith("_")
            if not inspect.isfunction(fn) or private or name in PER_EXAMPLE:
                continue
            if hasattr(module, name.removeprefix("scale_by_")) and "scale_by" in name:
                continue  # the optimizer of that name is made of it
            returns = str(inspect.signature(fn).return_annotation)
            if "GradientTransformation" in returns and BUILT.get(name, True):
                yield pytest.param(name, fn, id=name)


def build(name, fn):
    if name in BUILT:
        return BUILT[name](fn)
    needed = [
        p.name
        for p in inspect.signature(fn).parameters.values()
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    assert needed in ([], ["learning_rate"]), f"say in BUILT how to build {name}"
    return fn(**dict.fromkeys(needed, 0.1))


def value_fn(params):
    return sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(params))


def takes(name, **extra_args):
    """Of the extra arguments those that this transform wants to see."""
    if "linesearch" in name:
        return extra_args | {"value_fn": value_fn}
    if name in ("sophia", "scale_by_sophia"):
        return {"obj_fn": value_fn}
    return {} if name == "sam" else {"value": extra_args["value"]}


WINDOWS, EVERY = 3, 2
PARAMS = {
    "w": jnp.linspace(-1.0, 2.0, 12).reshape(4, 3),
    "b": jnp.array([0.5, -1.0, 2.0]),
}


def microbatches():
    """Gradients of integers, so that the large batch's are exact."""
    rng = np.random.default_rng(0)
    return [
        [
            jax.tree.map(
                lambda p: rng.integers(-4, 5, p.shape).astype(np.float32), PARAMS
            )
            for _ in range(EVERY)
        ]
        for _ in range(WINDOWS)
    ]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "fn"), list(discover()))
def test_a_window_equals_the_large_batch(name, fn):
    opt = optax.with_extra_args_support(build(name, fn))

    @jax.jit
    def large_batch(grads, state, params, value):
        args = takes(name, value=value, grad=grads)
        updates, state = opt.update(grads, state, params, **args)
        return optax.apply_updates(params, updates), state

    average = [arg for arg in takes(name, value=0, grad=0) if arg == "value"]
    tx = optax_accum.chain(optax_accum.accumulate(EVERY, average_args=average), opt)

    def micro_step(form):
        @jax.jit
        def step(grads, state, params, value, mean):
            args = takes(name, value=value, grad=mean)
            return FORMS[form](tx, grads, state, params, **args)

        return step

    steps = {form: micro_step(form) for form in FORMS}
    params, state = PARAMS, opt.init(PARAMS)
    runs = {form: (PARAMS, tx.init(PARAMS)) for form in FORMS}
    for window in microbatches():
        mean = jax.tree.map(lambda *g: jnp.float32(np.mean(g, axis=0)), *window)
        value = value_fn(params)
        params, state = large_batch(mean, state, params, value)
        for form, (p, s) in runs.items():
            for i, grads in enumerate(window):
                before = p, s[1]
                off = value + (1.0 if i % 2 else -1.0)  # the mean is `value`
                p, s = steps[form](grads, s, p, off, mean)
                if i < EVERY - 1:
                    assert_trees_equal((p, s[1]), before)
            runs[form] = p, s
            assert_trees_equal(p, params, rtol=2e-5, atol=1e-6)
            assert_trees_equal(s[1], state, rtol=2e-5, atol=1e-5)

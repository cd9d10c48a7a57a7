"""The gradient noise scale against what it estimates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal
from optax import microbatching

import optax_accum
from optax_accum import accumulate, chain, metrics, noise_scale
from optax_accum._split import Split

SIZE = 64
G = np.linspace(-0.5, 1.0, SIZE)  # the true gradient
STD = np.linspace(0.5, 1.5, SIZE)  # of a gradient of weight 1


def run(tx, grads, weights=None):
    """The state after microbatches, in one scan."""

    def step(state, x):
        g, w = x
        extra = {} if weights is None else {"weight": w}
        _, state = tx.update(g, state, **extra)
        return state, ()

    ws = jnp.ones(len(grads)) if weights is None else jnp.asarray(weights, float)
    state = tx.init(jnp.zeros(SIZE))
    return jax.jit(lambda *xs: jax.lax.scan(step, state, xs)[0])(jnp.asarray(grads), ws)


@pytest.mark.parametrize("window", [2, 16])
@pytest.mark.parametrize("unequal", [False, True])
def test_it_estimates_a_known_gradient_and_covariance(window, unequal):
    rng = np.random.default_rng(window)
    n = 400 * window
    weights = rng.integers(1, 9, n) if unequal else np.ones(n)
    noise = rng.normal(size=(n, SIZE)) * STD / np.sqrt(weights)[:, None]
    grads = np.float32(G + noise)
    decay = 0.999  # all windows count about the same
    tx = accumulate(window, track_noise=True, noise_decay=decay)
    state = run(tx, grads, weights if unequal else None)
    got = noise_scale(state)

    # Of a window, with its own weights, in units of a microbatch of mean weight.
    trace = np.sum(STD**2) * np.mean(window / weights.reshape(-1, window).sum(1))
    np.testing.assert_allclose(got.trace, trace, rtol=0.05)
    np.testing.assert_allclose(got.gradient_norm_squared, np.sum(G**2), rtol=0.1)
    np.testing.assert_allclose(got.noise_scale, trace / np.sum(G**2), rtol=0.15)


def test_it_is_what_the_gradients_of_the_examples_say():
    x = jax.random.normal(jax.random.key(0), (6, 3))
    params = jnp.array([1.0, -2.0, 0.5])

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    by_example = microbatching.micro_grad(
        loss_fn,
        accumulator=microbatching.AccumulationType.MEAN,
        metrics_fn=lambda g: jnp.sum(g**2),
    )
    mean, aux = by_example(params, x)
    tx = chain(accumulate(6, track_noise=True), optax.sgd(0.1))
    state = tx.init(params)
    for row in x:
        grads = jax.grad(loss_fn)(params, row[None])
        _, state = tx.update(grads, state, params)
    got = noise_scale(state)
    trace = 6 / 5 * (jnp.mean(aux.metrics) - mean @ mean)
    np.testing.assert_allclose(got.trace, trace, rtol=1e-5)
    np.testing.assert_allclose(
        got.gradient_norm_squared, mean @ mean - trace / 6, rtol=1e-5
    )
    # Two microbatches of three examples each estimate a third of the trace.
    tx = accumulate(2, track_noise=True)
    state = tx.init(params)
    for rows in (x[:3], x[3:]):
        _, state = tx.update(jax.grad(loss_fn)(params, rows), state)
    halves = np.stack([by_example(params, rows)[0] for rows in (x[:3], x[3:])])
    np.testing.assert_allclose(
        noise_scale(state).trace, np.trace(np.cov(halves.T)), rtol=1e-5
    )


def test_windows_of_one_microbatch_tell_nothing():
    for every in (1, None):
        tx = accumulate(every, track_noise=True)
        state = tx.init(jnp.zeros(2))
        assert np.isnan(noise_scale(state).noise_scale)
        for _ in range(3):
            _, state = tx.update(jnp.ones(2), state, release=True)
        assert all(np.isnan(x) for x in noise_scale(state))


def test_they_leave_the_estimates_of_others_alone():
    tx = accumulate(None, track_noise=True)
    state = tx.init(jnp.zeros(2))
    for release in (False, True):
        _, state = tx.update(jnp.ones(2) * release, state, release=release)
    before = noise_scale(state)
    _, state = tx.update(jnp.full(2, 100.0), state, release=True)
    assert_trees_equal(noise_scale(state), before)


def test_skipped_microbatches_and_those_of_weight_zero_do_not_count():
    clean = accumulate(3, track_noise=True)
    tx = accumulate(3, track_noise=True, skip=optax.skip_not_finite)
    grads = jax.random.normal(jax.random.key(0), (3, 2))
    bad = jnp.array([jnp.nan, 1.0])
    want, got = clean.init(grads[0]), tx.init(grads[0])
    for g in grads:
        _, want = clean.update(g, want)
    for g in (bad, grads[0], bad, grads[1], grads[2]):
        _, got = tx.update(g, got)
    assert_trees_equal(noise_scale(got), noise_scale(want))
    tx = accumulate(4, track_noise=True)
    got = tx.init(grads[0])
    for g, w in ((grads[0], 2), (bad, 0), (grads[1], 2), (grads[2], 2)):
        _, got = tx.update(g, got, weight=w)
    assert_trees_equal(noise_scale(got), noise_scale(want), rtol=1e-6)


def test_the_smoothing_is_debiased():
    windows = np.float32([[[1.0, 0.0], [0.0, 0.0]], [[5.0, 0.0], [1.0, 2.0]]])
    traces = [np.trace(np.cov(window.T)) for window in windows]
    tx = accumulate(2, track_noise=True, noise_decay=0.75)
    state = tx.init(jnp.zeros(2))
    for g in windows[0]:
        _, state = tx.update(g, state)
    np.testing.assert_allclose(noise_scale(state).trace, traces[0], rtol=1e-6)
    for g in windows[1]:
        _, state = tx.update(g, state)
    want = (0.75 * traces[0] + traces[1]) / 1.75
    np.testing.assert_allclose(noise_scale(state).trace, want, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_it_changes_nothing_else(form, reduction, dtype):
    params = {"w": jnp.ones((2, 3), dtype), "none": None}
    grads = [
        {"w": jax.random.normal(jax.random.key(i), (2, 3)).astype(dtype), "none": None}
        for i in range(4)
    ]
    results = {}
    for track in (False, True):
        tx = chain(
            accumulate(2, reduction=reduction, track_noise=track), optax.sgd(1.0)
        )
        step = jax.jit(functools.partial(FORMS[form], tx))
        p, state = params, tx.init(params)
        for g in grads:
            p, state = step(g, state, p)
        results[track] = p
    assert_trees_equal(results[True], results[False])
    other = chain(accumulate(2, track_noise=True), optax.sgd(1.0))
    want = other.init(params)
    for g in grads:
        _, want = other.update(g, want, params)
    assert_trees_equal(noise_scale(state), noise_scale(want), rtol=1e-5)


def test_metrics_tell_it_too():
    tx = accumulate(2, track_noise=True)
    state = run(tx, np.ones((2, SIZE), np.float32))
    got = metrics(state)
    assert got["trace"] == 0
    assert got["gradient_norm_squared"] == SIZE
    assert got["noise_scale"] == 0
    assert "trace" not in metrics(accumulate(2).init(jnp.zeros(2)))


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="track_noise=True"):
        noise_scale(accumulate(2).init(jnp.zeros(2)))
    with pytest.raises(ValueError, match=r"noise_decay .* got 1"):
        accumulate(2, noise_decay=1)
    with pytest.raises(TypeError, match="noise_decay"):
        accumulate(2, noise_decay=None)
    state = accumulate(2).init(jnp.zeros(2))
    with pytest.raises(ValueError, match="another track_noise"):
        accumulate(2, track_noise=True).update(jnp.zeros(2), state)


def mean_loss(params, x):
    return jnp.mean(jnp.tanh(x @ params) ** 2)


PARAMS = jnp.array([1.0, -2.0, 0.5])
X = jax.random.normal(jax.random.key(1), (10, 3))


def by_microbatch(tx, parts, weights, skip=()):
    """The state after these parts of `X`, each by an `update` of its own."""
    state = tx.init(PARAMS)
    for i, (part, w) in enumerate(zip(parts, weights, strict=True)):
        if i not in skip:
            grads = jax.grad(mean_loss)(PARAMS, part)
            _, state = tx.update(grads, state, PARAMS, weight=w)
    return state


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_value_and_grad_tells_what_accumulate_would(size):
    ours = optax_accum.value_and_grad(mean_loss, microbatch_size=size, track_noise=True)
    _, grads, noise = jax.jit(ours)(PARAMS, X)
    assert_trees_equal(grads, jax.grad(mean_loss)(PARAMS, X), rtol=1e-5)
    split = Split.of(10, size)
    parts = [split.full(X, i) for i in range(split.whole)]
    parts += [split.last(X)] if split.rest else []
    tx = accumulate(len(parts), track_noise=True)
    want = noise_scale(by_microbatch(tx, parts, map(len, parts)))
    assert_trees_equal(noise_scale(noise), want, rtol=1e-4)


def test_value_and_grad_without_noise_to_tell_says_nan():
    def skip_all(grads, step, params):
        return jnp.array(True), ()

    for options in ({"microbatch_size": 10}, {"microbatch_size": 2, "skip": skip_all}):
        ours = optax_accum.grad(mean_loss, track_noise=True, **options)
        grads, noise = ours(PARAMS, X)
        assert np.all(np.isfinite(grads))
        assert all(np.isnan(x) for x in noise_scale(noise))


def test_weights_and_skips_of_value_and_grad_count():
    def skip(grads, step, params):
        return jnp.any(jnp.isnan(jnp.stack(grads))), ()

    def fun(params, x, y):
        return mean_loss(params[0], x) + params[0][0] * 0 * y[0], y

    y = jnp.array([1, 2, 3, 4, jnp.nan] * 2)
    ours = optax_accum.value_and_grad(
        fun,
        has_aux=True,
        batch_argnums=(1, 2),
        microbatch_size=2,
        weight=lambda params, x, y: y[0] ** 2,
        skip=skip,
        aux="stack",
        track_noise=True,
    )
    (_, aux), _, noise = ours([PARAMS], X, y)
    assert aux.shape == (10,)
    parts = [jnp.stack([X[i], X[i + 5]]) for i in range(4)]
    tx = accumulate(4, track_noise=True)
    want = noise_scale(by_microbatch(tx, parts, [1, 4, 9, 16]))
    assert_trees_equal(noise_scale(noise), want, rtol=1e-4)


@pytest.mark.parametrize("every", [1, 2])
def test_it_goes_into_the_state_by_update(every):
    ours = optax_accum.value_and_grad(mean_loss, microbatch_size=1, track_noise=True)
    tx = chain(accumulate(every, track_noise=True), optax.sgd(0.0))
    state, parts = tx.init(PARAMS), []
    for i in range(2):
        part = X[5 * i : 5 * i + 5]
        _, grads, noise = ours(PARAMS, part)
        _, state = tx.update(grads, state, PARAMS, noise=noise)
        parts += [row[None] for row in part]
    inner = accumulate(5 * every, track_noise=True)
    want = noise_scale(by_microbatch(inner, parts, [1] * 10))
    assert_trees_equal(noise_scale(state), want, rtol=1e-4)
    with pytest.raises(TypeError, match="noise must be the third"):
        tx.update(grads, state, PARAMS, noise=noise_scale(noise))
    tx = accumulate(2)
    with pytest.raises(TypeError, match="track_noise=True"):
        tx.update(grads, tx.init(PARAMS), noise=noise)

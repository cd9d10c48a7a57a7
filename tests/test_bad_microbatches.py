"""A bad microbatch can only spoil its own window, and with `skip` not even that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import FORMS, assert_trees_equal, recorder

import optax_accum
from optax_accum import accumulate, chain, released

PARAMS = jnp.array([1.0, 2.0])
GOOD = jnp.array([1.0, -1.0])
BAD = {
    "nan": jnp.array([jnp.nan, 1.0]),
    "inf": jnp.array([1.0, jnp.inf]),
    "-inf": jnp.array([-jnp.inf, jnp.nan]),
}


def train(tx, grads, form="apply_gradients", params=PARAMS, **per_step):
    step = jax.jit(functools.partial(FORMS[form], tx))
    state, trail = tx.init(params), []
    for i, g in enumerate(grads):
        args = {k: v[i] for k, v in per_step.items()}
        params, state = step(g, state, params, **args)
        trail.append((params, state))
    return trail


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_without_skip_only_its_window_is_spoilt(form, bad, position):
    # A memoryless optimizer: the next window's update must be clean.
    tx = chain(accumulate(3), recorder())
    grads = [GOOD] * 9
    grads[3 + position] = BAD[bad]
    trail = train(tx, grads, form)
    for i, (_, state) in enumerate(trail):
        finite = bool(jnp.all(jnp.isfinite(state[1].updates)))
        assert finite == (not 5 <= i <= 7)
    assert_trees_equal(trail[-1][1][1].updates, GOOD)


@pytest.mark.parametrize("form", FORMS)
def test_between_releases_a_nan_does_not_reach_the_parameters(form):
    tx = chain(accumulate(2), optax.adam(0.1))
    [(params, state)] = train(tx, [BAD["nan"]], form)
    assert_trees_equal(params, PARAMS)
    assert_trees_equal(state[1], tx.init(PARAMS)[1])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_waiting_is_as_if_it_never_came(form, bad, position):
    tx = chain(accumulate(2, skip=optax.skip_not_finite), optax.adam(0.1))
    grads = [GOOD, 3 * GOOD, 5 * GOOD, GOOD]
    clean = train(tx, grads, form)
    trail = train(tx, [*grads[:position], BAD[bad], *grads[position:]], form)
    (params, state), (want_params, want_state) = trail[-1], clean[-1]
    assert_trees_equal(params, want_params)
    assert_trees_equal(state[1:], want_state[1:])
    before = trail[position - 1] if position else (PARAMS, tx.init(PARAMS))
    skipped = trail[position]
    assert_trees_equal(skipped[0], before[0])
    assert skipped[1][0].mini_step == before[1][0].mini_step
    assert not released(skipped[1])
    assert skipped[1][0].skip_state["should_skip"]
    assert skipped[1][0].skip_state["num_not_finite"] > 0


@pytest.mark.parametrize("form", FORMS)
def test_shrinking_takes_the_mean_over_the_rest(form):
    skip = optax.skip_not_finite
    tx = chain(accumulate(3, skip=skip, on_skip="shrink"), recorder())
    for position in range(3):
        grads = [GOOD, 4 * GOOD]
        grads.insert(position, BAD["nan"])
        trail = train(tx, grads, form)
        assert [bool(released(s)) for _, s in trail] == [False, False, True]
        assert_trees_equal(trail[-1][1][1].updates, 2.5 * GOOD)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [1, 2])
def test_a_window_with_nothing_accepted_releases_nothing_and_starts_over(form, every):
    skip = optax.skip_not_finite
    tx = chain(accumulate(every, skip=skip, on_skip="shrink"), recorder())
    trail = train(tx, [BAD["nan"]] * every + [GOOD] * every, form)
    _, empty = trail[every - 1]
    assert not released(empty)
    assert (empty[0].mini_step, empty[0].gradient_step, empty[1].calls) == (0, 0, 0)
    _, full = trail[-1]
    assert (full[0].gradient_step, full[1].calls) == (1, 1)
    assert_trees_equal(full[1].updates, GOOD)


@pytest.mark.parametrize("form", FORMS)
def test_release_on_a_skipped_microbatch_releases_what_came_before(form):
    tx = chain(accumulate(4, skip=optax.skip_not_finite), recorder())
    grads = [GOOD, 3 * GOOD, BAD["nan"], GOOD]
    trail = train(tx, grads, form, release=jnp.array([False, False, True, False]))
    _, state = trail[2]
    assert released(state)
    assert_trees_equal(state[1].updates, 2 * GOOD)
    assert trail[3][1][0].mini_step == 1


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("every", [1, 2])
def test_weight_zero_adds_nothing_not_even_nan(form, every):
    # The loss of a microbatch that is all padding is 0/0.
    tx = chain(accumulate(every), recorder())
    trail = train(tx, [BAD["nan"]] * every, form, weight=jnp.zeros(every))
    assert not released(trail[-1][1])
    assert trail[-1][1][1].calls == 0
    tx = chain(accumulate(2), recorder())
    for w, grads in (([0, 2], [BAD["nan"], GOOD]), ([2, 0], [GOOD, BAD["inf"]])):
        trail = train(tx, grads, form, weight=jnp.array(w))
        assert released(trail[-1][1])
        assert_trees_equal(trail[-1][1][1].updates, GOOD)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bad", [jnp.nan, -1.0])
def test_a_bad_weight_spoils_its_window_and_no_later_one(form, bad):
    tx = chain(accumulate(2), recorder())
    weights = jnp.array([1.0, bad, 1.0, 1.0])
    trail = train(tx, [GOOD] * 4, form, weight=weights)
    assert jnp.all(jnp.isnan(trail[1][1][1].updates))
    assert_trees_equal(trail[3][1][1].updates, GOOD)


def test_an_averaged_argument_of_a_skipped_microbatch_does_not_count():
    skip = optax.skip_not_finite
    tx = chain(accumulate(2, skip=skip, average_args=("value",)), recorder())
    grads = [GOOD, BAD["nan"], GOOD]
    trail = train(tx, grads, value=jnp.array([1.0, jnp.nan, 3.0]))
    assert trail[-1][1][1].value == 2.0


def test_skip_large_updates_sees_the_gradient_step_and_the_params():
    seen = []

    def skip(updates, gradient_step, params):
        seen.append((gradient_step, params))
        return optax.skip_large_updates(updates, gradient_step, params, 4.0)

    tx = chain(accumulate(2, skip=skip), recorder())
    state = tx.init(PARAMS)
    for g in (GOOD, 9 * GOOD, GOOD):
        _, state = tx.update(g, state, PARAMS)
    assert released(state)
    assert state[0].skip_state["norm_squared"] == 2.0
    assert_trees_equal(state[1].updates, GOOD)
    assert all(params is PARAMS for _, params in seen)


def test_skip_does_not_see_what_has_no_numbers():
    params = {"n": jnp.arange(2), "w": PARAMS, "f": PARAMS}
    float0 = np.zeros(2, jax.dtypes.float0)
    tx = chain(accumulate(2, skip=optax.skip_not_finite), optax.identity())
    state = tx.init(params)
    for g in (GOOD, BAD["nan"], GOOD):
        grads = {"n": float0, "w": g, "f": None}
        updates, state = jax.jit(tx.update)(grads, state, params)
    assert_trees_equal(updates["w"], GOOD)


def test_zero_nans_upstream_cleans_each_microbatch():
    tx = chain(optax.zero_nans(), accumulate(2), optax.sgd(1.0))
    trail = train(tx, [BAD["nan"], GOOD])
    np.testing.assert_array_equal(trail[-1][0], PARAMS - jnp.array([0.5, 0.0]))


def test_the_last_partial_window_applies_its_true_mean():
    tx = optax_accum.MultiSteps(optax.sgd(1.0), 8)
    trail = train(tx, [GOOD, 2 * GOOD, 6 * GOOD], release=jnp.array([0, 0, 1], bool))
    np.testing.assert_array_equal(trail[-1][0], PARAMS - 3 * GOOD)
    assert trail[-1][1].mini_step == 0


def test_token_counts_as_weights_give_the_token_mean():
    tokens = jnp.array([10, 1000])
    tx = chain(accumulate(2), recorder())
    trail = train(tx, [GOOD, 2 * GOOD], weight=tokens)
    np.testing.assert_array_equal(trail[-1][1][1].updates, GOOD * (2010 / 1010))


def test_what_is_left_out_has_no_derivative():
    tx = chain(accumulate(2, skip=optax.skip_not_finite), optax.sgd(1.0))

    def loss(weight, bad):
        params = jnp.zeros(1)
        state = tx.init(params)
        for g, w in ((jnp.nan, bad), (3.0, weight), (1.0, 1.0)):
            updates, state = tx.update(jnp.array([g]), state, params, weight=w)
        return updates[0]

    # -(3 w + 1) / (w + 1)
    value, grads = jax.value_and_grad(loss, (0, 1))(1.0, 5.0)
    np.testing.assert_allclose(value, -2.0)
    np.testing.assert_allclose(grads, (-0.5, 0.0))
    assert jnp.isfinite(jax.jit(loss)(1.0, jnp.nan))

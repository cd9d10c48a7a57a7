"""A training run to which anything may happen, beside the oracle."""

import functools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import FORMS, assert_trees_equal, recorder, types
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from oracle import Oracle

import optax_accum

SCHEDULES = {
    "steady": lambda step: 3,
    "grows": lambda step: step + 1,
    "shrinks": lambda step: 4 - 2 * (step > 0),
}
PARAMS = {"x": jnp.array([100.0, -100.0])}


@functools.cache
def transform(schedule, on_skip):
    return optax_accum.chain(
        optax_accum.accumulate(
            SCHEDULES[schedule],
            skip=optax.skip_not_finite if on_skip else None,
            on_skip=on_skip or "wait",
        ),
        recorder(),
        optax.scale(-1.0),
    )


@functools.cache
def jitted(form, schedule, on_skip):
    return jax.jit(functools.partial(FORMS[form], transform(schedule, on_skip)))


def pickled(state):
    return pickle.loads(pickle.dumps(state))


def through_msgpack(state):
    written = flax.serialization.to_bytes(state)
    return flax.serialization.from_bytes(state, written)


class Training(RuleBasedStateMachine):
    """Integer gradients, so that what comes out must agree to the bit."""

    @initialize(
        schedule=st.sampled_from(sorted(SCHEDULES)),
        on_skip=st.sampled_from([None, "wait", "shrink"]),
    )
    def start(self, schedule, on_skip):
        self.schedule, self.on_skip = schedule, on_skip
        self.oracle = Oracle(SCHEDULES[schedule], on_skip=on_skip or "wait")
        self.params, self.state = PARAMS, transform(schedule, on_skip).init(PARAMS)
        self.types = types(self.state)
        self.calls = 0

    def micro_step(self, form, grad, skip=False, **extra_args):
        before = self.params, self.state[1:]
        want = self.oracle.step(grad, skip=skip, **extra_args)
        step = jitted(form, self.schedule, self.on_skip)
        grads = {"x": jnp.asarray(grad, jnp.float32)}
        params, state = step(grads, self.state, self.params, **extra_args)
        if want is None:
            assert_trees_equal((params, state[1:]), before)
        else:
            self.calls += 1
            mean = np.float32(want[0])
            np.testing.assert_array_equal(state[1].updates["x"], mean)
            np.testing.assert_array_equal(params["x"], before[0]["x"] - mean)
        assert types(state) == self.types
        assert state[0].mini_step == self.oracle.mini_step
        assert state[0].gradient_step == self.oracle.gradient_step
        assert state[1].calls == self.calls
        assert optax_accum.released(state) == self.oracle.released
        self.params, self.state = params, state
        if not np.all(np.isfinite(params["x"])):
            self.params = PARAMS

    @rule(
        form=st.sampled_from(sorted(FORMS)),
        grad=st.integers(-8, 8),
        weight=st.integers(0, 3),
        release=st.booleans(),
    )
    def good_microbatch(self, form, grad, weight, release):
        self.micro_step(form, [grad, 1.0], weight=weight, release=release)

    @rule(
        form=st.sampled_from(sorted(FORMS)),
        bad=st.sampled_from([np.nan, np.inf, -np.inf]),
        release=st.booleans(),
    )
    def bad_microbatch(self, form, bad, release):
        skip = self.on_skip is not None
        self.micro_step(form, [1.0, bad], skip=skip, weight=1, release=release)

    @rule(save=st.sampled_from([pickled, through_msgpack, jax.device_get]))
    def save_and_restore(self, save):
        restored = save(self.state)
        assert_trees_equal(restored, self.state)
        self.state = restored

    @rule(schedule=st.sampled_from(sorted(SCHEDULES)))
    def go_on_under_another_schedule(self, schedule):
        # An open window keeps the length that it was opened with.
        self.schedule = schedule
        self.oracle.schedule = SCHEDULES[schedule]


Training.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, derandomize=True
)
TestTraining = Training.TestCase

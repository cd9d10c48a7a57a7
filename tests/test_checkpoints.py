"""Training goes on from a checkpoint, in the middle of a window, as if nothing was."""

import functools
import pickle
import random
import signal
import subprocess
import sys
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import assert_trees_equal
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_accum
import optax_accum.flax
from optax_accum import accumulate, apply_gradients, chain, from_multi_steps_state

PARAMS = {"w": jnp.arange(8.0).reshape(4, 2), "b": jnp.array([0.5, -1.0])}
OPT = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
TX = {
    "plain": chain(accumulate(3), OPT),
    "all of it": chain(
        optax.zero_nans(),
        accumulate(
            lambda step: 3 + step % 2,
            dtype="bfloat16",
            skip=optax.skip_not_finite,
            average_args=("value",),
        ),
        OPT,
    ),
    "a window of one": chain(accumulate(1), OPT),
    "MultiSteps": optax_accum.MultiSteps(OPT, 3),
}


@functools.cache
def jitted(name):
    def step(params, state, i):
        key = jax.random.fold_in(jax.random.key(0), i)
        grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape), params)
        args = {"value": i * 0.5} if name == "all of it" else {}
        return apply_gradients(TX[name], grads, state, params, weight=i + 1, **args)

    return jax.jit(step)


def train(name, params, state, micro_steps):
    for i in micro_steps:
        params, state = jitted(name)(params, state, i)
    return params, state


def orbax(state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        return checkpointer.restore(folder / "state", abstract)


def pickled(state, folder):
    (folder / "state").write_bytes(pickle.dumps(state))
    return pickle.loads((folder / "state").read_bytes())


def msgpack(state, folder):
    (folder / "state").write_bytes(flax.serialization.to_bytes(state))
    return flax.serialization.from_bytes(state, (folder / "state").read_bytes())


@pytest.mark.parametrize("through", [orbax, pickled, msgpack])
@pytest.mark.parametrize("name", TX)
def test_in_the_middle_of_a_window_a_state_comes_back_to_the_bit(
    name, through, tmp_path
):
    start = PARAMS, TX[name].init(PARAMS)
    middle = train(name, *start, range(5))
    restored = through(middle, tmp_path)
    assert_trees_equal(restored, middle)
    want = train(name, *middle, range(5, 9))
    assert_trees_equal(train(name, *restored, range(5, 9)), want)


def layouts(spec):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    parts = NamedSharding(mesh, spec)
    same = NamedSharding(mesh, PartitionSpec())
    return lambda tree: jax.tree.map(
        lambda x: parts if jnp.ndim(x) == 2 else same, tree
    )


@pytest.mark.parametrize(
    "other", [PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec()]
)
def test_a_sharded_state_may_be_restored_onto_another_sharding(other, tmp_path):
    start = PARAMS, TX["plain"].init(PARAMS)
    start = jax.device_put(start, layouts(PartitionSpec("data"))(start))
    middle = train("plain", *start, range(5))
    assert len(middle[1][0].acc_grads["w"].addressable_shards) == 2

    abstract = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        middle,
        layouts(other)(middle),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", middle)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert_trees_equal(restored, middle)
    assert restored[1][0].acc_grads["w"].sharding.spec == other
    want, got = (train("plain", *s, range(5, 9)) for s in (middle, restored))
    # On another layout the norm is summed up in another order.
    assert_trees_equal(got, want, rtol=1e-6)


def test_a_train_state_and_an_nnx_optimizer_come_back_from_orbax(tmp_path):
    state = optax_accum.flax.TrainState.create(
        apply_fn=None, params=PARAMS, tx=TX["plain"]
    )
    for _ in range(4):
        state = state.apply_gradients(grads=state.params)
    restored = orbax(state, tmp_path)
    assert_trees_equal(restored, state)
    for _ in range(2):
        state, restored = (s.apply_gradients(grads=s.params) for s in (state, restored))
    assert restored.gradient_step == 2
    assert_trees_equal(restored, state)

    def fresh():
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        optimizer = optax_accum.flax.Optimizer(model, TX["plain"], wrt=nnx.Param)
        return model, optimizer

    def train_on(model, optimizer, count):
        for i in range(count):
            x = jnp.ones(2) + i
            grads = nnx.grad(lambda model: jnp.sum(model(x) ** 2))(model)  # noqa: B023
            optimizer.update(model, grads)

    trained, other = fresh(), fresh()
    train_on(*trained, 4)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nnx", nnx.state(trained))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(tmp_path / "nnx", nnx.state(other)))
    for both in (trained, other):
        train_on(*both, 2)
    assert_trees_equal(
        *(nnx.to_pure_dict(nnx.state(both)) for both in (other, trained))
    )


def test_a_checkpoint_of_optax_finishes_its_window_here(tmp_path):
    optaxs = optax.MultiSteps(OPT, 3)
    grads = [jax.tree.map(lambda p, i=i: p * i + 1, PARAMS) for i in range(6)]
    params, state = PARAMS, optaxs.init(PARAMS)
    for i, g in enumerate(grads):
        updates, state = jax.jit(optaxs.update)(g, state, params)
        params = optax.apply_updates(params, updates)
        if i == 3:
            restored_params, restored = orbax((params, state), tmp_path)
    tx = TX["MultiSteps"]
    ours = from_multi_steps_state(restored, tx, restored_params)
    assert ours.mini_step == 1
    for g in grads[4:]:
        restored_params, ours = apply_gradients(tx, g, ours, restored_params)
    assert_trees_equal(restored_params, params, rtol=1e-6)


# A process that is killed.

MICRO_STEPS = 40
ROOT = Path(__file__).parents[1]


def start(folder, pace):
    folder.mkdir(exist_ok=True)
    script = [sys.executable, "-m", "tests.train_with_checkpoints"]
    return subprocess.Popen(
        [*script, str(folder), str(MICRO_STEPS), str(pace)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    with process:
        _, complaint = process.communicate(timeout=300)
    assert process.returncode == 0, complaint


def kill(process, after):
    """Kills it in the first open window after so many micro-steps."""
    with process:
        for line in process.stdout:
            micro_steps, in_window = map(int, line.split())
            if micro_steps >= after and in_window > 0:
                process.kill()
    assert process.returncode == -signal.SIGKILL


def test_a_killed_run_resumes_and_ends_to_the_bit_as_one_that_was_not(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    undisturbed = start(straight, pace=0.0)
    chance = random.Random(2)
    for first, last in ((5, 18), (20, 33)):
        kill(start(killed, pace=0.05), after=chance.randint(first, last))
        assert not (killed / "last.npz").exists()
    finish(start(killed, pace=0.0))
    finish(undisturbed)
    with np.load(straight / "last.npz") as want, np.load(killed / "last.npz") as got:
        assert [*got] == [*want]
        for name in want:
            np.testing.assert_array_equal(got[name], want[name])

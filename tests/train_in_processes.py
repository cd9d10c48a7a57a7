"""One of the processes of `test_processes.py`: PROCESS PROCESSES PORT FOLDER KILL.

Four devices in all train in each of the ways to reduce once a window, from the latest
checkpoint in the folder on. With KILL, the last process dies in the middle of a window,
right after the first checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_accum

DEVICES, MICRO_STEPS, SAVED = 4, 8, 5
NAN, RELEASE = 2, 6  # microbatches: with a NaN on one device; that closes its window

DATA = np.random.default_rng(0).normal(size=(MICRO_STEPS, 16, 3)).astype(np.float32)
DATA[NAN, -1] = np.nan  # on the last device, so in the last process
MASK = np.random.default_rng(1).random((MICRO_STEPS, 16)) < 0.6
ADAM = optax.adamw(0.05)
TX = optax_accum.chain(
    optax_accum.accumulate(3, skip=optax.skip_not_finite, reduce_axes="data"), ADAM
)


def loss_fn(params, x, mask):
    losses = jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"], axis=-1) ** 2
    return jnp.sum(losses * mask) / jnp.maximum(jnp.sum(mask), 1)


def accumulating(params, state, x, mask, release):
    partial = optax_accum.defer_reduction(params, "data")
    grads = jax.grad(loss_fn)(partial, x, mask)
    return optax_accum.apply_gradients(
        TX, grads, state, params, weight=jnp.sum(mask), release=release
    )


def in_shard_map(params):
    def step(params, state, x, mask, release):
        # Only one device knows that the window is to be closed.
        release &= jax.lax.axis_index("data") == DEVICES - 1
        return accumulating(params, state, x, mask, release)

    specs = optax_accum.state_specs(jax.eval_shape(TX.init, params), "data")
    init = jax.shard_map(TX.init, in_specs=P(), out_specs=specs)
    return init, jax.shard_map(
        step,
        in_specs=(P(), specs, P("data"), P("data"), P()),
        out_specs=(P(), specs),
    )


def at_once(params, state, x, mask, release):
    del release
    x = jnp.where(jnp.isnan(x), 0, x)
    grads = optax_accum.grad(
        loss_fn,
        batch_argnums=(1, 2),
        microbatch_size=8,
        weight=lambda params, x, mask: jnp.sum(mask),
        reduce_axes="data",
    )(params, x, mask)
    updates, state = ADAM.update(grads, state, params)
    return optax.apply_updates(params, updates), state


WAYS = {
    "shard_map": (AxisType.Explicit, in_shard_map),
    "explicit": (AxisType.Explicit, lambda _: (TX.init, accumulating)),
    "value_and_grad": (AxisType.Auto, lambda _: (ADAM.init, at_once)),
}


def train(way, folder, kill):
    kind, make = WAYS[way]
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(kind,))
    layout = jax.NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh), ocp.CheckpointManager(folder / way) as manager:
        params = {"w": np.linspace(-1, 1, 12).reshape(3, 4), "v": np.ones((4, 2))}
        params = jax.tree.map(np.float32, params)
        params = jax.device_put(params, jax.NamedSharding(mesh, P()))
        init, step = make(params)
        state = params, jax.jit(init)(params)
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        step = jax.jit(step, donate_argnums=(0, 1))
        for i in range(done, MICRO_STEPS):
            batch = [
                jax.make_array_from_callback(x.shape, layout, x.__getitem__)
                for x in (DATA[i], MASK[i])
            ]
            state = step(*state, *batch, i == RELEASE)
            if i + 1 == SAVED:
                if way != "value_and_grad":
                    assert optax_accum.metrics(state)["mini_step"] == 1
                manager.save(i + 1, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
                if kill:
                    return None
    params, state = state
    return jax.tree.map(np.asarray, params) | {"resumed": done}, state


def main(process, processes, port, folder, kill):
    jax.config.update("jax_num_cpu_devices", DEVICES // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"127.0.0.1:{port}", num_processes=processes, process_id=process
        )
    last = {}
    for way in WAYS:
        trained = train(way, folder, kill)
        if trained:
            params, state = trained
            last |= {f"{way}/{name}": x for name, x in params.items()}
            if way != "value_and_grad":
                metrics = optax_accum.metrics(state)
                last |= {f"{way}/{name}": np.asarray(x) for name, x in metrics.items()}
    if kill:
        if process == processes - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        multihost_utils.sync_global_devices("never")
    np.savez(folder / f"last-{process}.npz", **last)


if __name__ == "__main__":
    process, processes, port = map(int, sys.argv[1:4])
    main(process, processes, port, Path(sys.argv[4]), sys.argv[5] == "kill")

"""A training run that `test_checkpoints.py` kills: FOLDER MICRO_STEPS PACE.

It goes on from the latest checkpoint in the folder, says after each micro-step how many
it has done in all and in the open window, and leaves the last state in the folder. The
pace, in seconds a micro-step, is for the one who kills it to be in time.
"""

import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import optax_accum

EVERY, SAVE_EVERY = 4, 3  # so that most checkpoints are of open windows

tx = optax_accum.chain(
    optax_accum.accumulate(EVERY, skip=optax.skip_not_finite, average_args=("value",)),
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.linear_schedule(0.1, 0.01, 10)),
    optax.contrib.reduce_on_plateau(patience=2),
)


def loss_fn(params, key):
    x = jax.random.normal(key, (8, 3))
    return jnp.mean((jnp.tanh(x @ params["w"]) + params["b"] - x.sum(1)) ** 2)


@partial(jax.jit, donate_argnums=0)
def micro_step(state, i):
    params, opt_state = state
    key = jax.random.fold_in(jax.random.key(0), i)
    value, grads = jax.value_and_grad(loss_fn)(params, key)
    grads = jax.tree.map(lambda g: jnp.where(i % 7 == 5, jnp.nan, g), grads)
    return optax_accum.apply_gradients(
        tx, grads, opt_state, params, value=value, weight=1 + i % 3, release=i % 11 == 9
    )


def main(folder: Path, micro_steps: int, pace: float) -> None:
    params = {"w": jnp.ones(3), "b": jnp.zeros([])}
    state = params, tx.init(params)
    with ocp.CheckpointManager(folder / "checkpoints") as manager:
        done = manager.latest_step() or 0
        if done:
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        for i in range(done, micro_steps):
            state = micro_step(state, i)
            if (i + 1) % SAVE_EVERY == 0:
                manager.save(i + 1, args=ocp.args.StandardSave(state))
            print(i + 1, optax.tree.get(state, "mini_step"), flush=True)
            time.sleep(pace)
    np.savez(folder / "last.npz", *jax.tree.leaves(state))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

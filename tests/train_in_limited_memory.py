"""Fits a microbatch, limits this process's memory, and trains: WAY.

The limit is of the address space, set to what is mapped already, what the fit was given
and some for the runtime. Then a microbatch is tried that needs more.
"""

import resource
import sys

import jax
import jax.numpy as jnp
import optax

import optax_accum

BATCH, WIDTH = 8192, 128
LIMIT, RUNTIME = 90_000_000, 60_000_000
OPT = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, x):
    y = x
    for kernel in params:
        y = jnp.tanh(y @ kernel)
    return jnp.mean((y - x) ** 2)


def whole_window(microbatch_size):
    fun = optax_accum.value_and_grad(loss_fn, microbatch_size=microbatch_size)

    def step(params, state, x):
        _, grads = fun(params, x)
        updates, state = OPT.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1))


def one_microbatch(microbatch_size):
    tx = optax_accum.chain(optax_accum.accumulate(8), OPT)

    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        return optax_accum.apply_gradients(tx, grads, state, params)

    return jax.jit(step, donate_argnums=(0, 1))


def address_space():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def main(way):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [(WIDTH, 16 * WIDTH), (16 * WIDTH, 16 * WIDTH), (16 * WIDTH, WIDTH)]
    params = [
        0.01 * jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=False)
    ]
    x = jax.random.normal(keys[3], (BATCH, WIDTH))
    if way == "value_and_grad":
        build, state, batch = whole_window, OPT.init(params), x
    else:
        tx = optax_accum.chain(optax_accum.accumulate(8), OPT)
        build, state = one_microbatch, tx.init(params)

        def batch(size):
            return jax.ShapeDtypeStruct((size, WIDTH), x.dtype)

    sizes = [2**i for i in range(14)]
    fit = optax_accum.fit_microbatch(
        build,
        *(params, state, batch),
        batch_size=BATCH,
        memory_limit=LIMIT,
        candidates=sizes,
    )
    args = params, state, batch(BATCH) if callable(batch) else batch
    too_large = build(BATCH).lower(*args).compile()
    assert too_large.memory_analysis().temp_size_in_bytes > LIMIT + RUNTIME

    microbatch = x if way == "value_and_grad" else x[: fit.microbatch_size]
    jax.block_until_ready((params, state, microbatch))
    limit = address_space() + LIMIT + RUNTIME
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for _ in range(2):
        params, state = jax.block_until_ready(fit.step(params, state, microbatch))
    print("trained")
    try:
        jax.block_until_ready(too_large(params, state, x))
    except jax.errors.JaxRuntimeError as error:
        out_of_memory = "RESOURCE_EXHAUSTED" in str(error)
        print("ran out of memory" if out_of_memory else error)


if __name__ == "__main__":
    main(sys.argv[1])

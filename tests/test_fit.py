"""The microbatch that fits, against what the compiler and the kernel say."""

import functools
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_accum

BATCH, WIDTH = 24, 64
PARAMS = {
    "in": jax.ShapeDtypeStruct((WIDTH, 16 * WIDTH), jnp.float32),
    "out": jax.ShapeDtypeStruct((16 * WIDTH, WIDTH), jnp.float32),
}
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
OPT = optax.sgd(0.1, momentum=0.9)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - x) ** 2)


def whole_window(microbatch_size):
    """The batch in hand, in microbatches inside the step."""
    fun = optax_accum.value_and_grad(loss_fn, microbatch_size=microbatch_size)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, x):
        _, grads = fun(params, x)
        updates, state = OPT.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def one_microbatch(microbatch_size, batch_size=BATCH):
    """A microbatch a call; not jitted, so nothing is donated."""
    tx = optax_accum.chain(optax_accum.accumulate(batch_size // microbatch_size), OPT)

    def step(params, state, x):
        grads = jax.grad(loss_fn)(params, x)
        return optax_accum.apply_gradients(tx, grads, state, params)

    return step


def microbatch(size):
    return jax.ShapeDtypeStruct((size, WIDTH), jnp.float32)


WAYS = {
    "value_and_grad": (whole_window, (PARAMS, jax.eval_shape(OPT.init, PARAMS), X)),
    "apply_gradients": (
        one_microbatch,
        (
            PARAMS,
            jax.eval_shape(
                optax_accum.chain(optax_accum.accumulate(2), OPT).init, PARAMS
            ),
            microbatch,
        ),
    ),
}
SIZES = [1, 2, 4, 8, 12]


@functools.cache
def needed(way, size):
    build, args = WAYS[way]
    here = [x(size) if x is microbatch else x for x in args]
    step = build(size)
    step = step if way == "value_and_grad" else jax.jit(step)
    memory = step.lower(*here).compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


@pytest.mark.parametrize(
    ("way", "best"), [("value_and_grad", 4), ("apply_gradients", 1)]
)
def test_the_choice_is_that_of_an_exhaustive_search(way, best):
    build, args = WAYS[way]
    limit = needed(way, best) + 10
    exhaustive = max(size for size in SIZES if needed(way, size) <= limit)
    assert exhaustive == best
    heard = []
    fit = optax_accum.fit_microbatch(
        build,
        *args,
        batch_size=BATCH,
        memory_limit=limit,
        headroom=0.0,
        candidates=SIZES,
        progress=heard.append,
    )
    assert fit.microbatch_size == best
    assert fit.num_microbatches == BATCH // best
    assert (fit.bytes_needed, fit.bytes_limit) == (needed(way, best), limit)
    assert sorted(heard, key=lambda c: c.microbatch_size) == [*fit.candidates]
    assert len(fit.candidates) <= 3  # of 5
    for c in fit.candidates:
        assert c.bytes_needed == needed(way, c.microbatch_size)
        assert c.fits == (c.bytes_needed <= limit)


def test_sizes_that_leave_no_rest_come_before_those_that_do():
    def build(size):  # what is left over takes room of its own
        room = 1000 * size + (5000 if BATCH % size and size < BATCH // 2 else 0)

        def step(x):
            return jnp.sort(jnp.sin(x[0, 0] * jnp.arange(float(room))))[:2]

        return step

    needs = {}
    for size in (7, 8):
        fit = optax_accum.fit_microbatch(
            build, X, batch_size=BATCH, candidates=[size], memory_limit=10**9
        )
        needs[size] = fit.bytes_needed
    assert needs[8] < needs[7]
    fit = optax_accum.fit_microbatch(
        build, X, batch_size=BATCH, memory_limit=needs[8], headroom=0.0
    )
    assert fit.microbatch_size == 8


def test_the_whole_batch_is_taken_where_it_needs_less_than_parts_of_it():
    # Without a loop there are no sums beside the gradients.
    def deep_loss(params, x):
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    def build(microbatch_size):
        return optax_accum.grad(deep_loss, microbatch_size=microbatch_size)

    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
    x = jax.ShapeDtypeStruct((16, 256), jnp.float32)
    fit = functools.partial(
        optax_accum.fit_microbatch, build, params, x, batch_size=16, headroom=0.0
    )
    part, whole = (
        fit(candidates=[n], memory_limit=10**10).bytes_needed for n in (8, 16)
    )
    assert whole < part
    assert fit(memory_limit=whole + 1).microbatch_size == 16


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["plain", "filter"])
def test_a_step_of_an_equinox_model(jit):
    model = eqx.nn.MLP(3, 1, 8, 2, key=jax.random.key(0))

    def build(microbatch_size):
        return jit(
            optax_accum.grad(
                lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2),
                microbatch_size=microbatch_size,
            )
        )

    x = jnp.ones((8, 3))
    fit = optax_accum.fit_microbatch(build, model, x, batch_size=8, memory_limit=10**9)
    assert fit.microbatch_size == 8
    grads = fit.step(model, x)
    want = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(x) ** 2))(model)
    np.testing.assert_allclose(grads.layers[0].weight, want.layers[0].weight, rtol=1e-5)


def test_the_compiled_step_comes_with_it_and_trains():
    build, _ = WAYS["value_and_grad"]
    params = jax.tree.map(lambda p: jnp.full(p.shape, 0.1), PARAMS)
    args = params, OPT.init(params), jnp.ones((BATCH, WIDTH))
    fit = optax_accum.fit_microbatch(
        build, *args, batch_size=BATCH, memory_limit=10**9, multiple_of=5
    )
    assert (fit.microbatch_size, fit.num_microbatches) == (20, 2)
    want, _ = build(20)(*jax.tree.map(jnp.copy, args))
    got, _ = fit.step(*args)
    np.testing.assert_array_equal(got["in"], want["in"])


def test_the_compiled_step_refuses_another_constant():
    def step(x, mode):
        return 2 * x if mode == "double" else x

    fit = optax_accum.fit_microbatch(
        lambda size: step, jnp.ones(4), "double", batch_size=4, memory_limit=10**9
    )
    np.testing.assert_array_equal(fit.step(jnp.ones(4), "double"), 2 * jnp.ones(4))
    with pytest.raises(ValueError, match=r"compiled with 'double'.*got 'single'"):
        fit.step(jnp.ones(4), "single")


def test_the_headroom_is_left_free():
    build, args = WAYS["value_and_grad"]
    options = {"batch_size": BATCH, "candidates": SIZES}
    limit = needed("value_and_grad", 4) + 10
    all_of_it, some = (
        optax_accum.fit_microbatch(
            build, *args, memory_limit=limit, headroom=headroom, **options
        )
        for headroom in (0.0, 0.02)
    )
    assert all_of_it.microbatch_size == 4
    assert some.microbatch_size < 4
    assert some.bytes_needed <= 0.98 * limit


def test_it_prints_as_a_table():
    build, args = WAYS["value_and_grad"]
    limit = needed("value_and_grad", 4) + 10
    fit = optax_accum.fit_microbatch(
        build,
        *args,
        batch_size=BATCH,
        memory_limit=limit,
        headroom=0.0,
        candidates=SIZES,
    )
    heading, *rows = str(fit).splitlines()
    assert "bytes needed" in heading
    assert len(rows) == len(fit.candidates)
    (chosen,) = (row for row in rows if row.endswith("fits <-"))
    assert chosen.split()[0] == "4"
    assert any(row.endswith("too large") for row in rows)


def test_a_sharded_program_is_judged_by_what_one_device_needs():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharded, same = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ())
    )
    build, (params, state, _) = WAYS["value_and_grad"]

    def laid_out(tree, sharding):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    def fit(x):
        return optax_accum.fit_microbatch(
            build,
            *laid_out((params, state), same),
            x,
            batch_size=4096,
            memory_limit=10**9,
            candidates=[4096],
        ).bytes_needed

    x = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)  # by far the most
    assert fit(laid_out(x, sharded)) < 0.7 * fit(laid_out(x, same))


def test_nothing_fits():
    build, args = WAYS["value_and_grad"]
    with pytest.raises(MemoryError, match=r"No microbatch fits.* needs .*MB.*1\.0 MB"):
        optax_accum.fit_microbatch(
            build, *args, batch_size=BATCH, memory_limit=10**6, multiple_of=2
        )


def test_nothing_fits_since_the_size_is_not_used():
    build, args = WAYS["value_and_grad"]
    with pytest.raises(MemoryError, match=r"all need the same: does build use"):
        optax_accum.fit_microbatch(
            lambda size: build(2), *args, batch_size=BATCH, memory_limit=10**6
        )


class WithoutAnalysis:
    """A jitted function on a backend that does not tell, and has room for so many."""

    def __init__(self, size, room, ran):
        self.size, self.room, self.ran = size, room, ran

    def lower(self, *args):
        return self

    def compile(self):
        return self

    def memory_analysis(self):
        return None

    def __call__(self, *args):
        self.ran.append(self.size)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(args))
        if self.size > self.room:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return args


def test_where_the_compiler_does_not_tell_the_candidates_are_run():
    ran = []
    fit = optax_accum.fit_microbatch(
        lambda size: WithoutAnalysis(size, 5, ran), X, batch_size=BATCH
    )
    assert fit.microbatch_size == 5
    assert fit.bytes_needed is None
    assert len(ran) == len(fit.candidates) <= 11  # of 24
    assert "unknown" in str(fit)
    with pytest.raises(MemoryError, match="more than there is"):
        optax_accum.fit_microbatch(
            lambda size: WithoutAnalysis(size, 0, ran), X, batch_size=BATCH
        )


def test_another_error_is_not_taken_for_a_want_of_memory():
    def build(size):
        def step(x):
            raise jax.errors.JaxRuntimeError("INTERNAL: something else")

        return step

    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        optax_accum.fit_microbatch(build, X, batch_size=4, memory_limit=10**9)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, ValueError, "give memory_limit"),
        ({"batch_size": 0}, ValueError, "batch_size must be .* got 0"),
        ({"memory_limit": 1.5}, TypeError, "memory_limit must be .* got 1.5"),
        ({"headroom": 1.0}, ValueError, r"headroom must be .* got 1\.0"),
        ({"headroom": "0.1"}, TypeError, r"headroom must be .* got '0\.1'"),
        ({"multiple_of": 100}, ValueError, "no size up to .*multiple_of=100"),
        ({"candidates": [2.0]}, TypeError, "candidates must be"),
        ({"candidates": [100]}, ValueError, r"no size of candidates=\[100\] up to"),
        ({"candidates": 16}, TypeError, "candidates must be several sizes, got 16"),
        ({"build": lambda size: size}, TypeError, "build returns must be .* got 24"),
        ({"build": 3}, TypeError, "build must be a function"),
    ],
)
def test_wrong_arguments_are_named(options, error, words):
    build = options.pop("build", WAYS["value_and_grad"][0])
    options = {"batch_size": BATCH, **options}
    if jax.default_backend() != "cpu" and "give" in words:
        pytest.skip("the devices tell their memory")
    with pytest.raises(error, match=words):
        optax_accum.fit_microbatch(build, *WAYS["value_and_grad"][1], **options)


@pytest.mark.parametrize("way", ["value_and_grad", "apply_gradients"])
def test_under_a_limit_of_the_kernel_it_trains_and_a_larger_one_does_not(way):
    if sys.platform != "linux":
        pytest.skip("needs limits of the address space that hold")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train_in_limited_memory", way],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.splitlines() == ["trained", "ran out of memory"], done.stderr


# Eight devices.

DEVICES, LARGE = 8, 8192


def on_eight_devices(way):
    """`build` and its arguments, with the examples spread over the devices."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    whole, spread = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",))
    )

    def put(tree, layout=whole):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), tree
        )

    def examples(size):
        return put(microbatch(size), spread)

    params = put(PARAMS)
    if way == "value_and_grad":
        args = params, put(jax.eval_shape(OPT.init, PARAMS)), examples(LARGE)
        return whole_window, args
    # The length of the window is no part of the state's types.
    tx = optax_accum.chain(optax_accum.accumulate(2), OPT)
    args = params, put(jax.eval_shape(tx.init, PARAMS)), examples

    def build(size):
        step = one_microbatch(size, batch_size=LARGE)
        return jax.jit(step, donate_argnums=(0, 1))

    return build, args


def needed_on_each_device(way, size):
    build, args = on_eight_devices(way)
    here = [x(size) if callable(x) else x for x in args]
    memory = build(size).lower(*here).compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


@pytest.mark.parametrize("way", WAYS)
def test_on_eight_devices_the_choice_is_by_what_each_of_them_needs(way):
    build, args = on_eight_devices(way)
    sizes = [512, 1024, 2048]  # in windows of four and more
    needed = {size: needed_on_each_device(way, size) for size in sizes}
    limit = needed[1024] + 10
    assert needed[512] < needed[1024] < needed[2048]
    fit = optax_accum.fit_microbatch(
        build,
        *args,
        batch_size=LARGE,
        memory_limit=limit,
        headroom=0.0,
        multiple_of=DEVICES,
        candidates=[*sizes, 1500, 2047],  # no multiples of the number of devices
    )
    assert fit.microbatch_size == max(n for n in sizes if needed[n] <= limit)
    assert fit.bytes_needed == needed[fit.microbatch_size]
    assert all(c.microbatch_size % DEVICES == 0 for c in fit.candidates)
    assert all(c.bytes_needed == needed[c.microbatch_size] for c in fit.candidates)


@pytest.mark.parametrize("way", WAYS)
def test_on_eight_devices_examples_cost_an_eighth_of_what_they_do_on_one(way):
    build, args = on_eight_devices(way)

    def on_one(size):
        here = [x(size) if callable(x) else x for x in args]
        here = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), here)
        fit = optax_accum.fit_microbatch(
            build, *here, batch_size=LARGE, memory_limit=10**12, candidates=[size]
        )
        return fit.bytes_needed

    def more(needed):
        return needed(2048) - needed(1024)

    several = more(lambda size: needed_on_each_device(way, size))
    assert 0 < several <= more(on_one) / DEVICES * 1.1


@pytest.mark.parametrize("way", WAYS)
def test_on_eight_devices_the_compiled_step_trains(way):
    build, args = on_eight_devices(way)
    fit = optax_accum.fit_microbatch(
        build, *args, batch_size=LARGE, memory_limit=10**9, candidates=[2048]
    )
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        name: 0.1 * jax.random.normal(key, x.shape)
        for key, (name, x) in zip(keys, PARAMS.items(), strict=False)
    }
    x = jax.random.normal(keys[2], (LARGE, WIDTH))
    want = optax.apply_updates(
        params, OPT.update(jax.grad(loss_fn)(params, x), OPT.init(params))[0]
    )
    tx = OPT
    if way != "value_and_grad":
        tx = optax_accum.chain(optax_accum.accumulate(LARGE // 2048), OPT)
    parts = [x] if way == "value_and_grad" else x.reshape(-1, 2048, WIDTH)
    layouts = [jax.tree.map(lambda x: x.sharding, a) for a in args[:2]]
    state = jax.device_put(tx.init(params), layouts[1])
    got = jax.device_put(jax.tree.map(jnp.copy, params), layouts[0])
    for part in parts:
        spread = jax.device_put(
            part, NamedSharding(layouts[0]["in"].mesh, PartitionSpec("data"))
        )
        got, state = fit.step(got, state, spread)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-6)

"""Accumulators spread over a mesh: a part on each device, and the same numbers."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import FORMS, assert_trees_equal
from hlo import collectives
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optax_accum import accumulate, chain, defer_reduction, state_specs

N = 8
PARAMS = {
    "w": jax.random.normal(jax.random.key(0), (3, 64)),  # its second dimension divides
    "v": jax.random.normal(jax.random.key(1), (64, 2)),
    "odd": jnp.ones((2, 3)),  # none does
}
BYTES = {name: x.nbytes for name, x in PARAMS.items()}
SPREAD = BYTES["w"] + BYTES["v"]
DATA = jax.random.normal(jax.random.key(2), (4, 2 * N, 3))
ADAM = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.05))
SCALARS = 16
close = functools.partial(assert_trees_equal, rtol=2e-5, atol=2e-6)


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] @ params["odd"]) ** 2)


def large_batches(**options):
    tx, params = chain(accumulate(2, **options), ADAM), PARAMS
    state = tx.init(params)
    for x in DATA:
        updates, state = tx.update(jax.grad(loss_fn)(params, x), state, params)
        params = optax.apply_updates(params, updates)
    return params


def mesh_of(kind):
    return jax.make_mesh((N,), ("data",), axis_types=(kind,))


class Run:
    def __init__(self, kind, tx, form="apply_gradients", defer=False, layout=None):
        self.mesh = mesh_of(kind)

        def step(params, state, x):
            at = defer_reduction(params, "data") if defer else params
            if kind == AxisType.Explicit and layout:
                at = jax.tree.map(lambda p: jax.sharding.reshard(p, P()), params)
            grads = jax.grad(loss_fn)(at, x)
            if kind == AxisType.Explicit and layout:
                grads = jax.tree.map(jax.sharding.reshard, grads, layout)
            return FORMS[form](tx, grads, state, params)

        self.step = jax.jit(step, donate_argnums=(0, 1))
        with jax.set_mesh(self.mesh):
            self.params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), layout or P())
            self.state = tx.init(self.params)
            self.data = jax.device_put(DATA, P(None, "data"))
            lowered = self.step.lower(self.params, self.state, self.data[0])
        self.collectives = [
            c for c in collectives(lowered.compile().as_text()) if c.bytes > SCALARS
        ]

    def train(self):
        with jax.set_mesh(self.mesh):
            for i in range(len(DATA)):
                data = self.data[i]  # iterating would lay it out anew
                self.params, self.state = self.step(self.params, self.state, data)
        return self.params


def spread(x):
    """Over how many devices an array is."""
    return x.size // x.addressable_shards[0].data.size


WAYS = {
    "automatic": (AxisType.Auto, {}, False),
    "explicit": (AxisType.Explicit, {}, False),
    "partial gradients": (AxisType.Explicit, {}, True),
    "reduced at the release": (AxisType.Explicit, {"reduce_axes": "data"}, True),
}


@pytest.mark.parametrize(
    ("way", "form"),
    [*((way, "apply_gradients") for way in WAYS), ("automatic", "update")],
)
def test_each_device_holds_a_part_and_the_parameters_are_the_same(way, form):
    kind, options, defer = WAYS[way]
    tx = chain(accumulate(2, sharding="data", **options), ADAM)
    run = Run(kind, tx, form, defer)
    for name, parts in (("w", N), ("v", N), ("odd", 1)):
        rows = N if options else parts  # those of its own, a row for each device
        assert spread(run.state[0].acc_grads[name]) == rows
        assert spread(run.state[1][1][0].mu[name]) == parts
    params = run.train()
    close(jax.device_get(params), jax.device_get(large_batches()))
    assert all(spread(x) == 1 for x in jax.tree.leaves(params))
    assert spread(run.state[1][1][0].mu["w"]) == N


@pytest.mark.parametrize("form", FORMS)
def test_each_microbatch_costs_a_reduce_scatter(form):
    tx = chain(accumulate(2, sharding="data"), ADAM)
    found = Run(AxisType.Explicit, tx, form, defer=True).collectives
    between = [c for c in found if not c.at_release]
    scattered = [c for c in between if c.name == "reduce-scatter"]
    assert sum(c.bytes for c in scattered) * N == SPREAD
    # What cannot be divided is reduced whole.
    assert [c.bytes for c in between if c.name != "reduce-scatter"] == [BYTES["odd"]]
    gathered = [c for c in found if c.at_release]
    assert {c.name for c in gathered} == {"all-gather"}  # the updates
    assert sum(c.bytes for c in gathered) == SPREAD


def test_with_reduce_axes_the_release_is_the_reduce_scatter():
    tx = chain(accumulate(2, sharding="data", reduce_axes="data"), ADAM)
    found = Run(AxisType.Explicit, tx, "update", defer=True).collectives
    assert all(c.at_release for c in found)
    scattered = [c for c in found if c.name == "reduce-scatter"]
    assert sum(c.bytes for c in scattered) * N == SPREAD


def test_on_an_automatic_mesh_nothing_is_gathered_between_releases():
    # That XLA for CPU has an all-reduce here, and makes the slice of it after, is for
    # want of the pass that other backends have.
    tx = chain(accumulate(2, sharding="data"), ADAM)
    run = Run(AxisType.Auto, tx)
    between = [c for c in run.collectives if not c.at_release]
    assert {c.name for c in between} <= {"all-reduce", "reduce-scatter"}
    run.train()
    assert run.step._cache_size() == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("form", FORMS)
def test_by_default_it_follows_parameters_that_are_spread_themselves(kind, form):
    layout = {"w": P(None, "data"), "v": P("data"), "odd": P()}
    run = Run(kind, chain(accumulate(2), ADAM), form, layout=layout)
    assert spread(run.state[0].acc_grads["w"]) == N
    params = run.train()
    assert spread(run.state[0].acc_grads["w"]) == spread(params["w"]) == N
    close(jax.device_get(params), jax.device_get(large_batches()))


@pytest.mark.parametrize(
    "sharding",
    [
        {"w": P(None, "data"), "v": P("data"), "odd": P()},
        ("data",),
        {"w": P(None, "data"), "v": "named", "odd": P()},
    ],
    ids=str,
)
def test_a_layout_is_axes_or_a_prefix_of_specs(sharding):
    kind = AxisType.Explicit
    mesh = jax.make_mesh((N,), ("data",), axis_types=(kind,))
    if isinstance(sharding, dict) and sharding["v"] == "named":
        sharding = sharding | {"v": NamedSharding(mesh, P("data"))}
    run = Run(kind, chain(accumulate(2, sharding=sharding), ADAM))
    assert spread(run.state[0].acc_grads["v"]) == N
    close(jax.device_get(run.train()), jax.device_get(large_batches()))


def test_one_spec_is_for_all():
    tx = accumulate(2, sharding=P("data"))
    with jax.set_mesh(jax.make_mesh((N,), ("data",))):
        state = tx.init({"a": jnp.ones(N), "b": (jnp.ones((N, 2)), None)})
    assert [spread(x) for x in jax.tree.leaves(state.acc_grads)] == [N, N]


def test_weights_skips_and_noise_are_as_ever():
    options = {"skip": optax.skip_not_finite, "track_noise": True}
    run = Run(AxisType.Auto, chain(accumulate(2, sharding="data", **options), ADAM))
    close(jax.device_get(run.train()), jax.device_get(large_batches(**options)))


def test_a_bare_accumulation_hands_on_whole_means():
    run = Run(
        AxisType.Explicit,
        optax.chain(accumulate(2, sharding="data"), optax.sgd(0.1)),
        "update",
        defer=True,
    )
    params = run.train()
    want, tx = PARAMS, chain(accumulate(2), optax.sgd(0.1))
    state = tx.init(want)
    for x in DATA:
        updates, state = tx.update(jax.grad(loss_fn)(want, x), state, want)
        want = optax.apply_updates(want, updates)
    close(jax.device_get(params), jax.device_get(want))


def test_update_needs_no_parameters():
    specs = {"w": P(None, "data"), "v": P("data"), "odd": P()}
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        tx = chain(accumulate(1, sharding=specs), optax.sgd(1.0))
        updates, _ = jax.jit(tx.update)(PARAMS, tx.init(PARAMS))
    close(jax.device_get(updates), jax.tree.map(lambda p: -p, jax.device_get(PARAMS)))


@pytest.mark.parametrize("sharding", [3, {"w": 3}, (), ("data", 1), jax])
def test_a_layout_of_another_type_is_refused(sharding):
    with pytest.raises(TypeError, match="sharding must be the name of a mesh axis"):
        accumulate(2, sharding=sharding)


def test_layouts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"sharding has 'data'.*there is none"):
        accumulate(2, sharding="data").init(PARAMS)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with pytest.raises(ValueError, match="prefix of the parameters"):
            accumulate(2, sharding={"w": P("data")}).init(PARAMS)

        def local(params):
            return accumulate(2, sharding="data").init(params).mini_step

        with pytest.raises(ValueError, match=r"manual in this shard_map.*psum_scatter"):
            jax.shard_map(local, in_specs=P(), out_specs=P())(PARAMS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_state_keeps_its_layout_or_a_step_would_be_compiled_twice(kind):
    params = {"w": jnp.ones((N, 4)), "none": jnp.zeros((0, N)), "odd": jnp.ones(3)}
    tx = chain(accumulate(2, sharding="data"), optax.sgd(0.1, momentum=0.9))

    def layouts(state):
        return [x.sharding.spec for x in jax.tree.leaves(state) if x.ndim]

    with jax.set_mesh(mesh_of(kind)):
        params = jax.device_put(params, P())
        state = tx.init(params)
        step = jax.jit(lambda p, s: FORMS["apply_gradients"](tx, p, s, p))
        _, after = step(params, state)
    assert layouts(after) == layouts(state)


def test_names_do_not_overrule_a_layout_that_steps_cannot_see():
    tx = accumulate(2, sharding="data")
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        params = jax.device_put(jnp.ones((N, N)), P(None, "data"))
        with pytest.raises(
            ValueError, match=r"sharding='data'.*PartitionSpec for each"
        ):
            tx.init(params)
        tx.init(jax.device_put(params, P("data")))  # as it would be anyway
        state = accumulate(2, sharding=P(None, "data")).init(params)
        assert state.acc_grads.sharding.spec == P(None, "data")


def test_a_mesh_with_axes_of_both_kinds_is_refused():
    kinds = (AxisType.Auto, AxisType.Explicit)
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)):
        params = jax.device_put(jnp.ones((N, N)), P())
        with pytest.raises(ValueError, match="all explicit, or all automatic"):
            accumulate(2, sharding="data").init(params)


def test_partial_gradients_that_nobody_reduces_are_refused():
    with pytest.raises(ValueError, match=r"partial over \['data'\].*reduce_axes"):
        Run(AxisType.Explicit, chain(accumulate(2), ADAM), defer=True)


def test_in_a_shard_map_it_is_one_or_the_other():
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        tx = accumulate(2, sharding="data", reduce_axes="data")
        state = tx.init(jnp.ones(N))

        def local(state):
            grads = jax.lax.pcast(jnp.ones(N), "data", to="varying")
            return tx.update(grads, state)[0]

        with pytest.raises(ValueError, match="no sharding beside reduce_axes"):
            jax.shard_map(local, in_specs=(state_specs(state, "data"),), out_specs=P())(
                state
            )

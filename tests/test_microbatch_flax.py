"""Microbatches through Flax modules: NNX passed as they are, Linen by their state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from helpers import assert_trees_equal

import optax_accum

X = jax.random.normal(jax.random.key(0), (6, 3))
Y = jnp.sum(X, axis=-1, keepdims=True)
close = functools.partial(assert_trees_equal, rtol=2e-4, atol=1e-5)


def mse(prediction, y):
    return jnp.mean((prediction - y) ** 2)


def nnx_loss(model, x, y):
    return mse(model(x), y)


class Normalised(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.linear = nnx.Linear(3, 1, rngs=rngs)

    def __call__(self, x):
        return self.linear(self.dropout(self.norm(x)))


def test_an_nnx_model_gets_the_gradients_of_nnx():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    ours = optax_accum.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=2)
    want_value, want_grads = nnx.value_and_grad(nnx_loss)(model, X, Y)
    for transform in (lambda f: f, nnx.jit, jax.jit):
        value, grads = transform(ours)(model, X, Y)
        np.testing.assert_allclose(value, want_value, rtol=1e-5)
        close(nnx.to_pure_dict(grads), nnx.to_pure_dict(want_grads))


def test_the_state_of_an_nnx_model_is_carried_and_updated():
    ours = optax_accum.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=2)
    for transform in (lambda f: f, nnx.jit):
        model, by_hand = Normalised(nnx.Rngs(0)), Normalised(nnx.Rngs(0))
        value, grads = transform(ours)(model, X, Y)
        values = []
        for i in range(3):
            x, y = X[i::3], Y[i::3]
            v, g = nnx.value_and_grad(nnx_loss)(by_hand, x, y)
            values.append((v, nnx.to_pure_dict(g)))
        want_value, want = jax.tree.map(lambda *xs: sum(xs) / 3, *values)
        np.testing.assert_allclose(value, want_value, rtol=1e-5)
        close(nnx.to_pure_dict(grads), want)
        stats = nnx.state(model, nnx.BatchStat), nnx.state(by_hand, nnx.BatchStat)
        close(*map(nnx.to_pure_dict, stats))
        counts = nnx.state(model, nnx.RngCount), nnx.state(by_hand, nnx.RngCount)
        assert_trees_equal(*map(nnx.to_pure_dict, counts))


def test_it_trains_with_the_optimizer_of_nnx():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    fun = optax_accum.value_and_grad(nnx_loss, batch_argnums=(1, 2), num_microbatches=3)

    @nnx.jit
    def train_step(model, optimizer):
        value, grads = fun(model, X, Y)
        optimizer.update(model, grads)
        return value

    values = [train_step(model, optimizer) for _ in range(20)]
    assert values[-1] < 0.2 * values[0]


def test_modules_may_be_anywhere_in_the_arguments():
    class Head(nnx.Module):
        def __init__(self, body):
            self.body = body  # shared with the other argument
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.linear(self.body(x))

    def loss_fn(models, scale, metrics, rngs, teacher, x, y):
        noise = 1e-3 * rngs.noise.normal(x.shape)
        value = scale * mse(models["head"](models["body"](x + noise)), y)
        metrics.update(values=value)
        return value + mse(teacher(x), y)

    def arguments():
        body = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
        models = {"body": body, "head": Head(body)}
        teacher = Normalised(nnx.Rngs(2))
        return models, 2.0, nnx.metrics.Average(), nnx.Rngs(noise=3), teacher

    ours = optax_accum.value_and_grad(
        loss_fn, argnums=(0, 1), batch_argnums=(5, 6), microbatch_size=2
    )
    by_hand = nnx.value_and_grad(loss_fn, argnums=(0, 1))
    args, want_args = arguments(), arguments()
    got = nnx.jit(ours)(*args, X, Y)
    parts = [by_hand(*want_args, X[i::3], Y[i::3]) for i in range(3)]
    close(got, jax.tree.map(lambda *xs: sum(xs) / 3, *parts))
    close(*(nnx.to_pure_dict(nnx.state(a[:1] + a[2:])) for a in (args, want_args)))


def test_a_module_may_be_passed_by_keyword():
    def loss_fn(w, x, *, norm):
        return jnp.mean(norm(x) @ w)

    norm, by_hand = (nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    ours = optax_accum.value_and_grad(loss_fn, microbatch_size=2)
    nnx.jit(ours)(jnp.ones(3), X, norm=norm)
    for i in range(3):
        by_hand(X[i::3])
    close(*(nnx.to_pure_dict(nnx.state(n)) for n in (norm, by_hand)))


def test_variables_that_two_modules_share_are_one():
    tied = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))

    def loss_fn(first, second, x, y):
        return mse(second(first(x)), y)

    ours = optax_accum.value_and_grad(
        loss_fn, argnums=(0, 1), batch_argnums=(2, 3), num_microbatches=1
    )
    other = nnx.clone(tied)
    got = ours(tied, tied, X, Y)
    close(got, nnx.value_and_grad(loss_fn, argnums=(0, 1))(other, other, X, Y))
    close(*(nnx.to_pure_dict(nnx.state(n)) for n in (tied, other)))


@pytest.mark.parametrize("argnums", [0, 1])
def test_a_parameter_of_two_arguments_is_differentiated_in_both_or_neither(argnums):
    tied, batch = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), {"batch_argnums": (2, 3)}

    def loss_fn(first, second, x, y):
        return mse(second(first(x))[:, :1], y)

    ours = optax_accum.grad(loss_fn, argnums=argnums, microbatch_size=2, **batch)
    with pytest.raises(ValueError, match=r"at \w+ is in two of the arguments.*clone"):
        ours(tied, tied, X, Y)
    grads = ours(tied, nnx.clone(tied), X, Y)
    want = nnx.grad(loss_fn, argnums=argnums)(tied, nnx.clone(tied), X, Y)
    close(nnx.to_pure_dict(grads), nnx.to_pure_dict(want))


def test_a_diff_state_chooses_what_is_differentiated():
    only_bias = nnx.DiffState(0, nnx.PathContains("bias"))
    ours = optax_accum.value_and_grad(
        nnx_loss, argnums=only_bias, batch_argnums=(1, 2), microbatch_size=2
    )
    model = Normalised(nnx.Rngs(0))
    model.eval()
    value, grads = jax.jit(ours)(model, X, Y)
    want = nnx.value_and_grad(nnx_loss, argnums=only_bias)(model, X, Y)
    close((value, nnx.to_pure_dict(grads)), (want[0], nnx.to_pure_dict(want[1])))
    assert "kernel" not in grads["linear"]


def test_a_module_that_becomes_another_one_is_refused():
    class Sowing(nnx.Linear):
        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return super().__call__(x)

    class Setting(nnx.Linear):
        def __call__(self, x):
            self.calls = 1
            return super().__call__(x)

    ours = optax_accum.value_and_grad(nnx_loss, batch_argnums=(1, 2), microbatch_size=2)
    with pytest.raises(TypeError, match=r"new variables at \[.*seen"):
        ours(Sowing(3, 1, rngs=nnx.Rngs(0)), X, Y)
    with pytest.raises(TypeError, match="more than its variables"):
        ours(Setting(3, 1, rngs=nnx.Rngs(0)), X, Y)


def test_transforms_of_nnx_may_be_inside():
    class Remat(nnx.Linear):
        @nnx.remat
        def __call__(self, x):
            return super().__call__(x)

    model = Remat(3, 1, rngs=nnx.Rngs(0))
    ours = optax_accum.value_and_grad(
        nnx.jit(nnx_loss), batch_argnums=(1, 2), microbatch_size=2
    )
    got, want = ours(model, X, Y), nnx.value_and_grad(nnx_loss)(model, X, Y)
    close((got[0], nnx.to_pure_dict(got[1])), (want[0], nnx.to_pure_dict(want[1])))


def test_the_batch_statistics_of_linen_are_carried():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.BatchNorm(use_running_average=False, momentum=0.5)(x)
            return linen.Dense(1)(x)

    model = Model()
    variables = model.init(jax.random.key(0), X)

    def loss_fn(params, batch_stats, x, y):
        variables = {"params": params, "batch_stats": batch_stats}
        out, new = model.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), (new["batch_stats"], {"out": out})

    ours = optax_accum.value_and_grad(
        loss_fn,
        has_aux=True,
        batch_argnums=(2, 3),
        carry_argnums=1,
        microbatch_size=2,
        aux="stack",
    )
    stats = variables["batch_stats"]
    (value, (got, aux)), grads = jax.jit(ours)(variables["params"], stats, X, Y)
    parts = []
    for i in range(3):
        part = jax.value_and_grad(loss_fn, has_aux=True)
        part = part(variables["params"], stats, X[i::3], Y[i::3])
        stats = part[0][1][0]
        parts.append(part)
    close(got, stats)
    mean = jax.tree.map(lambda *xs: sum(xs) / 3, *[(p[0][0], p[1]) for p in parts])
    close((value, grads), mean)
    for i in range(3):
        close(aux["out"][i::3], parts[i][0][1][1]["out"])

"""What several test files share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_accum


class RecorderState(NamedTuple):
    calls: jax.Array
    value: jax.Array
    updates: Any


def recorder() -> optax.GradientTransformationExtraArgs:
    """Remembers what it saw downstream, and how often; passes it on."""

    def init_fn(params):
        return RecorderState(
            calls=jnp.zeros([], jnp.int32),
            value=jnp.zeros([], float),
            updates=optax.tree.zeros_like(params),
        )

    def update_fn(updates, state, params=None, *, value=0.0, **extra_args):
        del params, extra_args
        value = jnp.asarray(value, float)
        return updates, RecorderState(state.calls + 1, value, updates)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def plain_step(tx, grads, state, params, **extra_args):
    """`update` and `optax.apply_updates`, as in any Optax loop."""
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


FORMS = {"update": plain_step, "apply_gradients": optax_accum.apply_gradients}


def assert_trees_equal(got, want, **kwargs):
    """Same structure, shapes and dtypes, and the same bits (or within `kwargs`)."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    got_leaves = jax.tree.leaves_with_path(got)
    for (path, x), y in zip(got_leaves, jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert jnp.result_type(x) == jnp.result_type(y), name
        assert jnp.shape(x) == jnp.shape(y), name
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        if kwargs:
            np.testing.assert_allclose(x, y, err_msg=name, **kwargs)
        else:
            np.testing.assert_array_equal(x, y, err_msg=name)


def types(tree):
    """Shapes, dtypes and structure of a tree, to compare."""
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)

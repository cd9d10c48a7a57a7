"""Leaves of the trees that come in as gradients, parameters and states."""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

Tree = TypeVar("Tree")


def differentiable(tree: Any) -> Callable[[Any], bool]:
    """Which leaves of an argument to differentiate.

    All that JAX computes with; in one with Equinox modules in it, where numbers and
    flags are settings, what `eqx.filter_grad` differentiates.
    """
    equinox: Any = sys.modules.get("equinox")
    if equinox is not None:
        leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, equinox.Module))
        if any(isinstance(x, equinox.Module) for x in leaves):
            return equinox.is_inexact_array
    return is_array


def is_none(x: Any) -> bool:
    """For `is_leaf`: `None` in a tree of gradients marks a frozen parameter."""
    return x is None


def is_array(x: Any) -> bool:
    """Whether JAX computes with this leaf; not with functions, strings and float0."""
    if isinstance(x, bool | int | float | complex):
        return True
    return hasattr(x, "shape") and hasattr(x, "dtype") and x.dtype != jax.dtypes.float0


def put(leaves: Sequence[Any], slots: Sequence[int], items: Iterable[Any]) -> list[Any]:
    """The leaves with these items at these places."""
    filled = list(leaves)
    for i, x in zip(slots, items, strict=True):
        filled[i] = x
    return filled


def shorten(structure: Any, most: int = 400) -> str:
    """A tree's structure for an error; that of a large model is longer than a page."""
    text = str(structure)
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def where_else_zero(pred: jax.Array | bool, tree: Tree) -> Tree:
    """The tree where `pred`, else zeros; what is not an array stays."""
    if pred is True:
        return tree
    return jax.tree.map(
        lambda x: jnp.where(pred, x, jnp.zeros_like(x)) if is_array(x) else x, tree
    )


def like(new: Tree, old: Tree, what: str, *, exact: bool = False) -> Tree:
    """`new` in the structure, the shapes and the dtypes of `old`.

    Where `new` has `None`, or `old` has what is no array, `old` stays.

    Args:
      new: the tree to fit.
      old: the tree to fit it to.
      what: names the tree in an error.
      exact: whether an array of another dtype, or `None` for an array, is an error.

    Raises:
      TypeError: the structures differ, or an array cannot take the other's place.
    """
    old_leaves, treedef = jax.tree.flatten(old, is_leaf=is_none)
    new_leaves, new_treedef = jax.tree.flatten_with_path(new, is_leaf=is_none)
    if new_treedef != treedef:
        raise TypeError(
            f"{what} must have the structure of what it replaces."
            f"\n  it has:      {shorten(new_treedef)}"
            f"\n  it replaces: {shorten(treedef)}"
        )
    return treedef.unflatten(
        _like_leaf(path, x, y, what, exact)
        for (path, x), y in zip(new_leaves, old_leaves, strict=True)
    )


def _like_leaf(path: Any, new: Any, old: Any, what: str, exact: bool) -> Any:
    if not is_array(old) or (new is None and not exact):
        return old
    if not is_array(new):
        new_type = type(new).__name__
    else:
        new, old_type, new_type = jnp.asarray(new), jax.typeof(old), jax.typeof(new)
        if new.shape == old_type.shape:
            if new.dtype == old_type.dtype:
                return new
            if not exact and _rank(new.dtype) <= _rank(old_type.dtype):
                return new.astype(old_type.dtype)
    raise TypeError(
        f"{what} must have the shapes and dtypes of what it replaces, but"
        f" {jax.tree_util.keystr(path) or 'it'} is {new_type} for {jax.typeof(old)}."
    )


def _rank(dtype: Any) -> int:
    """The kind of a dtype; in a lower one a number loses more than digits."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next((i for i, k in enumerate(kinds) if jnp.issubdtype(dtype, k)), -1)

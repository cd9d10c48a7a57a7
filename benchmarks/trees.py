"""The trees of parameters: their number of arrays is what a compiler minds."""

import math
from collections.abc import Callable

import jax

Shapes = dict[str, tuple[int, ...]]


def large(megabytes: float) -> Shapes:
    """Four square matrices."""
    side = _multiple_of_8(math.sqrt(megabytes * 1e6 / 4 / 4))
    return {f"matrix_{i}": (side, side) for i in range(4)}


def transformer(megabytes: float) -> Shapes:
    """Twelve layers of a transformer with biases: 197 arrays."""
    # A layer has 12 width^2 parameters, the two embeddings have 16 width^2 together.
    width = _multiple_of_8(math.sqrt(megabytes * 1e6 / 4 / (12 * 12 + 16)))
    vocabulary, length = 8 * width, 512
    layer = {
        **{f"{name}_kernel": (width, width) for name in ("q", "k", "v", "out")},
        **{f"{name}_bias": (width,) for name in ("q", "k", "v", "out")},
        "up_kernel": (width, 4 * width),
        "up_bias": (4 * width,),
        "down_kernel": (4 * width, width),
        "down_bias": (width,),
        **{f"norm_{i}_{name}": (width,) for i in (1, 2) for name in ("scale", "bias")},
    }
    return {
        "embedding": (vocabulary, width),
        "position": (length, width),
        **{f"layer_{i}_{k}": shape for i in range(12) for k, shape in layer.items()},
        "norm_scale": (width,),
        "norm_bias": (width,),
        "head_kernel": (width, vocabulary),
    }


def tiny(megabytes: float) -> Shapes:
    """Three dense layers of a few kilobytes, where the call is what costs."""
    del megabytes
    kernels = {f"kernel_{i}": (16, 16) for i in range(3)}
    return {**kernels, **{f"bias_{i}": (16,) for i in range(3)}}


TREES: dict[str, Callable[[float], Shapes]] = {
    "large": large,
    "transformer": transformer,
    "tiny": tiny,
}


def draw(shapes: Shapes, seed: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: 0.02 * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _multiple_of_8(x: float) -> int:
    return max(8, 8 * round(x / 8))

"""The largest microbatch that fits in memory, found without running out of it."""

import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from optax_accum import _arguments as arguments
from optax_accum._tree import is_array, put


@dataclass(frozen=True)
class Candidate:
    """A microbatch size that was tried.

    Attributes:
      microbatch_size: in examples.
      bytes_needed: what the compiled step needs on each device; `None` if the backend
        does not say, or could not compile it for want of memory.
      fits: whether there is room for that.
    """

    microbatch_size: int
    bytes_needed: int | None
    fits: bool


@dataclass(frozen=True)
class Fit:
    """What `fit_microbatch` found. Printed, it is a table.

    Attributes:
      microbatch_size: the largest that fits, in examples.
      num_microbatches: how many of them, the last perhaps smaller, make a batch.
      bytes_needed: what a step with it needs on each device; `None` if the backend
        does not say.
      bytes_limit: what each device has, the headroom included; `None` if unknown.
      candidates: all sizes that were tried, in the order of size.
      step: the step for this size, compiled for these arguments.
    """

    microbatch_size: int
    num_microbatches: int
    bytes_needed: int | None
    bytes_limit: int | None
    candidates: tuple[Candidate, ...]
    step: Callable[..., Any]

    def __str__(self) -> str:
        limit = "" if self.bytes_limit is None else f" of {_mb(self.bytes_limit)}"
        lines = [f"microbatch size  bytes needed{limit}"]
        for c in self.candidates:
            chosen = " <-" if c.microbatch_size == self.microbatch_size else ""
            needed = "unknown" if c.bytes_needed is None else _mb(c.bytes_needed)
            verdict = "fits" if c.fits else "too large"
            lines.append(f"{c.microbatch_size:15}  {needed:>12}  {verdict}{chosen}")
        return "\n".join(lines)


def fit_microbatch(
    build: Callable[[int], Callable[..., Any]],
    *args: Any,
    batch_size: int,
    memory_limit: int | None = None,
    headroom: float = 0.1,
    multiple_of: int = 1,
    candidates: Iterable[int] | None = None,
    progress: Callable[[Candidate], object] | None = None,
) -> Fit:
    r"""Finds the largest microbatch with which a training step fits in memory.

    XLA knows what a compiled program needs: arguments, outputs and temporaries, less
    the outputs in donated arguments. So the step is compiled for some sizes, by
    bisection, and nothing is run or allocated. The whole batch at once comes first,
    then sizes that make two of it, those that divide it, and all others, since a step
    with one or two microbatches is another program than one with a loop and may need
    less, and so may one without a rest. Within each of the four it is taken for granted
    that a larger microbatch needs more. Of :math:`n` candidates a little more than
    :math:`2 \log_2 n` are tried, 29 of 8192 at most.

    What the compiler does not tell is what ``headroom`` is for: other arrays that are
    alive, those that the step closes over included, fragmentation, other processes on
    the device.

    Where a backend does not tell what a program needs, the candidates are run, on
    zeros for a ``ShapeDtypeStruct``, until one runs out of memory.

    Args:
      build: makes the training step for a microbatch size, jitted or not. Donate in it
        what the real step donates.
      *args: the step's arguments, arrays or :class:`jax.ShapeDtypeStruct`, laid out
        over devices as they will be. A Python function among them gives the argument
        for a microbatch size: the microbatch, where it is an argument. What else is no
        array is constant.
      batch_size: examples to the whole batch; no microbatch is larger.
      memory_limit: bytes on each device. By default what the devices say they have,
        the least of them.
      headroom: the part of the limit to leave free, from 0 up to 1.
      multiple_of: try only multiples of this, for example the number of devices that
        the batch is sharded over.
      candidates: or try only these sizes.
      progress: called with each candidate that has been tried.

    Returns:
      A ``Fit``: the size, what it needs, and the compiled step, which takes arguments
      of these shapes, dtypes and layouts.

    Raises:
      TypeError: an argument is of a wrong type, or what ``build`` returns.
      ValueError: an argument has a wrong value, or the platform does not tell how much
        memory there is and ``memory_limit`` is not given.
      MemoryError: no candidate fits.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax_accum
      >>> def loss_fn(w, x):
      ...     return jnp.mean(jnp.tanh(x @ w) ** 2)
      >>> def build(microbatch_size):
      ...     return optax_accum.grad(loss_fn, microbatch_size=microbatch_size)
      >>> w = jax.ShapeDtypeStruct((64, 512), jnp.float32)
      >>> x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
      >>> fit = optax_accum.fit_microbatch(
      ...     build, w, x, batch_size=32, memory_limit=10_000_000
      ... )
      >>> print(fit.microbatch_size, fit.num_microbatches)
      32 1
    """
    arguments.check_function("build", build)
    batch_size = arguments.check_count("batch_size", batch_size)
    multiple_of = arguments.check_count("multiple_of", multiple_of)
    arguments.check_decay("headroom", headroom)
    if candidates is None:
        sizes = list(range(multiple_of, batch_size + 1, multiple_of))
    else:
        if not isinstance(candidates, Iterable):
            raise TypeError(f"candidates must be several sizes, got {candidates!r}.")
        sizes = {arguments.check_count("candidates", size) for size in candidates}
        sizes = sorted(x for x in sizes if x <= batch_size and x % multiple_of == 0)
    if not sizes:
        among = "" if candidates is None else f" of candidates={candidates!r}"
        raise ValueError(
            f"There is no size{among} up to batch_size={batch_size} that is a multiple"
            f" of multiple_of={multiple_of}."
        )
    if memory_limit is not None:
        memory_limit = arguments.check_count("memory_limit", memory_limit)
    limit = memory_limit or _limit_of_devices(args)
    room = None if limit is None else int(limit * (1 - headroom))

    tried: list[Candidate] = []
    chosen, chosen_step = None, None
    for group in _alike(sizes, batch_size):
        if chosen is not None:
            group = [n for n in group if n > chosen.microbatch_size]
        low, high = 0, len(group)  # all below `low` fit, none from `high` on does
        while low < high:
            middle = (low + high) // 2
            size = group[middle]
            here = [x(size) if isinstance(x, types.FunctionType) else x for x in args]
            step = build(size)
            arguments.check_function("What build returns", step)
            step, needed, fits = _try(step, here, room)
            candidate = Candidate(size, needed, fits)
            tried.append(candidate)
            if fits:
                chosen, chosen_step, low = candidate, step, middle + 1
            else:
                high = middle
            if progress is not None:
                progress(candidate)
    tried.sort(key=lambda c: c.microbatch_size)
    if chosen is None or chosen_step is None:
        raise MemoryError(_nothing_fits(tried, limit, headroom))
    return Fit(
        microbatch_size=chosen.microbatch_size,
        num_microbatches=-(-batch_size // chosen.microbatch_size),
        bytes_needed=chosen.bytes_needed,
        bytes_limit=limit,
        candidates=tuple(tried),
        step=chosen_step,
    )


def _alike(sizes: list[int], batch_size: int) -> list[list[int]]:
    """The sizes by what a step makes of the batch.

    That is one microbatch, two, or a loop over equal ones, with or without a rest.
    """
    whole = [n for n in sizes if n == batch_size]
    two = [n for n in sizes if batch_size < 2 * n < 2 * batch_size]
    loop = [n for n in sizes if 2 * n <= batch_size]
    equal = [n for n in loop if batch_size % n == 0]
    return [whole, two, equal, [n for n in loop if batch_size % n]]


def _try(
    step: Any, args: list[Any], room: int | None
) -> tuple[Callable[..., Any] | None, int | None, bool]:
    """The compiled step, the bytes that it needs, and whether it fits."""
    try:
        compiled, call = _compile(step, args)
        needed = _bytes_needed(compiled)
        if needed is None:
            _run(call, args)
            return call, None, True
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None, None, False
    if room is None:
        raise ValueError(
            "The platform does not tell how much memory its devices have; give"
            " memory_limit, in bytes on each device."
        )
    return call, needed, needed <= room


def _compile(step: Any, args: list[Any]) -> tuple[Any, Callable[..., Any]]:
    """The compiled step, and what calls it with arguments like these."""
    if hasattr(step, "lower"):
        compiled = step.lower(*args).compile()
        # That of `eqx.filter_jit` has JAX's in it.
        return getattr(compiled, "compiled", compiled), compiled

    leaves, treedef = jax.tree.flatten(args)
    slots = [i for i, x in enumerate(leaves) if is_array(x)]
    constant = {i: x for i, x in enumerate(leaves) if not is_array(x)}

    def of_arrays(arrays):
        return step(*treedef.unflatten(put(leaves, slots, arrays)))

    compiled = jax.jit(of_arrays).lower([leaves[i] for i in slots]).compile()

    def call(*args):
        leaves = treedef.flatten_up_to(list(args))
        for i, x in constant.items():
            if leaves[i] is not x and leaves[i] != x:
                raise ValueError(
                    f"The step was compiled with {x!r} as a constant, got"
                    f" {leaves[i]!r} in its place."
                )
        return compiled([leaves[i] for i in slots])

    return compiled, call


def _bytes_needed(compiled: Any) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    # What goes out into a donated buffer is counted on both sides.
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return kept - memory.alias_size_in_bytes + memory.temp_size_in_bytes


def _run(compiled: Any, args: list[Any]) -> None:
    """Runs it once; what it takes is free again afterwards."""

    def zeros(x):
        if isinstance(x, jax.ShapeDtypeStruct):
            return jnp.zeros(x.shape, x.dtype, device=x.sharding)
        return jnp.copy(x) if is_array(x) else x  # it may be donated

    jax.block_until_ready(compiled(*jax.tree.map(zeros, args)))


def _limit_of_devices(args: tuple[Any, ...]) -> int | None:
    """The least memory of the devices that the arguments are on, of this process."""
    devices = set()
    for x in jax.tree.leaves(args):
        sharding = getattr(x, "sharding", None)
        if isinstance(sharding, jax.sharding.Sharding):
            devices |= sharding.addressable_devices
    stats = [d.memory_stats() or {} for d in devices or jax.local_devices()[:1]]
    limits = [s["bytes_limit"] for s in stats if "bytes_limit" in s]
    return min(limits) if limits and len(limits) == len(stats) else None


def _nothing_fits(tried: list[Candidate], limit: int | None, headroom: float) -> str:
    known = [c.bytes_needed for c in tried if c.bytes_needed is not None]
    needs = f"{_mb(min(known))} on each device" if known else "more than there is"
    has = "" if limit is None else f" There are {_mb(limit)}, {headroom:.0%} headroom."
    if len(known) > 1 and len(set(known)) == 1:
        advice = (
            "They all need the same: does build use its microbatch size, and is a"
            " microbatch that is an argument given as a function of it?"
        )
    else:
        advice = (
            "What can help: donated arguments, jax.checkpoint in the model, parameters"
            " and optimizer state in bfloat16 or sharded over devices."
        )
    return (
        f"No microbatch fits, of {[c.microbatch_size for c in tried]} that were tried:"
        f" the step needs at least {needs}.{has} {advice}"
    )


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"

"""What an accumulation hands to the code that finishes a micro-step."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import jax
import optax

MicroStep = Callable[..., "Window"]


class Window(NamedTuple):
    """The open window after one more microbatch, before anything runs downstream.

    Attributes:
      released: does this micro-step hand a reduced gradient on? A boolean scalar, or
        a Python `bool` where tracing can tell.
      mean: the accumulator. It holds the reduced gradient where `released`, the sum
        so far elsewhere.
      tail_state: the state of everything downstream.
      extra_args: what downstream transforms are to see of the extra arguments.
      downstream: `(mean, tail_state, params) -> (updates, tail_state)`.
      close: `(accumulator, tail_state) -> opt_state` at the end of the micro-step.
      back: `updates -> updates`, out of the layout of the accumulator; `None` if that
        is the layout of the parameters.
    """

    released: jax.Array | bool
    mean: optax.Updates
    tail_state: optax.OptState
    extra_args: Mapping[str, Any]
    downstream: Callable[..., tuple[optax.Updates, optax.OptState]]
    close: Callable[[optax.Updates, optax.OptState], optax.OptState]
    back: Callable[[optax.Updates], optax.Updates] | None = None


class Accumulation(optax.GradientTransformationExtraArgs):
    """A gradient transformation whose accumulation `chain` can see.

    To Optax it is the pair `(init, update)`. `micro_step` takes the arguments of
    `update` and stops where a release would run what is downstream, so that whoever
    also holds the parameters can finish the step for less than `update` can. `spread`
    lays parameters out like the accumulator, for what is downstream.
    """

    micro_step: MicroStep
    spread: Callable[[Any], Any]

    def __new__(
        cls,
        init: optax.TransformInitFn,
        update: optax.TransformUpdateExtraArgsFn,
        micro_step: MicroStep,
        spread: Callable[[Any], Any],
    ) -> Self:
        self = super().__new__(cls, init, update)
        self.micro_step = micro_step
        self.spread = spread
        return self

    def __init_subclass__(cls) -> None:
        _register(cls)

    def _replace(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **kwargs: Any
    ) -> optax.GradientTransformationExtraArgs:
        """With another `init` or `update` it is no longer this accumulation."""
        return optax.GradientTransformationExtraArgs(*self)._replace(**kwargs)

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), tuple(self), vars(self))


def _register(cls: type) -> None:
    """Makes it a pytree that comes back whole; a named tuple's has only two parts."""
    jax.tree_util.register_pytree_node(
        cls,
        lambda self: (tuple(self), tuple(vars(self).items())),
        lambda attributes, pair: _rebuild(cls, tuple(pair), dict(attributes)),
    )


def _rebuild(cls: type, pair: tuple, attributes: dict[str, Any]) -> Any:
    """Lets `copy` and pickles of closures work, whatever `__new__` takes."""
    self = tuple.__new__(cls, pair)
    vars(self).update(attributes)
    return self


_register(Accumulation)

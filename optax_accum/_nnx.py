"""Flax NNX modules among the arguments of a function that is to be differentiated."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax


class Modules:
    """Takes modules apart into what is differentiated and what is only carried.

    Without Flax loaded there can be none, and nothing is imported to find out.

    Attributes:
      args: the arguments, in place of each module its `nnx.Param`, a pytree of arrays.
      state: for each module all else that it holds.
    """

    def __init__(self, args: Sequence[Any], argnums: Sequence[int]):
        self._nnx: Any = sys.modules.get("flax.nnx")
        self.args, self.state = list(args), []
        self._modules, self._graphs = {}, {}
        for i in argnums:
            if self._nnx is not None and isinstance(args[i], self._nnx.Module):
                split = self._nnx.split(args[i], self._nnx.Param, ...)
                self._graphs[i], self.args[i], state = split
                self._modules[i] = args[i]
                self.state.append(state)

    def merge(
        self, args: Sequence[Any], state: Sequence[Any]
    ) -> tuple[list[Any], Callable[[], list[Any]]]:
        """The arguments with modules in them, and what tells their state later on."""
        args, modules = list(args), []
        for (i, graph), rest in zip(self._graphs.items(), state, strict=True):
            # NNX forbids to change a variable from within a trace that it is older
            # than; a map makes new ones.
            rest = jax.tree.map(lambda x: x, rest)
            args[i] = self._nnx.merge(graph, args[i], rest)
            modules.append(args[i])

        def current_state():
            return [self._nnx.split(m, self._nnx.Param, ...)[2] for m in modules]

        return args, current_state

    def update(self, state: Sequence[Any]) -> None:
        """Writes the state into the modules that came in."""
        for module, rest in zip(self._modules.values(), state, strict=True):
            self._nnx.update(module, rest)

"""Flax NNX modules among the arguments of a function that is to be differentiated."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax


def pure(tree: Any) -> Any:
    """The arrays in place of the variables of NNX."""
    nnx: Any = sys.modules.get("flax.nnx")
    return tree if nnx is None else nnx.as_pure(tree)


class Modules:
    """Takes modules apart into what is differentiated and what is only carried.

    A module here is anything of NNX that holds variables: models, metrics, random
    streams. Without Flax loaded there can be none, and nothing is imported to find out.

    Attributes:
      inputs: the arguments, in place of each module the state of it that is to be
        differentiated, a pytree of arrays.
      state: all else that the modules hold.
    """

    def __init__(self, inputs: Mapping[Any, Any], trained: Mapping[Any, Any]):
        """Takes arguments by any names, and of those to differentiate the filters.

        A filter says which variables to differentiate; `None` stands for `nnx.Param`.
        """
        self._nnx: Any = sys.modules.get("flax.nnx")
        self.inputs, self.state = dict(inputs), ()
        self._trees, self._modules, self._filters = {}, [], []
        if self._nnx is None:
            return
        for name, tree in inputs.items():
            leaves, treedef = jax.tree.flatten(tree, is_leaf=self._is_module)
            slots = [i for i, x in enumerate(leaves) if self._is_module(x)]
            if slots:
                chosen = trained.get(name, False)
                chosen = self._nnx.Param if chosen is None else chosen
                chosen = self._nnx.filterlib.to_predicate(chosen)
                self._trees[name] = treedef, slots
                self._modules += [leaves[i] for i in slots]
                self._filters += [chosen] * len(slots)
        if self._modules:
            self._check_sharing()
            self._graph, states, self.state = self._split(self._modules)
            self.inputs |= self._fill(inputs, [*map(states.get, self._each())])

    def merge(
        self, inputs: Mapping[Any, Any], state: Any
    ) -> tuple[dict[Any, Any], Callable[[], Any]]:
        """The arguments with modules in them, and what tells their state later on."""
        if not self._modules:
            return dict(inputs), lambda: ()
        states = []
        for name, (treedef, slots) in self._trees.items():
            leaves = treedef.flatten_up_to(inputs[name])
            states += [leaves[i] for i in slots]
        states = self._nnx.State(dict(zip(self._each(), states, strict=True)))
        # NNX forbids to change a variable from within a trace that it is older than;
        # a map makes new ones.
        states, state = jax.tree.map(lambda x: x, (states, state))
        known = {path for path, _ in jax.tree.leaves_with_path(state)}
        modules = self._nnx.merge(self._graph, states, state)

        def current_state():
            graph, _, now = self._split(modules)
            if graph != self._graph:
                raise TypeError(_changed(known, now))
            return now

        return dict(inputs) | self._fill(inputs, modules), current_state

    def update(self, state: Any) -> None:
        """Writes the state into the modules that came in."""
        if self._modules:
            self._nnx.update(self._modules, state)

    def _is_module(self, x: Any) -> bool:
        return isinstance(x, self._nnx.Pytree)

    def _each(self) -> range:
        return range(len(self._modules))

    def _split(self, modules: list[Any]) -> tuple[Any, Any, Any]:
        """All at once, for a variable that two of them share to be one."""

        def differentiated(path, variable):
            return self._filters[path[0]](path[1:], variable)

        graph, states, rest = self._nnx.split(modules, differentiated, ...)
        none = self._nnx.State({})
        return graph, {i: states.get(i, none) for i in self._each()}, rest

    def _check_sharing(self) -> None:
        """That a variable is differentiated wherever it is, or nowhere.

        Raises:
          ValueError: two modules share one that is differentiated in one of them.
        """
        found: dict[int, bool] = {}
        for chosen, module in zip(self._filters, self._modules, strict=True):
            for path, x in self._nnx.iter_graph(module):
                if not isinstance(x, self._nnx.Variable):
                    continue
                trained = chosen(path, x)
                if found.setdefault(id(x), trained) != trained:
                    raise ValueError(
                        f"The variable at {'.'.join(map(str, path))} is in two of the"
                        " arguments and differentiated in only one. Give argnums both,"
                        " or one of them a copy, by nnx.clone."
                    )

    def _fill(self, inputs: Mapping[Any, Any], new: list[Any]) -> dict[Any, Any]:
        """The arguments that have modules in them, with these in their places."""
        filled, news = {}, iter(new)
        for name, (treedef, slots) in self._trees.items():
            leaves = treedef.flatten_up_to(inputs[name])
            for i in slots:
                leaves[i] = next(news)
            filled[name] = treedef.unflatten(leaves)
        return filled


def _changed(known: set[Any], now: Any) -> str:
    new = [path for path, _ in jax.tree.leaves_with_path(now) if path not in known]
    what = "changed in more than its variables"
    if new:
        what = f"got new variables at {[jax.tree_util.keystr(p[1:]) for p in new]}"
    return (
        f"A module {what} while fun ran. Its state is carried from microbatch to"
        " microbatch, so it must be there before: call the model once beforehand, or"
        " return what is new as an auxiliary output."
    )

"""Finds the arguments of a call by their numbers."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# An argument as it was passed: the digits of its position, or the name of a keyword.
# All are of one type, for JAX sorts the keys of a dict.
Argument = str


def find_arguments(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    numbers: Mapping[str, tuple[int, ...]],
) -> list[tuple[Argument, ...]]:
    """Which arguments of a call each role has.

    The call itself stays as it is: a decorated function may do anything with what it
    gets by name. Numbers below 0 count back from the last positional argument, as they
    do for `jax.grad`.

    Args:
      fun: the function, for the names of its parameters.
      args: what it is given by position.
      kwargs: what it is given by name.
      numbers: for each role the numbers of its arguments.

    Raises:
      ValueError: there is no such argument, it has two roles, or its name is a number.
    """
    if numeric := [name for name in kwargs if name.isdigit()]:
        raise ValueError(f"No argument can have a number for a name, got {numeric}.")
    roles: dict[Argument, str] = {}
    found = []
    for role, argnums in numbers.items():
        arguments = []
        for i in argnums:
            argument = _find(fun, args, kwargs, role, i)
            if argument in roles:
                where = f"argument {argument}"
                twice = f"{role} has {where} twice"
                both = f"{role} and {roles[argument]} both have {where}"
                raise ValueError(
                    f"{twice if roles[argument] == role else both}; it can have one"
                    " role only."
                )
            roles[argument] = role
            arguments.append(argument)
        found.append(tuple(arguments))
    return found


def _find(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    role: str,
    i: int,
) -> Argument:
    if -len(args) <= i < len(args):
        return str(i % len(args))
    names = _positional(fun)
    if 0 <= i < len(names) and names[i] in kwargs:
        return names[i]
    raise ValueError(
        f"{role} has {i}, but fun got {len(args)} positional arguments, counted from 0,"
        f" and {sorted(kwargs) or 'none'} by name. An argument that fun takes by name"
        " only has no number; it is the same for all microbatches."
    )


def _positional(fun: Callable[..., Any]) -> list[str]:
    """The names of the parameters that may be given by position, as far as known."""
    for follow_wrapped in (False, True):
        try:
            signature = inspect.signature(fun, follow_wrapped=follow_wrapped)
        except (TypeError, ValueError):  # it is not written in Python
            continue
        kinds = inspect.Parameter
        names = [
            p.name
            for p in signature.parameters.values()
            if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        if names:  # else it hands all on to what it wraps
            return names
    return []

"""Reads in the text of a compiled program what runs between releases."""

import math
import re
from typing import NamedTuple

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
FALSE_BRANCH = re.compile(r"false_computation=%?([\w.\-]+)")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
COLLECTIVE = re.compile(
    r"= (.*?) ((?:all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?)\("
)
COPY = re.compile(r"= \w+\[([\d,]*)\]\S* copy\(")


def computations(text):
    """The lines of each computation by its name, and the name of the entry."""
    found, entry, name = {}, None, None
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
            found[name] = []
            entry = name if match[1] else entry
        elif line.startswith("}"):
            name = None
        elif name is not None:
            found[name].append(line)
    return found, entry


def lines_between_releases(text):
    """All instructions that a micro-step runs if every conditional says no."""
    found, entry = computations(text)
    todo, done, lines = [entry], set(), []
    while todo:
        name = todo.pop()
        if name in done:
            continue
        done.add(name)
        for line in found[name]:
            lines.append(line)
            todo += CALLED.findall(line)
            todo += FALSE_BRANCH.findall(line)
            if match := BRANCHES.search(line):
                todo.append(match[1].split(",")[0].strip().lstrip("%"))
    return lines


def copies(lines, at_least):
    """The copies of arrays with at least so many elements."""
    found = []
    for line in lines:
        if match := COPY.search(line):
            size = math.prod(int(n) for n in match[1].split(",") if n)
            found += [line.strip()] if size >= at_least else []
    return found


class Collective(NamedTuple):
    """An instruction that sends.

    Attributes:
      name: such as `all-reduce`.
      bytes: of its result on one device.
      at_release: whether it is only run if a conditional says yes.
      in_loop: whether it is in a computation that a loop calls.
    """

    name: str
    bytes: int
    at_release: bool
    in_loop: bool


def collectives(text):
    """All instructions of a compiled program that send between devices."""
    found, _ = computations(text)
    between = set(lines_between_releases(text))
    looped = _called(found, re.compile(r"(?:body|condition)=%?([\w.\-]+)"))
    return [
        Collective(
            match[2],
            sum(_bytes(*array) for array in ARRAY.findall(match[1])),
            at_release=line not in between,
            in_loop=name in looped,
        )
        for name, lines in found.items()
        for line in lines
        if (match := COLLECTIVE.search(line))
    ]


def _called(found, roots):
    """What is called, by whatever it is called, from the computations named so."""
    todo = [
        name for lines in found.values() for x in lines for name in roots.findall(x)
    ]
    done = set()
    while todo:
        name = todo.pop()
        if name in found and name not in done:
            done.add(name)
            text = "\n".join(found[name])
            todo += [other for other in found if re.search(rf"%?{other}\b", text)]
    return done


def _bytes(dtype, shape):
    size = 1 if dtype == "pred" else int(re.search(r"\d+", dtype)[0]) // 8
    return size * math.prod(int(n) for n in shape.split(",") if n)

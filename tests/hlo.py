"""Reads in the text of a compiled program what runs between releases."""

import math
import re

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
FALSE_BRANCH = re.compile(r"false_computation=%?([\w.\-]+)")
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

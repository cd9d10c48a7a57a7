"""Counts in a compiled program what it sends between devices."""

import math
import re
from collections import Counter
from typing import NamedTuple

COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
SENDS = re.compile(
    r"= (.*?) (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)"
    r"(?:-start)?\("
)
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\[([\d,]*)\]")
LOOP = re.compile(r" while\(.*body=%?([\w.\-]+)")
TRIPS = re.compile(r'known_trip_count"?[:=]\{"n":"(\d+)"')
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRUE_FALSE = re.compile(
    r"true_computation=%?([\w.\-]+), false_computation=%?([\w.\-]+)"
)
CALL = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")


class Sent(NamedTuple):
    """What one device puts into collectives.

    Attributes:
      counts: how many there are, by their names.
      bytes: of all their results together.
    """

    counts: Counter[str]
    bytes: int

    def __add__(self, other: "Sent") -> "Sent":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Sent(self.counts + other.counts, self.bytes + other.bytes)

    def times(self, n: int) -> "Sent":
        scaled = Counter({name: n * k for name, k in self.counts.items()})
        return Sent(scaled, n * self.bytes)


NOTHING = Sent(Counter(), 0)


def sent(text: str, *, release: bool, least_bytes: int = 0) -> Sent:
    """What a run of the program sends.

    Args:
      text: of the optimized HLO.
      release: do the conditionals say yes?
      least_bytes: leave out what is smaller, such as the mean of a loss.
    """
    computations: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if match := COMPUTATION.match(line):
            name = match[2]
            computations[name] = []
            entry = name if match[1] else entry
        elif name:
            computations[name].append(line)

    def of(name: str) -> Sent:
        total = NOTHING
        for line in computations.get(name, []):
            if match := SENDS.search(line):
                size = sum(_bytes(*array) for array in ARRAY.findall(match[1]))
                if size >= least_bytes:
                    total += Sent(Counter([match[2]]), size)
            elif match := LOOP.search(line):
                trips = TRIPS.search(line)
                if trips is None:
                    raise ValueError(f"How often does it run? {line.strip()[:200]}")
                total += of(match[1]).times(int(trips[1]))
            elif match := BRANCHES.search(line):
                total += of(match[1].split(",")[release].strip().lstrip("%"))
            elif match := TRUE_FALSE.search(line):
                total += of(match[1 if release else 2])
            elif match := CALL.search(line):
                total += of(match[1])
        return total

    return of(entry)


def _bytes(dtype: str, shape: str) -> int:
    bits = re.search(r"\d+", dtype)
    size = int(bits[0]) // 8 if bits else 1
    return size * math.prod(int(n) for n in shape.split(",") if n)

"""Options from the command line; what is wrong with them is one line on stderr."""

import contextlib
import io
import itertools
import re
import sys
from typing import NoReturn, TypeVar

import tyro

T = TypeVar("T")
USAGE_ERROR = 2
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def read(options: type[T], prog: str, args: list[str] | None = None) -> T:
    """The dataclass `options`, filled in by `tyro.cli`; exits where that cannot be.

    By default from `sys.argv`.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(options, prog=prog, args=args)
    except SystemExit as stop:
        if not stop.code:
            raise
    fail(_said(complaint.getvalue()))


def fail(complaint: str) -> NoReturn:
    print(complaint, file=sys.stderr)
    sys.exit(USAGE_ERROR)


def _said(box: str) -> str:
    """What is wrong, out of Tyro's box: what stands between its first two rules."""
    # Tyro colours the box where stdout is a terminal, wherever the box goes.
    lines = [line.strip("│ ") for line in COLOUR.sub("", box).splitlines()]
    said = itertools.takewhile(lambda line: not line.startswith(("─", "╰")), lines[1:])
    return " ".join(said)

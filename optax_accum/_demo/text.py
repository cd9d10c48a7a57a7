"""The text that comes with Python, as padded sequences of characters."""

import re
from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import numpy as np

PADDING = 0
START = 1
SHORTEST = 24  # Below are section marks and single words.
LONGEST = 128
HELD_OUT = 128


class Text(NamedTuple):
    """Paragraphs as rows: `START`, up to `LONGEST` characters, then `PADDING`.

    Attributes:
      training: int32 [paragraphs, 1 + LONGEST].
      held_out: the same, paragraphs that are not in `training`.
      characters: how many different tokens there are.
    """

    training: np.ndarray
    held_out: np.ndarray
    characters: int


def read_text(seed: int) -> Text:
    """Python's reference manual, its paragraphs in an order drawn from the seed."""
    paragraphs = _paragraphs()
    alphabet = sorted(set("".join(paragraphs)))
    token = {character: START + 1 + i for i, character in enumerate(alphabet)}
    rows = np.full((len(paragraphs), 1 + LONGEST), PADDING, np.int32)
    rows[:, 0] = START
    for row, paragraph in zip(rows, paragraphs, strict=True):
        tokens = [token[character] for character in paragraph]
        row[1 : 1 + len(tokens)] = tokens
    rows = np.random.default_rng(seed).permutation(rows)
    return Text(rows[HELD_OUT:], rows[:HELD_OUT], START + 1 + len(alphabet))


def windows(
    rows: np.ndarray, window: int, microbatch_size: int, seed: int
) -> Iterator[np.ndarray]:
    """Draws windows without end: int32 [window, microbatch_size, 1 + LONGEST].

    Every paragraph comes once before any comes again. Nothing sorts them by length.
    """
    rng = np.random.default_rng(seed)
    size = window * microbatch_size
    queue = rows[:0]
    while True:
        while len(queue) < size:
            queue = np.concatenate([queue, rng.permutation(rows)])
        yield queue[:size].reshape(window, microbatch_size, -1)
        queue = queue[size:]


def count_tokens(rows: Any) -> Any:
    """How many tokens each batch of rows, of NumPy or JAX, has to predict."""
    return (rows[..., 1:] != PADDING).sum(axis=(-2, -1))


def _paragraphs() -> list[str]:
    parts = [part for text in topics.values() for part in re.split(r"\n\s*\n", text)]
    parts = [" ".join(part.split())[:LONGEST] for part in parts]
    # Once each: what is held out must not be trained on elsewhere.
    return [part for part in dict.fromkeys(parts) if len(part) >= SHORTEST]

"""What the library promises, and whether the numbers bear it out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.contenders import (
    ALONE,
    APPLY_GRADIENTS,
    MULTI_STEPS,
    NNX_OPTIMIZER,
    TRACK_NOISE,
    TRAIN_STATE,
    UPDATE,
)
from benchmarks.measure import Row, Table

BIG = ("large", "transformer")


@dataclass(frozen=True)
class Target:
    """A value that may be at most `limit`, whichever the table.

    Attributes:
      value: from the rows of the contender and of the optimizer alone.
      optimizer: the one that it is about, if not all.
    """

    what: str
    value: Callable[[Row, Row], float | None]
    limit: float
    contenders: tuple[str, ...] = (UPDATE, APPLY_GRADIENTS)
    trees: tuple[str, ...] = BIG
    optimizer: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The worst value and where it was; `None` if nothing of the kind was measured."""

    what: str
    limit: float
    worst: float | None
    where: str | None

    @property
    def met(self) -> bool | None:
        return None if self.worst is None else self.worst <= self.limit


def _added_temporaries(row: Row, alone: Row) -> float | None:
    ours, theirs = row.temporaries_per_parameters, alone.temporaries_per_parameters
    return None if ours is None or theirs is None else ours - theirs


TARGETS = (
    Target(
        f"{APPLY_GRADIENTS} between releases / floor",
        lambda row, _: row.between_per_floor,
        limit=1.15,
        contenders=(APPLY_GRADIENTS,),
    ),
    Target(
        f"{APPLY_GRADIENTS} between releases / hand-over",
        lambda row, _: row.between_per_hand_over,
        limit=1.15,
        contenders=(APPLY_GRADIENTS,),
    ),
    Target(
        f"{APPLY_GRADIENTS}, window / ideal",
        lambda row, _: row.mean_per_ideal,
        limit=1.10,
        contenders=(APPLY_GRADIENTS,),
    ),
    Target(
        f"{TRACK_NOISE} between releases / floor",
        lambda row, _: row.between_per_floor,
        limit=1.4,
        contenders=(TRACK_NOISE,),
    ),
    Target(
        "train states of flax between releases / floor",
        lambda row, _: row.between_per_floor,
        limit=1.2,
        contenders=(TRAIN_STATE, NNX_OPTIMIZER),
    ),
    Target(
        f"{UPDATE} between releases / floor",
        lambda row, _: row.between_per_floor,
        limit=2.0,
        contenders=(UPDATE,),
    ),
    Target(
        f"{UPDATE}, window of AdamW / {MULTI_STEPS}",
        lambda row, _: row.mean_per_multi_steps,
        limit=0.15,
        contenders=(UPDATE,),
        optimizer="adamw",
    ),
    Target("(temporaries - alone) / params", _added_temporaries, limit=0.01),
    Target(
        f"trace and compile / {MULTI_STEPS}",
        lambda row, _: row.compile_per_multi_steps,
        limit=1.0,
        trees=(*BIG, "tiny"),
    ),
    Target(
        f"tiny tree between releases / {MULTI_STEPS}",
        lambda row, _: row.between_per_multi_steps,
        limit=1.0,
        trees=("tiny",),
    ),
)


def judge(target: Target, tables: Sequence[Table]) -> Verdict:
    found = [
        (value, f"{name}, {table.optimizer}, {table.tree}")
        for table in tables
        if table.tree in target.trees and target.optimizer in (None, table.optimizer)
        for name, row in table.rows.items()
        if name in target.contenders
        and (value := target.value(row, table.rows[ALONE])) is not None
    ]
    worst, where = max(found, default=(None, None))
    return Verdict(target.what, target.limit, worst, where)

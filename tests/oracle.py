"""What an accumulation must do, in plain NumPy float64 and the most obvious way."""

from collections.abc import Callable

import numpy as np


class Oracle:
    """Keeps the whole window in lists and averages it at the end.

    A step takes one gradient array; it returns what goes downstream at a release, and
    `None` in all other micro-steps.
    """

    def __init__(
        self,
        every: int | Callable[[int], int] | None,
        reduction: str = "mean",
        on_skip: str = "wait",
    ):
        self.schedule = every if callable(every) else lambda step: every
        self.reduction = reduction
        self.on_skip = on_skip
        self.gradient_step = 0
        self.released = False
        self.start_window()

    def start_window(self):
        self.mini_step, self.opened = 0, False
        self.grads, self.values, self.weights = [], [], []

    def step(self, grad, *, value=0.0, weight=1.0, release=False, skip=False):
        if not self.opened:
            self.length, self.opened = self.schedule(self.gradient_step), True
        if not skip or self.on_skip == "shrink":
            self.mini_step += 1
        if not skip and weight != 0:
            self.grads.append(np.asarray(grad, np.float64))
            self.values.append(np.float64(value))
            self.weights.append(np.float64(weight))
        full = self.length is not None and self.mini_step >= self.length
        if not (full or release):
            self.released = False
            return None
        out = self.reduce() if self.weights else None
        self.released = out is not None
        self.gradient_step += self.released
        self.start_window()
        return out

    def reduce(self):
        w = np.array(self.weights)
        with np.errstate(invalid="ignore"):  # inf - inf is NaN
            total = sum(wi * gi for wi, gi in zip(w, self.grads, strict=True))
        mean = total / w.sum()
        value = (w * self.values).sum() / w.sum()
        return (mean if self.reduction == "mean" else total), value

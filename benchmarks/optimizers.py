"""The optimizers to accumulate for."""

from collections.abc import Callable

import optax

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "adamw": lambda: optax.adamw(1e-3),
    "clip+adamw": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3)
    ),
    # Without momentum, because `optax.apply_every` is right for nothing else.
    "sgd": lambda: optax.sgd(1e-3),
    "sgd+momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3),
    "adabelief": lambda: optax.adabelief(1e-3),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}

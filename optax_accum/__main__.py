"""`python -m optax_accum`: trains a small model with accumulation and without."""

import importlib.util
import sys
from typing import NoReturn

EXTRA = ("flax", "matplotlib", "rich", "tyro")
FAILED = 2
INTERRUPTED = 130


def main() -> None:
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        _stop(
            f'The demo needs {", ".join(missing)}: pip install "optax-accum[demo]"',
            FAILED,
        )
    try:
        from optax_accum._demo.command import run

        run()
    except KeyboardInterrupt:
        _stop("Interrupted before the end.", INTERRUPTED)


def _stop(why: str, status: int) -> NoReturn:
    print(why, file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()

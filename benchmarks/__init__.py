"""How near to free accumulation is: `python -m benchmarks`, from a checkout."""

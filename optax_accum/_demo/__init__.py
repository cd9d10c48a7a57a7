"""What `python -m optax_accum` runs; nothing else imports it."""

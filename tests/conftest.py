"""Eight CPU devices, so that sharding is tested on any machine."""

import jax

jax.config.update("jax_num_cpu_devices", 8)

"""Gradient accumulation for Optax: exact, nearly free, safe, at home."""

from optax_accum._accumulate import AccumulateState as AccumulateState
from optax_accum._accumulate import accumulate as accumulate
from optax_accum._chain import apply_gradients as apply_gradients
from optax_accum._chain import chain as chain
from optax_accum._fit import Fit as Fit
from optax_accum._fit import fit_microbatch as fit_microbatch
from optax_accum._metrics import metrics as metrics
from optax_accum._metrics import noise_scale as noise_scale
from optax_accum._metrics import released as released
from optax_accum._microbatch import grad as grad
from optax_accum._microbatch import value_and_grad as value_and_grad
from optax_accum._multi_steps import MultiSteps as MultiSteps
from optax_accum._multi_steps import from_multi_steps_state as from_multi_steps_state
from optax_accum._sharding import defer_reduction as defer_reduction
from optax_accum._sharding import state_specs as state_specs

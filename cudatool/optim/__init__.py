"""Optimizers that step all arrays of a model in a few launches, and other work on lists of arrays.

Nothing here differentiates: gradients are passed, one for each parameter.
"""

from cudatool.optim._adam import fused_adam_, fused_adamw_
from cudatool.optim._foreach import (
    amp_foreach_non_finite_check_and_unscale_,
    amp_update_scale_,
    clip_grad_norm_,
    clip_grads_with_norm_,
    foreach_add_,
    foreach_copy_,
    foreach_scale_,
    foreach_zero_,
    get_total_norm,
)
from cudatool.optim._optimizers import SGD, Adam, AdamW, Optimizer
from cudatool.optim._sgd import fused_sgd_

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Optimizer",
    "amp_foreach_non_finite_check_and_unscale_",
    "amp_update_scale_",
    "clip_grad_norm_",
    "clip_grads_with_norm_",
    "foreach_add_",
    "foreach_copy_",
    "foreach_scale_",
    "foreach_zero_",
    "fused_adam_",
    "fused_adamw_",
    "fused_sgd_",
    "get_total_norm",
]

# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Which `is_first_microbatch` a call may hand to Transformer Engine: pure functions, no torch.

TE's one flag decides two unrelated things: whether a cached quantized weight is refreshed, and
whether the weight gradient overwrites ``main_grad``. It therefore means something only for a call
whose weight cache Megatron maintains. Such a call is *tracked*.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_first_microbatch_tracked"]


def is_first_microbatch_tracked(
    config: Any, module: Any | None = None, ambient_autocast: bool | None = None
) -> bool:
    """Whether `is_first_microbatch` means something, for the model or for one call of a module.

    Without a module this is the model-wide answer, and what
    ``MegatronModule.set_is_first_microbatch`` asks. With one it is the answer for a single call.

    Args:
        config: a TransformerConfig: its ``fp8``, ``fp4``, ``use_kitchen``, ``quant_recipe``.
        module: the module that is about to run, or None for the model-wide answer.
        ambient_autocast: whether TE's autocast is on around the module, read before the module
            enters a context of its own. Only read where a ``quant_recipe`` is set.

    Returns:
        bool: True where the call has a quantized weight cache that Megatron maintains.

    Source: megatron-core 0.19.2, ``MegatronModule.set_is_first_microbatch`` (the model-wide
    predicate) and ``TELinear.will_execute_quantized`` (the answer of one module).
    """
    # Kitchen drives quantization outside TE's autocast, so the module cannot be asked.
    if getattr(config, "use_kitchen", False):
        return True
    if getattr(config, "quant_recipe", None) is None:
        return config.fp8 is not None or config.fp4 is not None
    if module is None:
        return True
    # The method reads the recipe's contents; `te_quant_params is not None` would not do, because
    # a rule that forces BF16 is a rule too.
    will_execute_quantized = getattr(module, "will_execute_quantized", None)
    if will_execute_quantized is None:
        return True
    return bool(will_execute_quantized(ambient_autocast))


def _resolve_is_first_microbatch(
    module: Any, config: Any, ambient_autocast: bool | None
) -> bool | None:
    """What one call of ``module`` may hand to TE as ``is_first_microbatch``.

    Args:
        module: a TE linear wrapper of Megatron; ``is_first_microbatch`` and
            ``disable_parameter_transpose_cache`` are read, nothing is changed.
        config: the module's TransformerConfig.
        ambient_autocast: as in :func:`is_first_microbatch_tracked`.

    Returns:
        bool | None: None for a call that must leave the weight cache alone (untracked, or
        ``disable_parameter_transpose_cache``), else the module's own flag: True while the first
        call of the step is still to come.
    """
    if module.disable_parameter_transpose_cache:
        return None
    if not is_first_microbatch_tracked(config, module, ambient_autocast):
        return None
    flag: bool | None = module.is_first_microbatch
    return flag

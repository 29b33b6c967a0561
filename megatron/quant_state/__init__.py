# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Right weight gradients and precision for quantized training with Megatron-Core.

One line in a training script: ``import megatron.quant_state; megatron.quant_state.install()``.
Importing this package imports neither torch nor Megatron.
"""

# Bound at once, not on demand: the function must win over the submodule of the same name.
from megatron.quant_state.install import Installation, install, uninstall
from megatron.quant_state.package_info import __version__
from megatron.quant_state.weight_cache import weights_changed

__all__ = ["Installation", "__version__", "install", "uninstall", "weights_changed"]

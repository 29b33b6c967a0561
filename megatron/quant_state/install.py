# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Install and uninstall the layer: the one tuple of patches, which the docs read as well."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from megatron.quant_state.errors import UnsupportedVersionError
from megatron.quant_state.package_info import __version__
from megatron.quant_state.patching import (
    AppliedPatch,
    Patch,
    apply_patches,
    check_on_top,
    restore_patches,
)
from megatron.quant_state.recompute import (
    keep_precision,
    nest_enter,
    nest_exit,
    prepare_replayed_call,
)
from megatron.quant_state.recompute_probe import megatron_restores_precision
from megatron.quant_state.recompute_state import RecomputeState
from megatron.quant_state.weight_cache import (
    arm_what_is_loaded,
    resolve_flag_and_refresh,
    set_is_first_microbatch,
    write_flag_directly,
)

__all__ = ["Installation", "install", "uninstall"]

logger = logging.getLogger(__name__)

_WRAPPERS = "megatron.core.extensions.transformer_engine"
_TE_BASE = "transformer_engine.pytorch.module.base"
_TE_DISTRIBUTED = "transformer_engine.pytorch.distributed"

_RESTORED_BY_MEGATRON = (
    "Megatron restores the FP8 state of a recomputed region by itself, so "
    "tensor_parallel.checkpoint was left alone"
)


def _resolve(forward: Callable[..., Any]) -> Callable[..., Any]:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    return resolve_flag_and_refresh(forward, FP8GlobalStateManager)


def _recompute_state() -> RecomputeState:
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    return RecomputeState(FP8GlobalStateManager, distributed)


def _with_recompute_state(
    wrap: Callable[[Callable[..., Any], RecomputeState], Callable[..., Any]],
    function: Callable[..., Any],
) -> Callable[..., Any]:
    return wrap(function, _recompute_state())


def _keep_signature(replacement: Callable[..., Any], _: Callable[..., Any]) -> Callable[..., Any]:
    return replacement


_linear = partial(
    Patch,
    module=_WRAPPERS,
    method="forward",
    mentions=("is_first_microbatch", "disable_parameter_transpose_cache"),
    wrap=_resolve,
)

#: What needs Megatron alone.
MEGATRON_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.transformer.module",
        class_name="MegatronModule",
        method="set_is_first_microbatch",
        parameters=("self",),
        mentions=("is_first_microbatch", "config"),
        wrap=partial(_keep_signature, set_is_first_microbatch),
        reaches="arms each module once a step, also in quant_recipe-only runs and late modules",
    ),
)

_flag_writes = partial(
    Patch,
    module=_WRAPPERS,
    method="__setattr__",
    parameters=("self", "name", "value"),
    mentions=(),
    wrap=write_flag_directly,
    reaches="the flag that forward writes at every call, past nn.Module's search for a parameter",
    inherited=True,
)

#: What needs Transformer Engine as well. Column- and row-parallel wrappers inherit these.
TE_PATCHES: tuple[Patch, ...] = (
    _linear(
        class_name="TELinear",
        parameters=("self", "x"),
        reaches="row- and column-parallel and duplicated linears",
    ),
    _linear(
        class_name="TELayerNormColumnParallelLinear",
        parameters=("self", "x"),
        reaches="column-parallel linears with a fused norm",
    ),
    _linear(
        class_name="TEGroupedLinear",
        parameters=("self", "x", "m_splits"),
        reaches="grouped linears of MoE experts",
    ),
    _flag_writes(class_name="TELinear"),
    _flag_writes(class_name="TELayerNormColumnParallelLinear"),
    _flag_writes(class_name="TEGroupedLinear"),
    Patch(
        module=_TE_BASE,
        class_name="TransformerEngineBaseModule",
        method="_load_from_state_dict",
        parameters=("self", "state_dict", "prefix"),
        mentions=("_load_from_state_dict",),
        wrap=arm_what_is_loaded,
        reaches="a module whose weights were loaded refreshes them in its next call",
    ),
)

#: What needs Transformer Engine and a Megatron that does not restore precision by itself.
RECOMPUTE_PATCHES: tuple[Patch, ...] = (
    Patch(
        module="megatron.core.tensor_parallel.random",
        class_name="CheckpointFunction",
        method="forward",
        parameters=("ctx", "run_function", "distribute_saved_activations"),
        mentions=("run_function", "no_grad"),
        wrap=partial(_with_recompute_state, keep_precision),
        reaches="every caller of tensor_parallel.checkpoint: a replay runs as its forward did",
    ),
    Patch(
        module=_TE_DISTRIBUTED,
        class_name="activation_recompute_forward",
        method="__enter__",
        parameters=("self",),
        mentions=("_is_first_fp8_module",),
        wrap=partial(_with_recompute_state, nest_enter),
        reaches="a region that TE or Megatron opens inside a replay belongs to that replay",
    ),
    Patch(
        module=_TE_DISTRIBUTED,
        class_name="activation_recompute_forward",
        method="__exit__",
        parameters=("self",),
        mentions=(),
        wrap=partial(_with_recompute_state, nest_exit),
        reaches="a region inside a region: the outer one's phase survives",
    ),
    Patch(
        module=_TE_BASE,
        class_name="TransformerEngineBaseModule",
        method="prepare_forward",
        parameters=("self", "inp", "num_gemms"),
        mentions=("in_fp8_activation_recompute_phase",),
        wrap=partial(_with_recompute_state, prepare_replayed_call),
        reaches="a module in a replay: its own state follows the autocast, amaxes reduce once",
    ),
)


class Installation:
    """Handle of an installed layer, and a context manager that uninstalls it.

    Attributes:
        patches: what is in place, in the order of installation.
        left_alone: what was not patched and why, a sentence each.
    """

    def __init__(self, patches: tuple[AppliedPatch, ...], left_alone: tuple[str, ...] = ()) -> None:
        self.patches = patches
        self.left_alone = left_alone

    def uninstall(self) -> None:
        """Restore every attribute exactly; harmless when that was done before.

        Raises:
            ForeignPatchError: somebody patched on top; nothing is changed then.
        """
        global _installation
        if _installation is not self:
            return
        restore_patches(self.patches)
        _installation = None

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.uninstall()


_installation: Installation | None = None


def install() -> Installation:
    """Put the layer in place, for this process. Call it once, before or after models are built.

    Says on rank 0, through ``logging``, what was patched and what was left alone. Without
    Transformer Engine only ``MegatronModule.set_is_first_microbatch`` is patched. A Megatron that
    restores the FP8 state of a recomputed region by itself keeps its own way.

    Returns:
        Installation: the handle; the same one when the layer is in place already.

    Raises:
        UnsupportedVersionError: Megatron-Core or Transformer Engine has not the expected shape.
            Nothing is patched then.
        ForeignPatchError: the layer is in place and somebody patched on top of it.
    """
    global _installation
    if _installation is not None:
        check_on_top(_installation.patches)
        return _installation
    patches = MEGATRON_PATCHES
    left_alone: tuple[str, ...] = ()
    if not _have_transformer_engine():
        left_alone = ("Transformer Engine is not installed, so no linear was patched",)
    else:
        _check_transformer_engine()
        patches += TE_PATCHES
        if megatron_restores_precision(_recompute_state()):
            left_alone = (_RESTORED_BY_MEGATRON,)
        else:
            patches += RECOMPUTE_PATCHES
    applied = apply_patches(patches)
    if patches[-1] is RECOMPUTE_PATCHES[-1] and not megatron_restores_precision(_recompute_state()):
        restore_patches(applied)
        raise UnsupportedVersionError(
            "patched, tensor_parallel.checkpoint of this megatron-core still replays a region "
            "without its forward's FP8 state: something has replaced "
            "megatron.core.tensor_parallel.random.checkpoint. Remove that; nothing was patched."
        )
    _installation = Installation(applied, left_alone)
    _say(_installation)
    return _installation


def uninstall() -> None:
    """Undo :func:`install`; harmless when nothing is installed.

    Raises:
        ForeignPatchError: somebody patched on top; nothing is changed then.
    """
    if _installation is not None:
        _installation.uninstall()


def _have_transformer_engine() -> bool:
    try:
        from megatron.core.extensions import transformer_engine
    except ModuleNotFoundError as error:
        if error.name not in ("megatron.core", "megatron.core.extensions"):
            raise
        raise UnsupportedVersionError(
            "megatron-core is not installed in this environment: pip install megatron-core"
        ) from error
    have: bool = getattr(transformer_engine, "HAVE_TE", True)
    return have


def _check_transformer_engine() -> None:
    """Check what the wrappers use of TE beside the methods that are patched.

    Raises:
        UnsupportedVersionError: something is missing.
    """
    import transformer_engine
    from transformer_engine import pytorch
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    from transformer_engine.pytorch.module import base

    missing = [
        f"FP8GlobalStateManager.{name}"
        for name in ("is_fp8_enabled", "fp8_graph_capturing")
        if not callable(getattr(FP8GlobalStateManager, name, None))
    ]
    # A method, but in 2.15 the attribute alone.
    state = getattr(FP8GlobalStateManager, "quantization_state", FP8GlobalStateManager)
    if not callable(
        getattr(FP8GlobalStateManager, "get_skip_fp8_weight_update_tensor", None)
    ) and not hasattr(state, "skip_fp8_weight_update_tensor"):
        missing.append("FP8GlobalStateManager.get_skip_fp8_weight_update_tensor")
    missing += [
        f"parameter is_first_microbatch of {kind.__name__}.forward"
        for kind in (pytorch.Linear, pytorch.LayerNormLinear, pytorch.GroupedLinear)
        if "is_first_microbatch" not in inspect.signature(kind.forward).parameters
    ]
    # Where the class itself is missing, its patch says so.
    base_class = getattr(base, "TransformerEngineBaseModule", object)
    made = inspect.unwrap(base_class.__init__)
    if base_class is not object and "_fp8_workspaces" not in made.__code__.co_names:
        missing.append(
            "TransformerEngineBaseModule._fp8_workspaces, the cache of quantized weights"
        )
    if missing:
        raise UnsupportedVersionError(
            f"transformer-engine {transformer_engine.__version__} has not: {', '.join(missing)}. "
            "Nothing was patched."
        )


def _say(installation: Installation) -> None:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank()
    else:
        rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        return
    lines = [
        f"  {item.patch.target}" + (f" (over {item.below})" if item.below else "")
        for item in installation.patches
    ]
    lines += [f"  {sentence}" for sentence in installation.left_alone]
    # A warning, since Python shows nothing below that by default, and a patched process says so.
    logger.warning("megatron.quant_state %s patched:\n%s", __version__, "\n".join(lines))

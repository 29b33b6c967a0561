# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Refresh a module's quantized weights once a step without overwriting `main_grad`.

TE refreshes a cached weight only on ``is_first_microbatch=True``, and then the weight gradient of
that call overwrites ``main_grad``: whatever later calls of the same module had accumulated is lost,
because backward runs in reverse. So an armed call refreshes the cache here and hands TE False.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from megatron.quant_state.first_microbatch import (
    _resolve_is_first_microbatch,
    is_first_microbatch_tracked,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "arm_what_is_loaded",
    "refresh_weight_cache",
    "resolve_flag_and_refresh",
    "set_is_first_microbatch",
    "weights_changed",
    "write_flag_directly",
]

logger = logging.getLogger(__name__)

_FLAG = "is_first_microbatch"
# In the ``__dict__`` of a module that a CUDA graph captured: a bool, for deepcopy and pickle.
_CAPTURED = "_quant_state_captured"

_said_overwrite_main_grad = False


def refresh_weight_cache(module: Any, will_quantize: bool) -> None:
    """Make the next read of a module's cached quantized weights see the current weights.

    Changes ``module._fp8_workspaces`` (TE's cache: name to quantized copy of the parameter of that
    name) and nothing else. Where the call is going to quantize and every copy can be rewritten
    without losing a direction, the copies are requantized in place, which is what TE does on
    True. Otherwise they are dropped, and TE makes them anew when it next needs them. A module that
    a CUDA graph captured is never dropped, because the graph holds the addresses. Weights that are
    themselves quantized have no copy, so nothing is done for them.

    Args:
        module: a TE linear, layernorm-linear or grouped linear module.
        will_quantize: whether the call that follows runs quantized. A refresh in place before a
            call in BF16 would be work for nothing.

    Raises:
        RuntimeError: a captured module whose copies cannot be rewritten in place.

    Source: Transformer Engine 2.20.2, ``module/base.py: quantize_weight``; 2.9.0,
    ``TransformerEngineBaseModule.get_weight_workspace``.
    """
    workspaces = module._fp8_workspaces
    if not workspaces:
        return
    captured = _CAPTURED in module.__dict__
    if will_quantize or captured:
        parameters = module._parameters
        for name, copy in workspaces.items():
            if not _can_requantize(copy, parameters.get(name), captured):
                break
        else:
            for name, copy in workspaces.items():
                copy.quantize_(parameters[name].detach())
            return
        if captured:
            raise RuntimeError(
                f"{type(module).__name__} was captured in a CUDA graph, and its cached weights "
                f"({', '.join(workspaces)}) cannot be requantized in place. The graph reads their "
                "addresses, so they cannot be replaced either. Set "
                "disable_parameter_transpose_cache=True for this model, or capture it again."
            )
    workspaces.clear()


def _can_requantize(copy: Any, weight: Any, captured: bool) -> bool:
    """Whether rewriting ``copy`` in place from ``weight`` keeps all that a reader may need.

    TE's kernels rewrite the directions that the quantizer's usage flags ask for and may strip the
    other. The flags are those of the last call: after an evaluation without gradients the
    column-wise copy would go, and an in-flight microbatch may still need it.
    """
    quantizer = getattr(copy, "_quantizer", None)
    if weight is None or quantizer is None or not hasattr(copy, "quantize_"):
        return False
    if captured:
        # What a graph reads must stay whole; TE sets the flags anew in every call.
        quantizer.set_usage(rowwise=True, columnwise=True)
    return bool(quantizer.rowwise_usage and quantizer.columnwise_usage)


def resolve_flag_and_refresh(forward: Callable[..., Any], fp8_state: Any) -> Callable[..., Any]:
    """Wrap the ``forward`` of one of Megatron's TE linear wrappers.

    The wrapped method reads ``self.is_first_microbatch``, hands it to TE and sets it to False. So
    the wrapper puts there what this call may hand, and afterwards what the module is owed: a call
    that hands None does not disarm the module, and an exception leaves the flag as it was.

    Args:
        forward: ``forward`` of TELinear, TELayerNormColumnParallelLinear or TEGroupedLinear.
        fp8_state: TE's FP8GlobalStateManager. Its autocast and capture state are read, and nothing
            of it is changed.

    Returns:
        Callable: a function with the same signature.
    """
    is_fp8_enabled = fp8_state.is_fp8_enabled
    capturing = _capture_check(fp8_state)
    resolve = _resolve_is_first_microbatch

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Plain dict writes: nn.Module.__setattr__ costs more than the rest of this wrapper.
        state = self.__dict__
        config, owed = self.config, state[_FLAG]
        # Only a recipe asks for the state of autocast, so it is not read for others.
        has_recipe = getattr(config, "quant_recipe", None) is not None
        flag = resolve(self, config, is_fp8_enabled() if has_recipe else None)
        if flag is not None:
            if capturing():
                flag = _flag_under_capture(self, fp8_state)
            elif flag:
                _refresh_armed(self, is_fp8_enabled())
                flag = False
            if flag is owed:
                return forward(self, *args, **kwargs)
        state[_FLAG] = flag
        try:
            out = forward(self, *args, **kwargs)
        except BaseException:
            state[_FLAG] = owed
            raise
        if flag is None:
            state[_FLAG] = owed
        return out

    return wrapper


def write_flag_directly(set_attribute: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__setattr__`` of a TE linear wrapper: the flag goes straight into ``__dict__``.

    Megatron's ``forward`` writes the flag at every call, and ``nn.Module.__setattr__`` looks for a
    parameter, a module and a buffer of that name first, which costs more than all that this layer
    adds to a call.

    Args:
        set_attribute: what the class inherits, for every other attribute.

    Returns:
        Callable: a function with the same signature.
    """

    @functools.wraps(set_attribute)
    def wrapper(self: Any, name: str, value: Any) -> None:
        if name == _FLAG:
            self.__dict__[_FLAG] = value
        else:
            set_attribute(self, name, value)

    return wrapper


def _capture_check(fp8_state: Any) -> Callable[[], bool]:
    """TE's ``fp8_graph_capturing()`` without its Python frames, where torch has the call.

    Source: Transformer Engine 2.9.0 and 2.20.2, ``FP8GlobalStateManager.fp8_graph_capturing``: its
    own mark, or a capture of the current stream.
    """
    import torch

    check: Callable[[], bool] = fp8_state.fp8_graph_capturing
    is_capturing: Callable[[], bool] | None = getattr(
        torch._C, "_cuda_isCurrentStreamCapturing", None
    )
    state = getattr(fp8_state, "quantization_state", None)
    known = hasattr(state, "fp8_graph_capturing")
    if is_capturing is None or not known or not torch.cuda.is_available():
        return check

    def capturing() -> bool:
        # Looked up at every call: ``reset()`` replaces the state.
        marked: bool = fp8_state.quantization_state.fp8_graph_capturing
        return marked or is_capturing()

    return capturing


def _refresh_armed(module: Any, ambient_autocast: bool) -> None:
    """What an armed, tracked call does before TE sees it."""
    _say_overwrite_main_grad(module)
    if module._fp8_workspaces:
        will_execute_quantized = getattr(module, "will_execute_quantized", None)
        refresh_weight_cache(
            module,
            ambient_autocast
            if will_execute_quantized is None
            else bool(will_execute_quantized(ambient_autocast)),
        )


def _flag_under_capture(module: Any, fp8_state: Any) -> bool | None:
    """What a call that a CUDA graph captures hands to TE; the graph replays it for ever.

    With a skip tensor TE guards the refresh on the GPU and never overwrites. Without one
    (``quant_recipe``-only runs) a Python flag would be baked in: a graph of a False never sees new
    weights, so the call quantizes at every replay instead.
    """
    # TE 2.15 has the tensor and no method that returns it.
    get = getattr(fp8_state, "get_skip_fp8_weight_update_tensor", None)
    skip = get() if get else fp8_state.quantization_state.skip_fp8_weight_update_tensor
    if skip is None:
        return None
    module.__dict__[_CAPTURED] = True
    return False


def _say_overwrite_main_grad(module: Any) -> None:
    """Say once that ``weight.overwrite_main_grad`` (Megatron-FSDP) makes TE overwrite anyway.

    Source: Transformer Engine 2.9.0 and later, ``origin_weight_overwrites_main_grad``.
    """
    global _said_overwrite_main_grad
    if _said_overwrite_main_grad:
        return
    for name, parameter in module._parameters.items():
        if getattr(parameter, "overwrite_main_grad", False):
            _said_overwrite_main_grad = True
            logger.warning(
                "%s.%s has overwrite_main_grad set (Megatron-FSDP does that): Transformer Engine "
                "then overwrites main_grad whatever is_first_microbatch says, so a module that "
                "runs more than once in a microbatch loses gradient. Unset it for repeated "
                "modules, or set gradient_accumulation_fusion=False.",
                type(module).__name__,
                name,
            )
            return


def set_is_first_microbatch(self: Any) -> None:
    """Arm every module of a model where the model-wide predicate says the flag means something.

    Stands in for ``MegatronModule.set_is_first_microbatch``, which Megatron's schedules call once
    a step. The modules are looked up anew each time, so one that was added after the first step is
    armed like every other (the release caches the list at the first call).

    Args:
        self: a MegatronModule; ``self.config`` is its TransformerConfig.
    """
    if is_first_microbatch_tracked(self.config):
        _arm(self.modules())


def weights_changed(model: torch.nn.Module | Iterable[torch.nn.Module]) -> None:
    """Say that weights changed outside a schedule: the next call of each module refreshes them.

    Call it where a forward follows that no schedule drives (generation, a probe) after an optimizer
    step, a LoRA merge or a copy into the weights. ``load_state_dict`` needs no call: it arms what
    it loads.

    Args:
        model: a module, or the list of model chunks that Megatron hands around. Only the flags of
            its TE linears are changed.
    """
    # A list of chunks, or one chunk: torch is not imported for telling them apart.
    chunks: Iterable[Any] = (model,) if hasattr(model, "modules") else model
    for chunk in chunks:
        _arm(chunk.modules())


def _arm(modules: Iterable[Any]) -> None:
    for module in modules:
        if _FLAG in module.__dict__:
            module.__dict__[_FLAG] = True


def arm_what_is_loaded(load_from_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Wrap TE's ``_load_from_state_dict`` so that a module whose weights were loaded is armed.

    Args:
        load_from_state_dict: ``TransformerEngineBaseModule._load_from_state_dict``.

    Returns:
        Callable: a function with the same signature.
    """

    @functools.wraps(load_from_state_dict)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        load_from_state_dict(self, *args, **kwargs)
        _arm((self,))

    return wrapper

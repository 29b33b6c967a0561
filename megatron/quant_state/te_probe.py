# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What the reference engine counts and switches, on the real Transformer Engine, from outside.

For a rehearsal, a test or a benchmark, never for training: it wraps functions of TE, and keeps a
copy of each weight to tell whether a cached one is stale. Everything is process-wide.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "Call",
    "Counters",
    "calls",
    "counters",
    "forget",
    "install",
    "never_overwrite",
    "provide_fused_weight_gradient",
    "record_calls",
]

_MODULES = {
    "transformer_engine.pytorch.module.linear": "_Linear",
    "transformer_engine.pytorch.module.layernorm_linear": "_LayerNormLinear",
    "transformer_engine.pytorch.module.grouped_linear": "_GroupedLinear",
}
_BASE = "transformer_engine.pytorch.module.base"


_KINDS = ("Linear", "LayerNormLinear", "GroupedLinear")
#: TE's question to a recipe, and Megatron's word for the answer.
_PRECISIONS = {
    "delayed": "delayed",
    "float8_current_scaling": "tensorwise",
    "float8_block_scaling": "blockwise",
    "mxfp8": "mxfp8",
    "nvfp4": "nvfp4",
}


@dataclass(frozen=True)
class Call:
    """One forward of a linear module; attention is not recorded.

    Attributes:
        module: the module; hold it to name it through ``named_modules``.
        precision: what the call computed in: ``bf16`` (not quantized, whatever the dtype),
            ``delayed``, ``tensorwise``, ``blockwise``, ``mxfp8`` or ``nvfp4``.
        grad_enabled: grad mode of the call.
        in_backward: whether a backward pass made the call: with gradients, it is a replay.
    """

    module: object
    precision: str
    grad_enabled: bool
    in_backward: bool


@dataclass
class Counters:
    """What happened to the weights of linear modules since the last ``reset()``.

    Attributes:
        weight_quantizations: quantizations of a weight, new copies and rewritten ones alike.
        weights_used: data pointers of the weights whose quantized form a forward used. Its length
            is the least number of quantizations, one a weight a step.
        stale_reads: forwards that used a copy of another weight than the current one.
        empty_reads: always 0: that a copy was never filled cannot be seen from outside.
    """

    weight_quantizations: int = 0
    weights_used: set[int] = field(default_factory=set)
    stale_reads: int = 0
    empty_reads: int = 0

    def reset(self) -> None:
        """Start from zero."""
        self.weight_quantizations = 0
        self.weights_used.clear()
        self.stale_reads = 0


#: The one instance, never replaced.
counters = Counters()

#: Calls in the order of their ends, while recording is on. Never replaced.
calls: list[Call] = []

_recording = False
_recorders_installed = False
_never_overwrite = False
_installed = False
# Data pointers of what has been handed to TE as a weight; quantizers see other tensors too.
_weights: set[int] = set()
# Data pointer of a quantized copy to the weight that it was made from.
_sources: dict[int, Any] = {}
_keep_sources = False


def never_overwrite(enabled: bool) -> None:
    """Turn every overwrite of ``main_grad`` into an accumulation, for the run that is the truth.

    The weight cache is left alone: it behaves as released. Acts in backward, so that it holds for
    a forward that ran before it was switched.

    Source: Transformer Engine 2.9.0 to 2.20.2, ``is_first_microbatch`` of the autograd functions.
    """
    global _never_overwrite
    install()
    _never_overwrite = enabled


def record_calls(enabled: bool) -> None:
    """Switch the recording of ``calls`` on, from an empty list, or off, which keeps the list."""
    global _recording, _recorders_installed
    if enabled and not _recorders_installed:
        pytorch = importlib.import_module("transformer_engine.pytorch")
        for name in _KINDS:
            kind = getattr(pytorch, name)
            kind.forward = _recorded(kind.forward)
        _recorders_installed = True
    if enabled:
        calls.clear()
    _recording = enabled


def forget() -> None:
    """Forget the weights of earlier models, whose memory may hold other tensors now."""
    _weights.clear()
    _sources.clear()


def install(*, check_reads: bool = False) -> None:
    """Start counting, once a process, before models are built.

    Args:
        check_reads: also count ``stale_reads``, which takes a copy of every weight and a
            comparison, on the GPU, a read.

    Raises:
        RuntimeError: this Transformer Engine is built otherwise.
    """
    global _installed, _keep_sources
    _keep_sources = _keep_sources or check_reads
    if _installed:
        return
    for module_name, function_name in _MODULES.items():
        module = importlib.import_module(module_name)
        function = getattr(module, function_name, None)
        if function is None:
            raise RuntimeError(f"{module_name} has no {function_name}: an unknown version of TE")
        function.backward = staticmethod(_accumulating(function.backward))
        uses = getattr(module, "quantize_weight", None)
        if uses is not None:
            setattr(module, "quantize_weight", _counting_uses(uses))  # noqa: B010
    base = importlib.import_module(_BASE).TransformerEngineBaseModule
    if hasattr(base, "get_weight_workspace"):
        # Up to 2.14 or so the cache is looked up by a method.
        base.get_weight_workspace = _counting_uses(base.get_weight_workspace)
    quantizer = _quantizer_class()
    for kind in (quantizer, *_subclasses(quantizer)):
        for name in ("quantize_impl", "update_quantized"):
            if name in kind.__dict__:
                setattr(kind, name, _counting_quantizations(kind.__dict__[name]))
    _installed = True


def provide_fused_weight_gradient() -> bool:
    """Stand in for APEX's fused weight gradient where it is missing; before Megatron is imported.

    Megatron's own output layer demands it for ``gradient_accumulation_fusion``; TE's linears do
    not use it. The stand-in always adds.

    Returns:
        bool: whether the stand-in is what Megatron will find.
    """
    name = "fused_weight_gradient_mlp_cuda"
    try:
        found = importlib.import_module(name)
    except ImportError:
        file = Path(__file__).parent / "reference" / "site" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise RuntimeError(f"{file} cannot be loaded") from None
        found = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    return str(found.__file__).endswith(f"site/{name}.py")


def _quantizer_class() -> type:
    for name in ("quantized_tensor", "tensor.quantized_tensor", "tensor"):
        try:
            module = importlib.import_module(f"transformer_engine.pytorch.{name}")
        except ModuleNotFoundError:
            continue
        if hasattr(module, "Quantizer"):
            found: type = module.Quantizer
            return found
    raise RuntimeError("Transformer Engine has no Quantizer where it is known to be")


def _subclasses(kind: type) -> list[type]:
    direct: list[type] = kind.__subclasses__()
    return direct + [inner for one in direct for inner in _subclasses(one)]


def _accumulating(backward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if _never_overwrite:
            # Since 2.17 or so _Linear keeps what backward needs in an object of its own.
            holder = getattr(ctx, "backward_objects", None) or ctx
            if holder.is_first_microbatch:
                holder.is_first_microbatch = False
        return backward(ctx, *gradients)

    return wrapper


def _recorded(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        grad_enabled = torch.is_grad_enabled()
        out = forward(self, *args, **kwargs)
        if _recording:
            in_backward = torch._C._current_graph_task_id() != -1
            calls.append(Call(self, _precision(self), grad_enabled, in_backward))
        return out

    return wrapper


def _precision(module: Any) -> str:
    if not module.fp8:
        return "bf16"
    recipe = module.fp8_meta["recipe"]
    for question, word in _PRECISIONS.items():
        answer = getattr(recipe, question, None)
        if answer is not None and answer():
            return word
    return type(recipe).__name__


def _counting_uses(quantize_weight: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(quantize_weight)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        weight = kwargs.get("tensor")
        if weight is None or _is_quantized(weight):
            return quantize_weight(*args, **kwargs)
        pointer = weight.data_ptr()
        _weights.add(pointer)
        counters.weights_used.add(pointer)
        result = quantize_weight(*args, **kwargs)
        # A method of older versions returns the copy, the function a pair.
        copy = result[0] if isinstance(result, tuple) else result
        if _keep_sources and copy is not weight and not _capturing():
            source = _sources.get(_pointer(copy))
            if source is not None and not source.equal(weight):
                counters.stale_reads += 1
        return result

    return wrapper


def _counting_quantizations(quantize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(quantize)
    def wrapper(self: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        result = quantize(self, tensor, *args, **kwargs)
        if not _is_quantized(tensor) and tensor.data_ptr() in _weights:
            counters.weight_quantizations += 1
            if _keep_sources and not _capturing():
                copy = args[0] if args else kwargs.get("dst", result)
                _sources[_pointer(copy)] = tensor.detach().clone()
        return result

    return wrapper


def _is_quantized(tensor: Any) -> bool:
    # A weight that is itself quantized has no copy, and no data pointer of its own.
    return hasattr(tensor, "_quantizer")


def _pointer(copy: Any) -> int:
    """Where the values of a quantized copy lie; 0 for one that has none."""
    for name in ("_data", "_rowwise_data", "_transpose", "_columnwise_data"):
        values = getattr(copy, name, None)
        if values is not None:
            return int(values.data_ptr())
    return 0


def _capturing() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

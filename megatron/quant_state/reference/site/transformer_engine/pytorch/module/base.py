# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Base of the modules: quantization state, the phases of a forward, parameters, extra state.

Models TE 2.20, ``pytorch/module/base.py``.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from transformer_engine import reference
from transformer_engine.common.recipe import recipe_name
from transformer_engine.pytorch._recipe_state import has_delayed_scaling_state
from transformer_engine.pytorch.distributed import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.module._common import ParameterInit, WeightGradStore
from transformer_engine.pytorch.module._weight import get_dummy_wgrad as get_dummy_wgrad
from transformer_engine.pytorch.module._weight import quantize_weight as quantize_weight
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState
from transformer_engine.pytorch.quantized_tensor import QuantizedTensor, Quantizer


class TransformerEngineBaseModule(torch.nn.Module):
    """State of quantization of one module.

    ``_fp8_workspaces`` maps ``weight`` or ``weight{i}`` to the cached quantized weight.
    ``fp8_meta`` holds the recipe and, under ``scaling_fwd`` and ``scaling_bwd``, its state.
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        manager = FP8GlobalStateManager
        self.name = name
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self.quantizers: dict[str, list[Quantizer]] = {"scaling_fwd": [], "scaling_bwd": []}
        self.tp_group: Any = None
        self.tp_size = 1
        self.sequence_parallel = False
        self.param_init_meta: dict[str, ParameterInit] = {}
        self.primary_weights_in_fp8 = manager.with_fp8_parameters()
        self.preserve_high_precision_init_val = manager.with_high_precision_init_val()
        self.fsdp_wrapped = False
        self.fsdp_group: Any = None
        self._fp8_workspaces: dict[str, QuantizedTensor] = {}
        self.activation_dtype: torch.dtype | None = None
        self.wgrad_accumulation_and_reduce_hooks: list[Callable[[], Any]] = []
        self.wgrad_store: WeightGradStore | None = None
        self.fuse_wgrad_accumulation = False
        self.use_bias = False

    def fast_setattr(self, name: str, value: Any) -> None:
        """Set a plain attribute past ``nn.Module.__setattr__``."""
        self.__dict__[name] = value

    def module_setattr(self, name: str, value: Any) -> None:
        """Set an attribute through ``nn.Module.__setattr__``."""
        super().__setattr__(name, value)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the tensor parallel group."""
        self.fast_setattr("tp_group", tp_group)
        self.fast_setattr("tp_group_initialized", True)

    # --- quantization state -------------------------------------------------------------------

    def set_meta_tensor(self, fwd: bool, recipe: Any) -> None:
        """Make the state of a direction, unless there is one of the same kind of recipe."""
        key = "scaling_fwd" if fwd else "scaling_bwd"
        if self.fp8_meta_tensors_initialized:
            state = self.fp8_meta[key]
            if state.kind == recipe_name(recipe):
                if recipe.delayed():
                    self.adjust_amax_history_length(recipe.amax_history_len, fwd=fwd)
                return
        count = self.fp8_meta["num_gemms"] * (3 if fwd else 2)
        state = RecipeState.create(
            recipe, mode="forward" if fwd else "backward", num_quantizers=count
        )
        self.fp8_meta[key] = state
        self.quantizers[key] = state.make_quantizers()

    def adjust_amax_history_length(self, length: int, fwd: bool | None = None) -> None:
        """Grow or cut the amax history; delayed scaling only.

        As in Transformer Engine 2.20.2, each direction's history goes into the global buffers of
        both, so that a module which has run already fails at its next update.
        """
        buffer_info = self.fp8_meta.get(FP8GlobalStateManager.get_buffer_info())
        for forward in (True, False) if fwd is None else (fwd,):
            key = FP8GlobalStateManager.get_meta_tensor_key(forward)
            state = self.fp8_meta.get(key)
            if state is None or state.amax_history.shape[0] == length:
                continue
            history = state.amax_history.new_zeros(length, state.amax_history.shape[1])
            kept = min(length, state.amax_history.shape[0])
            history[:kept] = state.amax_history[:kept]
            state.amax_history = history
            self.quantizers[key] = state.make_quantizers()
            self._update_weight_quantizers()
            for position, buffer in (buffer_info[:2], buffer_info[2:]) if buffer_info else ():
                manager_state = FP8GlobalStateManager.quantization_state
                if buffer in manager_state.global_amax_buffer:
                    manager_state.global_amax_history_buffer[buffer][position] = history
                    manager_state.global_amax_buffer[buffer][position] = history[0]

    def _update_weight_quantizers(self) -> None:
        for weight, quantizer in zip(
            self._get_weight_tensors(), self._get_weight_quantizers(), strict=True
        ):
            if quantizer is not None and isinstance(weight, QuantizedTensor):
                weight.update_quantizer(quantizer)

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        """Weights as they enter the products."""
        raise NotImplementedError

    def _get_weight_quantizers(self) -> list[Quantizer | None]:
        """Quantizers of the weights, None where nothing is quantized."""
        raise NotImplementedError

    def init_fp8_meta_tensors(self, recipe: Any) -> None:
        """Make the states of both directions."""
        self.set_meta_tensor(True, recipe)
        self.set_meta_tensor(False, recipe)
        self.fast_setattr("fp8_meta_tensors_initialized", True)

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Take the ambient autocast over into the module.

        A recipe equal to the last one leaves everything as it is; a recipe of another class clears
        the cached weights, another parameter of the same class does not.
        """
        manager = FP8GlobalStateManager
        meta = self.fp8_meta
        self.fast_setattr("fp8_parameters", manager.with_fp8_parameters())
        self.fast_setattr("fp8", manager.is_fp8_enabled())
        self.fast_setattr("fp8_calibration", manager.is_fp8_calibration())
        enabled = self.fp8 or self.fp8_calibration
        meta["fp8_checkpoint"] = enabled
        if not (self.fp8_parameters or enabled):
            self.fast_setattr("fp8_initialized", False)
            return
        original = meta.get("recipe")
        current = manager.get_fp8_recipe()
        if self.fp8_initialized and current == original:
            return
        meta["recipe"] = current
        if self.fp8_parameters and not self.fp8_initialized:
            meta["num_gemms"] = num_gemms
            self.init_fp8_meta_tensors(current)
        if enabled:
            meta["num_gemms"] = num_gemms
            meta["fp8_group"] = manager.get_fp8_group()
            self.init_fp8_meta_tensors(current)
            self.fast_setattr("fp8_initialized", True)
        if original is not None and not (
            isinstance(current, type(original)) or isinstance(original, type(current))
        ):
            warnings.warn(
                f"Recipe type changed from {type(original).__name__} to {type(current).__name__}. "
                "This may affect model behavior.",
                stacklevel=2,
            )
            self._fp8_workspaces.clear()

    def _check_weight_recipes(self) -> None:
        """Refuse a region whose recipe is not that of the quantized parameters; not for groups.

        Raises:
            RuntimeError: For the first such parameter.
        """
        if not self.primary_weights_in_fp8 or not (self.fp8 or self.fp8_calibration):
            return
        recipe = self.fp8_meta["recipe"]
        for name in getattr(self, "weight_names", ()):
            weight = getattr(self, name)
            if isinstance(weight, QuantizedTensor):
                kind = weight._get_quantizer().recipe_kind
                if kind and kind != recipe_name(recipe):
                    raise RuntimeError(
                        f"Recipe mismatch for {name!r}: it was quantized by a {kind} recipe, but "
                        f"the region's is {type(recipe).__name__}"
                    )

    # --- phases of a forward ------------------------------------------------------------------

    def prepare_forward(
        self,
        inp: torch.Tensor,
        num_gemms: int = 1,
        allow_non_contiguous: bool = False,
        allow_different_data_and_param_types: bool = False,
    ) -> torch.Tensor:
        """Everything before the computation; a replay takes stashed scales, nothing else."""
        if self.fp8 and in_fp8_activation_recompute_phase():
            FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(self.fp8_meta)
        else:
            if self.tp_size > 1:
                raise NotImplementedError(
                    "transformer_engine (reference engine): the engine computes on one rank, but "
                    f"{type(self).__name__} was built for {self.tp_size} tensor parallel ranks"
                )
            self.set_activation_dtype(inp, allow_different_data_and_param_types)
            self.init_fp8_metadata(num_gemms=num_gemms)
            self._check_weight_recipes()
            if self.fp8 and has_delayed_scaling_state(self.fp8_meta):
                if not FP8GlobalStateManager.fp8_graph_capturing():
                    FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
                if is_fp8_activation_recompute_enabled():
                    FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(self.fp8_meta)
        if not allow_non_contiguous and not inp.is_contiguous():
            inp = inp.contiguous()
        return inp

    def end_forward(self) -> None:
        """Undo what a replay swapped in."""
        if self.fp8 and in_fp8_activation_recompute_phase():
            FP8GlobalStateManager.restore_fp8_meta_tensors(self.fp8_meta)

    @contextmanager
    def prepare_forward_ctx(self, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """``prepare_forward`` and ``end_forward`` around a computation."""
        inp = self.prepare_forward(inp, *args, **kwargs)
        try:
            yield inp
        finally:
            self.end_forward()

    def set_activation_dtype(
        self, inp: torch.Tensor, allow_different_data_and_param_types: bool = False
    ) -> None:
        """Compute in the input's dtype, or in that of ``torch.autocast``.

        Raises:
            TypeError: If a parameter has another dtype.
        """
        if torch.is_autocast_enabled("cpu"):
            self.fast_setattr("activation_dtype", torch.get_autocast_dtype("cpu"))
            return
        if self.activation_dtype == inp.dtype:
            return
        if not allow_different_data_and_param_types:
            for name, param in self.named_parameters():
                if param.dtype != inp.dtype:
                    raise TypeError(
                        "Data types for parameters must match when outside of autocasted "
                        f"region. Found input dtype: {inp.dtype} and {name!r} dtype: {param.dtype}"
                    )
        self.fast_setattr("activation_dtype", inp.dtype)

    def record_call(self, is_first_microbatch: bool | None, quantized: bool | None = None) -> None:
        """Note the call for ``transformer_engine.reference.calls``.

        Args:
            is_first_microbatch: As it was passed.
            quantized: Whether the call computes quantized; None where the module's state says so.
        """
        if reference.is_recording():
            quantized = self.fp8 if quantized is None else quantized
            precision = recipe_name(self.fp8_meta["recipe"]) if quantized else "bf16"
            reference.calls.append(
                reference.Call(
                    self,
                    precision,
                    is_first_microbatch,
                    in_fp8_activation_recompute_phase(),
                    torch.is_grad_enabled(),
                    self.training,
                    in_backward(),
                )
            )

    # --- parameters ---------------------------------------------------------------------------

    def register_parameter(self, name: str, param: Any, **kwargs: Any) -> None:
        """Register a parameter, and how it is initialized."""
        super().register_parameter(name, param)
        if "param_init_meta" in self.__dict__ and name not in self.param_init_meta:
            self.param_init_meta[name] = ParameterInit(**kwargs)

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialize the parameters, and quantize those that are to be."""
        if defer_init:
            return
        for name, param in list(self.named_parameters(recurse=False)):
            if param.device.type == "meta":
                param = torch.nn.Parameter(torch.empty_like(param, device="cpu"))
            init = self.param_init_meta[name]
            assert init.init_fn is not None
            if init.get_rng_state_tracker is None:
                init.init_fn(param)
            else:
                tracker_name = getattr(self, "rng_tracker_name", None)
                arguments = (tracker_name,) if tracker_name else ()
                with init.get_rng_state_tracker().fork(*arguments):
                    init.init_fn(param)
            if self.primary_weights_in_fp8 and init.fp8_meta_index is not None:
                param = self._quantized_parameter(param, init.fp8_meta_index)
            self.module_setattr(name, param)

    def _quantized_parameter(self, param: torch.Tensor, slot: int) -> torch.nn.Parameter:
        quantizer = self.quantizers["scaling_fwd"][slot]
        quantizer.set_usage(rowwise=True, columnwise=torch.is_grad_enabled())
        quantizer.internal = False
        values = param.detach()
        quantized = quantizer.quantize(values)
        reference.counters.weight_quantizations += 1
        # Marks a weight: its later updates count as quantizations.
        quantized._source = values.clone()
        result = torch.nn.Parameter(quantized)
        if self.preserve_high_precision_init_val:
            result._high_precision_init_val = values.clone()  # type: ignore[attr-defined]
            for function in (get_high_precision_init_val, clear_high_precision_init_val):
                setattr(result, function.__name__, MethodType(function, result))
        return result

    # --- delayed weight gradients -------------------------------------------------------------

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], Any]
    ) -> None:
        """Call the hook after each ``backward_dw``."""
        self.wgrad_accumulation_and_reduce_hooks.append(wgrad_accumulation_and_reduce_hook)

    def need_backward_dw(self) -> bool:
        """Whether ``backward_dw`` has something to do."""
        return self.wgrad_store is not None and self.wgrad_store.delay_wgrad_compute()

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    # --- checkpoints --------------------------------------------------------------------------

    def get_extra_state(self) -> torch.Tensor:
        """Scales and amaxes of delayed scaling as bytes, uint8; empty for what keeps no state."""
        enabled = self.fp8_meta["fp8_checkpoint"] or self.fp8 or self.fp8_calibration
        if not enabled or not has_delayed_scaling_state(self.fp8_meta):
            return torch.empty(0, dtype=torch.uint8)
        state: dict[str, Any] = {"recipe": self.fp8_meta["recipe"]}
        for key, suffix in (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd")):
            state[f"scale_{suffix}"] = self.fp8_meta[key].scale.clone()
            state[f"amax_history_{suffix}"] = self.fp8_meta[key].amax_history.clone()
        state["extra_fp8_variables"] = {
            key: value
            for key, value in self.fp8_meta.items()
            if key != FP8GlobalStateManager.get_buffer_info()
            and isinstance(value, (bool, int, float, str, tuple, list))
        }
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        """Load what ``get_extra_state`` gave.

        Raises:
            RuntimeError: NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE is not 1. Scales of delayed scaling
                are stored as a pickle, which can run anything.

        Source: Transformer Engine 2.20.2, ``_extra_state.py``.
        """
        if state is None or state.numel() == 0:
            return
        if os.getenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "0") != "1":
            raise RuntimeError(
                "Refusing to load pickled extra state of delayed scaling for "
                f"{type(self).__name__}: loading it can execute arbitrary code. Where the "
                "checkpoint is trusted, set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1."
            )
        loaded = pickle.loads(state.detach().cpu().numpy().tobytes())
        if loaded is None:
            return
        self.fp8_meta.update(loaded["extra_fp8_variables"])
        self.fp8_meta["recipe"] = loaded["recipe"]
        self.fp8_meta.pop("global_fp8_buffer_pos_fwd_recompute", None)
        self.init_fp8_meta_tensors(loaded["recipe"])
        if has_delayed_scaling_state(self.fp8_meta):
            for key, suffix in (("scaling_fwd", "fwd"), ("scaling_bwd", "bwd")):
                self.fp8_meta[key].scale.copy_(loaded[f"scale_{suffix}"])
                self.fp8_meta[key].amax_history.copy_(loaded[f"amax_history_{suffix}"])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Scales first: writing a quantized parameter needs them."""
        if self.primary_weights_in_fp8:
            self.set_extra_state(state_dict.get(f"{prefix}_extra_state"))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread now."""
    task: int = torch._C._current_graph_task_id()
    return task != -1


def get_high_precision_init_val(parameter: torch.Tensor) -> torch.Tensor | None:
    """What a quantized parameter was initialized from, until it is cleared."""
    return getattr(parameter, "_high_precision_init_val", None)


def clear_high_precision_init_val(parameter: torch.Tensor) -> None:
    """Release it."""
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val

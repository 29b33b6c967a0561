# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Autocast: the process-wide state of quantization, its nesting, and the reduction of amaxes.

Models TE 2.20, ``pytorch/quantization.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe, recipe_name
from transformer_engine.pytorch._recipe_state import (
    DelayedScalingRecipeState as DelayedScalingRecipeState,
)
from transformer_engine.pytorch._recipe_state import RecipeState as RecipeState
from transformer_engine.pytorch._recipe_state import (
    get_fp8_max,
    has_delayed_scaling_state,
    update_amax_and_scale,
)
from transformer_engine.pytorch._recipe_state import get_fp8_torch_dtype as get_fp8_torch_dtype

_BUFFER_INFO = "buffer_index_and_autocast_key"
_RECOMPUTE_POSITION = "global_fp8_buffer_pos_fwd_recompute"


@dataclass
class FP8GlobalState:
    """The mutable state, by TE's names. ``reset()`` replaces the instance: always look it up."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Any = None
    fp8_distributed_group: Any = None
    fp8_parameters: bool = False
    high_precision_init_val: bool = False
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque[list[torch.Tensor]]] = field(default_factory=list)
    autocast_arguments: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    skip_fp8_weight_update_tensor: torch.Tensor | None = None


def get_default_fp8_recipe() -> Recipe:
    """What an autocast without a recipe means on Hopper."""
    return DelayedScaling()


get_default_recipe = get_default_fp8_recipe


def get_align_size_for_quantization(recipe: Recipe) -> int:
    """Rows to which the tokens of an expert are padded."""
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


class FP8GlobalStateManager:
    """Class methods over ``quantization_state``; never instantiated."""

    quantization_state = FP8GlobalState()

    @classmethod
    def reset(cls) -> None:
        """Forget everything, inside an autocast region too."""
        cls.quantization_state = FP8GlobalState()

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool) -> None:
        """Make the flag that guards weight updates of a captured graph, and set it."""
        state = cls.quantization_state
        if state.skip_fp8_weight_update_tensor is None:
            state.skip_fp8_weight_update_tensor = torch.empty(1, dtype=torch.float32)
        state.skip_fp8_weight_update_tensor.fill_(skip)

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> torch.Tensor | None:
        """[1], fp32; 1 skips the update. None before the first set."""
        return cls.quantization_state.skip_fp8_weight_update_tensor

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """The engine emulates every format on any machine."""
        return True, ""

    is_mxfp8_available = is_fp8_available
    is_fp8_block_scaling_available = is_fp8_available
    is_nvfp4_available = is_fp8_available

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """Key of a direction's state in ``fp8_meta``."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def get_buffer_info(cls) -> str:
        """Key under which ``fp8_meta`` keeps its place in the global buffers."""
        return _BUFFER_INFO

    @staticmethod
    def get_unique_autocast_key(recipe: Recipe | None = None, group: Any = None) -> str:
        """Equal for equal recipes over the same group."""
        return f"recipe={recipe!r},group={None if group is None else id(group)}"

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe, fp8_group: Any) -> str:
        """Key of a direction in the global buffers."""
        direction = "forward" if forward else "backward"
        return f"{direction}_{cls.get_unique_autocast_key(fp8_recipe, fp8_group)}"

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict[str, Any]) -> None:
        """Enter a module's amaxes and scales, once in its life; delayed scaling only."""
        if not has_delayed_scaling_state(fp8_meta) or _BUFFER_INFO in fp8_meta:
            return
        state = cls.quantization_state
        fp8_meta[_BUFFER_INFO] = []
        for forward in (True, False):
            name = cls.get_meta_tensor_key(forward)
            if name not in fp8_meta:
                continue
            key = cls.get_key_in_buffer(forward, fp8_meta["recipe"], fp8_meta["fp8_group"])
            amaxes = state.global_amax_buffer.setdefault(key, [])
            amaxes.append(fp8_meta[name].amax_history[0])
            histories = state.global_amax_history_buffer.setdefault(key, [])
            histories.append(fp8_meta[name].amax_history)
            state.global_scale_buffer.setdefault(key, []).append(fp8_meta[name].scale)
            fp8_meta[_BUFFER_INFO].extend((len(amaxes) - 1, key))

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether a quantized autocast is active."""
        return cls.quantization_state.fp8_enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        """Whether amaxes are observed without quantizing."""
        return cls.quantization_state.fp8_calibration

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules made now hold quantized parameters."""
        return cls.quantization_state.fp8_parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether quantized parameters keep what they were initialized from."""
        return cls.quantization_state.high_precision_init_val

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether the region is captured into a CUDA graph; on the CPU, as the state says."""
        return cls.quantization_state.fp8_graph_capturing

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True for the first caller of an outermost region: its backward reduces the amaxes."""
        first = cls.quantization_state.is_first_fp8_module
        cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        """Recipe of the region, the default outside one."""
        recipe = cls.quantization_state.fp8_recipe
        return get_default_fp8_recipe() if recipe is None else recipe

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Process group over which amaxes are reduced."""
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        """Enabled, calibration, recipe, group, is_first_fp8_module, graph_capturing."""
        state = cls.quantization_state
        return (
            state.fp8_enabled,
            state.fp8_calibration,
            state.fp8_recipe,
            state.fp8_distributed_group,
            state.is_first_fp8_module,
            state.fp8_graph_capturing,
        )

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        """Restore what ``get_autocast_state`` returned; the depth is not part of it."""
        current = cls.quantization_state
        (
            current.fp8_enabled,
            current.fp8_calibration,
            current.fp8_recipe,
            current.fp8_distributed_group,
            current.is_first_fp8_module,
            current.fp8_graph_capturing,
        ) = state

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Reduce the amaxes of a direction over their groups and compute the next scales."""
        state = cls.quantization_state
        wanted = "forward" if forward else "backward"
        for key, amaxes in state.global_amax_buffer.items():
            direction, _, autocast_key = key.partition("_")
            if direction != wanted or not amaxes:
                continue
            recipe, group = state.autocast_arguments[autocast_key]
            distributed = recipe.reduce_amax and torch.distributed.is_initialized()
            if distributed and torch.distributed.get_world_size(group=group) > 1:
                packed = torch.cat(amaxes)
                torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX, group=group)
                parts = packed.split([len(amax) for amax in amaxes])
                for amax, part in zip(amaxes, parts, strict=True):
                    amax.copy_(part)
            fp8_max = get_fp8_max(recipe, forward)
            with torch.no_grad():
                for history, scale in zip(
                    state.global_amax_history_buffer[key],
                    state.global_scale_buffer[key],
                    strict=True,
                ):
                    update_amax_and_scale(history, scale, fp8_max, recipe)

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Take the region's settings; only the outermost region marks a first module."""
        recipe = get_default_fp8_recipe() if fp8_recipe is None else fp8_recipe
        state = cls.quantization_state
        state.autocast_arguments[cls.get_unique_autocast_key(recipe, fp8_group)] = (
            recipe,
            fp8_group,
        )
        state.fp8_enabled = enabled
        state.fp8_calibration = calibrating
        state.fp8_recipe = recipe
        state.fp8_distributed_group = fp8_group
        state.fp8_graph_capturing = _graph
        if state.autocast_depth == 0:
            state.is_first_fp8_module = True
        state.autocast_depth += 1

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """Leave a region; the outermost, with grad enabled, reduces the forward's amaxes."""
        state = cls.quantization_state
        state.autocast_depth -= 1
        if enabled and state.autocast_depth == 0 and not _graph and torch.is_grad_enabled():
            cls.reduce_and_update_fp8_tensors(forward=True)

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Stash the forward's scales for its replay: one first-in-first-out queue a module."""
        if not has_delayed_scaling_state(fp8_meta):
            return
        forward = fp8_meta["scaling_fwd"]
        stash = [forward.amax_history.clone(), forward.scale.clone()]
        queues = cls.quantization_state.fp8_tensors_recompute_buffer
        if _RECOMPUTE_POSITION not in fp8_meta:
            queues.append(deque())
            fp8_meta[_RECOMPUTE_POSITION] = len(queues) - 1
        queues[fp8_meta[_RECOMPUTE_POSITION]].append(stash)

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict[str, Any]) -> None:
        """Swap the stashed scales in for a replay.

        Raises:
            KeyError: If the module never stashed any.
            IndexError: If it replays more often than it stashed.
        """
        if not has_delayed_scaling_state(fp8_meta):
            return
        forward = fp8_meta["scaling_fwd"]
        fp8_meta["updated_amax_history_fwd"] = forward.amax_history.clone()
        fp8_meta["updated_scale_fwd"] = forward.scale.clone()
        queues = cls.quantization_state.fp8_tensors_recompute_buffer
        history, scale = queues[fp8_meta[_RECOMPUTE_POSITION]].popleft()
        forward.amax_history.copy_(history)
        forward.scale.copy_(scale)

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict[str, Any]) -> None:
        """Put the latest scales back after a replay."""
        if not has_delayed_scaling_state(fp8_meta):
            return
        fp8_meta["scaling_fwd"].amax_history.copy_(fp8_meta["updated_amax_history_fwd"])
        fp8_meta["scaling_fwd"].scale.copy_(fp8_meta["updated_scale_fwd"])


class autocast:
    """Quantize what the modules inside compute. An instance can be entered again, not nested."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        _graph: bool = False,
    ) -> None:
        self._arguments = (enabled, calibrating, recipe, amax_reduction_group, _graph)
        self._state: tuple[Any, ...] | None = None

    def __enter__(self) -> autocast:
        if self._state is not None:
            raise RuntimeError(
                "autocast context manager cannot be entered more than once concurrently"
            )
        enabled, _, recipe, _, _ = self._arguments
        if enabled and recipe is not None:
            recipe_name(recipe)
        self._state = FP8GlobalStateManager.get_autocast_state()
        FP8GlobalStateManager.autocast_enter(*self._arguments)
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._state is not None
        try:
            FP8GlobalStateManager.set_autocast_state(self._state)
            FP8GlobalStateManager.autocast_exit(self._arguments[0], self._arguments[4])
        finally:
            self._state = None


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> autocast:
    """The older name of ``autocast``, which Megatron still calls."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Make the modules built inside hold quantized parameters."""
    state = FP8GlobalStateManager.quantization_state
    saved = (state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val)
    state.fp8_parameters = enabled
    state.fp8_recipe = get_default_fp8_recipe() if recipe is None else recipe
    state.high_precision_init_val = preserve_high_precision_init_val
    try:
        yield
    finally:
        state.fp8_parameters, state.fp8_recipe, state.high_precision_init_val = saved


def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Any:
    """The older name of ``quantized_model_init``."""
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)

# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""TE's own activation checkpoint, reentrant and not.

Models TE 2.20, ``checkpoint`` in ``pytorch/distributed.py``: the replay runs under the
forward's autocast (its recipe, not its amax group) and phase True, the autocast innermost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import detach_variable, noop_context_fn

from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    get_activation_recompute_contexts,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, autocast


def _has_te_modules(function: Any) -> bool:
    from transformer_engine.pytorch.attention import DotProductAttention
    from transformer_engine.pytorch.module import LayerNorm, RMSNorm
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    if not isinstance(function, torch.nn.Module):
        # What a callable runs cannot be seen.
        return True
    kinds = (LayerNorm, RMSNorm, TransformerEngineBaseModule, DotProductAttention)
    return any(isinstance(module, kinds) for module in function.modules())


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Recompute ``function`` in the backward pass instead of keeping its activations.

    Args:
        function: What to run; a module without TE modules goes to PyTorch's own checkpoint.
        *args: Its positional arguments.
        **kwargs: ``use_reentrant`` (True), ``distribute_saved_activations``, ``tp_group``,
            ``get_rng_state_tracker``, ``context_fn``, ``determinism_check``, ``debug``; the rest is
            passed on to the function.

    Raises:
        NotImplementedError: With ``distribute_saved_activations``: the engine has one rank.
    """
    use_reentrant = kwargs.pop("use_reentrant", True)
    distribute = kwargs.pop("distribute_saved_activations", False)
    kwargs.pop("tp_group", None)
    tracker = kwargs.pop("get_rng_state_tracker", None)
    context_fn = kwargs.pop("context_fn", noop_context_fn)
    determinism_check = kwargs.pop("determinism_check", "default")
    debug = kwargs.pop("debug", False)
    if not _has_te_modules(function):
        return torch_checkpoint(
            function,
            *args,
            use_reentrant=use_reentrant,
            context_fn=context_fn,
            determinism_check=determinism_check,
            debug=debug,
            **kwargs,
        )
    if not torch.is_grad_enabled():
        with context_fn()[0]:
            return function(*args, **kwargs)
    if use_reentrant:
        if distribute:
            raise NotImplementedError("the reference engine does not distribute activations")
        return _CheckpointFunction.apply(function, tracker, context_fn, kwargs, *args)

    user_forward, user_recompute = context_fn()
    te_forward, te_recompute = get_activation_recompute_contexts()
    fp8 = FP8GlobalStateManager.is_fp8_enabled()
    recipe = FP8GlobalStateManager.get_fp8_recipe() if fp8 else None

    def replay() -> None:
        te_autocast = autocast(enabled=fp8, recipe=recipe)
        with torch.enable_grad(), te_recompute, user_recompute, te_autocast:
            function(*args, **kwargs)

    frame = _Frame(replay, _RngStates(tracker))
    with _SavedPlaces(frame), te_forward, user_forward:
        return function(*args, **kwargs)


class _RngStates:
    """The states of the generator and of a tracker, taken at construction."""

    def __init__(self, tracker: Callable[[], Any] | None) -> None:
        self.tracker = tracker
        self._state = torch.get_rng_state()
        self._named = tracker().get_states() if tracker is not None else None

    def restore(self) -> None:
        """Set them again."""
        torch.set_rng_state(self._state)
        if self.tracker is not None:
            self.tracker().set_states(self._named)


class _CheckpointFunction(torch.autograd.Function):
    """Reentrant form: the replay and its backward run inside this function's backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        function: Callable[..., Any],
        tracker: Callable[[], Any] | None,
        context_fn: Callable[[], Any],
        kwargs: dict[str, Any],
        *args: Any,
    ) -> Any:
        ctx.function = function
        ctx.rng = _RngStates(tracker)
        forward_context, ctx.recompute_context = context_fn()
        # A region that needs no gradient inherits an enclosing replay's phase.
        region = (
            activation_recompute_forward(activation_recompute=True, recompute_phase=False)
            if any(ctx.needs_input_grad)
            else nullcontext()
        )
        with torch.no_grad(), forward_context, region:
            outputs = function(*args, **kwargs)
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, torch.Tensor) else None for arg in args))
        ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        ctx.recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None
        ctx.tracker = tracker
        ctx.kwargs = kwargs
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        if not torch.autograd._is_checkpoint_valid():  # type: ignore[attr-defined]
            raise RuntimeError(
                "Checkpointing is not compatible with .grad(), please use .backward() if possible"
            )
        inputs = tuple(
            other if tensor is None else tensor
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        )
        outer = _RngStates(ctx.tracker)
        ctx.rng.restore()
        detached = detach_variable(inputs)
        phase = activation_recompute_forward(activation_recompute=True, recompute_phase=True)
        te_autocast = autocast(enabled=ctx.fp8, recipe=ctx.recipe)
        with torch.enable_grad(), ctx.recompute_context, phase, te_autocast:
            outputs = ctx.function(*detached, **ctx.kwargs)
        outer.restore()
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        if not pairs:
            raise RuntimeError(
                "none of output has requires_grad=True, this checkpoint() is not necessary"
            )
        torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        grads = tuple(arg.grad if isinstance(arg, torch.Tensor) else None for arg in detached)
        return (None, None, None, None, *grads)


class _Frame:
    """Activations of one region, filled by its replay."""

    def __init__(self, replay: Callable[[], None], states: _RngStates) -> None:
        self.replay = replay
        self.states = states
        self.tracker = states.tracker
        self.count = 0
        self.recomputed: list[torch.Tensor | None] = []

    def fetch(self, index: int) -> torch.Tensor | None:
        """The activation saved at ``index``, once: the first request replays the region."""
        if not self.recomputed:
            outer = _RngStates(self.tracker)
            self.states.restore()
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda saved: saved):
                self.replay()
            outer.restore()
        activation = self.recomputed[index]
        self.recomputed[index] = None
        return activation

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self.recomputed.append(tensor.detach())
        return tensor.detach()


class _SavedPlaces(torch.autograd.graph.saved_tensors_hooks):
    """Keep places instead of activations during a forward."""

    def __init__(self, frame: _Frame) -> None:
        def pack(_: torch.Tensor) -> int:
            frame.count += 1
            return frame.count - 1

        super().__init__(pack, frame.fetch)

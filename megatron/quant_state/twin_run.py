# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Runs a twin's pipeline stages in one process and notes what each linear did. Worker only.

A stage's output is handed to the next as Megatron's schedules hand it on: activations [s, b, h]
forward, their gradients backward. The calls come from the reference engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron.quant_state.model import ModelDescription
from megatron.quant_state.stages import Stage, at_stage, build_stage, pipeline_stages

__all__ = ["Microbatch", "Seen", "TwinRun"]

# The first microbatch of a step and a later one; all later ones are alike.
_MOST_MICROBATCHES = 2


@dataclass
class Microbatch:
    """What one module did in one microbatch, its calls in order.

    Attributes:
        forward: precision and flag of each call of the forward.
        ambient: the recipe that was on around each of these calls, ``bf16`` for none.
        replay: precision and flag of each call that a recomputation in the backward made.
        rows: tokens that went through it, summed over the forward's calls.
    """

    forward: list[tuple[str, bool | None]] = field(default_factory=list)
    ambient: list[str] = field(default_factory=list)
    replay: list[tuple[str, bool | None]] = field(default_factory=list)
    rows: int = 0


@dataclass
class Seen:
    """What one module did in the last step and in evaluation (precision and ambient recipe)."""

    training: dict[int, Microbatch] = field(default_factory=dict)
    evaluation: Microbatch = field(default_factory=Microbatch)


class TwinRun:
    """The twin's stages, on the CPU engine, and what was seen of their modules.

    Args:
        twin: the twin's description, with its pipeline split.
    """

    def __init__(self, twin: ModelDescription) -> None:
        import torch

        self.twin = twin
        self.stages: list[tuple[Stage, Any]] = []
        for stage in pipeline_stages(twin):
            with at_stage(stage):
                self.stages.append((stage, build_stage(twin, stage)))
        self.microbatches = min(twin.num_microbatches, _MOST_MICROBATCHES)
        self.weight_quantizations = 0
        self.seen: dict[int, Seen] = {}
        self._phase: int | str = "none"
        for _, model in self.stages:
            for parameter in model.parameters():
                parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float32)
        self._hook_products()

    def train(self) -> None:
        """One step; what was seen before is forgotten."""
        import torch
        from transformer_engine import reference

        self.seen.clear()
        reference.counters.reset()
        for _, model in self.stages:
            # As schedules.forward_step does for the first microbatch of a step.
            model.set_is_first_microbatch()
        for microbatch in range(self.microbatches):
            reference.record_calls(True)
            self._phase = microbatch
            passed = list(self._forward(microbatch))
            for call in reference.calls:
                done = self._of(call.module, microbatch)
                done.forward.append((call.precision, call.is_first_microbatch))
            reference.record_calls(True)
            self._phase = "backward"
            gradient: Any = None
            stages = zip(reversed(self.stages), reversed(passed), strict=True)
            for (stage, _), (given, output) in stages:
                with at_stage(stage):
                    torch.autograd.backward(output, gradient)
                gradient = None if given is None else given.grad
            for call in reference.calls:
                done = self._of(call.module, microbatch)
                done.replay.append((call.precision, call.is_first_microbatch))
        reference.record_calls(False)
        self.weight_quantizations = reference.counters.weight_quantizations

    def evaluate(self) -> None:
        """One forward in evaluation mode, without gradients."""
        import torch
        from transformer_engine import reference

        for _, model in self.stages:
            model.eval()
        reference.record_calls(True)
        self._phase = "evaluation"
        with torch.no_grad():
            list(self._forward(0))
        for call in reference.calls:
            done = self._of(call.module, "evaluation")
            done.forward.append((call.precision, call.is_first_microbatch))
        reference.record_calls(False)

    def observed(self) -> Iterator[dict[str, Any]]:
        """Values for JSON, a stage each."""
        tokens = self.twin.seq_length * self.twin.micro_batch_size
        for stage, model in self.stages:
            modules = {}
            for name, module in model.named_modules():
                seen = self.seen.get(id(module))
                if seen is None:
                    continue
                steps = [seen.training.get(i, Microbatch()) for i in range(self.microbatches)]
                modules[name] = {
                    "has_rule": getattr(module, "te_quant_params", None) is not None,
                    "microbatches": [{**vars(step), "rows": step.rows / tokens} for step in steps],
                    "evaluation": vars(seen.evaluation),
                    "storage": _storage(module),
                    "cached": len(getattr(module, "_fp8_workspaces", ())) > 0,
                }
            yield {"pp": stage.pp_rank, "vp": stage.vp_stage, "modules": modules}

    def _of(self, module: object, phase: int | str) -> Microbatch:
        seen = self.seen.setdefault(id(module), Seen())
        if isinstance(phase, int):
            return seen.training.setdefault(phase, Microbatch())
        return seen.evaluation

    def _forward(self, microbatch: int) -> Iterator[tuple[Any, Any]]:
        """Input and output of each stage; the input is a leaf, None for the first stage."""
        import torch

        twin, given = self.twin, None
        generator = torch.Generator().manual_seed(microbatch)
        shape = (twin.micro_batch_size, twin.seq_length + 1)
        tokens = torch.randint(twin.vocab_size, shape, generator=generator)
        positions = torch.arange(twin.seq_length).expand(twin.micro_batch_size, -1)
        mask = torch.ones(twin.micro_batch_size, twin.seq_length)
        for stage, model in self.stages:
            if given is not None:
                given = given.detach().requires_grad_(torch.is_grad_enabled())
            with at_stage(stage):
                model.set_input_tensor(given)
                output = model(
                    tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask
                )
                if stage.post_process:
                    output = output.mean()
            yield given, output
            given = output

    def _hook_products(self) -> None:
        """Look at each linear before its forward: what is on around it, how many rows it gets.

        TE's linears note their calls themselves; Megatron's own (output layer, router) are noted
        here, and run in the model's dtype always.
        """
        from transformer_engine.common.recipe import recipe_name
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
        from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

        def note(module: Any, given: tuple[Any, ...]) -> None:
            if self._phase == "backward":
                return
            done = self._of(module, self._phase)
            ambient = "bf16"
            if FP8GlobalStateManager.is_fp8_enabled():
                ambient = recipe_name(FP8GlobalStateManager.get_fp8_recipe())
            done.ambient.append(ambient)
            done.rows += given[0].numel() // given[0].shape[-1] if given else 0
            if not isinstance(module, TransformerEngineBaseModule):
                done.forward.append(("bf16", None))

        for _, model in self.stages:
            for module in model.modules():
                weights = [p for n, p in module._parameters.items() if n.startswith("weight")]
                has_product = any(p is not None and p.dim() == 2 for p in weights)
                if has_product and "Embedding" not in type(module).__name__:
                    module.register_forward_pre_hook(note)


def _storage(module: Any) -> str | None:
    """How the weight is held: the quantized type's name, or None for high precision."""
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensor

    for name, parameter in module._parameters.items():
        if name.startswith("weight") and isinstance(parameter, QuantizedTensor):
            return type(parameter).__name__
    return None

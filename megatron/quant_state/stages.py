# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Pipeline stages one after another in one process, without a process group of that size.

Runs in a worker process. ``parallel_state`` has overrides for pipeline sizes and ranks, which some
of Megatron asks; the rest asks the process group that the model was given. Both must say the same:
the overrides alone make wrong layer numbers under VPP, the group alone builds MTP on every stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.quant_state.build import build_model
from megatron.quant_state.model import ModelDescription

__all__ = ["Stage", "at_stage", "build_stage", "layer_numbers", "on_device", "pipeline_stages"]


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline; ranks count from 0.

    Attributes:
        pp_rank, vp_stage: which stage; ``vp_stage`` is None without virtual stages.
        pp_size, vp_size: of how many.
    """

    pp_rank: int
    vp_stage: int | None
    pp_size: int
    vp_size: int | None

    @property
    def pre_process(self) -> bool:
        """Whether it has the embedding."""
        return self.pp_rank == 0 and not self.vp_stage

    @property
    def post_process(self) -> bool:
        """Whether it has the output layer."""
        last_virtual = self.vp_size is None or self.vp_stage == self.vp_size - 1
        return self.pp_rank == self.pp_size - 1 and last_virtual

    @property
    def name(self) -> str:
        """``pp1`` or ``pp1 vp0``."""
        return f"pp{self.pp_rank}" + ("" if self.vp_stage is None else f" vp{self.vp_stage}")


class _PipelineGroup:
    """What Megatron asks of the pipeline's process group, answered for one stage.

    Args:
        group: the real group of this process; answers everything else.
        stage: the stage that the process plays.
    """

    def __init__(self, group: Any, stage: Stage) -> None:
        self._group, self._stage = group, stage

    def rank(self) -> int:
        return self._stage.pp_rank

    def size(self) -> int:
        return self._stage.pp_size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def pipeline_stages(description: ModelDescription) -> list[Stage]:
    """All stages, in the order in which a microbatch passes them."""
    parallel = description.parallel
    pp_size = parallel.get("pipeline_model_parallel_size") or 1
    vp_size = parallel.get("virtual_pipeline_model_parallel_size")
    layout = parallel.get("pipeline_model_parallel_layout")
    if layout is not None and vp_size is None:
        # Megatron's own config derives it in the same way.
        vp_size = _layout_stages(layout) // pp_size
    if vp_size == 1:
        vp_size = None
    virtual = [None] if vp_size is None else list(range(vp_size))
    return [Stage(pp, vp, pp_size, vp_size) for vp in virtual for pp in range(pp_size)]


def _layout_stages(layout: Any) -> int:
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    if isinstance(layout, str):
        return len(PipelineParallelLayerLayout.parse_str_to_list(layout))
    return len(layout)


@contextmanager
def at_stage(stage: Stage) -> Iterator[None]:
    """The process plays one stage; saves and restores ``parallel_state``'s overrides."""
    from megatron.core import parallel_state as state

    names = (
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    )
    before = {name: getattr(state, name) for name in names}
    state.set_pipeline_model_parallel_world_size(stage.pp_size)
    state.set_pipeline_model_parallel_rank(stage.pp_rank)
    state.set_virtual_pipeline_model_parallel_world_size(stage.vp_size)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(state, name, value)


def build_stage(description: ModelDescription, stage: Stage, *, device: str = "cpu") -> Any:
    """The GPTModel of one stage; see :func:`build.build_model`.

    The stage must be the one that the process plays (:func:`at_stage`), here and in its forward.

    Raises:
        InputError: what Megatron refuses.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.pp = _PipelineGroup(groups.pp, stage)
    with on_device(device):
        return build_model(
            description,
            pre_process=stage.pre_process,
            post_process=stage.post_process,
            vp_stage=stage.vp_stage,
            pg_collection=groups,
            device=device,
        )


@contextmanager
def on_device(device: str) -> Iterator[None]:
    """What is built inside lies on ``device``.

    Megatron's embedding and output layer name the current CUDA device, whatever is the default. On
    the meta device that must be it too, or the vocabulary takes gigabytes for nothing.
    """
    import torch

    if device != "meta":
        with torch.device(device):
            yield
        return
    cuda: Any = torch.cuda
    # Transformer Engine refuses to be built where there is no GPU; nothing is asked of one.
    stand_ins: dict[str, Any] = {
        "current_device": lambda: torch.device("meta"),
        "is_available": lambda: True,
    }
    try:
        cuda.Stream()
    except (RuntimeError, AssertionError):
        # Nothing runs on the streams that the experts make; without a GPU there are none.
        stand_ins["Stream"] = lambda *_, **__: None
    before = {name: getattr(cuda, name) for name in stand_ins}
    try:
        for name, stand_in in stand_ins.items():
            setattr(cuda, name, stand_in)
        with torch.device(device):
            yield
    finally:
        for name, value in before.items():
            setattr(cuda, name, value)


_LAYER = re.compile(r"^decoder\.layers\.(\d+)$")


def layer_numbers(model: Any) -> dict[int, int]:
    """Local layer index in a stage's module paths to the model's, both from 0."""
    found: dict[int, int] = {}
    for name, module in model.named_modules():
        match = _LAYER.match(name)
        if match:
            # Megatron counts from 1.
            found[int(match[1])] = int(module.layer_number) - 1
    return found

# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Worker of a plan: builds each pipeline stage of a model and writes down what its linears do.

Started as ``python -m megatron.quant_state.reference -m megatron.quant_state.survey JOB PART``.
JOB is a folder with ``job.json``; PART is ``names``, the full model on the meta device, ``calls``,
a run of the twin, or ``real_names``, which is ``names`` in a plain Python process with the real
Transformer Engine; where that cannot be used, its last event is ``unavailable``. Events go to
``JOB/PART/events.jsonl``, one JSON object a line. The process ends when its stdin is closed.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.quant_state.errors import InputError
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.package_info import __version__
from megatron.quant_state.worker import Write, end_with_parent, work

__all__ = ["main"]

# The second step: what a step does once the first has filled the caches and moved the flags.
_STEPS = 2


def main(arguments: list[str]) -> int:
    """Survey.

    Args:
        arguments: the job's folder and ``names``, ``calls`` or ``real_names``.

    Returns:
        int: 0 done; 2 the input cannot be used, with the error as the last event.
    """
    return work(arguments, _survey)


def _survey(job: Path, part: str, given: dict[str, Any], write: Write) -> None:
    if part == "names":
        _names(given, write, "none (reference engine)")
    elif part == "real_names":
        _real_names(given, write)
    else:
        _calls(given, write)


def _real_names(given: dict[str, Any], write: Write) -> None:
    try:
        import torch  # noqa: F401 - TE finds the CUDA libraries that torch has loaded
        from transformer_engine import __version__ as te_version
        from transformer_engine.pytorch import Linear  # noqa: F401 - it loads TE's own library

        _names(given, write, str(te_version).partition("+")[0])
    except InputError:
        raise
    except Exception as error:
        # A build for another torch or another machine fails in many ways.
        write("unavailable", reason=" ".join(f"{type(error).__name__}: {error}".split())[:300])


def _names(given: dict[str, Any], write: Write, te_version: str) -> None:
    import torch

    from megatron.quant_state import build, stages
    from megatron.quant_state.megatron_config import megatron_version

    build.check_model(ModelDescription.from_dict(given["model"]))
    full = ModelDescription.from_dict(given["full"])
    build.initialize_single_process()
    config = build.build_transformer_config(full)
    write(
        "config",
        values={name: _plain(getattr(config, name, None)) for name in given["config_fields"]},
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": torch.__version__,
            "megatron-core": megatron_version(),
            "transformer-engine": te_version,
            "megatron-quant-state": __version__,
        },
    )
    # Asks for a CUDA extension, and changes no name and no shape.
    unfused = {**full.transformer_config, "gradient_accumulation_fusion": False}
    full = replace(full, transformer_config=unfused)
    for stage in stages.pipeline_stages(full):
        with stages.at_stage(stage):
            model = stages.build_stage(full, stage, device="meta")
        write(
            "stage",
            pp=stage.pp_rank,
            vp=stage.vp_stage,
            layers=sorted(stages.layer_numbers(model).items()),
            modules=[_described(name, module) for name, module in _with_weights(model)],
        )


def _calls(given: dict[str, Any], write: Write) -> None:
    from megatron.quant_state import build
    from megatron.quant_state.twin_run import TwinRun

    twin = ModelDescription.from_dict(given["twin"])
    build.initialize_single_process()
    run = TwinRun(twin)
    write("built")
    for step in range(1, _STEPS + 1):
        run.train()
        write("step", step=step)
    run.evaluate()
    for values in run.observed():
        write("stage", **values)
    write("done", weight_quantizations=run.weight_quantizations)


def _with_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that hold parameters themselves."""
    for name, module in model.named_modules():
        if module._parameters and any(p is not None for p in module._parameters.values()):
            yield name, module


def _described(name: str, module: Any) -> dict[str, Any]:
    own = {key: p for key, p in module._parameters.items() if p is not None}
    weights = [p for key, p in own.items() if key.startswith("weight") and p.dim() == 2]
    # TE's fused norm and the norms themselves have 1-D weights, which no GEMM reads.
    return {
        "name": name,
        "class": type(module).__name__,
        "ruled": hasattr(module, "finish_init"),
        "has_rule": getattr(module, "te_quant_params", None) is not None,
        "parameters": sum(p.numel() for p in own.values()),
        "weights": len(weights),
        "weight_elements": sum(p.numel() for p in weights),
        "weight_shape": list(weights[0].shape) if weights else None,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float)):
        return value
    # A str that is an enum's member stays its value.
    return str(getattr(value, "value", value))


if __name__ == "__main__":
    end_with_parent()
    # Megatron's advice, once a stage; nobody reads it unless the process fails.
    logging.disable(logging.WARNING)
    sys.exit(main(sys.argv[1:]))

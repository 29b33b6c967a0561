# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Worker of a rehearsal: one process trains one model once and writes down what happened.

Started as ``python -m megatron.quant_state.reference -m megatron.quant_state.train JOB RUN``, or
without the first module on real kernels. JOB is a folder with ``job.json``; this process writes to
``JOB/RUN``: ``events.jsonl``, one JSON object a line, and ``step{N}.npy``, all main_grads of step N
one after the other, fp32. It ends at once when its stdin is closed: then whoever wanted the answer
is gone.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron.quant_state.errors import InputError
from megatron.quant_state.model import ModelDescription
from megatron.quant_state.package_info import PACKAGE_NAME, __version__
from megatron.quant_state.replays import replays_in_another_precision
from megatron.quant_state.worker import Write, end_with_parent, work

__all__ = ["RUNS", "main"]

#: What a process can train, and how it differs from the release as it is.
RUNS = {
    "truth": "the release's own cache, refreshed every step, main_grad never overwritten, regions "
    "replayed in the precision of their forward",
    "no_cache": "the release with disable_parameter_transpose_cache: no cache, no overwriting; "
    "replays as in the truth",
    "release": "the release; its optimizer is handed the truth's gradients",
    "quant_state": "the release with megatron.quant_state installed",
}

_SEED = 1234

# Kernels that give the same bytes every time, where there are such; the user's wishes win.
_DETERMINISTIC = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def main(arguments: list[str]) -> int:
    """Train.

    Args:
        arguments: the job's folder and a key of ``RUNS``.

    Returns:
        int: 0 done; 2 the input cannot be used, with the error as the last event.
    """
    return work(arguments, _train)


def _train(job: Path, run: str, given: dict[str, Any], write: Write) -> None:
    import numpy
    import torch

    engine = given.get("engine", "reference")
    device = "cpu" if engine == "reference" else "cuda"
    probe = _probe(engine)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron.quant_state import build
    from megatron.quant_state.megatron_config import megatron_version

    twin = ModelDescription.from_dict(given["twin"])
    build.initialize_single_process(_SEED)
    # In every run, so that the same words come whichever of two ends first.
    build.check_model(ModelDescription.from_dict(given["full"]))
    if run in ("truth", "no_cache"):
        _replay_in_the_precision_of_the_forward()
    if run == "truth":
        probe.never_overwrite(True)
    elif run == "no_cache":
        config = {**twin.transformer_config, "disable_parameter_transpose_cache": True}
        twin = replace(twin, transformer_config=config)
    elif run == "quant_state":
        from megatron.quant_state import install

        install()
    model = build.build_model(twin, device=device)
    chunk = build.build_ddp(model, twin)
    optimizer = build.build_optimizer([chunk], twin)
    build.connect_schedule([chunk], optimizer)
    modules = {id(module): name for name, module in model.named_modules()}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    write(
        "built",
        parameters=[[name, parameter.numel()] for name, parameter in named],
        weights=_digest(parameter for _, parameter in named),
        versions={
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": torch.__version__,
            **_engine_version(engine),
            "megatron-core": megatron_version(),
            PACKAGE_NAME: __version__,
        },
    )
    for step in range(1, given["steps"] + 1):
        probe.counters.reset()
        probe.record_calls(True)
        start = time.perf_counter()
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        if run == "truth":
            # Some releases never refresh a quant_recipe-only run; the truth does.
            for module in model.modules():
                if hasattr(module, "is_first_microbatch"):
                    module.is_first_microbatch = True
        reports = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=_batches(twin, step, device),
            model=[chunk],
            num_microbatches=twin.num_microbatches,
            seq_length=twin.seq_length,
            micro_batch_size=twin.micro_batch_size,
            forward_only=False,
        )
        replays = replays_in_another_precision(probe.calls, modules, step)
        probe.record_calls(False)
        probe.calls.clear()
        flat = torch.cat([p.main_grad.detach().float().flatten() for _, p in named])
        numpy.save(job / run / f"step{step}.npy", flat.cpu().numpy())
        if run == "release":
            # So that a step's error is its own, and not the drift that earlier ones caused.
            right = torch.from_numpy(numpy.load(job / "truth" / f"step{step}.npy"))
            parts = torch.split(right, [parameter.numel() for _, parameter in named])
            for (_, parameter), part in zip(named, parts, strict=True):
                parameter.main_grad.copy_(part.view_as(parameter.main_grad))
        optimizer.step()
        write(
            "step",
            step=step,
            seconds=time.perf_counter() - start,
            loss=sum(float(report["loss"]) for report in reports) / len(reports),
            weight_quantizations=probe.counters.weight_quantizations,
            weight_quantizations_least=len(probe.counters.weights_used),
            stale_reads=probe.counters.stale_reads,
            empty_reads=probe.counters.empty_reads,
            replays_in_another_precision=[asdict(replay) for replay in replays],
        )


def _replay_in_the_precision_of_the_forward() -> None:
    """The layer's patches of recompute alone: a truth that is replayed in BF16 would be none."""
    from transformer_engine.pytorch import distributed
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

    from megatron.quant_state.install import RECOMPUTE_PATCHES
    from megatron.quant_state.patching import apply_patches
    from megatron.quant_state.recompute_probe import megatron_restores_precision
    from megatron.quant_state.recompute_state import RecomputeState

    if not megatron_restores_precision(RecomputeState(FP8GlobalStateManager, distributed)):
        apply_patches(RECOMPUTE_PATCHES)


def _probe(engine: str) -> Any:
    """Switches and counters of the engine, before Megatron is imported.

    Raises:
        InputError: the engine is not there.
    """
    if engine == "reference":
        from transformer_engine import reference

        return reference
    for variable, value in _DETERMINISTIC.items():
        os.environ.setdefault(variable, value)
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "--engine transformer-engine: found no GPU. Run it on a GPU host, or without it"
        )
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        message = f"--engine transformer-engine: cannot be imported here: {error}"
        raise InputError(message) from error
    from megatron.quant_state import te_probe

    te_probe.provide_fused_weight_gradient()
    te_probe.install(check_reads=True)
    return te_probe


def _engine_version(engine: str) -> dict[str, str]:
    if engine == "reference":
        return {}
    import torch
    import transformer_engine

    return {
        "transformer-engine": transformer_engine.__version__,
        "GPU": torch.cuda.get_device_name(),
    }


def _batches(twin: ModelDescription, step: int, device: str) -> Iterator[Any]:
    """Tokens of a step's microbatches, [micro_batch_size, seq_length + 1], int64."""
    import torch

    generator = torch.Generator().manual_seed(step)
    shape = (twin.micro_batch_size, twin.seq_length + 1)
    while True:
        yield torch.randint(twin.vocab_size, shape, generator=generator).to(device)


def _forward_step(batches: Iterator[Any], chunk: Any) -> Any:
    import torch

    tokens = next(batches)
    size, length = tokens.shape[0], tokens.shape[1] - 1
    positions = torch.arange(length, device=tokens.device).expand(size, length)
    mask = torch.ones(size, length, device=tokens.device)
    out = chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:], loss_mask=mask)
    return out, lambda losses: (losses.mean(), {"loss": losses.detach().mean()})


def _digest(parameters: Iterator[Any]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))

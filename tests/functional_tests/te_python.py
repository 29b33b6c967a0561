# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Worker of ``test_te_versions.py``: what the layer finds in one Transformer Engine, as JSON.

``python te_python.py [FOLDER]``. Without FOLDER the installed TE is the real one, extension and
all. With it TE's Python comes from there, an unpacked wheel, and stand-ins that do nothing take the
place of its compiled extension: enough to import it, to read signatures and to install.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", ".."))

import torch  # First: it loads libraries that Transformer Engine links to.

OVERRIDES = ("mtp_num_layers=2", "mtp_use_repeated_layer=true")


class _Anything(type):
    """A class that has every attribute, takes every argument and can be called again."""

    def __getattr__(cls, name: str) -> Any:
        if name == "__members__":
            return {}
        if name.startswith("__"):
            raise AttributeError(name)
        made = anything(name)
        setattr(cls, name, made)
        return made

    def __int__(cls) -> int:
        return 0

    __index__ = __int__


def anything(name: str) -> Any:
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        return self

    body = {"__init__": lambda self, *a, **k: None, "__call__": call}
    return _Anything(name, (), {**body, "__getattr__": lambda self, name: anything(name)})


class _Extension(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = anything(name)
        setattr(self, name, made)
        return made


def stand_in(folder: str) -> None:
    """Make TE's Python of a folder importable without what is compiled."""
    sys.path.insert(0, folder)
    # TE's own build sets it, so as to import TE before there is a library to load.
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    for name in ("transformer_engine_torch", "onnx", "onnxscript", "onnx_ir"):
        sys.modules[name] = _Extension(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]:
        del sys.modules[name]


@contextlib.contextmanager
def meta_device() -> Iterator[None]:
    """What a build on the meta device needs of CUDA on a machine without one."""
    meta = torch.device("meta")
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "current_device", return_value=meta),
    ):
        yield


def answers_of_a_meta_model() -> dict[str, Any]:
    """A GPT with real wrappers on the meta device: what its linears answer."""
    from pathlib import Path

    from megatron.quant_state import build, weights_changed
    from megatron.quant_state.first_microbatch import _resolve_is_first_microbatch
    from megatron.quant_state.model import load_model

    yaml = Path(__file__).resolve().parents[1] / "gpu" / "gpt.yaml"
    found: dict[str, Any] = {}
    build.initialize_single_process()
    for precision, extra in (("fp8", ("fp8=hybrid", "fp8_recipe=tensorwise")), ("bf16", ())):
        description = load_model(str(yaml), [*OVERRIDES, *extra])
        with meta_device():
            model = build.build_model(description, device="meta")
        layers = [m for m in model.modules() if hasattr(m, "disable_parameter_transpose_cache")]
        flags = {str(_resolve_is_first_microbatch(m, m.config, True)) for m in layers}
        for layer in layers:
            layer.is_first_microbatch = False
        model.set_is_first_microbatch()
        armed = {layer.is_first_microbatch for layer in layers}
        weights_changed(model)
        found[precision] = {
            "linears": len(layers),
            "devices": sorted({parameter.device.type for parameter in model.parameters()}),
            "flags": sorted(flags),
            "armed": sorted(armed),
            "quantized": sorted({m.will_execute_quantized(a) for m in layers for a in (0, 1)}),
            "armed_after_weights_changed": sorted({m.is_first_microbatch for m in layers}),
            "caches": sum(len(m._fp8_workspaces) for m in layers),
        }
    return found


def report(run: Callable[[], Any]) -> Any:
    try:
        return run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(arguments: list[str]) -> int:
    if arguments:
        stand_in(arguments[0])
    import transformer_engine
    import transformer_engine.pytorch
    from transformer_engine.pytorch.module import base

    from megatron.quant_state import te_probe

    te_probe.provide_fused_weight_gradient()
    from megatron.core.extensions import transformer_engine as wrappers

    from megatron.quant_state import install, uninstall

    before = wrappers.TELinear.__dict__["forward"]
    targets = report(lambda: [item.patch.target for item in install().patches])
    result: dict[str, Any] = {
        "te": transformer_engine.__version__,
        "have_te": wrappers.HAVE_TE,
        "targets": targets,
        "wrapped": wrappers.TELinear.__dict__["forward"] is not before,
        "model": None if arguments else report(answers_of_a_meta_model),
        "probe": report(lambda: te_probe.install() or "installed"),
    }
    uninstall()
    result["restored"] = wrappers.TELinear.__dict__["forward"] is before
    result["cache"] = hasattr(base, "quantize_weight")
    print("RESULT " + json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

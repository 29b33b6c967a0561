# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Other versions of Transformer Engine, on a CPU: import, signatures, meta build, install.

Real ones are those of interpreters: ``.venv-te``, and QUANT_STATE_TE_PYTHON, which may name
several, colon-separated. Python sources alone are unpacked wheels in QUANT_STATE_TE_SOURCES: the
extension is stood in for, so that nothing can run. ``docs/gpu.md`` says how to get either.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("te_python.py")
_HERE = str(ROOT / ".venv-te" / "bin" / "python")
PYTHONS = [
    path
    for path in [*os.environ.get("QUANT_STATE_TE_PYTHON", "").split(":"), _HERE]
    if path and Path(path).exists()
]
SOURCES = [path for path in os.environ.get("QUANT_STATE_TE_SOURCES", "").split(":") if path]
TARGETS = {
    "megatron.core.transformer.module.MegatronModule.set_is_first_microbatch",
    "megatron.core.extensions.transformer_engine.TELinear.forward",
    "megatron.core.extensions.transformer_engine.TELayerNormColumnParallelLinear.forward",
    "megatron.core.extensions.transformer_engine.TEGroupedLinear.forward",
    "transformer_engine.pytorch.module.base.TransformerEngineBaseModule._load_from_state_dict",
    "transformer_engine.pytorch.module.base.TransformerEngineBaseModule.prepare_forward",
}


def result(*command: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def check_installed(found: dict[str, Any]) -> None:
    assert found["have_te"] is True
    assert set(found["targets"]) >= TARGETS
    assert found["wrapped"] is True
    assert found["restored"] is True
    assert found["probe"] == "installed"


@pytest.mark.skipif(not PYTHONS, reason="no environment with a Transformer Engine (docs/gpu.md)")
@pytest.mark.parametrize("python", PYTHONS)
def test_a_real_transformer_engine_without_a_gpu(python: str) -> None:
    found = result(python, str(WORKER))
    check_installed(found)
    quantized, plain = found["model"]["fp8"], found["model"]["bf16"]
    for model in (quantized, plain):
        # Two decoder layers and one repeated MTP layer of four linears, and eh_proj.
        assert model["linears"] == 13
        assert model["devices"] == ["meta"]
        assert model["armed_after_weights_changed"] == [True]
        assert model["quantized"] == [0, 1]
        assert model["caches"] == 0
    assert (quantized["flags"], quantized["armed"]) == (["True"], [True])
    assert (plain["flags"], plain["armed"]) == (["None"], [False])


@pytest.mark.skipif(not SOURCES, reason="QUANT_STATE_TE_SOURCES names no unpacked wheel")
@pytest.mark.parametrize("folder", SOURCES)
def test_the_python_of_another_transformer_engine(folder: str) -> None:
    # -O: TE asserts that its Python and its extension list the same formats.
    found = result(sys.executable, "-O", str(WORKER), folder)
    check_installed(found)
    assert Path(folder, f"transformer_engine-{found['te']}.dist-info").exists()


def test_a_missing_cache_is_refused(tmp_path: Path) -> None:
    """Negative control of the worker: a TE without the cache is not one that can be patched."""
    if not SOURCES:
        pytest.skip("QUANT_STATE_TE_SOURCES names no unpacked wheel")
    import shutil

    folder = tmp_path / "te"
    shutil.copytree(SOURCES[0], folder, ignore=shutil.ignore_patterns("jax", "__pycache__"))
    base = folder / "transformer_engine" / "pytorch" / "module" / "base.py"
    base.write_text(base.read_text().replace("_fp8_workspaces", "_other_workspaces"))
    found = result(sys.executable, "-O", str(WORKER), str(folder))
    assert "has not: TransformerEngineBaseModule._fp8_workspaces" in found["targets"]["error"]
    assert found["wrapped"] is False

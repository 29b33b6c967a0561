# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Run a module or a file in this process, on the reference engine.

``python -m megatron.quant_state.reference -m MODULE [ARGUMENT...]`` or ``... FILE [ARGUMENT...]``.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

_USAGE = "usage: python -m megatron.quant_state.reference (-m MODULE | FILE) [ARGUMENT...]"


def prepare() -> None:
    """Put the engine in place; once, before anything imports torch or Megatron.

    Raises:
        RuntimeError: If another ``transformer_engine`` has been imported already.
    """
    # Megatron decorates with torch.compile, whose backends want a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # On a GPU host the engine must not find one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    site = str(Path(__file__).resolve().parent / "site")
    if site in sys.path:
        sys.path.remove(site)
    sys.path.insert(0, site)

    from megatron.quant_state.reference import collectives, cuda

    cuda.apply()
    collectives.apply()
    import fused_weight_gradient_mlp_cuda  # noqa: F401 - Megatron looks for it while it is imported
    import transformer_engine

    found = str(Path(transformer_engine.__file__ or "").resolve())
    if not found.startswith(site):
        raise RuntimeError(
            f"the reference engine needs its own transformer_engine from {site}, but {found} has "
            "been imported before"
        )


def main(arguments: list[str]) -> int:
    """Run what the arguments name, as ``python`` would.

    Returns:
        2 for arguments that name nothing; what is run leaves by itself.
    """
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(_USAGE, file=sys.stderr)
        return 2
    prepare()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        # ``python -m`` puts the working directory first; the engine must stay before it.
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(1, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

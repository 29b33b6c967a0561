# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Version and supported ranges; standard library only, so that any tool can read it."""

__version__ = "0.1.0"

PACKAGE_NAME = "megatron-quant-state"

#: Lowest and highest release that this version was run against, both included.
SUPPORTED = {
    "python": ("3.10", "3.12"),
    "megatron-core": ("0.16.1", "0.19.2"),
    "transformer-engine": ("2.9.0", "2.20.2"),
}

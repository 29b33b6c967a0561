# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""``python -m megatron.quant_state``, the same as ``quant-state``."""

from __future__ import annotations

import sys

from megatron.quant_state.commands import main

if __name__ == "__main__":
    sys.exit(main())

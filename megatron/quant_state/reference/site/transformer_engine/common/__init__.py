# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""What the frameworks share: the recipes."""

from __future__ import annotations

from transformer_engine.common import recipe as recipe

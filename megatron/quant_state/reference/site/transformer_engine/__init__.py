# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A CPU stand-in for Transformer Engine, of our own, that unmodified megatron-core trains with."""

from __future__ import annotations

#: The release whose behaviour is modelled. Megatron's ``is_te_min_version`` reads it.
__version__ = "2.20.2"

from transformer_engine import common as common
from transformer_engine import pytorch as pytorch
from transformer_engine import reference as reference

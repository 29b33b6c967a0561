# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Options that several commands have: which model, and what becomes of the result."""

from __future__ import annotations

import argparse

__all__ = ["add_model_options", "add_output_options"]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--recipe`` and ``--set``, for :func:`megatron.quant_state.model.load_model`."""
    parser.add_argument(
        "--recipe", metavar="FILE", help="quantization recipe, as Megatron takes it"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="override a field; the value is YAML; may be repeated",
    )


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--format`` and ``--out``."""
    parser.add_argument("--format", choices=("table", "json", "html"), default="table")
    parser.add_argument("--out", metavar="FILE", help="write there instead of to stdout")

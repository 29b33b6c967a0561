# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""One HTML page from a template of this package, without scripts and without anything to load."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

__all__ = ["render_page"]


def render_page(template: str, **values: Any) -> str:
    """Fill a template; texts are escaped, and a name that it lacks is an error.

    Args:
        template: name of a file in ``templates/``.
        **values: what the template reads.
    """
    environment = Environment(
        loader=PackageLoader("megatron.quant_state.reporters"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)

# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""A finding: what is wrong, how bad, where, which modules it means and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.quant_state.errors import Location

__all__ = ["CODES", "Finding", "Severity", "finding", "finding_from_dict", "has_errors", "in_order"]

Severity = Literal["error", "warning"]

#: Every code with its severity and its title. A code never changes its meaning: scripts and CI
#: filter by it. QS1xx can be told from the recipe alone, QS2xx need the model, QS3xx need what
#: the user compares with.
CODES: Mapping[str, tuple[Severity, str]] = {
    "QS101": ("error", "malformed YAML"),
    "QS102": ("error", "duplicate key"),
    "QS103": ("error", "no mapping where one is expected"),
    "QS104": ("error", "unknown key"),
    "QS105": ("error", "no matchers or no configs"),
    "QS106": ("error", "missing key"),
    "QS107": ("error", "unknown type"),
    "QS108": ("error", "unknown value"),
    "QS109": ("error", "config that does not exist"),
    "QS110": ("error", "recipe that is null"),
    "QS111": ("error", "delayed scaling in a rule"),
    "QS112": ("error", "fp8 and fp4 in one recipe"),
    "QS113": ("error", "custom recipe without a factory"),
    "QS114": ("error", "rule that is not enabled, for want of the key"),
    "QS115": ("error", "rule that never wins, because earlier ones do"),
    "QS116": ("error", "value of a wrong type"),
    "QS151": ("warning", "enabled that is no boolean"),
    "QS152": ("warning", "layer index that also hits longer numbers"),
    "QS153": ("warning", "pattern that is anchored at the start"),
    "QS154": ("warning", "pattern with capital letters"),
    "QS155": ("warning", "config that is not checked"),
    "QS201": ("error", "pattern that matches nothing on any stage"),
    "QS202": ("error", "nothing is quantized although something was asked for"),
    "QS251": ("warning", "layer index under pipeline stages, where numbers are local"),
    "QS252": ("warning", "layer index that also hits MTP"),
    "QS253": ("warning", "rule that matches and changes nothing"),
    "QS254": ("warning", "quantized parameters where no name reaches the wrapper"),
    "QS255": ("warning", "numbers of BF16 layers without the switch"),
    "QS256": ("warning", "first and last layers in BF16 do not cover MTP"),
    "QS257": ("warning", "evaluation in another precision than training"),
    "QS258": ("warning", "fc1 and fc2 of one fused MLP differ"),
    "QS259": ("warning", "format or recipe other than the global one"),
    "QS260": ("warning", "repeated modules without this layer"),
    "QS261": ("warning", "modules that the wrappers never see"),
    "QS301": ("error", "expected precision that does not hold"),
    "QS302": ("error", "expectation that matches nothing"),
    "QS303": ("error", "quantized although nothing else was expected to be"),
    "QS311": ("error", "decided otherwise than in the other plan"),
    "QS312": ("error", "module that only one of two plans has"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: a key of ``CODES``.
        message: what was found and what it causes.
        remedy: what to do, as an imperative.
        location: where in the user's file, if there is a place.
        modules: names of the modules meant, with the model's own layer numbers; empty where the
            recipe alone tells.
    """

    code: str
    message: str
    remedy: str
    location: Location | None = None
    modules: tuple[str, ...] = ()

    @property
    def severity(self) -> Severity:
        """``error`` or ``warning``."""
        return CODES[self.code][0]

    def __str__(self) -> str:
        where = f"{self.location}: " if self.location else ""
        return f"{where}{self.severity} {self.code}: {self.message}. {self.remedy}"

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        where = self.location
        return {
            "code": self.code,
            "severity": self.severity,
            "title": CODES[self.code][1],
            "file": where.file if where else None,
            "line": where.line if where else None,
            "column": where.column if where else None,
            "message": self.message,
            "remedy": self.remedy,
            "modules": list(self.modules),
        }


def finding(
    code: str,
    message: str,
    remedy: str,
    location: Location | None = None,
    modules: Iterable[str] = (),
) -> Finding:
    """A finding with a known code."""
    assert code in CODES, code
    return Finding(code, message, remedy, location, tuple(modules))


def finding_from_dict(values: Mapping[str, Any]) -> Finding:
    """The finding that :meth:`Finding.to_dict` turned into ``values``."""
    where = None
    if values["file"] is not None:
        where = Location(values["file"], values["line"], values["column"])
    return finding(values["code"], values["message"], values["remedy"], where, values["modules"])


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether one of them is an error."""
    return any(item.severity == "error" for item in findings)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, then in the order of the file; each once."""

    def key(item: Finding) -> tuple[Any, ...]:
        where = item.location or Location("")
        place = (where.file, where.line or 0, where.column or 0)
        return (item.severity != "error", *place, item.code, item.message)

    return sorted(dict.fromkeys(findings), key=key)

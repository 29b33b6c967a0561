# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Quantization recipes: which format and which scales an autocast region asks for."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

from pydantic.dataclasses import dataclass

_OVERRIDES = (None, "high_precision", "dequantized")


class _Maxima(NamedTuple):
    """Largest finite value of a format in the forward and in the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """Number formats; HYBRID is e4m3 in the forward and e5m2 in the backward pass."""

    E2M1 = _Maxima(6, 6)
    E4M3 = _Maxima(448, 448)
    E5M2 = _Maxima(57344, 57344)
    HYBRID = _Maxima(448, 57344)


@dataclass(frozen=True)
class MMParams:
    """Options of a matrix product. The split accumulator has no effect here: products are fp32."""

    use_split_accumulator: bool = True


@dataclass(frozen=True)
class QParams:
    """How one kind of tensor is quantized."""

    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class Recipe:
    """Base of the recipes. The class methods are what modules and Megatron ask."""

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is NVFP4 block scaling."""
        return issubclass(cls, NVFP4BlockScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether this is MXFP8 block scaling."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def delayed(cls) -> bool:
        """Whether this is delayed scaling."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def float8_current_scaling(cls) -> bool:
        """Whether this is per-tensor current scaling, ``tensorwise`` in Megatron."""
        return issubclass(cls, Float8CurrentScaling)

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        """Whether there is one scale a tensor."""
        return issubclass(cls, (DelayedScaling, Float8CurrentScaling))

    @classmethod
    def float8_block_scaling(cls) -> bool:
        """Whether this is FP8 block scaling, ``blockwise`` in Megatron."""
        return issubclass(cls, Float8BlockScaling)

    @classmethod
    def custom(cls) -> bool:
        """Whether quantizers come from a user's factory. Not modelled."""
        return issubclass(cls, CustomRecipe)


def _check(recipe: Any) -> None:
    """Refuse what TE refuses for every recipe."""
    if recipe.fp8_format == Format.E5M2:
        raise AssertionError("Pure E5M2 training is not supported.")
    if recipe.backward_override not in _OVERRIDES:
        raise AssertionError(f"backward_override must be one of {_OVERRIDES}.")
    if recipe.backward_override is not None:
        raise NotImplementedError("the reference engine does not model backward_override")


@dataclass
class DelayedScaling(Recipe):
    """Per-tensor scales computed from the amaxes of earlier steps."""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check(self)


@dataclass
class Float8CurrentScaling(Recipe):
    """Per-tensor scales computed from the tensor itself."""

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    # Without annotations, as in TE: attributes of the class and no fields of the instance.
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()

    def __post_init__(self) -> None:
        _check(self)


@dataclass
class MXFP8BlockScaling(Recipe):
    """A power-of-two scale for every 32 consecutive values, each direction on its own."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        _check(self)
        if self.enable_2d_quantization:
            raise NotImplementedError("the reference engine does not model MXFP8 2D blocks")


@dataclass
class Float8BlockScaling(Recipe):
    """1x128 scales for activations and gradients, 128x128 for weights."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    fp8_quant_fwd_inp = QParams(power_2_scale=True)
    fp8_quant_fwd_weight = QParams(power_2_scale=True)
    fp8_quant_bwd_grad = QParams(power_2_scale=True)

    def __post_init__(self) -> None:
        _check(self)
        dims = (self.x_block_scaling_dim, self.w_block_scaling_dim, self.grad_block_scaling_dim)
        if any(dim not in (1, 2) for dim in dims):
            raise AssertionError(f"Only 1D or 2D blocks are supported, got {dims}.")
        if sum(dim == 2 for dim in dims) > 1:
            raise AssertionError("2D by 2D block gemm not supported.")
        if self.fp8_dpa or self.fp8_mha:
            raise AssertionError("FP8 attention is not supported for Float8BlockScaling.")


@dataclass
class NVFP4BlockScaling(Recipe):
    """e4m3 scales for every 16 values below one fp32 scale a tensor.

    The flags for the random Hadamard transform and for stochastic rounding are accepted, as
    Megatron's defaults set them, and have no effect: see ``tensor/nvfp4_tensor.py``.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        _check(self)
        if self.fp4_format != Format.E2M1 or self.fp8_format != Format.E4M3:
            raise AssertionError("NVFP4 scaling supports E2M1 values with E4M3 scales only.")


@dataclass
class CustomRecipe(Recipe):
    """Quantizers made by a user's factory. It can be built, not entered."""

    qfactory: Callable[..., Any] | None = None
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


#: Names by Megatron's own words, for counters and messages; the order is that of the checks.
_NAMES: tuple[tuple[type[Recipe], str], ...] = (
    (DelayedScaling, "delayed"),
    (Float8CurrentScaling, "tensorwise"),
    (Float8BlockScaling, "blockwise"),
    (MXFP8BlockScaling, "mxfp8"),
    (NVFP4BlockScaling, "nvfp4"),
)


def recipe_name(recipe: Recipe) -> str:
    """Megatron's name of a recipe, for example ``blockwise``.

    Raises:
        NotImplementedError: For a recipe that the reference engine does not model.
    """
    for kind, name in _NAMES:
        if isinstance(recipe, kind):
            return name
    raise NotImplementedError(f"the reference engine does not model {type(recipe).__name__}")

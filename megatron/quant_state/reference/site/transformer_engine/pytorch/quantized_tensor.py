# Copyright (c) 2026, the megatron.quant_state authors. Licensed under the Apache License 2.0.
"""Quantizers, and the tensors they make: values for each direction of use.

TE stores codes and scales and multiplies codes; the CPU has no such product, so what is stored is
their product, the fp32 values, [M, K] for both directions. ``_rowwise`` serves the forward and the
dgrad's gradient operand, ``_columnwise`` the dgrad's weight and both operands of
the wgrad. Where TE derives one from the other by transposing codes, both name the same values.

Two kinds hold them: ``QuantizedTensorStorage`` for one call, ``QuantizedTensor`` for what lives
longer (a cached weight workspace, a primary parameter).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from transformer_engine import reference


class QuantizedTensorStorage:
    """Quantized values with no behaviour of a tensor."""

    _rowwise: torch.Tensor | None
    _columnwise: torch.Tensor | None
    _quantizer: Quantizer
    #: Copy of the weight that was last quantized into this; None for what is no weight.
    _source: torch.Tensor | None = None
    _filled: bool = False

    @property
    def _transpose(self) -> torch.Tensor | None:
        """TE's name, for per-tensor FP8, of the column-wise copy."""
        return self._columnwise

    @property
    def _rowwise_data(self) -> torch.Tensor | None:
        return self._rowwise

    @property
    def _columnwise_data(self) -> torch.Tensor | None:
        return self._columnwise

    def _get_quantizer(self) -> Quantizer:
        return self._quantizer

    def update_quantizer(self, quantizer: Quantizer) -> None:
        """Take another quantizer for later updates; the values stay."""
        self._quantizer = quantizer

    def get_usages(self) -> dict[str, bool]:
        """Which directions hold values."""
        return {
            "rowwise": self._rowwise is not None,
            "columnwise": self._columnwise is not None,
        }

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Make a direction available, or drop it; None leaves it as it is.

        Raises:
            RuntimeError: If a direction is asked for that holds nothing and cannot be derived.
        """
        if rowwise_usage and self._rowwise is None:
            raise RuntimeError("row-wise values cannot be made from column-wise ones")
        if columnwise_usage and self._columnwise is None:
            if self._rowwise is None or not self._quantizer.columnwise_from_rowwise:
                raise RuntimeError(
                    f"{type(self._quantizer).__name__}: column-wise values are asked for, but were "
                    "not kept and cannot be made from row-wise ones"
                )
            self._columnwise = self._rowwise
        if rowwise_usage is False:
            self._rowwise = None
        if columnwise_usage is False:
            self._columnwise = None

    def _fill(
        self, rowwise: torch.Tensor | None, columnwise: torch.Tensor | None, quantizer: Quantizer
    ) -> None:
        """Take values over."""
        self._rowwise = rowwise
        self._columnwise = columnwise
        self._quantizer = quantizer
        self._filled = True

    def _values(self) -> torch.Tensor:
        values = self._rowwise if self._rowwise is not None else self._columnwise
        if values is None:
            raise RuntimeError("a quantized tensor holds no values")
        return values


class Quantizer:
    """Makes quantized tensors. One object belongs to one slot of a module and keeps its usages."""

    #: Class of the tensors made; Megatron asks for some of them by class.
    tensor_class: ClassVar[type[QuantizedTensor]]
    #: Whether a column-wise copy holds the same values, so that it can be made at any time.
    columnwise_from_rowwise: bool = False
    #: Megatron's name of the recipe whose regions take a parameter of this kind; empty for any.
    recipe_kind: ClassVar[str] = ""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False
        self.optimize_for_gemm = False

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Directions that the next tensor needs; None leaves one as it is."""
        if rowwise is not None:
            self.rowwise_usage = rowwise
        if columnwise is not None:
            self.columnwise_usage = columnwise

    def get_usages(self) -> dict[str, bool]:
        """Both usages."""
        return {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}

    def round(
        self, values: torch.Tensor, peers: Sequence[Quantizer] | None, lengths: Sequence[int] | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Round [M, K] fp32 values in the directions of the current usages.

        Args:
            values: [M, K], fp32, contiguous, left as they are.
            peers: Quantizers of the segments, where there is state of their own; None for self.
            lengths: Row counts of the segments; None for one.

        Returns:
            Row-wise and column-wise values, or None for a direction that is not in use.
        """
        raise NotImplementedError

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError for a shape that the format cannot hold."""

    def is_requantization_safe(self) -> bool:
        """Whether the same input gives the same values at any later time."""
        return True

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Observe a tensor without quantizing it."""

    def multi_quantize(self, list_of_tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Quantize one after the other."""
        return [self.quantize(tensor) for tensor in list_of_tensors]

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Quantize a tensor of two or more dimensions.

        Returns:
            A ``QuantizedTensor``, or a storage where ``internal`` is set.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        self.check_shape(tensor.shape)
        with torch.no_grad():
            rowwise, columnwise = self.round(_matrix(tensor), None, None)
        if self.internal:
            result: Any = QuantizedTensorStorage()
        else:
            result = self.tensor_class(tensor.shape, tensor.dtype, device=tensor.device)
        result._fill(rowwise, columnwise, self)
        return result

    __call__ = quantize

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        **_: Any,
    ) -> QuantizedTensor:
        """A quantized tensor with room for values and none in it: they read as NaN."""
        device = torch.device("cpu" if device is None else device)
        result = self.tensor_class(torch.Size(shape), dtype, device=device)
        size = (torch.Size(shape).numel() // shape[-1], shape[-1])
        empty = [torch.full(size, float("nan"), device=device) for _ in range(2)]
        result._fill(empty[0], empty[1], self)
        result._filled = False
        result.update_usage(columnwise_usage=self.columnwise_usage or None)
        return result.requires_grad_(requires_grad)

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize ``src`` into ``dst``, in the directions of the current usages.

        A direction that is not in use is dropped from ``dst``, as TE's does. A flag of one leaves
        the values as they are. Buffers that stay are written in place, behind autograd's back.
        """
        if noop_flag is not None and bool(noop_flag):
            return dst
        if isinstance(src, QuantizedTensor):
            src = src.dequantize()
        with torch.no_grad():
            rowwise, columnwise = self.round(_matrix(src), None, None)
        _write(dst, rowwise, columnwise)
        dst._filled = True
        if dst._source is not None:
            dst._source.copy_(src.detach())
            reference.counters.weight_quantizations += 1
        return dst


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    """[..., K] of any float type as [M, K] fp32, contiguous."""
    return tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.float32).contiguous()


def _write(
    target: QuantizedTensorStorage, rowwise: torch.Tensor | None, columnwise: torch.Tensor | None
) -> None:
    shared = rowwise is columnwise
    if rowwise is not None and target._rowwise is not None:
        # ``.data`` has a version counter of its own: autograd must not see a kernel's write.
        target._rowwise.data.copy_(rowwise)
    else:
        target._rowwise = rowwise
    if shared and rowwise is not None:
        target._columnwise = target._rowwise
    elif columnwise is not None and target._columnwise is not None:
        target._columnwise.data.copy_(columnwise)
    else:
        target._columnwise = columnwise


class QuantizedTensor(QuantizedTensorStorage, torch.Tensor):
    """A quantized tensor that PyTorch sees as one of its high-precision dtype.

    Operations read the dequantized values; writing in place quantizes anew.
    """

    @staticmethod
    def __new__(
        cls: type[QuantizedTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        device: torch.device | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor without values; the quantizer fills it."""
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            torch.Size(shape),
            dtype=dtype,
            device=device or torch.device("cpu"),
            requires_grad=requires_grad,
        )

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({type(self._quantizer).__name__}, {self.dequantize()})"

    def dequantize(self, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values in ``dtype``, this tensor's own by default; [*shape], a fresh tensor."""
        return _Dequantize.apply(self, dtype or self.dtype)  # type: ignore[no-any-return]

    def quantize_(
        self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantize ``tensor`` into this one; see ``Quantizer.update_quantized``."""
        return self._quantizer.update_quantized(tensor, self, noop_flag=noop_flag)

    def detach(self) -> QuantizedTensor:
        """An alias: the same buffers, of which each can drop a direction on its own."""
        return self._alias()

    def _alias(self) -> QuantizedTensor:
        result = type(self)(self.shape, self.dtype, device=self.device)
        result._fill(self._rowwise, self._columnwise, self._quantizer)
        result._source = self._source
        result._filled = self._filled
        return result

    def float(self) -> torch.Tensor:  # type: ignore[override]
        """Dequantized to fp32."""
        return self.dequantize(dtype=torch.float32)

    def bfloat16(self) -> torch.Tensor:  # type: ignore[override]
        """Dequantized to bf16."""
        return self.dequantize(dtype=torch.bfloat16)

    def half(self) -> torch.Tensor:  # type: ignore[override]
        """Dequantized to fp16."""
        return self.dequantize(dtype=torch.float16)

    def expand_as(self, other: torch.Tensor) -> torch.Tensor:
        """Megatron's DDP expands a parameter as itself, to reach its node of accumulation."""
        if other is self:
            return _Same.apply(self)  # type: ignore[no-any-return]
        return super().expand_as(other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        buffers = (self._rowwise, self._columnwise, self._source, self._filled)
        arguments = (
            type(self),
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            self._quantizer,
            buffers,
        )
        return (_rebuild, arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        import copy

        result = self._alias()
        result.__dict__ = copy.deepcopy(self.__dict__, memo)
        if self._columnwise is self._rowwise:
            result._columnwise = result._rowwise
        result.requires_grad_(self.requires_grad)
        memo[id(self)] = result
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        if func is aten.detach.default:
            return args[0]._alias()
        if func is aten.copy_.default:
            destination, source = args[0], args[1]
            if isinstance(destination, QuantizedTensor):
                destination.quantize_(source)
            else:
                destination.copy_(_plain(source))
            return destination
        if func is aten.empty_like.default:
            tensor = args[0]
            return tensor._quantizer.make_empty(tensor.shape, dtype=tensor.dtype)
        if func in (aten._to_copy.default, aten.clone.default):
            wanted = kwargs.get("dtype")
            if wanted is None or wanted == args[0].dtype:
                return _clone(args[0])
        plain_args = tree_map(_plain, args)
        result = func(*plain_args, **tree_map(_plain, kwargs))
        if func._schema.is_mutable:
            for before, after, argument in zip(
                args, plain_args, func._schema.arguments, strict=False
            ):
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and isinstance(before, QuantizedTensor):
                    before.quantize_(after)
                    result = before if result is after else result
                elif written and isinstance(before, (list, tuple)):
                    for one, new in zip(before, after, strict=False):
                        if isinstance(one, QuantizedTensor):
                            one.quantize_(new)
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl


def _plain(value: Any) -> Any:
    """Values of a quantized tensor outside autograd; anything else unchanged."""
    if isinstance(value, QuantizedTensor):
        return value._values().detach().to(value.dtype, copy=True).view(value.shape)
    return value


def _clone(tensor: QuantizedTensor) -> QuantizedTensor:
    result = tensor._alias()
    if tensor._rowwise is not None:
        result._rowwise = tensor._rowwise.clone()
    if tensor._columnwise is tensor._rowwise:
        result._columnwise = result._rowwise
    elif tensor._columnwise is not None:
        result._columnwise = tensor._columnwise.clone()
    if tensor._source is not None:
        result._source = tensor._source.clone()
    return result


def _rebuild(
    kind: type[QuantizedTensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    quantizer: Quantizer,
    buffers: Any,
) -> QuantizedTensor:
    result = kind(shape, dtype)
    result._fill(buffers[0], buffers[1], quantizer)
    result._source, result._filled = buffers[2], buffers[3]
    return result.requires_grad_(requires_grad)


class _Dequantize(torch.autograd.Function):
    """Dequantize with a gradient that passes straight through."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:  # type: ignore[override]
        values = tensor._values()
        return values.to(dtype, copy=True).view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return gradient, None


class _Same(torch.autograd.Function):
    """An alias inside the graph."""

    @staticmethod
    def forward(ctx: Any, tensor: QuantizedTensor) -> QuantizedTensor:  # type: ignore[override]
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient

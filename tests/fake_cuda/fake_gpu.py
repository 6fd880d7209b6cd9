"""A GPU that is not there: CUDA tensors with a device, a dtype and a shape, but no numbers.

Tensors on the CPU stay real, CUDA tensors are torch's fake ones. Every operation on a fake tensor
goes through torch's own rules (`FakeTensorMode`), which refuse tensors of two devices, dtypes that
do not go together and shapes that do not fit; `CHECKS` has what they let through and a GPU does
not. Shapes and branches may depend on whole numbers (offsets, masks, positions), so that fake
tensors of whole numbers carry them where they are known. What comes back to the CPU without a known
number is 1.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # what collectives do to fake tensors
from torch import Tensor
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn.attention import varlen  # noqa: F401  defines the operation
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

CUDA = torch.device("cuda", 0)
aten = torch.ops.aten


class FakeGpu(TorchDispatchMode):
    """While it is entered, every operation that involves a CUDA tensor is a fake one."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.seen: set[str] = set()
        """Names of the operations on CUDA tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not all(issubclass(kind, FakeTensor) or kind in _PLAIN for kind in types):
            return NotImplemented  # a sharded tensor, which takes itself apart
        operands = list(tree_iter((args, kwargs)))
        if func.namespace == "c10d":
            _fits_nccl(operands)
        there = any(isinstance(one, torch.device) and one.type == "cuda" for one in operands)
        if not there and not any(isinstance(one, FakeTensor) for one in operands):
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        self.seen.add(func.name())
        if func is aten._local_scalar_dense.default:
            known = _numbers(args[0])
            return 1.0 if known is None else known.item()
        if func.overloadpacket in (aten.index, aten.index_put, aten.index_put_):
            args = (args[0], [self._as_places(one) for one in args[1]], *args[2:])
        if func is aten._pack_padded_sequence.default:  # whose lengths are on the CPU
            return func._op_dk(DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
        for check in CHECKS.get(func.overloadpacket, ()):
            check(*args, **kwargs)
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            numbers = _in_numbers(func, args, kwargs)
            if numbers is None:
                raise
            return tree_map(self._there, numbers)
        return self._settled(func, args, kwargs, out)

    def _settled(self, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
        """The result with its numbers, and as a real tensor where it is on the CPU."""
        written = [one for one in _written(func, args, kwargs) if isinstance(one, Tensor)]
        results = [one for one in tree_iter(out) if isinstance(one, Tensor)]
        whole = all(not one.is_floating_point() for one in (*results, *written))
        numbers = _in_numbers(func, args, kwargs) if whole and (results or written) else None
        if written:
            for tensor in written:
                if isinstance(tensor, FakeTensor):
                    if numbers is None:
                        tensor.numbers = None  # type: ignore[attr-defined]
                elif numbers is None:
                    tensor.fill_(1)
            return written[0] if isinstance(out, Tensor) else out
        known = iter([None] * len(results) if numbers is None else tree_iter(numbers))
        return tree_map(lambda one: _with(one, known) if isinstance(one, Tensor) else one, out)

    def _there(self, numbers: Any) -> Any:
        """A CUDA tensor of these numbers."""
        if not isinstance(numbers, Tensor):
            return numbers
        with self.fake:
            tensor: Any = torch.empty(numbers.shape, dtype=numbers.dtype, device=CUDA)
        tensor.numbers = numbers
        return tensor

    def _as_places(self, index: Any) -> Any:
        """An index by a mask as one by places, whose number is known."""
        known = None if index is None else _numbers(index)
        if known is None or known.dtype != torch.bool or not isinstance(index, FakeTensor):
            return index
        assert known.ndim == 1, "a mask of several dimensions: index by its places here too"
        return self._there(known.nonzero()[:, 0])


_PLAIN = (Tensor, torch.nn.Parameter)


def _with(result: Tensor, known: Iterator[Any]) -> Tensor:
    """A result with the next known numbers."""
    numbers = next(known)
    if result.device.type == "cpu":
        return torch.ones(result.shape, dtype=result.dtype) if numbers is None else numbers
    assert isinstance(result, FakeTensor)
    result.constant = None  # on which torch would compute for real
    result.numbers = numbers  # type: ignore[attr-defined]
    return result


def _numbers(one: Tensor) -> Tensor | None:
    return getattr(one, "numbers", None) if isinstance(one, FakeTensor) else one


class _UnknownError(Exception):
    pass


def _in_numbers(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the CPU, with numbers; None if one of them is not known."""

    def known(operand: Any) -> Any:
        if isinstance(operand, torch.device):
            return torch.device("cpu")
        if not isinstance(operand, Tensor):
            return operand
        numbers = _numbers(operand)
        if numbers is None:
            raise _UnknownError
        return numbers

    try:
        args, kwargs = tree_map(known, (args, kwargs))
    except _UnknownError:
        return None
    return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the operation writes to."""
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += list(tree_iter(value))
    return written


def _same_dtype(*operands: int) -> Callable[..., None]:
    """A check that operands have one dtype, as a GPU's kernel needs them."""

    def check(*args: Any, **kwargs: Any) -> None:
        dtypes = [args[place].dtype for place in operands]
        assert len(set(dtypes)) == 1, f"wanted operands of one dtype, got {dtypes}"

    return check


def _index_is_there(source: Tensor, index: Any, *_: Any, **__: Any) -> None:
    for one in index:
        same = one is None or source.is_cuda or not one.is_cuda
        assert same, "wanted the index of a tensor on the CPU on the CPU, it is on the GPU"


def _fits_nccl(operands: Iterable[Any]) -> None:
    on_cpu = any(isinstance(one, Tensor) and not isinstance(one, FakeTensor) for one in operands)
    assert not on_cpu, "wanted tensors on the GPU, which NCCL sums, got one on the CPU"


def _fits_varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, **__: Any
) -> None:
    """What FlashAttention takes (`_flash_attention_forward`)."""
    dtypes = {query.dtype, key.dtype, value.dtype}
    assert len(dtypes) == 1, dtypes
    assert dtypes <= {torch.bfloat16, torch.float16}, f"wanted half precision, got {query.dtype}"
    assert starts.dtype == torch.int32, f"wanted offsets of int32, got {starts.dtype}"
    assert query.shape[-1] in range(8, 257, 8), (
        f"wanted heads of 8, 16, … 256, got {query.shape[-1]}"
    )
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1


CHECKS: dict[Any, tuple[Callable[..., None], ...]] = {
    aten.mm: (_same_dtype(0, 1),),
    aten.bmm: (_same_dtype(0, 1),),
    aten.addmm: (_same_dtype(0, 1, 2),),
    aten.index_copy: (_same_dtype(0, 3),),
    aten.index_copy_: (_same_dtype(0, 3),),
    aten.index_add: (_same_dtype(0, 3),),
    aten.index_add_: (_same_dtype(0, 3),),
    aten.addmm_: (_same_dtype(0, 1, 2),),
    aten.index: (_index_is_there,),
    torch.ops.torch_attn._varlen_attn: (_fits_varlen,),
}

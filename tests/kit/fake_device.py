"""A device with memory of its own: what a GPU would refuse, and what its host would wait for.

Tensors on it hold real values, so that batches can be compared. Operations that mix it with the host are
errors, as on a GPU, and so is reading what another stream has made without telling its allocator. What waits
for a GPU is counted: values read by the host, shapes that depend on values, copies of pageable memory.
Its name is `meta`, since torch has a guard for that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from stoker.loader import disk, order
from stoker.loader import options as loader_options
from stoker.plan import resources

FAKE = torch.device("meta")
aten: Any = torch.ops.aten
_WAITS = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.unique_dim,
    aten._unique2,
    aten.equal,
}
_MIXES = {aten.copy_, aten._to_copy}


class FakeTensor(Tensor):
    """A tensor of the device; `values` are its values, in host memory."""

    values: Tensor
    thread: int
    """Where it was made: threads of a loader have streams of their own."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Any:
        how = {"strides": values.stride(), "storage_offset": values.storage_offset(), "dtype": values.dtype}
        made: Any = Tensor._make_wrapper_subclass(cls, values.size(), device=FAKE, **how)  # type: ignore[attr-defined]
        made.values = values
        made.thread = threading.get_ident()
        return made

    def tolist(self) -> Any:
        _waits.note("tolist")
        return self.values.tolist()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def record_stream(self, _: Any) -> None:
        _recorded.add(self.values.untyped_storage().data_ptr())

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"FakeTensor({self.values!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Waits:
    """What the host waited for, by the operation."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def note(self, what: Any) -> None:
        self.seen.append(str(what))


_waits = Waits()
_pinned: set[int] = set()
_recorded: set[int] = set()
_stages: set[int] = set()
"""Threads that copy to the device in a stream of their own."""


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor)]
    fake = [part for part in given if isinstance(part, FakeTensor)]
    packet, wanted = func.overloadpacket, kwargs.get("device")
    there = FAKE if wanted is None and fake else wanted
    is_copy = packet in _MIXES
    if fake and not is_copy:
        for part in given:
            if not isinstance(part, FakeTensor) and part.dim():
                raise RuntimeError(
                    f"{func} mixes the device with host memory: {tuple(part.shape)} {part.dtype}"
                )
    for part in fake:
        storage = part.values.untyped_storage()
        elsewhere = part.thread in _stages and part.thread != threading.get_ident()
        if elsewhere and storage.nbytes() and storage.data_ptr() not in _recorded:
            raise RuntimeError(f"{func} reads what another stream has made, and its allocator does not know")
    if packet is aten._pin_memory:
        return _page_locked(args[0].clone())
    if packet is aten.is_pinned:
        return args[0].untyped_storage().data_ptr() in _pinned or not args[0].numel()
    if fake and packet in _WAITS:
        _waits.note(func)
    masks = args[1] or () if fake and packet is aten.index else ()
    if any(isinstance(part, Tensor) and part.dtype == torch.bool for part in masks):
        _waits.note(f"{func} by a mask")
    if fake and packet is aten.repeat_interleave and kwargs.get("output_size") is None and len(args) < 3:
        _waits.note(func)
    if (
        is_copy
        and fake
        and packet is aten._to_copy
        and wanted is not None
        and torch.device(wanted).type == "cpu"
    ):
        _waits.note(f"{func} to the host")
    if packet is aten._to_copy and not fake and there is not None and torch.device(there).type == FAKE.type:
        _note_upload(args[0], kwargs.get("non_blocking", False))
    plain_args, plain_kwargs = tree_map(_plain, (args, kwargs))
    if wanted is not None:
        plain_kwargs["device"] = torch.device("cpu")
    pins = plain_kwargs.pop("pin_memory", False)
    made = func(*plain_args, **plain_kwargs)
    if pins:
        _page_locked(made)
    if there is None or torch.device(there).type != FAKE.type:
        if func._schema.is_mutable and given:
            return _same(made, given)
        return made
    if func._schema.is_mutable:
        return _same(made, given)
    return tree_map(lambda value: FakeTensor(value) if isinstance(value, Tensor) else value, made)


def _same(made: Any, given: list[Tensor]) -> Any:
    """What was changed in place is the very tensor that was given."""
    by_values = {id(_plain(one)): one for one in given}
    return tree_map(lambda value: by_values.get(id(value), value), made)


def _plain(value: Any) -> Any:
    return value.values if isinstance(value, FakeTensor) else value


def _page_locked(tensor: Tensor) -> Tensor:
    _pinned.add(tensor.untyped_storage().data_ptr())
    _kept.append(tensor)
    return tensor


_kept: list[Tensor] = []


def _note_upload(source: Tensor, non_blocking: bool) -> None:
    if source.numel() and not (non_blocking and source.untyped_storage().data_ptr() in _pinned):
        _waits.note("a copy of pageable memory")


class _Stream:
    def record_event(self) -> object:
        return self

    def wait_event(self, _: object) -> None:
        pass


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def fake_device(patch: pytest.MonkeyPatch) -> Iterator[Waits]:
    """Have `device="cuda"` of a loader mean the device, in this thread and those of the loader."""
    _waits.seen.clear()
    for known in (_pinned, _recorded, _stages):
        known.clear()
    _kept.clear()
    patch.setattr(resources, "resolve_device", lambda *_: FAKE)
    patch.setattr(loader_options, "resolve_device", lambda *_: FAKE, raising=False)
    patch.setattr(resources, "device_memory", lambda *_, **__: (1 << 34, 1 << 34, "made up"))
    make_order = order.Order.epoch

    def epoch(self: Any, number: int, device: Any = None) -> Any:
        return order.epoch_on(self, number, device) if device == FAKE else make_order(self, number, device)

    patch.setattr(order.Order, "epoch", epoch)
    make_tensor = torch.tensor

    def tensor(values: Any, *, device: Any = None, **how: Any) -> Tensor:
        made = make_tensor(values, device="cpu", **how)
        return made if device is None or torch.device(device).type == "cpu" else made.to(device)

    patch.setattr(torch, "tensor", tensor)  # of `meta` it makes no values
    threads = threading.local()

    def begin_thread(_: torch.device) -> None:
        if not hasattr(threads, "mode"):
            _stages.add(threading.get_ident())
            threads.mode = _Mode()
            threads.mode.__enter__()

    patch.setattr(disk, "begin_thread", begin_thread)
    make_partial = disk.PartialBatches.__init__

    def partial_batches(self: Any, *given: Any, **named: Any) -> None:
        make_partial(self, *given, **named)
        self._cuda, self._stream = True, _Stream()

    patch.setattr(disk.PartialBatches, "__init__", partial_batches)
    patch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    patch.setattr(torch.cuda, "current_stream", lambda _: _Stream())
    with _Mode():
        yield _waits

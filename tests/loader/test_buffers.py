from __future__ import annotations

import torch

from stoker.loader.batch import KEPT, Buffers


def buffers() -> Buffers:
    return Buffers((4, 5), torch.float32)


def test_memory_nobody_refers_to_is_reused() -> None:
    pool = buffers()
    first = pool.take()
    address = first.data_ptr()
    del first

    assert pool.take().data_ptr() == address


def test_memory_somebody_refers_to_is_never_reused() -> None:
    """A view, a numpy array and a storage all keep it, long after the tensor itself is gone."""
    pool = buffers()
    kept = [pool.take()[1], pool.take().numpy(), pool.take().untyped_storage(), pool.take().view(torch.int32)]
    taken = {kept[0].data_ptr() - 20, kept[1].ctypes.data, kept[2].data_ptr(), kept[3].data_ptr()}
    assert len(taken) == 4

    for _ in range(20):
        assert pool.take().data_ptr() not in taken


def test_memory_that_went_to_another_process_is_not_reused() -> None:
    pool = buffers()
    shared = pool.take()
    shared.share_memory_()
    address = shared.data_ptr()
    del shared

    assert pool.take().data_ptr() != address


def test_batches_kept_for_good_do_not_end_reuse() -> None:
    pool = buffers()
    kept = [pool.take() for _ in range(KEPT * 3)]

    assert len({tensor.data_ptr() for tensor in kept}) == KEPT * 3
    last = pool.take()
    address = last.data_ptr()
    del last
    assert pool.take().data_ptr() == address

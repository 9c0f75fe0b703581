"""Mistakes in the values of a program's tensors. On a GPU the host learns of them later, because it does not wait."""

from __future__ import annotations

from ctypes import c_uint64

import torch
from torch import Tensor

_KINDS = 8  # of mistakes: a byte for each, which the host reads as one number
_ALL_RIGHT = int.from_bytes(_KINDS * b"\1", "little")


def is_late(t: Tensor) -> bool:
    """Return whether the host would have to wait for the values of a tensor."""
    return t.is_cuda


class _Flags:
    """One bool for each kind of mistake, on a device and in memory of the host: False for a mistake, which stays."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # a tensor that is made in inference mode can be changed there alone
            self.device = torch.ones(_KINDS, dtype=torch.bool, device=device)
            self.of_kind = [self.device[kind] for kind in range(_KINDS)]
            self._host = torch.ones(_KINDS, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
        self._seen = c_uint64.from_address(self._host.data_ptr())  # a look costs 0.1 us, and no lock of the tensor

    def refuse_unless(self, right: Tensor, kind: int) -> None:
        self.of_kind[kind].logical_and_(right)
        self._host.copy_(self.device, non_blocking=True)

    def first_wrong(self) -> int | None:
        """Return the first kind that the host has seen to be wrong. Never wait."""
        if self._seen.value == _ALL_RIGHT:
            return None
        return self._host.tolist().index(False)

    def reset(self) -> None:
        self.device.fill_(True)
        self._host.fill_(True)


class LateMistakes:
    """Refuse wrong values: on a CPU at once, on a GPU as soon as the host sees what the device has found.

        late.refuse_unless(right, "topk_idx: ...")   # on a GPU two small operations in the current stream
        late.take()                                  # the error that has arrived, once, or None

    A device-side assert would need no host wait either, but it ends the use of CUDA in the process. So whoever calls
    this must see to it that wrong values do no harm until the error is raised.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []  # by kind
        self._flags: dict[torch.device, _Flags] = {}

    def prepare(self, device: torch.device) -> None:
        """Allocate the flags of a device. It is not possible while a CUDA graph is captured."""
        if device not in self._flags:
            self._flags[device] = _Flags(device)

    def refuse_unless(self, right: Tensor, text: str) -> None:
        """Raise ValueError with the text if ``right``, a bool without dimensions, is false: now, or from ``take``.

        text: one of a few, without numbers.
        """
        if not is_late(right):
            if not right:
                raise ValueError(text)
            return
        if text not in self._texts:
            assert len(self._texts) < _KINDS
            self._texts.append(text)
        self.prepare(right.device)
        self._flags[right.device].refuse_unless(right, self._texts.index(text))

    def take(self) -> ValueError | None:
        """Return the error of a mistake that has arrived, and forget it. Never wait."""
        for flags in self._flags.values():
            kind = flags.first_wrong()
            if kind is not None:
                flags.reset()
                return ValueError(self._texts[kind])
        return None

    def synchronize(self) -> None:
        """Wait until every mistake so far has arrived."""
        for device in self._flags:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

"""Errors in the values of a program's tensors. On a GPU the host learns of them later, because it does not wait."""

from __future__ import annotations

from ctypes import c_uint64

import torch
from torch import Tensor

_KINDS = 8  # kinds of errors, with a byte for each: the host reads all of them as one number
_ALL_RIGHT = int.from_bytes(_KINDS * b"\1", "little")


def must_host_wait(t: Tensor) -> bool:
    """Return whether the host would have to wait for a device to see the values of a tensor."""
    return t.is_cuda


class _Flags:
    """One bool for each kind of error, on a device and in the host's memory. False stands for an error, and stays."""

    def __init__(self, device: torch.device):
        with torch.inference_mode(False):  # a tensor that is made in inference mode can be changed there alone
            self.device = torch.ones(_KINDS, dtype=torch.bool, device=device)
            self.of_kind = [self.device[kind] for kind in range(_KINDS)]
            self._host = torch.ones(_KINDS, dtype=torch.bool, device="cpu", pin_memory=device.type == "cuda")
        self._seen = c_uint64.from_address(self._host.data_ptr())  # reading it costs 0.1 us

    def refuse_unless(self, right: Tensor, kind: int) -> None:
        self.of_kind[kind].logical_and_(right)
        self._host.copy_(self.device, non_blocking=True)

    def first_error(self) -> int | None:
        """Return the first kind of error that has reached the host; None if there is none. Never wait."""
        if self._seen.value == _ALL_RIGHT:
            return None
        return self._host.tolist().index(False)

    def reset(self) -> None:
        self.device.fill_(True)
        self._host.fill_(True)


class LateErrors:
    """Refuses wrong values: on a CPU at once, on a GPU as soon as the host sees what the device has found.

        late.refuse_unless(right, "topk_idx: ...")   # on a GPU two small operations in the current stream
        late.take()                                  # the error that has arrived, once, or None

    A device-side assert would not make the host wait either, but after it the process can no longer use CUDA. So the
    caller has to make sure that wrong values do no harm until the error is raised.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []  # by kind
        self._flags: dict[torch.device, _Flags] = {}

    def prepare(self, device: torch.device) -> None:
        """Allocate the flags of a device, which is not possible while a CUDA graph is captured."""
        if device not in self._flags:
            self._flags[device] = _Flags(device)

    def refuse_unless(self, right: Tensor, text: str) -> None:
        """Raise ValueError with the text if ``right``, a bool without dimensions, is false: now, or from ``take``.

        text: one of at most 8 texts, so it contains no numbers
        """
        if not must_host_wait(right):
            if not right:
                raise ValueError(text)
            return
        if text not in self._texts:
            assert len(self._texts) < _KINDS
            self._texts.append(text)
        self.prepare(right.device)
        self._flags[right.device].refuse_unless(right, self._texts.index(text))

    def take(self) -> ValueError | None:
        """Return an error that has reached the host, and forget it; None if there is none. Never wait."""
        for flags in self._flags.values():
            kind = flags.first_error()
            if kind is not None:
                flags.reset()
                return ValueError(self._texts[kind])
        return None

    def synchronize(self) -> None:
        """Wait until every error so far has reached the host."""
        for device in self._flags:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

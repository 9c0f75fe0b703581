"""The text: Python's own language reference, which every CPython carries in ``pydoc_data.topics`` for ``help()``.

Some topics occur again inside larger ones ("attribute-access" is a chapter of "specialnames"). So repeated paragraphs
are left out. Otherwise a fifth of the text would occur twice, and held-out text would also be training text.
"""

from __future__ import annotations

from collections import Counter
from math import log2

import torch
from torch import Tensor

HELD_OUT_EVERY, HELD_OUT_FIRST = (
    10,
    5,
)  # of the sorted topics, numbers 5, 15, 25, ... are held out: about 9% of the bytes


def load_text() -> tuple[bytes, bytes]:
    """Return the training and the held-out bytes: whole topics in sorted order, each paragraph once."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SystemExit(
            "train_moe_lm reads its text from the standard module pydoc_data.topics, which this Python lacks; "
            "use a full Python (on Debian and Ubuntu: apt-get install libpython3-stdlib)"
        ) from error
    seen: set[str] = set()
    parts: tuple[list[str], list[str]] = ([], [])
    for number, name in enumerate(sorted(topics)):
        is_held_out = number % HELD_OUT_EVERY == HELD_OUT_FIRST
        for paragraph in topics[name].split("\n\n"):
            words = " ".join(paragraph.split())
            if words not in seen:
                seen.add(words)
                parts[is_held_out].append(paragraph)
    train, held_out = ("\n\n".join(part).encode() for part in parts)
    return train, held_out


def unigram_bits(train: bytes, held_out: bytes) -> float:
    """Return bits per byte of ``held_out`` under the byte frequencies of ``train``, every count plus one."""
    counts = Counter(train)
    return -sum(log2((counts[byte] + 1) / (len(train) + 256)) for byte in held_out) / len(held_out)


def bigram_bits(train: bytes, held_out: bytes, smoothing: float = 0.02) -> float:
    """Return the same if the byte before is known: pairs counted in ``train``, every count plus ``smoothing``."""
    singles, pairs = Counter(train[:-1]), Counter(zip(train, train[1:]))
    bits = 0.0
    for previous, byte in zip(held_out, held_out[1:]):
        bits -= log2((pairs[previous, byte] + smoothing) / (singles[previous] + 256 * smoothing))
    return bits / (len(held_out) - 1)


def to_tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class RandomWindows:
    """Endless batches ``(inputs, targets)``, each int64 ``[batch, seq_len]``: random windows for one rank.

    They are on the device of ``text``, and the same on every device.
    """

    def __init__(self, text: Tensor, batch: int, seq_len: int, seed: int, rank: int):
        self.text, self.batch, self.seq_len = text, batch, seq_len
        self.generator = torch.Generator().manual_seed(1_000 * seed + rank)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.seq_len, (self.batch, 1), generator=self.generator)
        windows = self.text[(starts + torch.arange(self.seq_len + 1)).to(self.text.device)]
        return windows[:, :-1], windows[:, 1:]


def held_out_batches(text: Tensor, batch: int, seq_len: int, rank: int, num_ranks: int, max_windows: int | None = None):
    """Return this rank's share of ``text`` in adjacent windows, as a list of ``(inputs, targets)``.

    All ranks must dispatch in step, so each gets the same number of batches, of the same sizes; the few windows left
    over are dropped. ``max_windows`` (of all ranks) takes an even sample.
    """
    windows = text.unfold(0, seq_len + 1, seq_len)
    if max_windows is not None:
        windows = windows[:: max(1, len(windows) // max_windows)]
    share = windows[rank : len(windows) // num_ranks * num_ranks : num_ranks]
    return [(piece[:, :-1], piece[:, 1:]) for piece in share.split(batch)]

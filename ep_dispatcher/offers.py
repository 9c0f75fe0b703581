"""The messages of a gather (gather.py). Whoever can connect to the store can also write there, so all is checked.

They are JSON: lists of the fields of an ``Offer`` or a ``Decision``, in their order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ep_dispatcher._version import __version__
from ep_dispatcher.stores import are_ranks, read_json

MAX_BYTES = 2**20  # of a message
MAX_TEXT = 2**16  # of an error in it
LATE = "PeersLate"  # the kind of an offer of a rank that waited for others in vain
ERRORS: dict[str, type[RuntimeError | ValueError]] = {"RuntimeError": RuntimeError, "ValueError": ValueError}


class Offer(NamedTuple):
    """The outcome of one rank's step, as the other ranks get it."""

    attempts: int  # of the rank with this group
    result: Any = None  # if the kind is LATE, the ranks that it waited for
    kind: str | None = None  # LATE, or that of the error, which travels by its name
    text: str | None = None  # of the error


class Decision(NamedTuple):
    """What became of a step, the same for all ranks: it is complete, or ended because of ``ranks``."""

    ranks: list[int]  # those that did not arrive; the one that left; none if the step is complete
    left_by: str = ""  # the error by which that one left


def read_offer(message: bytes, own: Offer, num_ranks: int) -> Offer | None:
    """Return the offer in a message; None if it is none, or if its result has another form than that of ``own``."""
    fields = read_json(message, MAX_BYTES)
    if type(fields) is not list or len(fields) != len(Offer._fields):
        return None
    offer = Offer(*fields)
    if type(offer.attempts) is not int or offer.attempts < 0:
        return None
    if offer.kind is None:
        is_sound = offer.text is None and (own.kind is not None or _alike(offer.result, own.result))
    elif type(offer.kind) is not str or type(offer.text) is not str:
        is_sound = False
    elif offer.kind == LATE:
        is_sound = are_ranks(offer.result, num_ranks)
    else:
        is_sound = offer.kind in ERRORS and offer.result is None
    return offer if is_sound else None


def read_decision(message: bytes, num_ranks: int) -> Decision:
    """Return the decision in a message. ValueError if it is none."""
    match read_json(message, MAX_BYTES):
        case [ranks, str(left_by)] if are_ranks(ranks, num_ranks) and (ranks or not left_by):
            return Decision(ranks, left_by)
    raise ValueError(f"{message[:100]!r} is no decision of ep_dispatcher {__version__}")


def _alike(one: Any, other: Any) -> bool:
    """Return whether two results have the same form. None may stand for anything but a dict."""
    if isinstance(one, dict) or isinstance(other, dict):
        if not (isinstance(one, dict) and isinstance(other, dict)):
            return False
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return not other or all(_alike(element, other[min(i, len(other) - 1)]) for i, element in enumerate(one))
    return one is None or other is None or type(one) is type(other) or {type(one), type(other)} == {int, float}

"""The caller's own words in the errors of one buffer: what it is doing, and how it numbers its plans."""

from __future__ import annotations

import torch

from ep_dispatcher.errors import DisagreementError, OtherRoutingError, PeerTimeoutError


class Wording:
    """Puts an engine's errors into the words of the caller. A buffer sets the words, its engine uses them."""

    def __init__(self, plan_text: str = "checkpointed forward pass {}, dispatch {}"):
        self.note = ""  # Buffer.note
        self.plan_text = plan_text  # for OtherRoutingError.where

    def reword(self, error: PeerTimeoutError | ValueError) -> PeerTimeoutError | ValueError:
        """Return the error to be raised in place of an engine's error."""
        if isinstance(error, (PeerTimeoutError, DisagreementError)):
            in_backward = torch._C._current_graph_task_id() != -1
            error.note = self.note or ("in a backward, which every rank must run" if in_backward else "")
        if isinstance(error, OtherRoutingError):
            return OtherRoutingError(f"{self.plan_text.format(*error.where)}, recompute: {error}", error.where)
        return error

    def __enter__(self) -> None:
        """Raise an engine's errors in the caller's words: ``with wording: ...``."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (PeerTimeoutError, ValueError)):
            explained = self.reword(error)
            if explained is not error:
                raise explained

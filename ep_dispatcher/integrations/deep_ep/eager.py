"""Keeps torch.compile out of calls of deep_ep."""

from __future__ import annotations

from types import FunctionType
from typing import TypeVar

import torch

C = TypeVar("C", bound=type)


def outside_graphs(cls: C) -> C:
    """Let torch.compile break its graph at every public method of a class, and run the method as it is.

    It does so at DeepEP's methods too, because they are compiled code. An operator for the graph is no choice here: a
    handle carries Python objects, the number of received rows is known on the host alone, and ranks agree on sizes.
    """
    for name, member in list(vars(cls).items()):
        function = member.__func__ if isinstance(member, staticmethod) else member
        if isinstance(function, FunctionType) and (name == "__init__" or not name.startswith("_")):
            eager = torch.compiler.disable(function, reason="the host takes part in operations of deep_ep")
            setattr(cls, name, staticmethod(eager) if isinstance(member, staticmethod) else eager)
    return cls

"""What integrations say to a user."""

import contextlib
import io
from collections.abc import Iterator

from ep_dispatcher.integrations import messages


@contextlib.contextmanager
def lines_in_use() -> Iterator[list[str]]:
    """Yield a list that has, afterwards, what this rank has printed of integrations in use, as in a new job."""
    messages._announced.clear()
    lines: list[str] = []
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        yield lines
    lines += [line for line in said.getvalue().splitlines() if "carries the tokens of" in line]

"""Runs a Megatron training script with ep_dispatcher registered, without an edit of any file.

torchrun ... -m ep_dispatcher.integrations.megatron pretrain_gpt.py <arguments of pretrain_gpt.py> \\
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher
torchrun ... -m ep_dispatcher.integrations.megatron -m package.module <arguments of the module>

The two flags choose this dispatcher. Rank 0 prints a line at the first MoE layer if it is in use. The script's own
--help also has the arguments --ep-dispatcher-...
"""

from __future__ import annotations

import os
import sys

from ep_dispatcher.integrations.launch import launch

FLAGS = {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "ep_dispatcher"}


def _value(argv: list[str], flag: str) -> str | None:
    """The last value that the arguments give to a flag."""
    value = None
    for one, following in zip(argv, [*argv[1:], None]):
        name, equals, text = one.partition("=")
        if name == flag:
            value = text if equals else following
    return value


def prepare() -> None:
    from ep_dispatcher.integrations.megatron.plugin import register

    registration = register()
    if os.environ.get("RANK", "0") == "0":
        print(registration, flush=True)
        wrong = [f"{flag} {value}" for flag, value in FLAGS.items() if _value(sys.argv, flag) != value]
        if wrong:
            print(
                f"ep_dispatcher: the arguments do not choose it; missing: {' '.join(wrong)}",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    launch("ep_dispatcher.integrations.megatron", __doc__, prepare)

"""Runs a Megatron training script with ep_dispatcher registered, without an edit of any file.

torchrun ... -m ep_dispatcher.integrations.megatron pretrain_gpt.py <arguments of pretrain_gpt.py> \\
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher
torchrun ... -m ep_dispatcher.integrations.megatron -m package.module <arguments of the module>

The two flags choose this dispatcher. Rank 0 prints a line at the first MoE layer if it is in use. The script's own
--help also has the arguments --ep-dispatcher-...
"""

from __future__ import annotations

import argparse
import os
import sys

from ep_dispatcher.integrations.launch import launch

FLAGS = {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "ep_dispatcher"}


def prepare() -> None:
    from ep_dispatcher.integrations.megatron.plugin import register

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in FLAGS:
        parser.add_argument(flag, nargs="?", dest=flag)
    given = vars(parser.parse_known_args()[0])  # before register(), which looks at parsers with these flags
    registration = register()
    if os.environ.get("RANK", "0") == "0":
        print(registration, flush=True)
        wrong = [f"{flag} {value}" for flag, value in FLAGS.items() if given[flag] != value]
        if wrong:
            text = f"ep_dispatcher: the arguments do not choose it; missing: {' '.join(wrong)}"
            print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    launch("ep_dispatcher.integrations.megatron", __doc__, prepare)

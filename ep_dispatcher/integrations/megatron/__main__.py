"""Runs a Megatron training script with ep_dispatcher registered, without an edit of any file.

torchrun ... -m ep_dispatcher.integrations.megatron pretrain_gpt.py <arguments of pretrain_gpt.py> \\
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher
torchrun ... -m ep_dispatcher.integrations.megatron -m package.module <arguments of the module>

The two flags choose this dispatcher, and so do the fields of the same names if the script makes a TransformerConfig
itself. Rank 0 prints a line when the dispatcher is in use, or when an MoE layer has another one. The script's own
--help also lists the arguments --ep-dispatcher-...
"""

from __future__ import annotations

import os

from ep_dispatcher.integrations.run_program import run_program


def prepare() -> None:
    from ep_dispatcher.integrations.megatron.plugin import register

    registration = register()
    registration.expects_use = True
    if os.environ.get("RANK", "0") == "0":
        print(registration, flush=True)


if __name__ == "__main__":
    run_program("ep_dispatcher.integrations.megatron", __doc__, prepare)

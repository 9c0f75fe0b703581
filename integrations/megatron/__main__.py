"""Runs a Megatron training script with ep_dispatcher registered, without an edit of any file.

torchrun ... -m ep_dispatcher.integrations.megatron pretrain_gpt.py <arguments of pretrain_gpt.py> \\
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher

The two flags choose this dispatcher. Rank 0 prints a line at the first MoE layer if it is in use.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

FLAGS = {"--moe-token-dispatcher-type": "flex", "--moe-flex-dispatcher-backend": "ep_dispatcher"}


def _value(argv: list[str], flag: str) -> str | None:
    """The last value that the arguments give to a flag."""
    value = None
    for one, following in zip(argv, [*argv[1:], None]):
        name, equals, text = one.partition("=")
        if name == flag:
            value = text if equals else following
    return value


def _allow_name_in_parsers() -> None:
    """Also where a Megatron of one's own has written the choices of the flag by hand."""
    from ep_dispatcher.integrations.megatron.plugin import NAME

    add_argument = argparse._ActionsContainer.add_argument

    def add(container, *names, **options):
        choices = options.get("choices")
        flags = [name.replace("_", "-") for name in names]  # Megatron-Bridge writes it with underscores
        if "--moe-flex-dispatcher-backend" in flags and choices is not None and NAME not in choices:
            options["choices"] = (*choices, NAME)
        return add_argument(container, *names, **options)

    argparse._ActionsContainer.add_argument = add  # type: ignore[assignment,method-assign]  # Megatron has no hook


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.strip())
        sys.exit(0 if len(sys.argv) > 1 else 2)
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    if not os.path.isfile(script):
        sys.exit(f"ep_dispatcher.integrations.megatron: script: given {script!r}, allowed: a Python file that exists")
    # As `python script.py` does: what lies beside the script comes first, also a megatron/ of its own.
    if not getattr(sys.flags, "safe_path", False):  # python -P: Python puts no folder there, and so do we
        sys.path[0] = os.path.dirname(os.path.abspath(script))

    from ep_dispatcher.integrations.megatron.plugin import register

    registration = register()
    _allow_name_in_parsers()
    if os.environ.get("RANK", "0") == "0":
        print(registration, flush=True)
        wrong = [f"{flag} {value}" for flag, value in FLAGS.items() if _value(sys.argv, flag) != value]
        if wrong:
            print(
                f"ep_dispatcher: the arguments do not choose it; missing: {' '.join(wrong)}",
                file=sys.stderr,
                flush=True,
            )
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

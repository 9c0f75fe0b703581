"""Lists the programs of this package: python -m ep_dispatcher"""

import sys

from ep_dispatcher import __version__, engines

TOOLS = (
    ("ep_dispatcher.doctor", "what was found on this machine, what will be used, how to get the rest"),
    ("ep_dispatcher.bench", "times of dispatch and combine, beside a plain all-to-all"),
    ("ep_dispatcher.envs", "every EP_DISPATCHER_* switch, as a table"),
    ("ep_dispatcher.integrations.megatron", "runs a Megatron training script with this dispatcher"),
    ("ep_dispatcher.integrations.megatron.parity", "compares two dispatchers of Megatron in an MoE layer of yours"),
    ("ep_dispatcher.integrations.deep_ep", "runs a program written for DeepEP on this engine"),
)


def main() -> int:
    print(f"ep_dispatcher {__version__}: {engines.summary()}\n")
    width = max(len(name) for name, _ in TOOLS)
    print("Run one of these with python -m, or torchrun ... -m where it has several ranks. --help says how.\n")
    print("\n".join(f"  {name:{width}}  {does}" for name, does in TOOLS))
    return 0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main())

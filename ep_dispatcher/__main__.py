"""Lists the programs of this package: python -m ep_dispatcher"""

import sys

TOOLS = (
    ("ep_dispatcher.doctor", "what was found on this machine, what will be used, how to get the rest"),
    ("ep_dispatcher.bench", "times of dispatch and combine, beside a plain all-to-all"),
    ("ep_dispatcher.estimate", "bytes, memory and times on machines that are not at hand, by calculation"),
    ("ep_dispatcher.envs", "every EP_DISPATCHER_* switch, as a table"),
    ("ep_dispatcher.integrations.megatron", "runs a Megatron training script with this dispatcher"),
    ("ep_dispatcher.integrations.megatron.parity", "compares an MoE layer of Megatron with both dispatchers"),
    ("ep_dispatcher.integrations.deep_ep", "runs a program written for DeepEP on this engine"),
)


def main() -> int:
    width = max(len(name) for name, _ in TOOLS)
    print("Run one of these with python -m, or torchrun ... -m where it has several ranks. --help says how.\n")
    print("\n".join(f"  {name:{width}}  {does}" for name, does in TOOLS))
    return 0 if sys.argv[1:] in ([], ["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main())

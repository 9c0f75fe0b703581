"""Process groups made anew, and a module that is loaded again."""

from torch.distributed import ProcessGroup


def forwarded(attribute: str, *names: str) -> list:
    """Methods that call those of an attribute."""

    def forward(name):
        return lambda self, *args, **kwargs: getattr(getattr(self, attribute), name)(*args, **kwargs)

    return [forward(name) for name in names]


class Reloadable(ProcessGroup):
    """A group that can be dropped and made again, as frameworks of reinforcement learning give it to Megatron."""

    def __init__(self, group: ProcessGroup):
        super().__init__(rank=group.rank(), size=group.size())
        self.group: ProcessGroup | None = group

    def __getattr__(self, name):
        return getattr(self.group, name)

    rank, size, allreduce = forwarded("group", "rank", "size", "allreduce")

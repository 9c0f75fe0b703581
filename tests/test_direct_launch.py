"""Launches past Triton's code in Python: what its function in C is called with. Neither Triton nor a GPU is needed.

`Launcher` here does what Triton's CudaLauncher does, in the two ways that versions 3.4 to 3.9 have.
"""

import sys
from types import SimpleNamespace

import pytest
import torch

from ep_dispatcher.moe.direct_launch import DirectLaunch

GRID, STREAM, FUNCTION, PACKED = (5, 2, 1), 77, 1234, (4, 1)


class Map:
    """Stands for Triton's PyCUtensorMap."""

    def __init__(self, *content):
        self.content = content


class Matrix:
    def __init__(self, rows: int, columns: int, block=(2, 8), memory=None):
        self.base = torch.zeros(rows, columns) if memory is None else memory
        self.shape, self.strides, self.block_shape = (rows, columns), (columns, 1), block


made: list[Map] = []


def make_tensordesc_arg(arg, metadata):
    if metadata is None:
        return [arg.base, *arg.shape, *arg.strides]
    made.append(Map(metadata, arg.base.data_ptr(), tuple(arg.shape)))
    return [made[-1], *arg.shape, *arg.strides]


def wrap(launcher, places, tensordesc_meta, is_packed):
    def inner(*args):
        head, tail = (args[:-1], args[-1]) if is_packed else (args[:9], args[9:])
        final, number = [], 0
        for i, arg in enumerate(tail):
            if i in places:
                final.extend(make_tensordesc_arg(arg, tensordesc_meta[number]))
                number += 1
            else:
                final.append(arg)
        return launcher(*head, final) if is_packed else launcher(*head, *final)

    return inner


class Launcher:
    """Triton's: it calls the function in C, `launch_in_c`, with the grid, the stream and much else."""

    def __init__(self, launch_in_c, places=(), metadata=(), is_packed=False, scratch=None):
        self.is_packed, self.scratch = is_packed, scratch
        self.launch = wrap(launch_in_c, places, metadata, is_packed) if places else launch_in_c

    def __call__(self, x, y, z, stream, function, packed, described, enter, leave, *args):
        if self.is_packed:
            self.launch(x, y, z, stream, function, False, packed, self.scratch, args)
        else:
            self.launch(x, y, z, stream, function, False, self.scratch, packed, enter, *args)


def compiled(run, metadata):
    return SimpleNamespace(
        run=run, function=FUNCTION, packed_metadata=PACKED, metadata=SimpleNamespace(tensordesc_meta=metadata)
    )


@pytest.fixture
def calls():
    made.clear()
    return []


class Recorder:
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, *call):
        self.calls.append(call)


def by_triton(run, arguments):
    run(*GRID, STREAM, FUNCTION, PACKED, None, None, None, *arguments)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_matrices", [False, True])
def test_the_function_in_c_gets_what_triton_gives_it(calls, is_packed, has_matrices):
    first = [Matrix(4, 16), Matrix(8, 16, (2, 4))] if has_matrices else []
    metadata = ["first", "second"] if has_matrices else None
    places = range(len(first))
    run = Launcher(Recorder(calls), places, metadata, is_packed)
    x = torch.zeros(4)
    direct = DirectLaunch.of(compiled(run, metadata), [*first, x, 32, None, (1, 2)])
    assert direct is not None and not calls, "nothing was launched"

    later = [Matrix(6, 16), Matrix(8, 16, (2, 4))] if has_matrices else []
    by_triton(run, [*later, x, 48, None, (1, 2)])
    direct(GRID, STREAM, [*later, x.data_ptr(), 48, None, (1, 2)], list(places))
    triton, ours = calls
    if is_packed:
        triton, ours = (*triton[:-1], *triton[-1]), (*ours[:-1], *ours[-1])
    assert len(triton) == len(ours)
    for theirs, one in zip(triton, ours):
        if isinstance(theirs, Map):
            assert theirs.content == one.content
        elif theirs is x:
            assert one == x.data_ptr()
        else:
            assert theirs == one


def test_a_matrix_is_described_once_for_each_address_and_size(calls):
    run = Launcher(Recorder(calls), [0], ["only"])
    memory = torch.zeros(256)
    direct = DirectLaunch.of(compiled(run, ["only"]), [Matrix(4, 16, memory=memory), 1])
    made.clear()
    for rows, tensor in ((4, memory), (4, memory), (5, memory), (4, memory[16:]), (5, memory)):
        direct(GRID, STREAM, [Matrix(rows, 16, memory=tensor), 1], [0])
    assert [one.content[1:] for one in made] == [
        (memory.data_ptr(), (4, 16)),
        (memory.data_ptr(), (5, 16)),
        (memory[16:].data_ptr(), (4, 16)),
    ]
    maps = [call[9] for call in calls]
    assert maps == [made[0], made[0], made[1], made[2], made[1]]


def test_old_descriptions_make_room(calls, monkeypatch):
    monkeypatch.setattr("ep_dispatcher.moe.direct_launch.MOST_DESCRIPTIONS", 2)
    run = Launcher(Recorder(calls), [0], ["only"])
    direct = DirectLaunch.of(compiled(run, ["only"]), [Matrix(4, 16)])
    memory = torch.zeros(256)
    for rows in (1, 2, 3, 3, 4):
        direct(GRID, STREAM, [Matrix(rows, 16, memory=memory)], [0])
    assert [call[9].content[2] for call in calls] == [(rows, 16) for rows in (1, 2, 3, 3, 4)]


class OtherOrder(Launcher):
    def __call__(self, x, y, z, stream, *rest):
        self.launch(stream, x, y, z, *rest)


class OtherArguments(Launcher):
    def __call__(self, x, y, z, stream, function, packed, described, enter, leave, *args):
        self.launch(x, y, z, stream, function, *args, len(args))


class FewerArguments(Launcher):
    def __call__(self, x, y, z, stream):
        raise AssertionError("not reached")


class TwoLaunches(Launcher):
    def __call__(self, *args):
        self.launch(*args)
        self.launch(*args)


class NeedsAnAllocator(Launcher):
    def __call__(self, *args):
        raise RuntimeError("no allocator is set")


@pytest.mark.parametrize("kind", [OtherOrder, OtherArguments, FewerArguments, TwoLaunches, NeedsAnAllocator])
def test_an_unknown_version_launches_by_itself(calls, kind):
    assert DirectLaunch.of(compiled(kind(Recorder(calls)), None), [torch.zeros(4), 32]) is None


def test_memory_of_one_launch_is_not_repeated(calls):
    run = Launcher(Recorder(calls), scratch=torch.zeros(4))
    assert DirectLaunch.of(compiled(run, None), [torch.zeros(4), 32]) is None


@pytest.mark.parametrize("metadata", [None, [None]])
def test_a_kernel_without_tensor_maps_is_left_to_triton(calls, metadata):
    run = Launcher(Recorder(calls), [0], [None])
    assert DirectLaunch.of(compiled(run, metadata), [Matrix(4, 16), 32]) is None


def test_another_description_of_matrices_is_left_to_triton(calls, monkeypatch):
    run = Launcher(Recorder(calls), [0], ["only"])
    monkeypatch.delattr(sys.modules[__name__], "make_tensordesc_arg")
    assert DirectLaunch.of(compiled(run, ["only"]), [Matrix(4, 16), 32]) is None

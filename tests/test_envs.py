import pytest

from ep_dispatcher import envs

SWITCHES = {switch.name.removeprefix("EP_DISPATCHER_"): switch for switch in envs.SWITCHES}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*(switch.name for switch in envs.SWITCHES), *envs.REMOVED):
        monkeypatch.delenv(name, raising=False)


def test_defaults():
    assert [switch() for switch in envs.SWITCHES] == ["auto", None, 100.0, "auto", None, False, None, False]
    assert len(envs.SWITCHES) <= 8, "what is the job's is an argument"


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("ENGINE", "cpu", "cpu"),
        ("ENGINE", " cuda ", "cuda"),
        ("ENGINE", "", "auto"),
        ("RANKS_PER_NODE", "4", 4),
        ("TIMEOUT_S", "0.5", 0.5),
        ("WIRE", "peer", "peer"),
        ("WIRE", "nvshmem-puts", "nvshmem-puts"),
        ("WIRE_GBPS", "50", 50.0),
        ("TRACE", "1", True),
        ("TRACE", "0", False),
    ],
)
def test_values_are_read_when_asked(monkeypatch, name, text, value):
    monkeypatch.setenv(f"EP_DISPATCHER_{name}", text)
    assert SWITCHES[name]() == value


@pytest.mark.parametrize(
    "name, text",
    [
        ("ENGINE", "gpu"),
        ("ENGINE", "CPU"),
        ("RANKS_PER_NODE", "0"),
        ("RANKS_PER_NODE", "two"),
        ("TIMEOUT_S", "0"),
        ("TIMEOUT_S", "inf"),
        ("TIMEOUT_S", "nan"),
        ("TIMEOUT_S", "1e10"),
        ("WIRE", "ib"),
        ("WIRE_GBPS", "0"),
        ("TRACE", "yes"),
        ("MAX_TOKENS_PER_RANK", "0"),
        ("DEEP_EP_EXACT", "yes"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(monkeypatch, name, text):
    switch = SWITCHES[name]
    monkeypatch.setenv(switch.name, text)
    with pytest.raises(ValueError) as caught:
        switch()
    assert str(caught.value) == f"{switch.name}: given {text!r}, allowed: {switch.allowed}"


@pytest.mark.parametrize("name", envs.REMOVED)
def test_a_removed_switch_is_refused_with_what_replaces_it(monkeypatch, name):
    envs.refuse_removed()
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=f"{name}: given '1', allowed: unset") as caught:
        envs.refuse_removed()
    assert envs.REMOVED[name] in str(caught.value) and name not in envs.unknown()


def test_unknown_switches_are_found(monkeypatch):
    monkeypatch.setenv("EP_DISPATCHER_ENGIN", "cpu")
    assert "EP_DISPATCHER_ENGIN" in envs.unknown()


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("EP_DISPATCHER_CUDAA", ["EP_DISPATCHER_CUDA"]),
        ("EP_DISPATCHER_ENGIN", ["EP_DISPATCHER_ENGINE"]),
        ("EP_DISPATCHER_TIMEOUT", ["EP_DISPATCHER_TIMEOUT_S"]),
        ("EP_DISPATCHER_RANK_PER_NODE", ["EP_DISPATCHER_RANKS_PER_NODE"]),
        ("EP_DISPATCHER_PROFILE", []),
    ],
)
def test_the_nearest_switch_is_found_by_what_differs(name, nearest):
    assert envs.nearest(name) == nearest


def test_the_table_has_every_switch():
    for switch in envs.SWITCHES:
        assert f"| `{switch.name}` |" in envs.table()

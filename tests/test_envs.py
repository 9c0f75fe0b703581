import pytest
from lib.errors import assert_refused

from ep_dispatcher import envs

SWITCHES = {switch.name.removeprefix("EP_DISPATCHER_"): switch for switch in envs.SWITCHES}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for switch in envs.SWITCHES:
        monkeypatch.delenv(switch.name, raising=False)


def test_defaults():
    assert [switch() for switch in envs.SWITCHES] == ["auto", None, 100.0, "auto", False, None, False]


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("ENGINE", "cpu", "cpu"),
        ("ENGINE", " cuda ", "cuda"),
        ("ENGINE", "", "auto"),
        ("RANKS_PER_NODE", "4", 4),
        ("TIMEOUT_S", "0.5", 0.5),
        ("WIRE", "peer", "peer"),
        ("TRACE", "1", True),
        ("TRACE", "0", False),
    ],
)
def test_values_are_read_when_asked(monkeypatch, name, text, value):
    monkeypatch.setenv(f"EP_DISPATCHER_{name}", text)
    assert SWITCHES[name]() == value


WRONG = {
    "ENGINE": ["gpu", "CPU"],
    "RANKS_PER_NODE": ["0", "two"],
    "TIMEOUT_S": ["0", "inf", "nan", "1e10"],
    "WIRE": ["ib", "nvshmem-puts"],
    "TRACE": ["yes"],
    "MAX_TOKENS_PER_RANK": ["0"],
    "DEEP_EP_EXACT": ["yes"],
}


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_wrong_value_is_refused(monkeypatch, name, text):
    monkeypatch.setenv(SWITCHES[name].name, text)
    assert repr(text) in assert_refused(SWITCHES[name].name, SWITCHES[name])


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("CUDAA", ["EP_DISPATCHER_CUDA"]),
        ("ENGIN", ["EP_DISPATCHER_ENGINE"]),
        ("TIMEOUT", ["EP_DISPATCHER_TIMEOUT_S"]),
        ("RANK_PER_NODE", ["EP_DISPATCHER_RANKS_PER_NODE"]),
        ("PROFILE", []),
    ],
)
def test_unknown_switches_are_found_and_the_nearest_by_what_differs(monkeypatch, name, nearest):
    monkeypatch.setenv(f"EP_DISPATCHER_{name}", "1")
    assert f"EP_DISPATCHER_{name}" in envs.unknown() and envs.nearest(f"EP_DISPATCHER_{name}") == nearest


def test_an_unknown_switch_is_warned_of_once(monkeypatch, caplog):
    """A switch that was misspelt, or is none any more, would otherwise be ignored in silence."""
    monkeypatch.setenv("EP_DISPATCHER_ENGIN", "cpu")
    envs.warn_of_unknown.cache_clear()
    envs.warn_of_unknown()
    envs.warn_of_unknown()
    (record,) = caplog.records
    assert "EP_DISPATCHER_ENGIN is set" in record.getMessage() and "EP_DISPATCHER_ENGINE" in record.getMessage()
    envs.warn_of_unknown.cache_clear()

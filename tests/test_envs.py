import pytest

from ep_dispatcher import envs

READERS = {
    "EP_DISPATCHER_ENGINE": envs.engine,
    "EP_DISPATCHER_RANKS_PER_NODE": envs.ranks_per_node,
    "EP_DISPATCHER_TIMEOUT_S": envs.timeout_s,
    "EP_DISPATCHER_SPIN_US": envs.spin_us,
    "EP_DISPATCHER_NUM_SMS": envs.num_sms,
    "EP_DISPATCHER_RAIL_SMS": envs.rail_sms,
    "EP_DISPATCHER_WIRE": envs.wire,
    "EP_DISPATCHER_WIRE_GBPS": envs.wire_gbps,
    "EP_DISPATCHER_TRACE": envs.trace,
    "EP_DISPATCHER_MAX_TOKENS_PER_RANK": envs.max_tokens_per_rank,
    "EP_DISPATCHER_DEEP_EP_EXACT": envs.deep_ep_exact,
    "EP_DISPATCHER_GROUPED_EXPERTS": envs.grouped_experts,
    "EP_DISPATCHER_EXPERT_WAVES": envs.expert_waves,
    "EP_DISPATCHER_RANK_CAPACITY_FACTOR": envs.rank_capacity_factor,
    "EP_DISPATCHER_GEMM_SM_MARGIN": envs.gemm_sm_margin,
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for switch in envs.SWITCHES:
        monkeypatch.delenv(switch.name, raising=False)


def test_defaults():
    defaults = ["auto", None, 100.0, 50, None, None, "auto", None, False, None, False, False, False, None, 0]
    assert [reader() for reader in READERS.values()] == defaults
    assert list(READERS) == [switch.name for switch in envs.SWITCHES]


@pytest.mark.parametrize(
    "name, text, value",
    [
        ("EP_DISPATCHER_ENGINE", "cpu", "cpu"),
        ("EP_DISPATCHER_ENGINE", " cuda ", "cuda"),
        ("EP_DISPATCHER_ENGINE", "", "auto"),
        ("EP_DISPATCHER_RANKS_PER_NODE", "4", 4),
        ("EP_DISPATCHER_TIMEOUT_S", "0.5", 0.5),
        ("EP_DISPATCHER_SPIN_US", "0", 0),
        ("EP_DISPATCHER_NUM_SMS", "16", 16),
        ("EP_DISPATCHER_RAIL_SMS", "2", 2),
        ("EP_DISPATCHER_WIRE", "peer", "peer"),
        ("EP_DISPATCHER_WIRE", "nvshmem-puts", "nvshmem-puts"),
        ("EP_DISPATCHER_WIRE_GBPS", "50", 50.0),
        ("EP_DISPATCHER_RANK_CAPACITY_FACTOR", "1.5", 1.5),
        ("EP_DISPATCHER_GEMM_SM_MARGIN", "auto", "auto"),
        ("EP_DISPATCHER_GEMM_SM_MARGIN", "16", 16),
        ("EP_DISPATCHER_GEMM_SM_MARGIN", "0", 0),
    ],
)
def test_values_are_read_when_asked(monkeypatch, name, text, value):
    monkeypatch.setenv(name, text)
    assert READERS[name]() == envs.read(name) == value


@pytest.mark.parametrize("text, value", [("1", True), ("0", False), ("", False)])
def test_switches_of_integrations(monkeypatch, text, value):
    for name in ("EP_DISPATCHER_DEEP_EP_EXACT", "EP_DISPATCHER_GROUPED_EXPERTS", "EP_DISPATCHER_EXPERT_WAVES"):
        monkeypatch.setenv(name, text)
        assert READERS[name]() is value


@pytest.mark.parametrize(
    "name, text",
    [
        ("EP_DISPATCHER_ENGINE", "gpu"),
        ("EP_DISPATCHER_ENGINE", "CPU"),
        ("EP_DISPATCHER_RANKS_PER_NODE", "0"),
        ("EP_DISPATCHER_RANKS_PER_NODE", "two"),
        ("EP_DISPATCHER_TIMEOUT_S", "0"),
        ("EP_DISPATCHER_TIMEOUT_S", "inf"),
        ("EP_DISPATCHER_TIMEOUT_S", "nan"),
        ("EP_DISPATCHER_TIMEOUT_S", "1e10"),
        ("EP_DISPATCHER_SPIN_US", "-1"),
        ("EP_DISPATCHER_SPIN_US", "1.5"),
        ("EP_DISPATCHER_NUM_SMS", "0"),
        ("EP_DISPATCHER_RAIL_SMS", "0"),
        ("EP_DISPATCHER_WIRE", "ib"),
        ("EP_DISPATCHER_WIRE_GBPS", "0"),
        ("EP_DISPATCHER_TRACE", "yes"),
        ("EP_DISPATCHER_MAX_TOKENS_PER_RANK", "0"),
        ("EP_DISPATCHER_DEEP_EP_EXACT", "yes"),
        ("EP_DISPATCHER_GEMM_SM_MARGIN", "-1"),
        ("EP_DISPATCHER_GEMM_SM_MARGIN", "all"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    allowed = next(switch.allowed for switch in envs.SWITCHES if switch.name == name)
    with pytest.raises(ValueError) as caught:
        READERS[name]()
    assert str(caught.value) == f"{name}: given {text!r}, allowed: {allowed}"


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

"""Configurations of Megatron's MoE layer."""

from lib.megatron_layer import (
    Case,
    Layout,
)

CAPACITY = dict(moe_expert_capacity_factor=0.6)

PAD = dict(moe_expert_capacity_factor=1.3, moe_pad_expert_input_to_capacity=True)

SHARED = dict(moe_shared_expert_intermediate_size=40)

OVERLAP = SHARED | dict(moe_shared_expert_overlap=True)

GATE = OVERLAP | dict(moe_shared_expert_gate=True)

RECOMPUTE = dict(recompute_granularity="selective", recompute_modules=["moe"])

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)

SIGMOID = dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32")

TWO_NODES = dict(EP_DISPATCHER_RANKS_PER_NODE="2")

QUANTIZED = dict(fp8="e4m3", moe_router_padding_for_quantization=True)

EP4, EP2, ALONE = Layout(ep=4), Layout(ep=2), Layout(ep=1)

TP2_EP4, TP2_EP2 = Layout(ep=4, tp=2), Layout(ep=2, tp=2)

ETP2, TP2_ETP2, ETP4 = Layout(ep=2, etp=2), Layout(ep=2, tp=2, etp=2), Layout(ep=1, etp=4)

# alltoall gathers chunks of different sizes over the expert tensor parallel group, which gloo cannot: there the other
# reference, or capacities, are needed. allgather wants the same number of tokens on every rank, and refuses some flags.
ALLTOALL, ALLGATHER = ("alltoall",), ("allgather",)

CASES = {
    "plain": Case(),
    "top-1": Case(settings=dict(moe_router_topk=1, moe_router_pre_softmax=True)),
    "top-8, every expert": Case(settings=dict(moe_router_topk=8)),
    "router fp32": Case(settings=dict(moe_router_dtype="fp32")),
    "router fp64": Case(settings=dict(moe_router_dtype="fp64")),
    "capacity": Case(settings=CAPACITY),
    "capacity by position": Case(settings=CAPACITY | dict(moe_token_drop_policy="position")),
    "capacity padded": Case(settings=PAD),
    "capacity padded, few tokens": Case(settings=PAD | dict(moe_expert_capacity_factor=0.5)),
    "capacity, top-4, uneven": Case(
        settings=CAPACITY | dict(moe_router_topk=4), references=ALLTOALL, lengths=(12, 3, 17, 8)
    ),
    "shared expert": Case(settings=SHARED),
    "shared expert overlapped": Case(settings=OVERLAP, references=ALLTOALL),
    "shared expert overlapped, gate, capacity": Case(settings=GATE | CAPACITY, references=ALLTOALL),
    "recompute moe": Case(settings=RECOMPUTE),
    "recompute moe, capacity padded": Case(settings=RECOMPUTE | PAD),
    "recompute moe, shared expert overlapped, uneven": Case(
        settings=RECOMPUTE | GATE, references=ALLTOALL, lengths=(5, 12, 1, 9)
    ),
    "recompute moe, no tokens": Case(settings=RECOMPUTE, references=ALLTOALL, lengths=(12, 0, 3, 0)),
    "recompute full": Case(settings=FULL, checkpointed=True),
    "recompute shared_experts": Case(
        settings=SHARED | dict(recompute_granularity="selective", recompute_modules=["shared_experts"])
    ),
    "uneven tokens": Case(references=ALLTOALL, lengths=(12, 3, 17, 8)),
    "uneven tokens, Megatron's own router": Case(
        settings=dict(moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001),
        references=ALLTOALL,
        lengths=(5, 12, 1, 9),
        own_router=True,
    ),
    "no tokens": Case(references=ALLTOALL, lengths=(0, 5, 0, 9)),
    "latent": Case(settings=dict(moe_latent_size=16)),
    "latent, shared expert, recompute": Case(settings=dict(moe_latent_size=16) | SHARED | RECOMPUTE),
    "expert bias": Case(settings=SIGMOID),
    "group-limited": Case(settings=dict(moe_router_num_groups=4, moe_router_group_topk=2)),
    "auxiliary losses": Case(settings=dict(moe_aux_loss_coeff=0.01, moe_z_loss_coeff=0.001)),
    "probs on input": Case(
        settings=dict(moe_router_topk=1, moe_router_pre_softmax=True, moe_apply_probs_on_input=True)
    ),
    "linear bias, capacity padded": Case(settings=PAD | dict(add_bias_linear=True), references=ALLTOALL),
    "padding flag": Case(references=ALLTOALL, later=QUANTIZED),
    "padding flag, mxfp8, uneven": Case(
        references=ALLTOALL, later=QUANTIZED | dict(fp8_recipe="mxfp8"), lengths=(12, 3, 0, 8)
    ),
    "quantized without the flag, capacity": Case(settings=CAPACITY, references=ALLTOALL, later=dict(fp8="e4m3")),
    "two nodes": Case(environment=TWO_NODES),
    "two nodes, recompute, capacity, shared expert": Case(
        settings=RECOMPUTE | CAPACITY | OVERLAP, references=ALLTOALL, environment=TWO_NODES, lengths=(12, 0, 17, 8)
    ),
    "four nodes": Case(environment=dict(EP_DISPATCHER_RANKS_PER_NODE="1")),
    "two groups": Case(layout=EP2),
    "two groups, recompute, uneven": Case(layout=EP2, settings=RECOMPUTE, references=ALLTOALL, lengths=(12, 3, 0, 8)),
    "one rank a group": Case(layout=ALONE),
    "sequence parallel": Case(layout=TP2_EP4),
    "sequence parallel, gate, recompute": Case(layout=TP2_EP4, settings=GATE | RECOMPUTE, references=ALLTOALL),
    "sequence parallel, capacity padded": Case(layout=TP2_EP4, settings=PAD),
    "sequence parallel, two groups": Case(layout=TP2_EP2, settings=SHARED | CAPACITY),
    "expert tensor parallel": Case(layout=ETP2, references=ALLGATHER),
    "expert tensor parallel, capacity": Case(layout=ETP2, settings=CAPACITY, references=ALLGATHER),
    "expert tensor parallel, capacity padded": Case(layout=ETP2, settings=PAD),
    "expert tensor parallel, two nodes": Case(layout=ETP2, references=ALLGATHER, environment=TWO_NODES),
    "expert tensor parallel, tp": Case(layout=TP2_ETP2, settings=dict(moe_router_topk=3), references=ALLGATHER),
    "expert tensor parallel, tp, recompute": Case(layout=TP2_ETP2, settings=SHARED | RECOMPUTE, references=ALLGATHER),
    "expert tensor parallel alone": Case(layout=ETP4, references=ALLGATHER),
}

UNEVEN = {EP4: (12, 0, 17, 8), EP2: (12, 0, 17, 8), TP2_EP4: (12, 12, 5, 5)}  # the same within a tensor parallel group

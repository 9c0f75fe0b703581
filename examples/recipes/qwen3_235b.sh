# Qwen3-235B-A22B: 235 billion parameters, 22 billion for a token. 32 nodes of 8 GPUs; the experts of a layer lie on 4.
RECIPE=(
    # Attention: grouped queries, with a norm of queries and keys.
    --num-layers 94 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 64
    --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --position-embedding-type rope --rotary-base 1000000
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 151936 --make-vocab-size-divisible-by 1187
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02

    # Experts: 8 of 128 in every layer.
    --num-experts 128 --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion

    # Parallelism: 8 x 4 pipeline stages of 3 layers, where the embedding and the loss count as one each.
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8
    --num-virtual-stages-per-pipeline-rank 4
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --micro-batch-size 1 --use-distributed-optimizer --bf16 --transformer-impl transformer_engine

    # The dispatcher.
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher
)

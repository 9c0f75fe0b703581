# gpt-oss-120b: 117 billion parameters, 5 billion for a token. 8 nodes of 8 GPUs; the experts of a layer lie on one.
RECIPE=(
    # Attention: every second layer sees 128 tokens; a softmax with a learned sink.
    --num-layers 36 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --kv-channels 64
    --position-embedding-type yarn --rotary-base 150000 --no-rope-fusion --add-qkv-bias
    --rotary-scaling-factor 32 --yarn-original-max-position-embeddings 4096 --yarn-beta-fast 32 --yarn-beta-slow 1
    --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 201088 --make-vocab-size-divisible-by 128
    --normalization RMSNorm --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02

    # Experts: 4 of 128 in every layer, with biases, and a gate that is clamped. Megatron's TEGroupedMLP refuses biases with
    # the fusion of bias and dropout, which is on by default.
    --num-experts 128 --moe-ffn-hidden-size 2880 --moe-router-topk 4 --moe-router-dtype fp32
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0 --no-bias-dropout-fusion
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion

    # Parallelism: 4 pipeline stages of 9 layers.
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
    --micro-batch-size 1 --use-distributed-optimizer --bf16 --transformer-impl transformer_engine
    --recompute-granularity selective --recompute-modules layernorm moe_act

    # The dispatcher.
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher
)

# Kimi-K2: 1 trillion parameters, 32 billion for a token. 64 nodes of 8 GPUs; the experts of a layer lie on 4 nodes.
RECIPE=(
    # Attention: multi-head latent attention.
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 64
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --position-embedding-type rope --rope-type yarn --rotary-base 50000 --rotary-scaling-factor 32
    --mscale 1.0 --mscale-all-dim 1.0 --no-rope-fusion
    --seq-length 4096 --max-position-embeddings 4096 --vocab-size 163840 --make-vocab-size-divisible-by 1280
    --normalization RMSNorm --norm-epsilon 1e-6 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.006

    # Experts: after one dense layer, 8 of 384, and one that all tokens share.
    --moe-layer-freq '([0]*1+[1]*60)' --num-experts 384 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-router-topk 8 --moe-router-topk-scaling-factor 2.827
    --moe-router-score-function sigmoid --moe-router-pre-softmax --moe-router-dtype fp32
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3
    --moe-grouped-gemm --moe-permute-fusion --moe-router-fusion

    # Parallelism: 16 pipeline stages of 4 layers, the last of 1.
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 16
    --pipeline-model-parallel-layout 'Etttt|(tttt|)*14tL'
    --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
    --micro-batch-size 1 --use-distributed-optimizer --bf16 --transformer-impl transformer_engine
    --recompute-granularity selective --recompute-modules mla_up_proj mlp

    # The dispatcher.
    --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ep_dispatcher
)

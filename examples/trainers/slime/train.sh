#!/usr/bin/env bash
# Train with slime on the rollouts of Rollyard: SLIME=FOLDER bash train.sh [more of slime's arguments]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
: "${SLIME:?give the folder of slime}" "${MEGATRON:=/root/Megatron-LM}" "${GPUS:=4}"
: "${MODEL:=/models/Qwen3-8B}" "${TORCH_DIST:=/models/Qwen3-8B_torch_dist}" "${RUN:=/checkpoints/slime-1}"
export ROLLYARD_JOB=$here/job.yaml ROLLYARD_POOL=default ROLLYARD_WEIGHTS=$RUN/pool
export PYTHONPATH=$here:$MEGATRON CUDA_DEVICE_MAX_CONNECTIONS=1
source "$SLIME/scripts/models/qwen3-8B.sh" # It sets MODEL_ARGS.

ray start --head --num-gpus "$GPUS" --disable-usage-stats
exec python "$SLIME/train.py" "${MODEL_ARGS[@]}" \
  --actor-num-nodes 1 \
  --actor-num-gpus-per-node "$GPUS" \
  --debug-train-only \
  --hf-checkpoint "$MODEL" \
  --ref-load "$TORCH_DIST" \
  --load "$RUN/megatron" \
  --save "$RUN/megatron" \
  --save-interval 1 \
  --save-hf "$RUN/hf/{rollout_id}" \
  --rollout-function-path rollyard_rollout.generate_rollout \
  --eval-function-path slime.rollout.sglang_rollout.generate_rollout \
  --prompt-data "$here/train.jsonl" \
  --input-key prompt \
  --metadata-key metadata \
  --rollout-shuffle \
  --num-rollout 100 \
  --rollout-batch-size 16 \
  --n-samples-per-prompt 8 \
  --rollout-max-response-len 8192 \
  --rollout-temperature 1 \
  --global-batch-size 128 \
  --use-rollout-logprobs \
  --advantage-estimator grpo \
  --eps-clip 0.2 \
  --optimizer adam \
  --lr 1e-6 \
  --lr-decay-style constant \
  --tensor-model-parallel-size 2 \
  --sequence-parallel \
  --recompute-granularity full \
  --recompute-method uniform \
  --recompute-num-layers 1 \
  --use-dynamic-batch-size \
  --max-tokens-per-gpu 16384 \
  --attention-dropout 0.0 \
  --hidden-dropout 0.0 \
  --accumulate-allreduce-grads-in-fp32 \
  --attention-softmax-in-fp32 \
  --attention-backend flash \
  "$@"

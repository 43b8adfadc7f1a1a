#!/usr/bin/env bash
# The whole road: data, tokenizer, training on two ranks, and resuming from the checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

STDLIB=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
rm -rf data/demo runs/demo

ascend-run preprocess --input "$STDLIB" --format python --train-tokenizer 4096 \
    --tokenizer data/demo/tokenizer.json --output-prefix data/demo/train \
    --holdout 0.05 --append-eod

ascend-run --enable ulysses,gmm,swap-attention --config examples/demo.toml

echo "Resuming from the checkpoint for 20 more steps."
ascend-run --enable ulysses,gmm,swap-attention --config examples/demo.toml train.train_iters=270

#!/usr/bin/env bash
# The whole road: data, tokenizer, training on two ranks, and resuming from the checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

STDLIB=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
rm -rf data/demo runs/demo

# A few files of the library's own tests are broken on purpose, hence --skip-undecodable.
ascend-run preprocess --input "$STDLIB" --format python --skip-undecodable \
    --train-tokenizer 2048 --tokenizer-out data/demo/tokenizer.json \
    --holdout 0.05 --output-prefix data/demo/train --heldout-prefix data/demo/heldout

ascend-run --enable ulysses,gmm,swap-attention --config examples/demo.toml

echo "Resuming from the checkpoint for 20 more steps."
ascend-run --enable ulysses,gmm,swap-attention --config examples/demo.toml train.train_iters=320

python examples/check_demo.py runs/demo
echo "Talk to the model: ascend-run chat runs/demo"

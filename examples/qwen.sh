#!/usr/bin/env bash
# From a Hugging Face folder and ShareGPT files to a folder that transformers loads, in two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf data/qwen runs/qwen
python examples/qwen_data.py data/qwen

ascend-run --config examples/qwen.toml
ascend-run convert --to-hf runs/qwen data/qwen/tuned

python examples/qwen_ask.py data/qwen/tuned

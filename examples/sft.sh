#!/usr/bin/env bash
# A base, adapters trained on conversations, and the model that is both; under a minute on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf data/sft runs/sft-base runs/sft
python examples/sft_data.py data/sft

ascend-run preprocess --input data/sft/corpus.jsonl --train-tokenizer 512 \
    --output-prefix data/sft/corpus
ascend-run model.family=llama model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=128 \
    model.num_attention_heads=4 model.num_query_groups=2 model.vocab_size=512 \
    model.make_vocab_size_divisible_by=64 data.train=data/sft/corpus \
    data.tokenizer=data/sft/tokenizer.json data.seq_length=96 train.precision=fp32 \
    train.train_iters=60 train.micro_batch_size=16 train.global_batch_size=16 \
    optimizer.lr=5e-3 checkpoint.save_interval=60 run.output_dir=runs/sft-base
ascend-run convert --to-hf runs/sft-base data/sft/base
cp data/sft/tokenizer.json data/sft/tokenizer_config.json data/sft/base/

ascend-run --config examples/sft.toml

ascend-run convert --to hf runs/sft data/sft/merged

#!/usr/bin/env bash
# A base that has learnt a little of code, and preferences: by dpo, then by simpo; minutes on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf data/dpo runs/dpo-base runs/dpo runs/simpo runs/chosen-only
python examples/dpo_data.py data/dpo

ascend-run preprocess --input data/dpo/corpus.jsonl --train-tokenizer 1024 \
    --tokenizer-out data/dpo/tokenizer.json --output-prefix data/dpo/corpus
ascend-run model.family=llama model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=128 \
    model.num_attention_heads=4 model.num_query_groups=2 model.vocab_size=1024 \
    model.make_vocab_size_divisible_by=64 model.share_embeddings_and_output_weights=true \
    model.max_position_embeddings=512 data.train=data/dpo/corpus \
    data.tokenizer=data/dpo/tokenizer.json data.seq_length=128 train.precision=fp32 \
    train.train_iters=300 train.micro_batch_size=16 train.global_batch_size=16 \
    optimizer.lr=3e-3 optimizer.lr_warmup_iters=10 checkpoint.save_interval=300 \
    run.output_dir=runs/dpo-base
ascend-run convert --to-hf runs/dpo-base data/dpo/base
cp data/dpo/tokenizer.json data/dpo/tokenizer_config.json data/dpo/base/

ascend-run --config examples/dpo.toml
ascend-run --config examples/dpo.toml --task simpo run.output_dir=runs/simpo
# The control: next to no weight of the preference, so that the chosen answers' loss alone trains.
ascend-run --config examples/dpo.toml --task simpo plugins.simpo.beta=1e-6 \
    plugins.simpo.sft_weight=1 run.output_dir=runs/chosen-only

python examples/check_dpo.py runs/dpo runs/simpo

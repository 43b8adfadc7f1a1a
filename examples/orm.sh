#!/usr/bin/env bash
# A base that has learnt to predict code, and a reward model of real endings; minutes on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."

rm -rf data/orm runs/orm-base runs/orm
python examples/dpo_data.py data/orm

ascend-run preprocess --input data/orm/corpus.jsonl --train-tokenizer 1024 \
    --tokenizer-out data/orm/tokenizer.json --output-prefix data/orm/corpus
ascend-run model.family=llama model.num_layers=2 model.hidden_size=64 model.ffn_hidden_size=128 \
    model.num_attention_heads=4 model.num_query_groups=2 model.vocab_size=1024 \
    model.make_vocab_size_divisible_by=64 model.share_embeddings_and_output_weights=true \
    model.max_position_embeddings=512 data.train=data/orm/corpus \
    data.tokenizer=data/orm/tokenizer.json data.seq_length=128 train.precision=fp32 \
    train.train_iters=1200 train.micro_batch_size=16 train.global_batch_size=16 \
    optimizer.lr=3e-3 optimizer.lr_warmup_iters=10 checkpoint.save_interval=1200 \
    run.output_dir=runs/orm-base
ascend-run convert --to-hf runs/orm-base data/orm/base
cp data/orm/tokenizer.json data/orm/tokenizer_config.json data/orm/base/

ascend-run --config examples/orm.toml

python examples/check_dpo.py --least 85 runs/orm

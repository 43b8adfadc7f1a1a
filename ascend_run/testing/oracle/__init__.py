"""The oracle: a plain model and training step, written from the formulas.

It shares no code with the rest of the package: it imports torch, attrs and the records of
``ascend_run.types``, so a mistake that every run of the project makes is not made here too. It is
for reading: one rank, one dtype (float64), no kernels, every score in memory.

Modules and parameters have Megatron's names, so weights load as they are and each output can be
compared with that of a run. Tensors are [B, S, ...], unlike Megatron's [S, B, ...].

``known``       what the oracle has no formula for, by name; torch-free
``batches``     micro-batches, and the documents in them
``layers``      linear, norm, MLP
``positions``   rotary positions, ALiBi
``scaling``     angles of rotary positions, scaled for longer sequences
``attention``   masked softmax attention; self-attention
``latent``      multi-latent attention
``experts``     router, balancing losses, experts
``adapters``    LoRA
``model``       the transformer, the loss, multi-token prediction
``optimizer``   AdamW, its groups, clipping, the schedule of the learning rate
``trace``       moments of every module's tensors, in forward and backward
``training``    gradients of one global batch, and some steps

Letters of shapes: B rows of a micro-batch, S positions, T = B * S tokens, H hidden size, N query
heads, G key-value groups, D width of a query or key, E width of a value, R rotated width, P = R / 2
pairs, L width of a latent, F width of an MLP, X experts, K experts of a token, A rank of an
adapter, V vocabulary.
"""

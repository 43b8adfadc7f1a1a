"""What the loss holds: chunks of logits, and the gradients that it takes in its forward.

The formulas are those of ``ops.linear.linear_cross_entropy`` and ``ops.linear.weight_gradient``.
"""

from __future__ import annotations

from ascend_run.types.config import RunConfig
from ascend_run.types.layout import Layout

from .sizes import Sizes

_CHUNK_BYTES = {True: 64 * 2**20, False: 256 * 2**20}
_ROW_BYTES = {True: 2 * 2**20, False: 128 * 2**20}
"""Whether the ranks compute on a processor -> bytes."""
_PRODUCT_BYTES = 2 * 2**20
_WIDE = 4


def saved_by_loss(config: RunConfig, sizes: Sizes, *, trains: bool) -> tuple[float, float]:
    """Bytes of the gradients of the hidden state and, where it is trained, of the weight."""
    item, rows = _gradient_item(config, sizes), sizes.valid_vocab
    if config.model.num_labels:  # of few positions; the hidden state's has all
        return sizes.tokens * sizes.hidden * sizes.item_bytes, 0.0
    chunked = sizes.tokens > _chunk(config, sizes)
    return (
        sizes.tokens * sizes.hidden * item,
        rows * sizes.hidden * (_WIDE if chunked else item) if trains else 0.0,
    )


def loss_working(config: RunConfig, layout: Layout, sizes: Sizes, *, trains: bool) -> float:
    """The most that is held while the loss is taken, without what the final norm keeps.

    Args:
        trains: Whether the output layer's weight is trained.
    """
    output = sizes.shared_tokens * sizes.hidden * sizes.item_bytes  # of the final norm
    gathered = sizes.tokens * sizes.hidden * sizes.item_bytes if output and layout.tp > 1 else 0
    if not config.parallel.sequence_parallel:
        gathered = 0
    if config.model.num_labels:
        return output + gathered
    item, rows = _gradient_item(config, sizes), sizes.valid_vocab
    chunk = min(_chunk(config, sizes), sizes.tokens)
    logits = chunk * rows * sizes.item_bytes
    if item != sizes.item_bytes or config.model.final_logit_softcapping is not None:
        logits += chunk * rows * item
    hidden, weight = saved_by_loss(config, sizes, trains=trains)
    factor = rows * sizes.hidden * item if item != sizes.item_bytes else 0  # a copy of the weight
    wide = 0
    if item < _WIDE:
        # The ranks of a vocabulary take their softmax in step, a whole chunk at once.
        num_bytes = _ROW_BYTES[config.platform == "cpu"]
        block = chunk if layout.tp > 1 else min(chunk, max(1, num_bytes // (_WIDE * rows)))
        # A block's is there until the next one's has been made.
        wide = block * rows * _WIDE * (1 if block == chunk else 2)
    first = chunk == sizes.tokens
    softmax = logits + wide + hidden + (0 if first else weight)
    masked = chunk * sizes.hidden * item
    product = 0 if first or item == _WIDE else rows * sizes.hidden * item
    if config.platform == "cpu":
        product = min(product, max(_PRODUCT_BYTES, sizes.hidden * item))
    matmul = weight + masked + product
    small = sizes.tokens * (2 * 8 + 6 * _WIDE)  # labels, masks, one number a token
    return max(softmax, logits + hidden + matmul) + factor + output + gathered + small


def loss_backward(config: RunConfig, sizes: Sizes, *, trains: bool) -> float:
    """The most that a backward of the loss makes beside the gradients that its forward saved.

    It scales them in place, unless they are wider than those that it returns. Autograd adds rows of
    padding to the weight's.
    """
    if config.model.num_labels:
        return 0.0
    item, returned = _gradient_item(config, sizes), sizes.item_bytes
    hidden, weight = saved_by_loss(config, sizes, trains=trains)
    table = sizes.valid_vocab * sizes.hidden * returned
    copies = sizes.tokens * sizes.hidden * returned if item > returned else 0.0
    copies += table if weight > table else 0.0
    if copies:
        is_cpu = config.platform == "cpu"
        # The gradient of a loss that is the run's own is 1, which a CPU sees.
        scales = not is_cpu or item > returned or bool(sizes.mtp_layers)
        widest = max(weight, hidden if item > returned else 0.0)
        return copies + (min(widest, _ROW_BYTES[is_cpu]) if scales else 0.0)
    padded = weight > 0 and sizes.valid_vocab < sizes.vocab
    return sizes.vocab * sizes.hidden * returned if padded else 0.0


def _chunk(config: RunConfig, sizes: Sizes) -> int:
    """Tokens whose logits are held at once."""
    num_bytes = config.train.loss_chunk_bytes or _CHUNK_BYTES[config.platform == "cpu"]
    return max(1, num_bytes // (sizes.item_bytes * sizes.valid_vocab))


def _gradient_item(config: RunConfig, sizes: Sizes) -> int:
    """fp16 keeps them wide until they are scaled."""
    return _WIDE if config.train.precision == "fp16" else sizes.item_bytes

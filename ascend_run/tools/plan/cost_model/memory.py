"""Peak memory of the ranks of one stage, and its breakdown.

Evaluates the memory at all moments of a step that can be the peak: the forward of the last experts,
the loss, and each step of the backward of each layer, with the number of forwards in flight from
the pipeline schedule; then the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs

from ascend_run.plugin_api.contracts import Phase, Storage

from .ledger import OFFLOADED, Ledger, Saved
from .schedule import Waiting
from .state import State


@attrs.frozen(kw_only=True)
class Ends:
    """Memory outside of the layers of a stage. Unit: bytes for one micro-batch."""

    hidden: float
    """A hidden state outside of tensor-parallel regions."""
    embedding_norm: float
    """Saved by the norm of the embeddings; 0 if the stage has none."""
    final_norm: float
    """Saved by the final norm; like the next four, 0 if the stage has none."""
    final_norm_backward: float
    loss: float
    """Working memory of the loss."""
    loss_saved: float
    """Gradients that the forward of the loss computes and saves."""
    loss_backward: float
    """Copies that the backward of the loss makes of them."""
    earlier_losses: Mapping[int, float]
    """Layer of multi-token prediction -> what is held, during its backward, until those of the
    losses of fewer tokens ahead: what they saved, and the gradients of later losses."""
    output_gradient: float
    """Gradient of a tied output weight, until that of the embedding is added."""
    embedding_gradient: float
    lookup_gradient: float
    """The same by a lookup of multi-token prediction."""
    lookups_wait: bool
    """Whether the sum of these waits for that of the stage's input, and not in a tied weight's."""
    batch: float
    """Token ids, labels, masks, and rotary tables of both kinds of layers."""
    has_next: bool
    """Whether the stage's output is sent to a next one; it is then held like saved activations."""
    exchanged: float
    """What is received or sent during a backward."""


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes on one rank; the first five, without ``gradient_buffers``, add up to ``peak``."""

    weights: float
    gradients: float
    gradient_buffers: float
    """Part of ``gradients`` that is allocated for the whole run."""
    optimizer: float
    activations: float
    """At the peak, including working memory."""
    buffers: float
    off_device: float
    """Optimizer states that are on the device in their part of the optimizer step only, if at
    all."""
    in_files: float
    """Those of them that are in files, which every step reads and writes."""
    copied: float
    """Those of them that every step copies to the device and back."""
    host: float
    """Host memory at the peak."""
    moment: str
    """When the peak is."""

    @property
    def peak(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@attrs.frozen
class _Held:
    """A candidate for the peak."""

    moment: str
    activations: float
    gradients: float
    host: float


def peak_memory(
    ledger: Ledger,
    chunks: Sequence[Sequence[int]],
    waiting: Sequence[Waiting],
    state: State,
    ends: Ends,
) -> Memory:
    """Compute the peak memory.

    Args:
        chunks: Layers of each chunk, without empty layer slots.
        waiting: From ``schedule.in_flight``.
    """
    walk = _Walk(ledger, chunks, state, ends)
    candidates = [held for chunk, count in waiting for held in walk.backward(chunk, count)]
    candidates += walk.update()
    shared = 1.0 if ledger.host_is_device else 0.0
    most = max(candidates, key=lambda h: h.activations + h.gradients + shared * h.host)
    buffers = sum(ledger.buffers.values())
    host = sum(ledger.host_buffers.values()) + most.host
    host += state.off_device if ledger.optimizer_storage is Storage.HOST else 0.0
    return Memory(
        weights=state.weights,
        gradients=state.gradients + most.gradients,
        gradient_buffers=state.gradients,
        optimizer=state.optimizer,
        activations=most.activations + (host if ledger.host_is_device else 0.0),
        buffers=buffers,
        off_device=state.off_device,
        in_files=state.off_device if ledger.optimizer_storage is Storage.FILE else 0.0,
        copied=state.off_device if ledger.optimizer_bytes is None else 0.0,
        host=0.0 if ledger.host_is_device else host,
        moment=most.moment,
    )


class _Walk:
    def __init__(
        self, ledger: Ledger, chunks: Sequence[Sequence[int]], state: State, ends: Ends
    ) -> None:
        self.ledger, self.chunks, self.state, self.ends = ledger, chunks, state, ends
        self.here = self._by_layer(Storage.DEVICE)
        self.away = self._by_layer(*OFFLOADED)
        self.on_host = self._by_layer(Storage.HOST)

    def backward(self, chunk: int, waiting: Mapping[int, int]) -> Iterator[_Held]:
        """Yield the moments of the loss and the backward of one chunk and micro-batch."""
        ends, ledger, layers = self.ends, self.ledger, list(self.chunks[chunk])
        is_last = chunk == len(self.chunks) - 1
        live = sum(count * self._chunk_bytes(other) for other, count in waiting.items())
        live += self._kept_bytes(chunk, waiting)
        made = self._made_before(layers, is_loss=is_last and not ends.has_next)
        host = sum(
            count * sum(self.on_host[layer] for layer in self.chunks[other])
            for other, count in waiting.items()
        )
        live += ends.exchanged
        # Gradients of earlier micro-batches exist, and new ones are added to them.
        adds_up = ledger.num_microbatches > 1
        gradients = self._gradients() if adds_up else 0.0
        saved_last = ends.final_norm if is_last and not ends.has_next else 0.0
        for moment, held in self._forward(layers):
            yield _Held(f"forward of {moment}", live - saved_last + held, gradients, host)
        if is_last and not ends.has_next:
            back = self._fetched(layers, len(layers))
            extra = ledger.working_bytes(None, Phase.LOSS, "loss")
            yield _Held("loss", live + back + ends.loss + extra, gradients, host)
            copies = ends.loss_saved + ends.loss_backward
            yield _Held("backward of the loss", live + back + copies, gradients, host)
            live += ends.output_gradient
            norm = ends.final_norm_backward + ends.loss_saved - ends.output_gradient
            yield _Held("backward of the final norm", live + back + norm, gradients, host)
            live -= ends.final_norm
            gradients += 0.0 if adds_up else self._gradients("final_norm", "output_layer")
        if not (ledger.ahead and ledger.ahead.kept_forwards):
            live += sum(self._again_bytes(layer) for layer in made)
        lookups = 0.0
        for position in reversed(range(len(layers))):
            layer = layers[position]
            losses = ends.earlier_losses.get(layer, 0.0)
            live += losses
            live += 0.0 if layer in made else self._again_bytes(layer, layers)
            live += self._fetched(layers, position)
            for moment, held in self._layer(layer):
                held += live + lookups
                yield _Held(f"backward of layer {layer}, {moment}", held, gradients, host)
            live -= sum(t.nbytes for t in ledger.saved[layer])
            live -= self._fetched(layers, position) - self.away[layer]
            host -= self.on_host[layer]
            gradients += 0.0 if adds_up else self._gradients(layer=layer)
            if losses:
                held = live + lookups + ends.lookup_gradient
                yield _Held("backward of a lookup", held, gradients, host)
                lookups = ends.lookup_gradient if ends.lookups_wait else 0.0
                held = live + lookups + ends.loss_backward
                yield _Held("backward of the loss", held, gradients, host)
            live -= losses
        if ends.embedding_gradient and chunk == 0:
            held = live + lookups - ends.embedding_norm + ends.embedding_gradient
            yield _Held("backward of the embedding", held, gradients, host)

    def update(self) -> Iterator[_Held]:
        """Yield the moments of the optimizer's step, when no activation is left: gradients are
        copied to float32, if they are to be, and then parameters are updated."""
        state = self.state
        yield _Held("update", 0.0, state.copied_gradients, 0.0)
        extra = self.ledger.working_bytes(None, Phase.UPDATE) + state.on_device_at_once
        yield _Held("update", extra, state.main_gradients or self._gradients(), 0.0)

    def _layer(self, layer: int) -> Iterator[tuple[str, float]]:
        """(step, bytes beside what was held at the layer's beginning)."""
        steps, saved = self.ledger.steps[layer], list(self.ledger.saved[layer])
        freed = 0.0
        for index, step in enumerate(steps):
            working = self.ledger.working_bytes(step, Phase.BACKWARD)
            here = sum(t.nbytes for t in saved if _comes_late(t) and t.part == step.part)
            yield step.key, working + self.ends.hidden + here - freed
            is_last = all(later.part != step.part for later in steps[index + 1 :])
            done = [t for t in saved if t.part == step.part and (is_last or t.name in step.frees)]
            saved = [t for t in saved if t not in done]
            freed += sum(t.nbytes for t in done if not _comes_late(t))

    def _forward(self, layers: Sequence[int]) -> Iterator[tuple[str, float]]:
        """(layer and part, what it holds less what later layers will keep), of the last layer that
        has the part."""
        for part, working in self.ledger.forward_bytes().items():
            later = 0.0
            for layer in reversed(layers):
                if any(tensor.part == part for tensor in self.ledger.saved[layer]):
                    yield f"layer {layer}, {part}", working - later
                    break
                later += self.here[layer]

    def _by_layer(self, *storages: Storage) -> dict[int, float]:
        saved = self.ledger.saved.items()
        return {layer: sum(t.nbytes for t in _at(kept, *storages)) for layer, kept in saved}

    def _chunk_bytes(self, chunk: int) -> float:
        """What one forward of a chunk leaves on the device."""
        ends, is_last = self.ends, chunk == len(self.chunks) - 1
        output = ends.final_norm if is_last and not ends.has_next else ends.hidden
        output += ends.embedding_norm if chunk == 0 else 0.0
        return sum(self.here[layer] for layer in self.chunks[chunk]) + output + ends.batch

    def _kept_bytes(self, chunk: int, waiting: Mapping[int, int]) -> float:
        """What forwards keep that are not recomputed, or are already. The first chunk's backward is
        the last, so it has the others."""
        ahead = self.ledger.ahead
        if ahead is None or not ahead.kept_forwards:
            return 0.0
        surplus, kept = max(0, sum(waiting.values()) - ahead.kept_forwards), 0.0
        for other, count in sorted(waiting.items()):
            dropped = min(surplus, count - (other == chunk))
            surplus -= dropped
            again = sum(self._again_bytes(layer) for layer in self.chunks[other])
            kept += (count - dropped) * again
        return kept

    def _made_before(self, layers: Sequence[int], *, is_loss: bool) -> Sequence[int]:
        """Layers that are recomputed before the chunk's backward begins."""
        ahead = self.ledger.ahead
        if ahead is None or (is_loss and not ahead.kept_forwards):
            return ()
        whole = [layer for layer in layers if layer in self.ledger.whole]
        return whole if ahead.num_layers is None else whole[-ahead.num_layers :]

    def _again_bytes(self, layer: int, layers: Sequence[int] | None = None) -> float:
        """What is recomputed when a layer's backward begins, of itself and of ``layers``."""
        saved = (t for n in layers or (layer,) for t in self.ledger.saved[n])
        return sum(tensor.nbytes for tensor in saved if tensor.again == layer)

    def _fetched(self, layers: Sequence[int], position: int) -> float:
        """What was brought back, or has not left, when the backward has come to a place."""
        return sum(
            t.nbytes
            for place, layer in enumerate(layers[: position + 1])
            for t in _at(self.ledger.saved[layer], *OFFLOADED)
            if position - place <= t.ahead
        )

    def _gradients(self, *parts: str, layer: int | None = None) -> float:
        """Autograd's own gradients of some parts, of a layer, or of all."""
        if not self.state.gradient_item:
            return 0.0
        everything = not parts and layer is None
        return self.state.gradient_item * sum(
            p.numel
            for p in self.ledger.parameters
            if p.trained
            and (everything or (p.layer == layer if layer is not None else p.part in parts))
        )


def _at(saved: Sequence[Saved], *storages: Storage) -> Iterator[Saved]:
    return (tensor for tensor in saved if tensor.storage in storages)


def _comes_late(tensor: Saved) -> bool:
    """Whether it is not on the device yet when the backward of its layer begins."""
    return tensor.storage in OFFLOADED and tensor.ahead < 0

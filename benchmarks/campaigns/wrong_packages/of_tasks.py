"""Mistakes in the task and in the platform that ``new-plugin`` writes."""

from __future__ import annotations

from typing import Final

from .mistake import Change, Mistake

_TASK: Final = "fresh-task"
_PLATFORM: Final = "fresh-platform"

MISTAKES: Final = (
    Mistake(
        name="mean-of-each-micro-batch",
        what="returns the mean of a micro-batch instead of the sum and the count",
        package=_TASK,
        changes=(
            Change(
                "return LossSum(output, self.count(context, batch))",
                "count = self.count(context, batch)\n"
                "        return LossSum(output / count.clamp(min=1), count.clamp(max=1))",
                "task.py",
            ),
        ),
        checks=("KIT-PARITY",),
        says="against a run with larger micro-batches: ",
    ),
    Mistake(
        name="weight-without-gradient",
        what="adds a penalty whose gradient is cut off",
        package=_TASK,
        changes=(
            Change(
                "        return LossSum(output, ",
                "        weight = next(model.parameters())\n"
                "        output = output + 0.1 * weight.detach().square().sum()\n"
                "        return LossSum(output, ",
                "task.py",
            ),
        ),
        checks=("KIT-GRADIENTS",),
        says="with respect to embedding.word_embeddings",
    ),
    Mistake(
        name="threads-of-the-process",
        what="sets torch's number of threads and does not set it back",
        package=_PLATFORM,
        changes=(
            Change(
                "        return FreshPlatformDevice(local_rank)",
                "        import torch\n\n        torch.set_num_threads(3)\n"
                "        return FreshPlatformDevice(local_rank)",
            ),
        ),
        checks=("KIT-UNDO",),
        says="it does not restore: torch's number of threads",
    ),
    Mistake(
        name="kernel-without-a-declared-feature",
        what="declares every feature of attention and ignores the window",
        package=_PLATFORM,
        changes=(
            Change(
                "        return _cpu().ascend_attention_kernel(ops=ops)",
                "        from .device import WithoutWindow\n\n"
                "        return WithoutWindow(_cpu().ascend_attention_kernel(ops=ops))",
            ),
            Change(
                "class FreshPlatformDevice",
                "class WithoutWindow:\n"
                "    def __init__(self, inner: Any) -> None:\n"
                "        self.inner, self.features = inner, inner.features\n"
                "        self.backward_reads = inner.backward_reads\n\n"
                "    def forward(self, *arguments: Any) -> Any:\n"
                "        *tensors, spec = arguments\n"
                "        return self.inner.forward(*tensors, without_window(spec))\n\n"
                "    def backward(self, *arguments: Any) -> Any:\n"
                "        *tensors, spec = arguments\n"
                "        return self.inner.backward(*tensors, without_window(spec))\n\n\n"
                "def without_window(spec: Any) -> Any:\n"
                "    mask = attrs.evolve(spec.mask, window=None)\n"
                "    return attrs.evolve(spec, mask=mask)\n\n\n"
                "class FreshPlatformDevice",
                "device.py",
            ),
            Change(
                "from ascend_run.plugins.platforms.cpu.device import CpuDevice",
                "from typing import Any\n\nimport attrs\n\n"
                "from ascend_run.plugins.platforms.cpu.device import CpuDevice",
                "device.py",
            ),
        ),
        checks=("KIT-PARITY",),
        says="its attention with a window has max error ",
    ),
)

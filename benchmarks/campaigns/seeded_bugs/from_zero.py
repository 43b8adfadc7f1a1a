"""Bugs in the updates of weights that begin at zero, which consist of their updates: the second
factors of adapters, and biases."""

from __future__ import annotations

from typing import Final

from .bug import BACKWARD, OPTIMIZER, Bug

_ADAPTED: Final = r"decoder\.layers\.\d+\..*linear_(qkv|proj|fc1|fc2).*"
_ADAM: Final = "torch.optim.adam:Adam.step"
_LATEST: Final = 'store=self.__dict__.setdefault("latest", {}), part=part'

BUGS: Final = (
    Bug(
        name="lora-over-root-of-rank",
        what="what an adapter adds is multiplied by alpha / sqrt(r), as with rslora",
        target="ascend_run.plugins.fine_tuning.lora.sizes:scale_of_part",
        old="rslora=options.rslora",
        new="rslora=True",
        plugins=("lora",),
        modules=_ADAPTED,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-stale-gradient-of-b",
        what="B gets the gradient of the step before",
        target="ascend_run.plugins.fine_tuning.lora.adapter:Adapter.outer",
        old="self.shared(self.lora_B[part].to(inner.dtype))",
        new=(
            "(lambda matrix: (matrix.requires_grad and "
            f"matrix.register_hook(lambda g, {_LATEST}: "
            "(store.get(part, g), store.update({part: g}))[0]), matrix)[1])"
            "(self.shared(self.lora_B[part] * 1.0))"
        ),
        plugins=("lora",),
        config={"train.micro_batch_size": 2, "train.global_batch_size": 2},
        modules=_ADAPTED,
        phases=(BACKWARD,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-rate-of-its-group",
        what="the group of the adapters has 0.9 of the learning rate",
        target="ascend_run.core.train.optimizer:_group",
        old='"max_lr": config.optimizer.lr',
        new='"max_lr": 0.9 * config.optimizer.lr',
        plugins=("lora",),
        modules="optimizer",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
    Bug(
        name="lora-updates-too-small",
        what="Adam takes 0.9 of the learning rate that its group has",
        target=_ADAM,
        old='lr=group["lr"]',
        new='lr=0.9 * group["lr"]',
        plugins=("lora",),
        modules="optimizer",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
    Bug(
        name="biases-updates-too-small",
        what="Adam takes 0.9 of the learning rate of the group without weight decay",
        target=_ADAM,
        old='lr=group["lr"]',
        new='lr=group["lr"] * (1.0 if group["weight_decay"] else 0.9)',
        config={"model.add_bias_linear": True},
        modules="optimizer",
        phases=(OPTIMIZER,),
        hides_from_loss=True,
    ),
)

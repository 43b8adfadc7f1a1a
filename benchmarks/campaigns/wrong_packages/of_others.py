"""Mistakes in the packages for which ``new-plugin`` has no template."""

from __future__ import annotations

from typing import Final

from .mistake import Change, Mistake

_SCORE_CAP: Final = "score-cap"
_OWN_NORM: Final = "own-norm"
_WARM_MOMENTUM: Final = "warm-momentum"
_GATHER_CP: Final = "gather-cp"
_WEIGHT_DRIFT: Final = "weight-drift"
_SEED_OSS: Final = "seed_oss"
_NO_NAMES: Final = "        names={},\n"
_DWEIGHT: Final = "dweight = (dout * normal).flatten(0, -2).sum(0)"


def _tensor(condition: str, **fields: str) -> tuple[Change, ...]:
    """One tensor of the family that is mapped otherwise."""
    given = "".join(f"                {name}={value},\n" for name, value in fields.items())
    tensor = f"            TensorMap(\n{given}{condition}            ),\n"
    return (
        Change("import ConfigKey", "import Condition, ConfigKey, TensorMap"),
        Change(_NO_NAMES, f"        tensors=(\n{tensor}        ),\n"),
    )


MISTAKES: Final = (
    Mistake(
        name="backward-without-the-cap",
        what="caps the scores in forward only",
        package=_SCORE_CAP,
        changes=(
            Change(
                "self.inner.backward(dout, *saved, self._capped(spec))",
                "self.inner.backward(dout, *saved, spec)",
                "kernel.py",
            ),
        ),
        checks=("KIT-GRADIENTS",),
        says="the gradient of the attention of CappedKernel with ",
    ),
    Mistake(
        name="need-not-declared",
        what="needs a kernel with a softcap and does not declare it",
        package=_SCORE_CAP,
        changes=(Change("        attention_needs=AttentionFeatures(softcap=True),\n", ""),),
        checks=("KIT-NEEDS",),
        says="the attention kernel is called with 'softcap'",
    ),
    Mistake(
        name="attention-not-declared",
        what="does not declare what its attention supports",
        package=_SCORE_CAP,
        changes=(Change('        attention=AttentionFeatures.all_but("softcap"),\n', ""),),
        checks=("KIT-HOOKS",),
        says="its manifest does not declare the features of that attention",
    ),
    Mistake(
        name="claim-of-its-own-hook",
        what="claims in the manifest what its hook claims",
        package=_OWN_NORM,
        changes=(
            Change("import (\n    Condition,", "import (\n    Claim,\n    Condition,"),
            Change("        requires=(\n", "        claims=(Claim.NORM,),\n        requires=(\n"),
        ),
        checks=("KIT-HOOKS",),
        says="has Claim.NORM in its manifest",
    ),
    Mistake(
        name="bitwise-but-rounds",
        what="declares bitwise, as the formula is the same",
        package=_OWN_NORM,
        changes=(Change("Numerics.ROUNDING", "Numerics.BITWISE"),),
        checks=("KIT-PARITY",),
        says="bitwise: ",
    ),
    Mistake(
        name="gradient-without-a-term",
        what="takes the scale of a row for a constant in backward",
        package=_OWN_NORM,
        changes=(
            Change(
                "dx = scale * (dnormal - normal * (dnormal * normal).mean(-1, keepdim=True))",
                "dx = scale * dnormal",
                "norm.py",
            ),
        ),
        checks=("KIT-GRADIENTS",),
        says="norm.Normalise with respect to its input 'x' is wrong",
    ),
    Mistake(
        name="gradient-without-a-factor",
        what="leaves out the weight, which is 1 before the first step",
        package=_OWN_NORM,
        changes=(Change("dnormal = dout * weight", "dnormal = dout", "norm.py"),),
        checks=("KIT-GRADIENTS", "KIT-PARITY"),
        says="",
    ),
    Mistake(
        name="shard-of-the-sequence-not-marked",
        what="does not mark the weight, whose gradient then lacks the other ranks' tokens",
        package=_OWN_NORM,
        changes=(
            Change(
                "        mark(self.weight, sequence_parallel=config.sequence_parallel)\n",
                "",
                "norm.py",
            ),
        ),
        checks=("KIT-PARITY",),
        says="dense, tp=2, gradients, against one rank without it: ",
    ),
    Mistake(
        name="order-of-addresses",
        what="sums over a set of rows, whose order is that of their addresses",
        package=_OWN_NORM,
        changes=(
            Change(
                _DWEIGHT,
                "rows = {*(dout * normal).flatten(0, -2).unbind()}\n"
                "        dweight = torch.zeros_like(weight)\n"
                "        for row in rows:\n"
                "            dweight += row",
                "norm.py",
            ),
        ),
        checks=("KIT-AGAIN",),
        says="in its second run, ",
    ),
    Mistake(
        name="steps-counted-elsewhere",
        what="counts steps in an attribute of the optimizer, which is not saved",
        package=_WARM_MOMENTUM,
        changes=(
            Change('                "step": OptimizerState(scalar=True),\n', ""),
            Change(
                "        self.beta = beta\n",
                "        self.beta = beta\n        self.count = 0\n",
                "optimizer.py",
            ),
            Change(
                "        for group in self.param_groups:\n",
                "        self.count += 1\n        for group in self.param_groups:\n",
                "optimizer.py",
            ),
            Change('            state["step"] = torch.zeros(())\n', "", "optimizer.py"),
            Change('        state["step"] += 1\n', "", "optimizer.py"),
            Change('self.beta ** state["step"]', "self.beta**self.count", "optimizer.py"),
        ),
        checks=("KIT-RESUME",),
        says="of step ",
    ),
    Mistake(
        name="norm-of-a-shard",
        what="divides by the norm of what a rank holds, and declares to be element-wise",
        package=_WARM_MOMENTUM,
        changes=(
            Change(
                "        return update\n",
                "        return update / update.norm().clamp(min=1e-6)\n",
                "optimizer.py",
            ),
        ),
        checks=("KIT-PARITY",),
        says="after 5 steps, against its own run on one rank: ",
    ),
    Mistake(
        name="group-of-other-ranks",
        what="gathers over the tensor-parallel ranks",
        package=_GATHER_CP,
        changes=(Change("GatheringKernel(inner, groups.cp)", "GatheringKernel(inner, groups.tp)"),),
        checks=("KIT-PARITY",),
        says="dense, cp=2, gradients, against one rank without it: ",
    ),
    Mistake(
        name="gradient-of-one-rank",
        what="does not sum the gradients of keys and values over ranks",
        package=_GATHER_CP,
        changes=(
            Change(
                "        dist.all_reduce(gradient, group=self.group)\n",
                "",
                "kernel.py",
            ),
        ),
        checks=("KIT-GRADIENTS", "KIT-PARITY"),
        says="cp=2, ",
    ),
    Mistake(
        name="query-start-of-rank-0",
        what="forgets where in the sequence a rank's queries are",
        package=_GATHER_CP,
        changes=(Change("query_start=self.group.rank() * length", "query_start=0", "kernel.py"),),
        checks=("KIT-PARITY",),
        says="dense, cp=2, gradients, against one rank without it: ",
    ),
    Mistake(
        name="state-not-saved",
        what="has no entry in the checkpoint",
        package=_WEIGHT_DRIFT,
        changes=(
            Change(
                "    @hookimpl\n"
                "    def ascend_checkpoint_entries(self) -> Mapping[str, CheckpointEntry]:\n"
                '        return {"weight-drift": self._average}\n\n',
                "",
            ),
        ),
        checks=("KIT-RESUME",),
        says="the logged 'weight-drift/rms' of step 4 is ",
    ),
    Mistake(
        name="state-of-another-rank",
        what="saves a value that differs by rank as one of the run",
        package=_WEIGHT_DRIFT,
        changes=(
            Change(
                'return {"value": self.value}', 'return {"value": self.value.item()}', "average.py"
            ),
            Change(
                'self.value = state["value"].clone()',
                'self.value = torch.tensor(state["value"], dtype=torch.float64)',
                "average.py",
            ),
        ),
        checks=("KIT-RESUME",),
        says="rank 1 has different values than rank 0: weight-drift",
    ),
    Mistake(
        name="gate-after-up",
        what="stacks the gate below the up projection",
        package=_SEED_OSS,
        changes=_tensor(
            "",
            megatron='"decoder.layers.{layer}.mlp.linear_fc1.weight"',
            hf='tuple(f"model.layers.{{layer}}.mlp.{n}_proj.weight" for n in ("up", "gate"))',
            form='"concat"',
        ),
        checks=("KIT-FAMILY",),
        says="tiny: the logits have max error ",
    ),
    Mistake(
        name="bias-in-another-form",
        what="maps the bias of queries, keys and values one after the other",
        package=_SEED_OSS,
        changes=_tensor(
            '                condition=Condition("model.add_qkv_bias", "==", True),\n',
            megatron='"decoder.layers.{layer}.self_attention.linear_qkv.bias"',
            hf='tuple(f"model.layers.{{layer}}.self_attn.{n}_proj.bias" for n in "qkv")',
            form='"concat"',
        ),
        checks=("KIT-FAMILY",),
        says="self_attn.q_proj.bias",
    ),
    Mistake(
        name="key-that-is-ignored",
        what="ignores a key that changes results",
        package=_SEED_OSS,
        changes=(
            Change(
                '        ignored=("pretraining_tp",),\n',
                '        ignored=("pretraining_tp", "rms_norm_eps"),\n',
            ),
        ),
        checks=("KIT-FAMILY",),
        says="tiny: ",
    ),
)

"""Write docs/operators.md: every operator, its torch form, and what each platform has of its own.

python scripts/operator_table.py            # writes the page
python scripts/operator_table.py --check    # exits with 1 if the page is out of date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from ascend_run.ops.kernels.catalog import OPERATORS, Operator
from ascend_run.plugins.platforms.cuda import forms as cuda
from ascend_run.plugins.platforms.npu.forms import FORMS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/operators.md"
RECORD = ROOT / "tests/plugins/platforms/npu/schemas.json"

CUDA_FIELDS: Final[Mapping[str, str]] = {
    "rms_norm": "torch's kernel; Liger or torch.compile by plugin rms-norm",
    "swiglu": "torch form; torch.compile or Liger by plugin swiglu",
    "rotary": "torch form; torch.compile or Liger by plugin rotary",
    "grouped_matmul": "torch's grouped product",
}
NPU_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "rms_norm": ("npu_rms_norm", "npu_rms_norm_backward"),
    "swiglu": ("npu_swiglu", "npu_swiglu_backward"),
    "rotary": ("npu_rotary_mul",),
    "grouped_matmul": ("npu_grouped_matmul",),
}
"""Of the entries of ``PlatformOps`` that have a field of their own."""

HEAD = """# Operators

In a plugin, get an operator from the platform's table; it runs as that platform has it:

```python
from ascend_run.ops.experts.moe_permutation import moe_token_permute

permute = ops.form(moe_token_permute)  # ops: the model's PlatformOps
```

Each operator has a torch form: a function of `ascend_run.ops` that runs on every device and is the
reference implementation. Its tests compare it with an independent formula in float64, forward and
every gradient, within 1e-12. A platform may have its own form with the same arguments and results.

- **CPU**: always the torch form.
- **CUDA**: torch.compile fuses elementwise operators to one kernel at the first call; if torch or
  a kernel library has a kernel, that is used. "torch form": its operations are single kernels
  already, or communicate.
- **NPU**: the calls of torch_npu 2.13 in the form; `torch.` before a name is torch's operator,
  which torch_npu runs as one kernel. "torch form": torch_npu has no such operator, or not for
  these arguments. Forms are [verified without a device](npu-proof.md): each call against
  torch_npu's schema (S) and, if it has one, its meta kernel (M), and the arithmetic (A) against
  the torch form, with reference kernels written from torch_npu's documentation: float32, 1e-6,
  forward and gradients. If torch_npu's documentation lists only float16 and bfloat16, float32 is
  tested here anyway, although the device does not support it.

Attention is described on the page of [npu](plugins/platforms/npu.md). The matmuls of
tensor-parallel linears have their backward in `ops.linear.parallel_linear`. "no" under *backward*:
the operator is for inference, is an optimizer step or accumulates a gradient; an inference
operator raises an error for inputs that require a gradient.

"""
TAIL = """
## Operators without a torch_npu operator of the same name

- `dropout_add_layer_norm`, `dropout_add_rms_norm`: dropout and scales are torch operations; sum
  and norm are `npu_add_layer_norm` and `npu_add_rms_norm` if residual, input and weight have one
  dtype, otherwise the torch form.
- `ema_adamw_step_`: torch's fused Adam, for which torch_npu has a kernel, and one operation for
  the average. Without bias correction, the torch form.
- `mm_all_reduce_add_rms_norm`: `npu_mm_all_reduce_base`, then `npu_add_rms_norm`.
- `grouped_matmul_all_reduce`: one call for all GEMMs, then one all-reduce of all results.
- `all_to_all_all_gather_bmm`, `bmm_reduce_scatter_all_to_all`: the torch form.
- `HostMapped`, a class that allocates tensors in memory of the host: the torch form is for the CPU,
  and plugin virtual-optimizer refuses platforms without a form of their own. On the NPU
  `npu_apply_adam_w` updates moments there and copies, since few operators take that memory.

## Limits of the fused operators

- `moe_token_permute` and `moe_token_unpermute`: padded mode uses the torch form; the input needs a
  row for every copy: dropped ones are rows of zeros.
- `ffn`: gated activations use the torch form; with quantised operands they raise an error.
- `quant_grouped_matmul`: outputs other than float16, bfloat16 and int8 raise an error. The scale
  of an int8 output, and the scales from int8 to float16 in `quantised_ffn` and
  `mm_all_reduce_add_rms_norm`, are encoded by `npu_trans_quant_param` and keep 10 bits of
  mantissa.
- `ring_attention_update`: its result for -inf is not documented; it gets a large negative number,
  and -inf is restored.
- `gelu` of `npu_ffn` is assumed to be the exact one; its documentation does not say.
"""


def cuda_form(operator: Operator) -> str:
    made_by = {**CUDA_FIELDS, **cuda.described()}
    return made_by.get(operator.name, "torch form")


def npu_calls(operator: Operator) -> tuple[str, ...]:
    """What the NPU's form is made of; nothing where it is the torch form."""
    if operator.name in NPU_FIELDS:
        return NPU_FIELDS[operator.name]
    return FORMS[operator.name].calls if operator.name in FORMS else ()


def proof(operator: Operator, recorded: Mapping[str, object]) -> str:
    """S: all calls are in the record of schemas; M and A are held by the suite of the plugin."""
    calls = [call for call in npu_calls(operator) if not call.startswith("torch.")]
    suite = f"`{operator.suite_path}`"
    if not npu_calls(operator):
        return suite
    unknown = [call for call in calls if call not in recorded]
    if unknown:
        raise ValueError(f"{operator.name}: no schema of {unknown}; run scripts/npu_schemas.py")
    return f"{suite}; NPU {'S, M, A' if calls else 'A'}"


def page() -> str:
    """Return the page as text."""
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["schemas"]
    lines = [
        "| operator | known as | torch form | backward | CUDA | NPU | proof |",
        "|---|---|---|---|---|---|---|",
    ]
    for operator in OPERATORS:
        traits = [word for word in ("collective", "quantised") if getattr(operator, word)]
        name = f"`{operator.name}`" + (f" ({', '.join(traits)})" if traits else "")
        calls = ", ".join(f"`{call}`" for call in npu_calls(operator)) or "torch form"
        cells = (
            name,
            operator.known_as,
            f"`{operator.module.removeprefix('ascend_run.')}`",
            "yes" if operator.backward else "no",
            cuda_form(operator),
            calls,
            proof(operator, recorded),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return f"{HEAD}{chr(10).join(lines)}\n{TAIL}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if the page is outdated.")
def command(check: bool) -> None:
    """Write the page of operators."""
    new = page()
    if check:
        old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if new != old:
            click.echo(f"{PAGE} is out of date; run scripts/operator_table.py", err=True)
        sys.exit(int(new != old))
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    command()

"""Write docs/operators.md: every operator, its torch form, and what each platform has of its own.

python tools/operator_table.py            # writes
python tools/operator_table.py --check    # exits 1 where the page is old
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

from ascend_run.ops.kernels.catalog import OPERATORS, Operator
from ascend_run.plugins.cuda import forms as cuda
from ascend_run.plugins.npu.forms import FORMS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/operators.md"
RECORD = ROOT / "tests/plugins/npu/schemas.json"

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

The operators of a platform's table. Each has a torch form, a function of `ascend_run.ops` that runs
on every device and is the definition of the operator: its suite holds it against an independent
formula in float64, forward and every gradient, within 1e-12. A platform may have a form of its own
with the same arguments and the same answer; whoever needs an operator asks the table for it:

```python
from ascend_run.ops.experts.moe_permutation import moe_token_permute

permute = ops.form(moe_token_permute)  # ops: the model's PlatformOps
```

- **CPU**: the torch form, always.
- **CUDA**: torch.compile makes what is elementwise one kernel, the first time it is called; where
  torch or a kernel library has the kernel, that is taken. "torch form": its operations are single
  kernels already, or communicate.
- **NPU**: the calls of torch_npu 2.13 that the form is made of; `torch.` before a name: torch's own
  operator, which torch_npu runs as one kernel. "torch form": torch_npu has no such operator, or not
  for what is asked. A form is proven without a device, as [another page](npu-proof.md) tells: each
  call against torch_npu's schema (S) and, where it has one, its meta kernel (M), and the arithmetic
  (A) against the torch form, on reference kernels written from torch_npu's documentation: float32,
  1e-6, forward and gradients. Where torch_npu's documentation names float16 and bfloat16 alone,
  float32 is proven here all the same, and the device refuses it.

Attention is a kernel of its own kind, on the page of [npu](plugins/npu.md).
The products of tensor-parallel linears have their backward in `ops.linear.parallel_linear`.
"no" under *backward*: the operator is for inference, takes an optimizer's step or adds up a
gradient; the first kind refuses inputs that want a gradient.

"""
TAIL = """
## Where torch_npu has no operator of the name

- `dropout_add_layer_norm`, `dropout_add_rms_norm`: dropout and scales are torch's operations; sum
  and norm are `npu_add_layer_norm` and `npu_add_rms_norm`, where residual, input and weight have
  one dtype, else the torch form.
- `ema_adamw_step_`: torch's fused Adam, which torch_npu has a kernel for, and one operation for the
  average. Without bias correction the torch form.
- `mm_all_reduce_add_rms_norm`: `npu_mm_all_reduce_base`, then `npu_add_rms_norm`.
- `grouped_matmul_all_reduce`: one call for all products, then one all-reduce of all results.
- `all_to_all_all_gather_bmm`, `bmm_reduce_scatter_all_to_all`: the torch form.

## What the fused operators do not take

- `moe_token_permute` and `moe_token_unpermute`: the padded mode, which is the torch form; and a row
  for every copy is wanted: dropped ones are rows of zeros.
- `ffn`: gated activations are the torch form; of quantised operands they are refused.
- `quant_grouped_matmul`: outputs other than float16, bfloat16 and int8 are refused. The scale of an
  int8 output, and the scales that make float16 of int8 in `quantised_ffn` and
  `mm_all_reduce_add_rms_norm`, are encoded by `npu_trans_quant_param` and keep 10 bits of mantissa.
- `ring_attention_update`: what it makes of -inf is not documented; it is given a large negative
  number, and -inf is put back.
- `gelu` of `npu_ffn` is taken for the exact one; its documentation does not say which it is.
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
        raise ValueError(f"{operator.name}: no schema of {unknown}; run tools/npu_schemas.py")
    return f"{suite}; NPU {'S, M, A' if calls else 'A'}"


def page() -> str:
    """The whole page."""
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
            f"`ops.{operator.module}`",
            "yes" if operator.backward else "no",
            cuda_form(operator),
            calls,
            proof(operator, recorded),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return f"{HEAD}{chr(10).join(lines)}\n{TAIL}"


@click.command()
@click.option("--check", is_flag=True, help="Write nothing; exit 1 where the page is old.")
def command(check: bool) -> None:
    """Write the page of operators."""
    new = page()
    if check:
        old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if new != old:
            click.echo(f"{PAGE}: the page is old; run tools/operator_table.py", err=True)
        sys.exit(int(new != old))
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    command()

"""Devices that a step's time can be estimated on: published constants, each with its source.

A rate is the vendor's peak. ``reach`` is the share of it that large products get in practice, and
the one number here that is not published: see docs/cost-model.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import ConfigError

_TERA, _GIGA = 1e12, 1e9


def _rate(**options: Any) -> Any:
    above_0 = [attrs.validators.instance_of((int, float)), attrs.validators.gt(0)]
    return attrs.field(validator=above_0, **options)


def _rates(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    for precision, rate in dict(value).items():
        if not isinstance(rate, int | float) or rate <= 0:
            raise ValueError(f"{attribute.name}.{precision}={rate!r} must be a number above 0")


@attrs.frozen(kw_only=True)
class CostDevice:
    """One device, and how it reaches the others."""

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    flops: Mapping[str, float] = attrs.field(validator=_rates)
    """``train.precision`` -> dense matrix products. Unit: FLOP/s."""
    memory_bandwidth: float = _rate()
    """Unit: bytes/s."""
    memory_bytes: float = _rate()
    per_node: int = _rate()
    """Devices that the faster links join."""
    node_bandwidth: float = _rate()
    """Of one device in one direction to others of its node. Unit: bytes/s."""
    network_bandwidth: float = _rate()
    """The same, to other nodes."""
    latency: float = attrs.field(validator=attrs.validators.ge(0))
    """Of one message. Unit: seconds."""
    reach: float = attrs.field(validator=[attrs.validators.gt(0), attrs.validators.le(1)])
    """Share of ``flops`` that large products reach."""
    shared: bool = False
    """The rates are those of a machine, which its ranks share."""
    source: str = ""


DEVICES: Final[Mapping[str, CostDevice]] = {
    device.name: device
    for device in (
        CostDevice(
            name="ascend-910b",
            flops={"bf16": 376 * _TERA, "fp16": 376 * _TERA, "fp32": 94 * _TERA},
            memory_bandwidth=1600 * _GIGA,
            memory_bytes=64 * 2**30,
            per_node=8,
            node_bandwidth=196 * _GIGA,
            network_bandwidth=25 * _GIGA,
            latency=10e-6,
            reach=0.7,
            source="arXiv:2506.12708, table of the Ascend 910C, whose two dies are the 910B's: "
            "each 376 TFLOPS in half precision, 64 GB at 1.6 TB/s; links of the Atlas 800T A2 "
            "server: HCCS 392 GB/s in both directions together, RoCE 200 Gb/s for each device",
        ),
        CostDevice(
            name="h100",
            flops={"bf16": 989 * _TERA, "fp16": 989 * _TERA, "fp32": 67 * _TERA},
            memory_bandwidth=3350 * _GIGA,
            memory_bytes=80 * 2**30,
            per_node=8,
            node_bandwidth=450 * _GIGA,
            network_bandwidth=50 * _GIGA,
            latency=10e-6,
            reach=0.7,
            source="NVIDIA, H100 Tensor Core GPU datasheet (SXM5) and DGX H100 datasheet "
            "(ConnectX-7, 400 Gb/s each)",
        ),
        CostDevice(
            name="h200",
            flops={"bf16": 989 * _TERA, "fp16": 989 * _TERA, "fp32": 67 * _TERA},
            memory_bandwidth=4800 * _GIGA,
            memory_bytes=141e9,
            per_node=8,
            node_bandwidth=450 * _GIGA,
            network_bandwidth=50 * _GIGA,
            latency=10e-6,
            reach=0.7,
            source="NVIDIA, H200 Tensor Core GPU datasheet (SXM) and DGX H200 datasheet "
            "(ConnectX-7, 400 Gb/s each)",
        ),
        CostDevice(
            name="cpu",
            flops={"bf16": 2000 * _GIGA, "fp16": 340 * _GIGA, "fp32": 332 * _GIGA},
            memory_bandwidth=13 * _GIGA,
            memory_bytes=23 * 2**30,
            per_node=2**20,
            node_bandwidth=1.3 * _GIGA,
            network_bandwidth=1.3 * _GIGA,
            latency=136e-6,
            reach=0.63,
            shared=True,
            source="measured: 2 cores with AMX; python -m benchmarks.cpu_calibration measures "
            "another machine and writes a file that --device takes",
        ),
    )
}


def find_device(name: str) -> CostDevice:
    """A device by its name, or from a JSON file with the fields of ``CostDevice``.

    Raises:
        ConfigError: Neither is there, or the file holds something else.
    """
    if name in DEVICES:
        return DEVICES[name]
    path = Path(name)
    known = ", ".join(DEVICES)
    if not path.is_file():
        raise ConfigError(f"--device {name}: expected one of {known}, or a file of your own")
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        return CostDevice(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fields = ", ".join(attrs.fields_dict(CostDevice))
        reason = str(error.args[0] if error.args else error).replace("CostDevice.__init__() ", "")
        raise ConfigError(
            f"--device {name}: not a device ({reason}); expected a JSON object with {fields}"
        ) from None

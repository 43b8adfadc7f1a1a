"""Devices for which the step time can be estimated: accelerators with published constants and their
sources, and a CPU that was measured.

The rates of an accelerator are the vendor's peaks, and ``reach``, the share of the peak that
matmuls achieve, is an assumption. For the CPU both were measured by ``benchmarks.cpu_calibration``,
which wrote ``cpu.json`` in this folder. See docs/cost-model.md.

Files of constants have no checksum, since users may edit them. A file that cannot be parsed or has
a rate out of bounds is an error; a wrong rate only affects the estimate.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from ascend_run.plugin_api.errors import ConfigError

_TERA, _GIGA = 1e12, 1e9
_ASSUMED: Final = 31.5 * _GIGA
"""Bandwidth to the host where a file has none: 16 lanes of PCIe 4.0."""
_DISK_WRITES: Final = 4.0 * _GIGA
_DISK_READS: Final = 6.8 * _GIGA
"""Where nothing else is known: a disk for each device, NVMe on 4 lanes of PCIe 4.0."""
_DISK_ASSUMED: Final = (
    f"to a disk {_DISK_WRITES / _GIGA} GB/s and from it {_DISK_READS / _GIGA} GB/s, which is "
    "assumed"
)

_ABOVE_0: Final[Any] = attrs.validators.and_(
    attrs.validators.instance_of((int, float)), attrs.validators.gt(0)
)


def _rate() -> Any:
    return attrs.field(validator=_ABOVE_0)


def _rates(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    for precision, rate in dict(value).items():
        if not isinstance(rate, int | float) or rate <= 0:
            raise ValueError(f"{attribute.name}.{precision}={rate!r} must be a number above 0")


def _share(shares: float | Mapping[str, float], precision: str) -> float:
    return shares if isinstance(shares, int | float) else shares[precision]


def _shares(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    shares = dict.fromkeys(instance.flops, value) if isinstance(value, int | float) else value
    for precision in instance.flops:
        share = shares.get(precision)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(
                f"{attribute.name}={value!r} must be above 0 and at most 1, as one number or for "
                "each precision of flops"
            )


@attrs.frozen(kw_only=True)
class CostDevice:
    """Performance of one device and of its links."""

    name: str = attrs.field(validator=attrs.validators.instance_of(str))
    flops: Mapping[str, float] = attrs.field(validator=_rates)
    """``train.precision`` -> peak of dense matmuls. Unit: FLOP/s."""
    memory_bandwidth: float = _rate()
    """Unit: bytes/s."""
    memory_bytes: float = _rate()
    per_node: int = _rate()
    """Devices of one node."""
    node_bandwidth: float = _rate()
    """Bandwidth of one device to its node, in one direction. Unit: bytes/s."""
    network_bandwidth: float = _rate()
    """Bandwidth of one device to other nodes, in one direction. Unit: bytes/s."""
    latency: float = attrs.field(validator=attrs.validators.ge(0))
    """Latency of one send. Unit: seconds."""
    reach: float | Mapping[str, float] = attrs.field(validator=_shares)
    """Share of ``flops`` that matmuls achieve; one number, or one per precision."""
    attention: float | Mapping[str, float] | None = attrs.field(
        default=None, validator=attrs.validators.optional(_shares)
    )
    """Share of ``flops`` that the matmuls of attention achieve; None: ``reach``."""
    host_bandwidth: float | None = attrs.field(
        default=None, validator=attrs.validators.optional(_ABOVE_0)
    )
    """Bandwidth of the link to the host's memory, in one direction; None: they are one memory. A
    file without this field has None if it is ``shared``, otherwise an assumption. Unit: bytes/s."""
    disk_write_bandwidth: float = attrs.field(default=_DISK_WRITES, validator=_ABOVE_0)
    """Bandwidth of writes to files, of one device if it is not ``shared``. Unit: bytes/s."""
    disk_read_bandwidth: float = attrs.field(default=_DISK_READS, validator=_ABOVE_0)
    """Bandwidth of reads from files that are not in memory. Unit: bytes/s."""
    operation: float = attrs.field(default=0.0, validator=attrs.validators.ge(0))
    """Exposed overhead per operation; 0 if operations are launched ahead of the device. Unit:
    seconds."""
    shared: bool = False
    """Whether the rates are those of a machine that is shared by its ranks."""
    source: str = ""

    def matmul_flops(self, precision: str) -> float:
        """Return the FLOP/s that matmuls achieve."""
        return self.flops[precision] * _share(self.reach, precision)

    def attention_matmul_flops(self, precision: str) -> float:
        """Return the FLOP/s that the matmuls of attention achieve."""
        share = self.reach if self.attention is None else self.attention
        return self.flops[precision] * _share(share, precision)


_PUBLISHED: Final[Mapping[str, CostDevice]] = {
    device.name: device
    for device in (
        CostDevice(
            name="ascend-910b",
            flops={"bf16": 353.9 * _TERA, "fp16": 353.9 * _TERA, "fp32": 88.5 * _TERA},
            memory_bandwidth=1600 * _GIGA,
            memory_bytes=64 * 2**30,
            per_node=8,
            node_bandwidth=196 * _GIGA,
            network_bandwidth=25 * _GIGA,
            latency=10e-6,
            reach=0.7,
            host_bandwidth=31.5 * _GIGA,
            source="CANN's platform_config of the Ascend910B2C: 24 cube cores of 16 x 16 x 16 half-"
            "precision MACs a cycle at 1.8 GHz (arXiv:2506.12708 counts the vector cores too: "
            "376 TFLOPS a die of the 910C), 64 GB at 1.6 TB/s; fp32 a quarter, of which large "
            "matmuls reached 87 TFLOPS (github.com/gameofdimension/limulidae); links of the Atlas "
            "800T A2 server: HCCS 392 GB/s in both directions together, RoCE 200 Gb/s for each "
            "device; to the host 16 lanes, which is assumed, of its Kunpeng 920's PCIe 4.0; "
            + _DISK_ASSUMED,
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
            host_bandwidth=64 * _GIGA,
            source="NVIDIA, H100 Tensor Core GPU datasheet (SXM5) and DGX H100 datasheet "
            "(ConnectX-7, 400 Gb/s each; PCIe Gen5, 128 GB/s in both directions together); "
            + _DISK_ASSUMED,
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
            host_bandwidth=64 * _GIGA,
            source="NVIDIA, H200 Tensor Core GPU datasheet (SXM) and DGX H200 datasheet "
            "(ConnectX-7, 400 Gb/s each; PCIe Gen5, 128 GB/s in both directions together); "
            + _DISK_ASSUMED,
        ),
    )
}


CALIBRATED: Final = "cpu"
CALIBRATION: Final = Path(__file__).with_name("cpu.json")
"""Written by ``benchmarks.cpu_calibration`` for the machine that it last ran on."""
DEVICE_NAMES: Final = (*_PUBLISHED, CALIBRATED)


def device_of(platform: str) -> CostDevice | None:
    """Return the device with the name of a platform; None if there is none."""
    return find_device(platform) if platform in DEVICE_NAMES else None


def find_device(name: str) -> CostDevice:
    """Return a device by name, or from a JSON file with the fields of ``CostDevice``.

    Raises:
        ConfigError: There is no such device or file, or the file is invalid.
    """
    if name in _PUBLISHED:
        return _PUBLISHED[name]
    path = CALIBRATION if name == CALIBRATED else Path(name)
    known = ", ".join(DEVICE_NAMES)
    if not path.is_file():
        raise ConfigError(f"--device {name}: expected one of {known}, or an existing JSON file")
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        device = CostDevice(**values)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fields = ", ".join(attrs.fields_dict(CostDevice))
        reason = str(error.args[0] if error.args else error).replace("CostDevice.__init__() ", "")
        raise ConfigError(
            f"--device {name}: not a device ({reason}); expected a JSON object with {fields}"
        ) from None
    return _with_assumptions(device, values)


def _with_assumptions(device: CostDevice, given: Collection[str]) -> CostDevice:
    """Say in the source which rates a file does not give."""
    source = [device.source] if device.source else []
    host = device.host_bandwidth
    if not ("host_bandwidth" in given or device.shared):
        host = _ASSUMED
        source.append(f"to the host {_ASSUMED / _GIGA} GB/s, which is assumed")
    if not {"disk_write_bandwidth", "disk_read_bandwidth"} & {*given}:
        source.append(_DISK_ASSUMED)
    return attrs.evolve(device, host_bandwidth=host, source="; ".join(source))

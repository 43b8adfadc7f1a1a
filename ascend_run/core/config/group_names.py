"""Names of Megatron's process groups. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MEGATRON_GROUPS: Final[Mapping[str, str]] = {
    **{
        name: name
        for name in ("tp", "cp", "dp", "pp", "ep", "mp", "embd", "pos_embd", "dp_cp", "tp_cp")
    },
    "tp_dp_cp": "tp_dp_cp",
    "tp_ep_pp": "tp_ep_pp",
    "tp_ep": "tp_ep_mp",
    "expt_tp": "ep_tp",
    "expt_dp": "ep_dp",
}
"""Name in a ProcessGroupCollection -> the name under which Megatron looks up the group's options.
Source: megatron-core 0.16, ``parallel_state.initialize_model_parallel``."""

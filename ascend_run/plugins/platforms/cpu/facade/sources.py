"""Hashes of the sources that the rows of the facade were checked against.

A release that changes a source is refused with its new hash: review the change, then record it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SOURCES: Final[Mapping[str, Mapping[str, str]]] = {
    "torch.cuda:is_available": {"2.10": "b91a896857c10361"},
    "torch.cuda:current_device": {"2.10": "6e9804168a5c7f8c"},
    "torch.cuda:set_device": {
        "2.10": "31285f706348ab09",
        "2.11": "86c6d0bf42224be6",
        "2.15": "3eb38e4523042dcf",
    },
    "torch.cuda:device_count": {"2.10": "c7fd457e1134ece0", "2.12": "efd183354fc3ec67"},
    "torch.cuda:device": {"2.10": "892054019b0663e5"},
    "torch.cuda:get_device_capability": {"2.10": "6e0bc7998778fe34", "2.11": "6809539b0a673ba6"},
    "torch.cuda:get_device_properties": {"2.10": "8982029f2c1d5545", "2.11": "cb006011f5d15cba"},
    "torch.cuda:get_device_name": {"2.10": "b58f480be9f9706c", "2.11": "6f35f689a5716bb2"},
    "torch.cuda:_lazy_call": {"2.10": "237e5407a66c5d56", "2.15": "19c810d40d131d00"},
    "torch.cuda:_lazy_init": {"2.10": "f6316f9c5c9b0a2b"},
    "torch.cuda:init": {"2.10": "85035f109983dd08"},
    "torch.cuda:synchronize": {"2.10": "3abd3d63ffe8d326", "2.11": "7055e6143ffee8f1"},
    "torch.cuda:empty_cache": {"2.10": "bce971e6854fcc53"},
    "torch.cuda:Stream": {"2.10": "1b94a875b820c35b", "2.11": "f5b9547b46603680"},
    "torch.cuda:Event": {
        "2.10": "b18635998e07df55",
        "2.11": "f5fe051e2c600d1f",
        "2.13": "cc34c59c482fb9cc",
    },
    "torch.cuda:stream": {"2.10": "a701c622b6f531dc"},
    "torch.cuda:current_stream": {"2.10": "bbd210f76c574cfc", "2.11": "ca5387f64ee12c98"},
    "torch.cuda:default_stream": {"2.10": "83abba0b29b54c92", "2.11": "b0a2135268c651ca"},
    "torch.cuda:set_stream": {"2.10": "953d898f375890d3", "2.11": "6f7a1ab4ffc3f51f"},
    "torch.cuda:is_current_stream_capturing": {"2.10": "46ad9fe4332b954e"},
    "torch.cuda:memory_allocated": {"2.10": "0442d2549a6143ed"},
    "torch.cuda:memory_reserved": {"2.10": "de803da5e53ce7a1"},
    "torch.cuda:max_memory_allocated": {"2.10": "7d74e1261dc19d05"},
    "torch.cuda:max_memory_reserved": {"2.10": "60af9cdf5dca4f6a", "2.14": "4969f2a523d3fa75"},
    "torch.cuda:memory_stats": {
        "2.10": "9f51df1707461230",
        "2.12": "a1c857918268d2ce",
        "2.13": "4f345f0de187bbc4",
        "2.14": "6d0204574bd30a99",
    },
    "torch.cuda:reset_peak_memory_stats": {"2.10": "766ce5a529a5c05e"},
    "torch.cuda.nvtx:range_push": {"2.10": "8d3e0eb4b342e8cd"},
    "torch.cuda.nvtx:range_pop": {"2.10": "1843ba3dbe36d339"},
    "torch.cuda.nvtx:mark": {"2.10": "8fee730850566f90"},
    "torch.cuda.nvtx:range": {"2.10": "2bf13b897e0515f2"},
    "torch.cuda:manual_seed": {"2.10": "a71497712eba81c9"},
    "torch.cuda:manual_seed_all": {"2.10": "e9489253dd7c94fa"},
    "torch.cuda:seed": {"2.10": "d34333ec8dbd05fc"},
    "torch.cuda:seed_all": {"2.10": "c4aed4193a459697"},
    "torch.cuda:initial_seed": {"2.10": "77b4f9eb53d9fabc"},
    "torch.cuda:get_rng_state": {"2.10": "a3c99f160e28b204", "2.11": "1190f97901d79384"},
    "torch.cuda:set_rng_state": {"2.10": "196897dc0c2f88e0", "2.11": "2aaed350f20b8569"},
    "torch.cuda:get_rng_state_all": {"2.10": "de36bfb9f90eba1d"},
    "torch.cuda:set_rng_state_all": {"2.10": "b779d3c0abe3d703"},
    "torch.utils.checkpoint:_infer_device_type": {
        "2.10": "74cda75e00b66599",
        "2.12": "b82a34ede4994e40",
    },
    "torch.utils.checkpoint:get_device_states": {
        "2.10": "1f7f89cc008ac2a9",
        "2.12": "49a740e536b165dd",
    },
    "torch.nn.functional:dropout": {"2.10": "de4ee9f332ff8254"},
    "megatron.core.tensor_parallel.random:CudaRNGStatesTracker.fork": {
        "0.16.1": "6821e1e397253d43"
    },
    "megatron.core.tensor_parallel.random:_get_all_rng_states": {"0.16.1": "0fd22c8e723e13ee"},
    "megatron.core.tensor_parallel.random:_set_all_rng_states": {"0.16.1": "ecfe91a8fe3d8a00"},
    "torch.nn:Module.to": {
        "2.10": "8c6863059531818a",
        "2.11": "b53b0578ca1b2992",
        "2.15": "ee63450cc89c10de",
    },
    "torch.distributed:init_process_group": {
        "2.10": "41451eefdbf9214c",
        "2.11": "b26b016e14ccfda0",
        "2.14": "11b48d37d7d09089",
        "2.15": "c3231a1ac8f1184c",
    },
    "torch.distributed:new_group": {
        "2.10": "d5ff3e1763ec7ccd",
        "2.12": "c1501608133581ff",
        "2.13": "8c5521f146902d89",
        "2.14": "4ae397a1c6fe23c2",
        "2.15": "42d18d7c2abf6619",
    },
    "torch.distributed:all_reduce": {"2.10": "b5bedbdd93bebbc6", "2.14": "d4fb262e12e01f83"},
    "torch.distributed:reduce_scatter_tensor": {
        "2.10": "7e2be7258fef3539",
        "2.13": "9f90bb363b188b9a",
        "2.14": "d6134d4c8f09f0b5",
        "2.15": "24559b41ddd2a743",
    },
    "torch.distributed:all_gather": {"2.10": "42f0fb24f8e88dd9", "2.14": "aa8dd34faf8a8136"},
    "torch.distributed:reduce_scatter": {
        "2.10": "cd04be9db066f393",
        "2.12": "05f19b3176c62e4e",
        "2.14": "4474d42f384951a1",
    },
}
"""Target -> first release of torch or megatron-core with a source -> its hash. torch 2.10 to 2.15
were checked. A target that is not listed has no Python source."""

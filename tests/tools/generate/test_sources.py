"""Options of the stored model. Those of a run with adapters: plugins/fine_tuning/lora."""

from pathlib import Path
from typing import Any

import pytest

from ascend_run.tools.convert.command import command as convert_command
from ascend_run.tools.generate.command import command as generate_command
from tests.support.generated import generated, write_words
from tests.tools.convert.megatron_files import hugging_face
from tests.tools.convert.test_adapters import write_adapter
from tests.tools.convert.test_mp_rank import convert

pytestmark = pytest.mark.filterwarnings("ignore:.*tp_group is None:DeprecationWarning")


def test_an_adapter_answers_as_what_it_is_merged_into(tmp_path: Path) -> None:
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    hugging_face(base)
    write_adapter(adapter)
    assert convert("--to", "hf", "--adapter", adapter, base, merged) == 0
    words = ["w3 w1 w4", "--tokenizer", write_words(tmp_path, 37), "--max-new-tokens", 12]

    def ids(*source: object) -> Any:
        return generated(*source, *words)[0]["ids"]

    assert ids(base, "--adapter", adapter) == ids(merged) != ids(base)


def test_convert_and_generate_take_the_same_options_of_a_stored_model() -> None:
    stored = {"step", "family", "config", "weights", "first_copy", "adapter", "base"}
    for command in (convert_command, generate_command):
        assert stored | {"read_moe_tp_extend_ep"} <= {one.name for one in command.params}

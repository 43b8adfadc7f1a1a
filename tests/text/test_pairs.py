"""Pairs of answers: ids and masks against transformers, token files, limits and bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from ascend_run.plugin_api import DataError, NoCache
from ascend_run.text.dataset_paths import bin_path, idx_path
from ascend_run.text.encoder import Encoder
from ascend_run.text.encoding import Encoded, encoded_sources
from ascend_run.text.labelling import Labelled
from ascend_run.text.omissions import Omissions
from ascend_run.text.opening import ChatOptions, open_chat
from ascend_run.text.packed_samples import PackedSamples
from ascend_run.text.pairs import PairLimit, encoded_pair_dataset, encoded_pairs
from ascend_run.text.preferences import are_equal
from ascend_run.text.reading import sample_reader
from ascend_run.text.sample_files import field_prefix
from ascend_run.text.samples import Preference
from ascend_run.tools.preprocess.samples import SampleOptions, preprocess_samples
from tests.support.chats import CHATML, GENERATION, LLAMA2, write_lines, write_tokenizer

TEMPLATES = {"chatml": CHATML, "generation": GENERATION, "llama2": LLAMA2}
ANSWERS = [("three four", "five"), ("Paris.", "hello again, fox"), ("one", "two two two")]
NO_LIMIT = PairLimit(max_positions=10_000, too_long="drop")


def alpaca(chosen: str, rejected: str) -> dict[str, Any]:
    """Return a record of a question that follows an earlier turn."""
    return {
        "instruction": "hello",
        "history": [["one two?", "six seven"]],
        "chosen": chosen,
        "rejected": rejected,
    }


def sharegpt(chosen: str, rejected: str) -> dict[str, Any]:
    """Return the same in the other schema."""
    turns = [("human", "one two?"), ("gpt", "six seven"), ("human", "hello")]
    return {
        "conversations": [{"from": role, "value": text} for role, text in turns],
        "chosen": {"from": "gpt", "value": chosen},
        "rejected": {"from": "gpt", "value": rejected},
    }


RECORDS = {"alpaca-pairwise": alpaca, "sharegpt-pairwise": sharegpt}
PROMPT = [
    {"role": "user", "content": "one two?"},
    {"role": "assistant", "content": "six seven"},
    {"role": "user", "content": "hello"},
]


def encoder_of(folder: Path, template: str = CHATML) -> Encoder:
    tokenizer, chat_template = open_chat(
        ChatOptions(
            tokenizer=write_tokenizer(folder / "t", template),
            tokenizer_option="data.tokenizer",
            template_option="template",
            date_option="date",
        )
    )
    return Encoder(tokenizer=tokenizer, template=chat_template, keeps_special=False)


def pairs_of(
    folder: Path,
    records: Sequence[dict[str, Any]],
    encoder: Encoder,
    limit: PairLimit = NO_LIMIT,
    handler: str = "alpaca-pairwise",
) -> Encoded:
    path = Path(write_lines(folder / "a.jsonl", records))
    reader = sample_reader(handler, (), Preference)
    return encoded_pairs([path], reader, encoder, limit, NoCache())


@pytest.mark.parametrize("handler", RECORDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_and_masks_are_those_of_transformers(
    tmp_path: Path, template: str, handler: str
) -> None:
    encoder = encoder_of(tmp_path, TEMPLATES[template])
    records = [RECORDS[handler](*answers) for answers in ANSWERS]
    encoded = pairs_of(tmp_path, records, encoder, handler=handler)
    assert len(encoded) == 2 * len(ANSWERS)
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "t")
    start = len(theirs.apply_chat_template(PROMPT, add_generation_prompt=True)["input_ids"])
    for index, answer in enumerate(answer for pair in ANSWERS for answer in pair):
        ids, trained = encoded[index]
        expected = theirs.apply_chat_template(
            [*PROMPT, {"role": "assistant", "content": answer}],
            return_dict=True,
            return_assistant_tokens_mask=template == "generation",
        )
        whole, size = expected["input_ids"], len(ids)
        assert ids.tolist() == whole[:size]
        # What follows the last trained token, a line end, is not needed.
        assert not theirs.decode(whole[size:]).strip()
        mask = [place >= start for place in range(size)]
        if template == "generation":
            marked = expected["assistant_masks"][:size]
            assert mask == [bool(m) and at >= start for at, m in enumerate(marked)]
        assert trained.tolist() == mask


def test_documents_of_a_row_are_chosen_and_rejected_in_turn(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path)
    encoded = pairs_of(tmp_path, [alpaca(*answers) for answers in ANSWERS], encoder)
    length = int((encoded.lengths - 1).sum()) + 3
    row = PackedSamples(
        encoded, length=length, pad_id=0, num_samples=1, seed=None, packs=True, group=2
    )[0]
    answers = [
        encoder.tokenizer.backend.decode(row.labels[(row.documents == k) & (row.loss_mask > 0)])
        for k in range(int(row.documents[-1]) + 1)
    ]
    assert answers == [answer for pair in ANSWERS for answer in pair]
    assert not row.loss_mask[-3:].any()


def written(folder: Path, source: str, name: str = "d") -> str:
    """Write token files of pairs."""
    prefix = folder / name
    preprocess_samples(
        SampleOptions(
            inputs=(Path(source),),
            output_prefix=prefix,
            handler="alpaca-pairwise",
            tokenizer=folder / "t",
        )
    )
    return str(prefix)


@pytest.mark.parametrize("too_long", ["drop", "truncate"])
def test_token_files_hold_the_pairs_of_their_source(tmp_path: Path, too_long: str) -> None:
    encoder = encoder_of(tmp_path)
    records = [alpaca(*answers) for answers in [*ANSWERS, ("two " * 90, "one")]]
    limit = PairLimit(max_positions=110, too_long=too_long)
    source = pairs_of(tmp_path, records, encoder, limit)
    assert [*source.report.left_out] == [{"drop": "too long", "truncate": "truncated"}[too_long]]
    prefix = written(tmp_path, str(tmp_path / "a.jsonl"))
    read = encoded_pair_dataset(prefix, limit, NoCache())
    for name in ("ids", "trained", "ends"):
        assert np.array_equal(getattr(read, name), getattr(source, name))
        assert getattr(read, name).dtype == getattr(source, name).dtype
    assert read.report.samples == source.report.samples == len(read) // 2

    both = encoded_sources(
        [prefix, str(tmp_path / "a.jsonl")],
        lambda files: encoded_pairs(
            files, sample_reader("alpaca-pairwise", (), Preference), encoder, limit, NoCache()
        ),
        lambda name: encoded_pair_dataset(name, limit, NoCache()),
    )
    assert np.array_equal(both.ids, np.tile(source.ids, 2))
    assert both.report.samples == 2 * source.report.samples


def messages_of(action: Any) -> list[str]:
    with pytest.raises(DataError) as caught:
        action()
    return [*caught.value.problems]


def test_bad_pairs_are_all_listed(tmp_path: Path) -> None:
    # This template strips answers, so that texts that differ are the same tokens.
    encoder = encoder_of(tmp_path, LLAMA2)
    records = [
        alpaca("three", "four"),
        alpaca("three", "three \n"),
        alpaca("", "three"),
        alpaca("three", " "),
        alpaca("", ""),
    ]
    path = tmp_path / "a.jsonl"
    same = "its chosen and rejected answers are the same tokens; correct one, or remove the row"
    lacks = "answer has no token to train on; write an answer, or remove the row"
    assert messages_of(lambda: pairs_of(tmp_path, records, encoder)) == [
        f"{path}:2: {same}",
        f"{path}:3: its chosen {lacks}",
        f"{path}:4: its rejected {lacks}",
        f"{path}:5: its chosen and its rejected {lacks}",
    ]
    many = messages_of(lambda: pairs_of(tmp_path, [alpaca("three", "three")] * 25, encoder))
    assert many[:-1] == [f"{path}:{row}: {same}" for row in range(1, 21)]
    assert many[-1] == "5 more are rejected"
    # Token files are refused before they are written.
    assert len(messages_of(lambda: written(tmp_path, str(path)))) == 21
    assert not [*tmp_path.glob("d*")]


def test_pairs_with_equal_answers_may_be_dropped(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path, LLAMA2)
    records = [alpaca("three", "four"), alpaca("three", "three \n"), alpaca("one", "two")]
    limit = PairLimit(max_positions=10_000, too_long="drop", equal_answers="drop")
    report = pairs_of(tmp_path, records, encoder, limit).report
    assert (report.conversations, report.samples) == (3, 2)
    assert {reason: found.first for reason, found in report.left_out.items()} == {
        "equal answers": (f"{tmp_path / 'a.jsonl'}:2",)
    }
    # An answer without a token is still refused.
    assert len(messages_of(lambda: pairs_of(tmp_path, [alpaca("", "")], encoder, limit))) == 1


def test_bad_pairs_of_token_files_are_listed(tmp_path: Path) -> None:
    encoder_of(tmp_path)
    source = write_lines(tmp_path / "a.jsonl", [alpaca(*answers) for answers in ANSWERS])
    prefix, fewer = written(tmp_path, source), write_lines(tmp_path / "b.jsonl", [alpaca("1", "2")])
    other = written(tmp_path, fewer, "e")

    def replaced(from_prefix: str, from_side: str) -> None:
        """Let the rejected answers be those of another side, with its digests."""
        records = [json.loads(Path(f"{p}.json").read_text()) for p in (prefix, from_prefix)]
        for field in ("input_ids", "labels"):
            from_field = f"{from_side}_{field}"
            for path_of in (bin_path, idx_path):
                shutil.copy(
                    path_of(field_prefix(from_prefix, from_field)),
                    path_of(field_prefix(prefix, f"rejected_{field}")),
                )
            for digests in ("bin_sha256", "idx_sha256"):
                records[0][digests][f"rejected_{field}"] = records[1][digests][from_field]
        Path(f"{prefix}.json").write_text(json.dumps(records[0]))

    replaced(prefix, "chosen")
    problems = messages_of(lambda: encoded_pair_dataset(prefix, NO_LIMIT, NoCache()))
    assert [problem.partition(": its chosen and rejected answers are the same tokens")[0]
            for problem in problems] == [f"{prefix}:{row}" for row in (1, 2, 3)]  # fmt: skip
    dropping = PairLimit(max_positions=10_000, too_long="drop", equal_answers="drop")
    with pytest.raises(DataError, match="none of 3 pairs in"):
        encoded_pair_dataset(prefix, dropping, NoCache())
    replaced(other, "rejected")
    with pytest.raises(DataError, match="it has 3 chosen and 1 rejected answers; make the dataset"):
        encoded_pair_dataset(prefix, NO_LIMIT, NoCache())


def document(answer: int, first: int = 10) -> Labelled:
    """Return a prompt of three tokens and an answer."""
    return Labelled([1, 2, 3, *range(first, first + answer)], [False] * 3 + [True] * answer)


@given(chosen=st.integers(1, 30), rejected=st.integers(1, 30), room=st.integers(8, 40))
def test_a_truncated_pair_fits_and_leaves_no_room(chosen: int, rejected: int, room: int) -> None:
    pair = document(chosen), document(rejected, first=50)
    limit = PairLimit(max_positions=room, too_long="truncate")
    fits = limit.fit("a:1", pair, Omissions())
    assert fits is not None
    before, after = ([len(each.ids) - 1 for each in both] for both in (pair, fits))
    if sum(before) <= room:
        assert fits == pair
        return
    # One position is left over where both are cut and the room is odd.
    assert room - 1 <= sum(after) <= room
    assert abs(after[0] - after[1]) <= 1 or min(after) == min(before)
    for whole, cut in zip(pair, fits, strict=True):
        assert (cut.ids, cut.trained) == (whole.ids[: len(cut.ids)], whole.trained[: len(cut.ids)])


def test_a_truncated_pair_without_a_comparison_is_left_out() -> None:
    omissions = Omissions()
    limit = PairLimit(max_positions=8, too_long="truncate")
    prompt = Labelled([1] * 9, [False] * 6 + [True] * 3)
    assert limit.fit("a:1", (prompt, document(2)), omissions) is None
    assert limit.fit("a:2", (document(9), document(8)), omissions) is None
    assert {reason: found.first for reason, found in omissions.report().items()} == {
        "nothing to train on": ("a:1",),
        "the same tokens when truncated": ("a:2",),
    }
    assert limit.fit("a:3", (document(9), document(8, first=50)), omissions) is not None
    assert omissions.report()["truncated"].first == ("a:3",)


def test_what_is_left_out_is_counted_in_pairs(tmp_path: Path) -> None:
    encoder = encoder_of(tmp_path)
    records = [alpaca("a<|im_end|>", "three"), alpaca("two " * 90, "one"), alpaca("one", "two")]
    limit = PairLimit(max_positions=110, too_long="drop")
    report = pairs_of(tmp_path, records, encoder, limit).report
    path = tmp_path / "a.jsonl"
    assert (report.conversations, report.samples) == (3, 1)
    assert {reason: found.first for reason, found in report.left_out.items()} == {
        "spells a special token": (f"{path}:1",),
        "too long": (f"{path}:2",),
    }
    with pytest.raises(DataError, match=f"none of 2 pairs in {path} can be trained on"):
        pairs_of(tmp_path, records[:2], encoder, limit)


def test_answers_are_compared_by_their_tokens_alone() -> None:
    assert are_equal((document(4), document(4)))
    assert not are_equal((document(4), document(5)))
    longer_prompt = Labelled([9, *document(4).ids], [False, *document(4).trained])
    assert are_equal((document(4), longer_prompt))

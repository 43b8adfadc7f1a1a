"""A tiktoken file as ``tokenizer.json``: a token in base64 and its rank on each line.

The file has neither the pre-tokenization pattern nor the special tokens. Both are in the code of
the model's tokenizer; here they are records, or are read from ``tokenizer_config.json``.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n?")
_CL100K: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SHORT: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI: Final = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORT}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORT}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@attrs.frozen(kw_only=True)
class _Family:
    pattern: str
    special: tuple[str, ...] = ()
    """Special tokens, after the ranks."""
    nfc: bool = False
    """Whether texts are normalized to NFC."""


FAMILIES: Final[Mapping[str, _Family]] = {
    "QWenTokenizer": _Family(
        pattern=_CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),
        special=(
            *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
            *(f"<|extra_{number}|>" for number in range(205)),
        ),
        nfc=True,
    ),
    "ChatGLM4Tokenizer": _Family(pattern=_CL100K),
    "TikTokenTokenizer": _Family(pattern=_KIMI),
    "llama": _Family(pattern=_CL100K),
}
"""``tokenizer_class`` of tokenizer_config.json, or ``model_type`` of config.json -> what the code
of the tokenizer holds: Qwen 1, GLM 4, Kimi, Llama 3."""


def is_tiktoken(path: Path) -> bool:
    """Return whether a file begins as a tiktoken file does."""
    with path.open("rb") as stream:
        return _LINE.fullmatch(stream.readline(10_000)) is not None


def as_tokenizer_json(path: Path, config: Mapping[str, Any], added: Mapping[int, str]) -> str:
    """Return the content of the ``tokenizer.json`` that encodes as a tiktoken file.

    Merges are those of transformers' converter: every way to join two tokens to a third, in the
    order of ranks; a pre-token that is a token is not split.

    Args:
        config: ``tokenizer_class`` or ``model_type``, which name the family; or ``pat_str``.
        added: Id -> special token.

    Raises:
        ValueError: The file is malformed, or its pattern is not known; the message says which.
        OSError: The file cannot be read.
    """
    ranks = _ranks(path)
    if path.suffix == ".tiktoken" and path.stem == "qwen":
        config = {"tokenizer_class": "QWenTokenizer", **config}
    names = [str(config.get(key)) for key in ("tokenizer_class", "model_type")]
    family = next((FAMILIES[name] for name in names if name in FAMILIES), None)
    pattern = config.get("pat_str")
    if pattern is not None or family is None:
        if not isinstance(pattern, str):
            raise ValueError(
                f"{path} is a tiktoken file, which has no pre-tokenization pattern, and the "
                f"tokenizer_class {names[0]} is not known ({', '.join(FAMILIES)}); write the "
                f'pattern as "pat_str" into {path.parent / "tokenizer_config.json"}, or save a '
                "tokenizer.json"
            )
        family = _Family(pattern=pattern)
    _require_tokens_of_ranks(path, ranks, added)
    special = dict(enumerate(family.special, start=len(ranks))) | dict(added)
    return _backend(path, ranks, family, special)


def _ranks(path: Path) -> list[bytes]:
    """Return the tokens in the order of their ranks, which are their ids."""
    found: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            raise ValueError(
                f"{path}:{number}: expected a token in base64 and its rank, found {line[:40]!r}; "
                "copy the file again"
            ) from None
    if sorted(found) != [*range(len(found))]:
        missing = next(rank for rank in range(len(found) + 1) if rank not in found)
        raise ValueError(
            f"{path} has no rank {missing}; ranks must be contiguous from 0: copy the file again, "
            "or save a tokenizer.json"
        )
    tokens = [found[rank] for rank in range(len(found))]
    if lacking := {bytes([byte]) for byte in range(256)}.difference(tokens):
        raise ValueError(f"{path} has no token for {len(lacking)} of the 256 bytes")
    return tokens


def _require_tokens_of_ranks(path: Path, ranks: list[bytes], added: Mapping[int, str]) -> None:
    """
    Raises:
        ValueError: A special token has the id of a rank with other bytes; names all.
    """
    wrong = [
        f"{number} is {text!r}, and the rank is {ranks[number]!r}"
        for number, text in sorted(added.items())
        if number < len(ranks) and ranks[number] != text.encode()
    ]
    if wrong:
        raise ValueError(
            f"{path}: added_tokens_decoder has ids of other tokens: {'; '.join(wrong)}; give "
            f"special tokens ids from {len(ranks)} on"
        )


def _backend(path: Path, ranks: list[bytes], family: _Family, special: Mapping[int, str]) -> str:
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )

    vocabulary = {_spelled(token): rank for rank, token in enumerate(ranks)}
    backend = Tokenizer(models.BPE(vocabulary, [*_merges(ranks)], ignore_merges=True))
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    try:
        split = pre_tokenizers.Split(Regex(family.pattern), "isolated")
    except Exception as error:  # the library has no class of its own
        raise ValueError(f'{path}: "pat_str" is not a pattern: {error}') from None
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    for number, text in sorted(special.items()):
        if number < len(ranks):
            continue
        while (expected := backend.get_vocab_size()) < number:
            backend.add_special_tokens([AddedToken(f"<|reserved_token_{expected}|>", special=True)])
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    return str(backend.to_str())


def _merges(ranks: list[bytes]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that are joined, the first to join first."""
    rank_of = {token: rank for rank, token in enumerate(ranks)}
    for token in ranks:
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in rank_of and pair[1] in rank_of]
        for left, right in sorted(pairs, key=lambda pair: (rank_of[pair[0]], rank_of[pair[1]])):
            yield _spelled(left), _spelled(right)


def _spelled(token: bytes) -> str:
    """Return bytes as the characters that stand for them in byte-level tokenizers (GPT-2)."""
    return "".join(map(_CHARACTERS.__getitem__, token))


def _characters() -> Iterator[str]:
    """Yield the character of each byte: its own if it is visible, else one from U+0100 on."""
    hidden = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or (0xA1 <= byte <= 0xFF and byte != 0xAD):
            yield chr(byte)
        else:
            yield chr(0x100 + hidden)
            hidden += 1


_CHARACTERS: Final = (*_characters(),)

"""A SentencePiece model as ``tokenizer.json``, so that everything else needs one kind of tokenizer.

The pieces, the normalizer and the algorithm, byte-pair encoding, are those of the model (Kudo and
Richardson 2018, arXiv:1808.06226). The parts of a text between special tokens are each encoded as
the sentencepiece library encodes them alone: each gets the dummy prefix, if the model has one.

A user-defined symbol is found in a normalized text, which begins with the prefix. The tokenizers
library normalizes the symbol as well, and so would look for the symbol with a prefix. It is
therefore added under a second name, a mark before it, which the normalizer takes away instead of
adding the prefix. Both names have one id; the decoder knows the second.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import tokenizers

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
"""Types of a piece, as in sentencepiece_model.proto."""
_BPE: Final = 2
_SPACE: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_MOST_SPACES: Final = 2**31
"""More than a text begins with."""
_MARK: Final = "\ufdd0"
"""Before a symbol's second name: no character, so that no text begins with it."""


def as_tokenizer_json(path: Path, added: Mapping[int, str]) -> str:
    """Return the content of the ``tokenizer.json`` that encodes as a SentencePiece model.

    Args:
        path: The model, often named ``tokenizer.model``.
        added: Id -> special token beyond the model's own pieces.

    Raises:
        ValueError: The file is no such model, the model cannot be converted, or the sentencepiece
            library is not installed; the message says which.
        OSError: The file cannot be read.
    """
    model = _read(path)
    problems = [*_unsupported(model)]
    if problems:
        raise ValueError(f"{path} cannot be used: {'; '.join(problems)}")
    from tokenizers import AddedToken, Tokenizer

    symbols = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    has_prefix = bool(model.normalizer_spec.add_dummy_prefix)
    backend = Tokenizer(_bpe(model.pieces))
    backend.normalizer = _normalizer(model.normalizer_spec, symbols)
    backend.decoder = _decoder(model.normalizer_spec)
    for piece in model.pieces:
        if piece.type in (_UNKNOWN, _CONTROL):
            backend.add_special_tokens([AddedToken(piece.piece, special=True, normalized=False)])
    backend.add_tokens([AddedToken(text, normalized=True) for text in symbols])
    for number, text in sorted(added.items()):
        if number < len(model.pieces):
            continue
        if number != backend.get_vocab_size():
            raise ValueError(
                f"{path}: the added token {text!r} has id {number}, but the next id is "
                f"{backend.get_vocab_size()}; ids without a token cannot be converted"
            )
        backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
    content = str(backend.to_str())
    return _with_second_names(content, symbols) if has_prefix and symbols else content


def _with_second_names(content: str, symbols: Sequence[str]) -> str:
    """Return a ``tokenizer.json`` in which symbols are looked for under their second names.

    The library itself would give them ids of their own.
    """
    values = json.loads(content)
    vocabulary = values["model"]["vocab"]
    for token in values["added_tokens"]:
        # Stated, as the library counts names to find the next id.
        vocabulary[token["content"]] = token["id"]
        if token["content"] in symbols:
            token["content"] = _MARK + token["content"]
            vocabulary[token["content"]] = token["id"]
    return json.dumps(values, ensure_ascii=False)


def _read(path: Path) -> Any:
    try:
        from google.protobuf.message import DecodeError
        from sentencepiece import sentencepiece_model_pb2
    except ImportError:
        raise ValueError(
            f"{path} needs the sentencepiece library; install ascend-run[sentencepiece], or save a "
            "tokenizer.json with transformers"
        ) from None
    protos: Any = sentencepiece_model_pb2  # its classes are made when it is imported
    model = protos.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        raise ValueError(f"{path} is not a SentencePiece model, or is truncated") from None
    if not model.pieces:
        raise ValueError(f"{path} is not a SentencePiece model: it has no pieces")
    return model


def _unsupported(model: Any) -> list[str]:
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    problems = []
    if trainer.model_type != _BPE:
        kind = trainer.ModelType.Name(trainer.model_type).lower()
        problems.append(f"its algorithm is {kind}, expected bpe; save a tokenizer.json instead")
    if trainer.treat_whitespace_as_suffix:
        problems.append("white space is a suffix of its pieces")
    if not normalizer.escape_whitespaces:
        problems.append("it does not escape white space")
    return problems


def _bpe(pieces: Sequence[Any]) -> tokenizers.models.Model:
    """Every way to join two pieces to a third is a merge, the best-scored piece first."""
    from tokenizers import models

    ids = {piece.piece: number for number, piece in enumerate(pieces)}
    joined = {piece.piece: piece.score for piece in pieces if piece.type == _NORMAL}
    merges = []
    for text, score in joined.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in joined and right in joined:
                merges.append((-score, ids[left], ids[right], left, right))
    unknown = next((piece.piece for piece in pieces if piece.type == _UNKNOWN), None)
    return models.BPE(
        ids,
        [(left, right) for *_, left, right in sorted(merges)],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(piece.type == _BYTE for piece in pieces),
    )


def _normalizer(rules: Any, symbols: Sequence[str]) -> tokenizers.normalizers.Normalizer:
    """
    Args:
        symbols: User-defined pieces.
    """
    from tokenizers import Regex, normalizers

    steps: list[Any] = []
    if rules.precompiled_charsmap:
        steps.append(normalizers.Precompiled(rules.precompiled_charsmap))
    if rules.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        steps.append(normalizers.Replace(Regex(r"\A | \z"), ""))
    if rules.add_dummy_prefix and symbols:
        whole = "|".join(map(re.escape, sorted(symbols, key=len, reverse=True)))
        steps += [
            normalizers.Replace(Regex(rf"\A(?!{_MARK}(?:{whole})\z)(?=[\s\S])"), _SPACE),
            normalizers.Replace(Regex(rf"\A{_MARK}(?=(?:{whole})\z)"), ""),
        ]
    elif rules.add_dummy_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    steps.append(normalizers.Replace(" ", _SPACE))
    if rules.remove_extra_whitespaces:  # the end of a text may spell an escaped space
        steps.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    return normalizers.Sequence(steps)


def _decoder(rules: Any) -> tokenizers.decoders.Decoder:
    from tokenizers import decoders

    steps: list[Any] = [decoders.Replace(_MARK, ""), decoders.Replace(_SPACE, " ")]
    most = _MOST_SPACES if rules.remove_extra_whitespaces else int(rules.add_dummy_prefix)
    steps += [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", most, 0)]
    return decoders.Sequence(steps)

"""Text of any source as the tokens of a model, made in the processes that read."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

import numpy as np

from stoker.arguments import FLAG, check, whole
from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.arguments import check_path, parse_names
from stoker.sources.protocol import (
    SelfCheckingSource,
    Source,
    SourceIdentity,
    keys_follow_identity,
    locate,
)
from stoker.sources.torch_dataset import MapDataset, TorchSource

# The package is optional: it is imported where the first text is read.
# pyright: reportMissingImports=false

VERSION = 1
"""Bumped by hand when the same text and files would give other tokens."""

_ONE_OF = (
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
"""A folder with none of these holds no tokenizer."""
_NOT_OF_TOKENIZERS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".ot",
    ".tflite", ".index.json", ".md",
)  # fmt: skip
"""How names end of files that decide no token: weights, which may take gigabytes, and documents. Each kind of
tokenizer has further files, so no list names all that decide."""


class Tokenize:
    """The samples of another source, with the tokens of a text in its place.

    Tokens are made where samples are read, in the worker processes. They depend on the sample alone: an
    edited caption is encoded again, the others are taken from the earlier cache.

    Args:
        source: A source, or a map-style Dataset.
        folder: The tokenizer, as its `save_pretrained` wrote it: `tokenizer` of a pipeline, or the folder of
            a model. Nothing is downloaded. All its files but weights and documents (`.md`) are part of the
            identity.
        field: The field of text, as its UTF-8 bytes: `text={"caption": "bytes"}` of `TorchSource` (of a
            Dataset given here that is assumed), `ParquetSource` and `DatasetsSource`,
            `columns={"caption": {"text": "bytes"}}` of `SQLSource`, `.txt` members of `TarSource`.
        out: Name of the field of tokens, int32.
        max_length: The most tokens; longer text is cut there. None: any number, with `pad=False`.
        pad: True: tokens `(max_length,)`, padded at the end, and a field `attention_mask`, bool. False:
            ragged tokens `(T,)`.
        attention_mask: Name of the mask.
        special_tokens: Add those that the tokenizer begins and ends a text with. False: for text that has
            them already.
        keep_text: Leave the text in the sample, as for a second tokenizer.

    Raises:
        ConfigError: An argument makes no sense, or the folder holds no tokenizer.
        SourceError: On first use: there is no such field of text, or the text is not UTF-8.

    Examples:
        >>> captions = [{"caption": "a red cat"}, {"caption": "two dogs"}]  # or a Dataset
        >>> source = stoker.Tokenize(captions, "sdxl/tokenizer", max_length=77)  # doctest: +SKIP
        >>> source.read(0)["input_ids"].shape  # doctest: +SKIP
        (77,)
    """

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        source: Source | MapDataset,
        folder: str | Path,
        field: str = "caption",
        out: str = "input_ids",
        *,
        max_length: int | None = 77,
        pad: bool = True,
        attention_mask: str = "attention_mask",
        special_tokens: bool = True,
        keep_text: bool = False,
    ) -> None:
        check_path("folder", folder)
        flags = {"pad": pad, "special_tokens": special_tokens, "keep_text": keep_text}
        check({name: (value, FLAG) for name, value in flags.items()})
        for what, name in (("field", field), ("out", out), ("attention_mask", attention_mask)):
            parse_names(what, name, "the name of a field")
        if max_length is not None:
            check({"max_length": (max_length, whole(least=1))})
        elif pad:
            raise ConfigError(
                f"{arg('pad', True)} needs a length to pad to",
                hint=f"Give {arg('max_length', 77)}, or {arg('pad', False)}",
            )
        is_source = isinstance(source, Source) and not isinstance(source, type)
        made = cast("Source", source) if is_source else TorchSource(source, text={field: "bytes"})  # pyright: ignore[reportArgumentType]
        self._source: Source = made
        self._folder = Path(folder).expanduser()
        if not any((self._folder / name).is_file() for name in _ONE_OF):
            raise ConfigError(
                f"{self._folder} holds no tokenizer",
                hint="Give a folder that tokenizer.save_pretrained(folder) wrote; nothing is downloaded",
            )
        self._field, self._out, self._mask = field, out, attention_mask
        self._max_length, self._pad = max_length, pad
        self._special_tokens, self._keep_text = special_tokens, keep_text
        self._digest: str | None = None
        self._tokenizer: Any = None

    def __repr__(self) -> str:
        """Return the source and the folder."""
        return f"Tokenize({self._source!r}, {str(self._folder)!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the tokenizer, which each process loads; its digest is checked there."""
        self._digest_files()
        return {**self.__dict__, "_tokenizer": None}

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._source)

    def schema(self) -> Schema:
        """Return the fields of the source, with tokens and mask.

        Raises:
            SourceError: There is no such field of text, or a name occurs twice.
        """
        found = dict(self._source.schema())
        text = found.get(self._field)
        if text is None:
            likely = arg("field", _likely_text(found, self._field), call="Tokenize")
            raise SourceError(
                f"samples of {self._source!r} have no field {self._field!r}, only {', '.join(found)}",
                hint=f"Name the one with text, as {likely}",
            )
        if not _may_be_text(text):
            raise SourceError(
                f"field {self._field!r} of {self._source!r} is {text.dtype} {text.shape}, not the bytes of a "
                "text (uint8, one axis)",
                hint="Give Tokenize the dataset itself, or a source with "
                f"{arg('text', {self._field: 'bytes'})}",
            )
        if not self._keep_text:
            del found[self._field]
        length = self._max_length if self._pad and self._max_length is not None else -1
        made = {self._out: Field(shape=(length,), dtype="int32", ragged=not self._pad)}
        if self._pad:
            made[self._mask] = Field(shape=(length,), dtype="bool")
        if clash := sorted(found.keys() & made.keys()):
            raise SourceError(
                f"samples of {self._source!r} have a field {clash[0]!r} already",
                hint=f"Give another name with {arg('out')} or {arg('attention_mask')}",
            )
        return {**found, **made}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read a sample, with tokens in place of its text.

        Raises:
            SourceError: The text is not UTF-8; or as the source raises.
            IndexError: There is no such sample.
        """
        sample = self._source.read(index, start, stop)
        text = sample[self._field] if self._keep_text else sample.pop(self._field)
        try:
            # The NUL bytes behind a text come from sources that pad it to one length.
            plain = text.tobytes().rstrip(b"\0").decode()
        except UnicodeDecodeError as error:
            raise SourceError(
                f"{self.locate(index)}, field {self._field!r} is not UTF-8 at byte {error.start}",
                hint="Convert it, or leave the sample out",
            ) from error
        tokens = self._loaded()(
            plain,
            add_special_tokens=self._special_tokens,
            truncation=self._max_length is not None,
            max_length=self._max_length,
            padding="max_length" if self._pad else False,
            return_attention_mask=True,
        )
        sample[self._out] = np.asarray(tokens["input_ids"], np.int32)
        if self._pad:
            sample[self._mask] = np.asarray(tokens["attention_mask"], np.bool_)
        return sample

    def runs(self) -> Sequence[range]:
        """Return those of the source."""
        return self._source.runs()

    def keys(self) -> Sequence[str]:
        """Return those of the source."""
        return self._source.keys()

    @property
    def keys_follow_identity(self) -> bool:
        """As the source says: tokens change no key."""
        return keys_follow_identity(self._source)

    def locate(self, index: int) -> str:
        """Return the place that the source names."""
        return locate(self._source, index)

    def check_in_child(self) -> None:
        """Have the source check itself, if it can."""
        if isinstance(self._source, SelfCheckingSource):
            self._source.check_in_child()

    def identity(self) -> SourceIdentity:
        """Return the identity of the source with the settings here, and the tokenizer by content."""
        inner = self._source.identity()
        own: dict[str, Json] = {
            "field": self._field,
            "out": self._out,
            "max_length": self._max_length,
            "mask": self._mask if self._pad else None,
            "special_tokens": self._special_tokens,
            "keep_text": self._keep_text,
            "tokenizer": self._digest_files(),
        }
        # A second tokenizer around the first has a name of its own.
        settings: dict[str, Json] = {**inner.settings, f"tokenize {self._out}": own}
        return dataclasses.replace(inner, kind=f"{inner.kind} tokenize/{VERSION}", settings=settings)

    def _digest_files(self) -> str:
        """Return the sha256 of the names and bytes of the tokenizer's files; once the tokenizer is loaded, of
        those it was loaded from."""
        if self._tokenizer is None or self._digest is None:
            found = self._digest_now()
            self._digest = found if self._digest is None else self._digest
            if found != self._digest:
                raise SourceError(
                    f"files of the tokenizer in {self._folder} changed after the source was made",
                    hint="Make the source again: other files make another cache. Keep files that change, as "
                    "logs, in another folder",
                )
        return self._digest

    def _digest_now(self) -> str:
        digest = hashlib.sha256()
        try:
            for path in sorted(self._folder.iterdir()):
                if path.name.startswith(".") or path.name.endswith(_NOT_OF_TOKENIZERS) or not path.is_file():
                    continue
                data = path.read_bytes()
                digest.update(f"{path.name} {len(data)}\n".encode())
                digest.update(data)
        except OSError as error:
            raise SourceError(
                f"{error.filename or self._folder} cannot be read: {error.strerror}",
                hint="A tokenizer is known by all files in its folder: make this one readable, or move it",
            ) from error
        return digest.hexdigest()

    def _loaded(self) -> Any:
        if self._tokenizer is not None:
            return self._tokenizer
        self._digest_files()
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"Tokenize needs transformers, which cannot be imported ({error})",
                hint="pip install 'stoker[features]'",
            ) from error
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise SourceError(
                f"{self._folder} cannot be loaded as a tokenizer: {error}", hint="Copy or download it again"
            ) from error
        if self._pad and tokenizer.pad_token_id is None:
            raise ConfigError(
                f"the tokenizer in {self._folder} has no token to pad with",
                hint=f"Give {arg('pad', False)}: ragged tokens need none",
            )
        tokenizer.padding_side = tokenizer.truncation_side = "right"
        tokenizer.model_max_length = 1 << 30  # what is longer is cut here, or meant to be
        self._tokenizer = tokenizer
        return tokenizer


def _may_be_text(field: Field) -> bool:
    return field.dtype == "uint8" and len(field.shape) == 1


def _likely_text(schema: Schema, wanted: str) -> str:
    """Return the field that a name was meant for: one of text, the nearest of several."""
    names = [name for name, field in schema.items() if _may_be_text(field)] or [*schema] or [wanted]
    return (get_close_matches(wanted, names, n=1) or names)[0]

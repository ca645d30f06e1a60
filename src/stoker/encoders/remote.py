"""An encoder behind HTTP: embeddings, or hidden states of a language model, from a server.

A server may be slow, restart, answer in another order, or answer wrongly. So each request has a timeout and
retries, and each answer is checked: it must be about this request, of this length, and finite. What is wrong
with one sample costs that sample alone. A server that is gone ends the run; no sample is set aside for that.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from stoker.arguments import BATCH, LENGTHS, MAPPING, NAME, PATH, TEXT, check, number, or_none, several, whole
from stoker.encoders.pretrained import TOKEN_DTYPES, ComputeDtype, check_mask, passed_fields, required_tokens
from stoker.encoders.protocol import TOKEN_LENGTHS, EncodeBatchSize
from stoker.errors import EncoderError, ServiceError, arg
from stoker.runtime.http import FailureKind, HttpClient, HttpFailure, json_object, retry_after_s
from stoker.runtime.threads import Pool, RetryPolicy, Ticket, retry
from stoker.schema import LENGTHS_SUFFIX, Field, Json, Schema
from stoker.units import MIB

Api: TypeAlias = Literal["openai", "vllm", "vllm-files", "sglang"]
"""How the server is asked; see `RemoteEncoder`."""
Content: TypeAlias = "str | tuple[int, ...]"
"""What is sent of one sample: its text, or its tokens."""

_PATHS = {
    "openai": "/v1/embeddings", "vllm": "/pooling", "vllm-files": "/v1/completions", "sglang": "/generate"
}  # fmt: skip
_SECONDS = number("seconds above 0", least=0.0, above=True)
_LAYERS = several(whole(), "a list of whole numbers, as [8, 16]")
_ANSWER_BYTES = 512 * MIB
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_LOCK_PAUSE_S = 0.005
_GRACE_S = 5.0
"""Seconds for threads to come back after the deadline."""
_BUSY = frozenset({408, 409, 425, 429})
"""Statuses after which the same request may succeed; those from 500 on too."""
_OF_THE_SAMPLE = frozenset({400, 413, 422})
"""Statuses that say what is wrong with a request; those from 500 on may."""
_TRANSIENT = (FailureKind.UNREACHABLE, FailureKind.TIMEOUT, FailureKind.BROKEN, FailureKind.CUT)


class _Failure(Exception):  # noqa: N818 - raised and caught here alone
    """A request failed.

    Args:
        reason: For the message.
        again: The same request may succeed.
        blames: Whose fault it is: the sample's, the server's, or not known.
    """

    def __init__(
        self,
        reason: str,
        *,
        again: bool,
        blames: Literal["sample", "server", "unknown"],
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.again, self.blames, self.pause_s = again, blames, pause_s


def _wrong(reason: str) -> _Failure:
    """Return the failure of an answer that makes no sense: a server that does so once may do better."""
    return _Failure(f"a wrong answer: {reason}", again=True, blames="sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Remembered:
    """What one sample came to."""

    value: Tensor | None = None
    """`(dim,)`, `(T, dim)` or `(layers, T, dim)`."""
    error: str = ""


class RemoteEncoder:
    """Encoder on a server; satisfies `Encoder`.

    `api` says how the server is asked, and what the record has:

    - `openai`: `POST /v1/embeddings` with tokens or text (OpenAI, vLLM, SGLang, TEI). `embedding` `(dim,)`.
    - `vllm`: `POST /pooling` with tokens and the task `token_embed` (vLLM 0.11.2 to 0.22). `hidden`
      `(T, dim)`, the states after the last layer.
    - `vllm-files`: `POST /v1/completions` with tokens, of a vLLM that was started with the speculative method
      `extract_hidden_states` (0.18 to 0.22). It writes the states to files in a folder that this machine sees
      too. `hidden_8` `(T, dim)` for each layer.
    - `sglang`: `POST /generate` with tokens and `return_hidden_states` (SGLang 0.4.6 to 0.5, started with
      `--enable-return-hidden-states --disable-radix-cache --chunked-prefill-size -1`). `hidden` `(T, dim)`.

    The field is replaced by the record; other fields pass through. Tokens of a fixed length are sent without
    those that the mask hides, wherever these are, and `hidden` is zero there. A sample without any token or
    text is not sent: its `hidden` is zero, and for want of an embedding it is quarantined.

    Each answer is checked. Results are told apart by their numbers, not by their order. The id of the request
    must be ours where the server repeats it (vLLM, SGLang), and so must the count of tokens that it has read.
    The shape must be right, and all must be finite. An answer that fails is asked for again.
    A sample that fails in the end is quarantined. But if the server answers nothing else either, the run ends
    with an `EncoderError`, and resumes when it is started again.

    The identity is `model`, `revision` and the settings that change values, not the URL: the server cannot
    prove which weights it has, so say what you started it with.

    Args:
        url: Of the server, without the path that `api` adds.
        model: Name that the server knows the model by.
        revision: Names the weights: a commit or a date. Change it when the server's weights change.
        dim: Width of an embedding or of the state of one layer.
        api: See above.
        field: The field with tokens, or with text as its UTF-8 bytes (`openai` alone).
        output: Name of the record's field, or what the names of layers begin with.
        layers: Of `vllm-files`: the layers that the server was started with, in its order.
        files: Of `vllm-files`: the folder of the server, `shared_storage_path`. Files are deleted once read.
        attention_mask: The field with the mask of tokens of a fixed length, where there is one.
        dtype: Of the record. Give that of the server, as `bfloat16`: its first answers are asked for twice,
            and may differ by what that dtype rounds.
        in_flight: Requests at a time.
        per_request: Samples in one request, of `openai` and `vllm`.
        timeout_s: Seconds for one request.
        retries: Further attempts after an answer that failed, a timeout, 429 or 5xx. Pauses double from half
            a second to 30 s; a `Retry-After` of the server is respected.
        deadline_s: Seconds for all requests of one batch; less than `Timeouts.encode`.
        headers: Sent with each request, as `{"Authorization": "Bearer ..."}`; not part of the identity.
        body: Further entries of each request, as `{"dimensions": 256}`; part of the identity.
        encode_batch: Samples in one batch; None: `in_flight * per_request`.
        lengths: Lengths to which ragged samples are padded, so that several are asked for at a time. None:
            one at a time.

    Raises:
        EncoderError: A setting makes no sense.

    Examples:
        >>> import stoker
        >>> encoder = stoker.RemoteEncoder(
        ...     "http://localhost:8000", model="bge-m3", revision="5617a9f", dim=1024
        ... )
        >>> encoder.identity()["config"]["model"]
        'bge-m3'
    """

    VERSION = 2
    """Bumped by hand when the same answers would give other records."""

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        url: str,
        *,
        model: str,
        revision: str,
        dim: int,
        api: Api = "openai",
        field: str = "input_ids",
        output: str | None = None,
        layers: Sequence[int] = (),
        files: str | Path | None = None,
        attention_mask: str = "attention_mask",
        dtype: str = "float32",
        in_flight: int = 8,
        per_request: int = 1,
        timeout_s: float = 60.0,
        retries: int = 4,
        deadline_s: float = 240.0,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Json] | None = None,
        encode_batch: int | None = None,
        lengths: Sequence[int] | None = TOKEN_LENGTHS,
    ) -> None:
        for name, value, known in (("api", api, Api), ("dtype", dtype, ComputeDtype)):
            if value not in get_args(known):
                raise EncoderError(
                    f"{arg(name, value)} is unknown", hint=f"Expected {', '.join(get_args(known))}"
                )
        counts = {"dim": dim, "in_flight": in_flight, "per_request": per_request}
        check({name: (value, whole(least=1)) for name, value in counts.items()}, EncoderError)
        check({"encode_batch": (encode_batch, BATCH), "retries": (retries, whole(least=0))}, EncoderError)
        check({"timeout_s": (timeout_s, _SECONDS), "deadline_s": (deadline_s, _SECONDS)}, EncoderError)
        texts = {"url": url, "field": field, "attention_mask": attention_mask}
        check({name: (value, TEXT) for name, value in texts.items()}, EncoderError)
        check({"headers": (headers, or_none(MAPPING)), "body": (body, or_none(MAPPING))}, EncoderError)
        check({"layers": (layers, _LAYERS), "lengths": (lengths, LENGTHS)}, EncoderError)
        check({"output": (output, or_none(NAME)), "files": (files, or_none(PATH))}, EncoderError)
        if not (api == "vllm-files") == (files is not None) == bool(layers):
            raise EncoderError(
                f"{arg('api', api)} with layers {list(layers)} and files {files}",
                hint="Give layers and files to 'vllm-files', and to no other",
            )
        if per_request > 1 and api not in ("openai", "vllm"):
            raise EncoderError(f"{arg('api', api)} takes one sample a request", hint="Leave per_request out")
        if not (TEXT.accepts(model) and TEXT.accepts(revision)):
            raise EncoderError(
                f"model is {model!r} and revision {revision!r}: the cache is known by them",
                hint="Name the model, and the commit or date of its weights",
            )
        self._url, self._api = url.rstrip("/"), api
        self._model, self._revision, self._dim = model, revision, int(dim)
        self._field, self._mask, self._dtype = field, attention_mask, dtype
        self._output = output or ("embedding" if api == "openai" else "hidden")
        self._layers, self._files = tuple(layers), None if files is None else Path(files)
        self._in_flight, self._per_request = in_flight, per_request
        self._timeout_s, self._retries, self._deadline_s = timeout_s, retries, deadline_s
        self._headers, self._body = dict(headers or {}), dict(body or {})
        self._encode_batch = encode_batch
        self._lengths = () if lengths is None else tuple(lengths)
        self._begin()

    def _begin(self) -> None:
        self._client: HttpClient | None = None
        self._pool: Pool | None = None
        self._searched: dict[Content, _Remembered | None] = {}
        """Results of the last batch of which a sample failed: precompute asks for its samples again, alone.
        None: an error that has been told; the server may do better next time."""
        self._zeros: dict[Content, _Remembered] = {}
        """That of the last sample of zeros, with which short batches are filled up."""
        self._answered: Content | None = None
        """A sample that the server has answered well."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        """Return the URL and the model, without headers."""
        return f"RemoteEncoder({self._url!r}, model={self._model!r}, revision={self._revision!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; connections and threads stay."""
        left = ("_client", "_pool", "_searched", "_zeros", "_answered", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the settings."""
        self.__dict__.update(state)
        self._begin()

    @property
    def independent_steps(self) -> bool:
        """False: a state depends on the tokens before it."""
        return False

    def schema(self, sample_schema: Schema) -> Schema:
        """Return what the server gives, then the fields that pass through.

        Raises:
            EncoderError: There is no such field, it holds neither tokens nor text, or a name occurs twice.
        """
        field = required_tokens(sample_schema, self._field, "RemoteEncoder")
        tokens = field.dtype in TOKEN_DTYPES
        if len(field.shape) != 1 or not (tokens or (field.dtype == "uint8" and self._api == "openai")):
            text = " or the bytes of a text" if self._api == "openai" else ""
            raise EncoderError(
                f"field {self._field!r} is {field.dtype} {field.shape}",
                hint=f"Expected tokens (L,){text}; make them with stoker.Tokenize(source, folder)",
            )
        if self._api == "openai":
            made = {self._output: Field(shape=(self._dim,), dtype=self._dtype)}
        else:
            state = Field(shape=(field.shape[0], self._dim), dtype=self._dtype, ragged=field.ragged)
            made = dict.fromkeys(self._names(), state)
        masked = tokens and not field.ragged
        if masked:
            check_mask(sample_schema, self._field, self._mask, "RemoteEncoder")
        taken = {self._field} | ({self._mask} if masked else set())
        return passed_fields(sample_schema, taken, made, "RemoteEncoder")

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else as many samples as are in flight; ragged ones by length."""
        samples = self._encode_batch or self._in_flight * self._per_request
        if any(field.ragged for field in sample_schema.values()):
            return EncodeBatchSize(samples=samples if self._lengths else 1, lengths=self._lengths)
        return EncodeBatchSize(samples=samples)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Ask the server for one batch.

        Raises:
            ValueError: It answers one of these samples wrongly, and others well.
            EncoderError: It answers nothing, or refuses the model or the credentials.
        """
        values = batch[self._field]
        real = self._real_tokens(batch)
        contents = self._contents(values, real)
        found = self._results([*dict.fromkeys(content for content in contents if content)])
        for content in contents:
            if content and found[content].error and _means_something(content):
                raise ValueError(found[content].error)
        rows = [self._row(content, found, places) for content, places in zip(contents, real, strict=True)]
        stacked = torch.stack(rows).to(values.device)
        taken = {self._field, self._field + LENGTHS_SUFFIX}
        lengths = batch.get(self._field + LENGTHS_SUFFIX)
        if values.dtype is not torch.uint8 and lengths is None:
            taken.add(self._mask)
        if self._api == "openai":
            made = {self._output: stacked}
        else:
            made = {name: stacked[:, place].contiguous() for place, name in enumerate(self._names())}
            if lengths is not None:
                made |= {name + LENGTHS_SUFFIX: lengths for name in self._names()}
        return made | {name: value for name, value in batch.items() if name not in taken}

    def to(self, device: torch.device) -> None:
        """Do nothing: results go to the device of the batch."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return nothing: the server has them."""
        return {}

    def identity(self) -> dict[str, Json]:
        """Return model, revision and the settings that change values; neither URL nor headers."""
        config: dict[str, Json] = {
            "model": self._model,
            "revision": self._revision,
            "api": self._api,
            "dim": self._dim,
            "field": self._field,
            "output": self._output,
            "layers": list[Json](self._layers),
            "mask": self._mask,
            "dtype": self._dtype,
            "body": self._body,
        }
        return {"class": "stoker.RemoteEncoder", "config": config, "weights": "", "version": self.VERSION}

    # ------------------------------------------------------------------------------------------------------
    # Between batches and what is sent.

    def _names(self) -> list[str]:
        return [f"{self._output}_{layer}" for layer in self._layers] or [self._output]

    def _real_tokens(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return which tokens are not padding, `(n, L)` bool."""
        values = batch[self._field]
        lengths, mask = batch.get(self._field + LENGTHS_SUFFIX), batch.get(self._mask)
        if lengths is not None:
            return torch.arange(values.shape[1]) < lengths.cpu()[:, None]
        if values.dtype is not torch.uint8 and mask is not None and mask.shape == values.shape:
            return mask.cpu().bool()
        return torch.ones(values.shape, dtype=torch.bool)

    def _contents(self, values: Tensor, real: Tensor) -> list[Content]:
        """Return what to send of each sample; empty for one without text or tokens."""
        if values.dtype is torch.uint8:
            return [row.numpy().tobytes().rstrip(b"\0").decode() for row in values.cpu()]
        return [tuple(map(int, row[places])) for row, places in zip(values.cpu(), real, strict=True)]

    def _row(self, content: Content, found: Mapping[Content, _Remembered], real: Tensor) -> Tensor:
        """Return the record of one sample, `(dim,)` or `(layers, L, dim)`; `real`: its tokens."""
        value = found[content].value if content else None
        if self._api == "openai":  # NaN, of which precompute makes a quarantined sample
            empty = torch.full((self._dim,), torch.nan, dtype=getattr(torch, self._dtype))
            return empty if value is None else value
        # What fills up a batch may be refused by the server; a sample of zeros then as well.
        fill = torch.nan if content and value is None else 0.0
        shape = (len(self._names()), len(real), self._dim)
        row = torch.full(shape, fill, dtype=getattr(torch, self._dtype))
        if value is not None:
            row[:, real] = value
        return row

    def _results(self, contents: list[Content]) -> dict[Content, _Remembered]:
        """Return the result of each content.

        Raises:
            EncoderError: The server answers nothing, or refuses what is the same for all samples.
        """
        samples = {content for content in contents if _means_something(content)}
        if not samples <= self._searched.keys():  # other samples: the search is over
            self._searched = {}
        known = {**self._zeros, **self._searched}
        found = {content: one for content in contents if (one := known.get(content)) is not None}
        self._searched.update((content, None) for content in samples & found.keys() if found[content].error)
        fresh = [content for content in contents if content not in found]
        until = time.monotonic() + self._deadline_s
        if self._pool is None:
            self._pool = Pool(self._in_flight, "stoker-remote")
        pieces = [fresh[at : at + self._per_request] for at in range(0, len(fresh), self._per_request)]
        tickets: list[tuple[list[Content], Ticket[list[_Remembered]]]] = [
            (piece, self._pool.submit(lambda piece=piece: self._ask_all(piece, until))) for piece in pieces
        ]
        for piece, ticket in tickets:
            left_s = max(0.0, until - time.monotonic()) + _GRACE_S
            found.update(zip(piece, ticket.result(left_s, f"asking {self._url}"), strict=True))
        asked = {content: found[content] for content in fresh if content in samples}
        if self._searched or any(one.error for one in asked.values()):
            self._searched.update(asked)
        self._zeros = {
            content: found[content] for content in contents if content not in samples
        } or self._zeros
        return found

    def _ask_all(self, contents: list[Content], until: float) -> list[_Remembered]:
        """Return the results of one request; where that fails, of one request for each sample."""
        try:
            return [_Remembered(value=value) for value in self._ask(contents, until)]
        except _Failure as failure:
            if len(contents) == 1:
                return [_Remembered(error=f"{self._url}: {failure}")]
        return list(itertools.chain.from_iterable(self._ask_all([content], until) for content in contents))

    def _ask(self, contents: list[Content], until: float) -> list[Tensor]:
        """Return what the server makes of these samples, after retries.

        Raises:
            _Failure: These samples are at fault.
            EncoderError: The server is.
        """
        began = time.monotonic()
        policy = RetryPolicy(
            first_s=_FIRST_PAUSE_S,
            longest_s=_LONGEST_PAUSE_S,
            jitter=0.5,
            attempts=self._retries + 1,
            timeout_s=max(0.0, until - began),
        )
        try:
            return retry(
                lambda: self._exchange(contents, until),
                lambda error: isinstance(error, _Failure) and error.again,
                policy,
                asked_pause_s=lambda error: getattr(error, "pause_s", 0.0),
            )
        except _Failure as failure:
            if failure.blames != "server" and self._answers_others(failure, contents[0], until):
                raise
            raise EncoderError(
                f"{self._url}{_PATHS[self._api]}: {failure}",
                hint="What is stored stays; run it again to resume once the server answers",
            ) from None

    def _answers_others(self, failure: _Failure, content: Content, until: float) -> bool:
        """Return True if the server answers other samples well, so that this one is at fault.

        After a timeout or 5xx it is asked once more for a sample that it has answered. What it answered
        before, or to another request at the same time, says nothing of now.
        """
        with self._lock:
            answered = self._answered
        if answered is not None and failure.blames == "sample":
            return True
        other = answered if answered is not None else "a" if isinstance(content, str) else (1,)
        for _ in range(2):
            if time.monotonic() > until:
                return False
            with suppress(_Failure):
                self._exchange([other], until)
                return True
        return False

    def _exchange(self, contents: list[Content], until: float) -> list[Tensor]:
        """Send one request, and return its checked results."""
        request_id = uuid.uuid4().hex
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise _Failure(f"no answer within {self._deadline_s:g} s", again=False, blames="unknown")
        with self._lock:
            self._client = self._client or HttpClient(
                timeout_s=self._timeout_s, total_s=self._timeout_s, limit_bytes=_ANSWER_BYTES
            )
        try:
            answer = self._client.ask(
                "POST",
                self._url + _PATHS[self._api],
                total_s=min(self._timeout_s, left_s),
                headers={**self._headers, "X-Request-Id": request_id},
                body=self._request(contents, request_id),
            )
        except HttpFailure as failure:
            again = failure.kind in _TRANSIENT
            blames = "sample" if failure.kind is FailureKind.TOO_LARGE else "unknown" if again else "server"
            reason = f"no answer ({failure.kind.value}: {failure.reason})"
            raise _Failure(reason, again=again, blames=blames) from None
        if not answer.is_success:
            status = answer.status
            again = status in _BUSY or status >= 500
            blames = "sample" if status in _OF_THE_SAMPLE else "unknown" if status >= 500 else "server"
            said = answer.body[:200].decode(errors="replace").strip()
            raise _Failure(
                f"{answer.shown_status}{': ' if said else ''}{said}",
                again=again,
                blames=blames,
                pause_s=retry_after_s(answer.headers) if again else 0.0,
            )
        try:
            parsed = json_object(answer.body, "the server")
        except ServiceError as error:
            raise _wrong(error.problem.fact) from None
        values = self._parsed(parsed, contents, request_id, until)
        with self._lock:
            self._answered = contents[0]
        return values

    # ------------------------------------------------------------------------------------------------------
    # The formats of the servers.

    def _request(self, contents: list[Content], request_id: str) -> dict[str, Json]:
        inputs: list[Json] = [one if isinstance(one, str) else list[Json](one) for one in contents]
        if self._api == "sglang":
            sampling: Json = {"max_new_tokens": 1, "temperature": 0}
            own: dict[str, Json] = {"input_ids": inputs[0], "rid": request_id, "sampling_params": sampling}
            return {**own, "return_hidden_states": True, **self._body}
        if self._api == "vllm-files":
            return {
                "model": self._model,
                "prompt": inputs[0],
                "max_tokens": 1,
                "temperature": 0,
                **self._body,
            }
        task: dict[str, Json] = {"task": "token_embed"} if self._api == "vllm" else {}
        return {"model": self._model, "input": inputs, "encoding_format": "float", **task, **self._body}

    def _parsed(
        self, answer: Mapping[str, Any], contents: list[Content], request_id: str, until: float
    ) -> list[Tensor]:
        """Return the result of each sample.

        Raises:
            _Failure: The answer is not what was asked for.
        """
        if self._api == "sglang":
            return [self._of_sglang(answer, contents[0], request_id)]
        said = answer.get("id")
        of_vllm = self._api != "openai" or str(said).startswith("embd-")
        if of_vllm and not str(said).partition("-")[2].startswith(request_id):
            raise _wrong(f"it is about request {said!r}, not {request_id}")
        if self._api == "vllm-files":
            return [self._of_files(answer, contents[0], until)]
        usage = answer.get("usage")
        read: object = (
            cast("dict[str, object]", usage).get("prompt_tokens") if isinstance(usage, dict) else None
        )
        tokens = sum(len(one) for one in contents if not isinstance(one, str))
        if tokens and isinstance(read, int) and read != tokens:
            raise _wrong(f"the server has read {read} tokens of {tokens}")
        items = answer.get("data")
        entries = cast("list[Any]", items) if isinstance(items, list) else []
        places = [one.get("index") if isinstance(one, dict) else None for one in entries]
        if sorted(map(str, places)) != sorted(map(str, range(len(contents)))):
            raise _wrong(f"its results have the numbers {places}, asked for were {len(contents)}")
        by_place = dict(zip(map(int, cast("list[Any]", places)), entries, strict=True))
        name = "embedding" if self._api == "openai" else "data"
        return [
            self._numbers(
                by_place[place].get(name),
                (self._dim,) if self._api == "openai" else (1, len(content), self._dim),
            )
            for place, content in enumerate(contents)
        ]

    def _of_sglang(self, answer: Mapping[str, Any], content: Content, request_id: str) -> Tensor:
        meta: Mapping[str, Any] = answer.get("meta_info") or {}
        if meta.get("id") != request_id:
            raise _wrong(f"it is about request {meta.get('id')!r}, not {request_id}")
        if meta.get("prompt_tokens") != len(content):
            raise _wrong(f"the server has read {meta.get('prompt_tokens')} tokens of {len(content)}")
        states: object = meta.get("hidden_states")
        # One entry for the prompt, then one for each token that was generated.
        first: object = states[0] if isinstance(states, list) and states else None
        return self._numbers(first, (1, len(content), self._dim))

    def _of_files(self, answer: Mapping[str, Any], content: Content, until: float) -> Tensor:
        given: object = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        assert self._files is not None
        path = Path(str(given)).resolve()
        if not isinstance(given, str) or not path.is_relative_to(self._files.resolve()):
            raise _wrong(f"it names the file {given!r}, which is not in {self._files}")
        lock = path.with_name(path.name + ".lock")
        try:
            stored = _read_locked(path, lock, until)
        except (OSError, SafetensorError) as error:
            raise _wrong(f"{path} cannot be read ({error})") from None
        states, tokens = stored.get("hidden_states"), stored.get("token_ids")
        if states is None or tokens is None or tokens[: len(content)].tolist() != [*content]:
            raise _wrong(f"{path} is about other tokens")
        shape = (len(content), len(self._layers), self._dim)
        if tuple(states.shape) != shape or not bool(states.isfinite().all()):
            raise _wrong(f"{path} holds states {tuple(states.shape)}, expected {shape} finite numbers")
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        return states.transpose(0, 1).to(getattr(torch, self._dtype))

    def _numbers(self, found: object, shape: tuple[int, ...]) -> Tensor:
        """Return numbers of an answer.

        Raises:
            _Failure: They are of another shape, or not finite.
        """
        try:
            array: NDArray[np.float32] = np.asarray(found, np.float32)
        except (TypeError, ValueError):
            raise _wrong(f"{json.dumps(found)[:60]} are not numbers of shape {shape}") from None
        if array.shape != shape and not (
            shape[0] == 1 and array.size and array.shape in (shape[1:], shape[2:])
        ):
            raise _wrong(f"its numbers are of shape {array.shape}, expected {shape}")
        if array.size != math.prod(shape):
            raise _wrong(f"it has {array.size:,} numbers, expected {shape}")
        if not np.isfinite(array).all():
            raise _wrong("it holds NaN or infinity")
        return torch.from_numpy(array.reshape(shape).copy()).to(getattr(torch, self._dtype))  # pyright: ignore[reportUnknownMemberType]


def _means_something(content: Content) -> bool:
    """Return False for what fills up a short batch: tokens that are all 0."""
    return any(content) if isinstance(content, tuple) else bool(content)


def _read_locked(path: Path, lock: Path, until: float) -> dict[str, Tensor]:
    """Return the tensors of a file that its writer may hold a lock for."""
    if not lock.exists():
        return load(path.read_bytes())
    limit = RetryPolicy(first_s=_LOCK_PAUSE_S, longest_s=0.1, timeout_s=max(0.0, until - time.monotonic()))
    with lock.open("rb") as file:
        hold: Callable[[], None] = lambda: fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # noqa: E731
        retry(hold, BlockingIOError, limit)
        return load(path.read_bytes())

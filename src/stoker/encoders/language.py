"""Outputs of language models of `transformers`, token by token: text encoders, hidden states, top-k.

Tokens come as a field of numbers, from `stoker.Tokenize` or from the data. They are of a fixed length, padded
at the end, with a mask; or ragged, without padding.

Padding never reaches a token before it. A causal model needs no mask for that. A model that sees both sides
is given a mask of four axes for each batch, also for one without padding. `transformers` would leave out a
mask that hides nothing, take another kernel, and so make the last bits of a sample depend on its neighbors.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from stoker.arguments import FLAG, LENGTHS, NAME, check, number, or_none, several, whole
from stoker.encoders.pretrained import (
    ATTENTION,
    TOKEN_DTYPES,
    FolderEncoder,
    ModelFolder,
    check_mask,
    missing_package,
    passed_fields,
    refuse_left_padding,
    refuse_missing,
    required_tokens,
)
from stoker.encoders.protocol import TOKEN_LENGTHS, EncodeBatchSize
from stoker.errors import EncoderError, arg
from stoker.schema import LENGTHS_SUFFIX, Field, Json, Schema
from stoker.units import GIB, MIB

# The package is optional: it is imported where a model is loaded.
# pyright: reportMissingImports=false

Attend: TypeAlias = Literal["real", "all"]
"""`real`: no token attends to padding. `all`: of a fixed length, tokens attend to padding as to any token.
What ragged samples are padded with in a batch is never attended to."""

_LAYERS = several(whole(), "a list of whole numbers, as [8, 16, -1]")
_TEMPERATURE = number("a number above 0, as 1.0", least=0.0, above=True)
RAGGED_BATCH = 8
"""Samples in one call, where ragged samples are encoded several at a time."""
_TRIED = 8
"""Tokens with which a model is asked if it is causal."""
_LOGIT_BYTES = 64 * MIB
"""Logits that are turned into float32 at a time."""
_CALL_LOGIT_BYTES = GIB
"""Logits of one call, as float32, where the batch size is chosen here. They are not stored: the sizes of
samples and records say nothing of them."""
_FINAL_NORMS = (
    "final_layer_norm", "text_model.final_layer_norm", "encoder.final_layer_norm",
    "norm", "ln_f", "final_layernorm", "final_norm", "decoder.final_layer_norm",
)  # fmt: skip
"""Where models of `transformers` have the norm behind their last layer."""
_RELATIVE = ("t5", "mt5", "umt5", "longt5", "bloom", "mpt")
"""Kinds whose positions are relative and have no end."""
_OFFSET = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "data2vec-text")
"""Kinds that number positions from that of the padding token."""


_CLIP_TEXT = {
    "num_hidden_layers": 12, "hidden_size": 512, "vocab_size": 49408, "max_position_embeddings": 77
}  # fmt: skip
"""Sizes of the text tower of a complete CLIP where `config.json` leaves them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Tokens of one batch, cut to what the model can take."""

    ids: Tensor
    """`(n, L)` int64."""
    real: Tensor | None
    """`(n, L)` bool, True for tokens that are not padding; None: there is no padding."""
    lengths: Tensor | None
    """`(n,)` int64, the lengths of ragged samples that were padded."""
    length: int
    """Length of the batch as it came; outputs are padded to it."""


class LanguageEncoder(FolderEncoder):
    """Base of encoders that take one field of tokens."""

    CAUSAL = False
    """True where only causal models make sense."""

    def __init__(
        self,
        folder: str | Path,
        field: str,
        *,
        dtype: str | None,
        encode_batch: int | None,
        lengths: Sequence[int] | None,
    ) -> None:
        check({"field": (field, NAME), "lengths": (lengths, LENGTHS)}, EncoderError)
        model = ModelFolder(folder, "model")
        stated = model.config.get("dtype") or model.config.get("torch_dtype") or "float32"
        super().__init__(model, str(stated) if dtype is None else dtype, encode_batch)
        self._field = field
        self._lengths = () if lengths is None else tuple(lengths)
        if list(self._lengths) != sorted({*self._lengths}) or (self._lengths and self._lengths[0] < 1):
            raise EncoderError(
                f"lengths is {lengths}", hint="Expected rising whole numbers, as (64, 128, 256)"
            )
        self._sizes = _Sizes.of(model)
        self._causal: bool | None = None

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else about 8 MiB of samples and records a call; ragged samples by length."""
        if not required_tokens(sample_schema, self._field, type(self).__name__).ragged:
            return super().encode_batch_size(sample_schema)
        samples = (self._encode_batch or RAGGED_BATCH) if self._lengths else 1
        return EncodeBatchSize(samples=samples, lengths=self._lengths)

    def __getstate__(self) -> dict[str, Any]:
        """Return settings alone: each process loads the model from its folder."""
        return {**super().__getstate__(), "_causal": None}

    def _checked_field(self, sample_schema: Schema) -> Field:
        """Return the field of tokens.

        Raises:
            EncoderError: It is missing, or does not hold tokens.
        """
        call = type(self).__name__
        field = required_tokens(sample_schema, self._field, call)
        if field.dtype not in TOKEN_DTYPES or len(field.shape) != 1:
            raise EncoderError(
                f"field {self._field!r} is {field.dtype} {field.shape}, not token numbers of shape (L,)",
                hint=f"Make them of text: give stoker.Tokenize(dataset, folder, field={self._field!r}) in "
                f"place of the dataset, and leave {arg('field', self._field, call=call)} out",
            )
        limit = self._sizes.positions
        if not field.ragged and limit is not None and field.shape[0] > limit:
            raise EncoderError(
                f"samples have {field.shape[0]} tokens, the model in {self._folder.path} takes {limit}",
                hint=f"Give stoker.Tokenize {arg('max_length', limit)}",
            )
        return field

    def _tokens(self, batch: Mapping[str, Tensor], mask: str | None = None) -> TokenBatch:
        """Return the tokens of a batch.

        Raises:
            ValueError: A number is not a token of the model, or there are too many tokens.
        """
        ids = batch[self._field].long()
        length, lengths = ids.shape[1], batch.get(self._field + LENGTHS_SUFFIX)
        real = None if mask is None or mask not in batch else batch[mask].bool()
        limit = self._sizes.positions
        if limit is not None and length > limit:
            longest = length if lengths is None else int(lengths.max())
            if longest > limit:
                raise ValueError(f"the sample has {longest} tokens, the model takes {limit}")
            ids = ids[:, :limit]  # the rest is padding
        if lengths is not None:
            real = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
        if ids.numel():  # on a GPU a number that is no token would cost the device, not only the sample
            least, largest = (int(x) for x in ids.aminmax())
            if least < 0 or largest >= self._sizes.vocabulary:
                wrong = least if least < 0 else largest
                raise ValueError(f"{wrong} is not a token of the model, which has {self._sizes.vocabulary}")
        return TokenBatch(ids=ids, real=real, lengths=lengths, length=length)

    def _run(self, tokens: TokenBatch, *, attend: Attend = "real") -> Any:
        """Return what the model gives for a batch."""
        model = self._loaded()
        if self._causal is None:
            self._causal = _is_causal(model, self._sizes.vocabulary, self._device)
        if self.CAUSAL and not self._causal:
            raise EncoderError(
                f"the model in {self._folder.path} is not causal: its tokens see those behind them",
                hint=f"Use stoker.TextEncoder, and not {type(self).__name__}",
            )
        mask = None
        if self._causal:
            refuse_left_padding(tokens.real)
        elif tokens.real is not None and (attend == "real" or tokens.lengths is not None):
            # Padding of ragged samples comes from the batch that they are in, so no setting lets it be seen.
            mask = tokens.real if self._takes_plain_mask(model) else self._mask(tokens.real)
        return model(input_ids=tokens.ids, attention_mask=mask, return_dict=True)

    def _takes_plain_mask(self, model: Any) -> bool:
        """Return True if the model makes more of a mask than to hide padding, or has no such kernel."""
        config = self._folder.config
        windows = any(config.get(name) for name in ("sliding_window", "local_attention"))
        return windows or not getattr(model, "_supports_sdpa", False)

    def _mask(self, real: Tensor) -> Tensor:
        """Return what is added to the scores of attention, `(n, 1, L, L)`."""
        dtype: torch.dtype = getattr(torch, self._dtype)
        hidden = torch.zeros(real.shape, dtype=dtype, device=real.device)
        hidden.masked_fill_(~real, torch.finfo(dtype).min)  # not -inf: a row of padding alone would be NaN
        return hidden[:, None, None, :].expand(-1, 1, real.shape[1], -1)

    def _finished(self, made: Tensor, tokens: TokenBatch) -> Tensor:
        """Return an output `(n, L, *)` padded to the length of the batch."""
        missing = tokens.length - made.shape[1]
        if not missing:
            return made.contiguous()
        tail = made.new_zeros((made.shape[0], missing, *made.shape[2:]))
        return torch.cat([made, tail], 1)

    def _record(
        self,
        batch: Mapping[str, Tensor],
        tokens: TokenBatch,
        made: Mapping[str, Tensor],
        ragged: Sequence[str],
    ) -> dict[str, Tensor]:
        """Return the fields made with their lengths, and the fields that pass through."""
        lengths = {} if tokens.lengths is None else {name + LENGTHS_SUFFIX: tokens.lengths for name in ragged}
        taken = {self._field, self._field + LENGTHS_SUFFIX}
        return {**made, **lengths, **{name: value for name, value in batch.items() if name not in taken}}

    def _load(self) -> nn.Module:
        place = self._folder.path
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise missing_package(place, "transformers 5.5 or later", "features", error) from error
        try:
            config: Any = AutoConfig.from_pretrained(place, local_files_only=True, trust_remote_code=False)
            kind = self._kind(config)
            model, found = kind.from_pretrained(
                place,
                config=config if isinstance(config, kind.config_class) else None,
                dtype=getattr(torch, self._dtype),
                attn_implementation=ATTENTION if kind._supports_sdpa else "eager",
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError) as error:
            raise EncoderError(f"{place} cannot be loaded with transformers: {error}") from error
        refuse_missing(place, found)
        model.config.use_cache = False
        return model

    @abc.abstractmethod
    def _kind(self, config: Any) -> Any:
        """Return the class of the model. Raises KeyError where `transformers` has none for it."""


class _StateEncoder(LanguageEncoder):
    """Base of encoders that give the states of some layers."""

    _layers: tuple[int, ...] = ()
    """From 0, the embeddings, to the number of layers."""
    _norm: bool | None = None

    def _states(self, tokens: TokenBatch, *, attend: Attend = "real") -> tuple[dict[int, Tensor], Any]:
        """Return the states of the layers, `(n, L, D)` each, and the output of the model.

        They are taken by hooks: `output_hidden_states` would hold those of all layers in memory.
        """
        model = self._loaded()
        count = self._sizes.layers
        blocks = _blocks(model, count, self._folder.path)
        kept: dict[int, Tensor] = {}
        handles: list[Any] = []
        for layer in self._layers:
            if layer < count:
                handles.append(
                    blocks[layer].register_forward_pre_hook(_keep_input(kept, layer), with_kwargs=True)
                )
            else:
                handles.append(blocks[count - 1].register_forward_hook(_keep_output(kept, layer)))
        try:
            output = self._run(tokens, attend=attend)
        finally:
            for handle in handles:
                handle.remove()
        for layer in self._layers:
            if layer == count and self._norm is not False:
                kept[layer] = output.last_hidden_state
            elif self._norm:
                kept[layer] = _final_norm(model, self._folder.path)(kept[layer])
        return {layer: self._finished(kept[layer], tokens) for layer in self._layers}, output


class TextEncoder(_StateEncoder):
    """Frozen text encoder of `transformers` as an encoder; satisfies `Encoder`.

    For CLIP (`CLIPTextModel`, `CLIPTextModelWithProjection`), T5 (`T5EncoderModel`), BERT and its relatives,
    and decoders such as Gemma. The tokens are replaced by the states of one layer and, where the model has
    one, its pooled output. The other fields stay in the record.

    - Tokens of a fixed length give `hidden` `(L, D)`, with the padding, as `diffusers` stores it, and `mask`
      `(L,)` bool where the samples have an attention mask.
    - Ragged tokens give ragged `hidden` `(T, D)`: real tokens alone.

    Args:
        folder: What `save_pretrained` of the model wrote, such as the subfolder `text_encoder` of a pipeline.
            Nothing is downloaded.
        field: The field of tokens, as `stoker.Tokenize` makes it.
        layer: Whose output: -1 the last, -2 the one before (SDXL), or from 0, the embeddings, up.
        norm: Apply the model's final norm. None: to the last layer alone, as `transformers` does. True: also
            to an earlier layer (Stable Diffusion 1.5 with `clip_skip`). False: never.
        attend: `real`: no token attends to padding. `all`: the mask of tokens of a fixed length is stored,
            and not used, as in the pipelines of Stable Diffusion 3 and Flux. A causal model such as CLIP
            needs none. Ragged tokens have no padding to attend to.
        output: Name of the field with the states.
        pooled: Name of the field with the pooled output; None leaves it out.
        mask: Name of the field with the mask, in the record.
        attention_mask: The field with the mask of tokens of a fixed length.
        dtype: Of weights, activations and record; None: as `config.json` says.
        encode_batch: Samples in one call; None: about 8 MiB of samples and records, 8 ragged samples.
        lengths: Lengths to which ragged samples are padded, so that several are encoded in one call. None:
            one at a time.

    Raises:
        EncoderError: The folder holds no such model, or it has no such layer.

    Examples:
        >>> source = stoker.Tokenize(captions, "sdxl/tokenizer")  # doctest: +SKIP
        >>> encoder = stoker.TextEncoder("sdxl/text_encoder", layer=-2)  # doctest: +SKIP
        >>> cache = stoker.precompute(source, encoder, "caches", name="captions")  # doctest: +SKIP
        >>> cache[0]["hidden"].shape  # doctest: +SKIP
        torch.Size([77, 768])
    """

    NAME = "stoker.TextEncoder"
    VERSION = 2

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        folder: str | Path,
        field: str = "input_ids",
        *,
        layer: int = -1,
        norm: bool | None = None,
        attend: Attend = "real",
        output: str = "hidden",
        pooled: str | None = "pooled",
        mask: str = "mask",
        attention_mask: str = "attention_mask",
        dtype: str | None = "float32",
        encode_batch: int | None = None,
        lengths: Sequence[int] | None = TOKEN_LENGTHS,
    ) -> None:
        super().__init__(folder, field, dtype=dtype, encode_batch=encode_batch, lengths=lengths)
        if attend not in get_args(Attend):
            raise EncoderError(f"{arg('attend', attend)} is unknown", hint="Expected real or all")
        names = {"output": output, "mask": mask, "attention_mask": attention_mask}
        check({name: (value, NAME) for name, value in names.items()}, EncoderError)
        check({"pooled": (pooled, or_none(NAME)), "layer": (layer, whole())}, EncoderError)
        check({"norm": (norm, or_none(FLAG))}, EncoderError)
        self._layers = _resolved([layer], self._sizes.layers, self._folder.path)
        self._norm, self._mask_field = norm, attention_mask
        self._attend: Attend = attend
        self._output, self._mask_output = output, mask
        self._pooled = pooled if pooled and self._pooled_size() else None

    def schema(self, sample_schema: Schema) -> Schema:
        """Return states, pooled output and mask, then the fields that pass through.

        Raises:
            EncoderError: No such field, it holds no tokens, too many of them, or a name occurs twice.
        """
        field = self._checked_field(sample_schema)
        taken = {self._field}
        made = {
            self._output: Field(
                shape=(field.shape[0], self._sizes.width), dtype=self._dtype, ragged=field.ragged
            )
        }
        if self._pooled:
            made[self._pooled] = Field(shape=(self._pooled_size(),), dtype=self._dtype)
        if not field.ragged and self._mask_field in sample_schema:
            check_mask(sample_schema, self._field, self._mask_field, "TextEncoder")
            taken.add(self._mask_field)
            made[self._mask_output] = Field(shape=field.shape, dtype="bool")
        return passed_fields(sample_schema, taken, made, "TextEncoder")

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Return states, pooled output and mask of a batch of tokens.

        A sample without any token has no pooled output: it is NaN, and the sample is quarantined.

        Raises:
            ValueError: A number is not a token of the model, or there are too many tokens.
            EncoderError: `transformers` is not installed, or the weights are not those of the model.
        """
        ragged = self._field + LENGTHS_SUFFIX in batch
        given = None if ragged else batch.get(self._mask_field)
        if given is not None and given.shape != batch[self._field].shape:
            given = None  # of ragged samples, one at a time: another field of that name
        tokens = self._tokens(batch, None if given is None else self._mask_field)
        if not tokens.ids.shape[1]:
            made = self._nothing(tokens)
        else:
            with self._exact():
                states, output = self._states(tokens, attend=self._attend)
                made = {self._output: states[self._layers[0]]}
                if self._pooled:
                    found = getattr(output, "text_embeds", None)
                    made[self._pooled] = (output.pooler_output if found is None else found).clone()
        record = self._record(batch, tokens, made, [self._output])
        if given is not None:
            del record[self._mask_field]
            record[self._mask_output] = given.bool()
        return record

    def _nothing(self, tokens: TokenBatch) -> dict[str, Tensor]:
        dtype: torch.dtype = getattr(torch, self._dtype)
        count, device = tokens.ids.shape[0], tokens.ids.device
        made = {self._output: torch.zeros((count, 0, self._sizes.width), dtype=dtype, device=device)}
        if self._pooled:
            size = (count, self._pooled_size())
            made[self._pooled] = torch.full(size, torch.nan, dtype=dtype, device=device)
        return made

    def _pooled_size(self) -> int:
        """Return the width of the pooled output; 0 where the model has none with weights of its own."""
        config, kind = self._folder.config, str(self._folder.config.get("model_type"))
        if kind in ("clip_text_model", "clip"):
            text = config.get("text_config") or config
            projected = self._projects
            # A complete CLIP names its projection at the top.
            return int(
                (config if projected else text).get("projection_dim" if projected else "hidden_size", 512)
            )
        has_pooler = any("pooler." in name for name in self._folder.names())
        return self._sizes.width if has_pooler else 0

    @property
    def _projects(self) -> bool:
        names = cast("list[str]", self._folder.config.get("architectures") or [""])
        return names[0] in ("CLIPModel", "CLIPTextModelWithProjection")

    def _settings(self) -> dict[str, Json]:
        return {
            "field": self._field,
            "layer": self._layers[0],
            "norm": self._norm,
            "attend": self._attend,
            "mask": [self._mask_field, self._mask_output],
            "output": self._output,
            "pooled": self._pooled,
            "projects": self._projects,
        }

    def _kind(self, config: Any) -> Any:
        from transformers import MODEL_MAPPING, CLIPTextModelWithProjection
        from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING

        if self._projects:
            return CLIPTextModelWithProjection
        if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
            return MODEL_FOR_TEXT_ENCODING_MAPPING[type(config)]
        return MODEL_MAPPING[type(config)]


class HiddenStates(_StateEncoder):
    """Hidden states of some layers of a causal language model; satisfies `Encoder`.

    The tokens are replaced by one field for each layer, `hidden_8` `(T, D)`. So training reads the layers
    that it needs, and each has scales of its own when it is quantized. Keep the tokens as well with
    `precompute(..., keep=("input_ids",))`.

    Store fewer bits with `precompute(..., dtype="float8_e4m3fn")`; its report states the error.
    A sample has the same states alone and inside a padded batch, but for rounding. That is 1e-4 of the
    largest state in float32, and two units of the last place in bfloat16 and float16.

    Args:
        folder: What `save_pretrained` of the model wrote. Nothing is downloaded.
        layers: Which: from 0, the embeddings, to the number of layers; negative ones count from the last.
        field: The field of tokens, ragged or of a fixed length.
        norm: Apply the model's final norm. None: to the last layer alone, as `hidden_states[-1]` of
            `transformers` has it. False: never, as vLLM gives it. True: to all.
        output: What the names of the fields begin with.
        dtype: Of weights, activations and record; None: as `config.json` says.
        encode_batch: Samples in one call; None: about 8 MiB of samples and records, 8 ragged samples.
        lengths: Lengths to which ragged samples are padded, so that several are encoded in one call. None:
            one at a time.

    Raises:
        EncoderError: The folder holds no such model, or it has no such layer.

    Examples:
        >>> source = stoker.Tokenize(chats, "llama", max_length=None, pad=False)  # doctest: +SKIP
        >>> encoder = stoker.HiddenStates("llama", layers=[8, 16, -1])  # doctest: +SKIP
        >>> cache = stoker.precompute(  # doctest: +SKIP
        ...     source, encoder, "caches", name="chats", dtype="float8_e4m3fn", keep=("input_ids",)
        ... )
    """

    NAME = "stoker.HiddenStates"
    CAUSAL = True

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        folder: str | Path,
        layers: Sequence[int],
        field: str = "input_ids",
        *,
        norm: bool | None = None,
        output: str = "hidden",
        dtype: str | None = None,
        encode_batch: int | None = None,
        lengths: Sequence[int] | None = TOKEN_LENGTHS,
    ) -> None:
        super().__init__(folder, field, dtype=dtype, encode_batch=encode_batch, lengths=lengths)
        check({"layers": (layers, _LAYERS), "norm": (norm, or_none(FLAG))}, EncoderError)
        check({"output": (output, NAME)}, EncoderError)
        self._layers = _resolved(layers, self._sizes.layers, self._folder.path)
        self._norm, self._output = norm, output

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the states of each layer, then the fields that pass through.

        Raises:
            EncoderError: No such field, it holds no tokens, too many of them, or a name occurs twice.
        """
        field = self._checked_field(sample_schema)
        state = Field(shape=(field.shape[0], self._sizes.width), dtype=self._dtype, ragged=field.ragged)
        made = {self._name(layer): state for layer in self._layers}
        return passed_fields(sample_schema, {self._field}, made, "HiddenStates")

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Return the states of a batch of tokens.

        Raises:
            ValueError: A number is not a token of the model, or there are too many tokens.
            EncoderError: `transformers` is not installed, or the weights are not those of the model.
        """
        tokens = self._tokens(batch)
        if not tokens.ids.shape[1]:
            shape, dtype = (*tokens.ids.shape, self._sizes.width), getattr(torch, self._dtype)
            states = {
                layer: torch.zeros(shape, dtype=dtype, device=tokens.ids.device) for layer in self._layers
            }
        else:
            with self._exact():
                states, _ = self._states(tokens)
        made = {self._name(layer): state for layer, state in states.items()}
        return self._record(batch, tokens, made, [*made])

    def _name(self, layer: int) -> str:
        return f"{self._output}_{layer}"

    def _settings(self) -> dict[str, Json]:
        return {
            "field": self._field,
            "layers": list[Json](self._layers),
            "norm": self._norm,
            "output": self._output,
        }

    def _kind(self, config: Any) -> Any:
        from transformers import MODEL_MAPPING

        return MODEL_MAPPING[type(config)]


class TopK(LanguageEncoder):
    """The k most likely next tokens of a causal language model, for distillation; satisfies `Encoder`.

    The tokens are replaced by `values` `(T, k)` float32, `indices` `(T, k)` int32 and `log_rest` `(T,)`
    float32. Row t is about the token after token t. `values` are log-probabilities over the entire
    vocabulary, the largest first; `log_rest` is the logarithm of the probability of all other tokens. So
    `values.exp().sum(1) + log_rest.exp()` is 1.

    Args:
        folder: What `save_pretrained` of the model wrote. Nothing is downloaded.
        k: Tokens to keep, fewer than the vocabulary has.
        field: The field of tokens, ragged or of a fixed length.
        temperature: The logits are divided by it.
        dtype: Of weights and activations; None: as `config.json` says. Probabilities are float32.
        encode_batch: Samples in one call; None: about 8 MiB of samples and records, 8 ragged samples. Fewer
            where the logits of one call, float32 over the entire vocabulary, would take more than 1 GiB.
        lengths: Lengths to which ragged samples are padded, so that several are encoded in one call. None:
            one at a time.

    Raises:
        EncoderError: The folder holds no such model, or `k` or `temperature` makes no sense.

    Examples:
        >>> source = stoker.Tokenize(chats, "llama", max_length=None, pad=False)  # doctest: +SKIP
        >>> encoder = stoker.TopK("llama", k=64)  # doctest: +SKIP
        >>> stoker.precompute(source, encoder, "caches", name="chats", keep=("input_ids",))  # doctest: +SKIP
    """

    NAME = "stoker.TopK"
    CAUSAL = True
    VALUES, INDICES, REST = "values", "indices", "log_rest"
    """Fields of a record."""

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        folder: str | Path,
        k: int = 64,
        field: str = "input_ids",
        *,
        temperature: float = 1.0,
        dtype: str | None = None,
        encode_batch: int | None = None,
        lengths: Sequence[int] | None = TOKEN_LENGTHS,
    ) -> None:
        super().__init__(folder, field, dtype=dtype, encode_batch=encode_batch, lengths=lengths)
        check({"k": (k, whole()), "temperature": (temperature, _TEMPERATURE)}, EncoderError)
        if not 1 <= k < self._sizes.vocabulary:
            raise EncoderError(
                f"k is {k}, the model in {self._folder.path} has {self._sizes.vocabulary} tokens",
                hint=f"Expected 1 to {self._sizes.vocabulary - 1}",
            )
        self._k, self._temperature = int(k), float(temperature)

    def schema(self, sample_schema: Schema) -> Schema:
        """Return values, indices and the rest, then the fields that pass through.

        Raises:
            EncoderError: No such field, it holds no tokens, too many of them, or a name occurs twice.
        """
        field = self._checked_field(sample_schema)
        length, ragged = field.shape[0], field.ragged
        made = {
            self.VALUES: Field(shape=(length, self._k), dtype="float32", ragged=ragged),
            self.INDICES: Field(shape=(length, self._k), dtype="int32", ragged=ragged),
            self.REST: Field(shape=(length,), dtype="float32", ragged=ragged),
        }
        return passed_fields(sample_schema, {self._field}, made, "TopK")

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else one whose samples, records and logits are small enough for one call."""
        size = super().encode_batch_size(sample_schema)
        if self._encode_batch is not None:
            return size
        field = sample_schema[self._field]
        longest = field.shape[0] if not field.ragged else max(size.lengths, default=1)
        fitting = _CALL_LOGIT_BYTES // (4 * self._sizes.vocabulary * max(1, longest))
        return replace(size, samples=max(1, min(size.samples, fitting)))

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Return the most likely next tokens of a batch of tokens.

        Raises:
            ValueError: A number is not a token of the model, or there are too many tokens.
            EncoderError: `transformers` is not installed, or the weights are not those of the model.
        """
        tokens = self._tokens(batch)
        count, length = tokens.ids.shape
        if not length:
            size = (count, 0, self._sizes.vocabulary)
            logits = torch.zeros(size, dtype=torch.float32, device=tokens.ids.device)
        else:
            with self._exact():
                logits = cast("Tensor", self._run(tokens).logits)
        with self._exact():
            flat = logits.reshape(count * length, logits.shape[-1])
            rows = max(1, _LOGIT_BYTES // (4 * flat.shape[1]))
            pieces = [self._top(flat[at : at + rows]) for at in range(0, max(1, len(flat)), rows)]
            values, indices, rest = (torch.cat(parts) for parts in zip(*pieces, strict=True))
            made = {
                self.VALUES: self._finished(values.view(count, length, self._k), tokens),
                self.INDICES: self._finished(indices.view(count, length, self._k), tokens),
                self.REST: self._finished(rest.view(count, length), tokens),
            }
        return self._record(batch, tokens, made, [*made])

    def _top(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = logits.float() / self._temperature
        total = scores.logsumexp(-1)
        top = scores.topk(self._k, -1)
        # Not log(1 - sum): the rest may be far below what is left of 1 in float32.
        others = scores.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
        return top.values - total[:, None], top.indices.int(), others - total

    def _settings(self) -> dict[str, Json]:
        return {"field": self._field, "k": self._k, "temperature": repr(self._temperature)}

    def _kind(self, config: Any) -> Any:
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


# ----------------------------------------------------------------------------------------------------------
# What a configuration says, and where a model has its layers.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of a language model."""

    layers: int
    width: int
    vocabulary: int
    positions: int | None
    """The most tokens of a sample; None: any number."""

    @classmethod
    def of(cls, folder: ModelFolder) -> _Sizes:
        """Return those of a configuration.

        Raises:
            EncoderError: It is not that of a language model.
        """
        config = folder.config
        kind = config.get("model_type")
        if kind == "clip":
            config = {**_CLIP_TEXT, **cast("dict[str, Any]", config.get("text_config") or {})}
        names = {
            "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
            "width": ("hidden_size", "d_model", "n_embd", "dim"),
            "vocabulary": ("vocab_size",),
        }
        found = {
            size: next((config[name] for name in known if isinstance(config.get(name), int)), None)
            for size, known in names.items()
        }
        for size, value in found.items():
            if value is None:
                raise EncoderError(
                    f"{folder.path / 'config.json'} of a {kind} model has no {names[size][0]}, so this is "
                    "not a language model that is known here",
                    hint="Wrap the model in a ModuleEncoder",
                )
        positions = config.get("max_position_embeddings") or config.get("n_positions")
        if kind in _OFFSET and positions:
            positions -= int(config.get("pad_token_id") or 0) + 1
        limit = positions if isinstance(positions, int) and positions > 0 and kind not in _RELATIVE else None
        return cls(**cast("dict[str, int]", found), positions=limit)


def _resolved(layers: Sequence[int], count: int, place: Path) -> tuple[int, ...]:
    """Return layers counted from 0, the embeddings."""
    found = [int(layer) + count + 1 if layer < 0 else int(layer) for layer in layers]
    if not found or len({*found}) < len(found) or not all(0 <= layer <= count for layer in found):
        raise EncoderError(
            f"layers are {list(layers)}, the model in {place} has {count} layers",
            hint=f"Expected different numbers from 0, the embeddings, to {count}, or from -1 to {-count - 1}",
        )
    return tuple(found)


def _blocks(model: nn.Module, count: int, place: Path) -> nn.ModuleList:
    """Return the layers of a model: the outermost list of that length."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise EncoderError(
        f"no list of {count} layers was found in the model in {place}",
        hint="Wrap the model in a ModuleEncoder",
    )


def _final_norm(model: nn.Module, place: Path) -> nn.Module:
    """Return the norm behind the last layer."""
    for name in _FINAL_NORMS:
        try:
            return model.get_submodule(name)
        except AttributeError:
            continue
    raise EncoderError(
        f"the model in {place} has no norm behind its last layer", hint=f"Leave {arg('norm')} out"
    )


def _keep_input(kept: dict[int, Tensor], layer: int) -> Any:
    def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[layer] = args[0] if args else kwargs["hidden_states"]

    return keep


def _keep_output(kept: dict[int, Tensor], layer: int) -> Any:
    def keep(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        kept[layer] = output[0] if isinstance(output, tuple) else output

    return keep


def _is_causal(model: Any, vocabulary: int, device: torch.device) -> bool:
    """Return True if a token does not change the state of the one before it: the model itself is asked.

    Configurations do not say it: CLIP is causal, and BERT may be either. Several tokens are tried, since some
    may share one embedding.
    """
    # A narrow default dtype would round the last one to a number that is no token.
    others = torch.linspace(1, vocabulary - 1, _TRIED, dtype=torch.float64, device=device).long()
    output = model(
        input_ids=torch.stack([torch.zeros_like(others), others], 1), attention_mask=None, return_dict=True
    )
    states: Tensor = output.logits if hasattr(output, "logits") else output.last_hidden_state
    first = states[:, 0].float()
    return bool(torch.allclose(first, first[:1].expand_as(first), rtol=0.0, atol=1e-6))

"""Use any frozen `nn.Module`, or any function of tensors, as an encoder."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from stoker.encoders.describe import bound_module, describe_function, qualified_name
from stoker.encoders.groups import fixed_group
from stoker.encoders.protocol import Group
from stoker.encoders.weights import digest_weights, module_weights, named_parts, weights_device
from stoker.errors import EncoderError, arg
from stoker.schema import DTYPE_BYTES, SHAPE_SUFFIX, Field, Json, Schema
from stoker.units import format_count

_log = logging.getLogger("stoker")

Time: TypeAlias = Literal["none", "steps", "whole"]
"""What a module does with time. `none`: its output has no time axis. `steps`: it is given single time steps
`(n T, *shape of a step)`, and axis 0 of the output is time. `whole`: it is given `(n, T, ...)` and its output
has time as axis 0."""

DECODED = 64
"""Steps that a module decodes in one call."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModuleEncoder:
    """Frozen encoder around a module or function; satisfies `Encoder`.

    The module is called with the fields in order, each `(n, *shape)`, and returns one tensor `(n, *shape)`,
    or a tuple of them. It is frozen in place: `eval()`, and its parameters no longer require gradients.
    It may be on a GPU already; after encoding it is where it was before.
    Fields that it does not take stay in the record. Particles and meshes come as `(1, T, N, C)`, with edges
    `(1, E, 2)` and coordinates `(1, N, d)`, one sample a call; take them with `time="whole"`.

    Args:
        module: What encodes: a module, a method of one (`vae.encode`), or a function. Each sample's output
            must not depend on the other samples.
        field: Field or fields of the sample that it takes.
        output: Name or names of what it returns.
        time: `"none"`, `"steps"` or `"whole"`, see `Time`.
        version: Stands for the code in the identity. None: source text and settings of the module do.
            Compiled functions and modules (TorchScript) have neither and need it.
        group: Samples a call; None: about 8 MiB of samples and records.

    Raises:
        EncoderError: A weight has no value yet, a part uses statistics of its batch, or the code has no
            source text and no `version` was given.
    """

    def __init__(
        self,
        module: nn.Module | Callable[..., Any],
        *,
        field: str | Sequence[str] = "data",
        output: str | Sequence[str] = "latent",
        time: Time = "none",
        version: str | None = None,
        group: int | None = None,
    ) -> None:
        self._module = module
        self._fields = (field,) if isinstance(field, str) else tuple(field)
        self._outputs = (output,) if isinstance(output, str) else tuple(output)
        self._time: Time = time
        self._group = group
        self._digest: tuple[object, str] | None = None
        if time not in ("none", "steps", "whole"):
            raise EncoderError(f"time must be 'none', 'steps' or 'whole', got {time!r}")
        if group is not None and group < 1:
            raise EncoderError(f"group must be at least 1 sample, got {group}")
        self._owner = bound_module(module)
        if self._owner is not None:
            _freeze(self._owner)
        self._device = weights_device(self)
        self._parts = [] if self._owner is None else list(self._owner.modules())
        self._code: Json = describe_function(module) if version is None else version

    def decoder(self, ndim: int) -> ModuleDecoder | None:
        """Back to the first of its fields, by the module's own `decode`; None where it has none.

        Args:
            ndim: Axes of the latents of one step.
        """
        if self._owner is None or self._time == "whole" or not callable(getattr(self._owner, "decode", None)):
            return None
        return ModuleDecoder(self._owner, ndim)

    @property
    def independent_steps(self) -> bool:
        """True when the module is given single time steps."""
        return self._time == "steps"

    def schema(self, sample_schema: Schema) -> Schema:
        """The outputs, found by encoding zeros, then the fields that pass through.

        Raises:
            EncoderError: A field is missing or has no time, names clash, or the module fails on the shape.
        """
        for name in self._fields:
            if name not in sample_schema:
                raise EncoderError(
                    f"samples have no field {name!r}, only {sorted(sample_schema)}. "
                    f"Set {_argument('field')} to one of them"
                )
        timeless = [name for name in self._fields if not sample_schema[name].evolves]
        if (self._time == "steps" and timeless) or (self._time == "whole" and timeless == [*self._fields]):
            raise EncoderError(f"field {timeless[0]!r} has no time axis. Use {_argument('time', 'none')}")
        passed = {name: f for name, f in sample_schema.items() if name not in self._taken(sample_schema)}
        if clash := passed.keys() & set(self._outputs):
            raise EncoderError(
                f"outputs {sorted(clash)} are called like fields that pass through. "
                f"Set {_argument('output')} to another name"
            )
        ragged = any(sample_schema[name].ragged for name in self._fields)
        probed = self._probe(sample_schema, length=4)
        again = self._probe(sample_schema, length=6) if ragged else probed
        return {**{name: self._field_of(probed[name], again[name]) for name in probed}, **passed}

    def group(self, sample_schema: Schema) -> Group:
        """The group given, else about 8 MiB of samples and records a call."""
        if self._group is not None:
            return Group(samples=self._group)
        return fixed_group(sample_schema, self.schema(sample_schema), cut_time=self.independent_steps)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode one group; the module sees `(n, *shape)`, or `(n T, *shape)` with `time="steps"`.

        Raises:
            EncoderError: The module was put back into training, or returned something else than declared.
        """
        if any(part.training for part in self._parts):
            raise EncoderError(
                "the encoder's module is in training mode. Call `module.eval()` and keep it in eval mode"
            )
        inputs = [_in_own_axes(batch, name) for name in self._fields]
        lead = inputs[0].shape[: 2 if self._time == "steps" else 1]
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            result = self._module(*[x.reshape(-1, *x.shape[len(lead) :]) for x in inputs])
        outputs = self._named(result)
        for name, tensor in outputs.items():
            if not tensor.ndim or tensor.shape[0] != lead.numel():
                raise EncoderError(
                    f"output {name!r} has shape {tuple(tensor.shape)} for {lead.numel()} inputs. "
                    f"Axis 0 must count the inputs, also when there is one"
                )
        shaped = {name: tensor.reshape(*lead, *tensor.shape[1:]) for name, tensor in outputs.items()}
        return {**shaped, **{name: v for name, v in batch.items() if name not in self._taken(batch)}}

    def _taken(self, sample: Mapping[str, object]) -> set[str]:
        """The fields that the module takes, with the sizes of those of particles and meshes."""
        return {*self._fields, *({name + SHAPE_SUFFIX for name in self._fields} & sample.keys())}

    def to(self, device: torch.device) -> None:
        """Move the module to `device`; a plain function must follow the device of its inputs."""
        self._device = device
        if self._owner is not None:
            self._owner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Parameters and buffers by name; empty for a plain function."""
        return {} if self._owner is None else module_weights(self._owner)

    def identity(self) -> dict[str, Json]:
        """Class, fields, code (source and settings, or the version given) and weights by content."""
        config: dict[str, Json] = {
            "field": list(self._fields),
            "output": list(self._outputs),
            "time": self._time,
        }
        return {
            "class": qualified_name(self._module),
            "config": config,
            "weights": self._weights_digest(),
            "version": self._code,
        }

    def _weights_digest(self) -> str:
        """Kept until a weight is written to: large models take a second to digest."""
        weights = self.weights()
        state = [(name, tensor.data_ptr(), tensor._version) for name, tensor in weights.items()]
        if self._digest is None or self._digest[0] != state:
            self._digest = (state, digest_weights(weights))
        return self._digest[1]

    def _named(self, result: object) -> dict[str, Tensor]:
        found = list(cast("Sequence[object]", result)) if isinstance(result, tuple | list) else [result]
        tensors = [item for item in found if isinstance(item, Tensor)]
        if not len(tensors) == len(found) == len(self._outputs):
            raise EncoderError(
                f"the module returned ({', '.join(type(item).__name__ for item in found)}) for the outputs "
                f"{list(self._outputs)}. It must return one tensor for each name in {_argument('output')}"
            )
        return dict(zip(self._outputs, tensors, strict=True))

    def _probe(self, sample_schema: Schema, length: int) -> dict[str, Tensor]:
        """Outputs for one sample of zeros; ragged fields get `length`."""
        zeros: dict[str, Tensor] = {}
        for name in self._fields:
            field = sample_schema[name]
            sizes = [length + word.startswith("p") for word in field.axes] or [length]
            shape = (math.prod(sizes), *field.shape[1:]) if field.ragged else field.shape
            if field.folded:
                zeros[name + SHAPE_SUFFIX] = torch.tensor([sizes], device=self._device)
            zeros[name] = torch.zeros((1, *shape), dtype=getattr(torch, field.dtype), device=self._device)
        try:
            return self.encode(zeros)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            shapes = {name: tuple(tensor.shape) for name, tensor in zeros.items()}
            raise EncoderError(
                f"the module failed on one sample of zeros {shapes}: {error}. "
                f"Give it what it takes: another field, or other shapes in the source"
            ) from error

    def _field_of(self, tensor: Tensor, longer: Tensor) -> Field:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise EncoderError(f"the module returns {dtype}, which cannot be stored. Cast it in the module")
        ragged = tensor.shape != longer.shape
        if tensor.shape[2:] != longer.shape[2:]:
            raise EncoderError(
                f"the module returns {tuple(tensor.shape)} and {tuple(longer.shape)} for samples of two "
                "sizes. Only axis 0 of a record may vary: pool over points in the module"
            )
        shape = (-1, *tensor.shape[2:]) if ragged else tuple(tensor.shape[1:])
        return Field(shape=shape, dtype=dtype, time=self._time != "none", ragged=ragged)


class ModuleDecoder:
    """Latents back to fields by a module's `decode`, which takes `(n, *latents of a step)`.

    Each device has a copy of the module, so that several threads may decode on devices of their own.
    """

    def __init__(self, module: nn.Module, ndim: int) -> None:
        self._module, self._ndim = copy.deepcopy(module), ndim
        self._on: dict[torch.device, nn.Module] = {}

    def __call__(self, latents: Tensor) -> Tensor:
        """Latents `(..., *latents of a step)` as fields `(..., *field of a step)` float32.

        Raises:
            EncoderError: `decode` gives something else than one field for each step.
        """
        module = self._on.get(latents.device)
        if module is None:
            module = self._on[latents.device] = copy.deepcopy(self._module).to(latents.device)
        lead = latents.shape[: latents.ndim - self._ndim]
        steps = latents.float().reshape(-1, *latents.shape[len(lead) :])
        pieces: list[Tensor] = []
        with torch.inference_mode(), torch.autocast(latents.device.type, enabled=False):
            for at in range(0, len(steps), DECODED):
                piece: object = cast("Any", module).decode(steps[at : at + DECODED])
                if not isinstance(piece, Tensor) or piece.shape[:1] != steps[at : at + DECODED].shape[:1]:
                    raise EncoderError(
                        f"{qualified_name(module)}.decode gives {getattr(piece, 'shape', type(piece))} for "
                        f"latents {tuple(steps.shape)}. It must return one tensor with a field for each"
                    )
                pieces.append(piece.float())
        fields = torch.cat(pieces)
        return fields.reshape(*lead, *fields.shape[1:])


def _argument(name: str, *value: str) -> str:
    return arg(name, *(value or (...,)), call="ModuleEncoder", setting=f"encoder.{name}")


def _in_own_axes(batch: Mapping[str, Tensor], name: str) -> Tensor:
    """A field of a group; one of time and points as `(1, T, N, *rest)`, by the sizes in its size field."""
    sizes = batch.get(name + SHAPE_SUFFIX)
    if sizes is None:
        return batch[name]
    return batch[name].reshape(1, *map(int, sizes[0]), *batch[name].shape[2:])


def _freeze(module: nn.Module) -> None:
    """Put in evaluation mode, without gradients; refuse what would still differ from call to call."""
    weights = module_weights(module)
    if any(part.training for part in module.modules()) or any(
        parameter.requires_grad for parameter in module.parameters()
    ):
        _log.warning(
            "%s (%s) is frozen in place: eval(), and its parameters no longer require gradients. To "
            "train it as well, give a copy: copy.deepcopy(module)",
            *(type(module).__qualname__, format_count(len(weights), "weight")),
        )
    module.eval()
    for parameter in module.parameters():  # TorchScript refuses `module.requires_grad_`
        parameter.requires_grad = False
    for name, part in named_parts(module).items():
        scripted = cast("str", getattr(part, "original_name", ""))
        where = f"{name or 'the module'} ({scripted or type(part).__qualname__})"
        normalises = isinstance(part, BATCH_NORMS) or scripted in {kind.__name__ for kind in BATCH_NORMS}
        if normalises and getattr(part, "running_mean", None) is None:
            raise EncoderError(
                f"{where} normalises by its batch, so a sample would depend on its neighbours. "
                f"Use running statistics (track_running_stats=True)"
            )
        if part.training:
            raise EncoderError(f"{where} stays in training mode after eval(). Fix its `train` method")

"""Use any frozen `nn.Module`, or any function of tensors, as an encoder."""

from __future__ import annotations

import abc
import copy
import enum
import functools
import hashlib
import inspect
import logging
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Generic, Literal, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor, nn

from stoker.arguments import BATCH, LENGTHS, NAMES, TEXT, Kind, check, or_none
from stoker.encoders.protocol import EncodeBatchSize, fixed_batch_size, in_own_axes
from stoker.encoders.weights import (
    WeightsDigest,
    digest_weights,
    module_weights,
    named_parts,
    weights_device,
)
from stoker.errors import EncoderError, arg
from stoker.schema import (
    DTYPE_BYTES,
    LENGTHS_SUFFIX,
    SHAPE_SUFFIX,
    VARIES,
    Field,
    Json,
    Schema,
    size_field,
)
from stoker.units import format_count
from stoker.used_code import (
    bytecode_text,
    captured_values,
    functions_in,
    global_values,
    is_library,
    package_version,
    source_text,
    unwrapped,
)

# ----------------------------------------------------------------------------------------------------------
# Say in JSON what code an encoder runs: source text, settings, captured values.
#
# Two modules can have one class and equal weights and still differ (a stride, a scale kept as a plain
# number), so an identity needs their settings too. What cannot be described for certain is refused with the
# cure, an explicit `version=`; a guess would make two encoders share one cache.


LIBRARIES = (
    *("torch.", "torchvision.", "transformers.", "timm.", "numpy."),
    *("builtins.", "typing.", "abc.", "collections.", "functools."),
)
"""Code of these is named, not quoted: library versions are provenance, not part of a recipe."""


def qualified_name(thing: object) -> str:
    """Module and name of a class or function; of an instance, those of its class."""
    named = thing if isinstance(thing, type) or hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{getattr(named, '__qualname__', '?')}"


def describe_module(module: nn.Module) -> dict[str, Json]:
    """Return classes, digests of their code and plain settings of a module and everything below it.

    Raises:
        EncoderError: A class has no source text, or an attribute is of a kind that cannot be described.
    """
    return {
        name or "self": {**_instance(part, "forward"), **_hooks(part)}
        for name, part in named_parts(module).items()
    }


def describe_function(function: Callable[..., object]) -> dict[str, Json]:
    """Return what a callable runs: source digest, defaults, captured values, globals, and whose method it is.

    Functions and classes of the user that it uses are described too; those of libraries are named.

    Raises:
        EncoderError: It has no source text, or captures something that cannot be described.
    """
    if isinstance(function, nn.Module):
        return describe_module(function)
    if isinstance(function, functools.partial):
        partial = cast("functools.partial[object]", function)
        bound = _value(partial.args, "args"), _value(dict(partial.keywords), "keywords")
        return {**describe_function(partial.func), "args": bound[0], "keywords": bound[1]}
    if isinstance(function, types.MethodType):
        owner = function.__self__
        described = describe_module(owner) if isinstance(owner, nn.Module) else _instance(owner, "__call__")
        return {**describe_function(function.__func__), "owner": described}
    if not isinstance(function, types.FunctionType):
        if not isinstance(inspect.getattr_static(function, "__call__", None), types.FunctionType):
            raise _unseen(function, "it is compiled")
        return _instance(function, "__call__")
    if _in_library(function):
        return {"class": qualified_name(function), "source": None}
    return {"class": qualified_name(function), "source": _source(function), **_used(function)}


def bound_module(function: Callable[..., object]) -> nn.Module | None:
    """Return the module that a callable is, or is a method of, `functools.partial` taken off; else None."""
    while isinstance(function, functools.partial):
        function = cast("functools.partial[object]", function).func
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    return owner if isinstance(owner, nn.Module) else None


def _instance(thing: object, call: str) -> dict[str, Json]:
    """Class, code of it and of its bases, and settings of an object that is run by its method `call`."""
    if not hasattr(thing, "__dict__"):
        raise _unseen(thing, "it has no __dict__ that shows its settings")
    code: dict[str, Json] = {}
    for kind in type(thing).__mro__:
        if not _in_library(kind):
            method = vars(kind).get(call)
            used = _used(method) if isinstance(method, types.FunctionType) else {}
            others = {} if is_library(kind) else {"methods": _methods_used(kind)}
            code[qualified_name(kind)] = {"source": _source(kind), **used, **others}
    return {"class": qualified_name(type(thing)), "code": code, "set": _settings(thing)}


def _hooks(module: nn.Module) -> dict[str, Json]:
    """Return what runs before and after `forward`; modules without hooks read as they always did."""
    found: dict[str, Json] = {}
    for name in _HOOKS:
        hooks = cast("Mapping[int, Callable[..., object]]", getattr(module, name, {})).values()
        if hooks:
            found[name] = [_hook(hook) for hook in hooks]
    return found


def _hook(hook: Callable[..., object]) -> Json:
    if isinstance(hook, types.FunctionType | types.MethodType | functools.partial | nn.Module):
        return _value(hook, qualified_name(cast("object", hook)))
    return describe_function(hook)


def _used(function: types.FunctionType) -> dict[str, Json]:
    """Return values that a function takes from around it; its text has their names alone."""
    function = _undecorated(function)
    return {
        "defaults": _value([function.__defaults__, function.__kwdefaults__], "defaults"),
        "captured": {name: _value(value, name) for name, value in sorted(captured_values(function).items())},
        "globals": {name: _value(value, name) for name, value in sorted(global_values(function).items())},
    }


def _followed(code: Any) -> Json:
    """Describe a user's function or class that other code uses; one that is met again is only named."""
    outermost = _MET.get() is None
    met = _MET.get() or {}
    if is_library(code):
        return _named(qualified_name(code), code.__module__)
    if isinstance(code, _PLAINLY_NAMED) or id(code) in met:
        return qualified_name(code)
    met[id(code)] = code
    _MET.set(met)
    try:
        if isinstance(code, types.FunctionType):
            return describe_function(code)
        if not isinstance(code, type):
            return {"object": _followed(cast("object", type(code))), "set": _settings(code)}
        kinds = [kind for kind in code.__mro__ if not is_library(kind)]
        return {
            qualified_name(kind): {"source": _source(kind), "used": _methods_used(kind)} for kind in kinds
        }
    finally:
        if outermost:
            _MET.set(None)


def _named(name: str, module: str | None) -> str:
    """Name what belongs to an installed package, with the version of that package."""
    version = None if f"{module}.".startswith(LIBRARIES) else package_version(module or "builtins")
    return name if version is None else f"{name} of {version}"


def _methods_used(kind: type) -> dict[str, Json]:
    """Return values that the methods of a class take from around them."""
    return {
        f"{name}.{i}": _used(function)
        for name, member in sorted(vars(kind).items())
        for i, function in enumerate(functions_in(member))
    }


def _undecorated(function: types.FunctionType) -> types.FunctionType:
    """Without the decorators of libraries, such as `torch.no_grad()`, whose insides are not the user's."""
    while f"{function.__globals__.get('__name__')}.".startswith(LIBRARIES):
        inner = getattr(function, "__wrapped__", None)
        if not isinstance(inner, types.FunctionType):
            break
        function = inner
    return function


def _in_library(thing: object) -> bool:
    return f"{thing.__module__}.".startswith(LIBRARIES)


def _source(thing: Any) -> Json:
    if _in_library(thing):
        return None
    try:
        text = source_text(thing)
        if text.count("lambda") > 1 and getattr(thing, "__name__", "") == "<lambda>":
            text += bytecode_text(thing)  # several in one line have one text
        return hashlib.sha256(text.encode()).hexdigest()
    except (OSError, TypeError) as error:
        raise _unseen(thing, str(error)) from error


def _unseen(thing: object, why: str) -> EncoderError:
    return EncoderError(
        f"{qualified_name(thing)} has no source text and settings to tell it by ({why}), so that a change "
        "would go unseen",
        hint=_CURE,
    )


def _settings(thing: object) -> Json:
    """Plain attributes: a module's weights and parts are not among them, they are described elsewhere."""
    return {
        name: _value(value, f"{qualified_name(thing)}.{name}")
        for name, value in sorted(getattr(thing, "__dict__", {}).items())
        if name not in _BOOKKEEPING
    }


def _value(value: Any, where: str) -> Json:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | complex | bytes | torch.dtype | torch.device | torch.Size | range):
        return repr(
            cast("object", value)
        )  # repr keeps every bit of a float, and canonical JSON refuses infinities
    if isinstance(value, Tensor):
        return digest_weights({"": value})
    if isinstance(value, nn.Module | Mapping | Sequence | set | frozenset):
        return _held(cast("object", value), where)
    return _code_value(value, where)


def _held(value: object, where: str) -> Json:
    """Describe what may hold further values; one that holds itself by how many levels up it is."""
    above = _ABOVE.get()
    if id(value) in above:
        return {"itself": len(above) - above.index(id(value))}
    token = _ABOVE.set((*above, id(value)))
    try:
        return _parts(value, where)
    except RecursionError as error:
        fact = f"{where[:100]} is nested too deep to be distinguished from another"
        raise EncoderError(fact, hint=_CURE) from error
    finally:
        _ABOVE.reset(token)


def _parts(value: object, where: str) -> Json:
    if isinstance(value, nn.Module):
        weights = {**dict(value.named_parameters()), **dict(value.named_buffers())}
        return {"module": describe_module(value), "weights": digest_weights(weights)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {str(key): _value(item, f"{where}[{key!r}]") for key, item in items}
    if isinstance(value, Sequence):
        return [_value(item, f"{where}[{i}]") for i, item in enumerate(cast("Sequence[object]", value))]
    ordered = sorted(cast("set[object]", value), key=_place)  # what is met first is described there
    return [*sorted(str(_value(item, where)) for item in ordered)]


def _array_or_text(value: Any, where: str) -> Json:
    if isinstance(value, np.dtype | re.Pattern):
        return repr(cast("object", value))
    if value.dtype.hasobject:
        raise _alike(value, where)
    array = np.ascontiguousarray(value)
    return [array.dtype.str, list(value.shape), hashlib.sha256(array.tobytes()).hexdigest()]


def _code_value(value: Any, where: str) -> Json:
    if isinstance(value, np.ndarray | np.generic | np.dtype | re.Pattern):
        return _array_or_text(value, where)
    if isinstance(value, types.ModuleType):
        return _named(value.__name__, value.__name__)
    if isinstance(value, type | types.FunctionType | _PLAINLY_NAMED):
        return _followed(value)
    if isinstance(value, types.MethodType):
        return {"method": _followed(value.__func__), "owner": _value(value.__self__, f"{where}.__self__")}
    if isinstance(value, functools.partial):
        partial = cast("functools.partial[object]", value)
        inside = [_value(part, where) for part in (partial.func, partial.args, partial.keywords)]
        return {"partial": inside}
    if (function := unwrapped(value)) is not value:
        return _value(function, where)
    kinds = type(value).__mro__
    if hasattr(value, "__dict__") and not any(is_library(kind) for kind in kinds if kind not in _EMPTY):
        return _followed(value)
    raise _alike(value, where)


def _alike(value: object, where: str) -> EncoderError:
    return EncoderError(
        f"{where} is a {qualified_name(type(value))}, which cannot be distinguished from others of its kind",
        hint=_CURE,
    )


def _place(item: object) -> str:
    """Order within a set: equal in each process, which the order of the set itself is not."""
    return qualified_name(item) if callable(item) else repr(item)


_CURE = (
    'Give stoker.ModuleEncoder(module, version="1") in place of the module, in settings encoder.version=1, '
    "and raise the version when the encoder changes"
)

_PLAINLY_NAMED = types.BuiltinFunctionType | logging.Logger

_EMPTY = (object, abc.ABC, Generic, Protocol, enum.Enum)
"""Bases that hold nothing of their own."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")

_BOOKKEEPING = frozenset(vars(nn.Module()))
"""What every module has: hooks, which are described apart, and registries."""

_ABOVE: ContextVar[tuple[int, ...]] = ContextVar("_ABOVE", default=())
"""Modules and containers around the one that is being described, by id, the outermost first."""

_MET: ContextVar[dict[int, object] | None] = ContextVar("_MET", default=None)
"""Functions and classes that are already described: code that uses itself must come to an end."""


_log = logging.getLogger("stoker")
_VERSION = Kind("text, or None", lambda value: value is None or isinstance(value, str | int))

Time: TypeAlias = Literal["none", "steps", "whole"]
"""What a module does with time. `none`: its output has no time axis. `steps`: it is given single time steps
`(n T, *shape of a step)`, and axis 0 of the output is time. `whole`: it is given `(n, T, ...)` and its output
has time as axis 0."""

DECODED = 64
"""Steps that a module decodes in one call."""

PROBED_SIZES = ((64, 96), (224, 448), (4, 6), (1, 2))
"""Sizes of axes that vary together, in pixels say, until a module takes both: most need multiples of 8, 14 or
32."""
PROBED_VALUES = 1 << 25
"""Values of a sample of zeros at most."""

_MODULE_ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
"""What modules raise for samples that they do not take."""
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModuleEncoder:
    """Frozen encoder around a module or function; satisfies `Encoder`.

    The module is called with the fields in order, each `(n, *shape)`, and returns one tensor `(n, *shape)`,
    or a tuple of them. It is frozen in place: `eval()`, and its parameters no longer require gradients.
    It may be on a GPU already; after encoding it is where it was before.
    Fields that it does not take stay in the record. Particles and meshes come as `(1, T, N, C)`, with edges
    `(1, E, 2)` and coordinates `(1, N, d)`, one sample a call; take them with `time="whole"`. A field of
    which several axes vary, as images of any size, comes as `(1, C, H, W)`; so may its output.

    Args:
        module: What encodes: a module, a method of one (`vae.encode`), or a function. Each sample's output
            must not depend on the other samples.
        field: Field or fields of the sample that it takes.
        output: Name or names of what it returns.
        time: `"none"`: the output has no time axis. `"steps"`: the module is given single time steps
            `(n T, *shape of a step)`, and axis 0 of a record is time. `"whole"`: it is given `(n, T, ...)`,
            and axis 0 of a record is time.
        version: Stands for the code in the identity. None: source text and settings of the module do.
            Compiled functions and modules (TorchScript) have neither and need it.
        encode_batch: Samples in one call; None: about 8 MiB of samples and records. With `lengths`, 16 at
            most: more keep a GPU busier, and leave more empty rows in the last calls.
        lengths: Lengths that samples of varying length are padded to, ascending, so that samples of similar
            length are encoded together; longer ones are encoded alone. None: each is.
        mask: Keyword by which the module gets a bool tensor `(n, L)`, True at real elements and False in the
            padding. Without it, padding must not change what is before it.

    Raises:
        EncoderError: A weight has no value yet, a part uses statistics of its batch, or the code has no
            source text and no `version` was given.

    Examples:
        >>> import stoker, torch
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 16))
        >>> encoder = stoker.ModuleEncoder(net, field="image", output="code")
        >>> data = [{"image": torch.rand(3, 8, 8), "label": torch.tensor(i)} for i in range(10)]
        >>> loader = stoker.cached(data, encoder, batch_size=5)
        >>> {name: tuple(values.shape) for name, values in next(iter(loader)).items()}
        {'code': (5, 16), 'label': (5,)}
    """

    def __init__(  # noqa: PLR0913  all by name
        self,
        module: nn.Module | Callable[..., Any],
        *,
        field: str | Sequence[str] = "data",
        output: str | Sequence[str] = "latent",
        time: Time = "none",
        version: str | None = None,
        encode_batch: int | None = None,
        lengths: Sequence[int] | None = None,
        mask: str | None = None,
    ) -> None:
        check({"field": (field, NAMES), "output": (output, NAMES)}, EncoderError)
        check({"encode_batch": (encode_batch, BATCH), "lengths": (lengths, LENGTHS)}, EncoderError)
        check({"version": (version, _VERSION), "mask": (mask, or_none(TEXT))}, EncoderError)
        self._module = module
        self._fields = (field,) if isinstance(field, str) else tuple(field)
        self._outputs = (output,) if isinstance(output, str) else tuple(output)
        self._time: Time = time
        self._encode_batch = encode_batch
        self._lengths, self._mask = tuple(lengths or ()), mask
        self._digest = WeightsDigest()
        self._folded: dict[str, int] = {}
        """Outputs of which several axes vary, and how many leading axes are folded; `schema` finds them."""
        if time not in ("none", "steps", "whole"):
            raise EncoderError(f"time must be 'none', 'steps' or 'whole', got {time!r}")
        if mask is not None and time == "steps":
            raise EncoderError(
                f"mask={mask!r} with time='steps': the module is given single steps, and no padding",
                hint=f"Leave mask out, or use {_argument('time', 'whole')}",
            )
        EncodeBatchSize(samples=1, lengths=self._lengths)  # refuses what no batch can have
        self._owner = bound_module(module)
        if self._owner is not None:
            _freeze(self._owner)
        self._device = weights_device(self)
        self._parts = [] if self._owner is None else list(self._owner.modules())
        self._code: Json = describe_function(module) if version is None else version

    def decoder(self, ndim: int) -> ModuleDecoder | None:
        """Return a function from latents to the first field, by the module's own `decode`; None: it has none.

        Args:
            ndim: Number of axes of the latents of one step.
        """
        if self._owner is None or self._time == "whole" or not callable(getattr(self._owner, "decode", None)):
            return None
        return ModuleDecoder(self._owner, ndim)

    @property
    def independent_steps(self) -> bool:
        """True when the module is given single time steps."""
        return self._time == "steps"

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the outputs, found by encoding zeros, then the fields that pass through.

        Raises:
            EncoderError: A field is missing or has no time, names clash, or the module fails on the shape.
        """
        for name in self._fields:
            if name not in sample_schema:
                raise EncoderError(
                    f"samples have no field {name!r}, only {sorted(sample_schema)}",
                    hint=f"Set {_argument('field')} to one of them",
                )
        timeless = [name for name in self._fields if not sample_schema[name].evolves]
        if (self._time == "steps" and timeless) or (self._time == "whole" and timeless == [*self._fields]):
            raise EncoderError(
                f"field {timeless[0]!r} has no time axis", hint=f"Use {_argument('time', 'none')}"
            )
        passed = {name: f for name, f in sample_schema.items() if name not in self._taken(sample_schema)}
        if clash := passed.keys() & set(self._outputs):
            raise EncoderError(
                f"outputs {sorted(clash)} are called like fields that pass through",
                hint=f"Set {_argument('output')} to another name",
            )
        fields = self._probed_fields(sample_schema)
        if folded := {name: len(field.axes) for name, field in fields.items() if field.folded}:
            self._folded = folded  # another source, whose sizes are fixed, leaves them for the first one
        sizes = {name + SHAPE_SUFFIX: size_field(field) for name, field in fields.items() if field.folded}
        return {**fields, **sizes, **passed}

    def _probed_fields(self, sample_schema: Schema) -> Schema:
        """Return the outputs, found by encoding zeros of one size, and of another where sizes vary."""
        own = [sample_schema[name] for name in self._fields]
        folds = any(field.plain for field in own)
        if not any(field.ragged for field in own):
            probed = again = self._probe(sample_schema, length=4)
        elif not folds:
            probed, again = (self._probe(sample_schema, length=length) for length in (4, 6))
        else:
            probed, again = self._probe_in_pairs(sample_schema)
        return {name: self._field_of(probed[name], again[name], folds=folds) for name in probed}

    def _probe_in_pairs(self, sample_schema: Schema) -> list[dict[str, Tensor]]:
        """Return the outputs for two sizes of images or videos that the module takes."""
        own = [sample_schema[name] for name in self._fields]
        fitting = [
            pair
            for pair in PROBED_SIZES
            if all(math.prod([*f.made_up_sizes(pair[1]), *f.shape[1:]]) <= PROBED_VALUES for f in own)
        ]
        if not fitting:
            raise EncoderError("a sample of the smallest size has too many values to probe the module with")
        for pair in fitting:
            with suppress(*_MODULE_ERRORS):  # another error has nothing to do with the size
                return [self._called(self._zeros(sample_schema, length)) for length in pair]
        return [
            self._probe(sample_schema, length=length) for length in fitting[0]
        ]  # fails again, and says so

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else about 8 MiB of samples and records a call."""
        ragged = any(field.ragged for field in sample_schema.values())
        lengths = self._lengths if ragged else ()
        if self._encode_batch is not None:
            return EncodeBatchSize(samples=self._encode_batch, lengths=lengths)
        return fixed_batch_size(
            sample_schema, self.schema(sample_schema), cut_time=self.independent_steps, lengths=lengths
        )

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Encode one batch; the module sees `(n, *shape)`, or `(n T, *shape)` with `time="steps"`.

        Raises:
            EncoderError: The module was put back into training, or returned something else than declared.
        """
        if any(part.training for part in self._parts):
            raise EncoderError(
                "the encoder's module is in training mode",
                hint="Call `module.eval()` and keep it in eval mode",
            )
        shaped = self._called(batch)
        folds = any(name + SHAPE_SUFFIX in batch for name in self._fields)
        for name, lead in self._folded.items() if folds else ():
            sizes = shaped[name].shape[1 : 1 + lead]
            shaped[name + SHAPE_SUFFIX] = torch.tensor([[*sizes]], device=shaped[name].device)
            shaped[name] = shaped[name].flatten(1, lead)
        return {**shaped, **{name: v for name, v in batch.items() if name not in self._taken(batch)}}

    def _called(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the module makes of a batch, by output, in its own axes."""
        inputs = [in_own_axes(batch, name) for name in self._fields]
        lead = inputs[0].shape[: 2 if self._time == "steps" else 1]
        masks = {} if self._mask is None else {self._mask: self._mask_of(batch)}
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            result = self._module(*[x.reshape(-1, *x.shape[len(lead) :]) for x in inputs], **masks)
        outputs = self._named(result)
        for name, tensor in outputs.items():
            if not tensor.ndim or tensor.shape[0] != lead.numel():
                raise EncoderError(
                    f"output {name!r} has shape {tuple(tensor.shape)} for {lead.numel()} inputs",
                    hint="Axis 0 must count the inputs, also when there is one",
                )
        return {name: tensor.reshape(*lead, *tensor.shape[1:]) for name, tensor in outputs.items()}

    def _mask_of(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what is real, `(n, L)`: all of it where samples come alone, without lengths."""
        given = [name for name in self._fields if name + LENGTHS_SUFFIX in batch]
        values = batch[given[0] if given else self._fields[0]]
        steps = torch.arange(values.shape[1], device=values.device)
        if not given:
            return steps.new_ones((len(values), len(steps)), dtype=torch.bool)
        return steps[None] < batch[given[0] + LENGTHS_SUFFIX][:, None]

    def _taken(self, sample: Mapping[str, object]) -> set[str]:
        """Return the fields that the module takes, with the sizes of those of particles and meshes."""
        known = {name + suffix for name in self._fields for suffix in (SHAPE_SUFFIX, LENGTHS_SUFFIX)}
        return {*self._fields, *(known & sample.keys())}

    def to(self, device: torch.device) -> None:
        """Move the module to `device`; a plain function must follow the device of its inputs."""
        self._device = device
        if self._owner is not None:
            self._owner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return parameters and buffers by name; empty for a plain function."""
        return {} if self._owner is None else module_weights(self._owner)

    def identity(self) -> dict[str, Json]:
        """Return class, fields, code (source and settings, or the version given) and weights by content."""
        config: dict[str, Json] = {
            "field": list(self._fields),
            "output": list(self._outputs),
            "time": self._time,
            **({} if self._mask is None else {"mask": self._mask}),
        }
        return {
            "class": qualified_name(self._module),
            "config": config,
            "weights": self._digest.of(self.weights()),
            "version": self._code,
        }

    def _named(self, result: object) -> dict[str, Tensor]:
        found = list(cast("Sequence[object]", result)) if isinstance(result, tuple | list) else [result]
        tensors = [item for item in found if isinstance(item, Tensor)]
        if not len(tensors) == len(found) == len(self._outputs):
            keys = list(cast("Mapping[object, object]", result)) if isinstance(result, Mapping) else []
            raise EncoderError(
                f"the module returned ({', '.join(type(item).__name__ for item in found)}) for the outputs "
                f"{list(self._outputs)}",
                hint=f"It must return one tensor for each name in {_argument('output')}, several as a tuple"
                + (f": wrap it in a module that takes them from {keys}" if keys else ""),
            )
        return dict(zip(self._outputs, tensors, strict=True))

    def _zeros(self, sample_schema: Schema, length: int) -> dict[str, Tensor]:
        """Return one sample of zeros; ragged fields get `length`."""
        zeros: dict[str, Tensor] = {}
        for name in self._fields:
            field = sample_schema[name]
            sizes = field.made_up_sizes(length) or [length]
            shape = (math.prod(sizes), *field.shape[1:]) if field.ragged else field.shape
            if field.folded:
                zeros[name + SHAPE_SUFFIX] = torch.tensor([sizes], device=self._device)
            zeros[name] = torch.zeros((1, *shape), dtype=getattr(torch, field.dtype), device=self._device)
        return zeros

    def _probe(self, sample_schema: Schema, length: int) -> dict[str, Tensor]:
        """Return the outputs for one sample of zeros."""
        zeros = self._zeros(sample_schema, length)
        try:
            return self._called(zeros)
        except _MODULE_ERRORS as error:
            shapes = {name: tuple(in_own_axes(zeros, name).shape) for name in self._fields}
            steps = ""
            if self._time != "steps" and all(sample_schema[name].evolves for name in self._fields):
                steps = f"single time steps with {_argument('time', 'steps')}, "
            raise EncoderError(
                f"the module failed on one sample of zeros {shapes}: {error}",
                hint=f"Give it what it takes: {steps}another field, or other shapes in the source",
            ) from error

    def _field_of(self, tensor: Tensor, longer: Tensor, *, folds: bool) -> Field:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            raise EncoderError(
                f"the module returns {dtype}, which cannot be stored", hint="Cast it in the module"
            )
        ragged = tensor.shape != longer.shape
        if folds and tensor.ndim == longer.ndim and tensor.shape[2:] != longer.shape[2:]:
            pairs = [*zip(tensor.shape[1:], longer.shape[1:], strict=True)]
            lead = 1 + max(axis for axis, (one, other) in enumerate(pairs) if one != other)
            axes = tuple(str(one) if one == other else VARIES for one, other in pairs[:lead])
            return Field(shape=(-1, *tensor.shape[1 + lead :]), dtype=dtype, ragged=True, axes=axes)
        if tensor.shape[2:] != longer.shape[2:]:
            raise EncoderError(
                f"the module returns {tuple(tensor.shape)} and {tuple(longer.shape)} for samples of two "
                "sizes",
                hint="Only axis 0 of a record may vary: pool over points in the module",
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
        """Return latents `(..., *latents of a step)` as fields `(..., *field of a step)` float32.

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
                        f"latents {tuple(steps.shape)}",
                        hint="It must return one tensor with a field for each",
                    )
                pieces.append(piece.float())
        fields = torch.cat(pieces)
        return fields.reshape(*lead, *fields.shape[1:])


def _argument(name: str, *value: str) -> str:
    return arg(name, *(value or (...,)), call="ModuleEncoder", setting=f"encoder.{name}")


def _freeze(module: nn.Module) -> None:
    """Put in evaluation mode, without gradients; refuse what would still differ from call to call."""
    weights = module_weights(module)
    if any(parameter.requires_grad for parameter in module.parameters()):
        _log.warning(
            "%s (%s) is frozen in place: eval(), and its parameters no longer require gradients. To "
            "train it as well, give a copy: copy.deepcopy(module)",
            *(type(module).__qualname__, format_count(len(weights), "weight tensor")),
        )
    module.eval()
    for parameter in module.parameters():  # TorchScript refuses `module.requires_grad_`
        parameter.requires_grad = False
    for name, part in named_parts(module).items():
        scripted = cast("str", getattr(part, "original_name", ""))
        where = f"{name or 'the module'} ({scripted or type(part).__qualname__})"
        normalizes = isinstance(part, BATCH_NORMS) or scripted in {kind.__name__ for kind in BATCH_NORMS}
        if normalizes and getattr(part, "running_mean", None) is None:
            raise EncoderError(
                f"{where} normalizes by its batch, so a sample would depend on its neighbors",
                hint="Use running statistics (track_running_stats=True)",
            )
        if part.training:
            raise EncoderError(f"{where} stays in training mode after eval()", hint="Fix its `train` method")

"""Change batches before they are handed out.

A transform is any callable. `f(batch)` takes the batch; `f(batch, keys)` also takes a random key per example.
What it draws from the keys is part of the pure function `(seed, epoch, position)` like everything else:
stopping, resuming and another world size change nothing. While `f(batch)` runs, torch's global random state
is set from the batch's place, so that it draws the same after a resume with the same batch size and ranks.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
import xxhash
from torch import Tensor, nn

from stoker.errors import ConfigError, arg
from stoker.loader.batch import (
    PointBatch,
    RecordBatch,
    TupleBatch,
    WindowBatch,
    allocate,
    map_tensors,
    to_device,
)
from stoker.loader.chunks import RECORD
from stoker.loader.order import child_keys, example_keys
from stoker.loader.outputs import Conversion
from stoker.loader.structure import fields_of, structured

if TYPE_CHECKING:
    from stoker.loader.gather import ImageViews
    from stoker.loader.options import Options
    from stoker.loader.outputs import OutputSpec
    from stoker.loader.serving import Strip
    from stoker.loader.zipped import BatchZipper
    from stoker.sources.torch_items import ItemStructure
    from stoker.store.joins import JoinedColumns

Function: TypeAlias = "Callable[[Any, Tensor], Any] | Callable[[Any], Any]"
"""`f(batch, keys)` or `f(batch)` returns the batch to hand on. `keys` is `(B,)` int64 on the batch's device,
one per example, equal for the same seed, epoch, example and place among the transforms."""
Transform: TypeAlias = "Function | Mapping[Any, Function]"
"""A function of batches, or functions of single fields by name: `{"image": function}`."""


class FieldTransform:
    """Base of transforms that take fields by name, whatever structure the items of the dataset have."""


def as_transforms(given: object) -> tuple[Transform, ...]:
    """Return transforms as a tuple; one alone may be given without a list.

    Raises:
        ConfigError: It is none, or takes another number of arguments.
    """
    alone = callable(given) or isinstance(given, Mapping)
    found = (given,) if alone else tuple(cast("Sequence[object]", given)) if _is_list(given) else (None,)
    for one in found:
        for function in cast("Mapping[Any, object]", one).values() if isinstance(one, Mapping) else (one,):
            if not callable(function):
                raise ConfigError(
                    f"transforms is {given!r}",
                    hint='Expected functions of a batch, as [function], or of fields, as [{"image": '
                    "function}]",
                )
            _takes_keys(function)
    return cast("tuple[Transform, ...]", found)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _takes_keys(function: Callable[..., Any]) -> bool:
    """Return True if a function wants the keys of examples as its second argument.

    Raises:
        ConfigError: It takes no argument, or needs more than two.
    """
    if isinstance(function, type):
        raise ConfigError(
            f"transforms: {_name(function)} is a class", hint=f"Give an object of it, {_name(function)}()"
        )
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # compiled code may not say
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    needed = (
        sum(p.default is p.empty for p in (*places, *named)) + any(p.default is p.empty for p in named) * 2
    )
    if needed > 2 or not (places or any(p.kind is p.VAR_POSITIONAL for p in parameters)):
        raise ConfigError(
            f"transforms: {_name(function)} takes {needed} arguments",
            hint="Expected f(batch), or f(batch, keys); give others their values with functools.partial",
        )
    named_so = len(places) > 1 and (places[1].name.lstrip("_") in ("keys", "key", ""))
    if needed == 2 and not named_so:
        first, second = places[0].name, places[1].name
        raise ConfigError(
            f"transforms: {_name(function)} takes ({first}, {second})",
            hint="A batch is one argument, a tuple too; a second one must be called keys, and gets the "
            f"random keys of examples. Write lambda batch: {_name(function)}(*batch) for a function of the "
            "parts of a tuple",
        )
    return named_so


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


class TransformChain:
    """The transforms of a loader, each called with what it takes.

    Args:
        transforms: From `as_transforms`.
        structure: Of the dataset's items, which functions of batches are given; None: fields by name.
        seed: What torch's global random numbers follow from, next to the place of a batch.
    """

    def __init__(self, transforms: Sequence[Transform], structure: ItemStructure, seed: str) -> None:
        self._steps = [_Step(transform, seed) for transform in transforms]
        self._structure = structure

    def __call__(
        self, batch: Any, keys: Sequence[Tensor], position: tuple[int, int], *, first: int = 0
    ) -> Any:
        """Return the batch after the transforms from `first` on, each with its `keys`, in its structure."""
        structure, flat = self._structure, True
        index = batch["index"] if structure is not None else None
        for place, (step, own) in enumerate(zip(self._steps[first:], keys, strict=True), first):
            if structure is not None and step.by_field != flat:
                batch, flat = (
                    (structured(batch, structure), False)
                    if flat
                    else (_flat(batch, structure, index, position, step), True)
                )
            batch = step(batch, own, (*position, place))
            if batch is None:
                raise ConfigError(f"transforms: {step.name} returned None", hint="Return the batch, changed")
            if type(batch) is dict:
                batch = RecordBatch(batch)
                batch.position = position
        return structured(batch, structure) if flat and structure is not None else batch


def _flat(batch: Any, structure: ItemStructure, index: Any, position: tuple[int, int], step: _Step) -> Any:
    try:
        return fields_of(batch, structure, index, position)
    except (LookupError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"transforms: {step.name} takes fields by name, and the transform before it returned "
            f"{type(batch).__name__} of another structure than the dataset's items",
            hint=f"Put {step.name} first",
        ) from error


class _Step:
    """One transform."""

    def __init__(self, transform: Transform, seed: str) -> None:
        self._seed = seed
        fields = cast("Mapping[Any, Any]", transform) if isinstance(transform, Mapping) else None
        self._by_name = None if fields is None else {str(name): f for name, f in fields.items()}
        self._function = cast("Any", transform)
        functions = [self._function] if fields is None else [*fields.values()]
        self._with_keys = [_takes_keys(function) for function in functions]
        self.by_field = fields is not None or isinstance(transform, FieldTransform)
        self.name = "a transform by field" if fields is not None else _name(transform)

    def __call__(self, batch: Any, keys: Tensor, place: tuple[int, int, int]) -> Any:
        """Return the batch changed; `place`: epoch, position, and place among the transforms."""
        if all(self._with_keys):
            return self._called(batch, keys)
        with _global_random_state(f"{self._seed} {place}", keys.device):
            return self._called(batch, keys)

    def _called(self, batch: Any, keys: Tensor) -> Any:
        if self._by_name is None:
            return self._function(batch, keys) if self._with_keys[0] else self._function(batch)
        if not isinstance(batch, RecordBatch):
            raise ConfigError(
                f"transforms name the fields {', '.join(self._by_name)}, and a batch is a "
                f"{type(batch).__name__}",
                hint="Give a function of the batch",
            )
        made = copy.copy(batch)
        for (name, function), with_keys in zip(self._by_name.items(), self._with_keys, strict=True):
            if name not in batch:
                known = ", ".join(repr(known) for known in batch if known != "index")
                raise ConfigError(f"transforms name the field {name!r}", hint=f"The batch has {known}")
            made[name] = function(batch[name], keys) if with_keys else function(batch[name])
        return made


@contextmanager
def _global_random_state(text: str, device: torch.device) -> Generator[None]:
    """Have torch's global random numbers follow from `text`, and restore their state afterwards."""
    with _random_state:
        generators = [torch.default_generator]
        if device.type == "cuda":
            generators.append(torch.cuda.default_generators[device.index or 0])
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(xxhash.xxh3_64_intdigest(text.encode()) >> 1)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


_random_state = threading.RLock()
"""Held while torch's global random state is another: all threads share it."""


def _make_lock() -> None:
    global _random_state  # noqa: PLW0603 - a lock that another thread held at a fork is never released
    _random_state = threading.RLock()


os.register_at_fork(after_in_child=_make_lock)


def run(transforms: Sequence[Function], batch: Any, keys: Tensor) -> Any:
    """Return the batch after all transforms. Each has its own keys: two of one kind draw other numbers."""
    own = [child_keys(keys, place) for place in range(len(transforms))]
    seed = "" if all(map(_draws_from_keys, transforms)) else str(keys[:1].tolist())
    return TransformChain(transforms, None, seed)(batch, own, (0, 0))


def _draws_from_keys(transform: Transform) -> bool:
    functions = transform.values() if isinstance(transform, Mapping) else (transform,)
    return all(map(_takes_keys, functions))


class ColumnAdder:
    """Adds the columns of a table to batches; `static` ones are written to the same memory each time."""

    def __init__(self, joined: JoinedColumns, *, static: bool) -> None:
        self._joined = joined
        self._static = static
        self._memory: dict[str, Tensor] | None = None

    def added(self, batch: Any) -> Any:
        """Return the batch with the columns of its examples; with windows they are conditions, `(B, C)`."""
        windowed = isinstance(batch, WindowBatch | PointBatch)
        found = self._of(batch.index[:, 0].contiguous() if windowed else batch["index"])
        if windowed:
            return batch._replace(cond={**batch.cond, **{n: v.reshape(len(v), -1) for n, v in found.items()}})
        batch.update(found)
        return batch

    def _of(self, numbers: Tensor) -> dict[str, Tensor]:
        if not self._static:
            return self._joined.of(numbers)
        if self._memory is None:
            self._memory = {
                name: allocate((len(numbers), *values.shape[1:]), values.dtype, numbers.device)
                for name, values in self._joined.values.items()
            }
        return self._joined.of(numbers, self._memory)


_Layout: TypeAlias = "tuple[int, tuple[int, ...], tuple[int, ...]]"
"""Where a tensor begins, its shape and strides."""


class FixedBatch:
    """Copies what transforms return to the same memory for each batch, for `static=True`."""

    def __init__(self) -> None:
        self._memory: list[Tensor] = []

    def transformed(self, change: Callable[[Any], Any], batch: Any) -> Any:
        """`change(batch)`, at the addresses of the first one.

        A tensor that transforms pass on as it is has a fixed address already.

        Raises:
            ConfigError: Transforms returned other shapes, dtypes or fields than for the first batch.
        """
        passed = {*map(_layout, _tensors(batch))}  # asked first: a transform may change the batch in place
        made = change(batch)
        if not isinstance(made, RecordBatch | WindowBatch | TupleBatch):
            raise ConfigError(
                f"the last of {arg('transforms')} returned {type(made).__name__}, whose tensors static=True "
                "cannot keep at their addresses",
                hint="Return the batch, changed, or a dict; or leave static out",
            )
        tensors = list(_tensors(made))
        self._memory = self._memory or _memory_for(tensors, passed)
        found = [(tuple(t.shape), t.dtype, t.device) for t in tensors]
        if found != (first := [(tuple(t.shape), t.dtype, t.device) for t in self._memory]):
            raise ConfigError(
                f"static=True needs batches of one shape, and {arg('transforms')} returned {found} after "
                f"{first}",
                hint="Make transforms return the same fields, shapes and dtypes each time, or leave static "
                "out",
            )
        memory = iter(_written(self._memory, tensors))
        return map_tensors(made, lambda _: next(memory))


def _memory_for(tensors: Sequence[Tensor], passed: set[_Layout]) -> list[Tensor]:
    """Return the memory for each tensor: itself for the first one that was passed on as it is."""
    memory: list[Tensor] = []
    for tensor in tensors:
        if (layout := _layout(tensor)) in passed:
            passed.remove(layout)
            memory.append(tensor)
        else:
            memory.append(allocate(tuple(tensor.shape), tensor.dtype, tensor.device))
    return memory


def _written(memory: Sequence[Tensor], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copy tensors to `memory`. All are read before one is written: transforms may exchange two."""
    held = {_storage(fixed) for fixed in memory}
    apart = [
        fixed if _layout(fixed) == _layout(tensor) else tensor.clone() if _storage(tensor) in held else tensor
        for fixed, tensor in zip(memory, tensors, strict=True)
    ]
    for fixed, tensor in zip(memory, apart, strict=True):
        if tensor is not fixed:
            fixed.copy_(tensor.detach())
    return memory


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layout(tensor: Tensor) -> _Layout:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Return all tensors of a batch, in a fixed order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return iter(found)


class BatchFinisher:
    """Does what follows the gathering of a batch; nothing, unless asked for."""

    def __init__(
        self,
        options: Options,
        *,
        made_on: torch.device,
        columns: ColumnAdder | None = None,
        partners: BatchZipper | None = None,
        fixed: FixedBatch | None = None,
        structure: ItemStructure = None,
    ) -> None:
        """Prepare to copy, pin and transform batches as the options ask.

        Args:
            options: Of the loader.
            made_on: Where batches are made.
            columns: Columns of a table that batches are given before they are transformed.
            partners: Adds the fields of other caches, before they are transformed.
            fixed: Keeps what transforms return at fixed addresses.
            structure: Of the dataset's items, which batches get; None: they stay fields by name.
        """
        self._chain = TransformChain(options.transforms, structure, f"{options.seed} {options.rank}")
        self._structure = structure
        self.position = (0, 0)
        self._options, self._columns, self._fixed = options, columns, fixed
        self._partners = partners
        self._moves = options.device != made_on
        self._pins = options.pin_memory and options.device.type == "cpu" and torch.cuda.is_available()

    def __bool__(self) -> bool:
        """Return True if there is anything to do."""
        added = (self._columns, self._partners)
        return any((self._moves, self._pins, self._options.transforms, *added, self._structure))

    def apply(self, strip: Strip, batches: Iterable[Any], epoch: int) -> Iterator[Any]:
        """Finish the `batches` of a strip. `position` is that of the batch that came last."""
        options, meter, structure = self._options, self._options.meter, self._structure
        count = len(options.transforms) - strip.transformed
        keys: list[tuple[Tensor, ...]] = []
        for number, gathered in enumerate(batches):
            batch, begin = gathered, perf_counter()
            self.position = batch.position
            if self._pins:
                batch = map_tensors(batch, Tensor.pin_memory)
            if self._moves:
                batch = map_tensors(batch, partial(to_device, device=options.device))
            copied = perf_counter()
            if self._columns is not None:
                batch = self._columns.added(batch)
            if self._partners is not None:
                batch = self._partners.added(batch)
            if count:
                keys = keys or self._keys(strip, epoch, _device_of(batch))
                change = partial(
                    self._transformed, [own[number] for own in keys], batch.position, strip.transformed
                )
                batch = change(batch) if self._fixed is None else self._fixed.transformed(change, batch)
            elif structure is not None:
                batch = structured(batch, structure)
            if meter is not None:
                meter.spent("copy", copied - begin)
                meter.spent("transform", perf_counter() - copied)
            yield batch

    def _transformed(self, keys: Sequence[Tensor], position: tuple[int, int], first: int, batch: Any) -> Any:
        """Return what transforms made of a batch; a plain dict as the `RecordBatch` at its position."""
        index = batch["index"] if isinstance(batch, RecordBatch) else None
        made = self._chain(batch, keys, position, first=first)
        if type(made) in (tuple, list):
            made = TupleBatch(made)
        if isinstance(made, RecordBatch | TupleBatch):
            made.position = position
            if index is not None and (isinstance(made, TupleBatch) or "index" not in made):
                made.index = index
        return made

    def _keys(self, strip: Strip, epoch: int, device: torch.device) -> list[tuple[Tensor, ...]]:
        """Return per transform that is to be done the keys of each batch: some 40 launches, for a strip."""
        every = example_keys(self._options.seed, epoch, to_device(strip.examples, device))
        places = range(strip.transformed, len(self._options.transforms))
        return [cast("Any", child_keys(every, place)).split(strip.size) for place in places]


def _device_of(batch: Any) -> torch.device:
    return (batch.index if isinstance(batch, WindowBatch | PointBatch) else batch["index"]).device


# ----------------------------------------------------------------------------------------------------------
# Transforms that only move values of images, done by the gather itself: a crop, a mirror, or both.
#
# A batch that is cropped after it was gathered goes through memory twice more. Where a kernel gathers, the
# rows it reads are cut on the way; the values are the same, since cutting and normalizing do not touch each
# other. Only what stands at the head of `transforms=` can be done before the batch is there.


EXACT = (torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32)
"""Dtypes whose values pass through float32, as kernels take them, unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCut:
    """Change that one transform makes to the last two axes of one field."""

    field: str
    draw: Callable[[Tensor], Tensor]
    """From keys to where crops begin, `(n, 2)` int64, or to which examples are mirrored, `(n,)` bool."""
    crop: tuple[int, int] | None = None
    """Rows and columns kept; None: it mirrors."""


@runtime_checkable
class CutTransform(Protocol):
    """A transform that may be a cut."""

    def as_cut(self, shapes: Mapping[str, tuple[int, ...]]) -> ImageCut | None:
        """Return this transform as a cut of records of these example shapes; None: it does more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedCuts:
    """The cuts at the head of a loader's transforms."""

    cuts: tuple[ImageCut, ...] = ()
    """A crop, a mirror, or a crop and then a mirror of the same field."""
    seed: int = 0

    @property
    def count(self) -> int:
        """Transforms that need not be applied any more."""
        return len(self.cuts)

    def outputs(self, outputs: tuple[OutputSpec, ...]) -> tuple[OutputSpec, ...]:
        """Return what is gathered, with the cuts."""
        return tuple(self._output(output) for output in outputs)

    def views(self, epoch: int, examples: Any, device: torch.device) -> dict[str, ImageViews]:
        """By output, where crops begin and which of these examples are mirrored."""
        if not self.cuts:
            return {}
        keys = example_keys(self.seed, epoch, torch.as_tensor(examples, device=device))
        begins: Tensor | None = None
        flips: Tensor | None = None
        for place, one in enumerate(self.cuts):
            drawn = one.draw(child_keys(keys, place))
            begins, flips = (begins, drawn) if one.crop is None else (drawn, flips)
        return {self.cuts[0].field: (begins, flips)}

    def _output(self, output: OutputSpec) -> OutputSpec:
        if not self.cuts or output.name != self.cuts[0].field:
            return output
        conversion = output.conversion or Conversion(dtype=output.dtype)
        crop = next((one.crop for one in self.cuts if one.crop is not None), None)
        return replace(
            output, conversion=replace(conversion, crop=crop, flip=any(c.crop is None for c in self.cuts))
        )


NO_CUTS = FusedCuts()
"""All transforms come after the gather."""


def find_fused_cuts(
    transforms: Sequence[Transform], outputs: tuple[OutputSpec, ...], seed: int, *, windowed: bool
) -> FusedCuts:
    """As many of the first transforms as a gather can do with the bytes that they would give."""
    cuts: list[ImageCut] = []
    shapes = {output.name: output.shape for output in outputs if not output.ragged}
    for transform in () if windowed else transforms[:2]:
        found = transform.as_cut(shapes) if isinstance(transform, CutTransform) else None
        if found is None or not _follows(found, cuts) or not _gathered(found.field, outputs):
            break
        cuts.append(found)
    return FusedCuts(cuts=tuple(cuts), seed=seed)


def _follows(found: ImageCut, cuts: Sequence[ImageCut]) -> bool:
    """Return True if a cut may come after these: kernels crop one field first, and then mirror it."""
    return not cuts or (cuts[0].field == found.field and cuts[0].crop is not None and found.crop is None)


def _gathered(name: str, outputs: Sequence[OutputSpec]) -> bool:
    """Return True if a field is gathered as entire images, and normalized by one number for each plane."""
    (output,) = [output for output in outputs if output.name == name]
    if output.index != RECORD or output.parts or output.dtype not in EXACT:
        return False
    conversion = output.conversion
    return (
        conversion is None
        or len(conversion.scale) < 2
        or conversion.inner % math.prod(output.shape[-2:]) == 0
    )

"""Items of a Dataset as flat dictionaries of numpy arrays.

Dictionaries are flattened with `.`, tuples give fields `0`, `1`, ... (or their names), dataclasses the names
of their fields; a bare tensor or number is the field `data`. Numbers and lists of numbers keep all their
digits, as `default_collate` does: floats are float64. Arrays and tensors of float64 with at least one axis
become float32. complex gets a trailing axis of 2, bfloat16 travels as its bits in uint16. A store holds
numbers: text is refused, unless a rule says what number it is.
"""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from stoker.arguments import MAPPING, Kind, check, several
from stoker.errors import ConfigError, Problem, SourceError, arg
from stoker.schema import SHAPE_SUFFIX, VARIES, Field, Json, Sample, Schema, size_field
from stoker.sources.protocol import read_as

Item: TypeAlias = "dict[str, tuple[NDArray[Any], str]]"
"""Fields of one item: array, and dtype as a schema names it."""

DEEPEST = 64
"""Dictionaries, tuples and lists within one another; what has more contains itself."""

Rule: TypeAlias = "Sequence[str] | Literal['bytes', 'drop']"
"""The rule for a field of text: its place in a list of words, its UTF-8 bytes, or nothing."""


_WORDS = several(Kind("", lambda _: True), "a list of words, 'bytes' or 'drop'")


class TextRules:
    """Rules for text, by field.

    Args:
        rules: A list of words: text is stored as its place there, int64. `"bytes"`: as its UTF-8 bytes, a
            ragged uint8 field. `"drop"`: the field, whatever it holds, is left out of every item.

    Raises:
        ConfigError: A rule is unknown, or a word comes twice.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules: dict[str, Json] = {}
        self._places: dict[str, dict[str, int]] = {}
        check({"text": (rules, MAPPING)})
        for name, rule in rules.items():
            if isinstance(rule, str):
                if rule not in ("bytes", "drop"):
                    raise ConfigError(
                        f"{arg('text', {name: rule})} is not a rule",
                        hint="Expected a list of words, 'bytes' or 'drop'",
                    )
                self._rules[name] = rule
                continue
            check({f"text[{name!r}]": (rule, _WORDS)})
            words = [str(word) for word in rule]
            if len(set(words)) != len(words) or not words:
                raise ConfigError(
                    f"{arg('text', {name: words})} names no word, or one twice", hint="Name each word once"
                )
            self._rules[name] = list[Json](words)
            self._places[name] = {word: place for place, word in enumerate(words)}

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    @property
    def names(self) -> list[str]:
        """Fields that have a rule."""
        return list(self._rules)

    def bytes_fields(self) -> list[str]:
        """Return the fields that are stored as bytes, whose length varies."""
        return [name for name, rule in self._rules.items() if rule == "bytes"]

    def dropped(self, name: str) -> bool:
        """Return True if the field is left out."""
        return self._rules.get(name) == "drop"

    def missing(self, names: Collection[str]) -> str | None:
        """Return a field with a rule that is not among `names`, but for dropped ones; None: all are."""
        return next((name for name in self._rules if name not in names and not self.dropped(name)), None)

    def with_rule(self, name: str, rule: Rule) -> dict[str, Json]:
        """Return the rules with one more, as a call shows them; lists of words are left out."""
        short = {known: own for known, own in self._rules.items() if isinstance(own, str)}
        return {**short, name: rule if isinstance(rule, str) else list[Json](rule)}

    def number(self, name: str, text: str | bytes, where: str) -> NDArray[Any]:
        """Return the text as numbers.

        Raises:
            SourceError: It is not among the words.
        """
        plain = text if isinstance(text, bytes) else text.encode()
        if name not in self._places:
            return np.frombuffer(plain, np.uint8).copy()
        place = self._places[name].get(plain.decode(errors="replace"))
        if place is None:
            raise SourceError(
                f"{where} is {text[:40]!r}, which is not among the {len(self._places[name])} words of its "
                f"rule in {arg('text')}",
                hint="Add it there",
            )
        return np.asarray(place, np.int64)

    def to_json(self) -> dict[str, Json]:
        """Return the rules, for the recipe."""
        return dict(self._rules)


NO_RULES = TextRules({})


def flatten_item(item: Any, *, where: str, text: TextRules = NO_RULES) -> Item:
    """Return all values of an item, each as a fresh array and the name of its dtype.

    Raises:
        SourceError: A value is text without a rule, None or anything else that is not numbers, or one that
            a rule says is text, or two have one name; names the field.
    """
    found: Item = {}
    leaves = [(path or "data", value) for path, value in _walk(item, "", where)]
    for name, value in leaves:
        if text.dropped(name):
            continue
        spot = f"{where}, field {name!r}"
        if name in found:
            raise SourceError(
                f"{spot} occurs twice: nested names are joined with '.', so {{'a': {{'b': 1}}}} and "
                "{'a.b': 2} are one",
                hint="Give one of them another name",
            )
        if not isinstance(value, str | bytes):
            found[name] = _to_text(value, spot, name, text) if name in text else _to_array(value, spot, name)
            continue
        if name not in text:
            names = [one for one, _ in leaves]
            if (unknown := text.missing(names)) is not None:
                raise SourceError.of_all([missing_text(where, unknown, names)])
            raise _text_without_rule(value, spot, name, text)
        array = text.number(name, value, spot)
        found[name] = array, array.dtype.name
    return found


def missing_text(where: str, name: str, names: Collection[str]) -> Problem:
    """Return what is wrong where a field that is said to be text is not there."""
    near = get_close_matches(name, names, n=1) or [*names][:1]
    return Problem(
        f"{where} has no field {name!r} with text, only {', '.join(map(repr, names))}",
        f"Name one of these, as {near[0]!r}" if near else "",
    )


def _text_without_rule(value: str | bytes, where: str, name: str, text: TextRules) -> SourceError:
    """Return the error for the first text of a dataset, or for one next to others that have a rule."""
    tokens = f"For tokens of a language model give stoker.Tokenize(dataset, folder, field={name!r}). "
    as_bytes, place, out = (
        arg("text", text.with_rule(name, rule), call="TorchSource")
        for rule in ("bytes", ["cat", "dog"], "drop")
    )
    return SourceError(
        f"{where} is text ({value[:40]!r}), and a store holds numbers",
        hint=f"{'' if text.names else tokens}To store its bytes give {as_bytes}, to store its place among "
        f"words {place}; to leave it out {out}",
    )


def _to_text(value: Any, where: str, name: str, text: TextRules) -> tuple[NDArray[Any], str]:
    """Return an array that holds the bytes of a text already.

    Raises:
        SourceError: It is anything else.
    """
    if name in text.bytes_fields() and value is not None:
        array, dtype = _to_array(value, where, name)
        if dtype == "uint8" and array.ndim == 1:
            return array, dtype
    raise SourceError(
        f"{where} is {reprlib.repr(value)} ({type(value).__name__}), and text was expected",
        hint="Return text in every item, '' for an empty one; or name another field as text",
    )


def common_schema(
    name: str, items: Mapping[int, Item], *, time: Sequence[str], ragged: Mapping[str, tuple[int, ...]]
) -> Schema:
    """Return the fields that all items have, each folded one followed by the field of its sizes.

    Args:
        name: Of the Dataset, for messages.
        items: Probed ones by index.
        time: Fields whose axis 0 is time.
        ragged: By field the axes that vary, in addition to those that the items show.

    Raises:
        SourceError: They differ in dtype or number of axes.
        ConfigError: A field that the user names is not there, or has no such axis.
    """
    first_index = next(iter(items))
    first = items[first_index]
    schema: Schema = {}
    for index, item in items.items():
        if item.keys() != first.keys():
            raise SourceError(
                f"{name}: sample {index} has fields {sorted(item)}, sample {first_index} has {sorted(first)}",
                hint="Return the same fields in every item",
            )
    for field in first:
        others = {index: item[field] for index, item in items.items()}
        where = f"{name}: field {field!r}"
        schema[field] = _common_field(where, others, time=field in time, ragged=ragged.get(field, ()))
    for field in [name for name, found in schema.items() if found.folded]:
        if field + SHAPE_SUFFIX in schema:
            raise SourceError(
                f"{name}: the sizes of {field!r} are stored as {field + SHAPE_SUFFIX!r}, which items have as "
                "a field of their own",
                hint="Rename that in the Dataset",
            )
        schema[field + SHAPE_SUFFIX] = size_field(schema[field])
    if unknown := ({*time, *ragged} - schema.keys()):
        raise ConfigError(f"time or ragged name {sorted(unknown)}; the fields are {', '.join(schema)}")
    return schema


def _common_field(
    where: str, others: Mapping[int, tuple[NDArray[Any], str]], *, time: bool, ragged: tuple[int, ...]
) -> Field:
    first_index, (array, dtype) = next(iter(others.items()))
    for index, (other, kind) in others.items():
        if kind != dtype or other.ndim != array.ndim:
            raise SourceError(
                f"{where} is {dtype} {array.shape} in sample {first_index} and {kind} {other.shape} in "
                f"sample {index}",
                hint="Sizes of axes may vary; return one dtype and one number of axes",
            )
    if ragged and max(ragged) >= max(1, array.ndim):
        raise ConfigError(f"{where} has {array.ndim} axes", hint=f"{max(ragged)} in ragged= is not one")
    sizes = [{size} for size in array.shape]
    for other, _ in others.values():
        for own, size in zip(sizes, other.shape, strict=True):
            own.add(size)
    varying = {*ragged, *(axis for axis, own in enumerate(sizes) if len(own) > 1)}
    if varying - {*ragged}:
        named = " and ".join(f"axis {axis}" for axis in sorted(varying))
        logging.getLogger("stoker").info("%s varies along %s and is kept ragged", where, named)
    if time and max(varying, default=0):
        raise ConfigError(
            f"{where} is named in time= and varies along axes {sorted(varying)}",
            hint="Of a field with time axis 0 alone may vary: leave it out of time=, or resize or pad",
        )
    return varying_field(array.shape, dtype, varying, time=time)


def varying_field(
    shape: tuple[int, ...], dtype: str, varying: Collection[int], *, time: bool = False
) -> Field:
    """Return a field of which some axes vary; folded where one of them is not the first.

    >>> varying_field((4, 64, 64), "float16", {1, 2}).axes
    ('4', '*', '*')
    """
    last = max(varying, default=0)
    if not last:
        return Field(
            shape=(-1, *shape[1:]) if varying else shape, dtype=dtype, time=time, ragged=bool(varying)
        )
    axes = tuple(VARIES if axis in varying else str(shape[axis]) for axis in range(last + 1))
    return Field(shape=(-1, *shape[last + 1 :]), dtype=dtype, ragged=True, axes=axes)


def fold(sample: Sample, schema: Schema) -> Sample:
    """Return the sample with folded fields in rows, and their sizes after all others.

    Args:
        sample: Arrays in the shapes that the user has.
        schema: Their fields.
    """
    found = dict(sample)
    for name, array in sample.items():
        if schema[name].folded:
            lead = len(schema[name].axes)
            found[name] = array.reshape(-1, *array.shape[lead:])
            found[name + SHAPE_SUFFIX] = np.array(array.shape[:lead], np.int64)
    return found


def fits_field(shape: tuple[int, ...], field: Field) -> bool:
    """Return True if an array of this shape is one of the field."""
    if not field.folded:
        return shape == field.shape or (
            field.ragged and len(shape) == len(field.shape) and shape[1:] == field.shape[1:]
        )
    lead = len(field.axes)
    return (
        len(shape) >= lead
        and shape[lead:] == field.shape[1:]
        and all(word in (VARIES, str(size)) for word, size in zip(field.axes, shape[:lead], strict=True))
    )


def shape_text(field: Field) -> str:
    """Return the shape of a field as arrays have it, -1 for a size that varies.

    >>> shape_text(Field(shape=(-1, 4), dtype="uint8", ragged=True, axes=("3", "*")))
    '(3, -1, 4)'
    """
    axes = tuple(-1 if word == VARIES else int(word) for word in field.axes)
    return str((*axes, *field.shape[1:]) if field.folded else field.shape)


def varying_axes(ragged: Sequence[str] | Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """Return by field the axes that vary.

    Args:
        ragged: Fields whose axis 0 varies, one alone as text too; or by field the axes that vary.

    Raises:
        ConfigError: It names no fields; or an axis is not a whole number from 0 on, or a field has none.
    """
    if isinstance(ragged, Mapping):
        found = {name: _axes_of(axes) for name, axes in ragged.items()}
        if wrong := [name for name, axes in found.items() if not axes]:
            raise ConfigError(
                f"ragged[{wrong[0]!r}] is {ragged[wrong[0]]!r}", hint="Expected the axes that vary, as (1, 2)"
            )
        return found
    given = cast("object", (ragged,) if isinstance(ragged, str) else ragged)
    names = [*cast("Iterable[object]", given)] if isinstance(given, Iterable) else [None]
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(
            f"ragged is {ragged!r}", hint="Expected names of fields, as ['tokens'] or {'latent': (1, 2)}"
        )
    return dict.fromkeys(cast("list[str]", names), (0,))


def _axes_of(axes: object) -> tuple[int, ...]:
    """Return axes in their order; empty where they are not whole numbers from 0 on."""
    known = [*cast("Iterable[object]", axes)] if isinstance(axes, Iterable) else []
    whole = [axis for axis in known if isinstance(axis, int) and axis >= 0]
    return tuple(sorted({*whole})) if len(whole) == len(known) else ()


def differing_axes(shape: tuple[int, ...], dtype: str, field: Field) -> tuple[int, ...]:
    """Return the axes that would have to vary for such an array to be one of the field, and those that do.

    Empty where its dtype or number of axes differs.
    """
    known = field.axes or ((VARIES,) if field.ragged else ())
    words = [*known, *map(str, field.shape[1 if field.ragged else 0 :])]
    if dtype != field.dtype or len(shape) != len(words):
        return ()
    pairs = enumerate(zip(words, shape, strict=True))
    return tuple(axis for axis, (word, size) in pairs if word in (VARIES, "-1") or word != str(size))


def ragged_cure(name: str, array: NDArray[Any], dtype: str, field: Field) -> str:
    """Return how to declare the axes that vary, where nothing else differs."""
    if not (axes := differing_axes(array.shape, dtype, field)):
        return ""
    ragged = (name,) if axes == (0,) else {name: axes}
    return f"; if its size may vary, give stoker.TorchSource(dataset, ragged={ragged!r})"


class PlainItems:
    """Reads items that are flat and stored as they are, in a tenth of the time of `flatten_item`.

    Args:
        item: An item of the Dataset.
        found: The same, flattened.

    >>> item = {"x": np.zeros((2, 3), np.float32), "label": 3}
    >>> plain = PlainItems(item, flatten_item(item, where="item 0"))
    >>> plain.read({"x": np.ones((2, 3), np.float32), "label": 4})["label"]
    array(4)
    >>> plain.read({"x": np.ones((2, 4), np.float32), "label": 4}) is None
    True
    """

    def __init__(self, item: Any, found: Item) -> None:
        self._kind = type(item)
        if self._kind is dict:
            leaves: dict[str, Any] = item
        elif self._kind in (tuple, list):
            leaves = {str(place): value for place, value in enumerate(item)}
        else:
            leaves = {"data": item}
        self._fields: list[tuple[str, type, Any, Any]] | None = []
        """Name, type, dtype and shape of each."""
        for name, value in leaves.items():
            array, dtype = found.get(name, (None, ""))
            if array is None or not _is_stored_as_it_is(value, array, dtype):
                self._fields = None  # what another item of this kind looks like is not known
                break
            self._fields.append((name, type(value), getattr(value, "dtype", None), array.shape))
        if len(leaves) != len(found):
            self._fields = None

    def read(self, item: Any) -> Sample | None:
        """Return the fields of an item like the first, as fresh arrays; None for any other."""
        views = self._views(item)
        return None if views is None else {name: np.array(view, order="C") for name, view in views.items()}

    def read_into(self, item: Any, rows: Sample) -> bool:
        """Copy the fields of an item like the first into `rows`; False for any other."""
        views = self._views(item)
        if views is None or views.keys() != rows.keys():
            return False
        try:
            for name, view in views.items():
                row = rows[name]
                if row.shape != view.shape:
                    return False
                np.copyto(row, view, casting="no")
        except TypeError:  # another dtype
            return False
        return True

    def _views(self, item: Any) -> Sample | None:
        """Return the fields of an item like the first, in its own memory; None for any other."""
        fields = self._fields
        if fields is None or type(item) is not self._kind:
            return None
        if self._kind is dict:
            values = item.values()
            if list(item) != [field[0] for field in fields]:
                return None
        elif self._kind in (tuple, list):
            values = item
        else:
            values = (item,)
        if len(values) != len(fields):
            return None
        views: Sample = {}
        for (name, kind, dtype, shape), value in zip(fields, values, strict=True):
            if type(value) is not kind:
                return None
            if dtype is None:
                views[name] = np.array(value)
                if kind is int and views[name].dtype != np.int64:
                    return None
            else:
                try:
                    if value.dtype != dtype or value.shape != shape:
                        return None
                    views[name] = value if kind is np.ndarray else value.numpy()
                except (
                    TypeError,
                    RuntimeError,
                ):  # on a GPU, sparse, nested, with a gradient, a view that negates
                    return None
        return views


def _is_stored_as_it_is(value: Any, array: NDArray[Any], dtype: str) -> bool:
    """Return True if a leaf is stored without a conversion, as far as its type, dtype and shape say."""
    if type(value) in (bool, float):
        return True
    if type(value) is int:
        return dtype == "int64"
    torch = sys.modules.get("torch")
    if type(value) is np.ndarray:
        return value.dtype == array.dtype == np.dtype(dtype) and value.dtype.isnative
    if torch is None or type(value) is not torch.Tensor or dtype == "bfloat16":  # numpy has no such dtype
        return False
    return str(value.dtype) == f"torch.{dtype}" and tuple(value.shape) == array.shape


def encoded_structure(
    structure: ItemStructure, before: Iterable[str], after: Iterable[str]
) -> ItemStructure | bool:
    """Return the structure of items after an encoder; False if the encoder changed too much to keep it.

    One field that the encoder replaces by one other keeps its place: of `(image, label)` comes
    `(latent, label)`.

    Args:
        structure: Of the dataset's items.
        before, after: Names of the fields of samples, and of records.

    >>> item = Branch(tuple, ((0, "0"), (1, "1")))
    >>> encoded_structure(item, ["0", "1"], ["latent", "1"]).parts
    ((0, 'latent'), (1, '1'))
    """
    had, has = {*before}, {*after}
    gone, new = had - has, has - had
    if not gone and not new:
        return structure
    if len(gone) != 1 or len(new) != 1:
        return False
    return _renamed(structure, gone.pop(), new.pop())


def _renamed(node: ItemStructure, old: str, new: str) -> ItemStructure:
    if not isinstance(node, Branch):
        return new if node == old else node
    is_dict = issubclass(node.kind, Mapping)  # its keys are the names of fields
    parts = ((new if is_dict and one == old else key, _renamed(one, old, new)) for key, one in node.parts)
    return Branch(node.kind, tuple(parts))


def first_array(structure: ItemStructure, schema: Schema) -> str | None:
    """Return the first field of items that are tuples or lists which is not a single number; None: no such.

    >>> from stoker.schema import Field
    >>> fields = {"0": Field(shape=(), dtype="int64"), "1": Field(shape=(3,), dtype="float32")}
    >>> first_array(Branch(tuple, ((0, "0"), (1, "1"))), fields)
    '1'
    """
    if not isinstance(structure, Branch) or not issubclass(structure.kind, tuple | list):
        return None
    names = (part for _, part in structure.parts if isinstance(part, str))
    return next((name for name in names if schema[name].shape), None)


def narrowed_fields(item: Any) -> set[str]:
    """Return the fields that are arrays or tensors of more precision than is stored.

    >>> sorted(narrowed_fields({"a": np.ones(2), "b": np.ones(2, "f4"), "c": 0.5, "d": np.float64(1)}))
    ['a']
    """
    wider = ("longdouble", "float128", "clongdouble", "complex256")
    wide = ("float64", "complex128", *wider)
    return {
        name or "data"
        for name, value in _walk(item, "", "an item")
        if str(getattr(value, "dtype", "")).rpartition(".")[2].lstrip("<>=")
        in (wide if getattr(value, "ndim", 0) else wider)
    }


def _walk(value: Any, name: str, where: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries, tuples and lists; lists of plain numbers below the top are leaves.

    Raises:
        SourceError: They are nested without an end, or nearly so.
    """
    if depth > DEEPEST:
        raise SourceError(
            f"{where}, field {name[:40]!r}... is nested more than {DEEPEST} deep",
            hint="Does it contain itself? Return arrays in a flat dictionary",
        )
    if (items := _children(value, name)) is None:
        yield name, value
        return
    for key, inner in items:
        yield from _walk(inner, f"{name}.{key}" if name else str(key), where, depth + 1)


def _children(value: Any, name: str) -> list[tuple[Any, Any]] | None:
    """Return the parts of a dictionary, tuple, list or dataclass by key; None for a leaf.

    A list of plain numbers below the top is a leaf, and so is an empty list.
    """
    if isinstance(value, Mapping):
        return [*cast("Mapping[Any, Any]", value).items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    values = cast("Sequence[Any]", value) if isinstance(value, tuple | list) else ()
    if not values or (name and _plain_numbers(values)):
        return None
    return [*zip(getattr(values, "_fields", range(len(values))), values, strict=True)]


@dataclass(frozen=True, slots=True)
class Branch:
    """A dictionary, tuple, list or dataclass of an item; `parts` are its keys and what is there."""

    kind: type
    parts: tuple[tuple[Any, ItemStructure], ...]


ItemStructure: TypeAlias = "Branch | str | None"
"""How an item is built from its fields: a branch, the name of a field, or None where text is dropped."""


def structure_of(item: Any, text: TextRules, name: str = "") -> ItemStructure:
    """Return how an item is built from the fields that `flatten_item` makes of it.

    >>> structure_of((1.0, {"a": 2}), NO_RULES).parts[0]
    (0, '0')
    """
    children = _children(item, name)
    if children is None:
        field = name or "data"
        return None if text.dropped(field) else field
    parts = tuple((key, structure_of(v, text, f"{name}.{key}" if name else str(key))) for key, v in children)
    return Branch(type(item), parts)


def _plain_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values)


def _to_array(value: Any, where: str, name: str) -> tuple[NDArray[Any], str]:
    out = f"leave it out with {arg('text', {name: 'drop'})}"
    if value is None:
        raise SourceError(f"{where} is None", hint=f"Return an array or a number in every item, or {out}")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_tensor(value, where)
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        return _from_image(value)
    if isinstance(value, bool | np.bool_):
        return np.asarray(value, dtype=np.bool_), "bool"
    if isinstance(value, int):
        return _from_int(value, where)
    if isinstance(value, float):
        return np.asarray(value, dtype=np.float64), "float64"
    if isinstance(value, list | tuple):
        return _from_list(cast("Sequence[Any]", value), where, name)
    if isinstance(value, complex | np.ndarray | np.generic):
        return _from_numpy(np.asanyarray(value), where)
    kind = type(cast("object", value)).__name__
    raise SourceError(
        f"{where} is of type {kind}", hint=f"Return tensors, arrays, numbers or images, or {out}"
    )


def _from_list(values: Sequence[Any], where: str, name: str) -> tuple[NDArray[Any], str]:
    if not values:
        raise SourceError(
            f"{where} is an empty list, which has neither dtype nor further axes",
            hint="Return an array in every item, as np.array(values, np.float32) or np.zeros((0, 4), "
            f"np.float32); or leave it out with {arg('text', {name: 'drop'})}",
        )
    array = np.asanyarray(values)
    if array.dtype.kind not in "bi" and all(isinstance(value, int | np.integer) for value in values):
        return _from_int(max(map(int, values), key=abs), where)  # numpy makes floats of them, or gives up
    return _from_numpy(array, where, exact=True)


def _from_int(value: int, where: str) -> tuple[NDArray[Any], str]:
    try:
        return np.asarray(value, dtype=np.int64), "int64"
    except OverflowError as error:
        raise SourceError(
            f"{where} is a whole number of {value.bit_length()} bits, expected at most 63 and a sign",
            hint="Return it as a float",
        ) from error


def _from_tensor(tensor: Any, where: str) -> tuple[NDArray[Any], str]:
    import torch

    if tensor.layout != torch.strided:
        raise SourceError(
            f"{where} is a tensor of layout {tensor.layout}", hint="Return it dense (`to_dense()`)"
        )
    if tensor.is_meta:
        raise SourceError(f"{where} is a meta tensor, which has no values", hint="Return one with values")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return plain.contiguous().view(torch.int16).numpy().view(np.uint16).copy(), "bfloat16"
    try:
        array = plain.numpy()
    except (TypeError, RuntimeError) as error:
        raise SourceError(
            f"{where} has dtype {tensor.dtype}, which cannot be stored ({error})",
            hint="Convert it in the Dataset",
        ) from error
    return _from_numpy(array, where)


def _from_image(image: Any) -> tuple[NDArray[Any], str]:
    """Return a PIL image as `(H, W, C)`; palettes become RGB, bitmaps gray."""
    plain = image.convert({"P": "RGB", "1": "L"}.get(image.mode, image.mode))
    array = np.array(plain)
    return _from_numpy(array if array.ndim == 3 else array[..., None], "image")


def _from_numpy(array: NDArray[Any], where: str, *, exact: bool = False) -> tuple[NDArray[Any], str]:
    """Return an array as it is stored; float64 stays where it is one number, or `exact`."""
    if isinstance(array, np.ma.MaskedArray) and np.ma.getmaskarray(array).any():
        raise SourceError(
            f"{where} is a masked array with values left out, and a store has no masks",
            hint="Return array.filled(VALUE), and the mask as a field of its own if it is wanted",
        )
    array = np.asarray(array)
    kind, size = array.dtype.kind, array.dtype.itemsize
    exact = exact or not array.ndim
    if kind == "c":
        wide = exact and size > 8
        array = read_as(array, np.dtype(np.complex128 if wide else np.complex64), where=where)
        array = array[..., None].view(np.float64 if wide else np.float32)
    elif kind == "f":
        wide = exact and size > 4
        dtype = np.float16 if size == 2 else np.float64 if wide else np.float32
        array = read_as(array, np.dtype(dtype), where=where)
    elif kind == "u" and size in {2, 4}:
        array = array.astype(np.int32 if size == 2 else np.int64)
    elif kind in "bi" or (kind == "u" and size == 1):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    else:
        raise SourceError(
            f"{where} has dtype {array.dtype}, which cannot be stored",
            hint="Return bool, integers that fit int64, or floating point numbers",
        )
    return array, array.dtype.name

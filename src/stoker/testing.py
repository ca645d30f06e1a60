"""For tests of your own: conformance checks for sources and encoders, made-up data, and faults on demand."""

from __future__ import annotations

import copy
import itertools
import math
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import yaml
from numpy.typing import NDArray

from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.errors import ConfigError, StokerError
from stoker.schema import (
    FLOATS,
    LENGTHS_SUFFIX,
    SHAPE_SUFFIX,
    Field,
    Json,
    Sample,
    Schema,
    canonical_json,
    check_sample,
    unfolded,
)
from stoker.sources.pickling import dumps
from stoker.sources.protocol import BatchSource, RowSource, Source, SourceIdentity, locate

if TYPE_CHECKING:
    import torch
    from torch import Tensor


__all__ = ["Fault", "FaultySource", "check_encoder", "check_source", "write_dexycb"]

_Thing = TypeVar("_Thing")


def check_source(source: Source, *, samples: int = 4) -> None:
    """Assert the promises of `Source`, on some samples spread over all.

    Args:
        source: The source to check.
        samples: How many samples to read.

    Raises:
        AssertionError: Names the promise that is broken.

    Examples:
        >>> import stoker, torch
        >>> from stoker.testing import check_source
        >>> check_source(stoker.TorchSource([{"x": torch.ones(2)}] * 4))
    """
    assert isinstance(source, Source), f"{type(source).__name__} lacks a method of Source"
    count = len(source)
    assert count > 0, "a source has at least one sample; raise SourceError instead"
    schema = source.schema()
    assert schema, "schema() has no field"
    assert source.schema() == schema, "schema() differs from call to call"
    _check_numbering(source, count)
    _check_identity(source.identity(), count)
    assert source.identity() == source.identity(), "identity() differs from call to call"
    copied = _copied(source)
    numbers = sorted({round(i * (count - 1) / max(1, samples - 1)) for i in range(max(1, samples))})
    first = {number: {k: v.copy() for k, v in source.read(number).items()} for number in numbers}
    for number, sample in first.items():
        check_sample(sample, schema, where=f"sample {number}")
    for number in reversed(numbers):
        again = source.read(number)
        assert _same(first[number], again), f"sample {number} differs when it is read again in another order"
        _scribble(again)
        assert _same(first[number], source.read(number)), (
            f"sample {number} changes when its arrays are written to"
        )
        _check_ranges(source, number, first[number], schema)
    _check_many(source, first)
    _check_into(source, first)
    _check_copy(source, copied, first)
    _check_copy(source, _copied(source), first)
    for number in (-1, count):
        try:
            source.read(number)
        except (IndexError, StokerError):
            continue
        raise AssertionError(f"read({number}) answers although there are {count} samples; raise IndexError")


def _check_many(source: Source, first: dict[int, Sample]) -> None:
    """Check that a sample read with others is what it is alone, for sources that read several at once."""
    if not isinstance(source, BatchSource):
        return
    for number, sample in first.items():
        numbers = range(max(0, number - 2), min(len(source), number + 3))
        many = source.read_many(numbers)
        place = number - numbers.start
        assert many is None or _same(sample, {name: array[place, ...] for name, array in many.items()}), (
            f"sample {number} differs between read() and read_many({numbers})"
        )


def _check_into(source: Source, first: dict[int, Sample]) -> None:
    """Check that a sample is the same in arrays of the caller, for sources that can put it there."""
    if not isinstance(source, RowSource):
        return
    for number, sample in first.items():
        around = {name: np.stack([_others(array)] * 3) for name, array in sample.items()}
        found = source.read_into(number, {name: array[1, ...] for name, array in around.items()})
        got = {name: array[1, ...] for name, array in around.items()} if found is None else found
        assert _same(sample, got), f"sample {number} differs between read() and read_into()"
        for name, array in around.items():
            assert array[::2].tobytes() == 2 * _others(sample[name]).tobytes(), (
                f"read_into() of sample {number} writes outside of the row of field {name!r}"
            )


def _others(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the same shape and dtype in which every byte is another."""
    data = np.frombuffer(array.tobytes(), np.uint8)
    return np.frombuffer((data ^ 1).tobytes(), array.dtype).reshape(array.shape)


def _check_numbering(source: Source, count: int) -> None:
    """Runs cover all samples once, in order, inside parts; keys are stable strings."""
    keys = list(source.keys())
    assert len(keys) == count, f"keys() gives {len(keys)} keys for {count} samples"
    assert all(isinstance(key, str) for key in keys), "keys() must be strings"
    assert list(source.keys()) == keys, "keys() differ from call to call"
    runs = list(source.runs())
    assert [n for run in runs for n in run] == list(range(count)), (
        "runs() must cover every sample once and in order"
    )
    assert all(len(run) > 0 for run in runs), "runs() holds an empty range"
    edges = set(itertools.accumulate(part.count for part in source.identity().parts))
    for run in runs:
        crossed = [edge for edge in edges if run.start < edge < run.stop]
        assert not crossed, f"{run} crosses from one part to the next at sample {crossed[0]}"


def _check_identity(identity: SourceIdentity, count: int) -> None:
    """Counts add up, names are relative and unique, nothing tells where the data lies."""
    total = sum(part.count for part in identity.parts)
    assert total == count, f"identity() has parts of {total} samples in all, len() is {count}"
    assert all(part.count > 0 for part in identity.parts), "identity() has a part without samples"
    names = [part.name for part in identity.parts]
    assert len(set(names)) == len(names), f"parts share a name: {sorted(names)}"
    assert all(part.files or part.digest is not None for part in identity.parts), (
        "a part without files needs a digest of its content"
    )
    files = [file for part in identity.parts for file in part.files]
    for file in files:
        plain = PurePosixPath(file.name)
        relative = not plain.is_absolute() and ".." not in plain.parts
        assert relative, f"file name {file.name!r} is not relative"
        assert file.path.exists(), f"identity() names {file.path}, which does not exist"
    told: list[Json] = [identity.kind, dict(identity.settings)]
    told.extend([part.name, dict(part.values), part.selection] for part in identity.parts)
    text = canonical_json(told)  # raises for what JSON cannot hold
    for path in {str(file.path.parent) for file in files}:
        assert path == "/" or path not in text, (
            f"identity() holds the absolute path {path}; moving data would miss"
        )
    for value in _texts(told):
        assert not PurePosixPath(value).is_absolute(), f"identity() holds the absolute path {value!r}"


def _texts(value: Json) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for inner in value.values() for text in _texts(inner)]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else []


def _check_ranges(source: Source, number: int, whole: Sample, schema: Schema) -> None:
    """`start:stop` is the slice of axis 0 of fields with time; other fields come in full."""
    whole = unfolded(whole, schema)
    lengths = [whole[name].shape[0] for name, field in schema.items() if field.evolves]
    length = min(lengths, default=4)
    for start, stop in ((0, 1), (1, None), (None, length - 1), (length // 2, length // 2 + 2), (0, length)):
        part = unfolded(source.read(number, start, stop), schema)
        wanted = {name: array[start:stop] if schema[name].evolves else array for name, array in whole.items()}
        assert _same(wanted, part), f"read({number}, {start}, {stop}) is not that slice of read({number})"


def _check_copy(source: Source, copied: Source, first: Mapping[int, Sample]) -> None:
    """Check that a copy by cloudpickle, before or after reading, is the same source."""
    assert len(copied) == len(source), "len() changes when copied"
    assert copied.schema() == source.schema(), "schema() changes when copied"
    assert copied.identity() == source.identity(), "identity() changes when copied"
    assert list(copied.keys()) == list(source.keys()), "keys() change when copied"
    assert list(copied.runs()) == list(source.runs()), "runs() change when copied"
    for number, sample in first.items():
        assert _same(sample, copied.read(number)), f"sample {number} differs in a copy"


def _copied(thing: _Thing) -> _Thing:
    """Return a copy that went the way of copies for worker processes."""
    return cloudpickle.loads(dumps(thing))


def _same(one: Sample, other: Sample) -> bool:
    """Equal names, dtypes, shapes and bits."""
    return one.keys() == other.keys() and all(
        a.dtype == other[name].dtype and a.shape == other[name].shape and a.tobytes() == other[name].tobytes()
        for name, a in one.items()
    )


def _scribble(sample: Sample) -> None:
    for array in sample.values():
        if array.flags.writeable:
            array[...] = 1


def check_encoder(
    encoder: Encoder, sample_schema: Schema, *, steps: int = 8, tolerance: float = 1e-4, seed: int = 0
) -> None:
    """Assert the promises of `Encoder` on made-up samples of `sample_schema`, on the CPU.

    Args:
        encoder: Left as it was.
        sample_schema: Fields of the samples it is made for.
        steps: Length of ragged fields, and of the time range that independent steps are tried on.
        tolerance: Relative to the largest value: how far a record may move when its neighbors change.
        seed: Of the made-up samples.

    Raises:
        AssertionError: Names the promise that is broken.

    Examples:
        >>> import stoker, torch
        >>> from stoker.schema import Field
        >>> from stoker.testing import check_encoder
        >>> encoder = stoker.ModuleEncoder(torch.nn.Linear(8, 2), field="x")
        >>> check_encoder(encoder, {"x": Field(shape=(8,), dtype="float32")})
    """
    import torch

    from stoker.encoders.weights import on_device

    assert isinstance(encoder, Encoder), f"{type(encoder).__name__} lacks a method of Encoder"
    with on_device(encoder, torch.device("cpu")):
        _check_promises(encoder, sample_schema, steps=steps, tolerance=tolerance, seed=seed)


def _check_promises(
    encoder: Encoder, sample_schema: Schema, *, steps: int, tolerance: float, seed: int
) -> None:
    batch_size = _check_batch_size(encoder, sample_schema)
    schema = encoder.schema(sample_schema)
    assert schema, "schema() has no field"
    assert encoder.schema(sample_schema) == schema, "schema() differs from call to call"
    _check_encoder_identity(encoder)
    batch = _made_up(sample_schema, batch_size, steps, seed)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    first = encoder.encode(batch)
    assert _equal(batch, before), "encode() writes to its input"
    _check_record(_unpadded(first, batch, schema), schema, _rows(batch), steps)
    kept = {name: tensor.clone() for name, tensor in first.items()}
    assert _equal(encoder.encode(batch), kept), "encode() differs from call to call for equal input"
    other = _made_up(sample_schema, batch_size, steps, seed + 1)
    encoder.encode(other)
    assert _equal(first, kept), "encode() reuses the memory of an earlier result"
    unpadded = _unpadded(kept, batch, schema)
    _check_neighbours(encoder, schema, batch, other, unpadded, tolerance)
    if batch_size.lengths:
        _check_padding(encoder, schema, batch, unpadded, tolerance)
    elif encoder.independent_steps:
        _check_steps(encoder, sample_schema, batch, kept, tolerance)
    assert _equal(encoder.encode(batch), kept), "encode() keeps a state between calls"


def _check_batch_size(encoder: Encoder, sample_schema: Schema) -> EncodeBatchSize:
    size = encoder.encode_batch_size(sample_schema)
    assert size == encoder.encode_batch_size(sample_schema), "encode_batch_size() differs from call to call"
    assert size.samples >= 1, f"encode_batch_size() has {size.samples} samples"
    ragged = any(field.ragged for field in sample_schema.values())
    assert ragged or not size.lengths, "encode_batch_size() has lengths for samples of one length"
    if ragged and not size.lengths:
        assert size.samples == 1, (
            "samples with ragged fields are encoded one by one: EncodeBatchSize(samples=1); or have lengths"
        )
    if size.steps is not None:
        assert size.steps >= 1, f"encode_batch_size() has {size.steps} steps"
        assert size.samples == 1, "encode_batch_size() cuts over time, so it must have one sample"
        assert encoder.independent_steps, (
            "encode_batch_size() cuts over time although steps are not independent"
        )
    return size


def _check_encoder_identity(encoder: Encoder) -> None:
    """Weights are there, identity is stable, says what it must, and changes with the weights."""
    import torch

    identity = encoder.identity()
    missing = {"class", "config", "weights", "version"} - identity.keys()
    assert not missing, f"identity() lacks {sorted(missing)}"
    canonical_json(identity)
    assert encoder.identity() == identity, "identity() differs from call to call"
    assert _copied(encoder).identity() == identity, "identity() changes when copied"
    weights = encoder.weights()
    for name, tensor in weights.items():
        assert isinstance(name, str), f"weight names are strings, {name!r} is not"
        absent = tensor.is_meta or torch.nn.parameter.is_lazy(tensor)
        assert not absent, f"weight {name!r} has no value yet; run one sample first"
    filled = [name for name, tensor in weights.items() if tensor.numel()]
    for name in {filled[0], filled[-1]} if filled else ():
        tensor = weights[name]
        changed = copy.deepcopy(encoder)
        weight = changed.weights()[name]
        with torch.no_grad():
            weight.view(-1)[:1] = weight.view(-1)[:1].logical_not().to(weight.dtype)
        again = changed.weights()[name]
        assert not torch.equal(again, tensor), (
            f"weights() gives copies; {name!r} of the encoder itself is unknown"
        )
        assert changed.identity() != identity, f"identity() stays when weight {name!r} changes"


def _made_up(schema: Schema, batch_size: EncodeBatchSize, steps: int, seed: int) -> dict[str, Tensor]:
    """Return one encode batch of random samples; fields with time have `batch_size.steps` where cut."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    batch: dict[str, Tensor] = {}
    made: dict[str, Tensor] = {}
    for name, field in schema.items():
        shape = list(field.shape)
        sizes = field.made_up_sizes(steps)
        if field.ragged:
            shape[0] = math.prod(sizes) if sizes else steps
        elif field.time and batch_size.steps is not None:
            shape[0] = min(batch_size.steps, shape[0])
        size = (batch_size.samples, *shape)
        dtype: torch.dtype = getattr(torch, field.dtype)
        if field.dtype in FLOATS:
            batch[name] = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        else:
            batch[name] = torch.randint(0, 2, size, generator=generator, device="cpu").to(dtype)
        if field.folded:
            made[name + SHAPE_SUFFIX] = torch.tensor([sizes], device="cpu")
    if batch_size.lengths:
        padded = batch_size.padded(steps) or batch_size.lengths[-1]
        rows = batch_size.samples
        lengths = torch.randint(1, padded + 1, (rows,), generator=generator, device="cpu")
        for name in [name for name, field in schema.items() if field.ragged]:
            shape = (rows, padded, *schema[name].shape[1:])
            whole = torch.zeros(shape, dtype=batch[name].dtype, device="cpu")
            for row, length in enumerate(lengths.tolist()):
                whole[row, :length] = batch[name][row, torch.arange(length, device="cpu") % steps]
            batch[name], made[name + LENGTHS_SUFFIX] = whole, lengths.clone()
    return batch | made


def _unpadded(record: Mapping[str, Tensor], batch: Mapping[str, Tensor], schema: Schema) -> dict[str, Tensor]:
    """Return what an encoder gave with zeros behind the end of each sample, where samples are padded."""
    import torch

    given = [name for name in batch if name.endswith(LENGTHS_SUFFIX)]
    found = dict(record)
    for name, field in schema.items():
        if not (given and field.ragged and name in record):
            continue
        key = name + LENGTHS_SUFFIX
        lengths = found.pop(key, batch.get(key, batch[given[0]]))
        assert int(lengths.max()) <= record[name].shape[1], (
            f"field {name!r} has {record[name].shape[1]} rows for a sample of {int(lengths.max())}; return "
            f"{key!r} where an output is shorter than the input"
        )
        real = torch.arange(record[name].shape[1], device="cpu")[None] < lengths[:, None]
        real = real.reshape(*real.shape, *([1] * (record[name].ndim - 2)))
        found[name] = torch.where(real, record[name], torch.zeros_like(record[name]))
    return {name: tensor for name, tensor in found.items() if name not in given}


def _rows(batch: Mapping[str, Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def _check_record(record: Mapping[str, Tensor], schema: Schema, rows: int, steps: int) -> None:
    """Fields, shapes, dtypes and values as declared."""
    import torch

    assert record.keys() == schema.keys(), f"encode() gives {sorted(record)}, schema() has {sorted(schema)}"
    for name, field in schema.items():
        tensor = record[name]
        assert tensor.shape[0] == rows, f"field {name!r} has {tensor.shape[0]} rows for {rows} samples"
        _check_shape(name, tuple(tensor.shape[1:]), field)
        assert tensor.dtype == getattr(torch, field.dtype), (
            f"field {name!r} is {tensor.dtype}, not {field.dtype}"
        )
        assert tensor.device.type == "cpu", (
            f"field {name!r} is on {tensor.device}, not on the encoder's device"
        )
        assert not tensor.requires_grad, f"field {name!r} requires a gradient; encode under torch.no_grad()"
        assert not tensor.is_floating_point() or bool(tensor.isfinite().all()), (
            f"field {name!r} is not finite"
        )


def _check_shape(name: str, shape: tuple[int, ...], field: Field) -> None:
    free = field.ragged or field.time  # a time range is shorter than a whole sample
    compared = (shape[1:], field.shape[1:]) if free and shape else (shape, field.shape)
    assert compared[0] == compared[1], f"field {name!r} has shape {shape}, schema() says {field.shape}"


def _check_neighbours(
    encoder: Encoder,
    schema: Schema,
    batch: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    tolerance: float,
) -> None:
    """Each sample keeps its record when all others of its batch are replaced, or are zeros (padding)."""
    import torch

    rows = _rows(batch)
    zeros = {
        name: torch.ones_like(tensor) if name.endswith(LENGTHS_SUFFIX) else torch.zeros_like(tensor)
        for name, tensor in batch.items()
    }
    for row in sorted({0, rows - 1}) if rows > 1 else ():
        for fill in (other, zeros):
            mixed = {name: tensor.clone() for name, tensor in fill.items()}
            for name, tensor in batch.items():
                mixed[name][row] = tensor[row]
            found = _unpadded(encoder.encode(mixed), mixed, schema)
            for name, tensor in kept.items():
                far = _distance(found[name][row], tensor[row])
                assert far <= tolerance, (
                    f"field {name!r} of a sample moves by {far:.1e} of its largest value when its neighbors "
                    "change; normalize over the sample, not over the batch"
                )


def _check_padding(
    encoder: Encoder,
    schema: Schema,
    batch: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    tolerance: float,
) -> None:
    """Each sample has the record that it has when it is encoded alone, without padding."""
    padded = [name for name in batch if name + LENGTHS_SUFFIX in batch]
    for row in range(min(4, _rows(batch))):
        length = int(batch[padded[0] + LENGTHS_SUFFIX][row])
        one = {name: tensor[row : row + 1].clone() for name, tensor in batch.items()}
        alone = one | {name: one[name][:, :length].clone() for name in padded}
        found = _unpadded(encoder.encode(alone), alone, schema)
        for name, tensor in found.items():
            in_batch = kept[name][row : row + 1]
            if schema[name].ragged:
                in_batch = in_batch[:, : tensor.shape[1]]
            far = _distance(in_batch, tensor)
            assert far <= tolerance, (
                f"field {name!r} of a sample of {length} rows moves by {far:.1e} of its largest value when "
                "it is padded; mask the padding by the lengths"
            )


def _check_steps(
    encoder: Encoder,
    sample_schema: Schema,
    batch: Mapping[str, Tensor],
    kept: Mapping[str, Tensor],
    tolerance: float,
) -> None:
    """Check that a range of time steps encoded alone gives that range of all steps."""
    timed = [name for name, field in sample_schema.items() if field.time]
    assert timed, "independent_steps is True, and no field has time"
    schema = encoder.schema(sample_schema)
    length = min(batch[name].shape[1] for name in timed)
    low, high = length // 3, max(length // 3 + 1, 2 * length // 3)
    cut = {name: tensor[:, low:high].clone() if name in timed else tensor for name, tensor in batch.items()}
    found = encoder.encode(cut)
    for name, field in schema.items():
        wanted = kept[name][:, low:high] if field.time else kept[name]
        assert found[name].shape == wanted.shape, (
            f"field {name!r} of steps {low}:{high} has shape {tuple(found[name].shape)}, expected "
            f"{tuple(wanted.shape)}; independent_steps is not true"
        )
        far = _distance(found[name], wanted)
        assert far <= tolerance, (
            f"field {name!r} moves by {far:.1e} of its largest value when steps {low}:{high} are encoded "
            "alone; independent_steps is not true"
        )


def _distance(one: Tensor, other: Tensor) -> float:
    """Largest difference relative to the largest value of `other`."""
    if not one.numel():
        return 0.0
    scale = max(float(other.double().abs().max()), 1e-12)
    value = float((one.double() - other.double()).abs().max()) / scale
    return value if math.isfinite(value) else math.inf


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


# ----------------------------------------------------------------------------------------------------------
# A small made-up data set in DexYCB's layout: noise for images, and labels that agree with each other.


SERIALS = (
    "836212060125", "839512060362", "840412060917", "841412060263",
    "932122060857", "932122060861", "932122061900", "932122062010",
)  # fmt: skip


def write_dexycb(  # noqa: PLR0913 - how many of each, all by name
    root: Path,
    *,
    subjects: int = 2,
    sequences: int = 5,
    cameras: int = 2,
    frames: int = 2,
    size: tuple[int, int] = (48, 64),
    seed: int = 0,
) -> Path:
    """Write a small made-up data set in DexYCB's layout, and return its folder. It needs Pillow.

    Images are noise. The first frame of each sequence shows no hand. `joint_2d` is the projection of
    `joint_3d` by the camera that `calibration/` has for the images.

    Args:
        root: Folder to write to; it is made.
        subjects: People.
        sequences: Sequences of each person.
        cameras: Cameras of each sequence, 8 at most.
        frames: Frames of each camera.
        size: (height, width) in pixels; the original has (480, 640).
        seed: Of all random numbers.

    Returns:
        `root`.

    Examples:
        >>> import stoker
        >>> from pathlib import Path
        >>> from stoker.testing import write_dexycb
        >>> folder = write_dexycb(Path("dexycb"), subjects=1, sequences=1, frames=3)
        >>> len(stoker.ImageSource(folder, "dexycb"))  # one sequence, two cameras
        6
    """
    random = np.random.default_rng(seed)
    for camera in range(cameras):
        _yaml(_intrinsics(root, camera), {"color": _camera(camera, size), "depth": _camera(camera, size)})
    for subject in range(subjects):
        calibration = f"20200709_{subject:06d}"
        betas = random.normal(size=10).round(6).tolist()
        _yaml(root / f"calibration/mano_{calibration}_right/mano.yml", {"betas": betas})
        for sequence in range(sequences):
            folder = root / f"20200709-subject-{subject + 1:02d}" / f"20200709_{sequence:06d}"
            ids = [1 + (sequence + k) % 21 for k in range(2 + sequence % 3)]
            meta = {
                "num_frames": frames,
                "serials": list(SERIALS[:cameras]),
                "mano_calib": [f"{calibration}_right"],
                "mano_sides": ["right"],
                "ycb_ids": ids,
                "ycb_grasp_ind": sequence % len(ids),
            }
            _yaml(folder / "meta.yml", meta)
            for camera in range(cameras):
                for frame in range(frames):
                    place = folder / SERIALS[camera]
                    _write_frame(place, frame, random, _camera(camera, size), len(ids), size)
    return root


def _intrinsics(root: Path, camera: int) -> Path:
    return root / f"calibration/intrinsics/{SERIALS[camera]}_640x480.yml"


def _camera(camera: int, size: tuple[int, int]) -> dict[str, float]:
    height, width = size
    focal = 0.96 * width + camera
    return {"fx": focal, "fy": focal + 0.5, "ppx": width / 2 - 1.5, "ppy": height / 2 + 0.5}


def _write_frame(
    folder: Path,
    frame: int,
    random: np.random.Generator,
    camera: dict[str, float],
    objects: int,
    size: tuple[int, int],
) -> None:
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / f"color_{frame:06d}.jpg", quality=90)
    depth = random.integers(400, 1500, size, dtype=np.uint16)
    Image.fromarray(depth).save(folder / f"aligned_depth_to_color_{frame:06d}.png")
    joints = random.uniform((-0.1, -0.1, 0.6), (0.1, 0.1, 0.9), (1, 21, 3)).astype(np.float32)
    labels: dict[str, NDArray[np.generic]] = {
        "seg": random.integers(0, objects + 1, size, dtype=np.uint8),
        "pose_y": random.normal(size=(objects, 3, 4)).astype(np.float32),
        "pose_m": random.normal(size=(1, 51)).astype(np.float32),
        "joint_3d": joints,
        "joint_2d": _projected(joints, camera),
    }
    if frame == 0:  # DexYCB says so with -1 throughout
        for name in ("pose_m", "joint_3d", "joint_2d"):
            labels[name] = np.full_like(labels[name], -1)
    np.savez_compressed(folder / f"labels_{frame:06d}.npz", **labels)  # pyright: ignore[reportArgumentType]


def _projected(joints: NDArray[np.float32], camera: dict[str, float]) -> NDArray[np.float32]:
    x, y, z = np.moveaxis(joints.astype(np.float64), -1, 0)
    flat = [camera["fx"] * x / z + camera["ppx"], camera["fy"] * y / z + camera["ppy"]]
    return np.stack(flat, -1).astype(np.float32)


def _yaml(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))


# ----------------------------------------------------------------------------------------------------------
# Faults on demand: wrap a source, and the samples you name hang, kill, raise, are slow, or come out wrong.


Kind: TypeAlias = Literal["hang", "kill", "raise", "slow", "corrupt"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Faults while some samples are read.

    - `hang` sleeps for an hour.
    - `kill` ends the reading process with SIGKILL, as a crash or a lack of memory does.
    - `raise` raises `error`.
    - `slow` sleeps for `seconds` and then reads.
    - `corrupt` changes one byte of the first field without an error, as a medium without checksums does.

    Raises:
        ConfigError: `kind` is unknown, or `attempts` is below 1.

    Examples:
        >>> from stoker.testing import Fault
        >>> Fault("slow", [3, 5], seconds=0.1).attempts is None  # at each read
        True
    """

    kind: Kind
    """What happens: `hang`, `kill`, `raise`, `slow` or `corrupt`."""
    samples: Collection[int]
    """Sample indices."""
    attempts: int | None = None
    """How many times it happens to each of these samples, over all processes; None: always."""
    seconds: float = 1.0
    """Seconds that `slow` sleeps."""
    error: Exception | None = None
    """What `raise` raises; None: an OSError as of a disk that fails (EIO), which is tried again."""

    def __post_init__(self) -> None:
        """Refuse unknown kinds and numbers out of range."""
        if self.kind not in get_args(Kind):
            raise ConfigError(
                f"the fault {self.kind!r} is not known", hint=f"Expected {', '.join(get_args(Kind))}"
            )
        if self.attempts is not None and self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}", hint="Expected 1 or more, or None for always")


class FaultySource:
    """Source that fails where it is told to, and is `source` in all else, its identity too.

    So a cache that is filled through it has the fingerprint of one filled without, to be compared with it.

    Args:
        source: What to read from.
        faults: What happens; of several faults for one sample, the first that is not used up.
        folder: Where attempts are counted, in small files, since workers are processes that get replaced.
            Needed where a fault has `attempts`.

    Raises:
        ConfigError: `folder` is needed and not given.

    Examples:
        >>> import stoker, torch
        >>> from stoker.testing import Fault, FaultySource
        >>> source = stoker.TorchSource([{"x": torch.ones(2)}] * 4)
        >>> faulty = FaultySource(source, [Fault("raise", [2], error=ValueError("bad sample"))])
        >>> cache = stoker.precompute(faulty, None, "caches", name="ones", max_quarantined=0.5)
        >>> len(cache), cache.quarantined[2].error
        (3, 'item 2 of builtins.list: ValueError: bad sample')
    """

    def __init__(self, source: Source, faults: Sequence[Fault], *, folder: str | Path | None = None) -> None:
        if folder is None and any(fault.attempts is not None for fault in faults):
            raise ConfigError(
                "attempts are counted over processes, in files", hint="Give folder=, as pytest's tmp_path"
            )
        self._source = source
        self._faults = list(faults)
        self._folder = None if folder is None else Path(folder)
        self._maker = os.getpid()

    def __len__(self) -> int:
        return len(self._source)

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read as the source does, unless a fault is due; each call is an attempt, also for a part."""
        due = (i for i, fault in enumerate(self._faults) if index in fault.samples)
        place = next((i for i in due if self._take(i, index)), None)
        fault = None if place is None else self._faults[place]
        if fault is not None:
            self._happen(fault, index)
        whole = start is None and stop is None
        sample = self._source.read(index) if whole else self._source.read(index, start, stop)
        return _changed(sample) if fault is not None and fault.kind == "corrupt" else sample

    def locate(self, index: int) -> str:
        """Return what the source returns."""
        return locate(self._source, index)

    def runs(self) -> Sequence[range]:
        """Return what the source returns."""
        return self._source.runs()

    def keys(self) -> Sequence[str]:
        """Return what the source returns."""
        return self._source.keys()

    def identity(self) -> SourceIdentity:
        """Return what the source returns."""
        return self._source.identity()

    def schema(self) -> Schema:
        """Return what the source returns."""
        return self._source.schema()

    def _take(self, place: int, number: int) -> bool:
        """Return True if the fault is still due for a sample; counts this attempt."""
        attempts = self._faults[place].attempts
        if attempts is None or self._folder is None:
            return True
        for attempt in range(attempts):
            try:
                (self._folder / f"fault{place}-sample{number}-{attempt}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def _happen(self, fault: Fault, number: int) -> None:
        if fault.kind == "raise":
            raise fault.error or OSError(5, f"injected input/output error at sample {number}")
        if fault.kind == "kill":
            if os.getpid() == self._maker:
                raise ConfigError(
                    "the fault 'kill' would end the process that made the source",
                    hint="Read in another one, with workers=1 or more",
                )
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind in ("hang", "slow"):
            time.sleep(3600.0 if fault.kind == "hang" else fault.seconds)


def _changed(sample: Sample) -> Sample:
    """Return the sample with the top byte of its first value changed."""
    name = next(iter(sample))
    array = sample[name].copy(order="C")
    if array.nbytes:
        array.reshape(-1).view("uint8")[array.itemsize - 1] ^= 1
    return {**sample, name: array}

"""Serve a cache as batches, from the fastest tier that holds the records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from numpy.typing import NDArray

from stoker.errors import ConfigError, ResourceError, UncountedError, arg
from stoker.loader import state as states
from stoker.loader.choose import describe_choices, resolve_choices
from stoker.loader.options import Options, check_cache, refuse_workers, take_dataloader_arguments
from stoker.loader.order import order_text
from stoker.loader.prefetch import PendingStrip, Strips
from stoker.loader.records import joined_indices
from stoker.loader.serving import FillServing, Repairer, Serving, begin_serving
from stoker.loader.state import EpochIterable, EpochPlace
from stoker.loader.transform import BatchFinisher, ColumnAdder, FixedBatch, Transform
from stoker.loader.zipped import BatchZipper, Member, Zip, members_of
from stoker.plan.resources import host_memory, is_out_of_memory
from stoker.store.access import Table
from stoker.store.cache import open_cache
from stoker.store.storage import display_path
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.loader.assembly import Ragged
    from stoker.loader.batch import Windows
    from stoker.loader.choose import Choice, Choices
    from stoker.loader.design import Design
    from stoker.loader.order import Weights
    from stoker.loader.outputs import Normalization
    from stoker.monitor.meter import StallMeter
    from stoker.plan import Plan
    from stoker.schema import DtypeName, Json
    from stoker.sources.torch_items import ItemStructure
    from stoker.store import Cache
    from stoker.store.shard import Verify


_ORDER_WORDS = {
    "full": "shuffled",
    "block": "shuffled in blocks",
    "bucket": "shuffled by length",
    "static": "shuffled per rank",
    "sequential": "in order",
}


class Loader(EpochIterable):
    """Iterable over batches, like a `DataLoader`; the same bytes whatever tier they come from.

    After a finished pass comes the next epoch; an abandoned pass starts its epoch again. Batches own their
    memory. Those of windows are `WindowBatch`es (`PointBatch`es of particles and meshes), others
    `RecordBatch`es.
    """

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        cache: Cache | Zip | str | Path,
        batch_size: int = 1,
        *,
        shuffle: bool | str = False,
        windows: Windows | None = None,
        choose: Mapping[Any, Choice] | None = None,
        tier: str = "auto",
        device: str | torch.device = "cpu",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        partition: str = "global",
        indices: Sequence[int] | NDArray[Any] | None = None,
        weights: Sequence[float] | NDArray[Any] | Weights | None = None,
        dtype: DtypeName | None = None,
        normalize: Mapping[str, Normalization] | None = None,
        ragged: Ragged = "list",
        batch_by: str | None = None,
        batch_tokens: int | None = None,
        static: bool = False,
        drop_last: bool | None = None,
        reserve_bytes: int | None = None,
        verify: Verify = "always",
        transforms: Transform | Sequence[Transform] = (),
        meter: StallMeter | None = None,
        **dataloader: Any,
    ) -> None:
        """Decide what is served from where; records are read when iteration begins.

        Args:
            cache: What to serve, its path or URL, or caches joined by `stoker.zip`. One that is being filled
                (`precompute(wait=False)`) is served meanwhile, in block order; another with records missing
                needs a filler, which then encodes them first.
            batch_size: Examples in a batch of this rank: windows if `windows` is given, else records.
            shuffle: False, as in a `DataLoader`: by sample index. True: all examples, again in each epoch.
                `"block"`, `"block(64,4096)"`: blocks of 64 neighbors, and examples within windows of 4,096,
                for slow storage. `"bucket"`, `"bucket(50)"`: records of similar length in a batch, sorted
                within 50 batches.
            windows: How trajectories are cut; None serves entire records.
            choose: What part of each record is read; another part in every epoch. `Rows`, `Span` or `OneOf`
                by field, or by a tuple of fields that share it. See docs/how-to/choose.md.
            tier: `auto`, or the tier that must hold everything: `device` (or `gpu`), `host` (or `ram`),
                `disk`, `encode`.
            device: Where batches are wanted: `cpu`, `cuda[:i]`, or `auto`: a GPU if the machine has one.
            seed: Decides the shuffle and all other random draws, with the epoch.
            rank: This process among those that train together, from 0: it gets its part of each global batch.
            world_size: Processes that train together.
            partition: `"global"`: a global batch has examples of the entire set, and each rank a part of it.
                `"static"`: each rank keeps one part of the set for all epochs, and shuffles that.
            indices: Sample indices to serve, repeats allowed; None: all that are stored.
            weights: Draw with replacement, in proportion to one weight per record (or per sample, where some
                are quarantined or not encoded yet); or `Weights`.
            dtype: Hand floats out as this dtype instead of the stored one, `"bfloat16"` or `torch.bfloat16`.
            normalize: By field how values are normalized on the way, in float32 and on every tier alike.
            ragged: Entire records of varying length as `list`, `pad`, `pack`, or `Pad(to=..., value=...)`.
            batch_by: What examples of a batch have in common: `"shape"`, all of their shapes; the name of a
                field of varying shape, its shape; or of an integer field or joined column, its value. Fields
                whose shape is then the same are stacked to `(B, *shape)`. See docs/how-to/batching.md.
            batch_tokens: Tokens of a batch at most, in place of `batch_size`: entire records of fields of one
                varying length, packed to `(total, *step)`, with `cu_seqlens`, `position_ids`, `max_seqlen`.
            static: Every batch at the same addresses, overwriting the last; device tier only.
            drop_last: Leave out a short last batch. None: only with several ranks and shuffled, and never
                with `batch_by` or `batch_tokens`.
            reserve_bytes: Bytes of the device's memory to leave to the model; None: automatic.
            verify: When the disk tier compares what it reads with checksums: `always`, at the `first` read
                of each block by this process, or `off`. The other tiers do once, as they are filled.
            transforms: Functions of a batch, called in order; of `(batch, keys)`, where `keys` holds a random
                int64 per example; or of fields, `{"image": function}`. See docs/how-to/transforms.md.
            meter: Told how long each batch was waited for.
            **dataloader: Arguments of `torch.utils.data.DataLoader`; those without a meaning here say so.

        Raises:
            ConfigError: A setting does not fit the cache or another one.
            IncompleteError: Records are missing and no filler can encode them.
            ResourceError: `tier` cannot hold the records, or `device` is not there.

        Examples:
            >>> import stoker, torch
            >>> data = [{"x": torch.tensor([float(i)])} for i in range(10)]
            >>> cache = stoker.precompute(data, None, "caches", name="numbers")
            >>> loader = stoker.Loader(cache, batch_size=4, shuffle=True, seed=1)
            >>> [batch["x"].shape for batch in loader]
            [torch.Size([4, 1]), torch.Size([4, 1]), torch.Size([2, 1])]
            >>> loader.epoch
            1
        """
        refuse_workers()
        cache = cast("Cache", open_cache(cache) if isinstance(cache, str | Path) and str(cache) else cache)
        main = cache.main if isinstance(cache, Zip) else cache
        check_cache(main)
        timeout_s, pin_memory = take_dataloader_arguments(dataloader, (*Options.__slots__, "shuffle"))
        shuffle = True if weights is not None and isinstance(shuffle, bool) else shuffle  # they are drawn
        options = Options(
            batch_size=batch_size,
            windows=windows,
            choose=cast("Choices", choose),
            tier=tier,
            device=cast(torch.device, device),
            seed=seed,
            rank=rank,
            world_size=world_size,
            order=order_text(shuffle, partition),
            indices=indices if isinstance(cache, Zip) else joined_indices(main, indices),
            weights=cast("Weights | None", weights),
            dtype=cast("str | None", dtype),
            static=static,
            drop_last=drop_last,
            reserve_bytes=reserve_bytes,
            timeout_s=timeout_s,
            verify=verify,
            normalize=normalize,
            ragged=ragged,
            batch_by=batch_by,
            batch_tokens=batch_tokens,
            transforms=cast("tuple[Transform, ...]", transforms),
            pin_memory=pin_memory,
            meter=meter,
        )
        self._begin(cache, options)

    def _begin(self, given: Cache | Zip, options: Options) -> None:
        self._given, self._asked = given, options
        self._names: Mapping[str, str] = {}
        """By field of the first of several caches, the name in batches."""
        members = members_of(given, options) if isinstance(given, Zip) else {}
        cache = given.main if isinstance(given, Zip) else given
        if members:
            first = next(iter(members.values()))
            zipped = _with_choices(first.options.zipped, [*members.values()][1:])
            options, self._names = replace(first.options, zipped=zipped), first.names
        else:
            choose = resolve_choices(options.choose, cache, windowed=options.windowed)
            options = replace(options, choose=choose)
        self._options = options
        self._columns = None if cache.joined is None else ColumnAdder(cache.joined, static=options.static)
        self._fixed = FixedBatch() if options.static and options.transforms else None
        self._repairer = Repairer()
        self._serving: Serving = begin_serving(cache, self._options, self._repairer)
        self._partners = {
            name: (_follower(one.cache, one.options, self._serving.design), one.names)
            for name, one in [*members.items()][1:]
        }
        self._structure: ItemStructure = None
        """That of a dataset's items, which its batches have."""
        self._turn = PendingStrip()
        self._filling_epoch: int | None = None
        """The epoch that is, or was, served while its cache was filled."""
        self._place = EpochPlace()

    @property
    def options(self) -> Options:
        """The arguments that it was made with, by name, checked."""
        return self._options

    @property
    def plan(self) -> Plan:
        """Records by tier and the reasons: as planned, and as they are now once batches were made."""
        return self._serving.plan

    @property
    def dataset(self) -> Any:
        """The `Cache` or `Zip`, under the name that a `DataLoader` has for it."""
        return self._given if isinstance(self._given, Zip) else self._serving.design.cache

    @property
    def members(self) -> dict[str, Loader]:
        """Of caches joined by `stoker.zip`, the loaders of all but the first, each with a plan of its own."""
        return {name: loader for name, (loader, _) in self._partners.items()}

    @property
    def batch_size(self) -> int:
        """Examples in a full batch of this rank; with `batch_tokens`, about those of a batch."""
        return self._serving.design.share.batch_size

    @property
    def drop_last(self) -> bool:
        """True if a short last batch is left out."""
        return self._serving.design.share.drop_last

    @property
    def repaired(self) -> int:
        """Damaged records that this process has encoded again from their source."""
        return self._repairer.records + sum(loader.repaired for loader in self.members.values())

    @property
    def major_faults(self) -> int:
        """Page faults that went to disk since iteration began; more than a few mean that memory is short."""
        return self._serving.faulted

    def __len__(self) -> int:
        """Return the number of batches of this rank in the entire current epoch.

        With `batch_tokens` the next epoch may have a few more or fewer, for each shuffle packs otherwise.

        Raises:
            UncountedError: Windows are cut from trajectories of varying length, not all of which are encoded.
        """
        steps = self._serving.steps(self.epoch)
        if steps is None:
            raise UncountedError(
                f"{self.dataset.path} is being filled, and how many windows its trajectories have is known "
                "once all are",
                hint=f"Iterate without asking for the length, or leave {arg('wait', False)} out",
            )
        return steps

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path of the cache, the settings and the position; a `meter` stays behind."""
        if is_filling(self):
            raise ConfigError(
                f"{self!r} serves a cache that is being filled, which another process cannot follow",
                hint=f"Pickle it when the cache is complete, or leave {arg('wait', False)} out",
            )
        options = replace(self._asked, meter=None)
        return _restored, (self.dataset, options, self._structure, self.state_dict())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory that holds records, and close files. The next pass would fill it again."""
        self._serving.close()
        for loader in self.members.values():
            loader.close()

    def _repr_html_(self) -> str:
        rows = tuple((row.tier, format_count(row.records), format_bytes(row.bytes)) for row in self.plan.rows)
        return Table(f"{self!r}: {self.plan.reason}", ("tier", "records", "bytes"), rows).html()

    def __repr__(self) -> str:
        design, size = self._serving.design, sum(row.bytes for row in self.plan.rows)
        steps, examples = self._serving.steps(self.epoch), format_count(design.examples.count, "example")
        if steps is None:
            examples, batches = "windows still to be counted", "batches"
        else:
            batches = "1 batch" if steps == 1 else f"{format_count(steps)} batches"
        return (
            f"Loader({design.cache.name!r}, {design.cache.fingerprint}, {examples} in {batches} of "
            f"{self._size_text()}, "
            f"{_ORDER_WORDS[design.order.kind.kind]}, {self.plan.tier} tier, {format_bytes(size)})"
        )

    def _size_text(self) -> str:
        options = self._options
        if options.batch_tokens is not None:
            return f"up to {format_count(options.batch_tokens, 'token')}"
        by = "" if options.batch_by is None else f" of one {options.batch_by}"
        return f"{self.batch_size}{by}"

    def state_dict(self, position: tuple[int, int] | None = None) -> dict[str, Json]:
        """Return where to resume: after the batches handed out so far, or after the one at `position`.

        Args:
            position: `batch.position` of a batch, or `loader.position`; None: after the last batch.

        Returns:
            Plain values, which `torch.save` and JSON can keep.

        Examples:
            >>> import stoker, torch
            >>> cache = stoker.precompute([{"x": torch.ones(1)}] * 10, None, "caches", name="ones")
            >>> loader = stoker.Loader(cache, batch_size=4, shuffle=True)
            >>> first = next(iter(loader))
            >>> again = stoker.Loader(cache, batch_size=4, shuffle=True)
            >>> again.load_state_dict(loader.state_dict(first.position))
            >>> len(list(again))  # of three batches in the epoch
            2
        """
        at = self._place.at if position is None else position
        filled = at[1] == 0 and self._filling_epoch not in (None, at[0])
        return states.dump(self._serving.design, at, filled=filled)

    def load_state_dict(self, state: dict[str, Any], *, allow_rebatch: bool = False) -> None:
        """Resume where `state` was taken, at any tier, world size or number of workers.

        Args:
            state: What `state_dict` returned, of this loader or of an equal one.
            allow_rebatch: Accept another global batch; its first example is the next one.

        Raises:
            StaleStateError: The state belongs to another cache, order, seed or batch size.
        """
        self._follow(state)
        place = states.restore(state, self._serving.design, allow_rebatch=allow_rebatch)
        self._place.restore(place)
        self._filling_epoch = place[0] if states.was_filling(state) else None

    def __iter__(self) -> Iterator[Any]:
        """Return one pass over the rest of the epoch: `WindowBatch`es, or `RecordBatch`es without windows."""
        refuse_workers()
        self._place.rewind()
        return self._pass_while_filling() if is_filling(self) else self._pass(self._structure)

    def _pass_while_filling(self) -> Iterator[Any]:
        """As `_pass`, in the order of filling to the end of the epoch, also if the filling ends before."""
        epoch, shared = self._place.at[0], self._options.world_size > 1
        if self._filling_epoch not in (None, epoch) and not self._place.amid:
            self._complete(wait=shared)  # ranks do the same, whichever has a complete cache by now
        self._filling_epoch = epoch
        yield from self._pass(self._structure)
        if not shared:
            with suppress(ConfigError):  # the next pass raises it, if there is one
                self._complete()

    def _pass(self, structure: ItemStructure = None) -> Iterator[Any]:
        # Where to begin is decided with the first batch: trainers make the iterator, then call `set_epoch`.
        epoch, position = last = self._place.begin()
        serving, meter = self._serving, self._options.meter
        partners = self._partners_from(epoch, position)
        finish = BatchFinisher(
            self._options,
            made_on=serving.device,
            columns=self._columns,
            partners=partners,
            fixed=self._fixed,
            structure=structure,
        )
        example_bytes = sum(output.served_bytes for output in serving.design.outputs)
        begin = perf_counter()
        strips = Strips(serving.strips(epoch, position), self._turn)
        try:
            for strip in strips:
                batches = strip.batches
                if strip.tier == "host":
                    batches = serving.prefetcher.of(batches, strip.count, strips)
                place = None
                if finish:
                    batches, place = finish.apply(strip, batches, epoch), finish
                if meter is None:
                    for batch in batches:
                        self._place.at = last = (place or batch).position
                        yield batch
                else:
                    size_bytes = example_bytes * strip.size
                    for batch in batches:
                        self._place.at = last = (place or batch).position
                        meter.waited(perf_counter() - begin)
                        meter.handed(size_bytes, strip.size, strip.tier)
                        yield batch
                        begin = perf_counter()
                serving.prefetcher.ended()
                del strip, batches  # they refer to memory that may be released before the next ones
        except (RuntimeError, MemoryError) as error:
            # Of a device torch's own class is raised: what training finds a batch size with knows that.
            of_device = isinstance(error, torch.OutOfMemoryError) or "CUBLAS" in str(error)
            if of_device or not is_out_of_memory(error):
                raise
            raise self._no_memory(example_bytes) from error
        finally:
            strips.close()
            if partners is not None:
                partners.close()
        if meter is not None:
            meter.ended()
        self._place.end(epoch, last)

    def _no_memory(self, example_bytes: int) -> ResourceError:
        """Return the error for a batch that host memory cannot hold."""
        options, host = self._options, host_memory()
        what, lower = format_count(options.batch_size, "example"), arg("batch_size")
        if options.batch_tokens is not None:
            what, lower = f"up to {format_count(options.batch_tokens, 'token')}", arg("batch_tokens")
        elif example_bytes:  # 0: they differ in length
            what += f" ({format_bytes(options.batch_size * example_bytes)})"
        return ResourceError(
            f"{display_path(self._serving.design.cache.path)}: no memory for the next batch of {what}; "
            f"{format_bytes(host.usable_bytes)} are free ({host.label})",
            hint=f"Lower {lower}{' or the horizon of windows' if options.windows else ''}, or raise the "
            "limits on memory (ulimit -v, that of the container)",
        )

    def _partners_from(self, epoch: int, position: int) -> BatchZipper | None:
        """Return the batches of the other caches from a position on; None: there is one cache."""
        if not self._partners:
            return None
        passes: list[tuple[Iterator[Any], Mapping[str, str]]] = []
        for loader, names in self._partners.values():
            loader._place.restore((epoch, position))
            passes.append((loader._pass(), names))
        return BatchZipper(self._names, passes)

    def _follow(self, state: dict[str, Any]) -> None:
        """Serve while the cache is filled, or from a complete one, as the loader did whose state this is."""
        if not states.was_filling(state):
            self._complete(wait=True)
        elif not is_filling(self):
            self._serving = FillServing(self._serving.design.cache, self._options, self._repairer)

    def _complete(self, *, wait: bool = False) -> None:
        """Serve the cache as a complete one, if it is by now, or when it is."""
        if (cache := self._serving.complete(wait=wait)) is not None:
            self._serving = Serving(cache, self._options, self._repairer)


def _with_choices(zipped: Sequence[str], partners: Sequence[Member]) -> tuple[str, ...]:
    """Return what a state keeps of the other caches, with the parts that are read of their records."""
    chosen = [describe_choices(one.options.choose) for one in partners]
    return tuple(
        text if one is None else f"{text}, choose {one}" for text, one in zip(zipped, chosen, strict=True)
    )


def _follower(cache: Cache, options: Options, design: Design) -> Loader:
    """Return a loader of a cache that serves a partner for each record of another loader, in its order."""
    loader = Loader.__new__(Loader)
    loader._begin(cache, replace(options, follow=design.order))
    return loader


def _restored(cache: Cache, options: Options, structure: ItemStructure, state: dict[str, Any]) -> Loader:
    loader = Loader.__new__(Loader)
    loader._begin(cache, options)
    loader._structure = structure
    loader.load_state_dict(state)
    return loader


# pyright: reportPrivateUsage=false
# For mixtures, which put several loaders together, and for adapters to frameworks.


def design_of(loader: Loader) -> Design:
    """Return all that was decided about a loader.

    Raises:
        ConfigError: No mixture can be made of it.
    """
    if loader._structure is not None and loader._options.transforms:
        raise ConfigError(
            f"a mixture has fields by name, and the transforms of {loader!r} are for the structure of its "
            "dataset's items",
            hint="Make the mixture of loader.dataset, and give it transforms of fields",
        )
    if loader._partners:
        raise ConfigError(
            f"a mixture takes one cache of each member, and {loader!r} joins several",
            hint="Iterate over its loaders in turn",
        )
    if loader._serving.steps(0) is None:
        raise ConfigError(
            f"a mixture lays out its turns by the batches of each cache, and those of {loader!r} are known "
            "once it is filled",
            hint=f"Leave {arg('wait', False)} out of its precompute",
        )
    return loader._serving.design


def give_structure(loader: Loader, structure: ItemStructure) -> None:
    """Have its batches come in the structure of a dataset's items. Those of mixtures stay fields by name."""
    loader._structure = structure


def is_filling(loader: Loader) -> bool:
    """Return True if it serves while its cache is being filled."""
    return loader._serving.design.fill is not None


def complete(loader: Loader) -> None:
    """Have it serve a complete cache from its next pass on, and wait for that."""
    loader._complete(wait=True)


def follow(loader: Loader, state: dict[str, Any]) -> None:
    """Have it serve while the cache is filled, or not, as the loader did whose state this is."""
    if states.was_filling(state) != is_filling(loader):
        loader._follow(state)


def place_of(loader: Loader, epoch: int, batch: int) -> tuple[int, int]:
    """Return epoch and position at which the batch of that number of an epoch begins."""
    return epoch, loader._serving.begin(epoch, batch)


def pass_from(loader: Loader, epoch: int, batch: int) -> Iterator[Any]:
    """Return a pass that begins with batch `batch` of an epoch, from where the loader serves now."""
    loader._place.restore(place_of(loader, epoch, batch))
    return loader._pass()

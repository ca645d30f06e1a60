"""Results of a simulation: in figures, in words, in tables and as a picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from stoker.extras.simulation.queues import BatchCost, QueueTimes
from stoker.extras.simulation.scenario import Scenario
from stoker.plan.tiers import NO_STALL
from stoker.plan.trials import Interval, format_range
from stoker.runtime.files import replace_atomically
from stoker.schema import Json, as_json
from stoker.units import format_bytes, format_count, format_percent, format_rate, format_seconds

# ----------------------------------------------------------------------------------------------------------
# Precompute: workers, encoders, writers and links work at once, so the slowest of them sets the pace.


_STAGE_KEYS = {"workers": "readers"}
"""Names that differ in JSON, whose keys scripts rely on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingEstimate:
    """The cost of encoding the complete set once."""

    encoders: int
    nodes: int
    """That take part."""
    seconds: float
    """Of the command: its start, the first sample through all stages, then the slowest stage's pace."""
    stages: dict[str, float]
    """Seconds that each alone would take for the entire set, from what waits longest."""
    read_bytes: float
    """Of all nodes together, from the place of the samples."""
    written_bytes: float
    node_read_bytes: float
    node_written_bytes: float

    @property
    def bottleneck(self) -> str:
        """The stage that sets the pace."""
        return next(iter(self.stages))

    def to_json(self) -> dict[str, Json]:
        """Return all fields, and the bottleneck."""
        stages: dict[str, Json] = {
            _STAGE_KEYS.get(name, name): seconds for name, seconds in self.stages.items()
        }
        return {**asdict(self), "stages": stages, "bottleneck": self.bottleneck}


def encoding_with(scenario: Scenario, encoders: int) -> EncodingEstimate:
    """Return the encoding with so many encoders, nodes filled one after another.

    Workers of an encoder work in parallel; cores are what all processes of a node share (an encoder on
    a CPU takes one of them too). Reading from and writing to a local disk take turns; a network does both at
    once.
    """
    one = scenario
    nodes = min(one.nodes, math.ceil(encoders / one.gpus))
    pipe = one.disk_bytes_s * nodes
    if one.shared:
        pipe = min((one.network_bytes_s or math.inf) * nodes, one.store_bytes_s or math.inf)
    move_in, move_out = one.sample_bytes / pipe, one.record_bytes / pipe
    inline_s = 0.0 if one.workers else one.read_s
    work_s = one.read_s + one.write_s + (one.encode_s if one.on_cpu else 0.0)
    each_s = {
        "encoder": (one.encode_s + inline_s) / encoders,
        "workers": one.read_s / (one.workers * encoders) if one.workers else 0.0,
        "writer": one.write_s / encoders,
        "cores": work_s / (one.node_cores * nodes),
        "network" if one.shared else "disk": max(move_in, move_out) if one.shared else move_in + move_out,
    }
    if (
        one.shared
        and one.store_bytes_s is not None
        and one.store_bytes_s <= (one.network_bytes_s or 0) * nodes
    ):
        each_s["store"] = each_s.pop("network")
    through_s = one.read_s + one.encode_s + one.write_s + one.store_latency_s
    stages = dict(sorted(((k, v * one.records) for k, v in each_s.items()), key=lambda item: -item[1]))
    return EncodingEstimate(
        encoders=encoders,
        nodes=nodes,
        seconds=one.start_s + through_s + max(stages.values()),
        stages=stages,
        read_bytes=one.records * one.sample_bytes,
        written_bytes=one.set_bytes,
        node_read_bytes=one.records * one.sample_bytes / nodes,
        node_written_bytes=one.set_bytes / nodes,
    )


def first_epoch_while_encoding_s(scenario: Scenario, encoding: EncodingEstimate, steps_s: float) -> float:
    """Return seconds of the first epoch where training starts at once and encoding continues during it.

    Batches come in the order in which records are stored, so an epoch ends with the later of both. Where an
    encoder has a rank's GPU, its calls and the steps take turns at it; on CPUs they share the cores.

    Args:
        scenario: The run.
        encoding: Of the complete set, with no training in parallel.
        steps_s: Of an epoch's steps with nothing to load.
    """
    one, stages = scenario, encoding.stages
    if one.on_cpu:
        shared_s = stages["cores"] + steps_s * one.busy_cores * one.gpus / one.node_cores
    else:
        shared_s = stages["encoder"] + steps_s
    start_s = one.start_s if one.fill_start_s is None else one.fill_start_s
    return start_s + max(shared_s, steps_s, *stages.values())


def encodings(scenario: Scenario) -> tuple[EncodingEstimate, ...]:
    """With 1, 2, 4 ... encoders up to one a rank, or with the number that was given.

    >>> one = Scenario(records=1000, record_bytes=8, batch=1, step_s=1, host_memory_bytes=8, gpus=4,
    ...                gpu_memory_bytes=8, encode_s=0.1, read_s=0.2, cores=8)
    >>> [(each.encoders, each.bottleneck, round(each.seconds)) for each in encodings(one)]
    [(1, 'workers', 200), (2, 'workers', 100), (4, 'workers', 50)]
    """
    if scenario.encoders is not None:
        return (encoding_with(scenario, scenario.encoders),)
    counts = [
        1 << power for power in range(scenario.world_size.bit_length()) if 1 << power < scenario.world_size
    ]
    return tuple(encoding_with(scenario, count) for count in [*counts, scenario.world_size])


def pick_quickest(found: tuple[EncodingEstimate, ...]) -> EncodingEstimate:
    """Return the quickest estimate; of those within a hundredth the one with the fewest encoders."""
    least_s = min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= 1.01 * least_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of serving a run. If it does not fit, only `name`, `what` and `why_not` are set."""

    name: str
    what: str
    why_not: str = ""
    """Why it cannot be done, in words; empty: it can."""
    encoding_s: float = 0.0
    """Of precompute before it; 0 where samples are encoded in each epoch."""
    first_batch_s: float = 0.0
    """From the command to the first batch on every rank, precompute included."""
    first_epoch_s: float = 0.0
    """Of the first epoch, in which memories and disks are being filled during training; they may not be
    filled when it ends."""
    filling_epochs: int = 0
    """Epochs that begin before memory, and a disk with room for all, are filled. `epoch_s` and `epoch_bytes`
    are those of later epochs. 0: only what batches read is filled."""
    filled_s: float | None = 0.0
    """From the first batch until that is done; None: the run is over before."""
    epoch_s: float = 0.0
    """Of one with all of them filled."""
    stall: float = 0.0
    """Part of a later epoch that steps wait for data, 0..1, against the same steps without loading."""
    encoding_range_s: Interval | None = None
    epoch_range_s: Interval | None = None
    total_range_s: Interval | None = None
    stall_range: Interval | None = None
    """Likely values of the four: from all times at their least, to all at their largest. None: no time of the
    scenario has a range."""
    first_node_bytes: float = 0.0
    first_bytes: float = 0.0
    """Read from the place of the records in the first epoch, by one node and by all; without precompute."""
    epoch_node_bytes: float = 0.0
    epoch_bytes: float = 0.0
    """The same in every later one."""
    device_bytes: float = 0.0
    """Records on one device."""
    host_bytes: float = 0.0
    """Records in the host memory of one node."""
    disk_bytes: float = 0.0
    """Records on the local disk of one node, a copy of what a store has."""
    encoded_samples: float = 0.0
    """Encoded in every epoch, parts of a sample added up; 0 where precompute has encoded all."""
    read_bytes: float = 0.0
    """Read by all nodes in all epochs, precompute left out."""
    total_s: float = 0.0
    """Precompute and all epochs."""
    cost: float | None = None
    """Of that, and of a month of keeping the records; None: no price was given."""
    bottleneck: str = ""
    """The resource that limits a later epoch."""
    cure: str = ""
    """A change that would lift the limit, with the figure."""
    remark: str = ""
    """Further remarks."""

    @property
    def fits(self) -> bool:
        """True if it can be done."""
        return not self.why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Every way, and which to take."""

    scenario: Scenario
    encodings: tuple[EncodingEstimate, ...]
    """By number of encoders."""
    encoding: EncodingEstimate
    """The estimate that the ways use."""
    first_epoch_while_encoding_s: float
    """Seconds of the first epoch where training starts at once and encoding continues during it."""
    first_epoch_while_encoding_range_s: Interval | None = None
    """The least and the largest that are likely; None: as for those of ways."""
    ways: tuple[Way, ...]
    fastest: str
    """Name of the way that is over first; empty where none fits."""
    cheapest: str
    """Name of the way that costs least; empty where no price was given."""
    reason: str
    """Both in words."""
    taken: tuple[str, ...]
    """Values that were not given, and those used instead, in words."""

    def way(self, name: str) -> Way:
        """Return the way of that name."""
        return next(one for one in self.ways if one.name == name)

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "scenario": {_STAGE_KEYS.get(name, name): one for name, one in asdict(self.scenario).items()},
            "encodings": [one.to_json() for one in self.encodings],
            "encoding": self.encoding.to_json(),
            "first_epoch_while_encoding_s": self.first_epoch_while_encoding_s,
            "first_epoch_while_encoding_range_s": as_json(self.first_epoch_while_encoding_range_s),
            "ways": [{**asdict(one), "fits": one.fits} for one in self.ways],
            "fastest": self.fastest,
            "cheapest": self.cheapest,
            "reason": self.reason,
            "taken": list(self.taken),
        }


# ----------------------------------------------------------------------------------------------------------
# In words: what limits a way, which way to take and why; tables for screens and documents.


HEAD = (
    "way",
    "encode",
    "first batch",
    "first epoch",
    "filled",
    "epoch",
    "stall",
    "node reads",
    "memory",
    "total",
    "cost",
)


class Advice(TypedDict):
    """The part of a simulation that says what to do."""

    fastest: str
    cheapest: str
    reason: str


def find_bottleneck(
    scenario: Scenario, asked: BatchCost, even: QueueTimes, base: QueueTimes
) -> tuple[str, str]:
    """Name what sets the pace of an even epoch, and what would change it."""
    wait_s = even.period_s - base.period_s
    if wait_s <= NO_STALL * even.period_s:
        own_s = base.period_s - scenario.step_s
        if own_s > NO_STALL * base.period_s:
            what = "what ranks wait for each other and for cores"
            return what, f"{format_seconds(own_s)} a step: steadier steps, fewer ranks, more cores"
        return "the step", "shorter steps, or more ranks"
    if asked.inline_s + asked.encode_s >= wait_s / 2:
        if asked.encode_s > asked.inline_s:
            return "encoding during the step", f"precompute: {format_seconds(asked.encode_s)} of each step go"
        return (
            "loading in line with the step",
            f"a core free to load: {format_seconds(asked.inline_s)} of each step go",
        )
    place = max((name for name in even.busy if name != "step"), key=lambda name: even.busy[name])
    return _of_place(scenario, asked, place, base.period_s)


def _of_place(scenario: Scenario, asked: BatchCost, place: str, period_s: float) -> tuple[str, str]:
    """Return one place that batches wait for, and what it would need for steps not to."""
    rates = {
        "store": ("the store", "store_rate", asked.far_bytes * scenario.world_size, scenario.store_bytes_s),
        "link": ("a node's network", "network", asked.far_bytes * scenario.gpus, scenario.network_bytes_s),
        "disk": ("a node's disk", "disk_rate", asked.disk_bytes * scenario.gpus, scenario.disk_bytes_s),
    }
    if place in rates:
        name, key, size, has = rates[place]
        wanted = f"{key}={format_rate(size / period_s)}"
        return f"{name}, {format_rate(has or math.inf)}", f"{wanted}, or memory for more of the records"
    if place == "own workers":
        wanted = math.ceil(asked.read_s / period_s)
        return "workers of one rank", f"workers={wanted}, with cores for them, or precompute"
    if place == "own thread":
        return (
            "the thread of a rank that loads",
            f"{format_seconds(asked.overlapped_s)} a batch: a smaller dtype",
        )
    if asked.requests:
        wanted = math.ceil(asked.requests * scenario.store_latency_s / period_s)
        return (
            "the store's latency",
            f"requests={wanted} of each rank at once, or memory for more of the records",
        )
    return "what one rank waits for its reads", "memory for more of the records"


def choose_way(scenario: Scenario, ways: Sequence[Way]) -> Advice:
    """Return the fastest and the cheapest way, and why."""
    able = [way for way in ways if way.fits]
    if not able:
        why = "; ".join(f"{way.name}: {way.why_not}" for way in ways)
        return Advice(fastest="", cheapest="", reason=f"nothing fits. {why}")
    quick = min(able, key=lambda way: (round(way.total_s, 3), way.device_bytes + way.host_bytes))
    said = [
        f"fastest: {quick.name} ({quick.what}), {format_seconds(quick.total_s)} for precompute and "
        f"{scenario.epochs} epochs, limited by {quick.bottleneck}"
    ]
    refused = [way.name for way in ways if not way.fits]
    said += [f"what does not fit: {', '.join(refused)}"] if refused else []
    alike = [way.name for way in able if way is not quick and way.total_s <= 1.01 * quick.total_s]
    said += [f"within 1 % of it: {', '.join(alike)}"] if alike else []
    if (likely := quick.total_range_s) is not None:
        said.append("likely " + " to ".join(dict.fromkeys(map(format_seconds, likely))))
        unclear = [
            way.name
            for way in able
            if way.name not in (quick.name, *alike)
            and way.total_range_s is not None
            and way.total_range_s.overlaps(likely)
        ]
        said += [f"may be as fast, since their ranges overlap: {', '.join(unclear)}"] if unclear else []
    if scenario.prices.node_hour is None:
        said.append("no price given: price_node_hour=, price_gb_month= and price_gb_read= say what it costs")
        return Advice(fastest=quick.name, cheapest="", reason="; ".join(said))
    cheap = min(able, key=lambda way: (way.cost or 0.0, way.device_bytes + way.host_bytes))
    if cheap.name == quick.name:
        said.insert(1, f"and cheapest, {cheap.cost:,.2f}")
    else:
        said.insert(
            1,
            f"cheapest: {cheap.name} ({cheap.what}), {cheap.cost:,.2f} in place of {quick.cost:,.2f}, "
            f"{format_seconds(cheap.total_s)}",
        )
    return Advice(fastest=quick.name, cheapest=cheap.name, reason="; ".join(said))


def list_defaults(scenario: Scenario) -> tuple[str, ...]:
    """List what was not given and matters, with the values assumed for it."""
    said: list[str] = []
    if scenario.cores is None:
        said.append(f"cores={scenario.node_cores:g}, two a rank")
    if scenario.raw_bytes is None and (scenario.encode_s or scenario.read_s):
        said.append("raw_bytes: a sample is taken to be as large as its record")
    if not scenario.on_cpu and scenario.model_bytes is None:
        said.append("model_memory: half of each GPU is left to the model")
    if not scenario.encode_s and not scenario.read_s:
        said.append("encode, read: not given, so precompute is only moving bytes")
    if not scenario.shared and (scenario.network_bytes_s or scenario.store_bytes_s):
        said.append("store=local, each node's own disk, so network and store_rate go unused")
    if scenario.shared and scenario.store_bytes_s is None:
        said.append("store_rate: not given, so only the nodes' network limits it")
    defaults = {one.name: one.default for one in fields(Scenario)}
    for name, key in (
        ("copy_bytes_s", "copy_rate"),
        ("disk_bytes_s", "disk_rate"),
        ("h2d_bytes_s", "h2d_rate"),
    ):
        if getattr(scenario, name) == defaults[name] and not scenario.served:
            said.append(f"{key}={format_rate(getattr(scenario, name))}, a typical one")
    return tuple(said)


def cells(way: Way) -> tuple[str, ...]:
    """Return one row of the table, under `HEAD`."""
    if not way.fits:
        return (way.name, "does not fit", *[""] * (len(HEAD) - 2))
    memory = [
        f"{format_bytes(size)} {where}"
        for size, where in ((way.device_bytes, "GPU"), (way.host_bytes, "host"), (way.disk_bytes, "disk"))
        if size
    ]
    return (
        way.name,
        format_seconds(way.encoding_s) if way.encoding_s else "-",
        format_seconds(way.first_batch_s),
        format_seconds(way.first_epoch_s),
        _filled(way),
        format_seconds(way.epoch_s),
        format_percent(way.stall)
        if way.stall_range is None
        else ", ".join(dict.fromkeys((format_percent(way.stall), format_range(way.stall_range)))),
        format_bytes(way.epoch_node_bytes) if way.epoch_node_bytes else "-",
        ", ".join(memory) or "-",
        format_seconds(way.total_s),
        "no price" if way.cost is None else f"{way.cost:,.2f}",
    )


def _filled(way: Way) -> str:
    """In which epoch memories and disks are filled; later ones are as the row says."""
    if not way.filling_epochs:
        return "-"
    return "not in time" if way.filled_s is None else f"epoch {way.filling_epochs}"


def _say_filled(way: Way) -> str:
    if not way.filling_epochs:
        return ""
    if way.filled_s is None:
        return f"not filled when all {way.filling_epochs} epochs are over, so none is as the row says"
    return f"filled {format_seconds(way.filled_s)} after the first batch, in epoch {way.filling_epochs}"


def encoding_cells(found: Simulation) -> list[tuple[str, ...]]:
    """Return rows of the table of encoders, the head first."""
    rows = [("encoders", "nodes", "time", "limited by", "a node reads", "a node writes")]
    rows += [
        (
            format_count(one.encoders),
            format_count(one.nodes),
            format_seconds(one.seconds),
            one.bottleneck,
            format_bytes(one.node_read_bytes),
            format_bytes(one.node_written_bytes),
        )
        for one in found.encodings
    ]
    return rows


def remarks(found: Simulation) -> list[str]:
    """Return a line for each way: what limits it and what would change that, or why it does not fit."""
    said: list[str] = []
    for way in found.ways:
        parts = [way.bottleneck, f"would change it: {way.cure}", way.remark, _say_filled(way)]
        why = f"limited by {'; '.join(filter(None, parts))}"
        said.append(f"{way.name}: {why if way.fits else f'does not fit: {way.why_not}'}")
    return said


def markdown(found: Simulation) -> str:
    """Return both tables and the reason, for a document."""
    parts = [_table(encoding_cells(found)), _table([HEAD, *[cells(way) for way in found.ways]])]
    limits = [f"- {line}" for line in remarks(found)]
    taken = f"Taken: {'; '.join(found.taken)}." if found.taken else ""
    return "\n\n".join(part for part in (*parts, "\n".join(limits), found.reason + ".", taken) if part)


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


# ----------------------------------------------------------------------------------------------------------
# The picture: for each way how long precompute, the first epoch and all others take.


BLUE, ORANGE, PALE, GREY, TEXT = "#1f6fb4", "#d9731a", "#d5dce3", "#9aa5b1", "#24313f"


def draw_simulation(found: Simulation, path: Path) -> None:
    """Write a PNG or SVG, by the suffix of the name; works without a display and leaves pyplot alone."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ways = [way for way in found.ways if way.fits][::-1]
    picture: Any = Figure(figsize=(10, 1.9 + 0.44 * len(ways)), dpi=130, layout="constrained")
    FigureCanvasAgg(picture)
    axes = picture.subplots(1, 1)
    for place, way in enumerate(ways):
        left = 0.0
        later_s = way.total_s - way.encoding_s - way.first_epoch_s
        for seconds, color in ((way.encoding_s, ORANGE), (way.first_epoch_s, PALE), (later_s, BLUE)):
            axes.barh(place, seconds, left=left, color=color, height=0.62)
            left += seconds
        cost = "" if way.cost is None else f", costs {way.cost:,.0f}"
        said = f"  {format_seconds(way.total_s)}, stall {format_percent(way.stall)}{cost}"
        axes.text(left, place, said, va="center", fontsize=8.5, color=TEXT)
    most_s = max((way.total_s for way in ways), default=1.0)
    axes.set_xlim(0, 1.45 * most_s)
    axes.set_yticks(range(len(ways)), [way.name for way in ways])
    axes.xaxis.set_major_formatter(_tick)
    axes.tick_params(labelsize=8.5, color=GREY, labelcolor=TEXT, left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    names = {"precompute": ORANGE, "first epoch": PALE, "all others": BLUE}
    handles = [axes.barh(0, 0, color=color, label=name) for name, color in names.items()]
    axes.legend(
        handles=handles, fontsize=8.5, frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 1)
    )
    one = found.scenario
    title = f"{one.nodes} nodes with {one.gpus} ranks each, {one.records:,} records, {one.epochs} epochs"
    axes.set_title(title, fontsize=10, loc="left", color=TEXT)
    written: dict[str, Any] = {"color": TEXT, "x": 0.01, "ha": "left"}
    said = found.reason.partition("; ")[0]
    picture.supxlabel("\n".join(textwrap.wrap(said, 130)), fontsize=8.5, **written)
    with replace_atomically(path) as temporary:
        picture.savefig(temporary, format=path.suffix.lstrip(".").lower() or "png")


def _tick(value: float, _place: int) -> str:
    return format_seconds(value) if value else "0"

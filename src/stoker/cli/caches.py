"""The commands that look after caches and copies: verify, compact, gc, export, import-pt, stage."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.edge import Edge, Teller, edge
from stoker.cli.flags import CachePath, Config, Debug, Json, Overrides, duration, share, size
from stoker.errors import ConfigError, FormatError, IncompleteError
from stoker.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from stoker.store.mirror.transfer import Progress, TransferReport


def register_caches(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(verify)
    app.command()(compact)
    app.command()(gc)
    app.command()(export)
    app.command(name="import-pt")(import_pt)
    app.command()(stage)


def verify(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    path: CachePath,
    repair: Annotated[
        bool, typer.Option("--repair", help="Set aside what is damaged or lost, so that the rest serves.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(readable=False, help="With --repair: the settings that made it; encodes again at once."),
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings that win over --config.")
    ] = None,
    subset: Annotated[
        float, typer.Option(parser=share, metavar="5%", help="Part of the records to read; all by default.")
    ] = cast(float, "100%"),
    seed: Annotated[int, typer.Option(help="Which records --subset picks.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Read a cache back and compare checksums.

    Exit code 4 when a record is damaged; with --repair, when the cache is not complete afterwards.

    \b
    Example:
      stoker verify data/latent_cache/burgers1d_train --subset 5%
      stoker verify data/latent_cache/burgers1d_train --repair --config configs/train_burgers_32dim.yaml
    """
    if repair and subset < 1:
        raise typer.BadParameter("--repair reads every record: leave --subset out")
    if not repair and (config or overrides):
        raise typer.BadParameter("--config and settings go with --repair")
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.cli import output

        if repair:
            _repair(out, path, config, overrides or [])
            return
        from stoker.store import open_cache

        report = open_cache(path, require_complete=False).verify(subset, seed=seed)
        out.show(report, output.verify)
        if not report.ok:
            raise typer.Exit(FormatError.exit_code)


def _repair(out: Edge, path: str, config: Path | None, overrides: list[str]) -> None:
    from stoker.cli import output
    from stoker.config import load_config
    from stoker.pipeline.keep import repair_cache

    if config is None and overrides:
        raise ConfigError(f"settings ({', '.join(overrides)}) go with --config, which is not given")
    result = repair_cache(path, None if config is None else load_config(config, overrides))
    out.show(result, output.repair)
    if not result.ok:
        raise typer.Exit(IncompleteError.exit_code)


def compact(
    path: CachePath,
    compression: Annotated[
        str | None,
        typer.Option(
            metavar="none|zstd|lz4", help="Also rewrite shards that are stored in another way than this."
        ),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Merge short shards, or compress a cache.

    Reads and checks every record that moves. The old shards stay until `stoker gc`, for whoever has them
    open. Exit code 4 when a shard with a damaged record was left as it is.

    \b
    Example:
      stoker compact data/latent_cache/burgers1d_train
      stoker compact data/latent_cache/burgers1d_train --compression zstd
    """
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.cli import output
        from stoker.store.maintain import compact as merge

        report = merge(path, compression=compression)
        out.show(report, output.compact)
        if report.left:
            raise typer.Exit(FormatError.exit_code)


def gc(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    cache_dir: Annotated[
        str, typer.Argument(metavar="CACHE_DIR", help="The folder, or address, that holds caches by name.")
    ],
    keep: Annotated[
        int | None,
        typer.Option(min=0, help="Recipes of each name that stay, the newest; alone: the rest go."),
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            parser=size, metavar="20GB", help="The least recently used recipes go until it is no larger."
        ),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(parser=duration, metavar="30d", help="Recipes go that were unused for longer."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go, and why.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also what is in use, was used in the last day, or is the newest.")
    ] = False,
    at_address: Annotated[
        bool, typer.Option("--at-address", help="Of an address: also shards there that serve nothing.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Remove what no cache needs any more.

    Superseded shards, temporaries of dead writers, weights that no recipe names; and recipes, as --keep,
    --max-size and --older-than say. What is in use stays. Of an address (s3://...), or of a folder
    with copies of one, only copies go.

    \b
    Example:
      stoker gc data/latent_cache --older-than 30d --keep 1 --dry-run
      stoker gc data/latent_cache --max-size 20GB
    """
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.cli import output
        from stoker.store.gc import GcPolicy, clean, collect
        from stoker.store.mirror.root import MARKER, here
        from stoker.store.remote import is_url

        policy = GcPolicy(keep=keep, max_bytes=max_size, older_than_s=older_than, force=force)
        # Copies of an address may be kept anywhere, and be named by their folder.
        if is_url(cache_dir) or Path(cache_dir, MARKER).exists():
            report = clean(here(cache_dir), policy, dry_run=dry_run, at_address=at_address)
        elif at_address:
            raise ConfigError(
                f"--at-address is of an address, and {cache_dir} is a folder here. Leave it out: of a folder "
                "what serves nothing always goes"
            )
        else:
            report = collect(cache_dir, policy, dry_run=dry_run)
        out.show(report, output.gc)


def import_pt(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    path: Annotated[
        Path, typer.Argument(metavar="DIR", readable=False, help="The folder with sample_00000.pt and so on.")
    ],
    out_dir: Annotated[str, typer.Option("--out", help="The cache folder to write to.")],
    name: Annotated[str, typer.Option(help="Name of the cache, as burgers1d_train.")],
    dtype: Annotated[str | None, typer.Option(help="Storage dtype; default: as in the files.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Samples there should be; default: up to the highest number.")
    ] = None,
    nan: Annotated[str, typer.Option(help="reject or allow samples with NaN or infinities.")] = "reject",
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Exit code 0 although samples are missing or broken.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Import an earlier cache of .pt files.

    Each file is read in a limited process of its own. Stopped at any moment, the same command goes on. Exit
    code 4 when a sample is missing or broken.

    \b
    Example:
      stoker import-pt old_cache/burgers1d_train --out data/latent_cache --name burgers1d_train
    """
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.cli import output
        from stoker.pipeline.import_pt import ImportSettings
        from stoker.pipeline.import_pt import import_pt as run_import
        from stoker.store.remote import local_path

        if nan not in ("reject", "allow"):
            raise ConfigError(f"--nan is {nan!r}, expected reject or allow")
        settings = ImportSettings(dtype=dtype, count=count, nan="allow" if nan == "allow" else "reject")
        result = run_import(path, local_path(out_dir, "--out"), name=name, settings=settings)
        out.show(result, output.import_pt)
        if result.failures and not allow_missing:
            raise typer.Exit(IncompleteError.exit_code)


def stage(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    config: Config,
    overrides: Overrides = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove copies of files that changed or are gone; copy nothing.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --prune: only show what would go.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --prune: also what was used in the last day.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Copy a configuration's files to local storage.

    As data.stage says: `auto` those on network storage, `always` all. Copies are verified, a stopped one
    goes on, and precompute reads from them. Exit code 6 when there is no room.

    \b
    Example:
      stoker stage configs/train_burgers_32dim.yaml data.stage=auto data.stage_dir=/scratch/staged
      stoker stage configs/train_burgers_32dim.yaml data.stage_dir=/scratch/staged --prune --dry-run
    """
    if (dry_run or force) and not prune:
        raise typer.BadParameter("--dry-run and --force go with --prune")
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.cli import output
        from stoker.config import load_config
        from stoker.pipeline.staging import prune_staged, stage_config, stage_folder

        if prune:
            folder = stage_folder(load_config(config, overrides or []))
            out.show(prune_staged(folder, dry_run=dry_run, force=force), output.gc)
            return
        out.show(stage_config(load_config(config, overrides or [])), output.stage)


# ----------------------------------------------------------------------------------------------------------
# `stoker export`: a cache as files of other libraries.


def numbers_between(text: str) -> range:
    """`A:B` as numbers.

    >>> numbers_between("10:20")
    range(10, 20)
    """
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise typer.BadParameter(f"{text!r} is no range. Write two numbers, as 0:1000")
    return range(int(first), int(last))


def export(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    path: CachePath,
    out: Annotated[str, typer.Argument(metavar="DIR", help="A folder that does not exist, or is empty.")],
    to: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors or tensordict.")],
    records: Annotated[
        range | None,
        typer.Option(
            parser=numbers_between, metavar="A:B", help="Sample numbers from A on and below B; default: all."
        ),
    ] = None,
    fields: Annotated[
        str | None, typer.Option(metavar="X,Y", help="Fields of the records; default: all.")
    ] = None,
    ragged: Annotated[
        str | None,
        typer.Option(metavar="FORM", help="nested or pad; needed where records differ in length."),
    ] = None,
    packed: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="What int8 and float8 with scales become, or refuse."),
    ] = "float32",
    file_size: Annotated[
        int, typer.Option(parser=size, metavar="4GB", help="Of a safetensors file, at most.")
    ] = cast(int, "4GiB"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a cache as files of other libraries.

    Plain safetensors, or the memory-mapped layout that TensorDict.load_memmap reads; records in order of
    number, every byte verified on the way, DIR there as a whole or not at all. Exit code 4 when a record is
    damaged, 6 when there is no room.

    \b
    Example:
      stoker export data/latent_cache/burgers1d_train burgers --to safetensors
      stoker export data/latent_cache/burgers1d_train burgers --to tensordict --records 0:1000
    """
    with edge(as_json=as_json, debug=debug) as outlet:
        from stoker.export import ExportSettings, export_cache

        wanted: Any = {"to": to, "ragged": ragged, "packed": packed}  # checked by ExportSettings
        settings = ExportSettings(
            **wanted,
            fields=None if fields is None else [name.strip() for name in fields.split(",")],
            records=None if records is None else (records.start, records.stop),
            file_bytes=file_size,
        )
        with Teller(outlet) as teller:

            def listen(done: int, total: int) -> None:
                teller.tell(f"{format_bytes(done)} of {format_bytes(total)} written")

            report = export_cache(path, out, settings, progress=listen)
        outlet.show(report, render_export)


def render_export(report: Any, console: Console) -> None:
    """What there is now, and what is not in it."""
    from stoker.cli.output import table

    files = format_count(len(report.files), "file")
    rows = [
        ("records", format_count(report.records)),
        ("fields", escape(", ".join(f"{name} {f['dtype']}" for name, f in report.fields.items()))),
        ("written", f"{format_bytes(report.bytes)} in {files}, {format_seconds(report.seconds)}"),
        ("folder", escape(report.path)),
    ]
    if report.quarantined:
        count = len(report.quarantined)
        rows.append(("not in it", f"{format_count(count)} quarantined samples, named in manifest.json"))
    table(console, rows)


# ----------------------------------------------------------------------------------------------------------
# The commands that bring caches to an address and from there: push, pull.


Address = Annotated[str, typer.Argument(metavar="URL", help="As s3://bucket/caches; docs/objects.md.")]


def register_remote(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(push)
    app.command()(pull)


def push(path: CachePath, url: Address, as_json: Json = False, debug: Debug = False) -> None:
    """Bring a cache to an address.

    To URL/NAME/FINGERPRINT, on an object store or a shared folder. Each shard is checked, and a push
    that was stopped goes on.

    \b
    Example:
      stoker push data/latent_cache/burgers1d_train s3://bucket/caches
    """
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.store.mirror.transfer import push as run

        with Teller(out) as teller:
            report = run(path, url, listen=partial(_listen, teller))
        out.show(report, render_transfer)


def pull(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    url: Address,
    cache_dir: Annotated[
        str, typer.Argument(metavar="[CACHE_DIR]", help="The folder that holds caches.")
    ] = "data/latent_cache",
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this rank reads in the order static(WORLD).")
    ] = None,
    world: Annotated[int | None, typer.Option(min=1, help="Ranks there are.")] = None,
    records: Annotated[
        str | None, typer.Option(metavar="FIRST:STOP", help="Only shards that hold these samples.")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Bring a cache here from an address.

    It goes to CACHE_DIR/NAME/FINGERPRINT, several shards at a time, each checked before it gets its place. A
    pull that was stopped goes on. With --records or --rank, whole shards that hold any of them.

    \b
    Example:
      stoker pull s3://bucket/caches/burgers1d_train
      stoker pull s3://bucket/caches/burgers1d_train /scratch/caches --rank 0 --world 8
    """
    with edge(as_json=as_json, debug=debug) as out:
        from stoker.store.mirror.transfer import Wanted
        from stoker.store.mirror.transfer import pull as run

        wanted = Wanted(rank=rank, world=world, records=_range(records))
        with Teller(out) as teller:
            report = run(url, cache_dir, wanted=wanted, listen=partial(_listen, teller))
        out.show(report, render_transfer)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal()):
        raise ConfigError(f"--records is {text!r}, expected FIRST:STOP as 0:1000")
    return int(first), int(stop)


def _listen(teller: Teller, now: Progress) -> None:
    teller.tell(
        f"{format_count(now.done)} of {format_count(now.count, 'shard')}, "
        f"{format_bytes(now.bytes)} of {format_bytes(now.total)}",
        last=now.done == now.count,
    )


def render_transfer(report: TransferReport, console: Console) -> None:
    """What was brought, and what is there now."""
    rate = f" at {format_bytes(report.bytes / report.seconds)}/s" if report.seconds else ""
    state = "complete" if report.complete else "not all of the cache: the index there says which"
    console.print(f"{report.url}\n{report.path}", soft_wrap=True, markup=False)
    console.print(
        f"{format_count(report.shards, 'shard')}, {format_bytes(report.bytes)} in "
        f"{format_seconds(report.seconds)}{rate}; {format_count(report.present)} were there already",
        soft_wrap=True,
    )
    console.print(f"{format_count(report.records, 'record')}, {state}", soft_wrap=True)

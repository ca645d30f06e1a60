"""The commands that look after caches and copies: `stoker cache ...` and `stoker data stage`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from stoker.cli.command import (
    CACHE_FOLDERS,
    BadValueError,
    CachePath,
    CommandOutput,
    ConfigArgument,
    Overrides,
    ProgressLine,
    Yes,
    cache_place,
    cli_command,
    duration,
    share,
    size,
    tell_settings,
)
from stoker.errors import ConfigError, FormatError, IncompleteError, docs_url
from stoker.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from stoker.store.transfer import TransferProgress, TransferReport


@cli_command
def cache_ls(
    out: CommandOutput,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[FOLDER]", help="The folder or URL that holds caches; default: .stoker, or the demo's."
        ),
    ] = None,
) -> None:
    """List the caches of a folder.

    A line for each: records, size, when it was last used. From their indexes alone.

    \b
    Example:
      stoker cache ls
      stoker cache ls data/latent_cache
    """
    from stoker.cli import output
    from stoker.run.caches import CacheSummary, inspect_path

    found = inspect_path(_folder_of_caches() if path is None else path)
    if isinstance(found, CacheSummary):
        out.show(found, output.inspect)
        return
    code = FormatError.exit_code if found.unreadable else 0
    out.show(found, output.inspect_folder, exit_code=code)


def _folder_of_caches() -> str:
    from stoker.config.load import holds_caches

    for folder in CACHE_FOLDERS:
        if holds_caches(Path(folder)):
            return folder
    raise FormatError(
        f"no caches found in {' or '.join(CACHE_FOLDERS)}",
        hint="Name the folder, as in `stoker cache ls FOLDER`, or make a cache with `stoker demo`",
    )


@cli_command
def cache_show(out: CommandOutput, path: CachePath) -> None:
    """Show what a cache holds.

    Records, fields, sizes, statistics and quarantined samples, from the index alone. Of a folder of
    several caches, a line for each.

    \b
    Example:
      stoker cache show data/latent_cache/burgers1d_train
    """
    from stoker.cli import output
    from stoker.run.caches import CacheSummary, inspect_path

    found = inspect_path(path)
    if isinstance(found, CacheSummary):
        out.show(found, output.inspect)
        return
    code = FormatError.exit_code if found.unreadable else 0
    out.show(found, output.inspect_folder, exit_code=code)


@cli_command
def cache_get(
    out: CommandOutput,
    path: CachePath,
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY...", help="Keys of samples: names of files or rows.")
    ] = None,
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="A condition over columns, as 'label > 3'.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Records to show at most.")] = 10,
) -> None:
    """Show single records, by key or condition.

    The first values of each field, read and checked. A condition may name fields that hold one number, `key`
    and `sample_index`.

    \b
    Example:
      stoker cache get data/latent_cache/cats cats/003
      stoker cache get data/latent_cache/cats --where "key LIKE 'cats/%' AND label = 3" --limit 3
    """
    from stoker.cli import output
    from stoker.run.caches import get_records

    out.show(get_records(path, keys or [], where, limit), output.records)


@cli_command
def cache_why(
    out: CommandOutput,
    a: Annotated[
        str,
        typer.Argument(metavar="A", parser=cache_place, help="A cache, a recipe's folder, or a CONFIG file."),
    ],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="B | KEY=VALUE",
            parser=cache_place,
            help="The other one (else: the nearest cache of A's name), and settings.",
        ),
    ] = None,
) -> None:
    """Name what differs between two recipes.

    So that a cache that was not used explains itself.

    \b
    Example:
      stoker cache why configs/train_burgers_32dim.yaml latent.dim=64
      stoker cache why data/latent_cache/burgers1d_train/3fa9c1d2e4b7a810 configs/train_burgers_32dim.yaml
    """
    from stoker.cli import output
    from stoker.run.caches import explain

    _, overrides = tell_settings(words or [])
    paths = [word for word in words or [] if word not in overrides]
    if len(paths) > 1:
        raise ConfigError(f"expected A and one B, found {', '.join([a, *paths])}", hint="Give two at most")
    out.show(explain(a, *paths, overrides=overrides), output.why)


@cli_command
def cache_verify(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
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
) -> None:
    """Read a cache back and compare checksums.

    Exit code 4 when a record is damaged, or the keys are; with --repair, when the cache is not complete
    afterwards.

    \b
    Example:
      stoker cache verify data/latent_cache/burgers1d_train --subset 5%
      stoker cache verify data/latent_cache/burgers1d_train --repair --config configs/train_burgers_32dim.yaml
    """
    if repair and subset < 1:
        raise BadValueError("--repair reads every record", "Leave --subset out")
    if not repair and (config or overrides):
        raise BadValueError("--config and settings go with --repair", "Add --repair, or leave them out")
    from stoker.cli import output

    if repair:
        _repair(out, path, config, overrides or [])
        return
    from stoker.store import open_cache

    cache = open_cache(path, require_complete=False)
    report = cache.verify(subset, seed=seed)
    if not (report.records or report.bad or cache.complete):
        raise IncompleteError(
            f"{path} holds no records yet: 0 of {format_count(cache.recipe.count)} are encoded",
            hint="`stoker precompute CONFIG` with the settings that made it encodes them",
        )
    render = partial(output.verify, path=str(path))
    out.show(report, render, exit_code=0 if report.ok else FormatError.exit_code)


def _repair(out: CommandOutput, path: str, config: Path | None, overrides: list[str]) -> None:
    from stoker.cli import output
    from stoker.config import load_config
    from stoker.run.context import Run
    from stoker.run.precompute import repair_cache

    if config is None and overrides:
        raise ConfigError(
            f"settings ({', '.join(overrides)}) go with --config, which is not given",
            hint="Name the settings that made the cache with --config CONFIG",
        )
    result = repair_cache(path, None if config is None else Run(load_config(config, overrides)))
    out.show(result, output.repair, exit_code=0 if result.ok else IncompleteError.exit_code)


@cli_command
def cache_compact(
    out: CommandOutput,
    path: CachePath,
    compression: Annotated[
        str | None,
        typer.Option(
            metavar="none|zstd|lz4", help="Also rewrite shards that are stored in another way than this."
        ),
    ] = None,
) -> None:
    """Merge short shards, or compress a cache.

    Reads and checks every record that moves. The old shards stay until `stoker cache gc`, for processes that
    have them open. Exit code 4 when a shard with a damaged record was left as it is.

    \b
    Example:
      stoker cache compact data/latent_cache/burgers1d_train
      stoker cache compact data/latent_cache/burgers1d_train --compression zstd
    """
    from stoker.cli import output
    from stoker.store.maintain import compact

    report = compact(path, compression=compression)
    out.show(report, output.compact, exit_code=FormatError.exit_code if report.left else 0)


@cli_command
def cache_gc(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    out: CommandOutput,
    cache_dir: Annotated[
        str, typer.Argument(metavar="CACHE_DIR", help="The folder, or URL, that holds caches by name.")
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
    yes: Yes = False,
) -> None:
    """Remove what no cache needs any more.

    Superseded shards, temporaries of dead writers, weights that no recipe names; and recipes, as --keep,
    --max-size and --older-than say. What is in use stays. Of an address (s3://...), or of a folder
    with copies of one, only copies go. Asks before it deletes, unless --yes is given.

    \b
    Example:
      stoker cache gc data/latent_cache --older-than 30d --keep 1 --dry-run
      stoker cache gc data/latent_cache --max-size 20GB --yes
    """
    from stoker.cli import output
    from stoker.store.gc import GcPolicy, clean, collect
    from stoker.store.remote import is_url
    from stoker.store.storage import MARKER, resolve_local

    policy = GcPolicy(keep=keep, max_bytes=max_size, older_than_s=older_than, force=force)
    # Mirrors of a URL may be kept anywhere, and be named by their folder.
    if is_url(cache_dir) or Path(cache_dir, MARKER).exists():
        run = partial(clean, resolve_local(cache_dir), policy, at_address=at_address)
    elif at_address:
        raise ConfigError(
            f"--at-address is for caches at a URL, and {cache_dir} is a local folder",
            hint="Leave it out: from a local folder, files that serve nothing are always removed",
        )
    else:
        run = partial(collect, cache_dir, policy)
    if not dry_run and not yes:
        preview = run(dry_run=True)
        if preview.removed:
            output.gc(preview, out.notes)
            out.confirm(f"Delete {format_count(len(preview.removed), 'item')} of {cache_dir}?")
    out.show(run(dry_run=dry_run), output.gc)


@cli_command
def data_stage(
    out: CommandOutput,
    config: ConfigArgument,
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
) -> None:
    """Copy a configuration's files to local storage.

    As data.stage says: `auto` those on network storage, `always` all. Copies are verified, a stopped one
    resumes, and precompute reads from them. Exit code 6 when there is no room.

    \b
    Example:
      stoker data stage configs/train_burgers_32dim.yaml data.stage=auto data.stage_dir=/scratch/staged
      stoker data stage configs/train_burgers_32dim.yaml data.stage_dir=/scratch/staged --prune --dry-run
    """
    if (dry_run or force) and not prune:
        raise BadValueError("--dry-run and --force go with --prune", "Add --prune, or leave them out")
    from stoker.cli import output
    from stoker.config import load_config
    from stoker.run.context import Run
    from stoker.run.staging import prune_staged, stage_config, stage_folder

    run = Run(load_config(config, overrides or []))
    if prune:
        out.show(prune_staged(stage_folder(run), dry_run=dry_run, force=force), output.gc)
        return
    out.show(stage_config(run), output.stage)


# ----------------------------------------------------------------------------------------------------------
# The commands that bring caches to a URL and from there: push, pull.


Address = Annotated[
    str, typer.Argument(metavar="URL", help=f"As s3://bucket/caches; see {docs_url('how-to/objects')}")
]


@cli_command
def cache_push(out: CommandOutput, path: CachePath, url: Address) -> None:
    """Bring a cache to an address.

    To URL/NAME/FINGERPRINT, on an object store or a shared folder. Each shard is checked, and a push
    that was stopped resumes.

    \b
    Example:
      stoker cache push data/latent_cache/burgers1d_train s3://bucket/caches
    """
    from stoker.store.transfer import push

    with ProgressLine(out) as progress:
        report = push(path, url, listen=partial(_listen, progress))
    out.show(report, render_transfer)


@cli_command
def cache_pull(
    out: CommandOutput,
    url: Address,
    cache_dir: Annotated[
        str, typer.Argument(metavar="[CACHE_DIR]", help="The folder that holds caches.")
    ] = "data/latent_cache",
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only what this rank reads with partition=static.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(min=1, help="Ranks there are.")] = None,
    records: Annotated[
        str | None, typer.Option(metavar="FIRST:STOP", help="Only shards that hold these samples.")
    ] = None,
) -> None:
    """Bring a cache here from an address.

    It goes to CACHE_DIR/NAME/FINGERPRINT, several shards at a time, each checked before it gets its place. A
    pull that was stopped resumes. With --records or --rank, whole shards that hold any of them.

    \b
    Example:
      stoker cache pull s3://bucket/caches/burgers1d_train
      stoker cache pull s3://bucket/caches/burgers1d_train /scratch/caches --rank 0 --world-size 8
    """
    from stoker.store.transfer import RecordSelection, pull

    wanted = RecordSelection(rank=rank, world_size=world_size, records=_range(records))
    with ProgressLine(out) as progress:
        report = pull(url, cache_dir, wanted=wanted, listen=partial(_listen, progress))
    out.show(report, render_transfer)


def _range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, stop = text.partition(":")
    if not (first.isdecimal() and stop.isdecimal()):
        raise ConfigError(f"--records is {text!r}", hint="Expected FIRST:STOP, as 0:1000")
    return int(first), int(stop)


def _listen(progress: ProgressLine, now: TransferProgress) -> None:
    progress.tell(
        f"{format_count(now.done)} of {format_count(now.count, 'shard')}, "
        f"{format_bytes(now.bytes)} of {format_bytes(now.total)}",
        last=now.done == now.count,
    )


def render_transfer(report: TransferReport, console: Console) -> None:
    """Print what was brought, and what is there now."""
    rate = f" at {format_bytes(report.bytes / report.seconds)}/s" if report.seconds else ""
    state = "complete" if report.complete else "not all of the cache: the index there says which"
    console.print(f"{report.url}\n{report.path}", markup=False)
    console.print(
        f"{format_count(report.shards, 'shard')}, {format_bytes(report.bytes)} in "
        f"{format_seconds(report.seconds)}{rate}; {format_count(report.present)} were there already"
    )
    console.print(f"{format_count(report.records, 'record')}, {state}")

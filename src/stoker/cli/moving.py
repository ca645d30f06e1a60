"""The commands that bring caches to an address and from there: push, pull."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from stoker.cli.edge import Teller, edge
from stoker.cli.flags import CachePath, Debug, Json
from stoker.errors import ConfigError
from stoker.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from stoker.store.mirror.transfer import Progress, TransferReport

Address = Annotated[str, typer.Argument(metavar="URL", help="As s3://bucket/caches; docs/objects.md.")]


def register(app: typer.Typer) -> None:
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
        from stoker.store.mirror.push import push as run

        with Teller(out) as teller:
            report = run(path, url, listen=partial(_listen, teller))
        out.show(report, render)


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
        from stoker.store.mirror.pull import pull as run
        from stoker.store.mirror.transfer import Wanted

        wanted = Wanted(rank=rank, world=world, records=_range(records))
        with Teller(out) as teller:
            report = run(url, cache_dir, wanted=wanted, listen=partial(_listen, teller))
        out.show(report, render)


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


def render(report: TransferReport, console: Console) -> None:
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

"""The command that converts weights of the earlier grid encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from stoker.cli.edge import edge
from stoker.cli.flags import Debug, Json
from stoker.errors import ConfigError, EncoderError

if TYPE_CHECKING:
    from stoker.compat.encoder import ConvertedEncoder


def register(group: typer.Typer) -> None:
    """Add `convert-encoder` to the group `compat`."""
    group.command("convert-encoder")(convert_encoder)


def convert_encoder(  # noqa: PLR0913, PLR0917 (one parameter per flag)
    old: Annotated[Path, typer.Argument(metavar="OLD.pt", readable=False, help="Its weights (state_dict).")],
    out: Annotated[Path, typer.Option(metavar="NEW.safetensors", help="Where to write.")],
    grid: Annotated[str, typer.Option(metavar="H,W", help="Points of the grid; 1D data: 1,W.")],
    patch: Annotated[int, typer.Option(help="Its patch_size.")],
    tokens: Annotated[int, typer.Option(help="Its latent_len.")],
    channels: Annotated[int, typer.Option(help="Channels of its fields together.")] = 1,
    fourier: Annotated[str, typer.Option(metavar="K,K", help="Its fourier_frequencies.")] = "1,2",
    key: Annotated[str | None, typer.Option(help="The entry of OLD with the weights.")] = None,
    prefix: Annotated[str, typer.Option(help="Take names that begin so, and cut it off.")] = "",
    original: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Makes the original, to take its positions and compare."),
    ] = None,
    field: Annotated[str, typer.Option(help="The name that the original has for its field.")] = "data",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Convert weights of the earlier grid encoder.

    For encoder.kind=grid. Possible where its stem is untrained and its pooling takes equal rectangles; else
    the layer that stands in the way is named. The result is compared with the earlier computation.

    \b
    Example:
      stoker compat convert-encoder old.pt --out new.safetensors --grid 64,64 --patch 4 --tokens 16
    """
    with edge(as_json=as_json, debug=debug) as out_edge:
        from stoker.compat.encoder import convert_encoder as convert
        from stoker.compat.encoder import original_forward

        points = _numbers(grid, "--grid", 2)
        size = (points[0], points[1])
        forward = None
        if original is not None:
            forward = original_forward(_original(original, old, key, prefix), size, field)
        result = convert(
            old, out, grid=size, patch=patch, tokens=tokens, channels=channels,
            fourier=_numbers(fourier, "--fourier"), key=key, prefix=prefix, original=forward,
        )  # fmt: skip
        out_edge.show(result, _show)


def _original(spec: str, old: Path, key: str | None, prefix: str) -> Any:
    """The original module, with the weights."""
    from torch import nn

    from stoker.encoders.checkpoint import load_checkpoint
    from stoker.pipeline.user_code import UserCode

    code = UserCode(
        setting="--original", spec=spec, of="a function that makes the original", arguments="nothing",
        error=EncoderError,
    )  # fmt: skip
    module = code.call(code.find(), {})
    if not isinstance(module, nn.Module):
        raise ConfigError(f"--original {spec} makes a {type(module).__qualname__}. {code.form}")
    load_checkpoint(module, old, key=key, prefix=prefix)
    return module.eval()


def _numbers(text: str, flag: str, count: int | None = None) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        found = ()
    if (count is not None and len(found) != count) or (not found and text):
        raise ConfigError(
            f"{flag} {text}: expected {count or 'some'} whole numbers, as {'64,64' if count else '1,2'}"
        )
    return found


def _show(result: ConvertedEncoder, console: Console) -> None:
    console.print(
        escape(
            f"{result.out}: patch {result.patch}, {result.tokens} tokens of {result.dim} numbers; differs by "
            f"at most {result.max_difference:.2g} from the {result.checked_against}, latents up to "
            f"{result.max_latent:.3g}"
        ),
        soft_wrap=True,
    )
    console.print(escape("use it with: " + " ".join(result.settings)), soft_wrap=True)

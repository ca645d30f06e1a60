"""Rows of `stoker validate`: what was checked, and how it came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from stoker.config.remedies import in_settings
from stoker.errors import ConfigError, ResourceError, StokerError
from stoker.schema import JsonResult

Status: TypeAlias = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(JsonResult):
    """One thing that was checked."""

    json_keys = ("check", "status", "detail")

    check: str
    """What: `config`, `training`, `data train`, `encoder`, `cache`, `windows`, `tasks`, `run folder`,
    `tracker wandb`, `gpu`, `driver`, `shm`, `memory`, `disk`, `inodes`, `launch code`."""
    status: Status
    detail: str
    """What was found, with figures; for warn and fail also what to do."""
    exit_code: int = 0
    """What a `fail` of this row makes the command return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(JsonResult):
    """All rows."""

    json_keys = ("rows", "exit_code")

    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        """0 without a failed row; 3 when a setting or file is wrong, else 6 when resources do not suffice."""
        codes = {row.exit_code for row in self.rows if row.status == "fail"}
        return ConfigError.exit_code if codes - {ResourceError.exit_code} else max(codes, default=0)

    def and_these(self, rows: list[Row]) -> Validation:
        """With more rows at the end."""
        return Validation(rows=(*self.rows, *rows))


def failed(check: str, error: StokerError | OSError, exit_code: int | None = None) -> Row:
    """The row of what an error says; its class decides the exit code, unless one is given."""
    if isinstance(error, StokerError):
        detail, code = in_settings(error), exit_code or error.exit_code
        return Row(check=check, status="fail", detail=detail, exit_code=code)
    detail = f"{error.filename}: {error.strerror}. Fix that, or name another"
    return Row(check=check, status="fail", detail=detail, exit_code=exit_code or ConfigError.exit_code)

"""Measure the encode batch of a configuration, to show it."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.pipeline.build import build_jobs, tasks_of
from stoker.pipeline.encode_batch import Settled, measure_jobs, settled_batch
from stoker.pipeline.together import encoders_of
from stoker.precompute.encode_batch import EncodeBatch
from stoker.scale.ranks import ALONE
from stoker.schema import Json
from stoker.sources.files import canonical_split


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBench:
    """The encode batch of a task: what is in force, and what was measured now."""

    task: str
    in_force: Settled | None
    """None: `auto`, and nothing was encoded or measured before."""
    fixed: int
    """Samples in one call by the fixed rule."""
    found: EncodeBatch

    @property
    def setting(self) -> str:
        """The setting with what was measured, as `key=value`."""
        samples = self.found.samples
        return f"precompute.encode_batch={'null' if samples is None else samples}"

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        force = self.in_force
        return {
            "task": self.task,
            **self.found.to_json(),
            "setting": self.setting,
            "fixed_rule": self.fixed,
            "in_force": None if force is None else force.samples or self.fixed,
        }


def bench_encode(config: Config) -> EncodeBench:
    """Measure the encoder of the first task on its device; nothing is encoded or noted.

    Raises:
        ConfigError: There is no encoder.
        StokerError: As `build_jobs` and `measure_encode_batch`.
    """
    task = tasks_of(config)[0]
    own = config.for_task(task)
    (job,) = build_jobs(own, task, [canonical_split(own.data.wanted_splits[0])])
    if job.encoder is None:
        raise ConfigError("encoder.kind is identity: samples are stored as they are, and none is encoded")
    schema = job.source.schema()
    return EncodeBench(
        task=task,
        in_force=settled_batch(own, task, job.encoder, job.source),
        fixed=job.encoder.group(schema).samples,
        found=measure_jobs(own, [job], encoders_of(own, ALONE)[0]),
    )

"""Who failed, how often, and what follows: the one place that decides between retry and quarantine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from stoker.errors import IncompleteError, SourceError, arg
from stoker.precompute.fill import CHANGED, SampleFault
from stoker.precompute.verdict import retry_hint
from stoker.store import Failure

ATTEMPTS = 2
"""Tries that a sample gets in one run."""
FIRST = 64
"""So many samples that fail before one was read end a run that may not quarantine them."""
_DEAD_AT_FIRST = 3
_DEAD_LATER = 8
_STUCK = 2


@dataclass(slots=True, kw_only=True)
class _PartRecord:
    """What is known of one part in this run."""

    answered: bool = False
    """A sample of it has been read."""
    hung: set[int] = field(default_factory=set[int])
    """Samples on which readers hung or died at their first try, since one was read."""
    stuck: int = 0
    """Readers that could not even be killed in the middle of it."""


class Ledger:
    """Counts attempts by sample and hangs by part.

    Args:
        bad: Numbers quarantined before this run that are not tried again.
        quarantine: Records failures durably, several at the cost of one.
        wanted: Whether a number is to be stored by this run; others that fail are only replaced by zeros.
        allowed: Samples that may be set aside, before this run and in it.
        place: Where a user finds a sample; put before its error, unless that says so itself.
        nan: As `PrecomputeSettings.nan`.
    """

    def __init__(
        self,
        bad: Iterable[int],
        *,
        quarantine: Callable[[Sequence[Failure]], None],
        wanted: Callable[[int], bool],
        allowed: float = math.inf,
        place: Callable[[int], str] = "sample {}".format,
        nan: str = "reject",
    ) -> None:
        self._nan = nan
        self._bad = set(bad)
        self._allowed = allowed
        self.place = place
        self._hopeless: list[int] | None = []
        self._quarantine = quarantine
        self._wanted = wanted
        self._attempts: dict[int, int] = {}
        self._parts: dict[int, _PartRecord] = {}
        self.failures: list[Failure] = []
        """Quarantined by this run, in order."""

    def is_bad(self, number: int) -> bool:
        """Whether a sample is set aside, and zeros stand for it in its group."""
        return number in self._bad

    def fault(self, fault: SampleFault) -> bool:
        """Take note of a failed attempt; True when the sample is to be tried again.

        A fault that another try cannot mend, or the second one, sets the sample aside.

        Raises:
            SourceError: The source changed; no sample is at fault.
            IncompleteError: The first `FIRST` samples all failed, and they are more than is allowed.
        """
        if fault.stage == CHANGED:
            raise SourceError(fault.error)
        attempts = self._attempts.get(fault.number, 0) + 1
        self._attempts[fault.number] = attempts
        if fault.retry and attempts < ATTEMPTS:
            return True
        where = self.place(fault.number)
        if where not in fault.error:
            fault = replace(fault, error=f"{where}: {fault.error}")
        self._set_aside([fault.number], fault)
        self._check_hope(fault)
        return False

    def attempts(self, number: int) -> int:
        """Failed attempts at a sample in this run."""
        return self._attempts.get(number, 0)

    def answered(self, part: int) -> None:
        """A sample of `part` has been read, so its storage answers."""
        record = self._parts.setdefault(part, _PartRecord())
        record.answered = True
        record.hung.clear()
        self._hopeless = None

    def part_is_dead(self, part: int, number: int) -> bool:
        """Take note that a reader hung or died on `number`; True when the whole part is to be given up.

        That is so once readers were lost on three different samples of a part of which none was ever read,
        or on eight one after another of one that used to answer: trying each of its samples would cost two
        deadlines each. A second try that fails like the first says nothing new about the part.
        """
        record = self._parts.setdefault(part, _PartRecord())
        if self.attempts(number) < ATTEMPTS:
            record.hung.add(number)
        return len(record.hung) >= (_DEAD_LATER if record.answered else _DEAD_AT_FIRST)

    def part_holds_readers(self, part: int) -> bool:
        """Take note that a reader of `part` cannot be killed; True, at the second, to give the part up.

        Each further try would cost a process that nothing can end, even where the part answered before.
        """
        record = self._parts.setdefault(part, _PartRecord())
        record.stuck += 1
        return record.stuck >= _STUCK

    def give_up(self, numbers: Iterable[int], fault: SampleFault) -> int:
        """Set aside every one of `numbers` that is not yet, for the reason in `fault`; how many."""
        rest = [number for number in numbers if number not in self._bad]
        self._set_aside(rest, fault)
        return len(rest)

    def _check_hope(self, fault: SampleFault) -> None:
        """Stop where not one sample could be read: it is a setting or the code then, not the data."""
        if self._hopeless is None or fault.kind != "sample" or fault.stage == "encode":
            return
        self._hopeless.append(fault.number)
        if len(self._hopeless) < FIRST or len(self._bad) <= self._allowed:
            return
        raise IncompleteError(
            f"the first {len(self._hopeless)} samples all failed, and none was read. The last is sample "
            f"{fault.number} ({fault.stage}): {fault.error}\nFix the cause and "
            f"{retry_hint({fault.stage}, self._nan)}. Or allow more samples to fail with "
            f"{arg('max_quarantined', 1.0)}"
        )

    def _set_aside(self, numbers: Sequence[int], fault: SampleFault) -> None:
        failures = [
            Failure(
                number=number,
                stage=fault.stage,
                error=fault.error,
                attempts=max(1, self._attempts.get(number, 0)),
                kind=fault.kind,
            )
            for number in numbers
            # What is stored already is not wanted; a failed second reading takes nothing away.
            if number not in self._bad and self._wanted(number)
        ]
        self._bad.update(numbers)
        self._quarantine(failures)
        self.failures += failures

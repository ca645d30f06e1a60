"""What `stoker launch vast` does: look for machines, rent one, and look after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from stoker.errors import ConfigError, ServiceError
from stoker.launch.client import Instance, Offer, VastClient
from stoker.launch.plan import Launch
from stoker.schema import Json

OTHERS = 3
"""Offers that are tried after another customer took the first."""
GONE = (400, 404, 410)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """A machine that was just rented."""

    launch: Launch
    instance: int
    offer: Offer

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "instance": self.instance,
            "label": self.launch.label,
            "offer": asdict(self.offer),
            "commit": self.launch.code.commit,
            "onstart": self.launch.onstart,
            "request": self.launch.request(shown=True),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What would be sent."""

    launch: Launch

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "onstart": self.launch.onstart,
            "bytes": len(self.launch.onstart.encode()),
            "request": self.launch.request(shown=True),
            "query": self.launch.query(),
            "label": self.launch.label,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """What can be rented."""

    offers: tuple[Offer, ...]

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {"offers": [asdict(one) for one in self.offers]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What is rented, of one run."""

    label: str
    instances: tuple[Instance, ...]
    done: str = ""
    """What was done to them."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {"label": self.label, "instances": [asdict(one) for one in self.instances], "done": self.done}


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """The end of a machine's log."""

    instance: int
    text: str

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {"instance": self.instance, "log": self.text}


def search(client: VastClient, launch: Launch) -> Offers:
    """Machines that the settings allow, the cheapest first."""
    return Offers(offers=tuple(client.offers(launch.query())))


def up(client: VastClient, launch: Launch, offer: int | None = None) -> Rented:
    """Rent the cheapest machine, or the one that was chosen.

    Raises:
        ConfigError: A machine of this run is rented already, or none fits.
    """
    running = [one for one in client.instances() if one.label == launch.label and one.status != "stopped"]
    if running:
        raise ConfigError(
            f"instance {running[0].id} of {launch.label} is {running[0].status} already. Take it down first, "
            "or give this run another training.run_dir"
        )
    offers = client.offers(launch.query())
    chosen = offers if offer is None else [one for one in offers if one.id == offer]
    if not chosen:
        what = "fits launch.gpu, gpus, disk, region and max_price" if offer is None else f"is number {offer}"
        raise ConfigError(f"no offer {what} ({len(offers)} offers found). Ask for less, or try again later")
    for one in chosen[: 1 + OTHERS]:
        try:
            number = client.create(one.id, launch.request(shown=False))
        except ServiceError as error:
            if error.status in GONE and one is not chosen[: 1 + OTHERS][-1]:
                continue  # another customer was faster
            raise
        return Rented(launch=launch, instance=number, offer=one)
    raise ConfigError("every offer was taken meanwhile. Try again")


def status(client: VastClient, label: str) -> Machines:
    """The machines of a run."""
    found = [one for one in client.instances() if one.label == label]
    return Machines(label=label, instances=tuple(found))


def logs(client: VastClient, label: str, lines: int, instance: int | None = None) -> Log:
    """The end of the log of the newest machine of a run."""
    number = _chosen(client, label, instance)[-1].id
    return Log(instance=number, text=client.logs(number, lines))


def down(client: VastClient, label: str, instance: int | None = None, *, destroy: bool = False) -> Machines:
    """Stop the machines of a run; `destroy` gives them back, with all that is on their disks."""
    found = _chosen(client, label, instance)
    for one in found:
        if destroy:
            client.destroy(one.id)
        else:
            client.stop(one.id)
    return Machines(label=label, instances=tuple(found), done="destroyed" if destroy else "stopped")


def _chosen(client: VastClient, label: str, instance: int | None) -> Sequence[Instance]:
    """Machines of a run, or the one of them that was named. Machines of other runs are not touched.

    Raises:
        ConfigError: There is none.
    """
    found = [one for one in client.instances() if one.label == label]
    chosen = sorted((one for one in found if instance in (None, one.id)), key=lambda one: one.id)
    if not chosen:
        what = "none" if instance is None else f"no instance {instance}"
        raise ConfigError(f"{label} has {what}. `stoker launch vast status CONFIG` lists its machines")
    return chosen

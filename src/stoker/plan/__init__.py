"""Where records should live, and why: limits of this machine, and the arithmetic on them.

cgroups.py     limits of control groups, version 1 and 2
resources.py   what this process may use; the only module that asks the machine
rates.py       how fast it copies and reads, when timed
elsewhere.py   what an epoch fetches of a set that lies on an object store
tiers.py       records per tier, seconds per batch, stall: arithmetic
words.py       the reason in words
gpus.py        what the memory of GPUs would hold
ledger.py      what the loaders of one process hold together
moves.py       when what is held should change, and when it had better stay
mounts.py      what kind of storage a path lies on
"""

from stoker.plan.placement import LEDGER, Ledger, Reservation
from stoker.plan.rates import BatchLoad, Rates, measure_rates
from stoker.plan.resources import Resources, probe
from stoker.plan.tiers import TIERS, Demand, Elsewhere, Plan, Tier, TierShare, plan_tiers, stall_of

__all__ = [
    "LEDGER",
    "TIERS",
    "BatchLoad",
    "Demand",
    "Elsewhere",
    "Ledger",
    "Plan",
    "Rates",
    "Reservation",
    "Resources",
    "Tier",
    "TierShare",
    "measure_rates",
    "plan_tiers",
    "probe",
    "stall_of",
]

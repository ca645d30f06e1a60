"""Plans of where records should live: limits of this machine, and the arithmetic on them.

README.md has the map of this folder.
"""

from stoker.plan.placement import MEMORY_LEDGER, MemoryLedger, Reservation
from stoker.plan.rates import BatchLoad, Rates, measure_rates
from stoker.plan.remote import RemoteDemand
from stoker.plan.resources import Resources, probe
from stoker.plan.tiers import TIERS, Demand, Plan, Tier, TierShare, plan_tiers, stall_of
from stoker.plan.trials import Interval

__all__ = [
    "MEMORY_LEDGER",
    "TIERS",
    "BatchLoad",
    "Demand",
    "Interval",
    "MemoryLedger",
    "Plan",
    "Rates",
    "RemoteDemand",
    "Reservation",
    "Resources",
    "Tier",
    "TierShare",
    "measure_rates",
    "plan_tiers",
    "probe",
    "stall_of",
]

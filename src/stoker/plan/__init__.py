"""Plans of where records should live: limits of this machine, and the arithmetic on them.

README.md has the map of this folder.
"""

from stoker.plan.placement import MEMORY_LEDGER, MemoryLedger, Reservation
from stoker.plan.rates import BatchLoad, Rates, measure_rates
from stoker.plan.resources import Resources, probe
from stoker.plan.tiers import TIERS, Demand, Plan, RemoteDemand, Tier, TierShare, plan_tiers, stall_of

__all__ = [
    "MEMORY_LEDGER",
    "TIERS",
    "BatchLoad",
    "Demand",
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

"""Where records should live, and why: limits of this machine, and the arithmetic on them.

README.md has the map of this folder.
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

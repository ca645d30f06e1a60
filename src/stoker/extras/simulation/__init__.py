"""Estimate what a run would take on other machines: arithmetic, and queues where several wait."""

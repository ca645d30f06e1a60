"""Adapters for frameworks that ask for more than an iterable with state; docs/trainers.md says which do."""

from stoker.integrations.dataloader import as_dataloader

__all__ = ["as_dataloader"]

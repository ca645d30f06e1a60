"""Rented machines: the script that one starts with, and the provider that rents them."""

"""Frozen encoders: what turns a raw sample into the record that training reads.

protocol.py   what an encoder promises
"""

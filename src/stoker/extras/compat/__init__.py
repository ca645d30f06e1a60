"""The names of earlier systems, behind `stoker.compat`, and `stoker compat`."""

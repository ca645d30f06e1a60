"""A cache as files of other libraries, which read them back without Stoker.

run.py         checks, makes everything in a temporary folder, and gives it its name
columns.py     which tensors there will be, of which shape and dtype
read.py        records of a cache in order of number, verified, in pieces
safetensors_files.py, tensordict_files.py  the two layouts

docs/export.md says what they hold.
"""

from stoker.extras.export.records import ExportSettings
from stoker.extras.export.run import ExportReport, export_cache

__all__ = ["ExportReport", "ExportSettings", "export_cache"]

"""A cache as files of other libraries, which read them back without Stoker.

docs/how-to/export.md says what they hold, docs/how-to/plugins.md how another layout is added.
"""

from stoker.extras.export.run import (
    ExportedFile,
    Exporter,
    ExportReport,
    ExportSettings,
    ExportTensor,
    ExportWriter,
    export_cache,
    tensors_of,
)

__all__ = [
    "ExportReport",
    "ExportSettings",
    "ExportTensor",
    "ExportWriter",
    "ExportedFile",
    "Exporter",
    "export_cache",
    "tensors_of",
]

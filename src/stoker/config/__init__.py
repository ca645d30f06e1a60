"""Settings: what there is, where they come from, what earlier names mean.

README.md has the map of this folder.
"""

from stoker.config.load import load_config, make_config
from stoker.config.models import Config

__all__ = ["Config", "load_config", "make_config"]

"""Settings: what there is, where they come from, what earlier names mean.

sections.py   what all sections share, and sections of kinds of data, engines and machines
models.py     every setting with type, default and meaning
names.py      settings by dotted name; what a value should have been, which name was meant
load.py       YAML file, command line and names of earlier systems to `Config`, with exact messages
document.py   docs/config.md, made from the models
"""

from stoker.config.load import load_config, make_config
from stoker.config.models import Config

__all__ = ["Config", "load_config", "make_config"]

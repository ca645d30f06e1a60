"""Settings: what there is, where they come from, what earlier names mean.

models.py     every setting with type, default and meaning; section.py what its sections share
kinds.py      kinds of sources, and which settings each takes
names.py      settings by dotted name; what a value should have been, which name was meant
earlier.py    names of earlier systems
remedies.py   remedies of errors in the words of the settings file
load.py       YAML file and command line to `Config`, with exact messages
document.py   docs/config.md, made from the models
"""

from stoker.config.load import load_config, make_config
from stoker.config.models import Config

__all__ = ["Config", "load_config", "make_config"]

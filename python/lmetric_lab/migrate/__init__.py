"""Configurations of other routers, translated into the configuration of this router.

`import_config` reads a file of one of the `KINDS`. Each setting of the file becomes a setting here,
or a remark. No setting disappears without a word.
"""

from lmetric_lab.migrate.detect import KINDS, import_config
from lmetric_lab.migrate.draft import Draft

__all__ = ["KINDS", "Draft", "import_config"]

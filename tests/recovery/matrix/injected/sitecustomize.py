"""Numbers and disturbs the calls of a coordinator and of its Python workers: see `tests.recovery.matrix.points`.

Python imports this module at its start wherever this directory is on PYTHONPATH. MATRIX says in JSON what is to happen;
the file `marker` is made by whoever gets to the point first, so that it happens once.
"""

import json
import os
import sys
from pathlib import Path

if "MATRIX" in os.environ and not any("spark-submit" in argument for argument in sys.argv):
    from tests.recovery.matrix.points import Disturbance, Point, Wrapped

    _raw = json.loads(os.environ["MATRIX"])
    _at = Disturbance(_raw["fault"], Point(*_raw["at"]), *map(Path, _raw["files"])) if _raw["fault"] else None
    Wrapped(Path(_raw["root"]), _at, Path(_raw["journal"]) if _raw["journal"] else None).install()

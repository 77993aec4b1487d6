"""SpecRay on Ray: placement, supervision and scaling. The engine and its HTTP server live in `specray`."""

import os
import sys

if sys.flags.safe_path:  # Ray puts the driver's directory first in its workers' path even so, with a user's json.py
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

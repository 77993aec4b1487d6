"""SpecRay on Ray: placement, supervision, routing and the HTTP API. The engine itself lives in `specray`."""

import os
import sys

if sys.flags.safe_path:  # Ray puts the driver's directory first in its workers' path even so, with a user's json.py
    sys.path[:] = [entry for entry in sys.path if entry not in ("", os.getcwd())]

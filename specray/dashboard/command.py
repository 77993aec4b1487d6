"""`specray dashboard`: writes the files of dashboards/, or draws a running cluster's panels.

Grafana's SDK and matplotlib are imported only when they are used.
"""

import argparse
import time
from pathlib import Path

from specray.cli.arguments import positive
from specray.dashboard.alerts import rules_yaml
from specray.dashboard.grafana import dashboard_json
from specray.dashboard.png import save_png

HELP = "Write the Grafana dashboard and the alert rules, or draw the main panels of a running cluster."
DASHBOARD, ALERTS = "specray.json", "alerts.yaml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FOLDER", help=f"write {DASHBOARD} and {ALERTS} there")
    what.add_argument("--png", type=Path, metavar="FILE", help="draw the main panels from live data")
    add = parser.add_argument
    add(
        "--prometheus",
        default="http://127.0.0.1:9090",
        metavar="URL",
        help="address of Prometheus for --png (default: %(default)s)",
    )
    add(
        "--minutes",
        type=positive,
        default=15,
        metavar="N",
        help="time range of --png, up to now (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    if options.write:
        write(options.write)
        return 0
    now = time.time()
    save_png(options.png, options.prometheus, now - 60 * options.minutes, now)
    print(f"wrote {options.png}")
    return 0


def write(folder: Path) -> None:
    """Write the generated files, replacing older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in ((DASHBOARD, dashboard_json()), (ALERTS, rules_yaml())):
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}")

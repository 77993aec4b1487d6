"""`specray dashboard`: writes the dashboard and the alert rules, or draws a running cluster's panels."""

import argparse
import shutil
import time
from pathlib import Path

from specray.cli.arguments import positive
from specray.dashboard.panels import DASHBOARD
from specray.dashboard.png import save_png

HELP = "Write the Grafana dashboard and the files for Prometheus, or draw the main panels of a running cluster."
FILES = [DASHBOARD, DASHBOARD.with_name("alerts.yaml"), DASHBOARD.with_name("prometheus.yaml")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    names = ", ".join(path.name for path in FILES)
    what.add_argument("--write", type=Path, metavar="FOLDER", help=f"write {names} there")
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
        options.write.mkdir(parents=True, exist_ok=True)
        for path in FILES:
            print(f"wrote {shutil.copyfile(path, options.write / path.name)}")
        return 0
    now = time.time()
    save_png(options.png, options.prometheus, now - 60 * options.minutes, now)
    print(f"wrote {options.png}")
    return 0

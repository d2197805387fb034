"""Draw the learning curves of runs into an SVG file.

python examples/grpo/draw.py --out runs/train/curve.svg "seed 0=runs/train/seed-0" …
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tinygrpo.curve import draw, read_curve


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER", help="a run's label and folder")
    parser.add_argument("--out", type=Path, required=True, help="the SVG file")
    parser.add_argument("--title", default="GRPO on two cores")
    parser.add_argument("--goal", type=float, default=0.85, help="the success that a dashed line marks")
    options = parser.parse_args()
    curves = []
    for run in options.runs:
        label, equals, folder = run.partition("=")
        if not equals:
            parser.error(f"{run!r} must be LABEL=FOLDER")
        curves.append(read_curve(Path(folder), label))
    draw(curves, options.out, options.title, options.goal)


if __name__ == "__main__":
    main()

"""`python -m rollyard_crds [FOLDER]`: writes the CRD YAML (default: crds/yaml of the checkout)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rollyard_crds import schema


def main() -> int:
    """Write one file for each kind, and print their paths."""
    checkout = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(prog="python -m rollyard_crds", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=checkout / "yaml", help="where to write")
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in schema.files().items():
        (folder / name).write_text(text)
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

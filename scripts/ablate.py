"""The ablation, from a checkout: `python scripts/ablate.py [options]` is `t5fastpatch ablate [options]`."""

import sys
from pathlib import Path

# A checkout need not be installed.
sys.path.insert(0, str(Path(__file__).parents[1]))

from t5fastpatch.cli import main

if __name__ == "__main__":
    sys.exit(main(["ablate", *sys.argv[1:]]))

"""The long proofs: `python -m tests.acceptance [PART ...]` runs them and writes `docs/acceptance.md`.

No part of the suite. Each part replaces its own section of the page and leaves the other
as it was, with its commit and date. Exit code 1 when a bar is not met; the page says which.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path

from cosmos_core.observe.logs import configure_logging
from tests.acceptance import (
    apart,
    chaos,
    colours,
    diffusion,
    digits,
    digits_served,
    distilled,
    fuzz,
    kills,
    load,
    modes,
    nodes,
    operations,
    page,
    promise,
    python_flow,
    ranks,
    real,
    rewards,
    seeds,
    tools,
)

logger = logging.getLogger(__name__)

PARTS = {
    "seeds": seeds.prove,
    "kills": kills.prove,
    "ranks": ranks.prove,
    "load": load.prove,
    "modes": modes.prove,
    "distilled": distilled.prove,
    "tools": tools.prove,
    "colours": colours.prove,
    "real": real.prove_grpo,
    "expert_iteration": real.prove_expert_iteration,
    "python_flow": python_flow.prove,
    "digits": digits.prove,
    "diffusion": diffusion.prove,
    "fuzz": fuzz.prove,
    "apart": apart.prove,
    "promise": promise.prove,
    "nodes": nodes.prove,
    "rewards": rewards.prove,
    "digits_served": digits_served.prove,
    "chaos": chaos.prove,
    "operations": operations.prove,
}
PAGE = Path(__file__).parents[2] / "docs" / "acceptance.md"


def main() -> int:
    """Run the named parts, all without a name; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance", description=__doc__)
    parser.add_argument("parts", nargs="*", help=f"any of: {', '.join(PARTS)}; none: all")
    parser.add_argument("--work", type=Path, help="folder for the runs, kept afterwards; none: a temporary one")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"no part {', '.join(unknown)}; there are: {', '.join(PARTS)}")
    configure_logging()
    logging.getLogger("tests").setLevel(logging.INFO)
    met = True
    with tempfile.TemporaryDirectory(prefix="acceptance-") as temporary:
        for name in arguments.parts or PARTS:
            folder = (arguments.work or Path(temporary)).absolute() / name
            folder.mkdir(parents=True)
            proof = PARTS[name](folder)
            page.put(arguments.page, proof)
            logger.info("%s: %s; written to %s", name, "met" if proof.is_met else "NOT MET", arguments.page)
            met = met and proof.is_met
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())

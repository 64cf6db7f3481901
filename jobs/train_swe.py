"""Trains a policy on software-engineering tasks with an unchanged agent harness.

python jobs/train_swe.py                              the embedded default, on a CPU
python jobs/train_swe.py my.yaml trainer.lr=1e-6      your own run
ray job submit --working-dir . -- python jobs/train_swe.py
"""

import sys
from pathlib import Path

from lightning_ray.run import command
from lightning_ray.tasks import models
from lightning_ray.tasks.swe import rehearsal

if __name__ == "__main__":
    default = Path(__file__).parent.parent / "examples" / "swe" / "embedded.yaml"
    sys.exit(command.main(default, models.resolve, rehearsal=rehearsal.overrides))

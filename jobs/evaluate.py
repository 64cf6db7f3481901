"""Reports pass@1 of a run's base model and of its trained weights, with its own harness.

python jobs/evaluate.py RUN_DIR [--samples K] [section.key=value ...]
"""

import sys

from lightning_ray.run import command
from lightning_ray.tasks import models

if __name__ == "__main__":
    sys.exit(command.evaluate(models.resolve))

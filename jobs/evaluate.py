"""pass@k with intervals, outcomes and cost of a run's base model and of what it trained.

python jobs/evaluate.py RUN_DIR [--models base,trained,step-00010] [--samples K] [section.key=value]
python jobs/evaluate.py CONFIG.yaml [--samples K]        the model of a configuration, without a run
python jobs/evaluate.py --show A.json B.json             finished evaluations, side by side
"""

import sys

from lightning_ray.run import command
from lightning_ray.tasks import models

if __name__ == "__main__":
    sys.exit(command.evaluate(models.resolve))

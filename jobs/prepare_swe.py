"""Clean training and validation tasks from rows of SWE-smith's or SWE-bench's form.

python jobs/prepare_swe.py rows.jsonl --out data/swe
python jobs/prepare_swe.py SWE-bench/SWE-smith:train --held-out SWE-bench/SWE-bench_Verified:test \
    --out data/swe runner=kubernetes kubernetes.namespace=lightning-ray-rollouts workers=64
python jobs/prepare_swe.py rows.jsonl --out data/swe --probe examples/swe/offline.yaml samples=4
"""

import sys

from lightning_ray.tasks import models
from lightning_ray.tasks.swe.preparation import command

if __name__ == "__main__":
    sys.exit(command.main(models.resolve))

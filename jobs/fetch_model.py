"""Fetches the small model that the embedded example trains, once, into the user's cache."""

import sys

from lightning_ray.tasks import models

if __name__ == "__main__":
    print(models.resolve(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))

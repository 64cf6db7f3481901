"""Software-engineering tasks: `embedded` makes them, `workspace` lays out, `grading` judges."""

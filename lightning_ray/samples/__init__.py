"""From recorded calls to training rows: forest, rows, batch, dataset."""

"""From rows of SWE-smith's or SWE-bench's form to clean tasks: see `pipeline`."""

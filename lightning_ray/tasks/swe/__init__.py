"""Software-engineering tasks: `embedded` makes them, `workspace` lays out, `grading` judges;
`rehearsal` makes a run of any configuration small."""

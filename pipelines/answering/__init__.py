"""Code shared by the stages that answer rows: predictors, and the parts of an output."""

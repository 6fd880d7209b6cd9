"""What every stage that answers rows shares: predictors, and the parts of the output."""

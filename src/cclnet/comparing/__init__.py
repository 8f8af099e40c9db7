"""Methods against each other on one data set: every method with every seed, and the paired comparison."""

"""Many training runs as one experiment: each resumable, evaluated, and reduced to a small result file."""

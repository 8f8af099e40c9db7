"""Training: from batches to a run folder. Start reading in ``loop``."""

"""A trained model on a page and behind an API: ``cclnet serve RUN``. Needs the extra ``serve``."""

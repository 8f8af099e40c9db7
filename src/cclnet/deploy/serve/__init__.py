"""Serve a trained model as a web page and an HTTP API: ``cclnet serve RUN``. Needs the extra ``serve``."""

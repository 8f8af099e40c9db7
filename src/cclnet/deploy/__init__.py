"""Use of trained models: load, predict, explain, export, serve."""

"""From a run to something people use: load, predict, explain, export, serve."""

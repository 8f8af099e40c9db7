"""Evaluation of predictions: metrics with intervals, calibration, statistics, comparison. No GPU, no training code."""

"""From predictions.csv to a judgement: scores, calibration, statistics, comparison. No GPU, no training code."""

"""Compare runs on the same images: differences with intervals, tests, and a verdict in plain words.

``compare(runs)`` takes run folders or predictions.csv files, as a list (grouped into methods by what their
model.json says; the seeds of one method differ) or as a dict of lists under a method's name, and returns the
dict below. Runs that differ in images, labels or classes are refused, all at once.

comparison.json::

    {
      "format": 1,
      "kind": "comparison",
      "task": "single-label" | "multi-label",
      "classes": [...], "part": {...}, "intervals": {...},    # as in scores.json (cclnet.evaluation.judge)
      "primary": "accuracy",                # the score that the overall verdicts speak of
      "metrics": [                          # what is compared, in order
        {"name": "accuracy", "higher_is_better": true}, ..., {"name": "nll", "higher_is_better": false}
      ],
      "methods": [
        {
          "name": "ccl, resnet18",
          "runs": [{"name": "ccl-0", "path": "runs/ccl-0", "seed": 0 | null}],
          "scores": {"accuracy": {"mean": 0.86, "sd": 0.004 | null, "low": 0.84, "high": 0.88, "values": [0.861, ...]}}
        }                                   # low, high: of the mean, over seeds and images (one seed: images alone)
      ],
      "comparisons": [                      # every pair of methods, or each method against the one asked for
        {
          "a": "ccl, resnet18", "b": "hard, resnet18",
          "seeds": {"a": 5, "b": 5, "paired": true},
          "in_words": "5 seeds each, paired by seed.",
          "metrics": {
            "accuracy": {
              "difference": 0.021,          # a - b, mean over seeds
              "low": 0.006, "high": 0.036,  # 95%, over seeds and images both; decides with "p"
              "p": 0.012, "p_holm": 0.036,  # Holm over the comparisons of this metric
              "evidence": true,             # p_holm < 0.05, and more than one seed each
              "better": "a" | "b" | null,   # who, when there is evidence
              "seed_differences": [...] | null,          # paired seeds only
              "effect_size": 1.9 | null,                 # Cohen's d_z over seeds (d for unpaired); null for one seed
              "bootstrap": {"low": 0.004, "high": 0.038, "p": 0.004},          # over seeds, then groups (plain percentile)
              "permutation": {"p": 0.0625, "smallest_possible": 0.0625, "arrangements": 32, "in_words": "..."} | null,
              "verdict": "ccl, resnet18 is better by 2.1 points [0.6, 3.6]."
            }
          },
          "mcnemar": {"only_a_right": 30, "only_b_right": 12, "p": 0.008, "in_words": "..."} | null,   # one seed each only
          "verdict": "..."                  # of the primary score, and what the others say
        }
      ],
      "correlation": {                      # null unless at least two runs have a correlation.csv
        "runs": ["ccl-0", "ccl-1"], "agreement": [[1.0, 0.94], [0.94, 1.0]],   # Spearman of the off-diagonals
        "mean_agreement": 0.94
      } | null,
      "warnings": [...],
      "versions": {...}
    }
"""

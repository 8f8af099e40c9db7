"""Judge one run: everything there is to say about a predictions.csv, as plain JSON.

``judge(run)`` takes a run folder or a predictions.csv and returns (and writes as scores.json) the dict below.
``compare(runs)`` of ``cclnet.evaluation.compare`` returns comparison.json; its schema stands there.

A *number with interval* is ``{"value": x, "low": x, "high": x}``; all three may be null (undefined), or the
two ends alone (every draw gave the same value, so nothing is known about the spread). K classes, in file
order, everywhere. No NaN or infinity is ever written: what is undefined is null.

scores.json::

    {
      "format": 1,
      "kind": "scores",
      "name": "ccl-0",                      # of the run folder, or of the file
      "model": {...} | null,                # model.json as it stands (method, backbone, trained, ...), null without one
      "task": "single-label" | "multi-label",
      "classes": ["MEL", ...],              # K names
      "part": {
        "name": "test" | "val" | "all",     # what is reported: test if there, else val, else everything
        "images": 2003,
        "groups": 1500 | null,              # null: no groups known
        "class_counts": [...],              # K, images of each class in this part
        "missing_classes": ["DF"],          # without an image in this part: left out of every macro mean
        "images_of_parts": {"val": 2003, "calibration": 800}   # all the parts in the file; {"all": n} if it names none
      },
      "intervals": {
        "level": 0.95, "draws": 1000, "seed": 0,
        "over": "groups" | "images", "units": 1500,
        "in_words": "95% intervals from 1,000 bootstrap draws of 1,500 groups."
      },
      "scores": {                           # numbers with interval; single-label:
        "accuracy", "balanced_accuracy", "macro_f1", "kappa", "macro_jaccard",
        "macro_auroc", "mean_average_precision", "top_2_accuracy", "top_3_accuracy", "top_5_accuracy"   # k < K only
                                            # multi-label:
        "mean_average_precision", "macro_auroc", "macro_f1", "micro_f1", "subset_accuracy", "hamming_loss"
      },
      "per_class": [                        # K, in class order
        {"class": "MEL", "support": 223, "predicted": 198,        # counts
         "precision", "recall", "f1", "jaccard", "auroc", "average_precision"}   # numbers with interval
      ],
      "confusion": [[...]] | null,          # K x K counts, row: true class, column: predicted; null for multi-label
      "calibration": {
        "temperature": {
          "value": 1.37 | null,             # what is saved in model.json; null: could not be fitted
          "fitted_on": "calibration" | "val" | "cross-fitted halves" | null,
          "images": 800,                    # how many images it was fitted on
          "halves": [1.35, 1.39] | null,    # cross-fitted: the temperature of each half
          "in_words": "One temperature, 1.37, fitted on ..."
        },
        "before": {                         # probabilities as in the file
          "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "aurc",       # numbers with interval
          "mean_confidence": 0.81,
          "reliability": [                  # the 15 equal-width bins of the ECE; empty ones are left out
            {"low": 0.6, "high": 0.667, "images": 130, "confidence": 0.64, "accuracy": 0.71}
          ],
          "risk_coverage": [{"coverage": 0.005, "risk": 0.0}, ..., {"coverage": 1.0, "risk": 0.14}]   # at most 200
        },
        "after": {...} | null               # the same after the temperature; null when none could be fitted
      },
      "leak": {                             # from split.csv; null without one, or when it names no groups
        "images": 790, "share": 0.394,      # of the reported part, whose group is also in the training part
        "per_class": [{"class": "MEL", "images": 158, "share": 0.71}],
        "in_words": "790 of 2,003 images (39%) show a lesion or patient that the model was trained on."
      } | null,
      "correlation": {...} | null,          # of correlation.csv, see cclnet.evaluation.correlation.summary
      "mistakes": [                         # the most confident errors, worst first, at most 24; [] for multi-label
        {"image": "ISIC_0024", "label": "MEL", "predicted": "NV", "probability": 0.99, "probability_of_label": 0.01}
      ],
      "warnings": ["...", ...],             # what a reader must know, in whole sentences
      "versions": {"cclnet": ..., "numpy": ..., "scikit-learn": ..., "scipy": ...}
    }

correlation::

    {
      "matrix": [[...]],                    # K x K, row k the soft label of class k
      "softness": 0.41,                     # mean of the diagonal
      "collapse_softness": 0.5519,          # where an overfitted dictionary ends (from model.json, else margin 2)
      "uniform_smoothing": {"epsilon": 0.69, "distance_mean": 0.07, "distance_max": 0.12},   # total variation of rows
                                            # from uniform label smoothing of the same softness
      "per_class": [{"class": "MEL", "softness": 0.40, "most_alike": "NV", "weight": 0.13}],
      "most_alike_pairs": [{"a": "DF", "b": "VASC", "weight": 0.17}],          # softest first, at most 10
      "rarity_agreement": 0.84 | null,      # Spearman of the off-diagonal with class rarity; null without class counts
      "confusion_agreement": 0.31 | null    # Spearman of the off-diagonal with how often the model confused the pair
    }
"""

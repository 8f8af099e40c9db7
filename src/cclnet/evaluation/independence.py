"""How many independent images a number of images is worth, where those of one group (lesion, patient) are alike.

With r the share of n images that are wrong, n_g of them in group g and w_g of these wrong, the variance of r over
groups is ``V = G / (G − 1) · Σ (w_g − r n_g)² / n²`` (ratio estimator, G groups); of n independent images it is
``r (1 − r) / n``. The second over the first, times n, is what they are worth. V of few groups is known badly, so it is
taken times ``(t / z)²``, t the Student quantile with G − 1 degrees of freedom (Korn and Graubard 1998). They are never
worth more than n, nor less than ``n² / Σ n_g²``: what they are where groups are right or wrong as a whole. That is what
is left where nothing or everything is wrong, which tells nothing of how alike a group is.

Simulated (5 to 500 groups, 5 and 20% wrong, groups not alike to nearly as a whole): Wilson's interval for so many
images holds the truth in 88 to 98% of cases; for all images, taken for independent, in 38 to 97%.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from cclnet.evaluation.bootstrap import LEVEL
from cclnet.predictions import Floats


def independent_images(wrong: npt.NDArray[np.bool_], groups: npt.NDArray[np.intp]) -> Floats:
    """What the first n of N images are worth, for n = 1..N, from whether each is wrong and its group.

    >>> two_of_ten = np.repeat(np.arange(10) < 2, 100)  # groups of 100 images, wrong as a whole
    >>> float(independent_images(two_of_ten, np.repeat(np.arange(10), 100))[-1])
    10.0
    >>> float(independent_images(two_of_ten, np.arange(1000))[-1])
    1000.0
    """
    own = wrong.astype(np.float64)
    of_group = pd.Series(own).groupby(groups)
    size, errors = of_group.cumcount().to_numpy(), of_group.cumsum().to_numpy() - own  # of its group, before each image
    n, count = np.arange(1, len(own) + 1), np.cumsum(size == 0)
    share = np.cumsum(own) / n
    sizes, both, squares = (np.cumsum(x) for x in (2 * size + 1, errors + own * (size + 1), own * (2 * errors + 1)))
    least = n**2 / sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = count / (count - 1) * (squares - 2 * share * both + share**2 * sizes) / n**2
        upper = (1 + LEVEL) / 2
        worth = share * (1 - share) / variance * (stats.norm.ppf(upper) / stats.t.ppf(upper, count - 1)) ** 2
    return np.clip(np.where((share > 0) & (share < 1) & (count > 1), worth, least), least, n)

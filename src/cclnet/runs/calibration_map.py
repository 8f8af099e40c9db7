"""The calibration map, from logits to logits whose probabilities are calibrated: a temperature and class offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cclnet.errors import InputError
from cclnet.schema import rule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

TEMPERATURE = rule(low=1e-3, high=1e3)
OFFSETS = rule(low=-1e3, high=1e3)


@dataclass(frozen=True)
class CalibrationMap:
    """``apply(logits)`` → ``logits / T + b``. Without a temperature nothing was fitted, and logits stay as they are.

    >>> import numpy as np
    >>> CalibrationMap(2.0, (0.5, -0.5)).apply(np.array([[2.0, 4.0]])).tolist()
    [[1.5, 1.5]]
    """

    temperature: float | None = None  # T
    offsets: tuple[float, ...] | None = None  # b, one per class, [K]; None: zero. They sum to zero.

    @property
    def is_fitted(self) -> bool:
        return self.temperature is not None

    def apply(self, logits: Floats) -> Floats:
        """The calibrated logits [N, K]; the softmax (several labels: sigmoid) of them gives the probabilities."""
        import numpy as np  # here, so that scores.json is read without it

        scaled = logits if self.temperature is None else logits / self.temperature
        return scaled if self.offsets is None else scaled + np.asarray(self.offsets)

    def check(self, classes: int, multilabel: bool = False) -> None:
        """Refuse offsets of other classes, without a temperature, or of several labels."""
        if self.offsets is None:
            return
        if multilabel or self.temperature is None or len(self.offsets) != classes:
            wrong = (
                "with several labels there are none" if multilabel
                else "they need a temperature" if self.temperature is None
                else f"{classes} are needed, one per class"
            )  # fmt: skip
            raise InputError(f"the calibration has {len(self.offsets)} offsets, but {wrong}")

    def to_plain(self) -> dict[str, Any]:
        """As the metadata of an exported program has it; without offsets as in older versions."""
        return {"temperature": self.temperature} | ({} if self.offsets is None else {"offsets": list(self.offsets)})

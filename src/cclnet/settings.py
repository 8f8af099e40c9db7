"""Settings of a run: frozen dataclasses whose fields carry their help text and their range.

Each setting is declared once, with :func:`setting`. The checks, the options of the command line and the page of all
settings in the documentation derive from the fields.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from cclnet.errors import InputError, unknown
from cclnet.files import MAX_JSON, check_regular
from cclnet.schema import check, from_plain, rule, rules

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

S = TypeVar("S")
LOGGERS = ("tensorboard", "csv", "mlflow", "wandb", "none")
DEFAULT_LR = {"sgd": 0.1, "adamw": 0.001}
# Test-time augmentation: the views of an image whose logits are averaged, by degrees of rotation, maybe of the mirror
# image ("mirrored 180" is the vertical flip), or by the corner that is cropped and enlarged.
TTA = {
    "none": ("0",),
    "flip": ("0", "mirrored 0"),
    "flips": ("0", "180", "mirrored 0", "mirrored 180"),
    "turns": ("0", "90", "180", "270", "mirrored 0", "mirrored 90", "mirrored 180", "mirrored 270"),
    "crops": ("0", "top left", "top right", "bottom left", "bottom right"),
}
POOLINGS = ("last", "stages")
MAX_DEPTH = 16  # of tables and lists in settings
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def setting(default: Any = MISSING, help: str = "", *, factory: Any = MISSING, **own: Any) -> Any:
    """A dataclass field with its :class:`~cclnet.schema.Rule`."""
    return dataclasses.field(default=default, default_factory=factory, metadata=rule(help, convert=True, **own))


@dataclass(frozen=True)
class DataOptions:
    """How a data set is read. None of it is needed for the known layouts.

    >>> DataOptions(label_column="diagnosis").describes_manifest
    True
    """

    source: str = setting("", "Layout of the data, if several fit.")
    image_column: str = setting("", "Column of a manifest with the image names. Default: found by its usual names.")
    label_column: str | tuple[str, ...] = setting(
        "", "Column with the class names, or columns of 0 and 1: A,B,C. Default: found by its usual names."
    )
    group_column: str = setting("", "Column of the patient or lesion, whose images stay in one split.")
    split_column: str = setting("", "Column with train, calibration, val or test.", old_name="part_column")
    label_separator: str = setting("", "Separator of several labels in one cell. Default: | or ; if found.")
    image_folder: str = setting(
        "", "Folder to which the names in a manifest are relative. Default: the folder of the manifest."
    )
    class_level: int = setting(
        0, "Folders of this level are the classes: 1 for those in DATA (or in train, val, test), 2 for those inside.",
        low=0,
    )  # fmt: skip
    strict: bool = setting(False, "Refuse images without a label and labels without an image.")
    follow_links: bool = setting(False, "Follow links that lead out of the data folder.")
    group_regex: str = setting(
        "",
        "Regular expression for the patient or lesion in an image name: 'person\\d+'. These stay in one split.",
    )
    exclude: str | tuple[str, ...] = setting(
        "", "Images to leave out: patterns of their names, separated by commas, such as `*_mask.png,bad/*`."
    )
    merge_labels: str = setting(
        "",
        "Table with the columns old and new: renames and merges classes; an empty new name leaves a class out.",
    )
    min_class_size: int = setting(0, "Leave out classes with fewer images.", low=0)
    keep_masks: bool = setting(False, "Keep segmentation masks found among the images of class folders.")
    skip_unreadable: bool = setting(False, "Leave out images that cannot be read; the run lists them.")
    deduplicate: bool = setting(
        False, "Leave out copies of an image in another split (the one in train) or with other labels (all of them)."
    )

    def __post_init__(self) -> None:
        check(self, "setting ")

    @property
    def exclude_patterns(self) -> tuple[str, ...]:
        """``exclude`` as single patterns.

        >>> DataOptions(exclude="a*, b/*").exclude_patterns
        ('a*', 'b/*')
        """
        several = self.exclude.split(",") if isinstance(self.exclude, str) else self.exclude
        return tuple(pattern.strip() for pattern in several if pattern.strip())

    @property
    def describes_manifest(self) -> bool:
        """Whether an option is given that only a manifest has."""
        return any((self.image_column, self.label_column, self.group_column, self.split_column, self.label_separator,
                    self.image_folder))  # fmt: skip

    @property
    def selects(self) -> bool:
        """Whether an option is given that leaves out images, or changes their classes or groups."""
        return any((self.exclude_patterns, self.merge_labels, self.group_regex, self.min_class_size))


@dataclass(frozen=True)
class SplitSettings:
    """How a table is divided into train, calibration, val and test.

    ``by``: "group" keeps every group in one split and the class ratios as close as the groups allow; "class" keeps the
    class ratios; "given" uses the splits that came with the data. "auto" is "given" if the data has splits, else
    "group" if groups are known, else "class". With "group" or "class", a test split that came with the data is kept
    and the rest is divided. The calibration split is taken from the training split, so val and test do not depend on
    it. The same seed gives the same split, whatever the order of the rows.
    """

    by: str = setting(
        "auto",
        "What to split by: groups (patients, lesions), classes, or as given with the data.",
        choices=("auto", "given", "group", "class"),
    )
    val: float = setting(0.2, "Share of the images for validation.", low=0, below=1)
    test: float = setting(0.0, "Share of the images for testing.", low=0, below=1)
    calibration: float = setting(0.0, "Share of the images to calibrate on.", low=0, below=1)
    folds: int | None = setting(None, "Number of cross-validation folds; `val` is then not used.", low=2, high=1000)
    fold: int = setting(0, "The fold that is the validation split, from 0.", low=0)
    seed: int = setting(0, "Seed of the split.", low=0)
    file: str = setting("", "A split.csv to use. Other split settings than `allow_leaks` then have no effect.")
    allow_leaks: bool = setting(False, "Accept a given split, or a file, with a group in two splits.")

    def __post_init__(self) -> None:
        check(self, "setting split.")
        if self.folds is not None and self.fold >= self.folds:
            raise InputError(f"setting split.fold must be below split.folds; got folds={self.folds}, fold={self.fold}.")
        val = self.val if self.folds is None else 1 / self.folds * (1 - self.test)
        if val + self.test + self.calibration >= 1 - 1e-9:
            raise InputError(
                f"split: val ({val:g}), test ({self.test:g}) and calibration ({self.calibration:g}) leave nothing "
                "to train on: their sum must be below 1."
            )


@dataclass(frozen=True)
class AugmentSettings:
    """How training images are augmented. The defaults follow the paper, which gives no strengths.

    Colour jitter applies brightness, contrast, saturation and hue in this order; torchvision shuffles them. The first
    three commute except for clamping, and one order needs one compiled kernel instead of 24. Rotation, zoom and shear
    mirror the image at its edges, so that no black corners appear.
    """

    crop: int = setting(224, "Side of the square the network sees, in pixels.", low=1, high=2048,
                        synonyms=("image_size", "img_size", "input_size", "size"))  # fmt: skip
    horizontal_flip: float = setting(0.5, "Probability of a horizontal flip.", low=0, high=1)
    vertical_flip: float = setting(0.5, "Probability of a vertical flip.", low=0, high=1)
    transpose: float = setting(
        0.0, "Probability of mirroring at the diagonal; with both flips at 0.5, 0.5 gives all eight orientations.",
        low=0, high=1,
    )  # fmt: skip
    brightness: float = setting(
        0.1, "Strength s of the change of brightness: the factor is uniform in [max(0, 1 − s), 1 + s].", low=0
    )
    contrast: float = setting(0.1, "Strength of the change of contrast, as for brightness.", low=0)
    saturation: float = setting(0.1, "Strength of the change of saturation, as for brightness.", low=0)
    hue: float = setting(0.02, "The hue shift is uniform in [−hue, hue], as a share of the colour circle.",
                         low=0, high=0.5)  # fmt: skip
    resized_crop: tuple[float, float] | None = setting(
        None, "Smallest and largest share of the image area to cut out and resize to the crop. None: a plain crop.",
        above=0, high=1, length=2, ascending=True,
    )  # fmt: skip
    resized_ratio: tuple[float, float] = setting(
        (3 / 4, 4 / 3), "Smallest and largest width over height of that area.", above=0, length=2, ascending=True
    )
    rotation: float = setting(
        0.0,
        "The crop is rotated about its centre by an angle uniform in [−rotation, rotation] degrees.",
        low=0,
        high=180,
    )
    zoom: tuple[float, float] | None = setting(
        None, "Smallest and largest magnification of the crop, log-uniform: [0.8, 1.25].", above=0, high=10, length=2,
        ascending=True,
    )  # fmt: skip
    warp: float = setting(
        1.0, "Probability that an image is resized, rotated, zoomed and sheared. The others are cropped without "
        "interpolation, so that the network also sees images as sharp as those of the test.", low=0, high=1,
    )  # fmt: skip
    shear: float = setting(0.0, "The shear angle is uniform in [−shear, shear] degrees.", low=0, high=45)
    trivial_colour: float = setting(
        0.0, "Strength of a TrivialAugment-style policy: one colour operation per image replaces the jitter. 0: off.",
        low=0, high=1, synonyms=("trivial_augment", "trivial_color"),
    )  # fmt: skip
    erasing: float = setting(0.0, "Probability of erasing a rectangle, 2 to 33% of the crop.", low=0, high=1,
                             synonyms=("random_erasing",))  # fmt: skip
    mixup: float = setting(0.0, "α of Beta(α, α) for mixing each image with the previous one in the batch. 0: off.",
                           low=0)  # fmt: skip
    cutmix: float = setting(
        0.0,
        "α of Beta(α, α) for pasting a box of the previous image. With mixup, each image gets one of the two. 0: off.",
        low=0,
    )

    def __post_init__(self) -> None:
        check(self, "setting augment.")

    @property
    def warps(self) -> bool:
        """Whether pixels are resampled, so that the whole image is needed and not only a crop of it."""
        return self.resized_crop is not None or self.affine

    @property
    def affine(self) -> bool:
        """Whether crops are rotated, magnified or sheared."""
        return self.rotation > 0 or self.zoom is not None or self.shear > 0

    @property
    def mixes(self) -> bool:
        """Whether images, and their labels, are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0


@dataclass(frozen=True)
class Settings(DataOptions):
    """Everything that decides a run. The defaults are the paper's values where it gives them."""

    # Data.
    data: str = setting("synthetic", "A folder, a table, an .npz file, medmnist:NAME, or synthetic[:settings].")
    short_side: int = setting(256, "Images are decoded once to this short side, in pixels.", low=8, high=65536)
    test_short_side: int | None = setting(
        None, "Short side of test images, in pixels. Default: objects appear as large as in training on average.",
        low=8, high=65536,
    )  # fmt: skip
    mean: tuple[float, ...] = setting(
        (), "Channel means. Default: those the backbone was pretrained with, else ImageNet's.", length=3
    )
    std: tuple[float, ...] = setting((), "Channel standard deviations. Default: as for `mean`.", length=3, low=1e-6)
    split: SplitSettings = setting(SplitSettings(), "How the data is split.")  # noqa: RUF009
    folds: int = setting(0, "Cross-validation with this many folds, at least 3; each image is predicted once. 0: none.",
                         low=0, synonyms=("n_folds", "cv"))  # fmt: skip
    augment: AugmentSettings = setting(AugmentSettings(), "How training images are augmented.")  # noqa: RUF009
    ordered: bool | None = setting(
        None, "Whether the classes have an order, as grades do. Default: whether their names are grades in a row.",
    )  # fmt: skip
    by: str = setting("", "Columns of the table whose subgroups are scored: sex,age,site.")
    cache_dir: str = setting("", "Folder for decoded images. Default: cclnet in the user's cache folder.")
    # Network and method.
    backbone: str = setting("resnet18", "Any timm model name.", synonyms=("model", "arch", "network", "encoder"))
    pretrained: bool = setting(False, "Start from timm's pretrained weights.")
    weights: str = setting("", "Start from a .safetensors file or a plain state dict.", synonyms=("checkpoint",))
    pooling: str = setting("last", "Features of the classifier: the mean of the last feature map, or of all stages.",
                           choices=POOLINGS)  # fmt: skip
    drop_rate: float = setting(0.0, "Dropout before the classifier.", low=0, high=0.99, synonyms=("dropout",))
    drop_path_rate: float = setting(
        0.0, "Stochastic depth: share of images that skip the last block, rising from 0.", low=0, high=0.99
    )
    method: str = setting("ccl", "How labels enter the loss; `cclnet methods` lists all methods.", synonyms=("loss",))
    method_settings: dict[str, Any] = setting(factory=dict, help="Settings of the method.")  # noqa: RUF009
    unsoften: bool = setting(False, "Remove the soft labels from the probabilities of the finished model.")
    # Optimisation.
    epochs: int = setting(160, "Epochs to train.", low=1, synonyms=("max_epochs", "num_epochs", "n_epochs"))
    batch_size: int = setting(128, "Images per step, over all devices together.", low=2, synonyms=("batch", "bs"))
    accumulate: int = setting(
        1, "Process a batch in this many pieces to save memory. Gradients are the same; batch norm sees one piece.",
        low=1, high=4096, synonyms=("accumulate_grad_batches", "gradient_accumulation_steps"),
    )  # fmt: skip
    optimizer: str = setting("sgd", "Optimizer.", choices=("sgd", "adamw"))
    lr: float = setting(None, "Learning rate of the network. Default: 0.1 for sgd, 0.001 for adamw.", low=0, high=1e6,
                        synonyms=("learning_rate",))  # fmt: skip
    lr_ccl: float = setting(0.0005, "Learning rate of the method's own parameters, such as the CCL head.", low=0,
                            high=1e6, synonyms=("learning_rate_ccl", "head_lr"))  # fmt: skip
    momentum: float = setting(0.9, "Momentum of SGD.", low=0, high=1)
    layer_decay: float = setting(
        1.0, "Factor on the learning rate from each layer of the backbone to the one before it; the classifier has lr.",
        above=0, high=1, synonyms=("layer_wise_lr_decay", "llrd"),
    )  # fmt: skip
    weight_decay: float = setting(1e-4, "Weight decay.", low=0, high=1e6, synonyms=("wd",))
    decay_norms: bool = setting(True, "Apply weight decay also to the norms and biases of the network.")
    clip: float = setting(1.0, "Largest gradient norm, of network and head separately. 0: off.", low=0,
                          synonyms=("grad_clip", "gradient_clip", "gradient_clip_val", "max_grad_norm"))  # fmt: skip
    schedule: str = setting("step", "Learning rate schedule.", choices=("step", "cosine", "constant"),
                            synonyms=("scheduler", "lr_scheduler"))  # fmt: skip
    drops: tuple[float, ...] = setting(
        (0.5, 0.75), "When the step schedule drops, as shares of the epochs.", above=0, below=1, ascending=True,
        synonyms=("milestones",),
    )  # fmt: skip
    drop_factor: float = setting(0.1, "Factor of each drop.", low=0, high=1, synonyms=("gamma",))
    warmup_epochs: float = setting(0.0, "Epochs of linear warm-up of the learning rate.", low=0, synonyms=("warmup",))
    ema: float = setting(
        0.0, "Decay of an exponential moving average of the weights, which is then tested and shipped. 0: off.",
        low=0, high=0.999999, synonyms=("ema_decay",),
    )  # fmt: skip
    class_weights: bool = setting(False, "Weight each sample by 1 / class frequency.")
    balanced_sampling: bool = setting(False, "Draw all classes equally often.")
    logit_adjustment: float = setting(
        0.0, "Train with τ log(class frequency) added to the logits. 1: balanced softmax. 0: off.", low=0,
        synonyms=("tau", "balanced_softmax"),
    )  # fmt: skip
    prior_bias: bool = setting(
        False, "Start the bias of the classifier at the log class frequencies, unless the classes are balanced."
    )
    batch_norm: str = setting(
        "batch", "Statistics of batch norm: of each device, over all GPUs, or frozen at their initial values.",
        choices=("batch", "sync", "frozen"),
    )  # fmt: skip
    # Decisions from the probabilities of the finished model.
    decision: str = setting(
        "", "Rule that chooses the class from the probabilities. Default: costs if any are given, else accuracy.",
        choices=("accuracy", "balanced", "costs"), synonyms=("rule",),
    )  # fmt: skip
    cost: str = setting("", "Costs of errors: MEL|BCC:NV=10 (true:predicted), or a CSV or TOML file. Others cost 1.",
                        synonyms=("costs", "cost_matrix"))  # fmt: skip
    tta: str = setting(
        "none", "Test-time augmentation: average the logits of 1, 2, 4, 8 or 5 views (forward passes). auto: the "
        "mirror images that training also shows.", choices=("auto", *TTA),
    )  # fmt: skip
    # Running.
    seed: int = setting(0, "Seed of weights, batches and augmentation.", low=0, synonyms=("random_state",))
    precision: str = setting("auto", "Floating-point precision. auto: bf16 on a GPU that supports it, else 32.",
                             choices=("auto", "32", "bf16", "64"), synonyms=("dtype", "amp"))  # fmt: skip
    compile: bool | None = setting(
        None, "Compile the network; if false, CUDA graphs are off as well. Default: on a GPU, for long runs."
    )
    resident: bool | None = setting(
        None, "Keep the images on the device instead of streaming them. Default: if they fit."
    )
    deterministic: bool = setting(False, "Identical results every time, also on a GPU; slower.")
    validate_every: int = setting(1, "Epochs from one validation to the next.", low=1)
    max_minutes: float = setting(0.0, "Stop training after this many minutes. 0: never.", low=0)
    logger: str = setting(
        "", "Where to copy the history of the epochs: tensorboard, csv, mlflow, wandb, separated by commas, or none. "
        "Default: tensorboard if it is installed.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self, "setting ")
        for name in self.logger.split(",") if self.logger else ():
            if name.strip() not in LOGGERS:
                raise unknown("logger", name.strip(), LOGGERS)
        if self.lr is None:
            object.__setattr__(self, "lr", DEFAULT_LR[self.optimizer])
        if self.optimizer == "adamw" and self.lr > 0.03:
            raise InputError(f"lr {self.lr} is a rate for sgd; adamw needs a smaller one, such as lr=0.001.")
        balancing = [n for n in ("class_weights", "balanced_sampling", "logit_adjustment") if getattr(self, n)]
        if len(balancing) > 1:
            raise InputError(f"{' and '.join(balancing)} both balance the classes: choose one.")
        if self.folds and (self.folds < 3 or self.split.folds is not None or self.split.file):
            raise InputError(
                f"folds must be at least 3, without split.folds and split.file beside it; got folds={self.folds}."
            )
        if self.augment.crop > self.short_side:
            raise InputError(
                f"augment.crop is {self.augment.crop} but images have a short side of {self.short_side}: "
                "make the crop smaller or short_side larger."
            )
        if self.test_short_side is not None and self.augment.crop > self.test_short_side:
            raise InputError(
                f"augment.crop is {self.augment.crop} but test_short_side is {self.test_short_side}: make it larger."
            )

    @property
    def input_mean(self) -> tuple[float, ...]:
        """Channel means of the network's input: ``mean`` if given, else derived from the weights it starts from."""
        return self.mean or self._pretrained_normalisation()[0]

    @property
    def input_std(self) -> tuple[float, ...]:
        """Channel standard deviations of the network's input; see ``input_mean``."""
        return self.std or self._pretrained_normalisation()[1]

    @property
    def test_views(self) -> str:
        """``tta``; for "auto" the views that training shows, too: images never mirrored there are not mirrored here.

        >>> Settings(tta="auto").test_views, Settings(tta="auto", augment=AugmentSettings(vertical_flip=0)).test_views
        ('flips', 'flip')
        """
        if self.tta != "auto":
            return self.tta
        horizontal, vertical = self.augment.horizontal_flip > 0, self.augment.vertical_flip > 0
        return "flips" if horizontal and vertical else "flip" if horizontal else "none"

    @property
    def cache_folder(self) -> Path | None:
        """``cache_dir`` as a path; None for the user's cache folder."""
        return Path(self.cache_dir).expanduser() if self.cache_dir else None

    def _pretrained_normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        if not (self.pretrained or self.weights):
            return IMAGENET_MEAN, IMAGENET_STD
        from cclnet.pretrained import pretrained_config

        config = pretrained_config(self.backbone)
        return (IMAGENET_MEAN, IMAGENET_STD) if config is None else (tuple(config.mean), tuple(config.std))


def read_settings(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file as nested values."""
    if not Path(path).exists():
        raise InputError(f"there is no settings file {path}.")
    check_regular(path, MAX_JSON)
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits and endless nesting
        raise InputError(f"{path} is not valid TOML: {error}.") from error
    _refuse_depth(values, str(path))
    return values


def _refuse_depth(values: Mapping[str, Any], where: str) -> None:
    """Refuse tables in tables without end: settings have at most three levels."""
    level: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        tables = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [item for table in tables for item in table if isinstance(item, (Mapping, list))]
    if level:
        raise InputError(f"{where}: settings are nested more than {MAX_DEPTH} levels deep.")


def make_settings(*layers: Mapping[str, Any]) -> Settings:
    """Settings from layers of nested values; later layers override earlier ones. An unknown name is an error.

    >>> make_settings({"lr": 0.1, "augment": {"hue": 0.1}}, {"lr": 1, "augment": {"crop": 64}}).lr
    1.0
    """
    return build_settings(Settings, merge_layers(*(current_names(layer) for layer in layers)))


def merge_layers(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """One nested dict of all layers; later ones override earlier ones, tables are merged.

    >>> merge_layers({"augment": {"hue": 0.1}}, {"augment": {"crop": 64}})
    {'augment': {'hue': 0.1, 'crop': 64}}
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, value in layer.items():
            if isinstance(value, Mapping):
                table = merged.get(name, {})
                if not isinstance(table, Mapping):
                    raise InputError(f"setting {name} is given a value and a table.")
                value = merge_layers(table, value)
            merged[name] = value
    return merged


def parse_overrides(assignments: Sequence[str]) -> dict[str, Any]:
    """``name=value`` assignments as nested values; dots go into tables, values are TOML or plain words.

    >>> parse_overrides(["lr=.05", "augment.crop=64", "method=hard"])
    {'lr': 0.05, 'augment': {'crop': 64}, 'method': 'hard'}
    """
    nested: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise InputError(f"a setting is given as name=value, got '{assignment}'.")
        number = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text.strip())  # TOML does not allow .05
        try:
            value = tomllib.loads(f"v = {number}")["v"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        except (ValueError, RecursionError) as error:
            raise InputError(f"setting {name.strip()} cannot be read: {error}.") from error
        tables = name.strip().split(".")
        if len(tables) > MAX_DEPTH:
            raise InputError(f"setting {name[:60]}… is nested more than {MAX_DEPTH} levels deep.")
        for table in reversed(tables):
            value = {table: value}
        _refuse_depth(value, f"setting {name.strip()}")
        nested = merge_layers(nested, value)
    return nested


def build_settings(kind: type[S], values: Mapping[str, Any]) -> S:
    """A settings object from nested values, each converted to the type of its field. An unknown name is an error.

    >>> build_settings(DataOptions, {"part_column": "fold"}).split_column
    'fold'
    """
    _refuse_unknown(kind, values)
    return from_plain(kind, values, "setting ")


def data_options(values: Mapping[str, Any]) -> DataOptions:
    """The data options among nested values such as those of settings.toml; other settings are ignored."""
    return from_plain(DataOptions, values, "setting ")


def _refuse_unknown(kind: Any, values: Mapping[str, Any], path: str = "") -> None:
    known = {name: own.old_name for name, own in rules(kind).items()}
    for name, value in values.items():
        if name not in (*known, *known.values()):
            meant = next((f"{path}{own}" for own, known_as in rules(kind).items() if name in known_as.synonyms), "")
            hint = "" if meant or kind is not Settings else f"A setting of the method is named method_settings.{name}"
            raise unknown("setting", f"{path}{name}", [f"{path}{own}" for own in known], meant, hint)
        table = next((field.default for field in dataclasses.fields(kind) if field.name == name), None)
        if dataclasses.is_dataclass(table) and isinstance(value, Mapping):
            _refuse_unknown(table, value, f"{path}{name}.")


def current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values under the current names of settings; a previous name beside the current one stays and is refused."""
    renamed = {own.old_name: name for name, own in rules(Settings).items() if own.old_name and name not in values}
    return {renamed.get(name, name): value for name, value in values.items()}


def to_toml(settings: Settings, without: Collection[str] = ()) -> str:
    """The settings as TOML, as ``read_settings`` reads them, but for those named in ``without``. None is left out,
    except in the settings of the method, whose defaults are not known here: there it is written as "none"."""
    values = {name: value for name, value in dataclasses.asdict(settings).items() if name not in without}
    own = values["method_settings"]
    values["method_settings"] = {key: "none" if value is None else value for key, value in own.items()}
    return table_to_toml(values)


def table_to_toml(values: Mapping[str, Any]) -> str:
    """Nested values as TOML, without those that are None."""
    return "\n".join(_toml_lines(values, "")) + "\n"


def _toml_lines(values: Mapping[str, Any], table: str) -> list[str]:
    plain = {key: value for key, value in values.items() if not isinstance(value, dict) and value is not None}
    lines = [f"{key} = {_toml_value(value)}" for key, value in plain.items()]
    for key, value in values.items():
        if isinstance(value, dict) and value:
            name = f"{table}{key}"
            lines += ["", f"[{name}]", *_toml_lines(value, f"{name}.")]
    return lines


def _toml_value(value: Any) -> str:
    """As JSON, except for infinities.

    >>> _toml_value([1, 2.5]), _toml_value(float("-inf"))
    ('[1, 2.5]', '-inf')
    """
    infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if infinite else json.dumps(value, ensure_ascii=False)


def in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a method for JSON, which has no infinity.

    >>> in_json({"margin": float("inf"), "alpha": 0.1})
    {'margin': 'inf', 'alpha': 0.1}
    """
    return {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default of a setting for people, empty where there is none or it is found from the data.

    >>> [default_text(field) for field in dataclasses.fields(Settings) if field.name in ("lr", "drops", "mean")]
    ['', '', '0.5, 0.75']
    """
    values = field.default if isinstance(field.default, tuple) else (field.default,)
    if values == (None,) or values == (MISSING,):
        return ""
    return ", ".join(f"{value:g}" if isinstance(value, float) else _toml_value(value).strip('"') for value in values)

"""CCLNet: a backbone with its classifier, trained with a method and exported without it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cclnet.errors import InputError, check_range, first_line, unknown
from cclnet.memory import large_imports
from cclnet.methods import Classes, Loss, build_method
from cclnet.pretrained import pretrained_config

INITIAL_STD = 0.001  # of the weights of a new classifier on a pretrained backbone


class TimmClassifier(nn.Module):
    """A timm model, split into pooled features and logits; its state dict is that of the timm model."""

    def __init__(
        self,
        name: str,
        num_classes: int,
        pretrained: bool = False,
        in_channels: int = 3,
        backbone_settings: Mapping[str, Any] | None = None,
        pooling: str = "last",
    ) -> None:
        super().__init__()
        with large_imports():
            import timm

        if not timm.is_model(name):
            raise unknown("backbone", name, timm.list_models())
        given = {"pretrained": pretrained, "num_classes": num_classes, "in_chans": in_channels}
        try:
            self.model: Any = timm.create_model(name, **given, **(backbone_settings or {}))
        except TypeError as error:
            if not backbone_settings:
                raise
            raise InputError(f"backbone {name} does not accept {', '.join(backbone_settings)}: {error}.") from error
        except (OSError, RuntimeError) as error:
            if not pretrained:
                raise
            raise InputError(
                f"the pretrained weights of {name} could not be loaded ({first_line(error)}). Without an internet "
                "connection, load weights from a local file: --weights FILE.safetensors."
            ) from error
        classifier = self.model.get_classifier()
        if not isinstance(classifier, nn.Module) or isinstance(classifier, nn.ModuleList):
            raise InputError(f"backbone {name} must end in one classifier, but it has several: use another backbone.")
        if pooling == "stages":
            pool_stages(self.model, name, in_channels)
        # Not num_features: some models have another layer between pooling and classifier.
        self.feature_width = int(self.model.head_hidden_size)

    def features(self, images: Tensor) -> Tensor:
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)

    def shrink_last_layer(self) -> None:
        """Give the final classifier small random weights, for a backbone that is already trained.

        Some timm models begin with weights up to ±1/√K, whose large wrong logits would send large gradients into the
        pretrained backbone in the first steps.
        """
        classifier = self.model.get_classifier()
        nn.init.normal_(classifier.weight, std=INITIAL_STD)
        if classifier.bias is not None:
            nn.init.zeros_(classifier.bias)

    def logits(self, features: Tensor) -> Tensor:
        classifier = self.model.get_classifier()
        if isinstance(classifier, nn.Conv2d):  # 1 × 1: the same product as a linear layer
            return classifier(features[:, :, None, None]).flatten(1)
        return classifier(features)

    @property
    def shipped(self) -> nn.Module:
        """The module whose weights are exported: the timm model itself."""
        return self.model

    @property
    def last_layer(self) -> str:
        """Prefix of the parameter names of the final classifier."""
        name = self.model.pretrained_cfg["classifier"]
        return f"{name if isinstance(name, str) else name[0]}."


def pool_stages(model: Any, name: str, in_channels: int) -> None:
    """Give the classifier of a timm model the mean of every stage, instead of that of the last feature map alone.

    ``forward_features`` then returns the maps of all stages as the channels of one, those of earlier stages averaged
    to the size of the last. Pooling, names of weights and class activation maps stay those of a plain model.
    """
    classifier = model.get_classifier()
    pooled = isinstance(getattr(model, "global_pool", None), nn.Module)
    if not (pooled and hasattr(model, "forward_intermediates") and isinstance(classifier, nn.Linear)):
        raise InputError(
            f"pooling 'stages' needs a backbone that averages its last feature map and classifies linearly, such as "
            f"a ResNet or EfficientNet, and {name} does not. Use pooling 'last'."
        )

    class StagePooled(type(model)):  # type: ignore[misc]
        def forward_features(self, images: Tensor) -> Tensor:
            last, stages = self.forward_intermediates(images)
            maps = [own for own in stages if own is not last]
            return torch.cat([*(_averaged(own, last.shape[2]) for own in maps), last], dim=1)

    model.__class__ = StagePooled
    training = model.training
    with torch.no_grad():
        width = model.eval().forward_features(classifier.weight.new_zeros(1, in_channels, 64, 64)).shape[1]
    model.train(training)
    # The name of the attribute is the architecture's: fc, classifier, head.fc ...
    parent, _, last_name = model.pretrained_cfg["classifier"].rpartition(".")
    owner = model.get_submodule(parent)
    with torch.device(classifier.weight.device):
        setattr(owner, last_name, nn.Linear(width, classifier.out_features))
    model.head_hidden_size = width


def _averaged(planes: Tensor, size: int) -> Tensor:
    """Feature maps averaged to a side of ``size``. Not adaptive_avg_pool2d, which exporters do not know."""
    side = -(-planes.shape[2] // size)
    return nn.functional.avg_pool2d(planes, side, ceil_mode=True, count_include_pad=False) if side > 1 else planes


def image_size_settings(name: str, size: tuple[int, int]) -> dict[str, Any]:
    """Keyword arguments that set the image size (height, width) of a timm model; empty for models that take any size.

    Transformers need it for their position embeddings.

    >>> image_size_settings("vit_tiny_patch16_224", (64, 64)), image_size_settings("resnet18", (64, 64))
    ({'img_size': 64}, {})
    """
    config = pretrained_config(name)
    if config is None or not config.fixed_input_size or tuple(config.input_size[1:]) == size:
        return {}
    return {"img_size": size[0] if size[0] == size[1] else size}


@contextmanager
def silent_exporters() -> Iterator[None]:
    """Silence the exporters of torch, whose notes are for their developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def to_onnx(network: nn.Module, images: Tensor, outputs: Sequence[str] | None = None) -> Any:
    """A network as an ONNX model (a protobuf message) for batches of any size; ``images`` are an example."""
    program = torch.onnx.export(
        network,
        (images,),
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=outputs,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
    )
    assert program is not None  # only without dynamo
    return program.model_proto


def layer_groups(model: Any, weight_decay: float, layer_decay: float, decay_norms: bool) -> list[dict[str, Any]]:
    """Parameter groups of a model, one or two per layer, with the keys params, lr_scale and weight_decay.

    timm models know their layers; other modules are divided into groups of 12 parameters in the order of definition.
    Parameters that the model itself exempts from weight decay, such as position embeddings, are exempt as well.
    """
    from timm.optim import param_groups_layer_decay

    exempt = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    return param_groups_layer_decay(
        model,
        weight_decay,
        no_weight_decay_list=() if decay_norms else exempt,
        weight_decay_exclude_1d=not decay_norms,
        layer_decay=layer_decay,
    )


def clip_gradients(groups: Iterable[Mapping[str, Any]], norm: float) -> None:
    """Clip the gradients of all parameter groups of one name by one ``norm``; a group without a name by its own."""
    together: dict[Any, list[nn.Parameter]] = {}
    for index, group in enumerate(groups):
        together.setdefault(group.get("name", index), []).extend(group["params"])
    for parameters in together.values():
        nn.utils.clip_grad_norm_(parameters, norm)


class ModuleClassifier(nn.Module):
    """Any module that returns pooled features, with a linear classifier on top."""

    pretrained_cfg: ClassVar = {"classifier": "classifier"}  # timm's name of the last layer, for ``layer_groups``

    def __init__(self, backbone: nn.Module, num_classes: int, feature_width: int | None = None) -> None:
        super().__init__()
        width = feature_width or getattr(backbone, "feature_width", None) or getattr(backbone, "num_features", None)
        if not isinstance(width, int):
            raise InputError(
                f"the width of the pooled features of {type(backbone).__name__} is unknown: pass feature_width, or "
                "give the module an attribute of that name."
            )
        self.backbone = backbone
        self.feature_width = width
        self.classifier = nn.Linear(width, num_classes)

    def features(self, images: Tensor) -> Tensor:
        return self.backbone(images)

    def logits(self, features: Tensor) -> Tensor:
        return self.classifier(features)

    last_layer = "classifier."

    @property
    def shipped(self) -> nn.Module:
        return self


Classifier = TimmClassifier | ModuleClassifier


class CCLNet(nn.Module):
    """A classifier that is trained with a method and exported without it.

    ``net(images)`` → logits [N, K]; ``net(images, labels)`` → Loss. Distributed data parallel must wrap all of it.

    Args:
        backbone: a timm model name, or a module that returns pooled features [N, width].
        method: name of the method, see ``cclnet.methods.METHODS``.
        pretrained: load the pretrained weights of timm (downloaded the first time).
        feature_width: width of the pooled features of a module that has no attribute of this name.
        class_counts: number of training images per class, for methods that use the class prior.
        method_settings: settings of the method that differ from its defaults.
        backbone_settings: further keyword arguments for ``timm.create_model``.
        logit_adjustment: τ of the logit-adjusted loss: the method sees ``logits + τ log(n_k / N)``, with n_k of
            ``class_counts``. The logits of the finished network are then those of equally frequent classes.
        pooling: what the classifier of a timm model sees: the mean of the "last" feature map, or of all "stages".

    >>> net = CCLNet("resnet18", num_classes=7)
    >>> loss = net(torch.randn(2, 3, 64, 64), torch.tensor([0, 6]))
    >>> sorted(loss.terms)
    ['class_correlation', 'cross_entropy', 'head_cross_entropy', 'kl']
    >>> net.eval()(torch.randn(2, 3, 64, 64)).shape
    torch.Size([2, 7])
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        num_classes: int,
        method: str = "ccl",
        pretrained: bool = False,
        *,
        feature_width: int | None = None,
        class_counts: Sequence[int] | None = None,
        method_settings: Mapping[str, Any] | None = None,
        in_channels: int = 3,
        backbone_settings: Mapping[str, Any] | None = None,
        logit_adjustment: float = 0.0,
        pooling: str = "last",
    ) -> None:
        super().__init__()
        check_range("num_classes", num_classes, "[2, inf)", "a classifier needs at least 2 classes")
        self.classifier: Classifier
        if isinstance(backbone, str):
            self.classifier = TimmClassifier(backbone, num_classes, pretrained, in_channels, backbone_settings, pooling)
        else:
            self.classifier = ModuleClassifier(backbone, num_classes, feature_width)
        counts = None if class_counts is None else tuple(int(c) for c in class_counts)
        classes = Classes(num_classes, self.classifier.feature_width, counts)
        self.num_classes = num_classes
        self.method = build_method(method, classes, method_settings)
        self.log_prior: Tensor | None
        self.register_buffer("log_prior", self._scaled_log_prior(counts, logit_adjustment), persistent=False)

    def _scaled_log_prior(self, counts: Sequence[int] | None, scale: float) -> Tensor | None:
        check_range("logit_adjustment", scale, "[0, inf)", "1 is the balanced softmax, 0 turns it off")
        if not scale:
            return None
        if counts is None or self.method.multilabel:
            raise InputError("logit_adjustment needs one label per image and the class_counts of the training images.")
        share = torch.tensor(counts, dtype=torch.float64).clamp(min=1.0)  # a class without images: as with one
        return (scale * (share / share.sum()).log()).float()

    def forward(self, images: Tensor, labels: Tensor | None = None, weight: Tensor | None = None) -> Tensor | Loss:
        features = self.classifier.features(images)
        if features.dim() != 2 or features.shape[1] != self.classifier.feature_width:
            raise InputError(
                f"the backbone must return pooled features [N, {self.classifier.feature_width}], got "
                f"{list(features.shape)}. Pool its feature map, or pass the right feature_width."
            )
        logits = self.classifier.logits(features)
        if labels is None:
            return logits
        return self.method(features, logits if self.log_prior is None else logits + self.log_prior, labels, weight)

    def param_groups(
        self,
        lr: float = 0.1,
        lr_ccl: float = 0.0005,
        weight_decay: float = 1e-4,
        *,
        layer_decay: float = 1.0,
        decay_norms: bool = True,
    ) -> list[dict[str, Any]]:
        """Parameter groups for any optimizer, named "network", and "method" if the method has parameters.

        Args:
            layer_decay: the learning rate of the layer i layers below the classifier is ``lr · layer_decay^i``.
            decay_norms: False exempts norms and biases from weight decay.

        The network is one group, unless layers differ in their learning rate or weight decay. Clip all groups of a
        name by one norm (:func:`clip_gradients`); one norm over both names would couple them.
        """
        groups: list[dict[str, Any]] = [{"name": "network", "params": list(self.classifier.parameters()), "lr": lr}]
        if layer_decay != 1.0 or not decay_norms:
            groups = [
                {"name": "network", "lr": lr * group.pop("lr_scale"), **group}
                for group in layer_groups(self.classifier.shipped, weight_decay, layer_decay, decay_norms)
            ]
        if own := list(self.method.parameters()):
            groups.append({"name": "method", "params": own, "lr": lr_ccl})
        return [{"weight_decay": weight_decay, **group} for group in groups]

    def soft_labels(self) -> Tensor | None:
        return self.method.soft_labels()

    @torch.no_grad()
    def export_state(self) -> dict[str, Tensor]:
        """The weights of backbone and classifier, without the method. For a timm backbone this is the state dict of
        ``timm.create_model(name, num_classes=K)``."""
        return {name: value.detach().clone() for name, value in self.classifier.shipped.state_dict().items()}

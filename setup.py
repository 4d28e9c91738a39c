"""Lists the packages; everything else is in pyproject.toml.

The folder `launcher/` is imported as `dtorch_launcher`, a mapping that pyproject.toml can state only beside a list of
every subpackage written by hand.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["dtorch", "dtorch.*", "dtorch_runtime", "dtorch_runtime.*"]),
        "dtorch_launcher",
        *(f"dtorch_launcher.{name}" for name in find_packages("launcher")),
    ],
    package_dir={"dtorch_launcher": "launcher"},
)
